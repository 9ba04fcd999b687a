"""Durations and learning rates, against tables worked out by hand."""

from fractions import Fraction
from itertools import pairwise
from math import sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.config.choices import WarmupFrom
from launcher.config.decays import ConstantDecay, CosineDecay, DecayConfig, LinearDecay, StepDecay, WsdDecay
from launcher.config.schema import ScheduleConfig
from launcher.errors import ConfigError
from launcher.plan.batch import BatchPlan
from launcher.plan.durations import Clock, Duration, NeedsData
from launcher.plan.schedule import LearningRate, build_learning_rate, build_momentum
from launcher.plan.windows import WindowTable
from launcher.train.parts import count_updates


def build(
    decay: DecayConfig,
    num_updates: int,
    *,
    warmup: object = 0,
    warmup_from: WarmupFrom = WarmupFrom.zero,
    peak: float = 1.0,
    base_lr: float = 1.0,
) -> LearningRate:
    schedule = ScheduleConfig(warmup, warmup_from, decay)
    clock = Clock(None, num_updates)
    return build_learning_rate(schedule, clock, peak=peak, base_lr=base_lr, num_updates=num_updates)


def rates(lr: LearningRate) -> list[float]:
    return [rate for _, rate in lr.table()]


@pytest.mark.parametrize(
    ("value", "number", "unit"),
    [
        ("90 epochs", 90, "epochs"),
        ("1 epoch", 1, "epochs"),
        ("1.5 epochs", Fraction(3, 2), "epochs"),
        ("0.1 epochs", Fraction(1, 10), "epochs"),
        ("2000 updates", 2000, "updates"),
        ("1 update", 1, "updates"),
        ("1e9 tokens", 10**9, "tokens"),
        ("1e6 samples", 10**6, "samples"),
        ("1.5e3 samples", 1500, "samples"),
        ("10%", 10, "%"),
        ("12.5 %", Fraction(25, 2), "%"),
        (" 90  Epochs ", 90, "epochs"),
        ("3epochs", 3, "epochs"),
        (2000, 2000, "updates"),
        ("2000", 2000, "updates"),
        (2000.0, 2000, "updates"),
        (0, 0, "updates"),
        ("0%", 0, "%"),
    ],
)
def test_forms_of_a_duration(value: object, number: Fraction, unit: str) -> None:
    duration = Duration.parse(value, "k")
    assert (duration.value, duration.unit) == (number, unit)
    assert Duration.parse(str(duration), "k") == duration


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("-1 epochs", "negative"),
        (-3, "negative"),
        ("0.5 updates", "whole number of updates"),
        (0.5, "whole number of updates"),
        ("1.5 samples", "whole number of samples"),
        ("1e-1 tokens", "whole number of tokens"),
        ("90 epocs", "did you mean 'epochs'"),
        ("90 steps", "unknown unit 'steps'"),
        ("1,000 updates", "unknown unit"),
        ("epochs", "is no duration"),
        ("1.2.3 epochs", "is no duration"),
        ("1e999999999 epochs", "is no duration"),
        ("", "is no duration"),
        (None, "is no duration"),
        (True, "is no duration"),
        ([1], "is no duration"),
        (float("nan"), "is no duration"),
    ],
)
def test_what_is_no_duration_is_refused_by_name(value: object, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as error:
        Duration.parse(value, "schedule.warmup")
    assert error.value.key == "schedule.warmup"
    assert "90 epochs" in str(error.value)


def count(clock: Clock, value: object) -> int:
    return clock.updates(Duration.parse(value, "k"), "k")


def test_clock_counts_whole_windows() -> None:
    # 10 samples by 4: windows end at 4, 8 and 10 samples, three an epoch.
    clock = Clock(WindowTable(10, 4), 25, {10**9: 7})
    counted = {"7 updates": 7, "2 epochs": 6, "1.5 epochs": 5, "10 samples": 3, "11 samples": 4, "1e9 tokens": 7}
    assert {value: count(clock, value) for value in counted} == counted
    assert count(clock, "0 tokens") == 0


@pytest.mark.parametrize(
    ("percent", "of", "updates"),
    # Halves go up, also where rounding to even would go down.
    [("10%", 25, 3), ("10%", 5, 1), ("50%", 5, 3), ("50%", 1, 1), ("10%", 24, 2), ("12.5%", 20, 3), ("100%", 7, 7)],
)
def test_percentages_are_rounded_half_up(percent: str, of: int, updates: int) -> None:
    assert count(Clock(training_updates=of), percent) == updates


@pytest.mark.parametrize("value", ["1 epochs", "5 samples", "5 tokens", "10%"])
def test_what_needs_the_data_says_so(value: str) -> None:
    with pytest.raises(NeedsData) as error:
        count(Clock(), value)
    assert error.value.key == "k"
    assert count(Clock(), "5 updates") == 5


def test_training_is_no_percentage_of_itself() -> None:
    duration = Duration.parse("10%", "training.duration")
    with pytest.raises(ConfigError, match="itself") as error:
        Clock().updates(duration, "training.duration")
    assert not isinstance(error.value, NeedsData)


def test_warmup_from_zero() -> None:
    # peak x (n + 1) / w: the peak is reached at the last update of the warmup.
    lr = build(ConstantDecay(), 6, warmup=4, peak=0.8)
    assert rates(lr) == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8, 0.8])
    assert lr(3) == 0.8


def test_warmup_from_the_base_rate() -> None:
    # Goyal et al. 2017: from 0.1 to 0.5 in equal steps of 0.4 / 4.
    lr = build(ConstantDecay(), 6, warmup=4, warmup_from=WarmupFrom.base_lr, peak=0.5, base_lr=0.1)
    assert rates(lr) == pytest.approx([0.2, 0.3, 0.4, 0.5, 0.5, 0.5])
    assert lr(3) == 0.5


def test_linear_decay() -> None:
    assert rates(build(LinearDecay(), 6, warmup=2)) == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25])
    assert rates(build(LinearDecay(final=0.2), 4)) == pytest.approx([1.0, 0.8, 0.6, 0.4])


def test_cosine_decay() -> None:
    # (1 + cos(pi x)) / 2 at x = 0, 1/4, 1/2, 3/4.
    quarter = (1 + sqrt(0.5)) / 2
    assert rates(build(CosineDecay(), 4)) == pytest.approx([1.0, quarter, 0.5, 1 - quarter])
    assert rates(build(CosineDecay(final=0.5), 4, peak=2.0)) == pytest.approx([2.0, 1 + quarter, 1.5, 2 - quarter])


def test_step_decay() -> None:
    # Milestones count from the start of training, the warmup included.
    decay = StepDecay(at=["50%", 6], factor=0.1)
    assert rates(build(decay, 8, warmup=2)) == pytest.approx([0.5, 1.0, 1.0, 1.0, 0.1, 0.1, 0.01, 0.01])
    assert rates(build(StepDecay(), 1)) == [1.0]


def test_wsd_decay() -> None:
    # x = 0, 1/4, 1/2, 3/4 over the last four updates; 1 - sqrt(x).
    expected = [0.5, 1.0, 1.0, 1.0, 1.0, 0.5, 1 - sqrt(0.5), 1 - sqrt(0.75)]
    assert rates(build(WsdDecay(decay="50%"), 8, warmup=2)) == pytest.approx(expected)
    linear = build(WsdDecay(decay=2, final=0.5, shape="linear"), 4)
    assert rates(linear) == pytest.approx([1.0, 1.0, 1.0, 0.75])
    assert rates(build(WsdDecay(decay=0), 3)) == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("decay", [LinearDecay(final=0.1), CosineDecay(final=0.1), WsdDecay(decay=2, final=0.1)])
def test_rate_stays_where_the_decay_ends(decay: DecayConfig) -> None:
    lr = build(decay, 5, peak=2.0)
    assert lr(5) == lr(6) == lr(10**9) == pytest.approx(0.2)


def test_milestone_past_the_end_is_never_reached() -> None:
    lr = build(StepDecay(at=[2, 50], factor=0.5), 4)
    assert lr(49) == lr(51) == 0.5
    assert lr.notes() == ["schedule.decay.at: never reached in 4 updates: 50"]


def test_notes_name_a_warmup_start_without_effect() -> None:
    assert build(ConstantDecay(), 4, warmup=2).notes() == []
    start = WarmupFrom.base_lr
    assert "schedule.warmup is 0" in build(ConstantDecay(), 4, warmup_from=start, peak=2.0).notes()[0]
    assert "no warmup" in build(ConstantDecay(), 4, warmup=2, warmup_from=start).notes()[0]
    assert build(ConstantDecay(), 4, warmup=2, warmup_from=start, peak=2.0).notes() == []


DECAYS = [ConstantDecay(), LinearDecay(), CosineDecay(), StepDecay(), WsdDecay(decay=0), WsdDecay(decay="20%")]


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("num_updates", [1, 2, 3])
def test_short_trainings_and_warmups_as_long_as_the_training(decay: DecayConfig, num_updates: int) -> None:
    assert build(decay, num_updates)(0) > 0
    whole = decay if not isinstance(decay, WsdDecay) else WsdDecay(decay=0)
    lr = build(whole, num_updates, warmup="100%")
    assert rates(lr) == pytest.approx([(n + 1) / num_updates for n in range(num_updates)])
    assert 0 <= lr(num_updates) <= 1


@given(
    decay=st.sampled_from(DECAYS),
    # From 20 updates on, a warmup of 75% and a decay of 20% fit in whatever way both are rounded.
    num_updates=st.integers(20, 300),
    warmup=st.integers(0, 75),
    start=st.sampled_from(WarmupFrom),
)
def test_rate_lies_between_zero_and_the_peak(
    decay: DecayConfig, num_updates: int, warmup: int, start: WarmupFrom
) -> None:
    lr = build(decay, num_updates, warmup=f"{warmup}%", warmup_from=start, peak=0.3, base_lr=0.1)
    table = lr.table()
    assert [applied for applied, _ in table] == list(range(num_updates))
    assert all(0 <= rate <= 0.3 + 1e-12 for _, rate in table)
    after = [rate for applied, rate in table if applied >= lr.warmup_updates]
    assert after == sorted(after, reverse=True)


def test_long_table_is_sampled() -> None:
    lr = build(LinearDecay(), 2500)
    table = lr.table()
    applied = [n for n, _ in table]
    assert applied[:1000] == list(range(1000))
    assert len(applied) == 2000
    # 1,500 updates by 1,000 samples: steps of one and two, the last update among them.
    assert {b - a for a, b in pairwise(applied)} == {1, 2}
    assert table[-1] == [2499, lr(2499)]
    assert [n for n, _ in build(LinearDecay(), 1001).table()] == list(range(1001))
    assert [n for n, _ in build(LinearDecay(), 10).table(limit=3)] == [0, 1, 2, 4, 6, 9]


def test_table_depends_on_updates_alone() -> None:
    # The same 20 updates with warmup 10 at 1 and 16 micro-batches, and 40 with 8 on 1, 2 and 4 ranks.
    def table(micro: int, steps: int, degree: int, num_updates: int, warmup: int) -> list[list[float]]:
        plan = BatchPlan.solve(None, micro, steps, degree)
        clock = Clock(WindowTable(10_000, plan.global_batch_size), num_updates)
        schedule = ScheduleConfig(warmup, WarmupFrom.zero, CosineDecay())
        return build_learning_rate(schedule, clock, peak=1.0, base_lr=1.0, num_updates=num_updates).table()

    once = table(2, 1, 1, 20, 10)
    assert once == table(2, 16, 1, 20, 10)
    assert [rate for _, rate in once[:10]] == pytest.approx([0.1 * n for n in range(1, 11)])
    assert table(4, 1, 1, 40, 8) == table(4, 1, 2, 40, 8) == table(4, 1, 4, 40, 8)


def test_durations_of_the_schedule_may_be_epochs() -> None:
    # 96 samples by 32 are 3 updates an epoch.
    clock = Clock(WindowTable(96, 32), 18)
    schedule = ScheduleConfig("1 epochs", WarmupFrom.zero, StepDecay(at=["2 epochs", "4 epochs"]))
    lr = build_learning_rate(schedule, clock, peak=1.0, base_lr=1.0, num_updates=18)
    assert lr.warmup_updates == 3
    assert [n for n in range(1, 18) if lr(n) < lr(n - 1)] == [6, 12]


# 4,800 samples of 10 tokens an epoch, six epochs: half an epoch of warmup, and what follows in each unit
SAME_LENGTHS = {"epochs": ("0.5 epochs", "2 epochs"), "samples": ("2400 samples", "9600 samples")}
SAME_LENGTHS["tokens"] = ("24000 tokens", "96000 tokens")


def rate_of(batch: int, unit: str, decay: str, samples: int = 4800) -> LearningRate:
    warmup, two_epochs = SAME_LENGTHS[unit]
    windows = WindowTable(samples, batch)
    tokens = [Fraction(24_000), Fraction(96_000)]
    at = count_updates(np.full(samples, 10), windows, tokens, seed=0, shuffle=False)
    num_updates = 6 * windows.updates_per_epoch
    clock = Clock(windows, num_updates, {Fraction(key): value for key, value in at.items()})
    kinds: dict[str, DecayConfig] = {
        "constant": ConstantDecay(),
        "linear": LinearDecay(),
        "cosine": CosineDecay(0.1),
        "step": StepDecay(at=[two_epochs, "50%"]),
        "wsd": WsdDecay(decay=two_epochs),
    }
    schedule = ScheduleConfig(warmup, WarmupFrom.base_lr, kinds[decay])
    return build_learning_rate(schedule, clock, peak=1.0, base_lr=0.25, num_updates=num_updates)


@pytest.mark.parametrize("unit", list(SAME_LENGTHS))
@pytest.mark.parametrize("decay", ["constant", "linear", "cosine", "step", "wsd"])
def test_at_equal_samples_the_rate_is_the_same_for_any_batch(decay: str, unit: str) -> None:
    finest = rate_of(8, unit, decay)
    for batch in (16, 48, 96, 240, 480):
        rate = rate_of(batch, unit, decay)
        # the warmup gives the rate of the window that ends there, the decay that of the window that starts there
        for samples in range(batch, 2401, batch):
            assert rate(samples // batch - 1) == pytest.approx(finest(samples // 8 - 1), rel=1e-12)
        for samples in range(2400, 6 * 4800, batch):
            assert rate(samples // batch) == pytest.approx(finest(samples // 8), rel=1e-12)
        assert rate(6 * 4800 // batch) == pytest.approx(finest(6 * 4800 // 8), rel=1e-12)


@pytest.mark.parametrize("decay", ["constant", "linear", "cosine", "step", "wsd"])
def test_batches_that_do_not_divide_meet_at_the_end_of_every_epoch(decay: str) -> None:
    whole = {"epochs": ("1 epochs", "2 epochs")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SAME_LENGTHS, "epochs", whole["epochs"])
        one = rate_of(1, "epochs", decay, samples=101)
        for batch in (2, 7, 33, 101, 500):
            rate, epoch = rate_of(batch, "epochs", decay, samples=101), -(-101 // batch)
            meets = [rate(epochs * epoch) for epochs in range(1, 7)]
            assert meets == pytest.approx([one(epochs * 101) for epochs in range(1, 7)], rel=1e-12)


def test_momentum_rises_with_the_rate() -> None:
    schedule = ScheduleConfig("4 updates", decay=ConstantDecay(), warmup_momentum=0.5)
    momentum = build_momentum(schedule, {"momentum": 0.9}, build(ConstantDecay(), 10, warmup=4))
    assert momentum is not None
    assert [momentum(n) for n in range(6)] == pytest.approx([0.6, 0.7, 0.8, 0.9, 0.9, 0.9])
    assert momentum(3) == momentum(100) == 0.9
    assert momentum.line() == "momentum rises from 0.5 to 0.9 in 4 updates of warmup"
    without = ScheduleConfig(4, decay=ConstantDecay())
    assert build_momentum(without, {"momentum": 0.9}, build(ConstantDecay(), 10, warmup=4)) is None


@pytest.mark.parametrize(
    ("start", "optimizer", "updates", "says"),
    [
        (-0.1, {"momentum": 0.9}, 4, "from 0 to below 1"),
        (1.0, {"momentum": 0.9}, 4, "from 0 to below 1"),
        (float("nan"), {"momentum": 0.9}, 4, "from 0 to below 1"),
        (0.5, {"betas": [0.9, 0.95]}, 4, "no momentum"),
        (0.5, {"momentum": 0.0}, 4, "no momentum"),
        (0.5, {"momentum": 0.9}, 0, "schedule.warmup is 0"),
    ],
)
def test_momentum_that_cannot_rise(start: float, optimizer: dict[str, object], updates: int, says: str) -> None:
    schedule = ScheduleConfig(updates, decay=ConstantDecay(), warmup_momentum=start)
    with pytest.raises(ConfigError, match=says) as error:
        build_momentum(schedule, optimizer, build(ConstantDecay(), 10, warmup=updates))
    assert error.value.key == "schedule.warmup_momentum"


@pytest.mark.parametrize(
    ("decay", "warmup", "key", "says"),
    [
        (ConstantDecay(), 11, "schedule.warmup", "11 updates of warmup are more than the 10"),
        (ConstantDecay(), "x", "schedule.warmup", "no duration"),
        (WsdDecay(decay=6), 5, "schedule.decay.decay", "5 updates of warmup and 6 of decay are more than the 10"),
        (WsdDecay(decay="-1 epochs"), 0, "schedule.decay.decay", "negative"),
        (WsdDecay(shape="linaer"), 0, "schedule.decay.shape", "did you mean 'linear'"),
        (WsdDecay(final=1.5), 0, "schedule.decay.final", "share of the peak"),
        (LinearDecay(final=-0.1), 0, "schedule.decay.final", "share of the peak"),
        (CosineDecay(final=float("nan")), 0, "schedule.decay.final", "share of the peak"),
        (StepDecay(factor=0.0), 0, "schedule.decay.factor", "above 0"),
        (StepDecay(at=[5, 3]), 0, "schedule.decay.at[1]", "update 3 after update 5"),
        (StepDecay(at=["soon"]), 0, "schedule.decay.at[0]", "no duration"),
        (DecayConfig("cosin"), 0, "schedule.decay.name", "did you mean 'cosine'"),
    ],
)
def test_schedule_that_cannot_work(decay: DecayConfig, warmup: object, key: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as error:
        build(decay, 10, warmup=warmup)
    assert error.value.key == key


def test_schedule_that_waits_for_the_data() -> None:
    schedule = ScheduleConfig("1 epochs", WarmupFrom.zero, ConstantDecay())
    with pytest.raises(NeedsData) as error:
        build_learning_rate(schedule, Clock(None, 10), peak=1.0, base_lr=1.0, num_updates=10)
    assert error.value.key == "schedule.warmup"


def test_training_of_no_updates_is_refused() -> None:
    with pytest.raises(ConfigError) as error:
        build(ConstantDecay(), 0)
    assert error.value.key == "training.duration"
