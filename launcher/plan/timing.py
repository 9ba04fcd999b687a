"""What of a run is measured in updates: its length, its learning rate, and what happens every so often."""

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from launcher.config.schema import Config
from launcher.config.times import is_time
from launcher.errors import ConfigError
from launcher.plan.batch import BatchPlan
from launcher.plan.durations import TRAINING_DURATION, Clock, Duration, Every, NeedsData
from launcher.plan.facts import Facts
from launcher.plan.ramp import check_ramp, follows_ramp, ramp_stages, ramp_table
from launcher.plan.schedule import LearningRate, MomentumWarmup, build_learning_rate, build_momentum
from launcher.plan.windows import RAMP, WindowTable


@dataclass(frozen=True)
class Timing:
    """What is measured in updates; None where it takes data that wasn't seen."""

    num_updates: int | None = None
    rate: LearningRate | None = None
    momentum: MomentumWarmup | None = None
    validate_every: Every | None = None
    log_every: Every | None = None
    checkpoint_every: Every | None = None
    noise_scale_every: Every | None = None

    @property
    def lines(self) -> list[str]:
        """What beside the rate changes with it, for people to read."""
        return [] if self.momentum is None else [self.momentum.line()]

    def notes(self, windows: WindowTable | None) -> list[str]:
        """What of it has no effect, for people to read."""
        notes = [] if self.rate is None else self.rate.notes()
        if windows is not None and windows.ramp and windows.stage_ends[-1] >= (self.num_updates or 0):
            last = f"update {windows.stage_ends[-1]} of {self.num_updates}"
            notes.append(
                f"{RAMP}: a window of {windows.global_batch_size} samples never comes: the ramp ends at {last}"
            )
        return notes

    def samples(self, windows: WindowTable | None) -> int | None:
        """Of the whole training."""
        return None if windows is None or self.num_updates is None else windows.samples_after(self.num_updates)

    def fields(self, config: Config, windows: WindowTable | None) -> dict[str, Any]:
        """The fields of the plan that follow from it."""
        return {
            "samples_per_epoch": windows.samples_used_per_epoch if windows else None,
            "updates_per_epoch": windows.updates_per_epoch if windows else None,
            "num_updates": self.num_updates,
            "num_samples": self.samples(windows),
            "warmup_updates": self.rate.warmup_updates if self.rate else None,
            "validate_every_updates": self.validate_every.updates if self.validate_every else None,
            "log_every_updates": self.log_every.updates if self.log_every else None,
            "checkpoint_every_updates": self.checkpoint_every.updates if self.checkpoint_every else None,
            "noise_scale_every_updates": self.noise_scale_every.updates if self.noise_scale_every else None,
            "lr_table": self.rate.table() if self.rate else None,
            "ramp": ramp_table(config, windows),
        }


def windows_of(config: Config, facts: Facts, batch: BatchPlan) -> WindowTable | None:
    """Which window lies where; None while the length of the training set isn't known.

    Raises:
        ConfigError: a ramp that can't work.
    """
    check_ramp(config)
    if facts.samples is None:
        return None
    return table_of(config, facts.samples, batch.global_batch_size, facts.updates_at_tokens)


def table_of(
    config: Config,
    samples: int,
    global_batch_size: int,
    updates_at_tokens: Mapping[str, int],
    *,
    stages: int | None = None,
) -> WindowTable:
    """Which window of a training set of `samples` lies where.

    Args:
        updates_at_tokens: as in the facts, for ends of a ramp that are said in tokens.
        stages: how many of the ramp's count; None: all of them.
    """
    ramp = ramp_stages(config, updates_at_tokens, stages)
    return WindowTable(samples, global_batch_size, config.data.drop_last, ramp)


def make_timing(config: Config, facts: Facts, windows: WindowTable | None, *, peak: float) -> Timing:
    """The lengths of this run in updates, and its rate up to `peak`.

    Raises:
        ConfigError: a duration or a value that can't work.
    """
    training = config.training
    duration = Duration.parse(training.duration, TRAINING_DURATION)
    tokens: dict[Fraction | int, int] = {Fraction(key): value for key, value in facts.updates_at_tokens.items()}
    try:
        num_updates = Clock(windows, None, tokens).updates(duration, TRAINING_DURATION)
        if num_updates < 1:
            raise ConfigError(TRAINING_DURATION, training.duration, "must be at least one update")
        clock = Clock(windows, num_updates, tokens, counts_samples=duration.unit != "updates")
        validate = _every(clock, training.validate_every, "training.validate_every")
        log = _every(clock, training.log_every, "training.log_every")
        every = config.checkpoint.every
        noise = _every(clock, training.noise_scale, "training.noise_scale")
        save = None if is_time(every) else _every(clock, every, "checkpoint.every", or_time=True)
        rate = build_learning_rate(
            config.schedule,
            clock,
            peak=peak,
            base_lr=float(config.optimizer["lr"]),
            num_updates=num_updates,
            whole=clock.measure(duration),
            follow=follows_ramp(config.scaling, windows),
        )
    except NeedsData:
        if facts.samples is not None:
            raise
        return Timing()
    _check_warmups(config, rate)
    momentum = build_momentum(config.schedule, config.optimizer, rate)
    return Timing(num_updates, rate, momentum, validate, log, save, noise)


def _every(clock: Clock, value: Any, key: str, *, or_time: bool = False) -> Every | None:
    """An interval; None stays. `or_time`: as in Duration.parse. Raises ConfigError for one of nothing."""
    if value is None:
        return None
    duration = Duration.parse(value, key, or_time=or_time)
    if not duration.value:
        raise ConfigError(key, value, "is no interval", hint="1 is after every update")
    return clock.every(duration, key)


def _check_warmups(config: Config, rate: LearningRate) -> None:
    for index, group in enumerate(config.optimizer["groups"]):
        if group["warmup_from"] is not None and rate.warmup_updates == 0:
            key, hint = f"optimizer.groups[{index}].warmup_from", "schedule.warmup='3 epochs'"
            raise ConfigError(key, group["warmup_from"], "has no effect: schedule.warmup is 0", hint=hint)
