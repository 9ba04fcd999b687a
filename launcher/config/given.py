"""What overrides give to keys, and which of them miss the group that they mean."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from launcher.config.schema import SECTIONS
from launcher.errors import ConfigError, LauncherError, nearest

_WORDS = re.compile(r"\w+([./]\w+)*")


def values(override: str) -> dict[str, str]:
    """The dotted keys that an override sets, those inside of a section too, with their values as they are typed."""
    key, _, value = override.lstrip("+~").partition("=")
    found = {key: value}
    if value.startswith("{"):
        with suppress(HydraException):  # composing says so
            found |= _inside(key, OverridesParser.create().parse_override(override).value())
    return found


def _inside(key: str, value: object) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, one in value.items() if isinstance(value, dict) else ():
        inner = f"{key}.{name}"
        found |= {inner: Override._get_value_element_as_str(one, space_after_sep=True)} | _inside(inner, one)
    return found


def given(key: str, overrides: Sequence[str]) -> tuple[str, str]:
    """What `key` is given, or the first key below it, with that key's name; ``?`` where no override does."""
    for override in overrides:
        for name, value in values(override).items():
            if name == key or name.startswith(f"{key}."):
                return name, value
    return key, "?"


def wrong_choice(error: Exception, overrides: Sequence[str], folders: Sequence[Path]) -> LauncherError | None:
    """The message for an override that chooses from no group, or anew from one that has a choice."""
    again = re.search(r"Multiple values for (\S+)\.|^(\S+) appears more than once", str(error))
    for override in overrides:
        name, _, choice = override.partition("=")
        if again and name == f"+{again[1] or again[2]}":
            return ConfigError(name, choice, "its group has a choice already", hint=f"without the +: {override[1:]}")
        for key, value in values(override).items():
            if _WORDS.fullmatch(key) and not value.startswith(("{", "${")) and not override.startswith("~"):
                problem, meant = _missed(key, folders)
                if meant:
                    return ConfigError(key, value, problem, hint="; ".join(_hints(value, meant)))
    return None


def _missed(key: str, folders: Sequence[Path]) -> tuple[str, dict[str, list[str]]]:
    """What is wrong with a key that is given a choice, and the groups that are meant; none: nothing is wrong."""
    own = key.replace(".", "/")
    if "." in key:
        is_meant = key.split(".")[0] in SECTIONS and _choices(own, folders)  # elsewhere a key may be a text
        return f"is a section, the choice of the group {own}", {own: _choices(own, folders)} if is_meant else {}
    below = {f"{key}/{one.parent.name}" for folder in folders for one in (folder / key).glob("*/*.yaml")}
    is_group = bool(_choices(key, folders))
    return "is no group", {} if is_group else {group: _choices(group, folders) for group in sorted(below)}


def _choices(group: str, folders: Sequence[Path]) -> list[str]:
    return sorted({one.stem for folder in folders for one in (folder / group).glob("*.yaml")})


def _hints(value: str, meant: Mapping[str, list[str]]) -> Iterator[str]:
    for group, choices in meant.items():
        close = re.search("'(.*)'", nearest(value, choices))
        said = f"did you mean {group}={close[1]}?" if close else f"choose with {group}=…;"
        yield f"{said} allowed: {', '.join(choices)}"
