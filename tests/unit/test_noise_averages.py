"""The gradient noise scale: its arithmetic, what the plan refuses, and what a report says of it."""

import io
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from configs import config_text
from fabricated import run, sweep
from rich.console import Console

from launcher.config.choices import Device
from launcher.config.validate import parse
from launcher.errors import ConfigError
from launcher.observe.progress import Course, Lines, _show
from launcher.observe.status import render_status
from launcher.observe.text import critical_batch_text, value_text
from launcher.plan.facts import Facts
from launcher.plan.mesh import World
from launcher.plan.noise_scale import FEWEST
from launcher.plan.plan import Plan, make_plan
from launcher.report.read import read
from launcher.report.write import markdown, report
from launcher.run_dir import RunDir
from launcher.train.noise_scale import Averages, Estimate, split


def test_two_sizes_tell_signal_and_noise_apart():
    # |G|^2 = 2 and S = 12: batches of 3 and 12 have 2 + 4 and 2 + 1 on average
    assert split(6.0, 1 / 3, 3.0, 1 / 12) == pytest.approx((12.0, 2.0))
    # half of the small batches hold 2 samples, half 6: 2 + 12 (1/2 + 1/6) / 2 = 6
    assert split(6.0, (1 / 2 + 1 / 6) / 2, 3.0, 1 / 12) == pytest.approx((12.0, 2.0))


def test_averages_weigh_as_they_say():
    memory, values = 4.0, [(3.0, 1.0), (5.0, 1.5), (1.0, 0.5), (4.0, 2.5), (2.0, 2.0)]
    averages = Averages(memory)
    for noise, signal in values:
        averages.add(noise, signal)
    weights = np.array([(1 - 1 / memory) ** age for age in range(len(values))][::-1])
    weights /= weights.sum()
    noises, signals = np.array(values).T
    assert averages.noise == pytest.approx(weights @ noises)
    assert averages.signal == pytest.approx(weights @ signals)
    apart = noises - weights @ noises, signals - weights @ signals
    assert averages.noise_spread == pytest.approx(weights @ apart[0] ** 2)
    assert averages.signal_spread == pytest.approx(weights @ apart[1] ** 2)
    assert averages.joint_spread == pytest.approx(weights @ (apart[0] * apart[1]))
    assert averages.concentration == pytest.approx(weights @ weights)


def test_a_memory_of_one_is_the_last_measurement():
    averages = Averages(1.0)
    for _ in range(2 * FEWEST):
        averages.add(3.0, 2.0)
    averages.add(8.0, 4.0)
    assert (averages.noise, averages.signal) == (8.0, 4.0)
    assert averages.estimate() is None  # one measurement doesn't say how far it may be off


def test_the_error_is_how_far_estimates_scatter():
    draws = np.random.default_rng(5)
    found: list[Estimate] = []
    for _ in range(400):
        averages = Averages(40.0)
        noise, other = draws.normal(0, 30, 300), draws.normal(0, 0.4, 300)
        for one, two in zip(noise, other, strict=True):
            averages.add(100 + one, 2 + two - one / 60)  # as a difference of the same norms gives them
        estimate = averages.estimate()
        assert estimate is not None
        found.append(estimate)
    spread = float(np.std([one.batch for one in found], ddof=1))
    assert np.mean([one.batch for one in found]) == pytest.approx(50, rel=0.02)
    # of 400 draws a standard deviation is known to 1 / sqrt(800); the rest is the second order
    assert np.mean([one.error for one in found]) == pytest.approx(spread, rel=0.12)


def test_nothing_is_said_too_early_or_of_no_signal():
    averages = Averages(100.0)
    for index in range(FEWEST):
        assert averages.estimate() is None
        averages.add(10.0 + index % 2, 1.0)
    assert averages.estimate() is not None
    drowned = Averages(100.0)
    for index in range(50):
        drowned.add(10.0, 0.01 + (-1) ** index)  # around nothing: a quotient would say anything
    assert drowned.estimate() is None


def test_averages_survive_a_checkpoint_to_the_bit():
    averages = Averages(7.0)
    for index in range(23):
        averages.add(math.sqrt(index), math.exp(-index))
    again = Averages(**json.loads(json.dumps(asdict(averages))))
    for one in (averages, again):
        one.add(0.3, 0.1)
    assert again == averages


def plan(*more: str, ranks: int = 1, facts: Facts | None = None) -> Plan:
    config = parse(config_text("training.noise_scale=10 updates", "batch.layout=arrival", *more))
    return make_plan(config, facts or Facts(samples=320, knows_lengths=True), world=World(1, ranks, Device.cpu))


def test_the_plan_says_how_often():
    assert plan("batch.micro_batch_size=8").noise_scale_every_updates == 10
    assert plan("batch.micro_batch_size=8", "training.noise_scale=10%").noise_scale_every_updates == 10
    assert plan("batch.micro_batch_size=8", "training.noise_scale=null").noise_scale_every_updates is None
    assert "neighbours" not in " ".join(plan("batch.micro_batch_size=8").notes)
    assert "neighbours" in " ".join(plan("batch.micro_batch_size=8", "data.shuffle=false").notes)


REFUSED: dict[str, tuple[list[str], int, str, str]] = {
    "one micro-batch": (["batch.global_batch_size=16"], 1, "no smaller one", "batch.micro_batch_size=8"),
    "a short epoch": (
        ["batch.global_batch_size=640", "batch.micro_batch_size=400"], 1, "the window of 320", "micro_batch_size=160"
    ),
    "one sample": (["batch.global_batch_size=1"], 2, "one sample", "batch.global_batch_size=2"),
    "by length": (["batch.layout=auto"], 2, "sorts it", "batch.layout=arrival"),
    "by tokens": (
        ["batch.layout=auto", "batch.micro_batch_tokens=512"], 2, "sorts it", "instead of batch.micro_batch_tokens"
    ),
    "a pipeline": (["mesh.pp=2", "strategy=ddp"], 2, "mesh.pp=2", "mesh.pp=1"),
    "no shards": (["strategy=fsdp", "mesh.dp_shard=1", "mesh.dp_replicate=2"], 2, "dp_shard=1", "strategy=ddp"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_measured_is_refused_by_name(name: str):
    more, ranks, said, hint = REFUSED[name]
    facts = Facts(samples=320, knows_lengths=True, num_layers=4, part_costs=[1] * 6)
    with pytest.raises(ConfigError) as refused:
        plan(*more, ranks=ranks, facts=facts)
    assert str(refused.value).startswith("training.noise_scale=10 updates: ")
    assert said in str(refused.value)
    assert hint in str(refused.value)


@pytest.mark.parametrize("value", ["0.5", "1", "-1", "inf", "nan"])
def test_a_memory_of_at_most_one_is_refused(value: str):
    with pytest.raises(ConfigError, match=r"training\.noise_scale_memory=.*above 1"):
        config_text(f"training.noise_scale_memory={value}", "training.noise_scale=10")


@pytest.mark.parametrize("name", ["noise_scale_memory", "loss_spike_deviations", "loss_spike_window"])
def test_how_to_watch_what_is_not_watched_is_refused(name: str):
    with pytest.raises(
        ConfigError, match=rf"training\.{name}=20.*has no effect: training\.{name.rpartition('_')[0]} is"
    ):
        config_text(f"training.{name}=20")
    config_text(f"training.{name}=20", "training.noise_scale=10", "training.loss_spike=skip")


@pytest.mark.parametrize("key", ["noise_scale", "validate_every", "log_every"])
def test_an_interval_of_nothing_is_refused(key: str):
    with pytest.raises(ConfigError, match=rf"training\.{key}=0 .*no interval"):
        plan("batch.micro_batch_size=8", f"training.{key}=0 epochs")


def noted(*more: str, ranks: int = 1) -> list[str]:
    given = ["batch.global_batch_size=16", "batch.micro_batch_size=8", "training.duration=20 updates", *more]
    return [one for one in plan(*given, ranks=ranks).notes if one.startswith("training.noise_scale")]


def test_what_is_measured_never_is_refused_and_seldom_is_noted():
    with pytest.raises(ConfigError, match=r"training\.noise_scale=1000.*never measured in the 20 updates"):
        noted("training.noise_scale=1000")
    (seldom,) = noted("training.noise_scale=3 updates")
    assert "it is measured 6 times in 20 updates, and the critical batch is worked out from 10 on" in seldom
    assert noted("training.noise_scale=2 updates") == []


def test_what_a_ramp_leaves_unmeasured_is_noted():
    # 20 updates of 8 samples, then 10 of 16
    ramp = ["batch.ramp=[{until: 20 updates, global_batch_size: 8}]", "training.duration=30 updates"]
    unmeasured = "training.noise_scale: nothing is measured in batch.ramp[0], whose windows of 8 have no smaller part"
    assert noted(*ramp, "training.noise_scale=1") == [unmeasured]
    assert noted(*ramp, "training.noise_scale=1", ranks=2) == []
    assert "is measured 5 times in 30 updates" in noted(*ramp, "training.noise_scale=2 updates")[1]
    with pytest.raises(ConfigError, match=r"never measured"):
        noted(*ramp, "training.noise_scale=1", "training.duration=20 updates")


def test_numbers_with_their_error():
    assert value_text(51234.5, 1234.5) == "51,200 ± 1,200"
    assert value_text(3.14159, 0.0321) == "3.142 ± 0.032"
    assert value_text(12.0, 0.0) == "12.0 ± 0.0"
    assert critical_batch_text(None, None) == ""


def test_progress_and_status_show_what_was_measured_last(tmp_path: Path):
    folder = run(tmp_path / "run", batch=8, training=[3.0, 2.0, 1.0], state="finished")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines[1] |= {"critical_batch": 51234.5, "critical_batch_error": 1234.5}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    measured = json.loads((folder / "plan.json").read_text()) | {"noise_scale_every_updates": 1}
    (folder / "plan.json").write_text(json.dumps(measured))
    lines.append({"kind": "note", "attempt": 0, "update": 3, "text": "the loss drifts up"})
    console = Console(file=io.StringIO(), width=200)
    course = Course(RunDir(folder))
    with Lines(console, course) as view:
        for line in lines:
            _show(course, view, line)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "critical batch 51,200 ± 1,200" in shown
    assert "update 3/4  the loss drifts up" in shown
    render_status(folder, console)
    said = "critical batch 51,200 ± 1,200 (samples, by the noise of the gradients up to update 2)"
    assert said in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_report_shows_the_critical_batch(tmp_path: Path):
    members: list[tuple[str, dict[str, Any] | None]] = [
        (f"batch.global_batch_size={batch} run.seed={seed}", {"batch": batch, "seed": seed, "losses": [3.0, 2.0]})
        for batch in (8, 16, 32)
        for seed in (0, 1)
    ]
    folder = sweep(tmp_path, members)
    # at batch 8 seeds agree better than each run knows itself, at 16 they don't; at 32 nothing was measured
    for number, (batch, error) in enumerate([(100.0, 8.0), (101.0, 6.0), (90.0, 1.0), (110.0, 1.0)]):
        path = folder / str(number) / "metrics.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines:
            if line["kind"] == "train":
                is_first = line["update"] == 1
                line |= {
                    "critical_batch": 5.0 if is_first else batch,
                    "critical_batch_error": 1.0 if is_first else error,
                }
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = markdown(report(read(folder)))
    assert "Critical batch, by the noise of the gradients: 100.5 ± 5.0 at batch 8; 100 ± 10 at batch 16." in text
    assert "| critical batch |" in text
    assert "McCandlish" in text
    assert "| - |" in next(line for line in text.splitlines() if line.startswith("| 32 |"))
