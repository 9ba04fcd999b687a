"""Communication counted, not believed: how often gradients travel."""

from functools import partial
from typing import Any

import pytest
from configs import PLAIN, config_text, own
from toys import assembled, travelled

from launcher.config.choices import Device
from launcher.config.validate import parse
from launcher.plan.facts import Facts
from launcher.plan.mesh import World
from launcher.plan.plan import make_plan

pytestmark = pytest.mark.slow


def all_reduced_bytes(rank: int, world_size: int, text: str, updates: int) -> list[list[int]]:
    """For each window the sizes in bytes of the tensors of floating-point gradients that were reduced."""
    fit = assembled(rank, world_size, text)
    fit.sharding.prepare()
    found = []
    for update in range(1, updates + 1):
        window = fit.windows.get(update)
        events = travelled(partial(fit.runner.run, window))
        found.append([4 * size for name, size in events if name == "allreduce_"])
        fit.sharding.clear_gradients()
    return found


@pytest.mark.parametrize("steps", [1, 8])
def test_d02_gradients_travel_once_a_window(ranks: Any, steps: int) -> None:
    text = config_text(
        *PLAIN,
        *own("scalar.Scalar", "scalar.SquaredError", "scalar.Targets"),
        "+model.size=1000",
        f"+data.train.targets={[[[1.0] * 1000]] * (2 * 2 * steps)}",
        f"batch.global_batch_size={2 * steps}",
        "batch.micro_batch_size=1",
        "training.duration=1 epochs",
    )
    for of_rank in ranks.run(all_reduced_bytes, text, 2, world_size=2):
        assert of_rank == [[4000], [4000]]  # one bucket: each of the 1,000 gradients once


def collectives(rank: int, world_size: int, texts: list[str]) -> list[list[tuple[str, int]]]:
    """For each configuration what travels in its second window: names, and numbers of elements."""
    found = []
    for text in texts:
        fit = assembled(rank, world_size, text)
        fit.runner.run(fit.windows.get(1))  # stage 3 learns in which order parameters are used
        fit.sharding.step(0.1, None)
        window = fit.windows.get(2)
        found.append(travelled(partial(fit.runner.run, window)))
    return found


@pytest.mark.parametrize("steps", [1, 3])
def test_d02_under_zero_gradients_travel_as_often_as_the_plan_says(ranks: Any, steps: int) -> None:
    chosen = [("zero1", "auto", 1), ("zero2", "auto", steps), ("zero2", "window", 1)]
    chosen += [("zero3", "auto", steps), ("zero3", "window", 1)]
    texts = [
        config_text(
            *PLAIN,
            *own("toys.Branches", "toys.BranchTask", "toys.BranchData"),
            "+model.size=40",
            f"+data.train.branches={[0, 1] * 2 * steps}",
            f"+data.train.targets={[1.0] * 4 * steps}",
            f"batch.global_batch_size={2 * steps}",
            "batch.micro_batch_size=1",
            "training.duration=1 epochs",
            f"strategy={strategy}",
            f"strategy.reduce_each={each}",
        )
        for strategy, each, _ in chosen
    ]
    for text, (_, _, times) in zip(texts, chosen, strict=True):
        plan = make_plan(parse(text), Facts(samples=4 * steps), world=World(1, 2, Device.cpu))
        assert plan.reductions_per_window == times
    for of_rank in ranks.run(collectives, texts, world_size=2):
        for found, (strategy, each, times) in zip(of_rank, chosen, strict=True):
            # 80 + 40 + 40 + 3, padded to a multiple under stage 3; its ranks ask each other before each with 2 numbers
            sizes = [size for name, size in found if name in ("allreduce_", "_reduce_scatter_base_") and size > 2]
            assert sizes == [164 if strategy == "zero3" else 163] * times, (strategy, each, found)


def test_stage_3_reduces_during_the_backward_where_ranks_use_the_same_parameters(ranks: Any) -> None:
    names = ("param_persistence_threshold", "prefetch_bucket_size", "max_reuse_distance", "max_live_parameters")
    keys = "{reduce_bucket_size: 1, " + ", ".join(f"stage3_{name}: 0" for name in names) + "}"
    text = config_text(
        *PLAIN,
        *own("toys.Scrambled", "toys.Same", "toys.Drawing", count=4),
        "+model.width=10",
        "batch.global_batch_size=2",
        "batch.micro_batch_size=1",
        "training.duration=2 updates",
        "strategy=zero3",
        f"+strategy.deepspeed.zero_optimization={keys}",
    )
    for (found,) in ranks.run(collectives, [text], world_size=2):
        order = [name for name, size in found if size > 2]
        assert order.count("_reduce_scatter_base_") == 10
        last_gather = len(order) - 1 - order[::-1].index("_allgather_base_")
        assert order.index("_reduce_scatter_base_") < last_gather
