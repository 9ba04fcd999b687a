"""What a rank holds of a run's tensors, in terms of the whole ones: the same under every strategy and layout."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Named:
    """A parameter or a buffer under the plain model's first name for it."""

    name: str
    tensor: Tensor
    is_owned: bool = True
    """False: another stage of the pipeline holds it too, and counts as its owner."""
    is_kept: bool = True
    """False: a buffer that is no part of the model's state_dict."""


@dataclass(frozen=True)
class Box:
    """A rectangular part of a whole tensor."""

    offsets: Shape
    sizes: Shape
    value: Tensor
    """What is in it, of shape `sizes`: this rank's own memory."""


@dataclass(frozen=True)
class Piece:
    """What a rank holds of one tensor."""

    name: str
    shape: Shape
    """Of the whole tensor."""
    value: Tensor
    """This rank's own memory: a box of the whole, or where `start` is given a run of its elements [count]."""
    offsets: Shape = ()
    """Where the box begins."""
    start: int | None = None
    """The first element of the run, in the order in which a contiguous tensor lies in memory; None: a box."""
    copy: int = 0
    copies: int = 1
    """How many ranks hold the same, and which of them this one is."""

    def boxes(self) -> Iterator[Box]:
        """This piece as boxes, none of them empty."""
        if self.start is None:
            if self.value.numel():
                yield Box(self.offsets, tuple(self.value.shape), self.value)
            return
        done = 0
        for offsets, sizes in run_boxes(self.shape, self.start, self.start + self.value.numel()):
            count = prod(sizes)
            yield Box(offsets, sizes, self.value[done : done + count].view(sizes))
            done += count


def piece_of(name: str, tensor: Tensor, copy: int = 0, copies: int = 1) -> Piece:
    """What this rank holds of a tensor that is whole or a DTensor.

    Args:
        copy, copies: of a whole tensor, which many ranks hold alike.
    """
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return Piece(name, tuple(tensor.shape), tensor, (0,) * tensor.ndim, copy=copy, copies=copies)
    mesh, placements = tensor.device_mesh, tensor.placements
    _sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    copy, copies = 0, 1
    for axis, placement in enumerate(placements):
        if isinstance(placement, Replicate):
            copy = copy * mesh.size(axis) + mesh.get_local_rank(axis)
            copies *= mesh.size(axis)
    return Piece(name, tuple(tensor.shape), tensor.to_local(), tuple(offsets), copy=copy, copies=copies)


def run_boxes(shape: Shape, start: int, stop: int) -> Iterator[tuple[Shape, Shape]]:
    """The elements from `start` up to `stop` of a contiguous tensor as offsets and sizes of boxes, in their order."""
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # within one row
        yield from _inside(shape, last, start, stop)
        return
    if start < first * row:
        yield from _inside(shape, first - 1, start, first * row)
    if first < last:
        yield (first, *[0] * (len(shape) - 1)), (last - first, *shape[1:])
    if last * row < stop:
        yield from _inside(shape, last, last * row, stop)


def _inside(shape: Shape, index: int, start: int, stop: int) -> Iterator[tuple[Shape, Shape]]:
    begin = index * prod(shape[1:])
    for offsets, sizes in run_boxes(shape[1:], start - begin, stop - begin):
        yield (index, *offsets), (1, *sizes)


def to_write(pieces: Sequence[Piece]) -> list[Piece]:
    """Those of its pieces that this rank writes: of what several ranks hold alike each writes about as many bytes."""
    written: dict[int, list[int]] = defaultdict(list)
    mine = []
    for piece in pieces:
        load = written[piece.copies] = written[piece.copies] or [0] * piece.copies
        writer = load.index(min(load))
        load[writer] += piece.value.numel() * piece.value.element_size()
        if writer == piece.copy:
            mine.append(piece)
    return mine
