"""Plans of several nodes, and of those that are left."""

import pytest
from configs import config_text

from launcher.config.schema import Config
from launcher.config.validate import parse
from launcher.errors import ConfigError
from launcher.plan.facts import Facts
from launcher.plan.plan import Plan, make_plan, solve_again

pytestmark = pytest.mark.thorough

FOUR = ("cluster.device=cpu", "cluster.nodes=4", "cluster.ranks_per_node=2", "batch.global_batch_size=96")
RATE = ("scaling.rule=linear", "scaling.base_batch_size=32", "optimizer=sgd", "training.duration=3 epochs")
FACTS = Facts(samples=1000, knows_lengths=True)


def planned(*overrides: str) -> tuple[Config, Plan]:
    config = parse(config_text(*FOUR, *RATE, *overrides))
    return config, make_plan(config, FACTS)


def test_ranks_are_those_of_all_nodes() -> None:
    _, plan = planned()
    assert (plan.nodes, plan.ranks_per_node, plan.world_size, plan.data_parallel_degree) == (4, 2, 8, 8)


@pytest.mark.parametrize(
    "batch",
    [
        ["batch.micro_batch_size=4"],
        ["batch.micro_batch_size=4", "batch.gradient_accumulation_steps=3"],
        ["batch.global_batch_size=null", "batch.micro_batch_size=4", "batch.gradient_accumulation_steps=3"],
        ["batch.gradient_accumulation_steps=3"],
    ],
)
def test_fewer_nodes_take_more_steps_of_the_same_windows(batch: list[str]) -> None:
    config, plan = planned(*batch)
    assert (plan.micro_batch_size, plan.gradient_accumulation_steps) == (4, 3)
    left = solve_again(config, plan, nodes=3)
    assert (left.nodes, left.world_size) == (3, 6)
    assert (left.micro_batch_size, left.gradient_accumulation_steps) == (4, 4)
    one = solve_again(config, left, nodes=1)
    assert (one.micro_batch_size, one.gradient_accumulation_steps) == (4, 12)
    # as the ranks do, with what they have seen
    assert solve_again(config, one, FACTS) == one
    again = solve_again(config, one, nodes=4)
    assert (again.micro_batch_size, again.gradient_accumulation_steps) == (4, 3)
    for other in (left, one, again):
        same = ("global_batch_size", "updates_per_epoch", "num_updates", "lr", "lr_table", "weight_decay")
        assert [getattr(other, name) for name in same] == [getattr(plan, name) for name in same]


def test_tokens_bound_a_micro_batch_on_any_number_of_nodes() -> None:
    config, plan = planned("batch.micro_batch_tokens=512")
    left = solve_again(config, plan, nodes=2)
    assert (left.micro_batch_tokens, left.micro_batch_size, left.data_parallel_degree) == (512, None, 4)
    assert left.global_batch_size == 96


@pytest.mark.parametrize(
    ("overrides", "key", "said"),
    [
        (["cluster.nodes=0"], "cluster.nodes", "must be a whole number of at least 1"),
        (["cluster.min_nodes=5"], "cluster.min_nodes", "is more than the 4 that the run has"),
        (["cluster.min_nodes=0"], "cluster.min_nodes", "must be a whole number of at least 1 or null"),
        (["strategy=single", "cluster.ranks_per_node=1"], "strategy", "runs on one rank, not on 4"),
        # with 3 nodes of 2 ranks
        (["cluster.min_nodes=2", "mesh.pp=4"], "cluster.min_nodes", "couldn't go on with 3 of 4 nodes: mesh.pp=4"),
        (["cluster.min_nodes=1", "strategy=fsdp", "mesh.dp_shard=8"], "cluster.min_nodes", "couldn't go on with 1 of"),
    ],
)
def test_what_nodes_cannot_be(overrides: list[str], key: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        planned(*overrides)
    assert refused.value.key == key
    assert said in str(refused.value)


@pytest.mark.parametrize(("given", "what"), [("soon", "is no time"), ("5 seconds", "has no effect: cluster.min_nodes")])
def test_a_wait_that_is_no_time_or_for_nobody_is_refused(command, given: str, what: str) -> None:
    said = command("plan", f"cluster.wait_for_nodes={given}")
    assert said.code == 2
    assert f"cluster.wait_for_nodes={given}: {what}" in said.err


def test_each_node_has_a_command(command) -> None:
    said = command("plan", "cluster.nodes=2", "cluster.device=cpu")
    assert said.code == 0
    assert "4 on 2 nodes" in said.out
    assert said.out.replace("\n", " ").count("launcher.train.agent") == 2
    assert "--node 1" in said.out
