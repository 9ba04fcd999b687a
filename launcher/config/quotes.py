"""How a value is put in quotes that Hydra's grammar didn't take as it was typed."""

import shlex
from collections.abc import Iterator

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

_CLOSES = {"[": "]", "{": "}", "(": ")"}
_OPENS = ("[", "{")
_QUOTES = ("'", '"')


def in_quotes(key: str, value: str, *, is_list: bool) -> str:
    """What to do so that ``key=value`` is taken. `is_list`: as in `spelt`."""
    if is_list or value.strip()[:1] in _OPENS:
        rule = "each text in it with characters beyond a to z is put in quotes"
    else:
        rule = "a text with characters beyond a to z is put in quotes"
    return f"{rule}: {spelt(key, value, is_list=is_list)}"


def spelt(key: str, value: str, *, is_list: bool) -> str:
    """``key=value`` as a shell and Hydra take it, ``'key=["A=1", "B=2"]'``, or the form of it.

    Args:
        is_list: whether the key takes nothing but a list.
    """
    value = value.strip()
    inside = value.strip("'\"")
    if is_list and not value.startswith("["):
        value = inside if inside.startswith("[") else f"[{value}]"  # a list in quotes is a text
    elif value[:1] not in _OPENS:
        plain = value.replace("'", "").replace('"', "")
        return f"'{key}=\"{plain}\"'"
    try:
        mended = f"{key}={_mended(value)}"
    except ValueError:
        mended = ""
    if mended and _is_taken(mended):
        return shlex.quote(mended)
    return f'\'{key}=["first", "second"]\'' if value.startswith("[") else f"'{key}={{name: \"text\"}}'"


def _mended(value: str) -> str:
    """`value` with quotes around what needs them. Raises ValueError where that can't be told."""
    opened = value[:1]
    if opened not in _OPENS:
        return _text(value)
    if value[-1:] != _CLOSES[opened]:
        raise ValueError(value)
    parts = list(_parts(value[1:-1]))
    if opened == "{":
        pairs = [part.partition(":") for part in parts]
        if not all(colon for _, colon, _ in pairs):
            raise ValueError(value)
        parts = [f"{name.strip()}: {_mended(rest.strip())}" for name, _, rest in pairs]
    else:
        parts = [_mended(part) for part in parts]
    return f"{opened}{', '.join(parts)}{_CLOSES[opened]}"


def _text(value: str) -> str:
    """A value that holds no others: as it is where it is taken, else in double quotes."""
    if _is_taken(f"k=[{value}]") and value[:1] not in _QUOTES:
        return value
    if value[:1] in _QUOTES:
        if len(value) < 2 or value[-1] != value[0] or not _is_taken(f"k={value}"):
            raise ValueError(value)
        value = str(OverridesParser.create().parse_override(f"k={value}").value())
    return '"' + value.replace('"', '\\"') + '"'


def _parts(text: str) -> Iterator[str]:
    """What commas part, outside of quotes and brackets. Raises ValueError for what doesn't close, or a backslash."""
    if "\\" in text:
        raise ValueError(text)
    waiting: list[str] = []
    part = ""
    for one in text:
        quote = waiting[-1] if waiting and waiting[-1] in _QUOTES else None
        if quote is None and one == "," and not waiting:
            yield part.strip()
            part = ""
            continue
        if one == quote or (waiting and quote is None and one == waiting[-1]):
            waiting.pop()
        elif quote is None and (one in _CLOSES or one in _QUOTES):
            waiting.append(_CLOSES.get(one, one))
        elif quote is None and one in _CLOSES.values():
            raise ValueError(text)
        part += one
    if waiting:
        raise ValueError(text)
    if part.strip():
        yield part.strip()


def _is_taken(override: str) -> bool:
    try:
        OverridesParser.create().parse_override(override)
    except HydraException:
        return False
    return True
