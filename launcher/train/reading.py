"""Reading samples and collating them, in this process or in loader workers."""

import faulthandler
import operator
import os
import signal
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from launcher.errors import DataError
from launcher.outcome import SCRATCH
from launcher.process import STOP_SIGNALS, end_with_parent
from launcher.train.hangs import STACKS
from launcher.train.randomness import seed_sample

Batch = Mapping[str, Tensor]


class Item(NamedTuple):
    """One row of a micro-batch, before it is read."""

    epoch: int
    sample: int
    is_real: bool
    """False: a copy that fills up a micro-batch and is masked."""
    is_shape: bool = False
    """Whether it is collated with the others for its length alone, and then left out; it comes last."""


@dataclass(frozen=True)
class Read:
    """A micro-batch as it was read: on the host."""

    batch: Batch
    num_real: int
    weight: float
    """Sum of the weights of its real rows."""
    tokens: int | None
    """Lengths of its real rows, None where the task can't tell."""

    def pin_memory(self) -> "Read":
        """This micro-batch in memory that a GPU can copy from while it computes; torch's loader calls this."""
        pinned = {name: value.pin_memory() for name, value in self.batch.items()}
        return Read(pinned, self.num_real, self.weight, self.tokens)


class Samples(Dataset[tuple[Any, Item]]):
    """The data set, each sample read with its randomness seeded by (seed, epoch, index)."""

    def __init__(self, data: Any, seed: int) -> None:
        self.data, self.seed = data, seed
        self._kept: dict[tuple[int, int], Any] = {}

    @property
    def lengths(self) -> Sequence[int] | None:
        """The length of every sample, where the data set offers them."""
        return getattr(self.data, "lengths", None)

    def __getitem__(self, item: Item) -> tuple[Any, Item]:
        key = (item.epoch, item.sample)
        return (self._kept[key] if key in self._kept else self.read(*key)), item

    def read(self, epoch: int, index: int) -> Any:
        """Reads one sample."""
        seed_sample(self.seed, epoch, index)
        return self.data[index]

    def keep(self, epoch: int, index: int) -> Any:
        """Reads one sample that is asked for again soon."""
        sample = self._kept[epoch, index] = self.read(epoch, index)
        return sample

    def forget(self) -> None:
        """Lets go of the samples that were kept."""
        self._kept.clear()


class Collate:
    """A micro-batch from its samples, with the task's methods."""

    def __init__(self, task: Any) -> None:
        self.task = task

    def __call__(self, read: list[tuple[Any, Item]]) -> Read:
        samples = [sample for sample, _ in read]
        num_real = sum(item.is_real for _, item in read)
        batch = collate(self.task, samples)
        if read[-1][1].is_shape:
            samples.pop()
            batch = {name: value[: len(samples)] for name, value in batch.items()}
        counts = callable(getattr(self.task, "length", None))
        tokens = sum(sample_length(self.task, sample) for sample in samples[:num_real]) if counts else None
        weight = float(row_weights(self.task, batch)[:num_real].sum())
        return Read(batch, num_real, weight, tokens)


def start_worker(_number: int) -> None:
    """What a loader worker does first: it ends with its rank, at once, and leaves nothing behind."""
    end_with_parent(signal.SIGKILL)  # torch itself looks after its parent every 5 seconds
    for number in STOP_SIGNALS:  # a scheduler sends them to every process, and the window needs this one
        signal.signal(number, signal.SIG_IGN)
    faulthandler.register(STACKS, all_threads=True)
    # a worker makes a folder for the sockets by which it hands tensors over, and one that is killed can't remove it
    tempfile.tempdir = os.environ.get(SCRATCH, tempfile.tempdir)


def sample_length(task: Any, sample: Any) -> int:
    """The length of a sample as the task counts it. Raises DataError where that is no whole number of at least 0."""
    given = task.length(sample)
    try:
        length = operator.index(given)
    except TypeError:
        length = -1
    if length < 0:
        raise DataError(f"task.length must give a whole number of at least 0, not {given!r}")
    return length


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
    values = weights.cpu().numpy()  # numpy's small operations cost a fifth of torch's
    if not np.isfinite(values).all() or (values < 0).any():
        raise DataError(f"task.weight: a weight must be finite and at least 0, not {weights.tolist()}")
    return weights
