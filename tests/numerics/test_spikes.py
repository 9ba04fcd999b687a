"""The guard against loss spikes: what it takes for one, and what becomes of the window."""

import json
from pathlib import Path
from typing import Any

import pytest
from configs import PLAIN, config_text, own
from toys import assembled

from launcher import checkpoints
from launcher.config.choices import LossSpike
from launcher.errors import NonFiniteError
from launcher.run_dir import RunDir
from launcher.train.spikes import SpikeGuard


def test_a_loss_is_judged_by_the_median_of_those_before() -> None:
    guard = SpikeGuard(LossSpike.skip, deviations=10.0, window=12)
    for step in range(9):
        guard.add(5.0 + 0.1 * (step % 3))
    assert not guard.is_one(1e6)  # too few to judge by
    guard.add(5.0)
    # of 4, 3 and 3 losses 5.0, 5.1 and 5.2 the median is 5.1, and half of them lie within 0.1 of it
    assert guard.limit == pytest.approx(5.1 + 10 * 1.4826 * 0.1)
    assert guard.is_one(6.6)
    assert not guard.is_one(6.5)
    assert not guard.is_one(float("inf"))
    assert not guard.is_one(float("nan"))
    for _ in range(30):
        guard.add(2.0)
    assert guard.losses == [2.0] * 12
    assert guard.limit == pytest.approx(2.0 + 10 * 0.02)  # a deviation is at least a hundredth of the median


def test_nobody_asks() -> None:
    guard = SpikeGuard(LossSpike.none)
    for _ in range(20):
        guard.add(1.0)
    assert not guard.is_one(1e9)
    assert guard.losses == []


TARGETS = [1.0 + 0.125 * (index % 4) for index in range(40)]
SPIKE = 13
"""The window whose targets are far away."""


def text(action: str, *more: str) -> str:
    targets = [1000.0 if index // 2 == SPIKE - 1 else target for index, target in enumerate(TARGETS)]
    return config_text(
        *PLAIN,
        *own("toys.Branches", "toys.BranchTask", "toys.BranchData"),
        f"+data.train.branches={[0] * len(targets)}",
        f"+data.train.targets={targets}",
        "batch.global_batch_size=2",
        "optimizer.lr=0.25",
        "optimizer.momentum=0.5",
        "training.duration=20 updates",
        f"training.loss_spike={action}",
        "training.loss_spike_deviations=100",
        *more,
    )


def weight_after(updates: list[int]) -> tuple[float, float]:
    """The weight and its momentum after these windows, and the learning by hand."""
    weight = momentum = 0.0
    for update in updates:
        first, second = TARGETS[2 * update - 2 : 2 * update]
        momentum = 0.5 * momentum + (weight - (first + second) / 2)
        weight -= 0.25 * momentum
    return weight, momentum


def trained(rank: int, world_size: int, configuration: str, folder: str) -> dict[str, Any]:
    fit = assembled(rank, world_size, configuration, folder)
    progress = fit.run()
    fit.close()
    left = fit.sharding.full_state()["left"]
    return {"weight": left[0].item(), "applied": progress.applied, "update": progress.update}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero1"])
def test_a_skipped_spike_changes_nothing(ranks: Any, strategy: str, tmp_path: Path) -> None:
    found = ranks.run(trained, text("skip", f"strategy={strategy}"), str(tmp_path), world_size=2)
    expected, _ = weight_after([one for one in range(1, 21) if one != SPIKE])
    for one in found:
        assert one["weight"] == pytest.approx(expected, rel=1e-6)
        assert (one["update"], one["applied"]) == (20, 19)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    train = [line for line in lines if line["kind"] == "train"]
    assert [(line["update"], line["spike"]) for line in train if line["skipped"]] == [(SPIKE, 1)]
    assert train[SPIKE - 1]["loss"] > 1e5


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_going_back_leaves_out_what_led_to_the_spike(ranks: Any, strategy: str, tmp_path: Path) -> None:
    """To the checkpoint of update 9, so that windows 10 to 13 are left out and 14 comes next."""
    configuration = text("rollback", "checkpoint.every=9 updates", f"strategy={strategy}")
    found = ranks.run(trained, configuration, str(tmp_path), world_size=2)
    expected, _ = weight_after([*range(1, 10), *range(SPIKE + 1, 21)])
    for one in found:
        assert one["weight"] == pytest.approx(expected, rel=1e-6)
        assert (one["update"], one["applied"]) == (20, 16)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    train = [line for line in lines if line["kind"] == "train"]
    assert [(line["update"], line["rolled_back_to"]) for line in train if line["rolled_back_to"]] == [(SPIKE + 1, 9)]
    # what the guard goes on with belongs to the checkpoint too
    (newest, *_) = checkpoints.completed(RunDir(tmp_path))
    assert newest.update == 20


def test_a_save_beside_training_holds_what_there_was_when_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guard's losses, which the next window adds to, and no update that the metrics would lack after a kill."""
    every = ["checkpoint.every=12 updates", "training.log_every=1000"]
    fit = assembled(0, 1, text("skip", "strategy=single", *every), str(tmp_path))
    given: list[tuple[int, Any, int]] = []

    def save(update: int, progress: Any, **_: Any) -> None:
        given.append((update, progress, len((tmp_path / "metrics.jsonl").read_text().splitlines())))

    monkeypatch.setattr(fit.saver, "save", save)
    fit.run()
    assert fit.reporter._metrics is not None
    fit.reporter._metrics.close()
    found = [(update, len(progress["losses"]), lines) for update, progress, lines in given]
    assert found == [(12, 12, 12), (20, 19, 20)]


@pytest.mark.slow
def test_spikes_without_end_end_the_run(ranks: Any, tmp_path: Path) -> None:
    configuration = text("skip", "training.max_skipped_in_a_row=1")
    with pytest.raises(
        NonFiniteError, match=r"update 13: 1 updates in a row were skipped.*lies above.*samples \[24, 25\]"
    ):
        ranks.run(trained, configuration, str(tmp_path), world_size=2)
