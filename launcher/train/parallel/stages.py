"""A model cut into stages: each holds some of its layers, the first also what comes before them and the last what comes
after, under the plain model's names.

The plain model is `head(layers(embed(inputs)))`. Which of its parts `embed` and `head` use is found by watching what
they reach for, once, on tensors without memory.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from launcher.config.choices import PrecisionName
from launcher.errors import ConfigError, LauncherError
from launcher.train.parallel.precision import Precision

Hidden = Any
"""What flows between layers: a tensor, or a tuple of tensors."""


@dataclass(frozen=True)
class Span:
    """One stage: which layers it holds."""

    index: int
    count: int
    """Stages in all."""
    first_layer: int
    last_layer: int

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    def has(self, layer: int) -> bool:
        return self.first_layer <= layer <= self.last_layer


def spans_of(stages: Sequence[Sequence[int]]) -> list[Span]:
    """The stages of a plan's `stages`, [[first layer, last layer], …]."""
    return [Span(index, len(stages), first, last) for index, (first, last) in enumerate(stages)]


@dataclass(frozen=True)
class Anatomy:
    """Where a model's layers lie, and what is used before and after them."""

    layers: str
    """The list of layers by name."""
    before: frozenset[str]
    """Modules, parameters and buffers that `embed` uses, by name; of modules that hold the layers their own members."""
    after: frozenset[str]
    """What `head` uses."""

    @property
    def holders(self) -> list[str]:
        """The modules that the layers lie in, the model itself ("") first."""
        return _holders(self.layers)

    def holds(self, name: str, span: Span) -> bool:
        """Whether the parameter or buffer `name` lies in a stage."""
        if name.startswith(f"{self.layers}."):
            return span.has(int(name[len(self.layers) + 1 :].split(".")[0]))
        holder = max((one for one in self.holders if not one or name.startswith(f"{one}.")), key=len)
        start = len(holder) + 1 if holder else 0
        return self.needs(name[: start + len(name[start:].split(".")[0])], span)

    def needs(self, name: str, span: Span) -> bool:
        """Whether a stage holds the member `name`. What neither embed nor head uses lies in the first stage."""
        before, after = name in self.before, name in self.after
        return (span.is_first and (before or not after)) or (span.is_last and after)


def _holders(layers: str) -> list[str]:
    words = layers.split(".")
    return [".".join(words[:depth]) for depth in range(len(words))]


class Family(Protocol):
    """How models of one kind are taken apart."""

    def anatomy(self, model: nn.Module, inputs: Mapping[str, Any]) -> Anatomy:
        """What lies where in a model, found by a forward."""
        ...

    def cut(self, plain: nn.Module, anatomy: Anatomy, span: Span) -> nn.Module:
        """One stage of a model: the same modules, parameters and buffers under the same names, without those of other
        stages."""
        ...

    def run(self, stage: nn.Module, span: Span, inputs: Mapping[str, Any], hidden: Hidden) -> Any:
        """The forward of a stage: from `inputs` in the first, else from what the one before gave."""
        ...


class InOrder:
    """A model that is `head(layers(embed(inputs)))`."""

    def anatomy(self, model: Any, inputs: Mapping[str, Any]) -> Anatomy:
        watch, attributes = Watch(model), dict(vars(model))
        with watch.on() as before:
            hidden = model.embed(**inputs)
        hidden = through(model.layers, hidden)
        with watch.on() as after:
            model.head(hidden)
        if watch.layers in before | after:
            raise ConfigError("mesh.pp", "a pipeline", "embed or head looks at the layers, of which a stage has a few")
        kept = [name for name, value in vars(model).items() if attributes.get(name) is not value]
        if kept:
            problem = f"embed or head sets {', '.join(kept)} on the model, which the other doesn't see on another rank"
            raise ConfigError("mesh.pp", "a pipeline", problem, hint="give it on in the hidden tensors, or as a buffer")
        return watch.anatomy(before, after)

    def cut(self, plain: nn.Module, anatomy: Anatomy, span: Span) -> nn.Module:
        return cut(plain, anatomy, span)

    def run(self, stage: Any, span: Span, inputs: Mapping[str, Any], hidden: Hidden) -> Any:
        hidden = through(stage.layers, stage.embed(**inputs) if span.is_first else hidden)
        return stage.head(hidden) if span.is_last else hidden


class Sketch:
    """The model on tensors that have shapes and types and no memory, to ask what it uses and what it gives.

    They are on the meta device, or where a forward can't run there, fake tensors, which take ten times as long. In half
    precision they are fake from the start, for autocast is a matter of the device.
    """

    def __init__(
        self,
        make: Callable[[], nn.Module],
        family: Family,
        device: torch.device,
        precision: Precision,
    ) -> None:
        """
        Args:
            make: makes the model on the meta device.
        """
        self.model = make()
        self._mode: Any = nullcontext()
        self._device, self._real_device = torch.device("meta"), device
        self._precision, self._family = precision, family
        if precision.name is not PrecisionName.fp32:
            self._fake()
        self._stages: list[nn.Module] = []
        self._given: dict[Any, list[Hidden]] = {}

    def anatomy(self, inputs: Mapping[str, Any]) -> Anatomy:
        """What lies where, found by a forward of one micro-batch."""
        try:
            self._anatomy = self._look(inputs)
        except ConfigError:
            raise
        except Exception:  # a forward that has a tensor of its own on the CPU, or asks whether it is followed
            self._fake()
            try:
                self._anatomy = self._look(inputs)
            except ConfigError:
                raise
            except Exception as error:
                raise LauncherError(
                    "mesh.pp: a model is cut by following its forward on tensors without numbers, and this one's can't "
                    f"be followed: {type(error).__name__}: {error}"
                ) from error
        return self._anatomy

    def _look(self, inputs: Mapping[str, Any]) -> Anatomy:
        """As found in evaluation and in training, which may use different members."""
        found = []
        for trains in (False, True):
            self.model.train(trains)
            with self._running(), torch.no_grad():
                found.append(self._family.anatomy(self.model, self._without_memory(inputs)))
        before, after = ({name for one in found for name in getattr(one, what)} for what in ("before", "after"))
        return Anatomy(found[0].layers, frozenset(before), frozenset(after))

    def _fake(self) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode  # a second, which others don't pay

        self._mode, self._device = FakeTensorMode(allow_non_fake_inputs=True), self._real_device
        with self._mode:
            self.model.to_empty(device=self._device)

    @contextmanager
    def _running(self) -> Iterator[None]:
        with self._mode, self._device, self._precision.autocast():
            yield

    def hidden(self, inputs: Mapping[str, Any], spans: Sequence[Span]) -> list[Hidden]:
        """What each stage but the last gives to the next for these inputs, without memory; kept by their shapes."""
        key = _shapes(inputs)
        if key in self._given:
            return self._given[key]
        if not self._stages:
            self._stages = [self._family.cut(self.model, self._anatomy, span) for span in spans]
        given: list[Hidden] = []
        with self._running(), torch.enable_grad():
            without_memory = self._without_memory(inputs)
            for span in spans[:-1]:
                before = given[-1] if given else None
                given.append(self._family.run(self._stages[span.index], span, without_memory, before))
        self._given[key] = given
        return given

    def _without_memory(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        made: Mapping[str, Any] = tree_map_only(
            Tensor, lambda one: torch.empty(one.shape, dtype=one.dtype, device=self._device), dict(inputs)
        )
        return made


def _shapes(inputs: Mapping[str, Any]) -> Any:
    return tuple((name, tuple(one.shape), one.dtype) if isinstance(one, Tensor) else (name, repr(one))
                 for name, one in inputs.items())  # fmt: skip


def through(layers: Any, hidden: Hidden) -> Hidden:
    """What comes out of these layers."""
    for layer in layers:
        hidden = layer(hidden)
    return hidden


class Watch:
    """Sees which members of a model are reached for, those of the modules that hold its layers by their own names.

    torch keeps members out of an object's attributes, so that each access of one passes through `__getattr__`.
    """

    def __init__(self, model: Any) -> None:
        self.layers: str = next(name for name, one in model.named_modules() if one is model.layers)
        """The list of layers by name."""
        self._modules = {name: model.get_submodule(name) for name in _holders(self.layers)}

    @contextmanager
    def on(self) -> Iterator[set[str]]:
        """The members that are reached for inside, by name."""
        seen: set[str] = set()
        kinds = {name: type(one) for name, one in self._modules.items()}
        for name, module in self._modules.items():
            module.__class__ = _watching(kinds[name], name, seen)
        try:
            yield seen
        finally:
            for name, module in self._modules.items():
                module.__class__ = kinds[name]

    def anatomy(self, before: set[str], after: set[str]) -> Anatomy:
        """With what was reached for before the layers and after them."""
        own = {self.layers, *self._modules}
        return Anatomy(self.layers, frozenset(before - own), frozenset(after - own))


def _watching(kind: type[nn.Module], prefix: str, seen: set[str]) -> type[nn.Module]:
    def look(self: nn.Module, name: str) -> Any:
        seen.add(f"{prefix}.{name}".lstrip("."))
        return kind.__getattr__(self, name)

    def look_up(self: nn.ModuleDict, key: str) -> nn.Module:
        seen.add(f"{prefix}.{key}".lstrip("."))
        return nn.ModuleDict.__getitem__(self, key)

    members: dict[str, Any] = {"__getattr__": look}
    if issubclass(kind, nn.ModuleDict):
        members["__getitem__"] = look_up
    return type(kind.__name__, (kind,), members)


def cut(plain: nn.Module, anatomy: Anatomy, span: Span) -> nn.Module:
    """One stage of a model: the same modules, parameters and buffers under the same names, without those of others."""
    stage = _shallow(plain)
    for name in anatomy.holders:
        holder = stage.get_submodule(name)
        for members in (holder._modules, holder._parameters, holder._buffers):
            for key in list(members):
                full = f"{name}.{key}".lstrip(".")
                if full == anatomy.layers or full in anatomy.holders:
                    members[key] = _shallow(members[key])  # type: ignore[assignment, arg-type]
                elif not anatomy.needs(full, span):
                    del members[key]
    layers = stage.get_submodule(anatomy.layers)
    for key in list(layers._modules):
        if not span.has(int(key)):
            del layers._modules[key]
    if "layers" in stage.__dict__:  # a second name for a list that is registered elsewhere
        object.__setattr__(stage, "layers", layers)
    return stage


def take_members(stage: nn.Module, plain: nn.Module, anatomy: Anatomy) -> None:
    """Gives the modules that a stage has of its own the parameters and buffers that the plain model's have by now."""
    for name in anatomy.holders:
        own, original = stage.get_submodule(name), plain.get_submodule(name)
        own._parameters.update({key: original._parameters[key] for key in own._parameters})
        own._buffers.update({key: original._buffers[key] for key in own._buffers})


def share_buffers(stages: Sequence[nn.Module], anatomy: Anatomy) -> None:
    """Lets several stages on one rank have the buffers of what holds the layers together, so that one that a forward
    exchanges is the same everywhere."""
    for name in anatomy.holders if len(stages) > 1 else ():
        holders = [stage.get_submodule(name) for stage in stages]
        shared = {key: value for one in holders for key, value in one._buffers.items()}
        for one in holders:
            one._buffers = shared


def merged(stages: Sequence[nn.Module], anatomy: Anatomy, plain: nn.Module) -> nn.Module:
    """One module that holds what several stages of the plain model hold, as it stands."""
    return stages[0] if len(stages) == 1 else _merged(stages, anatomy.layers, plain)


def _shallow(module: nn.Module) -> nn.Module:
    """The same module with member lists of its own; the members are shared."""
    made: nn.Module = object.__new__(type(module))  # a sharded module's class makes another one of `copy.copy`
    made.__dict__ = dict(module.__dict__)
    for members in ("_modules", "_parameters", "_buffers"):
        made.__dict__[members] = dict(module.__dict__[members])
    return made


def _merged(modules: Sequence[nn.Module], layers: str, plain: nn.Module, prefix: str = "") -> nn.Module:
    made = _shallow(modules[0])
    for key in {key: None for one in modules for key in one._modules}:
        found: list[Any] = [one._modules[key] for one in modules if key in one._modules]
        original: Any = plain._modules[key]
        full = f"{prefix}.{key}".lstrip(".")
        if layers == full or layers.startswith(f"{full}."):
            made._modules[key] = _merged(found, layers, original, full)
        else:  # a stage may have something neutral in the place of another one's
            made._modules[key] = original if any(one is original for one in found) else found[0]
    for one in modules[1:]:
        made._parameters.update(one._parameters)
    made._buffers = modules[0]._buffers
    return made
