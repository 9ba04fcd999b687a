"""What Hydra and OmegaConf say of a user's mistake, as one message: the key, what was given, what is allowed."""

import os
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError, YAMLError
from yaml.reader import ReaderError

from launcher.config.decays import DECAYS, DecayConfig
from launcher.config.given import given, values, wrong_choice
from launcher.config.quotes import in_quotes, spelt
from launcher.config.schema import SECTIONS
from launcher.errors import ConfigError, LauncherError, nearest

OPEN_SECTIONS = ("model", "task", "optimizer")
RUN_GROUPS = (*OPEN_SECTIONS, "data", "schedule/decay", "strategy", "activation_checkpoint", "precision", "submit")
"""Groups whose choice is a section of a run's configuration."""
GROUPS = (*RUN_GROUPS, "experiment", "sweep")

KnownKeys = Callable[[Sequence[str]], DictConfig]


def schema_keys() -> list[str]:
    """Every dotted key of the strict sections."""
    return [key for section, schema in SECTIONS.items() for key in _keys_below(schema, f"{section}.")]


def _keys_below(schema: type, prefix: str) -> Iterator[str]:
    for name, kind in get_type_hints(schema).items():
        yield f"{prefix}{name}"
        if isinstance(kind, type) and is_dataclass(kind):
            yield from _keys_below(kind, f"{prefix}{name}.")


def allowed(key: str) -> str:
    """What the schema says `key` may be, or an empty string: ``one of single, ddp``, ``a whole number``."""
    return words(_kind(key))


def _kind(key: str) -> Any:
    """The type of a key of the schema; None where it has no such key."""
    section, *names = key.split(".")
    kind: Any = SECTIONS.get(section)
    for name in names:
        kinds = DECAYS if kind is DecayConfig else (kind,)
        kind = next(
            (found for one in kinds if is_dataclass(one) and (found := get_type_hints(one).get(name)) is not None), None
        )
    return kind


def words(kind: Any) -> str:
    """What a value of the type `kind` is, in words; an empty string where the type says nothing."""
    if isinstance(kind, UnionType):
        return " or ".join(filter(None, map(words, get_args(kind))))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return "one of " + ", ".join(member.name for member in kind)
    if isinstance(kind, type) and is_dataclass(kind):
        return "a section with the keys " + ", ".join(field.name for field in fields(kind))
    if get_origin(kind) is list:
        return "a list"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
    return names.get(kind, "")


def explain(
    error: Exception, known_keys: KnownKeys, overrides: Sequence[str], folders: Sequence[Path] = ()
) -> LauncherError:
    """The message for what composing the files in `folders` raised.

    `known_keys` composes again with fewer overrides, to say which keys there are beside a misspelt one. An error that
    is none of Hydra's or OmegaConf's is raised again as it is.
    """
    if (chosen := wrong_choice(error, overrides, folders)) is not None:
        return chosen
    if isinstance(error, MissingConfigException):
        return _missing_choice(error)
    if isinstance(error, YAMLError | UnicodeDecodeError):
        return _unreadable(error, folders)
    if isinstance(error, OverrideParseException):
        return _not_an_override(error)
    cause: BaseException = error.__cause__ or error
    key = getattr(cause, "full_key", None)
    if key and isinstance(cause, OmegaConfBaseException):
        if re.search(r"Key '.*' (is not in struct|not in '|.*not found)", str(cause)):
            return unknown_key(key, known_keys, overrides)
        key, value = given(key, overrides)
        text = str(cause).splitlines()[0]
        if "does not support deletion" in text:
            return LauncherError(f"~{key}: a key of the schema can be set, not deleted")
        may_be = allowed(key)
        if _takes_list(key) and value[:1] not in ("?", "{", ""):
            may_be += f", as in {spelt(key, value, is_list=True)}"
        return ConfigError(key, value, text, hint=f"allowed: {may_be}" if may_be else "")
    if isinstance(error, HydraException | OmegaConfBaseException):
        return LauncherError(_plain(str(error)))
    if isinstance(error, ValueError) and "group override" in str(error):
        return LauncherError(f"{error} (the groups are {', '.join(GROUPS)})")
    if isinstance(error, ValueError | TypeError | OSError) and os.environ.get("HYDRA_FULL_ERROR") != "1":
        return LauncherError(f"the configuration can't be composed: {_plain(str(error))}")
    raise error


def _unreadable(error: YAMLError | UnicodeDecodeError, folders: Sequence[Path]) -> LauncherError:
    """A file that is no YAML, with the place where it ends to be."""
    if isinstance(error, MarkedYAMLError) and (mark := error.problem_mark or error.context_mark):
        context = f"{error.context}: " if error.context else ""
        return LauncherError(f"{mark.name}, line {mark.line + 1}: not YAML: {context}{error.problem}")
    if isinstance(error, ReaderError):
        before = Path(error.name).read_text(encoding="utf-8", errors="replace")[: error.position]
        return LauncherError(f"{error.name}, line {before.count(chr(10)) + 1}: not YAML: {error.reason}")
    for path in (one for folder in folders for one in sorted(folder.rglob("*.yaml")) if one.is_file()):
        content = path.read_bytes()
        try:
            content.decode()
        except UnicodeDecodeError as wrong:  # composing doesn't say in which file
            line = content[: wrong.start].count(b"\n") + 1
            return LauncherError(f"{path}, line {line}: not UTF-8: the byte 0x{content[wrong.start]:02x}")
    return LauncherError(f"a file of the configuration can't be read: {error}")


def _not_an_override(error: OverrideParseException) -> LauncherError:
    text = f"{error.override}: not an override of the form key=value: {_plain(str(error))}"
    key, _, value = str(error.override).partition("=")
    if key and value:  # characters that mean something to Hydra's grammar
        text += f"\n  {in_quotes(key, value, is_list=_takes_list(key))}"
    return LauncherError(text)


def _takes_list(key: str) -> bool:
    return allowed(key.lstrip("+")).startswith("a list")


def _plain(text: str) -> str:
    """Hydra's words without its search path and links."""
    lines = [line.strip() for line in text.split("Config search path:")[0].splitlines()]
    noise = ("full_key:", "object_type=")
    kept = [line for line in lines if line and "https://" not in line and not line.startswith(noise)]
    return "\n  ".join(line for line in kept if not line.endswith("_schema"))


def _missing_choice(error: MissingConfigException) -> LauncherError:
    missing = error.missing_cfg_file or ""
    options = [option for option in error.options or [] if not option.endswith("_schema")]
    group, _, choice = missing.rpartition("/")
    if not options and not group and choice:
        return LauncherError(f"--config-name {choice}: there is no {choice}.yaml in conf/ or in --config-dir")
    if not options:
        return LauncherError(_plain(str(error)))
    hint = " ".join(filter(None, [f"allowed: {', '.join(options)};", nearest(choice, options)])).rstrip(";")
    return ConfigError(group, choice, "there is no such choice in this group", hint=hint)


def unknown_key(key: str, known_keys: KnownKeys, overrides: Sequence[str]) -> ConfigError:
    """An unknown key, with the nearest valid spelling of it among the keys that there are."""
    name, value = given(key, overrides)
    kept = [one for one in overrides if name not in values(one)]
    try:
        keys = list(_dotted(known_keys(kept)))
    except Exception:  # the rest of the command line has a mistake of its own: fall back on the schema
        keys = schema_keys()
    parent, _, leaf = key.rpartition(".")
    siblings = [one.rpartition(".")[2] for one in keys if one.rpartition(".")[0] == parent]
    is_open = parent.split(".")[0] in (*OPEN_SECTIONS, "data") or get_origin(_kind(parent)) is dict
    close = nearest(key, GROUPS) if "/" in key else nearest(leaf, siblings)
    if close and "/" not in key:
        close = close.replace("'", f"'{parent}." if parent else "'", 1)
    elif not (parent and siblings) and not is_open:
        sections = {one.rpartition(".")[0] for one in keys} - {""}
        close = _anywhere(key, keys) if name == key else nearest(key, sections)
    whole = close[:-2] + name[len(key) :]  # with what the override says below the key
    close = f"{whole}'?" if whole.rpartition("'")[2] in keys else close
    hint = close or (f"{parent or 'the configuration'} has the keys {', '.join(siblings)}" if siblings else "")
    if is_open and not close:
        added = f"+{name}={'…' if value == '?' else value}"
        hint += f"; a further argument is added with {added if '…' in added else shlex.quote(added)}"
    return ConfigError(name, value, "unknown key", hint=hint.lstrip("; "))


def _anywhere(key: str, keys: Sequence[str]) -> str:
    """The nearest spelling of a key whose section is missing or wrong: a key of that name, a group, a like name."""
    leaves = {one.rpartition(".")[2]: one for one in keys}
    by_group = [group for group in GROUPS if group.startswith(f"{key}/")]
    if key in leaves or by_group:
        return f"did you mean '{leaves.get(key) or by_group[0]}'?"
    close = nearest(key, [*keys, *GROUPS])
    if close:
        return close
    leaf = get_close_matches(key, list(leaves), n=1, cutoff=0.6)
    return f"did you mean '{leaves[leaf[0]]}'?" if leaf else ""


def _dotted(node: DictConfig, prefix: str = "") -> Iterator[str]:
    for name in node:
        key = f"{prefix}{name!s}"
        if key == "hydra":
            continue
        yield key
        child = node._get_node(name)
        if isinstance(child, DictConfig) and not child._is_missing() and not child._is_none():
            yield from _dotted(child, f"{key}.")
