"""Durations, and the learning rate of every update.

The learning rate is a function of the updates applied so far and of nothing else: not of micro-batches, ranks or
updates that were skipped.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from math import cos, floor, isfinite, pi, sqrt
from typing import Any, Literal, get_args

from launcher.config.choices import WarmupFrom
from launcher.config.decays import ConstantDecay, CosineDecay, DecayConfig, LinearDecay, StepDecay, WsdDecay
from launcher.config.schema import ScheduleConfig
from launcher.errors import ConfigError, nearest
from launcher.plan.batch import WindowTable, exact_number

TRAINING_DURATION = "training.duration"

Unit = Literal["updates", "epochs", "samples", "tokens", "%"]
Shape = Literal["linear", "cosine", "sqrt"]

_UNITS: dict[str, Unit] = {spelling: unit for unit in get_args(Unit) for spelling in (unit, unit.removesuffix("s"))}
_FORM = re.compile(r"([+-]?[0-9.]+(?:e[+-]?[0-9]+)?)\s*(.*)", re.DOTALL)
_ALLOWED = "a duration is `90 epochs`, `2000 updates`, `1e9 tokens`, `1e6 samples` or `10%`; a bare integer is updates"


class NeedsData(ConfigError):
    """The number can't be known yet: it takes the length of the data, its tokens, or a duration that waits for them."""


@dataclass(frozen=True)
class Duration:
    """How long something takes, as the user said it."""

    value: Fraction
    unit: Unit

    @classmethod
    def parse(cls, value: object, key: str) -> "Duration":
        """The duration that `value` of the key `key` stands for; zero is allowed.

        Raises:
            ConfigError: not a duration, negative, an unknown unit, or a part of an update, sample or token.
        """
        form = _FORM.fullmatch(str(value).strip().lower())
        number = None if isinstance(value, bool) or form is None else exact_number(form[1])
        if form is None or number is None:
            raise ConfigError(key, "null" if value is None else value, "is no duration", hint=_ALLOWED)
        unit = _UNITS.get(form[2] or "updates")
        if unit is None:
            hint = "; ".join(filter(None, [nearest(form[2], _UNITS), _ALLOWED]))
            raise ConfigError(key, value, f"has the unknown unit '{form[2]}'", hint=hint)
        if number < 0:
            raise ConfigError(key, value, "is negative", hint=_ALLOWED)
        if number.denominator != 1 and unit not in ("epochs", "%"):
            raise ConfigError(key, value, f"must be a whole number of {unit}", hint=_ALLOWED)
        return cls(number, unit)

    def __str__(self) -> str:
        number = str(self.value) if self.value.denominator == 1 else f"{float(self.value):g}"
        return f"{number}%" if self.unit == "%" else f"{number} {self.unit}"


@dataclass(frozen=True)
class Clock:
    """What durations are measured with; what is None or missing isn't known yet."""

    windows: WindowTable | None = None
    training_updates: int | None = None
    """Updates of the whole training, which percentages are of."""
    updates_at_tokens: Mapping[Fraction | int, int] = field(default_factory=dict)
    """For each number of tokens that a duration names: the number of windows that reaches it."""

    def updates(self, duration: Duration, key: str) -> int:
        """The number of updates, whole windows, after which `duration` has passed.

        Raises:
            NeedsData: what the duration is measured with isn't known yet.
            ConfigError: the duration of the training is a percentage of itself.
        """
        value = duration.value
        if duration.unit == "updates":
            return int(value)
        if duration.unit == "%":
            if key == TRAINING_DURATION:
                raise ConfigError(key, duration, "can't be a percentage of itself", hint=_ALLOWED)
            if self.training_updates is None:
                raise NeedsData(key, duration, f"takes {TRAINING_DURATION} in updates, which isn't known yet")
            return floor(value * self.training_updates / 100 + Fraction(1, 2))
        if duration.unit == "tokens":
            if value == 0:
                return 0
            if value not in self.updates_at_tokens:
                raise NeedsData(key, duration, "takes the number of tokens of every window, which isn't known yet")
            return self.updates_at_tokens[value]
        if self.windows is None:
            raise NeedsData(key, duration, "takes the length of data.train, which isn't known yet")
        if duration.unit == "epochs":
            return self.windows.updates_for_epochs(value)
        return self.windows.updates_for_samples(int(value))


@dataclass(frozen=True)
class Descent:
    """At the peak until `start`, then along `shape` down to `final` (a share of the peak) at `stop`, in updates.

    With x from 0 to 1 in between: linear 1 - x, cosine (1 + cos(pi x)) / 2 (Loshchilov and Hutter 2017,
    arXiv:1608.03983, equation 5), sqrt 1 - sqrt(x) (Haegele et al. 2024, arXiv:2405.18392).
    """

    shape: Shape
    start: int
    stop: int
    final: float

    def share(self, n: int) -> float:
        """The rate as a share of the peak after `n` updates."""
        if n >= self.stop:
            return self.final
        if n <= self.start:
            return 1.0
        x = (n - self.start) / (self.stop - self.start)
        left = {"linear": 1 - x, "cosine": (1 + cos(pi * x)) / 2, "sqrt": 1 - sqrt(x)}[self.shape]
        return self.final + (1 - self.final) * left


@dataclass(frozen=True)
class Steps:
    """The peak times `factor` for each of the `milestones`, in updates from the start of training, that has passed."""

    milestones: tuple[int, ...]
    factor: float

    def share(self, n: int) -> float:
        """The rate as a share of the peak after `n` updates."""
        return float(self.factor ** sum(milestone <= n for milestone in self.milestones))


@dataclass(frozen=True)
class LearningRate:
    """The learning rate as a function of the updates applied so far; every length is in updates."""

    peak: float
    base_lr: float
    """The rate before it was scaled to the batch, where a warmup from `base_lr` starts."""
    warmup_updates: int
    warmup_from: WarmupFrom
    decay: Descent | Steps | None
    """What follows the warmup; None: the peak, for good."""
    num_updates: int

    def __call__(self, applied: int) -> float:
        """The rate of the next update once `applied` updates have changed parameters.

        The warmup rises in equal steps to the peak at its last update (from base_lr: Goyal et al. 2017,
        arXiv:1706.02677, section 2.2). Past num_updates the rate stays where the decay ends.
        """
        if applied < self.warmup_updates:
            risen = (applied + 1) / self.warmup_updates
            start = self.base_lr if self.warmup_from is WarmupFrom.base_lr else 0.0
            # A weighted mean and not start + difference x risen, so that the last step is the peak to the bit.
            return start * (1 - risen) + self.peak * risen
        return self.peak if self.decay is None else self.peak * self.decay.share(min(applied, self.num_updates))

    def table(self, limit: int = 1000) -> list[list[float]]:
        """Pairs [applied, rate]: each of the first `limit` updates, then as many of the rest, evenly spaced, the last
        one among them."""
        rest = max(0, self.num_updates - limit)
        samples = min(limit, rest)
        every = list(range(min(limit, self.num_updates)))
        spaced = [limit + (i + 1) * rest // samples - 1 for i in range(samples)]
        return [[applied, self(applied)] for applied in every + spaced]

    def notes(self) -> list[str]:
        """What of the schedule has no effect, for people to read."""
        notes = []
        if self.warmup_from is WarmupFrom.base_lr and self.warmup_updates == 0:
            notes.append("schedule.warmup_from=base_lr has no effect: schedule.warmup is 0")
        elif self.warmup_from is WarmupFrom.base_lr and self.peak == self.base_lr:
            notes.append("schedule.warmup_from=base_lr: no warmup, since the scaled rate is the base rate")
        if isinstance(self.decay, Steps):
            late = [str(milestone) for milestone in self.decay.milestones if milestone >= self.num_updates]
            if late:
                after = ", ".join(late)
                notes.append(f"schedule.decay.at: never reached in {self.num_updates} updates: {after}")
        return notes


@dataclass(frozen=True)
class MomentumWarmup:
    """The momentum as a function of the updates applied so far: from `start` to its own value in `updates`, as the rate
    rises."""

    start: float
    own: float
    updates: int

    def __call__(self, applied: int) -> float:
        """The momentum of the next update once `applied` updates have changed parameters."""
        risen = min((applied + 1) / self.updates, 1.0) if self.updates else 1.0
        return self.start * (1 - risen) + self.own * risen

    def line(self) -> str:
        """What it does, for people to read."""
        return f"momentum rises from {self.start:g} to {self.own:g} in {self.updates} updates of warmup"


def build_momentum(
    schedule: ScheduleConfig, optimizer: Mapping[str, Any], warmup_updates: int
) -> MomentumWarmup | None:
    """How the momentum rises; None: it doesn't.

    Raises:
        ConfigError: a start that is none, an optimizer without momentum, or no warmup.
    """
    start, own, key = schedule.warmup_momentum, optimizer.get("momentum"), "schedule.warmup_momentum"
    if start is None:
        return None
    if not 0 <= start < 1:
        raise ConfigError(key, start, "must be a number from 0 to below 1; null: the momentum doesn't change")
    if isinstance(own, bool) or not isinstance(own, int | float) or not own > 0:
        raise ConfigError(key, start, "has no effect: the optimizer has no momentum", hint="optimizer.momentum=0.9")
    if warmup_updates == 0:
        raise ConfigError(key, start, "has no effect: schedule.warmup is 0", hint="schedule.warmup='3 epochs'")
    return MomentumWarmup(start, float(own), warmup_updates)


def build_learning_rate(
    schedule: ScheduleConfig, clock: Clock, *, peak: float, base_lr: float, num_updates: int
) -> LearningRate:
    """The learning rate that the configuration's schedule stands for, over a training of `num_updates`.

    Raises:
        NeedsData: a duration can't be counted in updates yet.
        ConfigError: a duration or a value that can't work, or parts that are longer than the training.
    """
    if num_updates < 1:
        raise ConfigError(TRAINING_DURATION, f"{num_updates} updates", "must be at least 1 update")
    warmup = clock.updates(Duration.parse(schedule.warmup, "schedule.warmup"), "schedule.warmup")
    if warmup > num_updates:
        problem = f"{warmup} updates of warmup are more than the {num_updates} of the training"
        raise ConfigError("schedule.warmup", schedule.warmup, problem, hint=f"at most {num_updates} updates")
    decay = _decay(schedule.decay, clock, warmup, num_updates)
    return LearningRate(peak, base_lr, warmup, schedule.warmup_from, decay, num_updates)


def _decay(config: DecayConfig, clock: Clock, warmup: int, num_updates: int) -> Descent | Steps | None:
    match config:
        case ConstantDecay():
            return None
        case LinearDecay():
            return Descent("linear", warmup, num_updates, _final(config.final))
        case CosineDecay():
            return Descent("cosine", warmup, num_updates, _final(config.final))
        case StepDecay():
            return _steps(config, clock)
        case WsdDecay():
            return _wsd(config, clock, warmup, num_updates)
    known = ["constant", "linear", "cosine", "step", "wsd"]
    problem = f"must be one of {', '.join(known)}"
    raise ConfigError("schedule.decay.name", config.name, problem, hint=nearest(config.name, known))


def _steps(config: StepDecay, clock: Clock) -> Steps:
    if not isfinite(config.factor) or config.factor <= 0:
        raise ConfigError("schedule.decay.factor", config.factor, "must be a finite number above 0")
    milestones: list[int] = []
    for index, value in enumerate(config.at):
        key = f"schedule.decay.at[{index}]"
        milestone = clock.updates(Duration.parse(value, key), key)
        # Equal is fine: in a short training two percentages round to the same update.
        if milestones and milestone < milestones[-1]:
            problem = f"must not lie before the one ahead of it: update {milestone} after update {milestones[-1]}"
            raise ConfigError(key, value, problem)
        milestones.append(milestone)
    return Steps(tuple(milestones), config.factor)


def _wsd(config: WsdDecay, clock: Clock, warmup: int, num_updates: int) -> Descent:
    key, shapes = "schedule.decay.decay", ("sqrt", "linear")
    if config.shape not in shapes:
        problem = f"must be one of {', '.join(shapes)}"
        raise ConfigError("schedule.decay.shape", config.shape, problem, hint=nearest(config.shape, shapes))
    length = clock.updates(Duration.parse(config.decay, key), key)
    if warmup + length > num_updates:
        problem = f"{warmup} updates of warmup and {length} of decay are more than the {num_updates} of the training"
        raise ConfigError(key, config.decay, problem, hint=f"at most {num_updates - warmup} updates")
    shape: Shape = "sqrt" if config.shape == "sqrt" else "linear"
    return Descent(shape, num_updates - length, num_updates, _final(config.final))


def _final(final: float) -> float:
    if not 0 <= final <= 1:
        raise ConfigError("schedule.decay.final", final, "must be a share of the peak, from 0 to 1")
    return final
