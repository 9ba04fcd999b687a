"""Objects from their dotted paths: checked against the signature first, so that a typo is one line and no traceback."""

import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from hydra.utils import get_object, instantiate
from omegaconf import OmegaConf

from launcher.errors import ConfigError, LauncherError, nearest


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
    except Exception as error:
        cause = error.__cause__ or error
        if isinstance(cause, ConfigError):
            raise cause from None
        if isinstance(cause, LauncherError):
            raise type(cause)(f"{key}: {cause}") from None
        where = traceback.extract_tb(cause.__traceback__)[-1]
        text = f"{spec['_target_']} raised {type(cause).__name__}: {cause}"
        raise LauncherError(f"{key}: {text}\n  at {where.filename}:{where.lineno}") from cause


def locate(path: str, key: str) -> Any:
    """The class or function at a dotted path. Raises ConfigError where there is none."""
    try:
        target = get_object(path)
    except Exception as error:
        cause = error.__cause__ or error
        module, _, name = path.rpartition(".")
        hint = nearest(name, vars(sys.modules[module])) if module in sys.modules else ""
        hint = hint or "the folder where the command was given and --config-dir are importable"
        raise ConfigError(key, path, f"can't be imported: {cause}", hint=hint) from error
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
