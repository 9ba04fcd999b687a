"""Durations: what the user says, in updates of this run."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import ceil, floor
from typing import Literal, get_args

from launcher.config import times
from launcher.errors import ConfigError, nearest
from launcher.plan.batch import exact_number
from launcher.plan.windows import WindowTable

TRAINING_DURATION = "training.duration"

Unit = Literal["updates", "epochs", "samples", "tokens", "%"]

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
    def parse(cls, value: object, key: str, *, or_time: bool = False) -> "Duration":
        """The duration that `value` of the key `key` stands for; zero is allowed.

        Args:
            or_time: whether the key takes a time too, which isn't asked here.

        Raises:
            ConfigError: not a duration, negative, an unknown unit, or a part of an update, sample or token.
        """
        allowed = _ALLOWED + (f"; or a time: {times.EXAMPLES}" if or_time else "")
        form = _FORM.fullmatch(str(value).strip().lower())
        number = None if isinstance(value, bool) or form is None else exact_number(form[1])
        if form is None or number is None:
            problem = "is no duration and no time" if or_time else "is no duration"
            raise ConfigError(key, "null" if value is None else value, problem, hint=allowed)
        unit = _UNITS.get(form[2] or "updates")
        if unit is None:
            units = [*_UNITS, *(times.UNITS if or_time else ())]
            hint = "; ".join(filter(None, [nearest(form[2], units), allowed]))
            raise ConfigError(key, value, f"has the unknown unit '{form[2]}'", hint=hint)
        if number < 0:
            raise ConfigError(key, value, "is negative", hint=allowed)
        if number.denominator != 1 and unit not in ("epochs", "%"):
            raise ConfigError(key, value, f"must be a whole number of {unit}", hint=allowed)
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
    counts_samples: bool = False
    """Whether the training's own length is said in samples, tokens or epochs. In a ramp a share of it is one of its
    samples then, and else of its updates."""

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
            if self._counts_samples(duration):
                assert self.windows is not None
                return self.windows.updates_for_samples(floor(self._share(duration) + Fraction(1, 2)))
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

    def last(self, duration: Duration, key: str, num_updates: int) -> int:
        """The updates after which the last `duration` of a training of `num_updates` begins; below 0: it is longer.

        Raises as `updates`.
        """
        length = self.updates(duration, key)
        if not self._counts_samples(duration):
            return num_updates - length
        assert self.windows is not None
        start = self.windows.samples_after(num_updates) - self.windows.samples_after(length)
        return -1 if start < 0 else self.windows.updates_for_samples(start)

    def measure(self, duration: Duration) -> "Measure":
        """What passes evenly along `duration`: updates, or where a ramp makes these of different sizes, and the
        duration is said in samples, tokens or epochs, samples."""
        if not self._counts_samples(duration):
            return by_updates
        assert self.windows is not None
        return self.windows.samples_after

    def every(self, duration: Duration, key: str) -> "Every":
        """What happens once in every `duration`, which is above 0. Raises as `updates`."""
        updates = max(1, self.updates(duration, key))
        if not self._counts_samples(duration):
            return Every(updates)
        assert self.windows is not None
        windows, full, length = self.windows, replace(self.windows, ramp=()), duration.value
        if duration.unit == "epochs":
            return Every(full.updates_for_epochs(length), lambda n: floor(windows.epochs_after(n) / length))
        samples = length if duration.unit == "samples" else Fraction(windows.samples_after(updates))
        samples = self._share(duration) if duration.unit == "%" else samples
        return Every(full.updates_for_samples(ceil(samples)), lambda n: floor(windows.samples_after(n) / samples))

    def _share(self, duration: Duration) -> Fraction:
        """The samples of a share of the training."""
        assert self.windows is not None
        assert self.training_updates is not None
        return duration.value * self.windows.samples_after(self.training_updates) / 100

    def _counts_samples(self, duration: Duration) -> bool:
        is_ramp = self.windows is not None and bool(self.windows.ramp)
        return is_ramp and (self.counts_samples if duration.unit == "%" else duration.unit != "updates")


Measure = Callable[[int], int]
"""How much of something has passed after a number of updates."""


def by_updates(n: int) -> int:
    """The measure where every update counts the same."""
    return n


@dataclass(frozen=True)
class Every:
    """What happens once in so many updates, or in a ramp in so many samples or epochs."""

    updates: int
    """Of full windows."""
    passed: Measure | None = None
    """How often it has been due after a number of updates; None: every `updates`."""

    def count(self, last: int, after: int = 0) -> int:
        """How often it is due after the updates from `after` + 1 to `last`, each of which it can be due after once."""
        passed = self.passed or (lambda n: n // self.updates)
        return min(passed(last) - passed(after), last - after) if last > after else 0

    def is_due(self, update: int) -> bool:
        """Whether it is due after this update."""
        if self.passed is None:
            return update % self.updates == 0
        return update > 0 and self.passed(update) > self.passed(update - 1)
