"""DeepSpeed's ZeRO against one process: every stage gives the same update."""

from typing import Any

import plain
import pytest
import torch
from configs import PLAIN, config_text, own
from scalar import Scalar, SquaredError, Targets
from test_cases import MEAN, mean
from test_sharding import CELLS
from test_update import GLOBAL, OPTIMIZERS, TOLERANCE, config, model
from toys import Branches, BranchTask, Listed, Same, Sequences, Varied, assembled, trained

from launcher.tasks import CausalLM
from launcher.train.parallel.precision import LossScale

pytestmark = pytest.mark.slow

STAGES = ["zero1", "zero2", "zero3"]
PARTED = "+strategy.deepspeed.zero_optimization.stage3_param_persistence_threshold=0"
"""Small parameters lie divided too; by itself stage 3 keeps them whole."""
SMALL_BUCKETS = "+strategy.deepspeed.zero_optimization.reduce_bucket_size=1"
"""Each parameter travels alone, so that ranks which disagree about their order add up different ones."""


def reductions(strategy: str) -> list[str]:
    """When gradients may travel."""
    return ["auto"] if strategy == "zero1" else ["micro_batch", "window"]


@pytest.fixture(scope="module")
def task() -> CausalLM:
    return CausalLM(vocab_size=14, bos=13)


@pytest.mark.parametrize("name", list(OPTIMIZERS))
@pytest.mark.parametrize("degree", [2, 3])
@pytest.mark.parametrize("strategy", STAGES)
def test_parameters_after_five_updates_with_a_clip_that_bites(
    ranks: Any, task: CausalLM, strategy: str, degree: int, name: str
) -> None:
    overrides, kind, arguments = OPTIMIZERS[name]
    max_norm = 0.05
    more = [*overrides, f"strategy={strategy}", f"training.max_grad_norm={max_norm}", "training.duration=5 updates"]
    expected = model("float32")
    lines = plain.train(expected, task, Sequences(), GLOBAL, 5, kind(expected.parameters(), **arguments), max_norm)
    assert min(line["grad_norm"] for line in lines) > 2 * max_norm  # the clip bites in every update
    cells = [[f"batch.layout={layout}", f"activation_checkpoint={kind}", micro] for micro, layout, kind in CELLS]
    texts = [
        config("float32", micro, *more, *cell, *([PARTED] if strategy == "zero3" else []))
        for *cell, micro in cells[degree % 2 :: 2]  # all of them on one degree or the other
    ]
    if strategy == "zero3":
        texts.append(config("float32", 1, *more))
    found = ranks.run(trained, texts, world_size=degree, timeout=120)
    for of_rank in found:
        for run in of_rank:
            difference = plain.largest_difference(run["state"], dict(expected.state_dict()))
            assert difference <= TOLERANCE["float32"]
            for line, reference in zip(run["lines"], lines, strict=True):
                assert line["loss"] == pytest.approx(reference["loss"], rel=TOLERANCE["float32"])
                assert line["grad_norm"] == pytest.approx(reference["grad_norm"], rel=2 * TOLERANCE["float32"])
    assert all(
        torch.equal(first["state"][key], other["state"][key])
        for of_rank in found[1:]
        for first, other in zip(found[0], of_rank, strict=True)
        for key in first["state"]
    ), "ranks hold the same bits"


@pytest.mark.parametrize("strategy", STAGES)
def test_d04_b03_windows_of_several_steps_are_clipped_by_the_norm_over_all_ranks(ranks: Any, strategy: str) -> None:
    # three steps a rank, a short last window of two samples, and a clip that bites in both
    targets = [[[float(one), 2.0 * one]] for one in (1, 3, 5, 7, 9, 11, 2, 4)]
    more = ["+model.size=2", "training.max_grad_norm=1.0", f"strategy={strategy}", "optimizer.momentum=0.9"]
    d04 = [mean(targets, 1, 3, *more, f"strategy.reduce_each={each}", degree=2) for each in reductions(strategy)]
    b03 = [mean("[[[10,0]],[[-4,8]]]", 1, 1, *more, degree=2)]
    b03 += [mean("[[[10,0]],[[10,0]],[[-4,8]],[[-4,8]]]", 1, 2, *more, degree=2)]
    expected = Scalar(2)
    optimizer = torch.optim.SGD(expected.parameters(), lr=1.0, momentum=0.9)
    lines = plain.train(expected, SquaredError(), Targets(targets), 6, 2, optimizer, 1.0)
    found = ranks.run(trained, d04 + b03, world_size=2)
    for of_rank in found:
        for run in of_rank[: len(d04)]:
            assert plain.largest_difference(run["state"], dict(expected.state_dict())) <= 1e-6
            assert [line["micro_batches"] for line in run["lines"]] == [3, 1]
            assert [line["grad_norm"] for line in run["lines"]] == pytest.approx([one["grad_norm"] for one in lines])
        for run in of_rank[len(d04) :]:
            assert run["state"]["w"].tolist() == pytest.approx([0.6, 0.8], rel=1e-6)
            assert run["lines"][0]["grad_norm"] == 5.0


@pytest.mark.parametrize("strategy", STAGES)
def test_a_parameter_that_no_sample_touched_has_gradient_zero(ranks: Any, strategy: str) -> None:
    # the left branch is used in the first micro-batch of rank 0 alone, then in no window, then on rank 1 alone
    branches = [0, 1, 1, 1, 1, 1] + [1] * 6 + [1, 1, 1, 1, 1, 0]
    targets = [6.0, 1.0, 2.0, 3.0, 4.0, 5.0] * 3
    text = [
        config_text(
            *PLAIN,
            *own("toys.Branches", "toys.BranchTask", "toys.BranchData"),
            "+model.size=7",
            f"+data.train.branches={branches}",
            f"+data.train.targets={targets}",
            "batch.global_batch_size=6",
            "batch.micro_batch_size=1",
            "batch.layout=arrival",
            "training.duration=3 updates",
            "optimizer.weight_decay=0.1",
            "optimizer.momentum=0.9",
            "optimizer.lr=0.5",
            f"strategy={strategy}",
            f"strategy.reduce_each={each}",
            *buckets,
        )
        for each in reductions(strategy)
        # buckets of one parameter: they hold the same on every rank whatever order gradients arrive in
        for buckets in ([], [SMALL_BUCKETS])
    ]
    expected = Branches(7)
    optimizer = torch.optim.SGD([one for one in expected.parameters() if one.requires_grad], 0.5, 0.9, weight_decay=0.1)
    for start in (0, 6, 12):
        batch = BranchTask().collate(list(zip(branches, targets, strict=True))[start : start + 6])
        optimizer.zero_grad(set_to_none=False)
        (BranchTask().loss(expected(batch["branch"]), batch).sum() / 6).backward()
        for parameter in expected.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    for degree in (2, 3):
        for of_rank in ranks.run(trained, text, world_size=degree):
            for run in of_rank:
                assert plain.largest_difference(run["state"], dict(expected.state_dict())) <= 1e-6


@pytest.mark.parametrize("strategy", STAGES)
def test_e03_f07_tied_frozen_and_odd_parameters_and_buffers_come_out_whole(ranks: Any, strategy: str) -> None:
    rows = [[float((3 * i + j) % 11) for j in range(4)] for i in range(10)]
    text = [
        config_text(
            *PLAIN,
            *own("toys.Varied", "toys.Same", "toys.Listed", rows=rows),
            "batch.global_batch_size=4",
            "batch.micro_batch_size=1",
            "training.duration=4 updates",
            "training.validate_every=1",
            "data.validation={_target_: toys.Listed, rows: [[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]]}",
            "optimizer=adamw",
            "optimizer.lr=0.01",
            "optimizer.eps=1e-5",
            "optimizer.groups=[{match: norms_and_biases, lr_scale: 0.5, weight_decay: 0.0}]",
            "run.seed=3",
            f"strategy={strategy}",
            *parted,
        )
        for parted in ([], [PARTED])[: 1 + (strategy == "zero3")]
    ]
    torch.manual_seed(3)
    expected = Varied()
    frozen = expected.frozen.weight.clone()
    named = [(name, one) for name, one in expected.named_parameters() if one.requires_grad]
    groups = [
        {"params": [one for _, one in named if one.ndim <= 1], "lr": 0.005, "weight_decay": 0.0},
        {"params": [one for _, one in named if one.ndim > 1], "lr": 0.01, "weight_decay": 0.1},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-5)
    plain.train(expected, Same(), Listed(rows), 4, 4, optimizer, None)
    check = Same().collate([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]])
    validation = expected(**check).sum().item() / 2
    for of_rank in ranks.run(trained, text, world_size=2):
        for run in of_rank:
            state, wanted = run["state"], dict(expected.state_dict())
            assert [(n, v.shape) for n, v in state.items()] == [(n, v.shape) for n, v in wanted.items()]
            assert torch.equal(state["frozen.weight"], frozen)
            assert torch.equal(state["head.weight"], state["embedding.weight"])
            assert state["head.weight"].data_ptr() != state["embedding.weight"].data_ptr()
            buffers = {"calls": state.pop("calls")}
            wanted.pop("calls")
            assert plain.largest_difference(state, wanted) <= 1e-6
            assert buffers["calls"].tolist() == [7.0] * 3  # forwards of one rank: 2 + 2 + 1 + 2
            assert run["validation"].loss == pytest.approx(validation, rel=1e-6)
            assert run["validations"] == [1, 2, 3, 4]


@pytest.mark.parametrize("strategy", STAGES)
def test_b05_a_window_that_is_not_finite_changes_nothing(ranks: Any, strategy: str) -> None:
    # the third window of six holds an infinite target, in the first micro-batch of rank 0
    targets = [1, 1, 1, 2, 2, 2, 1e39, 3, 3, 4, 4, 4, 5, 5, 5, 6, 6, 6]
    more = ["schedule/decay=linear", "optimizer.momentum=0.9", "training.max_grad_norm=0.5", f"strategy={strategy}"]
    text = [
        config_text(
            *PLAIN,
            *MEAN,
            f"+data.train.targets={targets}",
            "batch.global_batch_size=3",
            "batch.micro_batch_size=1",
            "training.duration=1 epochs",
            *more,
            *extra,
        )
        for extra in ([], [f"strategy.offload={'cpu' if strategy == 'zero3' else 'optimizer'}"])
    ]
    expected = Scalar(1)
    optimizer = torch.optim.SGD(expected.parameters(), lr=1.0, momentum=0.9)
    for applied, target in enumerate((1.0, 2.0, 4.0, 5.0, 6.0)):
        optimizer.param_groups[0]["lr"] = 1 - applied / 6
        plain.train(expected, SquaredError(), Targets([target]), 1, 1, optimizer, 0.5)
    for of_rank in ranks.run(trained, text, world_size=2):
        for run in of_rank:
            assert [line["skipped"] for line in run["lines"]] == [False, False, True, False, False, False]
            assert run["lines"][2]["grad_norm"] == float("inf")
            assert run["lines"][3]["lr"] == run["lines"][2]["lr"]
            assert run["state"]["w"].tolist() == pytest.approx(expected.w.tolist(), rel=1e-6)


@pytest.mark.parametrize("strategy", STAGES)
def test_long_windows_add_up_in_fp32_under_bf16(ranks: Any, strategy: str) -> None:
    # of 64 micro-batches a rank the first has a gradient of 56 / 128: a sum in bf16 stays there, as it has no number
    # between 56 and 56.25, and the 62 that follow have 0.125 / 128 each
    rows = [one for one in [56.0, *[0.125] * 62, 0.25] for _ in range(2)]
    text = [
        config_text(
            *PLAIN,
            *own("toys.Slope", "toys.Same", "toys.Listed", rows=[[one] for one in rows]),
            "+model.by_row=true",
            "batch.global_batch_size=128",
            "batch.micro_batch_size=1",
            "batch.layout=arrival",
            "training.duration=1 updates",
            "precision=bf16",
            f"strategy={strategy}",
            f"strategy.reduce_each={each}",
        )
        for each in reductions(strategy)
    ]
    for of_rank in ranks.run(trained, text, world_size=2):
        for run in of_rank:
            assert [line["micro_batches"] for line in run["lines"]] == [64]
            assert run["state"]["w"].tolist() == [0.0]
            assert run["lines"][0]["grad_norm"] == 1.0


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_divided_parameters_are_gathered_again_to_recompute(ranks: Any, task: CausalLM, recompute: str) -> None:
    overrides, kind, arguments = OPTIMIZERS["sgd"]
    expected = model("float32")
    plain.train(expected, task, Sequences(), GLOBAL, 3, kind(expected.parameters(), **arguments), 0.05)
    more = ["strategy=zero3", f"activation_checkpoint={recompute}", "training.max_grad_norm=0.05"]
    names = ("max_live_parameters", "max_reuse_distance")
    live = [f"+strategy.deepspeed.zero_optimization.stage3_{name}=0" for name in names]
    text = config("float32", 1, *overrides, *more, PARTED, *live, "training.duration=3 updates")
    for (run,) in ranks.run(trained, [text], world_size=2):
        assert plain.largest_difference(run["state"], dict(expected.state_dict())) <= TOLERANCE["float32"]


OFFLOADS = [*[(strategy, "optimizer") for strategy in STAGES], ("zero3", "cpu")]


@pytest.mark.parametrize(("strategy", "offload"), OFFLOADS)
def test_offload_leaves_the_update_as_it_is(ranks: Any, task: CausalLM, strategy: str, offload: str) -> None:
    overrides, kind, arguments = OPTIMIZERS["adamw"]
    expected = model("float32")
    plain.train(expected, task, Sequences(), GLOBAL, 5, kind(expected.parameters(), **arguments), 0.05)
    more = [f"strategy={strategy}", f"strategy.offload={offload}", "training.max_grad_norm=0.05"]
    more += [*overrides, "training.duration=5 updates"]
    texts = [config("float32", 1, *more, f"strategy.reduce_each={each}") for each in reductions(strategy)]
    for of_rank in ranks.run(trained, texts, world_size=2):
        for run in of_rank:
            assert plain.largest_difference(run["state"], dict(expected.state_dict())) <= TOLERANCE["float32"]


def scaled_training(rank: int, world_size: int, text: str, scales: list[float]) -> list[dict[str, Any]]:
    """As `trained`, with the loss scaled as fp16 has it, from each of these scales."""
    found = []
    for scale in scales:
        fit = assembled(rank, world_size, text)
        fit.sharding.scaler = LossScale(scale, growth_interval=1000)
        steps = []
        for update in (1, 2, 3):
            window = fit.windows.get(update)
            fit.runner.run(window)
            steps.append(fit.sharding.step(0.5, 0.05))
        found.append({"state": fit.sharding.full_state(), "steps": steps})
    return found


@pytest.mark.parametrize("offload", ["none", "optimizer"])
@pytest.mark.parametrize("strategy", STAGES)
def test_a_loss_scale_is_taken_out_before_the_clip(ranks: Any, task: CausalLM, strategy: str, offload: str) -> None:
    overrides, kind, arguments = OPTIMIZERS["sgd"]
    expected = model("float32")
    lines = plain.train(expected, task, Sequences(), GLOBAL, 3, kind(expected.parameters(), **arguments), 0.05)
    text = config("float32", 3, *overrides, f"strategy={strategy}", f"strategy.offload={offload}")
    for of_rank in ranks.run(scaled_training, text, [4096.0, 1e38], world_size=2):
        for name, line in zip(of_rank[0]["steps"], lines, strict=True):
            assert name.grad_norm == pytest.approx(line["grad_norm"], rel=2e-6)
        assert plain.largest_difference(of_rank[0]["state"], dict(expected.state_dict())) <= 1e-6
        overflow = of_rank[1]
        assert [step.applied for step in overflow["steps"]] == [False] * 3
        assert [step.loss_scale for step in overflow["steps"]] == [1e38, 5e37, 2.5e37]
        assert plain.largest_difference(overflow["state"], dict(model("float32").state_dict())) == 0.0


def test_ranks_validate_together_though_one_has_fewer_samples_or_none(ranks: Any) -> None:
    # a forward under stage 3 is one of all ranks: three samples, and one, over two ranks
    texts = [
        config_text(
            *PLAIN,
            *MEAN,
            "+data.train.targets=[1,3]",
            f"data.validation={{_target_: scalar.Targets, targets: {targets}}}",
            "batch.global_batch_size=2",
            "batch.micro_batch_size=1",
            "training.duration=3 updates",
            "training.validate_every=1",
            "optimizer.lr=0.0",
            "strategy=zero3",
            PARTED,
        )
        for targets in ("[2,2,4]", "[2]")
    ]
    for of_rank in ranks.run(trained, texts, world_size=2):
        assert [run["validation"].loss for run in of_rank] == [4.0, 2.0]
        assert [run["validations"] for run in of_rank] == [[1, 2, 3]] * 2


@pytest.mark.parametrize(("strategy", "offload"), [("zero1", "optimizer"), ("zero3", "cpu")])
def test_a_rank_alone_can_offload(ranks: Any, strategy: str, offload: str) -> None:
    more = [f"strategy={strategy}", f"strategy.offload={offload}", "training.max_grad_norm=1.0", "+model.size=2"]
    for ((run,),) in [ranks.run(trained, [mean("[[[10,0]],[[-4,8]]]", 1, 2, *more)], world_size=1)]:
        assert run["state"]["w"].tolist() == pytest.approx([0.6, 0.8], rel=1e-6)
