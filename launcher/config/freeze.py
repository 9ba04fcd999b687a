"""The text of config.yaml: everything is settled where the command is given, but environment variables."""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from omegaconf import BooleanNode, DictConfig, EnumNode, FloatNode, IntegerNode, ListConfig, Node, OmegaConf
from omegaconf.basecontainer import BaseContainer
from omegaconf.errors import OmegaConfBaseException

from launcher.errors import ConfigError

_NO_TEXT = (IntegerNode, FloatNode, BooleanNode, EnumNode)
PATH_NAMES = re.compile(r"(^|_)(path|root|file|folder|dir|directory)$")
"""Keys whose value is a path."""

_OPEN, _CLOSE = "\ue000", "\ue001"
"""What stands for ``${`` and ``}`` of an interpolation that is left to the ranks: no character of anyone's text."""

_ON_RANKS = ("oc.decode", "oc.create", "launcher.path_name")
"""Resolvers that ranks have and that need nothing but their arguments."""

Place = tuple[Any, ...]


def freeze(composed: DictConfig) -> str:
    """The YAML of config.yaml: every interpolation resolved but ``${oc.env:…}``, relative paths made absolute.

    An environment variable stays a reference, also where another key refers to it, so that no secret reaches a file; so
    does what is worked out from one, as in ``${oc.decode:${oc.env:…}}``. Only where a typed key of the schema needs a
    number or a choice does its value stand.

    Raises:
        ConfigError: an environment variable is needed where the command is given, as in ``${now:${oc.env:FORMAT}}``.
    """
    frozen = OmegaConf.create(cast(dict[str, Any], OmegaConf.to_container(composed, resolve=False)))
    for where, node in _interpolations(composed):
        if isinstance(node, _NO_TEXT):
            _parent(frozen, where)[where[-1]] = _parent(composed, where)[where[-1]]
    with _environment_kept_open():
        values = [(where, _resolved(frozen, where, node)) for where, node in _interpolations(frozen)]
    for where, value in values:
        _parent(frozen, where)[where[-1]] = _written(value)
    for section in ("model", "task", "data", "model_weights"):
        if section in frozen:
            _absolute_paths(frozen, section)
    return OmegaConf.to_yaml(frozen, resolve=False)


def open_keys(text: str) -> list[tuple[str, str]]:
    """The keys of a config.yaml that still refer to an environment variable, and their values."""
    if "${" not in text:
        return []
    found = _interpolations(cast(DictConfig, OmegaConf.create(text)))
    return [(node._get_full_key(None), node._value()) for _, node in found]


def _parent(root: Any, where: Place) -> Any:
    for name in where[:-1]:
        root = root[name]
    return root


def _resolved(root: DictConfig, where: Place, node: Node) -> Any:
    try:
        value = _plain(_parent(root, where)[where[-1]])
    except OmegaConfBaseException as error:
        text = re.sub(r"^\w+ raised while resolving interpolation: ", "", str(error).splitlines()[0])
        if _OPEN in text:
            text = "an environment variable can't name a key: its value is first known on the ranks"
        raise ConfigError(node._get_full_key(None), node._value(), text) from error
    if any(repr(_OPEN)[1:-1] in one for one in _texts(value)):  # a list as Python shows it
        problem = "a list or a section that holds ${oc.env:…} can't stand inside a text"
        raise ConfigError(node._get_full_key(None), node._value(), problem)
    return value


@contextmanager
def _environment_kept_open() -> Iterator[None]:
    """While inside, an environment variable resolves to its own reference, and what is worked out from one likewise.

    OmegaConf offers no list of its resolvers but this one.
    """
    before = dict(BaseContainer._resolvers)
    try:
        for name, resolver in before.items():
            BaseContainer._resolvers[name] = _keeping_open(name, resolver)
        yield
    finally:
        BaseContainer._resolvers.clear()
        BaseContainer._resolvers.update(before)


def _keeping_open(name: str, resolver: Callable[..., Any]) -> Callable[..., Any]:
    def resolve(config: Any, parent: Any, node: Any, args: tuple[Any, ...], args_str: tuple[str, ...]) -> Any:
        reads = args[:1] if name == "oc.select" else args  # its second argument is handed on as it is
        is_open = any(_OPEN in one for one in _texts(_plain(list(reads))))
        is_built = name == "oc.create" and not isinstance(args[0], str)
        if name == "oc.env" or (is_open and name in _ON_RANKS and not is_built):
            return f"{_OPEN}{name}:{','.join(map(_argument, args))}{_CLOSE}"
        if is_open and not is_built:
            problem = f"${{{name}:…}} is worked out where the command is given, and ${{oc.env:…}} only on the ranks"
            raise ValueError(problem)
        return resolver(config, parent, node, args, args_str)

    return resolve


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return OmegaConf.to_container(value, resolve=True) if isinstance(value, DictConfig | ListConfig) else value


def _texts(value: Any) -> Iterator[str]:
    """Every text in a plain value."""
    if isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _texts(one)
    elif isinstance(value, str):
        yield value


def _argument(value: Any) -> str:
    """A resolver's argument as it is written in an interpolation."""
    value = _plain(value)
    if isinstance(value, dict):
        return "{" + ",".join(f"{_argument(name)}:{_argument(one)}" for name, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_argument, value)) + "]"
    if not isinstance(value, str):
        return "null" if value is None else str(value)
    parts = list(_parts(value))
    is_word = re.fullmatch(r"[A-Za-z_][\w.]*", value) and value.lower() not in ("null", "true", "false", "nan", "inf")
    if is_word or (len(parts) == 1 and parts[0].startswith(_OPEN)):
        return value
    quoted = [part if part.startswith(_OPEN) else _quoted(_escaped(part)) for part in parts]
    return "'" + re.sub(r"(\\+)$", r"\1\1", "".join(quoted)) + "'"


def _quoted(text: str) -> str:
    return re.sub(r"(\\*)'", r"\1\1\\'", text)


def _escaped(text: str) -> str:
    """`text` such that it is no interpolation."""
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", text)


def _parts(text: str) -> Iterator[str]:
    """`text` cut into open references, nested ones whole, and what lies between."""
    start = depth = 0
    for index, character in enumerate(text):
        if character == _OPEN:
            if depth == 0 and index > start:
                yield text[start:index]
                start = index
            depth += 1
        elif character == _CLOSE:
            depth -= 1
            if depth == 0:
                yield text[start : index + 1]
                start = index + 1
    if start < len(text):
        yield text[start:]


def _written(value: Any) -> Any:
    """A resolved value as it stands in config.yaml."""
    if isinstance(value, dict):
        return {name: _written(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_written(one) for one in value]
    if not isinstance(value, str):
        return value
    text = "".join(part if part.startswith(_OPEN) else _escaped(part) for part in _parts(value))
    return text.replace(_OPEN, "${").replace(_CLOSE, "}")


def _interpolations(node: DictConfig | ListConfig, prefix: Place = ()) -> Iterator[tuple[Place, Node]]:
    """The nodes below `node` that are interpolations, by the names and numbers that lead to them."""
    names: Iterable[Any] = range(len(node)) if isinstance(node, ListConfig) else list(node)
    for name in names:
        child = node._get_node(name)
        if not isinstance(child, Node):
            continue
        if child._is_interpolation():
            yield (*prefix, name), child
        elif isinstance(child, DictConfig | ListConfig) and not child._is_none() and not child._is_missing():
            yield from _interpolations(child, (*prefix, name))


def _absolute_paths(parent: Any, name: Any) -> None:
    child = parent._get_node(name)
    if isinstance(child, DictConfig | ListConfig):
        if child._is_none() or child._is_missing():
            return
        for key in range(len(child)) if isinstance(child, ListConfig) else list(child):
            _absolute_paths(child, key)
        return
    value = child._value() if child is not None else None
    names_a_path = isinstance(name, str) and (PATH_NAMES.search(name) or name == "model_weights")
    if (
        names_a_path
        and isinstance(value, str)
        and "${" not in value
        and "://" not in value
        and not Path(value).is_absolute()
    ):
        parent[name] = str(Path(value).expanduser().absolute())
