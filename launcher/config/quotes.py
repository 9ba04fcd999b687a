"""How a value is put in quotes that Hydra's grammar didn't take as it was typed."""

import shlex

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException


def in_quotes(key: str, value: str, *, is_list: bool) -> str:
    """What to do so that ``key=value`` is taken. `is_list`: as in `spelt`."""
    what = "each text in it" if is_list or value.strip()[:1] in ("[", "{") else "a text"
    return f"{what} with characters beyond a to z is put in quotes: {spelt(key, value, is_list=is_list)}"


def spelt(key: str, value: str, *, is_list: bool) -> str:
    """``key=value`` as a shell and Hydra take it, ``'key=["A=1", "B=2"]'``, or the form of it.

    Args:
        is_list: whether the key takes nothing but a list.
    """
    value = value.strip()
    inside = value.strip("'\"")
    if value[:1] == "{":
        return f"'{key}={{name: \"text\"}}'"
    if not is_list and value[:1] != "[":
        plain = value.replace("'", "").replace('"', "")
        return f"'{key}=\"{plain}\"'"
    parts = [one.strip().strip("'\"") for one in inside.removeprefix("[").removesuffix("]").split(",")]
    if any(set(one) & set("'\"[]{}\\") for one in parts):  # what belongs together can't be told
        return f'\'{key}=["first", "second"]\''
    entries = [one if _is_taken(one) else f'"{one}"' for one in parts]
    return shlex.quote(f"{key}=[{', '.join(entries)}]")


def _is_taken(one: str) -> bool:
    """Whether an entry of a list needs no quotes."""
    try:
        OverridesParser.create().parse_override(f"key=[{one}]")
    except HydraException:
        return False
    return True
