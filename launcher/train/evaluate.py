"""Validation, exact for any number of ranks, and the loss of the best constant guess to compare with."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from launcher.train import heart
from launcher.train.buffers import untouched_buffers
from launcher.train.loading import load
from launcher.train.parallel.mesh import Place
from launcher.train.parallel.precision import Precision
from launcher.train.randomness import seed_micro_batch
from launcher.train.reading import Batch, Item, Read, Samples, row_weights, sample_length
from launcher.train.rounds import Rounds
from launcher.train.sharding.base import row_losses
from launcher.train.window import MicroBatch, to_micro_batch

EVALUATION_ROUND = 16
"""Micro-batches that run through a pipeline at once in an evaluation."""

BASELINE_SAMPLES = 10_000
"""The best constant guess is learned from at most so many training samples, evenly spaced."""


Collect = Callable[[MicroBatch, Any], None]
"""Takes a micro-batch and the model's output for it."""


@dataclass(frozen=True)
class Validation:
    """Means over the validation set, by weight."""

    loss: float
    metrics: dict[str, float]


@dataclass(frozen=True)
class Reader:
    """How a data set is read for an evaluation: dealt over the ranks, in micro-batches."""

    task: Any
    place: Place
    micro_batch_size: int
    seed: int
    workers: int = 0
    equal_steps: bool = False
    """Whether every rank gets as many micro-batches, the last maybe a copy of a sample that doesn't count."""
    rounds: Rounds | None = None
    """In a pipeline: how many micro-batches run through it at once."""

    def read(self, data: Any, indices: Sequence[int]) -> Iterator[Read]:
        """This rank's part of `indices` on the host, which may be empty; each sample counts once over all ranks."""
        return self._read(data, self._turns(indices))

    def micro_batches(self, data: Any, indices: Sequence[int]) -> Iterator[MicroBatch]:
        """The same on the rank's device."""
        return self.turns(data, self._turns(indices))

    def turns(self, data: Any, turns: list[list[Item]]) -> Iterator[MicroBatch]:
        """Micro-batches of these rows on the rank's device."""
        for read in self._read(data, turns):
            yield to_micro_batch(read, self.place.device)

    def _read(self, data: Any, turns: list[list[Item]]) -> Iterator[Read]:
        for read in self._load(data, turns):
            heart.beat()
            yield read

    def in_rounds(self, data: Any, indices: Sequence[int]) -> Iterator[tuple[int, list[MicroBatch]]]:
        """The same for a pipeline, round after round, each of one shape, and the number of its first micro-batch."""
        assert self.rounds is not None
        turns, sizes = self._turns(indices), []
        filled: list[list[Item]] = []
        for start in range(0, len(turns), EVALUATION_ROUND):
            several = turns[start : start + EVALUATION_ROUND]
            alike = self.rounds.alike(several, max(len(turn) for turn in several), self._longest(data, several))
            sizes.append(len(alike))
            filled += alike
        reading = self._load(data, filled)
        step = 0
        for size in sizes:
            read = [next(reading) for _ in range(size)]
            heart.beat()
            yield step, [to_micro_batch(one, self.place.device) for one in read]
            step += size

    def _turns(self, indices: Sequence[int]) -> list[list[Item]]:
        mine = [Item(0, index, True) for index in indices[self.place.rank :: self.place.degree]]
        size = self.micro_batch_size
        turns = [mine[start : start + size] for start in range(0, len(mine), size)]
        most = -(-len(indices) // self.place.degree)  # samples of the first rank
        if self.equal_steps and len(turns) < -(-most // size):
            turns.append([Item(0, indices[0], False)])
        return turns

    def _longest(self, data: Any, turns: Sequence[Sequence[Item]]) -> Item:
        items = [item for turn in turns for item in turn]
        lengths = getattr(data, "lengths", None)
        if lengths is not None:
            return max(items, key=lambda item: int(lengths[item.sample]))
        if not callable(getattr(self.task, "length", None)):
            return items[0]
        samples = Samples(data, self.seed)
        return max(items, key=lambda item: sample_length(self.task, samples.read(item.epoch, item.sample)))

    def _load(self, data: Any, turns: list[list[Item]]) -> Iterator[Read]:
        return load(Samples(data, self.seed), self.task, turns, workers=min(self.workers, len(turns)))


class Pipeline(Protocol):
    """What runs the forwards of an evaluation through the stages of a pipeline."""

    @property
    def modules(self) -> Sequence[nn.Module]:
        """The stages of this rank."""
        ...

    def evaluate(self, micro_batches: Sequence[MicroBatch], first_step: int, collect: Collect) -> None:
        """One round of forwards; `collect` is called with each micro-batch and output where the last stage is."""
        ...


def validate(
    model: nn.Module, data: Any, reader: Reader, precision: Precision, pipeline: Pipeline | None = None
) -> Validation:
    """The loss and the task's metrics over all of `data`: sums over all ranks / the sum of all weights.

    Ranks may see different numbers of samples, also none. The model's mode and its buffers are put back.
    """
    sums: dict[str, float] = defaultdict(float)
    task, place = reader.task, reader.place
    indices = _like_lengths_together(data)

    def collect(micro: MicroBatch, output: Any) -> None:
        real = slice(micro.num_real)
        weights = row_weights(task, micro.batch)[real]
        sums["weight"] += float(weights.sum())
        sums["loss"] += float(row_losses(task, output, micro.batch)[real].double().sum())
        for name, values in _metrics(task, output, micro.batch).items():
            sums[f"metric {name}"] += float((values[real].double().cpu() * weights).sum())

    modules = [model] if pipeline is None else [model, *pipeline.modules]
    was_training = [one.training for one in modules]
    for one in modules:
        one.eval()
    try:
        with torch.no_grad(), untouched_buffers(model):
            if pipeline is not None:
                for step, several in reader.in_rounds(data, indices):
                    pipeline.evaluate(several, step, collect)
            else:
                for step, micro in enumerate(reader.micro_batches(data, indices)):
                    seed_micro_batch(reader.seed, 0, place.rank, step)
                    output = precision.call(model, task.inputs(micro.batch))
                    if micro.num_real:
                        collect(micro, output)
    finally:
        for one, trained in zip(modules, was_training, strict=True):
            one.train(trained)
    total = _sum_dicts(sums, place)
    weight = total.pop("weight", 0.0)
    if weight == 0:
        return Validation(float("nan"), {})
    loss = total.pop("loss") / weight
    return Validation(loss, {name.removeprefix("metric "): value / weight for name, value in sorted(total.items())})


def _metrics(task: Any, output: Any, batch: Batch) -> dict[str, Tensor]:
    if not callable(getattr(task, "metrics", None)):
        return {}
    values: dict[str, Tensor] = task.metrics(output, batch)
    rows = next(iter(batch.values())).shape[0]
    for name, value in values.items():
        if not isinstance(value, Tensor) or value.shape != (rows,):
            shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(f"task.metrics: '{name}' must be one value per row, shape [{rows}], not {shape}")
    return values


def _like_lengths_together(data: Any) -> Sequence[int]:
    """All samples, sorted by length where the data set knows lengths: the sums are the same, and little is padded."""
    lengths = getattr(data, "lengths", None)
    return range(len(data)) if lengths is None else [int(one) for one in np.argsort(lengths, kind="stable")]


def _sum_dicts(mine: dict[str, float], place: Place) -> dict[str, float]:
    total = dict(mine)
    heart.beat(waits=True)
    if place.degree > 1:
        total = _sum_over(total, place.degree, place.group)
    if place.pipe is not None:
        total = _sum_over(total, place.pipe.size, place.pipe.host_group)
    return total


def _sum_over(mine: dict[str, float], ranks: int, group: dist.ProcessGroup | None) -> dict[str, float]:
    parts: list[Any] = [None] * ranks
    dist.all_gather_object(parts, mine, group=group)
    total: dict[str, float] = defaultdict(float)
    for part in parts:
        for name, value in part.items():
            total[name] += value
    return dict(total)


def baseline_loss(train: Any, validation: Any, reader: Reader) -> float | None:
    """The validation loss of the best constant guess: how often each target value occurs in the training set (unigram,
    majority), each value counted once more so that none is impossible. None where the task can't count targets.
    """
    if not callable(getattr(reader.task, "target_counts", None)):
        return None
    step = max(1, len(train) // BASELINE_SAMPLES)
    seen = _target_counts(train, range(0, len(train), step), reader)
    asked = _target_counts(validation, range(len(validation)), reader)
    share = (seen + 1) / (seen + 1).sum()
    return float(-(asked * share.log()).sum() / asked.sum())


def _target_counts(data: Any, indices: Sequence[int], reader: Reader) -> Tensor:
    place = reader.place
    counts: Tensor | None = None
    for read in reader.read(data, indices):
        values = reader.task.target_counts(read.batch).double()
        counts = values if counts is None else counts + values
    if place.degree > 1:
        parts: list[Any] = [None] * place.degree
        dist.all_gather_object(parts, None if counts is None else counts.tolist(), group=place.group)
        known = [torch.tensor(part, dtype=torch.float64) for part in parts if part is not None]
        counts = torch.stack(known).sum(0)
    assert counts is not None
    return counts
