"""Objects from their dotted paths: checked against the signature first, so that a typo is one line and no traceback."""

import inspect
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from hydra.utils import get_object, instantiate
from omegaconf import OmegaConf

from launcher.errors import ConfigError, LauncherError, nearest, shown


def build(spec: Mapping[str, Any], key: str, **extra: Any) -> Any:
    """The object that `spec` describes: its `_target_` called with its other items and `extra`.

    Arguments arrive as plain Python values. `key` is where `spec` stands in the configuration.

    Raises:
        ConfigError: the target can't be imported, or doesn't take these arguments.
        LauncherError: the target raised; the message says where.
    """
    target = locate(str(spec["_target_"]), f"{key}._target_")
    arguments = {name: value for name, value in spec.items() if name != "_target_"}
    check_signature(target, arguments, key, given_by_launcher=extra)
    try:
        made = instantiate(OmegaConf.create(dict(spec)), _convert_="all", **({"_partial_": True} if extra else {}))
        return made(**extra) if extra else made
    except (Exception, SystemExit) as error:
        cause = error.__cause__ or error
        if isinstance(cause, ConfigError):
            raise cause from None
        if isinstance(cause, LauncherError):
            raise type(cause)(f"{key}: {cause}") from None
        raise _refused(key, str(spec["_target_"]), target, _blamed(target, arguments, cause), cause) from cause


def raised(error: BaseException) -> str:
    """What user code raised, in words: ``raised ValueError: broken``, ``called sys.exit(1)``."""
    if isinstance(error, SystemExit):
        return f"called sys.exit({error.code!r})"
    return f"raised {type(error).__name__}: {error}"


def raised_at(error: BaseException) -> str:
    """Where it was raised, in words: ``at mine.py:3``."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"at {where.filename}:{where.lineno}"


def _refused(
    key: str, path: str, target: Callable[..., Any], blamed: Mapping[str, Any], cause: BaseException
) -> LauncherError:
    text, at = f"{path} {raised(cause)}", raised_at(cause)
    if len(blamed) == 1:
        ((name, value),) = blamed.items()
        default = _defaults(target).get(name)
        said = f"; its default is {list(default) if isinstance(default, tuple) else default}"
        return ConfigError(
            f"{key}.{name}", value, text, hint=at + (said if isinstance(value, list) and default else "")
        )
    given = ", ".join(f"{key}.{name}={shown(value)}" for name, value in blamed.items())
    return LauncherError(f"{key}: {text}{f' (given: {given})' if given else ''}\n  {at}")


def _blamed(target: Callable[..., Any], arguments: Mapping[str, Any], cause: BaseException) -> dict[str, Any]:
    """The arguments that an error is about: those it names, else those of another kind than their default, or lists
    where one is too short."""
    words = {word.rstrip("s") for word in re.findall(r"\w+", str(cause).lower())}
    named = {name: value for name, value in arguments.items() if name.lower().rstrip("s") in words}
    if not named and (isinstance(cause, IndexError) or "unpack" in words):
        return {name: value for name, value in arguments.items() if isinstance(value, list)}
    if named or not isinstance(cause, TypeError):
        return named
    defaults = _defaults(target)
    return {name: value for name, value in arguments.items() if _kind(defaults.get(name)) not in (None, _kind(value))}


def _defaults(target: Callable[..., Any]) -> dict[str, Any]:
    """The defaults of the arguments that have one; empty where there is no signature to ask."""
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):
        return {}
    return {name: one.default for name, one in parameters.items() if one.default is not inspect.Parameter.empty}


def _kind(value: Any) -> type | None:
    """The kind of a number, a list or a text; None for what may stand for anything."""
    kinds = {bool: bool, int: float, float: float, list: list, tuple: list, str: str}
    return next((kind for one, kind in kinds.items() if isinstance(value, one)), None)


def locate(path: str, key: str) -> Any:
    """The class or function at a dotted path. Raises ConfigError where there is none."""
    try:
        target = get_object(path)
    except (Exception, SystemExit) as error:
        cause = error.__cause__ or error
        module, _, name = path.rpartition(".")
        hint = nearest(name, vars(sys.modules[module])) if module in sys.modules else ""
        hint = hint or "the folder where the command was given and --config-dir are importable"
        if isinstance(cause, ImportError | AttributeError | SyntaxError):
            raise ConfigError(key, path, f"can't be imported: {cause}", hint=hint) from error
        problem = f"can't be imported: its module {raised(cause)}"
        raise ConfigError(key, path, problem, hint=raised_at(cause)) from error
    if not callable(target):
        raise ConfigError(key, path, f"is a {type(target).__name__}, not a class or a function")
    return target


def check_signature(
    target: Callable[..., Any], arguments: Mapping[str, Any], key: str, given_by_launcher: Mapping[str, Any]
) -> None:
    """That `target` takes these arguments, by name. Raises ConfigError for one it doesn't take, or that it lacks."""
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):  # some builtins have no signature to check against
        return
    kinds = {one.kind for one in parameters.values()}
    names = [name for name, one in parameters.items() if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    takes_any = inspect.Parameter.VAR_KEYWORD in kinds
    label = getattr(target, "__qualname__", str(target))
    for name, value in arguments.items():
        if name not in names and not takes_any and not name.startswith("_"):
            hint = nearest(name, names) or f"it takes {', '.join(names) or 'no arguments'}"
            group = key.split(".")[0]
            hint += f"; to start from no arguments: {group}=custom" if key in ("model", "task", "optimizer") else ""
            raise ConfigError(f"{key}.{name}", value, f"{label} takes no such argument", hint=hint)
    for name in names:
        required = parameters[name].default is inspect.Parameter.empty
        positional_only = parameters[name].kind is inspect.Parameter.POSITIONAL_ONLY
        if required and not positional_only and name not in arguments and name not in given_by_launcher:
            raise ConfigError(f"{key}.{name}", "???", f"{label} needs this argument", hint=f"add +{key}.{name}=…")
