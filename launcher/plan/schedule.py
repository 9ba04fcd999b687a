"""The learning rate of every update.

The learning rate is a function of the updates applied so far and of nothing else: not of micro-batches, ranks or
updates that were skipped.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import cos, isfinite, pi, sqrt
from typing import Any, Literal

from launcher.config.choices import WarmupFrom
from launcher.config.decays import ConstantDecay, CosineDecay, DecayConfig, LinearDecay, StepDecay, WsdDecay
from launcher.config.schema import ScheduleConfig
from launcher.errors import ConfigError, nearest
from launcher.plan.durations import TRAINING_DURATION, Clock, Duration, Measure, by_updates

Shape = Literal["linear", "cosine", "sqrt"]


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
    measure: Measure = by_updates
    """What of it passes evenly: updates, or samples where a ramp makes updates of different sizes."""

    def share(self, n: int) -> float:
        """The rate as a share of the peak after `n` updates."""
        if n >= self.stop:
            return self.final
        if n <= self.start:
            return 1.0
        start = self.measure(self.start)
        x = (self.measure(n) - start) / (self.measure(self.stop) - start)
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
    measure: Measure = by_updates
    """What rises evenly in the warmup, as in a Descent."""
    follow: Callable[[int], float] | None = None
    """For the number of an update: what its peak is of that of a full window, where the rate follows a ramp."""

    def __call__(self, applied: int) -> float:
        """The rate of the next update once `applied` updates have changed parameters.

        The warmup rises in equal steps to the peak at its last update (from base_lr: Goyal et al. 2017,
        arXiv:1706.02677, section 2.2). Past num_updates the rate stays where the decay ends.
        """
        peak = self.peak if self.follow is None else self.peak * self.follow(applied + 1)
        if applied < self.warmup_updates:
            risen = self.risen(applied)
            # A weighted mean and not start + difference x risen, so that the last step is the peak to the bit.
            return self.start * (1 - risen) + peak * risen
        return peak if self.decay is None else peak * self.decay.share(min(applied, self.num_updates))

    @property
    def start(self) -> float:
        """Where the warmup starts."""
        return self.base_lr if self.warmup_from is WarmupFrom.base_lr else 0.0

    def risen(self, applied: int) -> float:
        """How much of the warmup the next update has, from above 0 to 1."""
        if applied >= self.warmup_updates:
            return 1.0
        return self.measure(applied + 1) / self.measure(self.warmup_updates)

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
        elif self.warmup_from is WarmupFrom.base_lr and (last := self(self.warmup_updates - 1)) < self.start:
            notes.append(f"schedule.warmup_from=base_lr: the rate falls in the warmup, from {self.start:g} to {last:g}")
        elif self.warmup_from is WarmupFrom.base_lr and self.peak == self.base_lr and self.follow is None:
            notes.append("schedule.warmup_from=base_lr: no warmup, since the scaled rate is the base rate")
        if isinstance(self.decay, Steps):
            late = [str(milestone) for milestone in self.decay.milestones if milestone >= self.num_updates]
            if late:
                after = ", ".join(late)
                notes.append(f"schedule.decay.at: never reached in {self.num_updates} updates: {after}")
        return notes


@dataclass(frozen=True)
class MomentumWarmup:
    """The momentum as a function of the updates applied so far: from `start` to its own value, as `rate` rises."""

    start: float
    own: float
    rate: LearningRate

    def __call__(self, applied: int) -> float:
        """The momentum of the next update once `applied` updates have changed parameters."""
        risen = self.rate.risen(applied)
        return self.start * (1 - risen) + self.own * risen

    def line(self) -> str:
        """What it does, for people to read."""
        return f"momentum rises from {self.start:g} to {self.own:g} in {self.rate.warmup_updates} updates of warmup"


def build_momentum(schedule: ScheduleConfig, optimizer: Mapping[str, Any], rate: LearningRate) -> MomentumWarmup | None:
    """How the momentum rises with the rate; None: it doesn't.

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
    if rate.warmup_updates == 0:
        raise ConfigError(key, start, "has no effect: schedule.warmup is 0", hint="schedule.warmup='3 epochs'")
    return MomentumWarmup(start, float(own), rate)


def build_learning_rate(
    schedule: ScheduleConfig,
    clock: Clock,
    *,
    peak: float,
    base_lr: float,
    num_updates: int,
    whole: Measure = by_updates,
    follow: Callable[[int], float] | None = None,
) -> LearningRate:
    """The learning rate that the configuration's schedule stands for, over a training of `num_updates`.

    Args:
        whole: what passes evenly along the whole training.
        follow: how the peak follows a ramp.

    Raises:
        NeedsData: a duration can't be counted in updates yet.
        ConfigError: a duration or a value that can't work, or parts that are longer than the training.
    """
    if num_updates < 1:
        raise ConfigError(TRAINING_DURATION, f"{num_updates} updates", "must be at least 1 update")
    length = Duration.parse(schedule.warmup, "schedule.warmup")
    warmup = clock.updates(length, "schedule.warmup")
    if warmup > num_updates:
        problem = f"{warmup} updates of warmup are more than the {num_updates} of the training"
        raise ConfigError("schedule.warmup", schedule.warmup, problem, hint=f"at most {num_updates} updates")
    decay = _decay(schedule.decay, clock, warmup, num_updates, whole)
    rises = clock.measure(length)
    return LearningRate(peak, base_lr, warmup, schedule.warmup_from, decay, num_updates, rises, follow)


def _decay(config: DecayConfig, clock: Clock, warmup: int, num_updates: int, whole: Measure) -> Descent | Steps | None:
    match config:
        case ConstantDecay():
            return None
        case LinearDecay():
            return Descent("linear", warmup, num_updates, _final(config.final), whole)
        case CosineDecay():
            return Descent("cosine", warmup, num_updates, _final(config.final), whole)
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
    duration = Duration.parse(config.decay, key)
    start = clock.last(duration, key, num_updates)
    if start < warmup:
        length = num_updates - start
        problem = f"{warmup} updates of warmup and {length} of decay are more than the {num_updates} of the training"
        raise ConfigError(key, config.decay, problem, hint=f"at most {num_updates - warmup} updates")
    shape: Shape = "sqrt" if config.shape == "sqrt" else "linear"
    return Descent(shape, start, num_updates, _final(config.final), clock.measure(duration))


def _final(final: float) -> float:
    if not 0 <= final <= 1:
        raise ConfigError("schedule.decay.final", final, "must be a share of the peak, from 0 to 1")
    return final
