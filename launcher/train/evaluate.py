"""Validation, exact for any number of ranks, and the loss of the best constant guess to compare with."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from launcher.train.buffers import untouched_buffers
from launcher.train.parallel.precision import Precision
from launcher.train.randomness import seed_micro_batch
from launcher.train.reading import Batch, Collate, Item, Read, Samples, row_weights, start_worker
from launcher.train.sharding.base import row_losses
from launcher.train.window import Place, to_device

BASELINE_SAMPLES = 10_000
"""The best constant guess is learned from at most so many training samples, evenly spaced."""


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

    def micro_batches(self, data: Any, indices: Sequence[int]) -> Iterable[Read]:
        """This rank's part of `indices`, which may be empty; each sample counts once over all ranks."""
        mine = [Item(0, index, True) for index in indices[self.place.rank :: self.place.degree]]
        size = self.micro_batch_size
        turns = [mine[start : start + size] for start in range(0, len(mine), size)]
        most = -(-len(indices) // self.place.degree)  # samples of the first rank
        if self.equal_steps and len(turns) < -(-most // size):
            turns.append([Item(0, indices[0], False)])
        return DataLoader(
            Samples(data, self.seed),
            batch_sampler=turns,
            collate_fn=Collate(self.task),
            num_workers=min(self.workers, len(turns)),
            worker_init_fn=start_worker,
        )


def validate(model: nn.Module, data: Any, reader: Reader, precision: Precision) -> Validation:
    """The loss and the task's metrics over all of `data`: sums over all ranks / the sum of all weights.

    Ranks may see different numbers of samples, also none. The model's mode and its buffers are put back.
    """
    sums: dict[str, float] = defaultdict(float)
    task, place = reader.task, reader.place
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), untouched_buffers(model):
            for step, read in enumerate(reader.micro_batches(data, _like_lengths_together(data))):
                weights = row_weights(task, read.batch)
                batch = to_device(read.batch, place.device)
                seed_micro_batch(reader.seed, 0, place.rank, step)
                output = precision.call(model, task.inputs(batch))
                if read.num_real == 0:
                    continue
                sums["weight"] += float(weights.sum())
                sums["loss"] += float(row_losses(task, output, batch).double().sum())
                for name, values in _metrics(task, output, batch).items():
                    sums[f"metric {name}"] += float((values.double().cpu() * weights).sum())
    finally:
        model.train(was_training)
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
    if place.degree == 1:
        return dict(mine)
    parts: list[Any] = [None] * place.degree
    dist.all_gather_object(parts, dict(mine), group=place.group)
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
    for read in reader.micro_batches(data, indices):
        values = reader.task.target_counts(read.batch).double()
        counts = values if counts is None else counts + values
    if place.degree > 1:
        parts: list[Any] = [None] * place.degree
        dist.all_gather_object(parts, None if counts is None else counts.tolist(), group=place.group)
        known = [torch.tensor(part, dtype=torch.float64) for part in parts if part is not None]
        counts = torch.stack(known).sum(0)
    assert counts is not None
    return counts
