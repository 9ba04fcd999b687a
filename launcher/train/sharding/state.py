"""What a rank holds of a run's parameters, buffers and optimizer states, as pieces of the plain model's."""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from launcher.errors import LauncherError
from launcher.train.checkpoint.pieces import Named, Piece, piece_of
from launcher.train.parallel.mesh import Place

MODEL, STATE, NUMBER = "model.", "optimizer.", "optimizer_number."
"""What names begin with: of a parameter or buffer; of a tensor of its optimizer state; of a number of that state."""

Saved = Mapping[str, tuple[torch.Size, torch.dtype]]
"""The shape and type of what was saved, by name."""


class State(ABC):
    """The state of one sharding on one rank: what it holds, and how that is filled with what was saved.

    To load: `make_room`, then fill the memory of `targets`, then `filled`.
    """

    def __init__(self, sharding: Any, place: Place) -> None:
        self.sharding, self.place = sharding, place

    def pieces(self) -> list[Piece]:
        """What this rank holds and has to be saved; of what other stages hold too only what counts as theirs."""
        self.sharding.settle()
        model = [self._piece(MODEL + one.name, one.tensor) for one in self.named() if one.is_owned]
        return [*self.model_pieces(model), *self.optimizer_pieces()]

    def targets(self, saved: Saved) -> list[Piece]:
        """What has to be filled on this rank. Buffers that are no part of the state_dict stay if they weren't saved."""
        model = [
            self._piece(MODEL + one.name, one.tensor)
            for one in self.named()
            if one.is_kept or MODEL + one.name in saved
        ]
        return [*self.model_targets(model), *self.optimizer_pieces(filling=True), *self.number_targets(saved)]

    @abstractmethod
    def make_room(self, saved: Saved) -> None:
        """Gives the optimizer states of the kind that were saved, and drops those that it has.

        Raises:
            LauncherError: this sharding can't divide such a state.
        """

    @abstractmethod
    def filled(self) -> None:
        """Called when all targets hold what was saved."""

    def model_pieces(self, pieces: list[Piece]) -> list[Piece]:
        """The parameters and buffers as they are saved. `pieces`: as this rank has them."""
        return pieces

    def model_targets(self, pieces: list[Piece]) -> list[Piece]:
        """What has to be filled with the parameters and buffers. `pieces`: as this rank has them."""
        return pieces

    @abstractmethod
    def optimizer_pieces(self, *, filling: bool = False) -> list[Piece]:
        """The optimizer states of this rank. `filling`: tensors alone, and also what counts as another stage's."""

    @abstractmethod
    def number_targets(self, saved: Saved) -> list[Piece]:
        """Memory for the numbers that were saved of this rank's optimizer states, until `filled` puts them there."""

    def named(self) -> Iterator[Named]:
        """The parameters and buffers of this rank, each once."""
        part, model = self.sharding.part, self.sharding.model
        if part is not None:
            yield from part.named()
            return
        left_out = _not_in_state_dict(model)
        for name, parameter in model.named_parameters():
            yield Named(name, parameter)
        for name, buffer in model.named_buffers():
            yield Named(name, buffer, is_kept=name not in left_out)

    def _piece(self, name: str, tensor: Tensor) -> Piece:
        return piece_of(name, tensor, self.place.rank, self.place.degree)


class WholeState(State):
    """Of shardings whose optimizer has the model's own parameters, whole or as DTensors."""

    def __init__(self, sharding: Any, place: Place) -> None:
        super().__init__(sharding, place)
        self._numbers: list[tuple[dict[str, Any], str, Tensor]] = []

    @property
    def _optimizer(self) -> torch.optim.Optimizer:
        optimizer = self.sharding.optimizer
        # of torch's ZeroRedundancyOptimizer the one of this rank's part
        own: torch.optim.Optimizer = getattr(optimizer, "optim", optimizer)
        return own

    @property
    def _is_divided(self) -> bool:
        return self._optimizer is not self.sharding.optimizer

    def make_room(self, saved: Saved) -> None:
        kinds = of_parameters(saved, STATE)
        self._optimizer.state.clear()
        for name, group, parameter in self._trained():
            for key, (shape, dtype) in kinds.get(name, {}).items():
                self._optimizer.state[parameter][key] = room(name, key, shape, dtype, parameter, group)

    def optimizer_pieces(self, *, filling: bool = False) -> list[Piece]:
        found = []
        owned = {id(one.tensor) for one in self.named() if one.is_owned or filling}
        for name, _group, parameter in self._trained():
            if id(parameter) not in owned:
                continue
            for key, value in self._optimizer.state.get(parameter, {}).items():
                one = state_tensor(name, key, value)
                if one is not None and (isinstance(value, Tensor) or not filling):
                    prefix = STATE if isinstance(value, Tensor) else NUMBER
                    found.append(self._state_piece(f"{prefix}{name}.{key}", one))
        return found

    def _state_piece(self, name: str, tensor: Tensor) -> Piece:
        return piece_of(name, tensor) if self._is_divided else self._piece(name, tensor)

    def number_targets(self, saved: Saved) -> list[Piece]:
        kinds, found = of_parameters(saved, NUMBER), []
        self._numbers.clear()
        for name, _group, parameter in self._trained():
            for key, (_shape, dtype) in kinds.get(name, {}).items():
                number = torch.zeros((), dtype=dtype)
                self._numbers.append((self._optimizer.state[parameter], key, number))
                found.append(Piece(f"{NUMBER}{name}.{key}", (), number))
        return found

    def filled(self) -> None:
        for values, key, number in self._numbers:
            values[key] = number.item()
        self._numbers.clear()

    def _trained(self) -> Iterator[tuple[str, dict[str, Any], nn.Parameter]]:
        names = {id(one.tensor): one.name for one in self.named()}
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                yield names[id(parameter)], group, parameter


def _not_in_state_dict(model: nn.Module) -> set[str]:
    """The names of the buffers that are no part of it. It isn't asked itself: a model may take long to make one."""
    return {
        f"{prefix}.{name}".lstrip(".")
        for prefix, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }


def of_parameters(saved: Saved, prefix: str) -> dict[str, dict[str, tuple[torch.Size, torch.dtype]]]:
    """For each parameter by name what was saved of its optimizer state, by key."""
    found: dict[str, dict[str, tuple[torch.Size, torch.dtype]]] = defaultdict(dict)
    for full, kind in saved.items():
        if full.startswith(prefix):
            name, _, key = full[len(prefix) :].rpartition(".")
            found[name][key] = kind
    return found


def state_tensor(name: str, key: str, value: Any) -> Tensor | None:
    """A value of an optimizer's state as a tensor; None: there is nothing in it.

    Raises:
        LauncherError: it is neither a tensor nor a number.
    """
    if value is None:
        return None
    if isinstance(value, Tensor):
        return value
    if isinstance(value, bool | int | float):
        return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
    raise LauncherError(
        f"optimizer: its state '{key}' of {name} is a {type(value).__name__}, which a checkpoint can't hold: "
        "keep tensors and numbers there"
    )


def room(
    name: str, key: str, shape: torch.Size, dtype: torch.dtype, parameter: nn.Parameter, group: Mapping[str, Any]
) -> Tensor:
    """Memory for one tensor of a parameter's optimizer state, where its optimizer would have it.

    Raises:
        LauncherError: it has a shape of its own, and the parameter is sharded.
    """
    if shape == parameter.shape and parameter.ndim:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    if not shape:
        # torch keeps its counters on the host unless its kernels read them
        on_host = key == "step" and not (group.get("capturable") or group.get("fused"))
        return torch.zeros((), dtype=dtype, device="cpu" if on_host else parameter.device)
    if isinstance(parameter, DTensor):
        raise LauncherError(
            f"optimizer: its state '{key}' of {name} has a shape of its own, {list(shape)} for a parameter of "
            f"{list(parameter.shape)}, which can't be divided like the parameter: go on under strategy=ddp"
        )
    return torch.zeros(shape, dtype=dtype, device=parameter.device)
