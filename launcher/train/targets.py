"""Whether a run reaches what it is meant to come to, and whether it can."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.config.targets import HOUR, TargetsConfig, device_hours
from launcher.errors import ConfigError
from launcher.plan.targets import needed_rate
from launcher.train.evaluate import Validation

WARM = 3
"""First updates of an attempt, whose times aren't those of the others."""
MEASURED = 10
"""Updates after them that a rate is measured over."""


def is_reached(targets: TargetsConfig, validation: Validation) -> bool:
    """Whether a validation has the loss and the metric that are stated.

    Raises:
        ConfigError: the task gives no metric of that name.
    """
    loss, metric = targets.validation_loss, targets.metric
    holds = [] if loss is None else [validation.loss <= loss]
    if metric.name is not None:
        if metric.name not in validation.metrics:
            known = ", ".join(validation.metrics) or "none"
            raise ConfigError("targets.metric.name", metric.name, f"the task gives no such metric: {known}")
        value = validation.metrics[metric.name]
        holds.append(value >= metric.at_least if metric.at_least is not None else value <= (metric.at_most or 0.0))
    return bool(holds) and all(holds)


def came_to(targets: TargetsConfig, validation: Validation) -> str:
    """What a validation that reaches them found, in words."""
    said = [] if targets.validation_loss is None else [f"validation loss {validation.loss:.6g}"]
    name = targets.metric.name
    said += [] if name is None else [f"{name} {validation.metrics[name]:.6g}"]
    return f"{', '.join(said)} (target: {' and '.join(targets.quality())})"


def judged_after(ramp: Sequence[Mapping[str, Any]] | None, num_updates: int) -> int:
    """After which update the rate is that of the rest of the training: the last at which a window of the ramp, whose
    stages the plan has, becomes another and enough updates follow to measure it."""
    ends = [stage["last_update"] for stage in ramp or ()]
    return max((end for end in ends if end + WARM + MEASURED <= num_updates), default=0)


@dataclass
class Outlook:
    """Says once in an attempt whether the rate and the device-hours can be met, from its first updates that are like
    the rest."""

    targets: TargetsConfig
    world_size: int
    device_seconds: Callable[[], float]
    """What the run has used by now, over all of its attempts."""
    after: int = 0
    """The update after which they are: smaller windows of a ramp have another rate."""
    _updates: int = 0
    _samples: float = 0.0
    _seconds: float = 0.0

    def add(self, update: int, samples: int, seconds: float, left: int) -> list[str]:
        """Takes an update, after which `left` samples are left of the training. Returns what there is to say."""
        if update <= self.after:
            return []
        self._updates += 1
        if self._updates > WARM:
            self._samples, self._seconds = self._samples + samples, self._seconds + seconds
        if self._updates != WARM + MEASURED:
            return []
        rate, lines = self._samples / self._seconds, []
        if self.targets.samples_per_s is not None:
            lines.append(
                f"{rate:.4g} samples/s; {_met('samples_per_s', self.targets, rate >= self.targets.samples_per_s)}"
            )
        if self.targets.device_hours is not None:
            lines.append(self._of_hours(rate, left, self.targets.device_hours))
        return lines

    def _of_hours(self, rate: float, left: int, hours: float) -> str:
        used = self.device_seconds() / HOUR
        whole = used + device_hours(left / rate, self.world_size)
        needed = needed_rate(left, hours - used, self.world_size)
        return (
            f"the run takes about {whole:.3g} device-hours at {rate:.4g} samples/s, without validations and saving; "
            f"{_met('device_hours', self.targets, whole <= hours)} ({needed:.4g} samples/s from here on)"
        )


def _met(name: str, targets: TargetsConfig, is_met: bool) -> str:
    how = "can be met" if is_met else "CAN'T be met"
    return f"targets.{name}={getattr(targets, name):g} {how}"
