"""Which samples make up an update, and how they lie over ranks and micro-batches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from launcher.errors import DataError
from launcher.plan.batch import BatchPlan, WindowTable, rank_slice
from launcher.train.layout import Layout, by_length, in_order_of_arrival
from launcher.train.randomness import epoch_order, seed_sample

Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class MicroBatch:
    """What one rank puts through one forward and backward."""

    batch: Batch
    """Tensors of [rows, …], on the rank's device."""
    num_real: int
    """Rows that count; those behind them are copies that fill up and are masked."""


@dataclass(frozen=True)
class Window:
    """One rank's part of the samples of one update, and what all ranks' parts come to."""

    update: int
    epoch: float
    """Epochs that have passed when this window is through."""
    micro_batches: Sequence[MicroBatch]
    indices: np.ndarray
    """Of all samples of the window, over all ranks."""
    weight: float
    """Sum of the weights of all samples, over all ranks: the divisor of the window's gradient."""
    samples: int
    tokens: int | None
    """Input tokens without padding over all ranks, as the task counts them; None where it doesn't."""


@dataclass(frozen=True)
class Place:
    """Where this rank stands among those that see different samples."""

    rank: int
    degree: int
    device: torch.device
    group: dist.ProcessGroup | None = None
    """A gloo group for numbers on the host; None: the default one."""

    def sum(self, values: Sequence[float]) -> list[float]:
        """The sums of `values` over the data-parallel ranks, in float64."""
        numbers = torch.tensor(values, dtype=torch.float64)
        if self.degree > 1:
            dist.all_reduce(numbers, group=self.group)
        return [float(one) for one in numbers]


class Windows:
    """The windows of a run: which samples from (seed, update) alone, laid out over ranks and micro-batches."""

    def __init__(
        self,
        data: Any,
        task: Any,
        batch: BatchPlan,
        table: WindowTable,
        place: Place,
        *,
        seed: int,
        shuffle: bool,
        layout: str,
    ) -> None:
        self.data, self.task, self.batch, self.table, self.place = data, task, batch, table, place
        self.seed, self.shuffle, self.layout = seed, shuffle, layout
        self._order: tuple[int, np.ndarray] | None = None

    def indices(self, update: int) -> np.ndarray:
        """The samples of window `update` (from 1), int64 [samples], in the order of the epoch."""
        window = self.table.window(update)
        if self._order is None or self._order[0] != window.epoch:
            samples = self.table.samples_per_epoch
            self._order = (window.epoch, epoch_order(self.seed, window.epoch, samples, shuffle=self.shuffle))
        return self._order[1][window.start : window.stop]

    def get(self, update: int) -> Window:
        """Reads and lays out window `update`, and agrees on its weight with the other ranks."""
        reading = _Reading(self, self.indices(update), self.table.window(update).epoch)
        micro_batches, weight, tokens = [], 0.0, 0
        counts_tokens = callable(getattr(self.task, "length", None))
        for positions in self._laid_out(reading)[self.place.rank]:
            # a rank without a sample in this micro-step takes part with a masked copy of a real one
            samples = [reading.sample(position) for position in positions or [0]]
            batch = collate(self.task, samples)
            if positions:
                weight += float(row_weights(self.task, batch).sum())
                tokens += sum(self.task.length(sample) for sample in samples) if counts_tokens else 0
            micro_batches.append(MicroBatch(to_device(batch, self.place.device), len(positions)))
        total_weight, total_tokens = self.place.sum([weight, tokens])
        return Window(
            update=update,
            epoch=self.table.samples_after(update) / self.table.samples_used_per_epoch,
            micro_batches=micro_batches,
            indices=reading.indices,
            weight=total_weight,
            samples=len(reading.indices),
            tokens=int(total_tokens) if counts_tokens else None,
        )

    def _laid_out(self, reading: "_Reading") -> Layout:
        if self.layout == "arrival":
            return in_order_of_arrival(self.batch, len(reading.indices))
        return by_length(self.batch, reading.lengths())


class _Reading:
    """The samples of one window as this rank reads them, each once."""

    def __init__(self, windows: Windows, indices: np.ndarray, epoch: int) -> None:
        self.indices = indices
        self._windows, self._epoch = windows, epoch
        self._samples: dict[int, Any] = {}

    def sample(self, position: int) -> Any:
        if position not in self._samples:
            windows = self._windows
            index = int(self.indices[position])
            self._samples[position] = read_sample(windows.data, index, windows.seed, self._epoch)
        return self._samples[position]

    def lengths(self) -> list[int]:
        """The length of every sample of the window, the same on every rank.

        A data set that knows them (`lengths`) is asked; of another each rank reads its share and tells the others.
        """
        windows, place = self._windows, self._windows.place
        known = getattr(windows.data, "lengths", None)
        if known is not None:
            return [int(known[index]) for index in self.indices]
        mine = rank_slice(len(self.indices), place.degree, place.rank)
        told = np.zeros(len(self.indices))
        for position in mine:
            told[position] = windows.task.length(self.sample(position))
        return [int(one) for one in place.sum(told.tolist())]


def read_sample(data: Any, index: int, seed: int, epoch: int) -> Any:
    """Sample `index` of `data`, its randomness seeded by (seed, epoch, index)."""
    seed_sample(seed, epoch, index)
    return data[index]


def collate(task: Any, samples: list[Any]) -> Batch:
    """The task's batch of these samples. Raises DataError where it is no dict of tensors with one row a sample."""
    batch = task.collate(samples)
    if not isinstance(batch, Mapping) or not batch:
        raise DataError(f"task.collate must give a dict of tensors, not {type(batch).__name__}")
    for name, value in batch.items():
        if not isinstance(value, Tensor) or value.ndim < 1 or value.shape[0] != len(samples):
            shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise DataError(f"task.collate: '{name}' must be a tensor of [{len(samples)}, …], not {shape}")
    return batch


def row_weights(task: Any, batch: Batch) -> Tensor:
    """What each row counts in the loss, float64 [rows]. Raises DataError where a weight is negative or not finite."""
    weights = torch.as_tensor(task.weight(batch)).detach().double()
    rows = next(iter(batch.values())).shape[0]
    if weights.shape != (rows,):
        raise DataError(f"task.weight must give one weight per row, shape [{rows}], not {list(weights.shape)}")
    if not bool(torch.isfinite(weights).all()) or bool((weights < 0).any()):
        raise DataError(f"task.weight: a weight must be finite and at least 0, not {weights.tolist()}")
    return weights


def to_device(batch: Batch, device: torch.device) -> Batch:
    return {name: value.to(device, non_blocking=True) for name, value in batch.items()}
