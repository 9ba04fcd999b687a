"""A model made without memory for its large tensors, which can be filled later, part by part, with the very numbers
that an ordinary start would have given them.

Whatever a model's constructor does with torch goes by: small tensors are made as always, and of large ones only the
shape. What would have filled them is written down, with the state of the random generator at that moment, and done when
their numbers are asked for. The idea is that of deferred initialisation in torchdistX (Meta, 2022); here a tensor's
numbers don't depend on which others are asked for, or when, since each draw has its own state of the generator.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from launcher.errors import LauncherError

LARGE = 4096
"""Tensors of so many elements and more are deferred."""

_DRAWS = {
    "normal_", "uniform_", "random_", "bernoulli_", "exponential_", "log_normal_", "cauchy_", "geometric_",
    "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "normal_functional",
}  # fmt: skip
"""Random operators that take as many numbers from the generator whatever the tensors hold."""


class CannotDefer(LauncherError):
    """A constructor does something that can't be written down and done later."""


@dataclass(frozen=True)
class _View:
    """A tensor as a view of a storage that has no memory."""

    storage: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass
class _Operation:
    function: Any
    args: Any
    kwargs: Any
    """With every deferred tensor as a _View."""
    reads: set[int]
    """Storages that it needs, those that it writes into among them."""
    makes: list[_View]
    """Its results in storages of their own."""
    random_state: Tensor | None


@dataclass
class Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What would have filled the tensors that were made while it was on."""

    operations: list[_Operation] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._writers: dict[int, list[int]] = defaultdict(list)
        self._alive: list[Tensor] = []  # a storage's address is its name as long as it lives

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            return self._follow(func, args, kwargs or {})

    def _follow(self, func: Any, args: Any, kwargs: Any) -> Any:
        given = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, Tensor)]
        if not any(self.knows(one) for one in given):
            if given or not _makes_large(func, args, kwargs):
                return func(*args, **kwargs)
        elif not _gives_tensors(func) or any(not one.is_meta for one in _written(func, args, kwargs)):
            return func(*tree_map(self._concrete, args), **tree_map(self._concrete, kwargs))
        try:
            out = func(*tree_map(_to_meta, args), **tree_map(_to_meta, _on_meta(func, kwargs)))
        except (NotImplementedError, RuntimeError) as error:
            raise CannotDefer(f"{func}: {error}") from error
        self._write_down(func, args, kwargs, given, out)
        return out

    def knows(self, tensor: Tensor) -> bool:
        """Whether the tensor's numbers are still to be had from `value`."""
        return tensor.is_meta and _storage(tensor) in self._writers

    def _write_down(self, func: Any, args: Any, kwargs: Any, given: Sequence[Tensor], out: Any) -> None:
        written = _written(func, args, kwargs)
        results = [one for one in tree_flatten(out)[0] if isinstance(one, Tensor)]
        known = {_storage(one) for one in given if one.is_meta}
        fresh = [one for one in results if _storage(one) not in known]
        if not fresh and not written:
            return  # a view
        state = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            state = torch.get_rng_state()
            self._draw(func, args, kwargs)
        self._alive += fresh
        operation = _Operation(
            func, tree_map(_noted, args), tree_map(_noted, kwargs), known, [*map(_view, fresh)], state
        )
        for storage in {_storage(one) for one in (*fresh, *written)}:
            self._writers[storage].append(len(self.operations))
        self.operations.append(operation)

    def _draw(self, func: Any, args: Any, kwargs: Any) -> None:
        """Takes from the generator what the operator would take."""
        if kwargs.get("generator") is not None:
            raise CannotDefer(f"{func} draws from a generator of its own")
        as_many_always = func._schema.name.removeprefix("aten::") in _DRAWS
        stand_in = _scratch if as_many_always else self._concrete
        func(*tree_map(stand_in, args), **tree_map(stand_in, kwargs))

    def _concrete(self, value: Any) -> Any:
        return self.value(value) if isinstance(value, Tensor) and self.knows(value) else value

    @torch.no_grad()
    def value(self, tensor: Tensor) -> Tensor:
        """The numbers of a deferred tensor, on the CPU. The random generator is left as it was."""
        storages: dict[int, torch.UntypedStorage] = {}
        state = torch.get_rng_state()
        try:
            for index in self._needed(_storage(tensor)):
                self._do(self.operations[index], storages)
        finally:
            torch.set_rng_state(state)
        return _real(_view(tensor), storages)

    def _needed(self, storage: int) -> list[int]:
        """The operations that `storage` got its numbers from, in their order."""
        needed: set[int] = set()
        seen: dict[int, int] = {}
        wanted = [(storage, len(self.operations))]
        while wanted:
            storage, before = wanted.pop()
            if seen.get(storage, -1) >= before:
                continue
            seen[storage] = before
            for index in self._writers[storage]:
                if index < before and index not in needed:
                    needed.add(index)
                    wanted += [(one, index) for one in self.operations[index].reads]
        return sorted(needed)

    def _do(self, operation: _Operation, storages: dict[int, torch.UntypedStorage]) -> None:
        def real(value: Any) -> Any:
            return _real(value, storages) if isinstance(value, _View) else value

        is_view = lambda value: isinstance(value, _View)  # noqa: E731
        args = tree_map(real, operation.args, is_leaf=is_view)
        kwargs = tree_map(real, operation.kwargs, is_leaf=is_view)
        if operation.random_state is not None:
            torch.set_rng_state(operation.random_state)
        results = [one for one in tree_flatten(operation.function(*args, **kwargs))[0] if isinstance(one, Tensor)]
        given = {one.untyped_storage()._cdata for one in tree_flatten((args, kwargs))[0] if isinstance(one, Tensor)}
        fresh = [one for one in results if one.untyped_storage()._cdata not in given]
        for view, result in zip(operation.makes, fresh, strict=True):
            if result.stride() != view.stride or result.storage_offset() != view.offset:
                result = torch.empty_strided(view.size, view.stride, dtype=view.dtype).copy_(result)
            storages[view.storage] = result.untyped_storage()


class _AsIfThere(TorchFunctionMode):
    """Tensors without memory say that they are on the CPU: torch.nn.init leaves those out that say otherwise."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _IS_META:  # a new wrapper each time, so not `is`
            return False
        out = func(*args, **(kwargs or {}))
        return torch.device("cpu") if func == _DEVICE and out.type == "meta" else out


_IS_META, _DEVICE = torch.Tensor.is_meta.__get__, torch.Tensor.device.__get__  # type: ignore[attr-defined]


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _view(tensor: Tensor) -> _View:
    return _View(_storage(tensor), tensor.size(), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)


def _real(view: _View, storages: dict[int, torch.UntypedStorage]) -> Tensor:
    return torch.empty(0, dtype=view.dtype).set_(storages[view.storage], view.offset, view.size, view.stride)


def _noted(value: Any) -> Any:
    """An argument as it is written down: a deferred tensor as a view, another as a copy."""
    if not isinstance(value, Tensor):
        return value
    return _view(value) if value.is_meta else value.detach().clone()


def _to_meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, Tensor) and not value.is_meta else value


def _scratch(value: Any) -> Any:
    if not isinstance(value, Tensor) or not value.is_meta:
        return value
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype).fill_(0.5)


def _on_meta(func: Any, kwargs: Any) -> Any:
    if not any(one.name == "device" for one in func._schema.arguments):
        return kwargs
    device = kwargs.get("device")
    if device is not None and torch.device(device).type not in ("cpu", "meta"):
        raise CannotDefer(f"{func} on {device}: the launcher itself moves a model to its device")
    if kwargs.get("pin_memory"):
        raise CannotDefer(f"{func} in pinned memory")
    return {**kwargs, "device": torch.device("meta")}


def _makes_large(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a function without tensors makes a large one in the CPU's memory."""
    if not any(one.name == "device" for one in func._schema.arguments):
        return False
    device = kwargs.get("device")
    if device is not None and torch.device(device).type != "cpu":
        return False
    on_meta = {"device": torch.device("meta"), **({"pin_memory": None} if "pin_memory" in kwargs else {})}
    sketch = func(*args, **{**kwargs, **on_meta})
    return isinstance(sketch, Tensor) and sketch.numel() >= LARGE


def _gives_tensors(func: Any) -> bool:
    return any("Tensor" in str(one.type) for one in func._schema.returns)


def _written(func: Any, args: Sequence[Any], kwargs: Any) -> list[Tensor]:
    """The tensors that an operator writes into."""
    found = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            found += [one for one in tree_flatten(value)[0] if isinstance(one, Tensor)]
    return found


@dataclass(frozen=True)
class Blueprint:
    """A model some of whose tensors have no memory yet, and where their numbers come from."""

    model: nn.Module
    value: Callable[[str, Tensor], Tensor]
    """The numbers of a tensor, by its name in the model, on the CPU."""

    def fill(self, module: nn.Module) -> None:
        """Gives every tensor below `module` its numbers, shared ones everywhere at once."""
        inside = set(module.modules())
        parameters: dict[int, nn.Parameter] = {}
        wanted = {id(one) for below in inside for one in _tensors(below) if one.is_meta}
        for prefix, owner in self.model.named_modules():
            for key, tensor in [*owner._parameters.items(), *owner._buffers.items()]:
                if tensor is None or id(tensor) not in wanted:
                    continue
                name = f"{prefix}.{key}".lstrip(".")
                if not isinstance(tensor, nn.Parameter):
                    owner._buffers[key] = self.value(name, tensor)
                    continue
                if id(tensor) not in parameters:
                    made = parameters[id(tensor)] = nn.Parameter(self.value(name, tensor), tensor.requires_grad)
                    made.__dict__.update(tensor.__dict__)
                owner._parameters[key] = parameters[id(tensor)]


def _tensors(module: nn.Module) -> Iterable[Tensor]:
    return [one for one in (*module._parameters.values(), *module._buffers.values()) if one is not None]


def defer(make: Callable[[], nn.Module]) -> Blueprint:
    """What `make` returns, its large tensors without memory.

    Raises:
        CannotDefer: it does something that can't be done later; then it has to be made as always.
    """
    tape = Tape()
    with tape, _AsIfThere():
        model = make()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_meta and not tape.knows(tensor):
            raise CannotDefer(f"'{name}' is made on the meta device by the model itself")
    return Blueprint(model, lambda _name, tensor: tape.value(tensor))
