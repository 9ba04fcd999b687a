"""A training that is watched: what it says of its loss and of its targets, through checkpoints too."""

import json
from pathlib import Path
from typing import Any

from configs import PLAIN, config_text, own
from toys import assembled

from launcher.run_dir import RunDir
from launcher.train.trend import BLOCK


def noted(text: str, folder: Path, updates: int) -> list[tuple[int, str]]:
    """What is said until update `updates`, from a checkpoint in `folder` where there is one."""
    fit = assembled(0, 1, text, str(folder))
    object.__setattr__(fit.policy, "num_updates", updates)
    try:
        fit.run()
    finally:
        fit.close()
        assert fit.reporter._metrics is not None
        fit.reporter._metrics.close()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    notes = [(one["update"], one["text"]) for one in lines if one["kind"] == "note"]
    return [one for one in notes if "the rate has fallen" not in one[1]]  # which a busy machine may bring about


def config(targets: list[float], *more: str) -> str:
    return config_text(
        *PLAIN,
        *own("scalar.Scalar", "scalar.SquaredError", "scalar.Targets", targets=json.dumps(targets)),
        "optimizer.lr=0",
        "batch.global_batch_size=1",
        "training.duration=1 epochs",
        *more,
    )


def test_a_drift_is_said_once_also_when_the_run_goes_on(tmp_path: Path) -> None:
    text = config([1.0] * (2 * BLOCK) + [3.0] * (4 * BLOCK))
    RunDir(tmp_path).create(text, json.dumps({}))
    assert noted(text, tmp_path, 3 * BLOCK + 7) == []  # one block that is higher
    said = "the loss drifts up: 4.5 over the last 50 updates, 0.5 at its best"
    assert noted(text, tmp_path, 4 * BLOCK + 20) == [(4 * BLOCK, said)]
    assert noted(text, tmp_path, 6 * BLOCK) == [(4 * BLOCK, said)]


def test_the_first_updates_say_whether_rate_and_hours_can_be_met(tmp_path: Path) -> None:
    text = config([1.0] * 40, "targets.samples_per_s=1e9", "targets.device_hours=1e6")
    RunDir(tmp_path).create(text, json.dumps({}))
    rate, hours = noted(text, tmp_path, 40)
    assert rate[0] == hours[0] == 13
    assert "targets.samples_per_s=1e+09 CAN'T be met" in rate[1]
    assert "targets.device_hours=1e+06 can be met" in hours[1]


def test_a_target_that_is_reached_once_is_noted_and_trains_on(tmp_path: Path) -> None:
    more = ["+data.validation={_target_: scalar.Targets, targets: [1.0]}", "training.validate_every=4"]
    text = config([1.0] * 12, *more, "targets.validation_loss=0.5")
    RunDir(tmp_path).create(text, json.dumps({}))
    expected: list[Any] = [(4, "reached: validation loss 0.5 (target: validation loss at most 0.5)")]
    assert noted(text, tmp_path, 8) == expected
    assert noted(text, tmp_path, 12) == expected
    assert json.loads((tmp_path / "status.json").read_text())["reached"]["update"] == 4
