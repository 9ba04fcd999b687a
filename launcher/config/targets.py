"""What a run is meant to come to, stated before it starts."""

import math
from dataclasses import dataclass, field
from typing import Any

from launcher.errors import ConfigError

HOUR = 3600.0


@dataclass
class MetricTargetConfig:
    name: str | None = None
    """A metric of the validation that the run is meant to reach, by the name that the task gives it; null: none."""
    at_least: float | None = None
    """Where it is reached, for a metric that rises; this or at_most."""
    at_most: float | None = None
    """Where it is reached, for one that falls."""


@dataclass
class TargetsConfig:
    validation_loss: float | None = None
    """The validation loss that the run is meant to come down to; null: none is stated."""
    metric: MetricTargetConfig = field(default_factory=MetricTargetConfig)
    """A metric that it is meant to reach. With a loss as well both have to hold in one validation."""
    stop_when_reached: bool = False
    """Whether the run ends, finished and with its model, at the first validation that reaches the loss and the metric.
    It ends as if the training's duration had ended there; the learning rate is planned for all of it."""
    device_hours: float | None = None
    """What the run may take of its devices, over all of its attempts: ranks times hours from the start of the first
    agent; when it is used up the run stops with a checkpoint (exit 75). null: no bound."""
    samples_per_s: float | None = None
    """The rate that is expected; the run says once whether it has it."""

    @property
    def states_quality(self) -> bool:
        """Whether a loss or a metric is stated."""
        return self.validation_loss is not None or self.metric.name is not None

    def quality(self) -> list[str]:
        """The loss and the metric that are stated, in words."""
        metric = self.metric
        said = [] if self.validation_loss is None else [f"validation loss at most {self.validation_loss:g}"]
        if metric.name is not None:
            bound = f"at least {metric.at_least:g}" if metric.at_least is not None else f"at most {metric.at_most:g}"
            said.append(f"{metric.name} {bound}")
        return said


def device_hours(seconds: float, world_size: int) -> float:
    """What a run uses of its devices in so many seconds: each rank has one."""
    return seconds * world_size / HOUR


def check_targets(targets: TargetsConfig, *, is_validated: bool) -> None:
    """That targets can be reached and looked at. Raises ConfigError."""
    metric = targets.metric
    loss = ("targets.validation_loss", targets.validation_loss)
    bounds = [("targets.metric.at_least", metric.at_least), ("targets.metric.at_most", metric.at_most)]
    for key, value in (loss, *bounds):
        if value is not None and not math.isfinite(value):
            raise ConfigError(key, value, "must be a finite number; null: none is stated")
    for name in ("device_hours", "samples_per_s"):
        value = getattr(targets, name)
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"targets.{name}", value, "must be a number above 0; null: none is stated")
    given = [(key, value) for key, value in bounds if value is not None]
    if metric.name is not None and len(given) != 1:
        names = " and ".join(f"{key}={value:g}" if given else key for key, value in bounds)
        problem = f"can't have both {names}" if given else f"needs one of {names}"
        raise ConfigError("targets.metric.name", metric.name, problem, hint="leave one of them out" if given else "")
    if metric.name is None and given:
        raise ConfigError(*given[0], "is the bound of no metric", hint="targets.metric.name=accuracy")
    _check_quality(targets, is_validated=is_validated)


def _check_quality(targets: TargetsConfig, *, is_validated: bool) -> None:
    stated: list[tuple[str, Any]] = [
        ("targets.validation_loss", targets.validation_loss),
        ("targets.metric.name", targets.metric.name),
    ]
    stated = [(key, value) for key, value in stated if value is not None]
    if stated and not is_validated:
        raise ConfigError(*stated[0], "is never looked at: data.validation is null", hint="give data.validation")
    if targets.stop_when_reached and not stated:
        problem = "has no effect: no targets.validation_loss and no targets.metric is stated"
        raise ConfigError("targets.stop_when_reached", True, problem)
