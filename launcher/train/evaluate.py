"""Validation, exact for any number of ranks, and the loss of the best constant guess to compare with."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from launcher.train.randomness import seed_micro_batch
from launcher.train.sharding.base import row_losses
from launcher.train.window import Batch, Place, collate, read_sample, row_weights, to_device

BASELINE_SAMPLES = 10_000
"""The best constant guess is learned from at most so many training samples, evenly spaced."""


@dataclass(frozen=True)
class Validation:
    """Means over the validation set, by weight."""

    loss: float
    metrics: dict[str, float]


def validate(model: nn.Module, task: Any, data: Any, place: Place, *, micro_batch_size: int, seed: int) -> Validation:
    """The loss and the task's metrics over all of `data`: sums over all ranks / the sum of all weights.

    Ranks may see different numbers of samples, also none. The model's mode is put back.
    """
    sums: dict[str, float] = defaultdict(float)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            order = _like_lengths_together(data)
            for step, batch in enumerate(_batches(task, data, order, place, micro_batch_size, seed)):
                weights = row_weights(task, batch)
                on_device = to_device(batch, place.device)
                seed_micro_batch(seed, 0, place.rank, step)
                output, losses = _forward(model, task, on_device)
                sums["weight"] += float(weights.sum())
                sums["loss"] += float(losses.double().sum())
                for name, values in _metrics(task, output, on_device).items():
                    sums[f"metric {name}"] += float((values.double().cpu() * weights).sum())
    finally:
        model.train(was_training)
    total = _sum_dicts(sums, place)
    weight = total.pop("weight", 0.0)
    if weight == 0:
        return Validation(float("nan"), {})
    loss = total.pop("loss") / weight
    return Validation(loss, {name.removeprefix("metric "): value / weight for name, value in sorted(total.items())})


def _forward(model: nn.Module, task: Any, batch: Batch) -> tuple[Any, Tensor]:
    outputs: list[Any] = []

    def keep(**inputs: Any) -> Any:
        outputs.append(model(**inputs))
        return outputs[0]

    losses = row_losses(keep, task, batch)  # type: ignore[arg-type]
    return outputs[0], losses


def _metrics(task: Any, output: Any, batch: Batch) -> dict[str, Tensor]:
    if not callable(getattr(task, "metrics", None)):
        return {}
    values: dict[str, Tensor] = task.metrics(output, batch)
    return values


def _like_lengths_together(data: Any) -> Sequence[int]:
    """All samples, sorted by length where the data set knows lengths: the sums are the same, and little is padded."""
    lengths = getattr(data, "lengths", None)
    return range(len(data)) if lengths is None else [int(one) for one in np.argsort(lengths, kind="stable")]


def _batches(
    task: Any, data: Any, indices: Sequence[int], place: Place, micro_batch_size: int, seed: int
) -> Iterator[Batch]:
    mine = indices[place.rank :: place.degree]
    for start in range(0, len(mine), micro_batch_size):
        yield collate(task, [read_sample(data, index, seed, 0) for index in mine[start : start + micro_batch_size]])


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


def baseline_loss(task: Any, train: Any, validation: Any, place: Place, *, seed: int) -> float | None:
    """The validation loss of the best constant guess: how often each target value occurs in the training set (unigram,
    majority), each value counted once more so that none is impossible. None where the task can't count targets.
    """
    if not callable(getattr(task, "target_counts", None)):
        return None
    step = max(1, len(train) // BASELINE_SAMPLES)
    seen = _target_counts(task, train, range(0, len(train), step), place, seed)
    asked = _target_counts(task, validation, range(len(validation)), place, seed)
    share = (seen + 1) / (seen + 1).sum()
    return float(-(asked * share.log()).sum() / asked.sum())


def _target_counts(task: Any, data: Any, indices: Sequence[int], place: Place, seed: int) -> Tensor:
    counts: Tensor | None = None
    for batch in _batches(task, data, indices, place, 64, seed):
        values = task.target_counts(batch).double()
        counts = values if counts is None else counts + values
    if place.degree > 1:
        parts: list[Any] = [None] * place.degree
        dist.all_gather_object(parts, None if counts is None else counts.tolist(), group=place.group)
        known = [torch.tensor(part, dtype=torch.float64) for part in parts if part is not None]
        counts = torch.stack(known).sum(0)
    assert counts is not None
    return counts
