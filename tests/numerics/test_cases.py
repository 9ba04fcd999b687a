"""Faults of other trainers as small inputs with one right answer each: normalisation, clipping, schedule, syncs.

The probes are those of examples/scalar.py: with SGD at rate 1 the weight after one update is exactly the mean of the
targets, so every wrong divisor has a wrong number of its own.
"""

from typing import Any

import pytest
import torch
from configs import PLAIN, config_text, own
from toys import trained

pytestmark = pytest.mark.slow

MEAN = own("scalar.Scalar", "scalar.SquaredError", "scalar.Targets")
COUNT = own("scalar.Counter", "scalar.Visits", "scalar.Indices")


def mean(targets: Any, micro: int, steps: int, *more: str, degree: int = 1) -> str:
    """One weight from 0, rate 1, one epoch, a window of micro x steps x degree."""
    return config_text(
        *PLAIN,
        *MEAN,
        f"+data.train.targets={targets}",
        f"batch.micro_batch_size={micro}",
        f"batch.gradient_accumulation_steps={steps}",
        f"batch.global_batch_size={micro * steps * degree}",
        "training.duration=1 epochs",
        *more,
    )


def count(samples: int, window: int, *more: str, micro: int = 1) -> str:
    """One weight a sample, which grows by rate / window weight at each visit."""
    return config_text(
        *PLAIN,
        *COUNT,
        f"+model.num_samples={samples}",
        f"+data.train.num_samples={samples}",
        f"batch.micro_batch_size={micro}",
        f"batch.global_batch_size={window}",
        "training.duration=1 epochs",
        *more,
    )


def run(ranks: Any, text: str, degree: int = 1) -> dict[str, Any]:
    """Rank 0's training, after a check that all ranks hold the same bits and logged the same."""
    found = [of_rank[0] for of_rank in ranks.run(trained, [text], world_size=degree)]
    for other in found[1:]:
        assert all(torch.equal(found[0]["state"][name], other["state"][name]) for name in found[0]["state"])
        assert str(found[0]["lines"]) == str(other["lines"])  # as text: a NaN is no equal of itself
    first: dict[str, Any] = found[0]
    return first


def weight(found: dict[str, Any]) -> list[float]:
    (value,) = found["state"].values()
    return [float(one) for one in value.flatten()]


@pytest.mark.parametrize("layout", ["arrival", "length"])
def test_a01_tokens_weigh_alike_whatever_micro_batch_they_are_in(ranks: Any, layout: str) -> None:
    # (6 + 0 + 0 + 0) / 4; a mean of means would be 3.0
    found = run(ranks, mean("[[6],[0,0,0]]", 1, 2, f"batch.layout={layout}"))
    assert weight(found) == [1.5]
    assert found["lines"][0]["weight"] == 4


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_a03_a_short_last_window_is_divided_by_its_own_weight(ranks: Any, degree: int) -> None:
    found = run(ranks, mean("[0,0,0,0,8,8]", 1, 4 // degree, degree=degree), degree)
    assert weight(found) == [8.0]
    assert [line["update"] for line in found["lines"]] == [1, 2]


def test_a04_a_window_never_crosses_an_epoch(ranks: Any) -> None:
    found = run(ranks, count(6, 4, "training.duration=2 epochs"))
    assert len(found["lines"]) == 4
    assert sum(weight(found)) == 4.0
    assert weight(found) == [0.5, 0.5, 0.5, 0.5, 1.0, 1.0]  # 1/4 + 1/4, the last two 1/2 + 1/2
    assert [line["weight"] for line in found["lines"]] == [4, 2, 4, 2]


@pytest.mark.parametrize("degree", [1, 4])
def test_a05_a_data_set_smaller_than_one_window_is_one_update(ranks: Any, degree: int) -> None:
    found = run(ranks, mean("[3,6,9]", 1, 4 // degree, degree=degree), degree)
    assert weight(found) == [6.0]
    assert len(found["lines"]) == 1


@pytest.mark.parametrize(("steps", "degree"), [(1, 1), (4, 1), (4, 2), (1, 3)])
def test_a07_validation_loss_is_divided_by_nothing_but_its_weight(ranks: Any, steps: int, degree: int) -> None:
    more = [
        "optimizer.lr=0.0",
        "data.validation={_target_: scalar.Targets, targets: [[2],[2,2],[2],[2,2,2,2],[2]]}",
    ]
    found = run(ranks, mean("[1,2,3,4]", 1, steps, *more, degree=degree), degree)
    assert found["validation"].loss == 2.0


@pytest.mark.parametrize(("micro", "steps", "degree"), [(1, 4, 1), (1, 2, 2), (2, 1, 2), (1, 1, 4), (4, 1, 1)])
def test_a08_the_logged_loss_is_the_mean_over_the_window(ranks: Any, micro: int, steps: int, degree: int) -> None:
    found = run(ranks, mean("[2,4,6,8]", micro, steps, degree=degree), degree)
    assert found["lines"][0]["loss"] == 15.0  # (2 + 8 + 18 + 32) / 4


@pytest.mark.parametrize(("steps", "degree"), [(2, 1), (1, 2)])
def test_b01_b03_the_clip_is_of_the_window_by_the_norm_over_all_ranks(ranks: Any, steps: int, degree: int) -> None:
    more = ["+model.size=2", "training.max_grad_norm=1.0"]
    found = run(ranks, mean("[[[10,0]],[[-4,8]]]", 1, steps, *more, degree=degree), degree)
    assert weight(found) == pytest.approx([0.6, 0.8], rel=1e-6)  # torch's clip divides by norm + 1e-6
    assert found["lines"][0]["grad_norm"] == 5.0


def test_c01_c02_the_rate_is_a_function_of_updates_alone(ranks: Any) -> None:
    def rates(samples: int, steps: int, degree: int) -> list[float]:
        targets = list(range(samples))
        more = ["schedule.warmup=10 updates", "schedule/decay=linear", "training.duration=20 updates"]
        lines = run(ranks, mean(targets, 1, steps, *more, degree=degree), degree)["lines"]
        return [line["lr"] for line in lines]

    expected = [(n + 1) / 10 for n in range(10)] + [1 - n / 10 for n in range(10)]
    for samples, steps, degree in [(20, 1, 1), (320, 16, 1), (40, 1, 2), (80, 1, 4), (160, 4, 2)]:
        assert rates(samples, steps, degree) == pytest.approx(expected, rel=1e-12)


def test_c10_epochs_and_validations_are_counted_in_updates(ranks: Any) -> None:
    more = ["training.validate_every=5", "data.validation={_target_: scalar.Targets, targets: [1]}"]
    found = run(ranks, mean(list(range(100)), 1, 4, *more))
    assert [line["update"] for line in found["lines"]] == list(range(1, 26))
    assert found["lines"][-1]["epoch"] == 1.0
    assert found["validations"] == [5, 10, 15, 20, 25]


def test_d01_the_last_micro_batch_synchronises(ranks: Any) -> None:
    assert weight(run(ranks, mean("[1,3,5,7]", 1, 2, degree=2), 2)) == [4.0]
    # three steps a window; the last window has two micro-batches a rank
    found = run(ranks, mean("[0,0,0,0,0,0,1,3,5,7]", 1, 3, degree=2), 2)
    assert weight(found) == [4.0]
    assert [line["micro_batches"] for line in found["lines"]] == [3, 2]


@pytest.mark.parametrize("drop_last", [False, True])
def test_d07_uneven_data_ends_and_counts_each_sample_once(ranks: Any, drop_last: bool) -> None:
    found = run(ranks, count(10, 8, f"data.drop_last={drop_last}"), 4)
    expected = [1 / 8] * 8 + ([0.0, 0.0] if drop_last else [1 / 2, 1 / 2])
    assert weight(found) == expected
    assert len(found["lines"]) == (1 if drop_last else 2)


@pytest.mark.parametrize("degree", [1, 2, 3])
def test_a_parameter_is_updated_though_its_sample_came_in_an_early_micro_batch(ranks: Any, degree: int) -> None:
    # Branch 0 occurs in the first micro-batch alone, of rank 0 alone; the third weight in none.
    text = config_text(
        *PLAIN,
        *own("toys.Branches", "toys.BranchTask", "toys.BranchData"),
        "+data.train.branches=[0,1,1,1,1,1]",
        "+data.train.targets=[6.0,1.0,1.0,1.0,1.0,1.0]",
        "batch.global_batch_size=6",
        "batch.micro_batch_size=1",
        "training.duration=1 updates",
        "optimizer.weight_decay=0.5",
    )
    state = run(ranks, text, degree)["state"]
    assert state["left"].tolist() == pytest.approx([1.0, 1.0], rel=1e-6)  # 6 / 6
    assert state["right"].tolist() == pytest.approx([5 / 6, 5 / 6], rel=1e-6)
    assert state["unused"].tolist() == [0.5, 0.5, 0.5]  # no gradient, but decayed like any other
    assert state["frozen"].tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("degree", [1, 2, 3])
def test_f10_every_epoch_has_an_order_of_its_own_and_each_sample_once(ranks: Any, degree: int) -> None:
    text = count(7, 3, "data.shuffle=true", "training.duration=3 epochs", "run.seed=5")
    lines = run(ranks, text, degree)["lines"]
    epochs = [[one for line in lines[3 * e : 3 * e + 3] for one in line["indices"]] for e in range(3)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert [line["indices"] for line in lines] == [line["indices"] for line in run(ranks, text, 1)["lines"]]


@pytest.mark.parametrize("degree", [1, 2])
def test_a_window_of_weight_zero_is_skipped_and_counted(ranks: Any, degree: int) -> None:
    sizes = {"hidden_size": 8, "num_layers": 1, "num_heads": 1, "intermediate_size": 8, "vocab_size": 14}
    text = config_text(
        *PLAIN,
        *[f"model.{name}={value}" for name, value in sizes.items()],
        "task.vocab_size=14",
        "task.bos=null",
        "data=custom",
        "data.train._target_=toys.Masked",
        "batch.global_batch_size=2",
        "training.duration=2 updates",
        "schedule.warmup=2 updates",
    )
    found = run(ranks, text, degree)
    assert [line["skipped"] for line in found["lines"]] == [True, False]
    assert [line["weight"] for line in found["lines"]] == [0.0, 6.0]
    assert [line["applied"] for line in found["lines"]] == [0, 1]
    assert found["lines"][1]["lr"] == 0.5  # the first slot of the warmup: a skipped update takes none


@pytest.mark.parametrize("degree", [1, 2, 3])
def test_b05_an_update_that_is_not_finite_changes_nothing_and_takes_no_place_in_the_schedule(
    ranks: Any, degree: int
) -> None:
    # the third window of six holds an infinite target, in the first micro-batch of rank 0
    targets = "[1,1,1,2,2,2,.inf,3,3,4,4,4,5,5,5,6,6,6]".replace(".inf", "1e39")
    text = config_text(
        *PLAIN,
        *MEAN,
        f"+data.train.targets={targets}",
        "batch.global_batch_size=3",
        "batch.micro_batch_size=1",
        "training.duration=1 epochs",
        "schedule/decay=linear",
        "optimizer.momentum=0.9",
    )
    lines = run(ranks, text, degree)["lines"]
    assert [line["skipped"] for line in lines] == [False, False, True, False, False, False]
    assert [line["applied"] for line in lines] == [1, 2, 2, 3, 4, 5]
    assert lines[3]["lr"] == lines[2]["lr"] == pytest.approx(1 - 2 / 6)
