"""Times as a user says them: ``90 seconds``, ``10 minutes``, ``2 hours``, ``1 days``, ``1:30:00``."""

import re

from launcher.errors import ConfigError, nearest

_SECONDS = {"second": 1, "minute": 60, "hour": 3600, "day": 86400}
UNITS = {
    **{spelling: seconds for unit, seconds in _SECONDS.items() for spelling in (unit, unit + "s", unit[0])},
    "sec": 1,
    "min": 60,
}
_FORM = re.compile(r"([+-]?[0-9]+(?:\.[0-9]+)?)\s*([a-z]*)")
_CLOCK = re.compile(r"([+-]?)(?:([0-9]+)-)?([0-9]+):([0-9]{2}):([0-9]{2})")
_LIMIT = re.compile(r"(?:([0-9]+)-)?([0-9]+(?::[0-9]+){0,2})")
LEAD = 30.0
"""Seconds that a run is told to stop before it is ended, beside those of checkpoint.stop_within."""
EXAMPLES = "`90 seconds`, `10 minutes`, `2 hours`, `1 days` or `1:30:00`"
_ALLOWED = f"a time is {EXAMPLES}; a bare number is seconds"


def is_time(value: object) -> bool:
    """Whether `value` names a time by its unit, or as a clock does."""
    text = str(value).strip().lower()
    form = _FORM.fullmatch(text)
    return _CLOCK.fullmatch(text) is not None or (form is not None and form[2] in UNITS)


def seconds(value: object, key: str) -> float:
    """The seconds that `value` of the key `key` stands for.

    Raises:
        ConfigError: it is no time, or not above 0.
    """
    text = str(value).strip().lower()
    clock, form = _CLOCK.fullmatch(text), _FORM.fullmatch(text)
    if isinstance(value, bool) or (clock is None and form is None):
        raise ConfigError(key, value, "is no time", hint=_ALLOWED)
    if clock is not None:
        days, hours, minutes, rest = (int(one or 0) for one in clock.groups()[1:])
        found = float(f"{clock[1]}1") * (((days * 24 + hours) * 60 + minutes) * 60 + rest)
    else:
        assert form is not None
        if form[2] and form[2] not in UNITS:
            hint = "; ".join(filter(None, [nearest(form[2], UNITS), _ALLOWED]))
            raise ConfigError(key, value, f"has the unknown unit '{form[2]}'", hint=hint)
        found = float(form[1]) * UNITS.get(form[2], 1)
    if not found > 0:
        raise ConfigError(key, value, "must be above 0", hint=_ALLOWED)
    return found


def time_to_save(given: object, key: str, stop_within: object) -> float:
    """Seconds from when a run is told to stop until it is ended: `given`, else checkpoint.stop_within and LEAD.

    Args:
        given: the value of the key `key`; None: the default.

    Raises:
        ConfigError: it is shorter than checkpoint.stop_within.
    """
    within = seconds(stop_within, "checkpoint.stop_within")
    found = within + LEAD if given is None else seconds(given, key)
    if found < within:
        raise ConfigError(key, given, f"is shorter than checkpoint.stop_within, {within:g} s: a save would be cut")
    return found


def limit(text: str) -> float | None:
    """The seconds of a time limit as Slurm reads it: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S; None: none of these."""
    form = _LIMIT.fullmatch(text.strip())
    if form is None:
        return None
    days, numbers = form[1], [int(one) for one in form[2].split(":")]
    if days is not None:
        hours, minutes, rest = [*numbers, 0, 0][:3]
    elif len(numbers) == 3:
        hours, minutes, rest = numbers
    else:
        hours, minutes, rest = 0, *[*numbers, 0][:2]
    return float(((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + rest)
