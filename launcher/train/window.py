"""Which samples make up an update, and this rank's part of them as batches on its device."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from launcher.plan.batch import BatchPlan, rank_slice
from launcher.plan.windows import WindowTable
from launcher.train import heart
from launcher.train.layout import Layout, by_length, by_tokens, in_order_of_arrival, in_whole_groups
from launcher.train.loading import load
from launcher.train.parallel.mesh import Place
from launcher.train.randomness import epoch_order
from launcher.train.reading import Batch, Item, Read, Samples, sample_length
from launcher.train.rounds import Rounds


@dataclass(frozen=True)
class MicroBatch:
    """What one rank puts through one forward and backward."""

    batch: Batch
    """Tensors of [rows, …], on the rank's device."""
    num_real: int
    """Rows that count; those behind them are copies that fill up and are masked."""
    weight: float
    """Sum of their weights."""


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
    rounds: Sequence[int] = ()
    """In a pipeline: how many of the micro-batches each run of its schedule takes, all of one shape."""


class Windows:
    """The windows of a run in turn: which samples from (seed, update) alone, laid out over ranks and micro-batches.

    Reading and collating run in `workers` processes ahead of the training, or with 0 in this one when a window is asked
    for.
    """

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
        workers: int = 0,
        num_updates: int | None = None,
        micro_batch_tokens: int | None = None,
        rounds: Rounds | None = None,
        group_size: int | None = None,
    ) -> None:
        self.task, self.batch, self.table, self.place = task, batch, table, place
        self.seed, self.shuffle, self.layout, self.workers = seed, shuffle, layout, workers
        self.num_updates, self.micro_batch_tokens = num_updates, micro_batch_tokens
        self._rounds, self.group_size = rounds, group_size
        self._steps: dict[int, int] = {}
        self._sizes: dict[int, list[int]] = {}
        self._samples = Samples(data, seed)
        self._order: tuple[int, np.ndarray] | None = None
        self._reading: Iterator[Read] | None = None
        self._next = 0

    @property
    def reads_ahead(self) -> bool:
        """Whether the next window is better asked for while the current one computes: something runs beside it."""
        return self.workers > 0 or self.place.device.type == "cuda"

    def indices(self, update: int) -> np.ndarray:
        """The samples of window `update` (from 1), int64 [samples], in the order of the epoch."""
        window = self.table.window(update)
        if self._order is None or self._order[0] != window.epoch:
            samples = self.table.samples_per_epoch
            self._order = (window.epoch, epoch_order(self.seed, window.epoch, samples, shuffle=self.shuffle))
        return self._order[1][window.start : window.stop]

    def get(self, update: int) -> Window:
        """Window `update`, its weight agreed with the other ranks. Asked for in turn, nothing is read twice."""
        heart.beat()
        if self._reading is None or update != self._next:
            self._reading = self._start(update)
        self._next = update + 1
        indices = self.indices(update)
        read = [next(self._reading)]
        read += [next(self._reading) for _ in range(self._steps.pop(update) - 1)]
        counts_tokens = all(one.tokens is not None for one in read)
        weight, tokens = self.place.sum([sum(one.weight for one in read), sum(one.tokens or 0 for one in read)])
        return Window(
            update=update,
            epoch=float(self.table.epochs_after(update)),
            micro_batches=[to_micro_batch(one, self.place.device) for one in read],
            indices=indices,
            weight=weight,
            samples=len(indices),
            tokens=int(tokens) if counts_tokens else None,
            rounds=self._sizes.pop(update, ()),
        )

    def _start(self, update: int) -> Iterator[Read]:
        """Reads this rank's micro-batches from window `update` on."""
        return load(
            self._samples,
            self.task,
            _Turns(self, update),
            workers=self.workers,
            pin_memory=self.place.device.type == "cuda",
        )

    def micro_batches(self, update: int) -> list[list[Item]]:
        """What this rank reads for each micro-batch of window `update`.

        A rank without a sample in one takes part with a masked copy of a real one.
        """
        indices, epoch = self.indices(update), self.table.window(update).epoch
        by_length = self.layout == "length"
        pads_alike = self._rounds is not None and callable(getattr(self.task, "length", None))
        lengths = self._lengths(indices, epoch) if by_length or pads_alike else [1] * len(indices)
        laid_out = self._laid_out(lengths)

        def items(positions: Sequence[int]) -> list[Item]:
            return [Item(epoch, int(indices[position]), True) for position in positions]

        if self._rounds is not None:
            rounds = self._in_rounds(self._rounds, laid_out, lengths, items)
            self._sizes[update] = [len(one) for one in rounds]
            found = [step for one in rounds for step in one]
        else:
            found = [items(positions) or [items([0])[0]._replace(is_real=False)]
                     for positions in laid_out[self.place.rank]]  # fmt: skip
        self._steps[update] = len(found)
        return found

    def _in_rounds(
        self, rounds: Rounds, layout: Layout, lengths: Sequence[int], items: Callable[[Sequence[int]], list[Item]]
    ) -> list[list[list[Item]]]:
        """The same in a pipeline, round by round, the micro-batches of a round with as many rows as the fullest of any
        rank and the length of this rank's longest."""
        steps = range(len(layout[0]))
        longest = [max(lengths[position] for of_rank in layout for position in of_rank[step]) for step in steps]
        found = []
        for one in rounds.divide(longest):
            rows = max(len(of_rank[step]) for of_rank in layout for step in one)
            mine = [layout[self.place.rank][step] for step in one]
            taken = [position for positions in mine for position in positions] or [0]
            (pads,) = items([max(taken, key=lengths.__getitem__)])
            found.append(rounds.alike([items(positions) for positions in mine], rows, pads))
        return found

    def _laid_out(self, lengths: Sequence[int]) -> Layout:
        if self.group_size is not None:
            return in_whole_groups(self.batch, len(lengths), self.group_size)
        if self.layout == "arrival":
            return in_order_of_arrival(self.batch, len(lengths))
        if self.micro_batch_tokens is not None:
            return by_tokens(self.micro_batch_tokens, self.place.degree, lengths)
        return by_length(self.batch, lengths)

    def _lengths(self, indices: np.ndarray, epoch: int) -> list[int]:
        """The length of every sample of a window, the same on every rank.

        A data set that knows them (`lengths`) is asked; of another each rank reads its share and tells the others.
        """
        known = self._samples.lengths
        if known is not None:
            return [int(known[index]) for index in indices]
        told = np.zeros(len(indices))
        self._samples.forget()
        for position in rank_slice(len(indices), self.place.degree, self.place.rank):
            told[position] = sample_length(self.task, self._samples.keep(epoch, int(indices[position])))
        return [int(one) for one in self.place.sum(told.tolist())]


class _Turns:
    """The micro-batches of a rank in turn, window after window, as a batch sampler."""

    def __init__(self, windows: Windows, first: int) -> None:
        self._windows, self._first = windows, first

    def __iter__(self) -> Iterator[list[Item]]:
        update, last = self._first, self._windows.num_updates
        while last is None or update <= last:
            yield from self._windows.micro_batches(update)
            update += 1


def to_micro_batch(read: Read, device: torch.device) -> MicroBatch:
    """What was read, with its tensors on `device`."""
    return MicroBatch(to_device(read.batch, device), read.num_real, read.weight)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch with its tensors on `device`."""
    return {name: value.to(device, non_blocking=True) for name, value in batch.items()}
