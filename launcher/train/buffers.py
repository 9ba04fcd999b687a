"""Buffers that a forward changes, such as batch norm's running statistics: the same on every rank after every update.

What moves is found by looking, window after window, so it is the same whether torch's own batch norm, a running
instance norm or a model's own moving average changes a buffer, and whether it does so in place or by a new tensor.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from launcher.errors import LauncherError
from launcher.train.parallel.mesh import Place


@dataclass(frozen=True)
class Kept:
    """A buffer as it stood."""

    owner: nn.Module
    name: str
    full_name: str
    buffer: Tensor | None
    value: Tensor | None
    """A copy of what was in it."""

    @property
    def now(self) -> Tensor | None:
        return self.owner._buffers[self.name]

    @property
    def is_comparable(self) -> bool:
        """Whether it still is a tensor of the shape and type that it had."""
        now, value = self.now, self.value
        return now is not None and value is not None and (now.shape, now.dtype) == (value.shape, value.dtype)

    def changed(self) -> Tensor:
        """Whether it holds something else by now (bool scalar, on the buffer's device)."""
        now, value = self.now, self.value
        if now is None or value is None or not self.is_comparable:
            return torch.tensor(now is not self.buffer)
        return (now != value).any()

    def restore(self) -> None:
        if self.buffer is not None and self.value is not None:
            self.buffer.copy_(self.value)
        self.owner._buffers[self.name] = self.buffer


@torch.no_grad()
def keep_buffers(model: nn.Module) -> list[Kept]:
    """Every buffer of a model as it stands, for `restore_buffers`, `borrowed_buffers` and `Buffers`."""
    return [
        Kept(module, name, f"{prefix}.{name}".lstrip("."), buffer, None if buffer is None else buffer.detach().clone())
        for prefix, module in model.named_modules()
        for name, buffer in module._buffers.items()
    ]


@torch.no_grad()
def restore_buffers(kept: Sequence[Kept]) -> None:
    """Takes back whatever has come in since; buffers that were replaced are those of before again."""
    for one in kept:
        one.restore()


@contextmanager
def borrowed_buffers(kept: Sequence[Kept]) -> Iterator[None]:
    """Puts the copies in the place of the buffers, and afterwards the buffers back as they were. Nothing is written
    into a tensor that a backward may still need. A copy can be lent once."""
    own = [one.now for one in kept]
    for one in kept:
        one.owner._buffers[one.name] = one.value
    try:
        yield
    finally:
        for one, buffer in zip(kept, own, strict=True):
            one.owner._buffers[one.name] = buffer


def untouched_buffers(model: nn.Module) -> AbstractContextManager[None]:
    """Leaves every buffer as it was, whatever the forward and the backward inside do to it."""
    return borrowed_buffers(keep_buffers(model))


class Buffers:
    """The buffers of a model on the data-parallel ranks, brought to agree after every update.

    An average of running means and variances commutes with their exponential decay, so it could be taken later. It is
    taken after each update because then no bit depends on when a run was validated, saved or stopped.
    """

    def __init__(self, model: nn.Module, place: Place) -> None:
        self._model, self._place = model, place

    def keep(self) -> list[Kept]:
        """The buffers before a window."""
        return keep_buffers(self._model)

    @torch.no_grad()
    def changed(self, kept: Sequence[Kept]) -> list[float]:
        """For each buffer 1 where this rank's part of the window changed it, else 0; [] on one rank, which agrees with
        itself. Summed over the ranks they say which ones `agree` has to look at."""
        if self._place.degree == 1 or not kept:
            return []
        return [float(one) for one in torch.stack([one.changed().cpu() for one in kept]).tolist()]

    @torch.no_grad()
    def agree(self, kept: Sequence[Kept], changed: Sequence[float]) -> None:
        """Brings buffers that a rank has changed to one state: floating ones to the average of all ranks (in float32
        at least), whole numbers and truth values to the largest, since a rank without a sample of its own in some
        micro-step has counted fewer.

        Raises:
            LauncherError: one has another shape or type than before the window.
        """
        moved = [one for one, ranks in zip(kept, changed, strict=True) if ranks]
        buffers: list[Tensor] = []
        for one in moved:
            now = one.now
            if now is None or not one.is_comparable:
                raise LauncherError(
                    f"model: buffer '{one.full_name}' has changed its shape or type in a forward, so "
                    f"{self._place.degree} ranks can't be brought to agree on it"
                )
            buffers.append(torch.view_as_real(now) if now.is_complex() else now)
        floating = [one for one in buffers if one.is_floating_point()]
        exact = torch.float64 if any(one.dtype == torch.float64 for one in floating) else torch.float32
        self._reduce(floating, exact, dist.ReduceOp.SUM)
        self._reduce([one for one in buffers if not one.is_floating_point()], torch.int64, dist.ReduceOp.MAX)

    def _reduce(self, buffers: Sequence[Tensor], dtype: torch.dtype, operation: "dist.ReduceOp.RedOpType") -> None:
        if not buffers:
            return
        values = torch.cat([one.detach().flatten().to(dtype).cpu() for one in buffers])
        dist.all_reduce(values, operation, group=self._place.group)
        if operation == dist.ReduceOp.SUM:
            values /= self._place.degree
        for buffer, part in zip(buffers, torch.split(values, [one.numel() for one in buffers]), strict=True):
            buffer.copy_(part.view_as(buffer))
