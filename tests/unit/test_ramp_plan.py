"""A ramp of the global batch in the plan: its ends in every unit, and what rate and intervals make of it."""

from fractions import Fraction
from math import cos, pi, sqrt

import numpy as np
import pytest
from configs import config_text
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.config.choices import Device
from launcher.config.schema import Config
from launcher.config.validate import parse
from launcher.errors import ConfigError
from launcher.plan.facts import Facts, token_targets
from launcher.plan.mesh import World
from launcher.plan.plan import Plan, make_plan
from launcher.plan.schedule import LearningRate
from launcher.plan.timing import Timing, make_timing, windows_of
from launcher.plan.windows import Stage, WindowTable
from launcher.train.parts import count_through_ramp

WORLD = World(1, 2, Device.cpu)
TWO = "[{until: UNTIL, global_batch_size: 4}, {until: 3 epochs, global_batch_size: 8}]"


def planned(*overrides: str, samples: int = 40, tokens: dict[str, int] | None = None) -> tuple[Config, Plan, Timing]:
    config = parse(config_text("batch.global_batch_size=16", "training.duration=6 epochs", *overrides))
    facts = Facts(samples=samples, knows_lengths=True, updates_at_tokens=tokens or {})
    plan = make_plan(config, facts, world=WORLD)
    return config, plan, make_timing(config, facts, windows_of(config, facts, plan.batch), peak=plan.lr)


DROP = "data.drop_last=true"


def ramp(until: str) -> str:
    return f"batch.ramp={TWO.replace('UNTIL', until)}"


# 40 samples: 10 windows of 4, 5 of 8, or 3 of 16 an epoch; a quarter of 6 epochs is 1.5
@pytest.mark.parametrize(
    ("until", "first"), [("60 samples", 15), ("1.5 epochs", 15), ("25%", 15), ("15 updates", 15), ("1e2 tokens", 13)]
)
def test_a_stage_ends_in_any_unit(until: str, first: int) -> None:
    _, plan, _ = planned(ramp(until), tokens={"100": 13})
    assert plan.ramp is not None
    row = {"global_batch_size": 4, "grow_to": None, "until": until}
    assert plan.ramp[0] == {**row, "first_update": 1, "last_update": first}
    assert plan.ramp[1]["first_update"] == first + 1
    assert plan.num_updates == plan.ramp[1]["last_update"] + 9
    assert (plan.global_batch_size, plan.updates_per_epoch) == (16, 3)


def test_a_share_of_a_training_in_updates_is_of_its_updates() -> None:
    _, plan, _ = planned("batch.ramp=[{until: 10%, global_batch_size: 4}]", "training.duration=25")
    assert plan.ramp is not None
    assert plan.ramp[0]["last_update"] == 3  # 2.5, rounded half up
    assert plan.num_updates == 25


def walked_tokens(lengths: list[int], sizes: list[tuple[int, int]], full: int) -> list[int]:
    """The windows after which each stage's tokens are read, one after another, in order."""
    found, read, update, position = [], 0, 0, 0
    for target, size in [*sizes, (10**9, full)]:
        while read < target and len(found) < len(sizes):
            stop = min(position + size, len(lengths))
            read, update, position = read + sum(lengths[position:stop]), update + 1, stop % len(lengths)
        found.append(update)
    return found[: len(sizes)]


@pytest.mark.thorough
@settings(deadline=None, max_examples=30)  # a configuration is composed each time
@given(
    lengths=st.lists(st.integers(1, 9), min_size=4, max_size=20),
    sizes=st.lists(st.integers(1, 4), min_size=2, max_size=2),
    ends=st.tuples(st.integers(1, 60), st.integers(61, 200)),
)
def test_stages_in_tokens_as_read_window_by_window(lengths: list[int], sizes: list[int], ends: tuple[int, int]) -> None:
    stages = ", ".join(
        f"{{until: {end} tokens, global_batch_size: {size}}}" for end, size in zip(ends, sizes, strict=True)
    )
    config = parse(config_text(f"batch.ramp=[{stages}]", "data.shuffle=false", "training.duration=500 tokens"))
    by_hand = walked_tokens(lengths, list(zip(ends, sizes, strict=True)), 64)
    if by_hand[0] == by_hand[1]:
        with pytest.raises(ConfigError, match="holds no window"):
            count_through_ramp(config, np.array(lengths), 64, token_targets(config))
        return
    found = count_through_ramp(config, np.array(lengths), 64, token_targets(config))
    assert [found[str(end)] for end in ends] == by_hand


def rate_of(*overrides: str) -> tuple[LearningRate, list[int]]:
    """The rate, and the samples consumed after each update."""
    config, plan, timing = planned(ramp("1 epochs"), *overrides)
    assert timing.rate is not None
    assert plan.num_updates is not None
    table = windows_of(config, Facts(samples=40), plan.batch)
    assert table is not None
    return timing.rate, [table.samples_after(n) for n in range(plan.num_updates + 1)]


@pytest.mark.parametrize(("rule", "follows"), [("none", [1, 1]), ("linear", [0.25, 0.5]), ("sqrt", [0.5, sqrt(0.5)])])
def test_the_rate_follows_the_windows_by_its_rule(rule: str, follows: list[float]) -> None:
    base = [] if rule == "none" else ["scaling.base_batch_size=16"]
    rate, _ = rate_of("schedule/decay=constant", "schedule.warmup=0", f"scaling.rule={rule}", *base, "optimizer.lr=0.1")
    by_hand = [0.1 * follows[0]] * 10 + [0.1 * follows[1]] * 10 + [0.1] * 9
    assert [rate(n) for n in range(29)] == pytest.approx(by_hand, rel=1e-12)


def test_what_is_said_in_samples_passes_by_samples() -> None:
    rate, ends = rate_of("schedule/decay=cosine", "schedule.warmup='0.5 epochs'", "optimizer.lr=0.1")
    by_hand = [ends[n + 1] / 20 if ends[n] < 20 else (1 + cos(pi * (ends[n] - 20) / 220)) / 2 for n in range(29)]
    assert [rate(n) for n in range(29)] == pytest.approx([0.1 * one for one in by_hand], rel=1e-12)
    rate, ends = rate_of("schedule/decay=wsd", "schedule.decay.decay='1 epochs'", "schedule.decay.shape=linear")
    assert [rate(n) / rate.peak for n in range(26, 29)] == pytest.approx(
        [1 - (ends[n] - 200) / 40 for n in (26, 27, 28)]
    )
    assert rate(25) == rate.peak


def test_what_is_said_in_updates_passes_by_updates() -> None:
    rate, _ = rate_of("schedule/decay=linear", "schedule.warmup=5", "training.duration=29", "optimizer.lr=0.1")
    by_hand = [(n + 1) / 5 if n < 5 else 1 - (n - 5) / 24 for n in range(29)]
    assert [rate(n) for n in range(29)] == pytest.approx([0.1 * one for one in by_hand], rel=1e-12)


def test_intervals_in_epochs_and_samples_come_with_these() -> None:
    _, plan, timing = planned(ramp("1 epochs"), "training.validate_every=1 epochs", "checkpoint.every=60 samples")
    assert timing.validate_every is not None
    assert timing.checkpoint_every is not None
    due = [n for n in range(30) if timing.validate_every.is_due(n)]
    assert due == [10, 15, 20, 23, 26, 29]
    assert [n for n in range(30) if timing.checkpoint_every.is_due(n)] == [13, 20, 25, 29]
    assert (plan.validate_every_updates, plan.checkpoint_every_updates) == (3, 5)  # of full windows


@pytest.mark.parametrize(
    ("key", "overrides"),
    [
        ("batch.ramp[0].until", ["batch.ramp=[{until: 0, global_batch_size: 4}]"]),
        ("batch.ramp[0].until", ["batch.ramp=[{until: 5 parsecs, global_batch_size: 4}]"]),
        ("batch.ramp[0].until", ["batch.ramp=[{until: 9 updates, global_batch_size: 4, grow_to: 8}]"]),
        ("batch.ramp[1].until", ["batch.ramp=[{until: 9, global_batch_size: 4}, {until: 9, global_batch_size: 8}]"]),
        ("batch.ramp[0]", ["batch.ramp=[{until: 9}]"]),
        ("batch.ramp[0]", ["batch.ramp=[4]"]),
        ("batch.ramp[0].until", ["batch.ramp=[{until: 0.4%, global_batch_size: 4}]", "training.duration=10"]),
        ("training.duration", ["batch.ramp=[{until: 50%, global_batch_size: 4}]", "training.duration=50%"]),
        ("data.drop_last", ["batch.ramp=[{until: 99 epochs, global_batch_size: 8, grow_to: 48}]", DROP]),
        ("batch.ramp[0].grow_to", ["batch.ramp=[{until: 2 epochs, global_batch_size: 4, grow_to: x}]"]),
        (
            "scaling.adam_betas_and_eps",
            ["batch.ramp=[{until: 9, global_batch_size: 4}]", "scaling.rule=sqrt", "scaling.base_batch_size=16",
             "scaling.adam_betas_and_eps=true"],
        ),
        (
            "optimizer.groups[0].warmup_from",
            ["optimizer.groups=[{match: bias, warmup_from: 0.1}]", "schedule.warmup=0"],
        ),
        ("optimizer.groups[0].warmup_from", ["optimizer.groups=[{match: bias, warmup_from: -1}]"]),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_name(key: str, overrides: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        planned(*overrides)
    assert error.value.key == key
    if key.startswith(("batch.ramp", "training")):  # without the data too, as on a login node
        with pytest.raises(ConfigError) as error:
            make_plan(parse(config_text("training.duration=6 epochs", *overrides)), Facts(), world=WORLD)
        assert error.value.key == key


def test_targets_in_tokens_take_the_ramp_along() -> None:
    config = parse(config_text(ramp("25%"), "training.duration=400 tokens"))
    assert token_targets(config) == [Fraction(100), Fraction(400)]


def test_the_plan_says_each_stage() -> None:
    _, plan, _ = planned(ramp("1 epochs"), "scaling.rule=linear", "scaling.base_batch_size=16", "optimizer.lr=0.4")
    assert [line for line in plan.arithmetic if line.startswith("ramp")] == [
        "ramp: 4 samples, updates 1 to 10 (until 1 epochs), lr 0.1",
        "ramp: 8 samples, updates 11 to 20 (until 3 epochs), lr 0.2",
        "ramp: then 16 samples; weight decay is that of a full window throughout",
    ]


def test_a_ramp_that_outlasts_the_training_is_said() -> None:
    _, plan, _ = planned("batch.ramp=[{until: 30, global_batch_size: 4}]", "training.duration=20")
    assert "batch.ramp: a window of 16 samples never comes: the ramp ends at update 30 of 20" in plan.notes
    _, plan, _ = planned("batch.ramp=[{until: 19, global_batch_size: 4}]", "training.duration=20")
    assert not [note for note in plan.notes if "ramp" in note]


def test_a_share_is_one_moment_for_ramp_warmup_and_decay() -> None:
    half = ["batch.ramp=[{until: 50%, global_batch_size: 4}]", "schedule.decay.at=[50%]", "schedule.warmup=50%"]
    _, plan, timing = planned(*half, "schedule/decay=step", "training.validate_every=50%")
    assert plan.ramp is not None
    assert plan.ramp[0]["last_update"] == plan.warmup_updates == 30  # three epochs of ten
    assert timing.rate is not None
    assert [n for n in range(2, plan.num_updates or 0) if timing.rate(n) < 0.5 * timing.rate(n - 1)] == [30]
    assert timing.validate_every is not None
    assert [n for n in range(40) if timing.validate_every.is_due(n)] == [30, 39]


def test_windows_that_grow_end_where_the_stage_does() -> None:
    growing = "batch.ramp=[{until: 16170 samples, global_batch_size: 64, grow_to: 256}]"
    config, plan, _ = planned(growing, "training.duration=20 epochs", samples=1617)
    windows = windows_of(config, Facts(samples=1617), plan.batch)
    assert windows is not None
    end = windows.stage_ends[0]
    assert windows.samples_after(end - 1) < 16170 <= windows.samples_after(end)


def test_what_does_not_grow_is_said() -> None:
    _, plan, _ = planned("batch.ramp=[{until: 2 epochs, global_batch_size: 8, grow_to: 11}]")
    assert plan.ramp is not None
    assert plan.ramp[0]["grow_to"] is None
    assert any("(grow_to=11 is below 1.5 times it: it doesn't grow)" in line for line in plan.arithmetic)


def test_a_warmup_that_falls_is_said() -> None:
    more = ("scaling.rule=linear", "scaling.base_batch_size=16", "optimizer.lr=0.4", "schedule.warmup=5")
    _, plan, _ = planned("batch.ramp=[{until: 10, global_batch_size: 4}]", *more, "schedule.warmup_from=base_lr")
    (note,) = [note for note in plan.notes if "warmup" in note]
    assert note == "schedule.warmup_from=base_lr: the rate falls in the warmup, from 0.4 to 0.1"


def test_long_growth_is_planned_at_once() -> None:
    table = WindowTable(10**8, 1024, ramp=(Stage(Fraction(5 * 10**7), "samples", 1, "", Fraction(1024)),))
    assert table.samples_after(table.stage_ends[0]) >= 5 * 10**7
    assert table.size(table.stage_ends[0]) == 1024
