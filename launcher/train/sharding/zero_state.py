"""The state of a run under DeepSpeed's ZeRO, whose optimizer has flat slices of many parameters in a row."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from launcher.errors import LauncherError
from launcher.train.checkpoint.pieces import Piece
from launcher.train.parallel.mesh import Place
from launcher.train.sharding.state import MODEL, NUMBER, STATE, Saved, State, of_parameters, room, state_tensor


@dataclass(frozen=True)
class _Slice:
    """Where what this rank updates of a parameter lies in the flat tensor that its optimizer has."""

    name: str
    parameter: Any
    flat: Tensor
    offset: int
    """Of the slice in the flat tensor."""
    start: int
    """Its first element in the parameter."""
    count: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole parameter."""
        return tuple(getattr(self.parameter, "ds_shape", self.parameter.shape))

    def of(self, flat: Tensor) -> Tensor:
        """What of a tensor like the flat one belongs to this slice [count]."""
        return flat.narrow(0, self.offset, self.count)


class ZeroState(State):
    """Nothing is gathered: each rank saves and fills the slices that it has."""

    def __init__(self, sharding: Any, place: Place) -> None:
        super().__init__(sharding, place)
        self._zero = sharding.engine.optimizer
        self._scalars: list[tuple[Tensor, str, list[Tensor]]] = []

    @property
    def _flats(self) -> list[tuple[Tensor, list[Any]]]:
        """The flat tensors of this rank's optimizer, each with the parameters that it has slices of."""
        if self.sharding.stage == 3:
            return list(zip(self._zero.fp32_partitioned_groups_flat, self._zero.fp16_groups, strict=True))
        return list(zip(self._zero.single_partition_of_fp32_groups, self._zero.bit16_groups, strict=True))

    @property
    def _states(self) -> dict[Any, dict[str, Any]]:
        states: dict[Any, dict[str, Any]] = self._zero.optimizer.state
        return states

    def _slices(self) -> Iterator[_Slice]:
        """Every trained parameter; where this rank has nothing of one, a slice of no elements."""
        names = {id(one.tensor): one.name for one in self.named()}
        for flat, parameters in self._flats:
            for one in parameters:
                if self.sharding.stage == 3:
                    _group, offset, count = self._zero.grad_position[self._zero.get_param_id(one)]
                    start = count * self.place.rank
                    count = max(0, min(count, one.ds_numel - start))  # the last rank's is filled up
                    yield _Slice(names[id(one)], one, flat, offset, min(start, one.ds_numel), count)
                    continue
                mapping = one._hp_mapping
                if mapping is None:
                    yield _Slice(names[id(one)], one, flat, 0, 0, 0)
                    continue
                own, there = mapping.lp_fragment_address, mapping.hp_fragment_address
                yield _Slice(names[id(one)], one, flat, there.start, own.start, own.numel)

    def model_pieces(self, pieces: list[Piece]) -> list[Piece]:
        return pieces if self.sharding.stage < 3 else self._in_parts(pieces, [self._master])

    def model_targets(self, pieces: list[Piece]) -> list[Piece]:
        if self.sharding.stage == 3:
            return self._in_parts(pieces, [self._master, self._own_part])
        return [*pieces, *(self._master(one) for one in self._slices())]

    def _in_parts(self, pieces: list[Piece], parts: list[Any]) -> list[Piece]:
        """Under stage 3: buffers are whole, parameters aren't."""
        slices = {MODEL + one.name: one for one in self._slices()}
        frozen = {MODEL + one.name: one.tensor for one in self.named() if hasattr(one.tensor, "ds_tensor")}
        found = []
        for piece in pieces:
            if piece.name in slices:
                found += [part(slices[piece.name]) for part in parts]
            elif piece.name in frozen:
                found.append(self._frozen(piece.name, frozen[piece.name]))
            else:
                found.append(piece)
        return found

    def _frozen(self, name: str, parameter: Any) -> Piece:
        count = parameter.ds_tensor.numel()
        start = min(count * self.place.rank, parameter.ds_numel)
        count = max(0, min(count, parameter.ds_numel - start))
        value = parameter.ds_tensor.detach().view(-1).narrow(0, 0, count)
        return Piece(name, tuple(parameter.ds_shape), value, start=start)

    def _master(self, one: _Slice) -> Piece:
        """The numbers that the optimizer changes."""
        return Piece(MODEL + one.name, one.shape, one.of(one.flat.detach()), start=one.start)

    def _own_part(self, one: _Slice) -> Piece:
        """Under stage 3: the numbers that are gathered for a forward."""
        value = one.parameter.ds_tensor.detach().view(-1).narrow(0, 0, one.count)
        return Piece(MODEL + one.name, one.shape, value, start=one.start)

    def optimizer_pieces(self, *, filling: bool = False) -> list[Piece]:
        found = []
        for one in self._slices():
            for key, value in self._states.get(one.flat, {}).items():
                tensor = state_tensor(one.name, key, value)
                if tensor is None or (filling and not tensor.ndim):
                    continue  # a counter of many parameters in one: see `number_targets`
                prefix = STATE if isinstance(value, Tensor) else NUMBER
                name = f"{prefix}{one.name}.{key}"
                if tensor.ndim:
                    found.append(Piece(name, one.shape, one.of(tensor), start=one.start))
                else:
                    found.append(self._piece(name, tensor))
        return found

    def make_room(self, saved: Saved) -> None:
        kinds = of_parameters(saved, STATE)
        self._states.clear()
        first = self._zero.optimizer.param_groups[0]
        for one in self._slices():
            values = self._states.setdefault(one.flat, {})
            for key, (shape, dtype) in kinds.get(one.name, {}).items():
                if key in values:
                    continue
                if tuple(shape) == one.shape and shape:
                    values[key] = torch.zeros_like(one.flat, dtype=dtype, requires_grad=False)
                elif not shape:
                    values[key] = room(one.name, key, shape, dtype, one.parameter, first)
                else:
                    raise LauncherError(
                        f"optimizer: its state '{key}' of {one.name} has a shape of its own, {list(shape)}, which "
                        "ZeRO can't divide: go on under strategy=ddp"
                    )

    def number_targets(self, saved: Saved) -> list[Piece]:
        """Counters too: each stands for all parameters of a flat tensor."""
        found = []
        self._scalars.clear()
        slices = list(self._slices())
        for prefix in (STATE, NUMBER):
            kinds = of_parameters(saved, prefix)
            for flat, _parameters in self._flats:
                names = [one.name for one in slices if one.flat is flat]
                keys = {key: kind for name in names for key, kind in kinds.get(name, {}).items()}
                for key, (shape, dtype) in keys.items():
                    if shape:
                        continue
                    here = [name for name in names if key in kinds.get(name, {})]
                    read = [torch.zeros((), dtype=dtype) for _ in here]
                    found += [Piece(f"{prefix}{name}.{key}", (), one) for name, one in zip(here, read, strict=True)]
                    self._scalars.append((flat, key, read))
        return found

    def filled(self) -> None:
        for flat, key, read in self._scalars:
            if any(one.item() != read[0].item() for one in read):
                raise LauncherError(
                    f"optimizer: its state '{key}' differs among parameters that ZeRO updates as one: go on under "
                    "strategy=fsdp or ddp"
                )
            values = self._states.setdefault(flat, {})
            if isinstance(values.get(key), Tensor):
                values[key].copy_(read[0])
            else:
                values[key] = read[0].item()
        self._scalars.clear()
        if self.sharding.stage == 3 and self._zero.persistent_parameters:
            # small parameters stay gathered between windows
            first = self._zero.persistent_parameters[0]
            first.partition(self._zero.persistent_parameters)
            first.all_gather(self._zero.persistent_parameters)
