"""Where a rank stands: among those that see different samples, and among the stages that share a window."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from launcher.train import heart


@dataclass(frozen=True)
class Pipe:
    """Where a rank stands among those that hold the stages of one pipeline."""

    rank: int
    size: int
    group: dist.ProcessGroup
    """What flows between stages travels here."""
    host_group: dist.ProcessGroup
    """For numbers on the host."""

    def sum(self, values: Sequence[float]) -> list[float]:
        """The sums of `values` over the ranks of the pipeline, in float64."""
        return _sum(values, self.host_group)


@dataclass(frozen=True)
class Place:
    """Where this rank stands among those that see different samples."""

    rank: int
    degree: int
    device: torch.device
    group: dist.ProcessGroup | None = None
    """A gloo group for numbers on the host; None: the default one."""
    pipe: Pipe | None = None
    """None: every rank holds all layers."""
    device_group: dist.ProcessGroup | None = None
    """For gradients; None: the default one."""
    world_group: dist.ProcessGroup | None = None
    """A gloo group of all ranks of the run; None: the default one."""

    @property
    def is_first(self) -> bool:
        """Whether this is the one rank that writes for the run."""
        return self.rank == 0 and (self.pipe is None or self.pipe.rank == 0)

    @property
    def world_size(self) -> int:
        """All ranks of the run."""
        return self.degree * (1 if self.pipe is None else self.pipe.size)

    def sum(self, values: Sequence[float]) -> list[float]:
        """The sums of `values` over the data-parallel ranks, in float64."""
        return _sum(values, self.group) if self.degree > 1 else _exact(values).tolist()

    def everywhere(self, values: Sequence[float]) -> Sequence[float]:
        """The sums of `values` over all ranks of the run, where they are those over the data-parallel ones already."""
        return values if self.pipe is None else self.pipe.sum(values)


def _exact(values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _sum(values: Sequence[float], group: dist.ProcessGroup | None) -> list[float]:
    numbers = _exact(values)
    heart.beat(waits=True)
    dist.all_reduce(numbers, group=group)
    heart.beat()
    return [float(one) for one in numbers]


def take_place(
    rank: int, degree: int, pp: int, device: torch.device, *, group: dist.ProcessGroup | None, timeout: timedelta
) -> Place:
    """The place of a global rank. Every rank calls it alike, for it makes process groups.

    Ranks that see different samples are neighbours, and the stages of a pipeline lie `degree` apart: what data-parallel
    ranks say to each other is more, and neighbours are on one node.

    Args:
        group: a gloo group of all ranks; None: the default one.
    """
    if pp == 1:
        return Place(rank, degree, device, group, world_group=group)
    stage, mine = divmod(rank, degree)
    rows = [[one * degree + other for other in range(degree)] for one in range(pp)]
    columns = [list(column) for column in zip(*rows, strict=True)]
    data_group, data_host = _groups(rows, stage, timeout)
    pipe_group, pipe_host = _groups(columns, mine, timeout)
    pipe = Pipe(stage, pp, pipe_group, pipe_host)
    return Place(mine, degree, device, data_host, pipe, data_group, world_group=group)


def _groups(
    members: Sequence[Sequence[int]], own: int, timeout: timedelta
) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """A group for tensors on the device and one of gloo for each list of ranks; those of this rank's list."""
    made = [
        (dist.new_group(list(ranks), timeout=timeout), dist.new_group(list(ranks), backend="gloo", timeout=timeout))
        for ranks in members
    ]
    return made[own]
