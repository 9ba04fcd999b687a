"""Targets: what is refused, what the plan and the run say of them, device-hours, and the watch over loss and rate."""

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
from configs import config_text
from fabricated import sweep

from launcher import checkpoints
from launcher.config.choices import Device
from launcher.config.targets import MetricTargetConfig, TargetsConfig, device_hours
from launcher.config.validate import parse
from launcher.errors import ConfigError, LauncherError
from launcher.plan.facts import Facts
from launcher.plan.mesh import World
from launcher.plan.plan import make_plan
from launcher.plan.targets import needed_rate, spent
from launcher.report.read import read
from launcher.report.write import markdown, report
from launcher.run_dir import RunDir
from launcher.train import stopping
from launcher.train.budget import Budget
from launcher.train.evaluate import Validation
from launcher.train.targets import MEASURED, WARM, Outlook, came_to, is_reached, judged_after
from launcher.train.trend import BLOCK, Trend

REFUSED = {
    "a loss that is none": ("targets.validation_loss=nan", "targets.validation_loss=nan", "finite"),
    "no hours": ("targets.device_hours=0", "targets.device_hours=0", "above 0"),
    "a negative rate": ("targets.samples_per_s=-1", "targets.samples_per_s=-1", "above 0"),
    "a metric without a bound": ("targets.metric.name=accuracy", "targets.metric.name=accuracy", "at_least"),
    "a bound of no metric": ("targets.metric.at_most=1", "targets.metric.at_most=1", "no metric"),
    "nothing to reach": ("targets.stop_when_reached=true", "targets.stop_when_reached=true", "has no effect"),
    "nothing to look at": (
        "targets.validation_loss=2 data.validation=null", "targets.validation_loss=2", "data.validation is null"
    ),
    "two bounds": (
        "targets.metric.name=a targets.metric.at_least=1 targets.metric.at_most=2", "targets.metric.name=a",
        "both targets.metric.at_least=1 and targets.metric.at_most=2",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_a_target_is_refused(name: str):
    given, key, said = REFUSED[name]
    with pytest.raises(ConfigError) as refused:
        config_text(*given.split())
    assert str(refused.value).startswith(key)
    assert said in str(refused.value)


def test_the_plan_shows_them():
    given = ["validation_loss=2.5", "stop_when_reached=true", "device_hours=2", "samples_per_s=100"]
    config = parse(config_text(*(f"targets.{one}" for one in given), "training.duration='2 epochs'"))
    plan = make_plan(config, Facts(samples=36_000), world=World(1, 4, Device.cpu))
    assert plan.targets == [
        "validation loss at most 2.5, which ends the run",
        # 72,000 samples in half an hour
        "at most 2 device-hours, 0.5 hours on 4 ranks: 72,000 samples need 40 samples/s",
        "at least 100 samples/s",
    ]
    unknown = make_plan(config, Facts(), world=World(1, 4, Device.cpu))
    assert unknown.targets[1] == "at most 2 device-hours, 0.5 hours on 4 ranks"
    assert make_plan(parse(config_text()), Facts(samples=9), world=World(1, 1, Device.cpu)).targets == []


def test_hours_and_rates():
    assert device_hours(1800, 4) == 2
    assert needed_rate(7200, 2, 4) == 4
    assert needed_rate(1, 0, 4) == needed_rate(1, -1, 4) == float("inf")


METRIC = MetricTargetConfig("accuracy", at_least=0.9)


@pytest.mark.parametrize(
    ("targets", "loss", "accuracy", "expected"),
    [
        (TargetsConfig(validation_loss=2.0), 2.0, 0.0, True),
        (TargetsConfig(validation_loss=2.0), 2.1, 1.0, False),
        (TargetsConfig(validation_loss=2.0), float("nan"), 1.0, False),
        (TargetsConfig(metric=METRIC), 9.0, 0.9, True),
        (TargetsConfig(metric=METRIC), 9.0, 0.89, False),
        (TargetsConfig(metric=MetricTargetConfig("accuracy", at_most=0.0)), 9.0, 0.1, False),
        (TargetsConfig(validation_loss=2.0, metric=METRIC), 1.9, 0.8, False),
        (TargetsConfig(validation_loss=2.0, metric=METRIC), 1.9, 0.95, True),
        (TargetsConfig(), 0.0, 1.0, False),
    ],
)
def test_when_a_validation_reaches_them(targets: TargetsConfig, loss: float, accuracy: float, expected: bool):
    assert is_reached(targets, Validation(loss, {"accuracy": accuracy})) is expected


def test_what_it_came_to_is_said():
    both = TargetsConfig(validation_loss=2.0, metric=METRIC)
    said = came_to(both, Validation(1.5, {"accuracy": 0.95, "other": 3.0}))
    assert said == "validation loss 1.5, accuracy 0.95 (target: validation loss at most 2 and accuracy at least 0.9)"
    with pytest.raises(ConfigError, match=r"targets\.metric\.name=accuracy: the task gives no such metric: top5"):
        is_reached(both, Validation(1.5, {"top5": 0.95}))


def test_a_run_says_once_whether_it_can_meet_its_rate_and_its_hours():
    targets = TargetsConfig(device_hours=1.0, samples_per_s=20.0)
    outlook = Outlook(targets, 4, lambda: 360.0)
    said = [outlook.add(update, 100, 99.0, 10_000) for update in range(1, WARM + 1)]  # the first ones are slow
    said += [outlook.add(WARM + update, 100, 4.0, 9_000) for update in range(1, MEASURED + 6)]
    (lines,) = [one for one in said if one]
    assert said.index(lines) == WARM + MEASURED - 1
    assert lines[0] == "25 samples/s; targets.samples_per_s=20 can be met"
    # 9,000 samples at 25 a second are 360 s on 4 ranks, 0.4 hours, beside the 0.1 that are used
    # and 0.9 hours, 810 s on 4 ranks, are enough at 9000 / 810 samples a second
    assert "about 0.5 device-hours at 25 samples/s" in lines[1]
    assert "targets.device_hours=1 can be met (11.11 samples/s from here on)" in lines[1]
    tight = Outlook(TargetsConfig(device_hours=0.3, samples_per_s=30.0), 4, lambda: 360.0)
    lines = [line for update in range(1, WARM + MEASURED + 1) for line in tight.add(update, 100, 4.0, 9_000)]
    assert "targets.samples_per_s=30 CAN'T be met" in lines[0]
    # 0.2 hours are 180 s on 4 ranks
    assert "targets.device_hours=0.3 CAN'T be met (50 samples/s from here on)" in lines[1]


def test_in_a_ramp_full_windows_are_judged():
    ramp = [{"last_update": 20}, {"last_update": 50}]
    assert judged_after(None, 100) == judged_after([], 100) == 0
    assert judged_after(ramp, 50 + WARM + MEASURED) == 50
    assert judged_after(ramp, 50 + WARM + MEASURED - 1) == 20  # too few would follow
    assert judged_after(ramp, 20) == 0
    outlook = Outlook(TargetsConfig(samples_per_s=20.0), 4, lambda: 0.0, judged_after(ramp, 100))
    # 10 samples a second in windows of 10, 25 in those of 100
    assert not any(outlook.add(update, 10, 1.0, 9_000) for update in range(1, 51))
    said = [outlook.add(update, 100, 4.0, 9_000) for update in range(51, 51 + WARM + MEASURED)]
    assert said[-1] == ["25 samples/s; targets.samples_per_s=20 can be met"]
    assert not any(said[:-1])


@pytest.mark.parametrize(
    ("every", "is_said"), [("null", True), ("20 updates", True), ("200%", True), ("19 updates", False), ("5%", False)]
)
def test_a_single_look_at_the_end_is_noted(every: str, is_said: bool):
    given = ["targets.validation_loss=2", "training.duration=20 updates", f"training.validate_every={every}"]

    def noted(*more: str) -> bool:
        plan = make_plan(parse(config_text(*given, *more)), Facts(samples=320), world=World(1, 1, Device.cpu))
        return any(one.startswith("targets.stop_when_reached has no effect") for one in plan.notes)

    assert noted("targets.stop_when_reached=true") is is_said
    assert not noted()


def run_dir(folder: Path, world_size: int) -> RunDir:
    plan = make_plan(parse(config_text()), Facts(samples=9), world=World(1, world_size, Device.cpu))
    (folder / "plan.json").write_text(json.dumps(plan.to_dict()))
    return RunDir(folder)


def test_device_hours_are_counted_over_all_attempts(tmp_path: Path):
    run = run_dir(tmp_path, 3)
    assert run.device_seconds() == 0
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    begun = time.monotonic()
    first = Budget(run, scratch, None, begun - 100, lambda: True)
    first.count()
    first.write()
    assert 300 <= run.device_seconds() <= 3 * (time.monotonic() - begun + 100)
    assert stopping.asked(scratch) is None
    begun = time.monotonic()
    second = Budget(run, scratch, 0.2, begun - 130, lambda: True)  # 720 s in all, of which 420 are left: 140 on 3 ranks
    second.count()
    assert stopping.asked(scratch) is None
    up: list[bool] = []
    third = Budget(run, scratch, 0.2, begun - 11, lambda: bool(up))
    third.count()
    assert stopping.asked(scratch) is None, "no rank is there yet that could save"
    up.append(True)
    third.count()
    assert stopping.asked(scratch) == "targets.device_hours"
    assert stopping.number_of("targets.device_hours").name == "SIGTERM"
    third.write()
    used = spent(run, 0.2)
    assert used is not None
    assert 0.2 <= used < 0.25
    assert spent(run, 0.3) is None
    assert spent(run, None) is None


def test_a_loss_that_drifts_up_is_said_once():
    draws = random.Random(0)
    trend, said = Trend(), []
    for update in range(1, 20 * BLOCK + 1):
        level = 3 - min(update, 8 * BLOCK) / (8 * BLOCK) + max(0, update - 12 * BLOCK) / (10 * BLOCK)
        said += [(update, line) for line in trend.add(level + draws.gauss(0, 0.1), 10.0)]
    ((update, line),) = said
    assert 13 * BLOCK <= update <= 16 * BLOCK
    assert "the loss drifts up" in line


def test_noise_alone_and_a_plateau_are_no_drift():
    draws = random.Random(1)
    trend = Trend()
    for _ in range(400 * BLOCK):
        assert trend.add(2 + draws.gauss(0, 0.3), draws.uniform(9, 11)) == []


def test_a_rate_that_falls_is_said_once_and_survives_a_checkpoint():
    trend, said = Trend(), []
    for update in range(1, 10 * BLOCK + 1):
        rate = 10.0 if update <= 4 * BLOCK else 7.5
        said += [(update, line) for line in trend.add(1.0, rate)]
        if update == 7 * BLOCK + 3:
            trend = Trend.take(json.loads(json.dumps(trend.to_dict())))
    ((update, line),) = said
    assert update == 6 * BLOCK
    assert "7.5 samples/s over the last 50 updates, 10 at best" in line
    assert trend.said == ["rate"]


def test_a_drift_goes_on_after_a_checkpoint():
    draws = random.Random(2)
    losses = [2 + max(0, n - 4 * BLOCK) / (4 * BLOCK) + draws.gauss(0, 0.1) for n in range(9 * BLOCK)]
    whole, broken = Trend(), Trend()
    said: tuple[list[Any], list[Any]] = ([], [])
    for update, loss in enumerate(losses):
        said[0].extend((update, line) for line in whole.add(loss, 1.0))
        said[1].extend((update, line) for line in broken.add(loss, 1.0))
        if update % 37 == 0:
            broken = Trend.take(json.loads(json.dumps(broken.to_dict())))
    assert said[0] == said[1]
    assert len(said[0]) == 1


def test_later_checkpoints_are_put_aside_and_none_is_overwritten(tmp_path: Path):
    run = RunDir(tmp_path)
    for attempt in (1, 2):
        for update in (10, 20, 30):
            checkpoints.path_of(run, update).mkdir(parents=True, exist_ok=True)
        (checkpoints.path_of(run, 30) / "of").write_text(str(attempt))
        checkpoints.put_aside_after(run, 10, attempt)
        assert [one.update for one in checkpoints.completed(run)] == [10]
    for attempt in (1, 2):
        aside = run.checkpoints / f"update_0000000030.before_attempt_{attempt}"
        assert (aside / "of").read_text() == str(attempt)


def test_a_report_gives_device_hours_to_the_stated_loss(tmp_path: Path):
    members: list[tuple[str, dict[str, Any] | None]] = [
        (f"batch.global_batch_size={batch}", {"batch": batch, "losses": losses, "seconds": 1800.0})
        for batch, losses in ((8, [3.0, 2.4, 2.0]), (16, [3.0, 2.6, 2.5]), (32, [3.0, 2.9, 2.8]))
    ]
    folder = sweep(tmp_path, members)
    for number in range(3):
        plan = json.loads((folder / str(number) / "plan.json").read_text())
        (folder / str(number) / "plan.json").write_text(json.dumps(plan | {"world_size": 4}))
        config = json.loads((folder / str(number) / "config.yaml").read_text())
        (folder / str(number) / "config.yaml").write_text(json.dumps(config | {"targets": {"validation_loss": 2.5}}))
    text = markdown(report(read(folder)))
    assert "| samples to a loss of 2.5 | device-hours to it |" in text
    rows = {line.split(" | ")[0].strip("| "): line for line in text.splitlines() if line.startswith("| ")}
    # two updates of half an hour on 4 ranks, three of them, and never
    assert "| 16 | 4 |" in rows["8"]
    assert "| 48 | 6 |" in rows["16"]
    assert "| not reached | - |" in rows["32"]


def test_a_run_whose_hours_are_used_up_is_not_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from launcher.resume import _refuse_spent

    run = RunDir(tmp_path)
    (tmp_path / "usage.json").write_text(json.dumps({"device_seconds": 3600.0}))
    monkeypatch.chdir(tmp_path.parent)
    with pytest.raises(LauncherError) as refused:
        _refuse_spent(run, 0.5)
    assert "targets.device_hours=0.5: is used up: the run has had 1 device-hours" in str(refused.value)
    assert f"launcher resume {tmp_path.name} targets.device_hours=2" in str(refused.value)
    _refuse_spent(run, 1.5)
    _refuse_spent(run, None)
