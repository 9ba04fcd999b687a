"""Reading ahead in workers changes nothing; what a sample draws follows from (seed, epoch, index) alone."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from configs import PLAIN, config_text, own
from torch import Tensor, nn
from toys import Sequences, assembled, read, window_gradients

pytestmark = pytest.mark.slow


def drawing(*more: str) -> str:
    return config_text(
        *PLAIN,
        *own("toys.Slope", "toys.Same", "toys.Drawing", count=6),
        "batch.global_batch_size=4",
        "batch.micro_batch_size=1",
        "training.duration=2 epochs",
        *more,
    )


def rows_by_window(found: list[list[dict[str, list[Any]]]]) -> list[list[list[float]]]:
    """What all ranks read of each window, in the order of the ranks."""
    return [[row for of_rank in found for row in of_rank[window]["rows"]] for window in range(len(found[0]))]


def test_f09_draws_differ_between_samples_and_epochs_and_not_between_layouts(ranks: Any) -> None:
    alone = rows_by_window(ranks.run(read, drawing(), 4, world_size=1))
    streams = [tuple(row) for window in alone for row in window]
    assert len(streams) == 12  # 6 samples, 2 epochs
    for generator in range(3):
        assert len({stream[generator] for stream in streams}) == 12
    assert rows_by_window(ranks.run(read, drawing("data.workers=2"), 4, world_size=2)) == alone
    assert rows_by_window(ranks.run(read, drawing("data.workers=1"), 4, world_size=3)) == alone
    assert rows_by_window(ranks.run(read, drawing("run.seed=1"), 4, world_size=1)) != alone


@pytest.mark.parametrize(("degree", "layout"), [(1, "length"), (2, "arrival"), (3, "arrival"), (3, "length")])
def test_workers_leave_every_bit_of_the_gradient(ranks: Any, degree: int, layout: str) -> None:
    sizes = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "intermediate_size": 24, "vocab_size": 14}
    texts = [
        config_text(
            *PLAIN,
            *[f"model.{name}={value}" for name, value in sizes.items()],
            "model.dropout=0.5",
            "task.vocab_size=14",
            "task.bos=13",
            "data=custom",
            "data.train._target_=toys.Sequences",
            "data.shuffle=true",
            "batch.global_batch_size=7",
            "batch.micro_batch_size=2",
            f"batch.layout={layout}",
            f"data.workers={workers}",
            "training.duration=1 epochs",
        )
        for workers in (0, 2)
    ]
    windows = -(-len(Sequences()) // 7)
    for without, with_workers in ranks.run(window_gradients, texts, windows, world_size=degree):
        for mine, other in zip(without, with_workers, strict=True):
            assert all(torch.equal(mine[name], other[name]) for name in mine)


class Noise(nn.Module):
    """Keeps what Python's, NumPy's and torch's generators give in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))
        self.drawn: list[tuple[float, float, float]] = []

    def forward(self, rows: Tensor) -> Tensor:
        self.drawn.append((random.random(), float(np.random.rand()), torch.rand(()).item()))
        return self.w * rows


def drawn(rank: int, world_size: int, text: str, updates: list[int]) -> list[list[tuple[float, float, float]]]:
    """What the model drew in every micro-batch of some windows."""
    fit = assembled(rank, world_size, text)
    fit.sharding.prepare()
    found = []
    for update in updates:
        fit.sharding.model.drawn.clear()  # type: ignore[union-attr, operator]
        fit.runner.run(fit.windows.get(update))
        found.append(list(fit.sharding.model.drawn))  # type: ignore[arg-type]
    return found


def test_a_micro_batch_draws_by_its_window_rank_and_step_alone(ranks: Any) -> None:
    text = drawing("model._target_=test_reading.Noise")
    whole = ranks.run(drawn, text, [1, 2, 3, 4], world_size=2)
    streams = [one for of_rank in whole for window in of_rank for one in window]
    assert len(streams) == 2 * (2 + 1 + 2 + 1)  # windows of 4 and 2 samples, one of them a micro-batch
    for generator in range(3):
        assert len({stream[generator] for stream in streams}) == len(streams)
    later = ranks.run(drawn, text, [3, 2], world_size=2)
    assert later == [[of_rank[2], of_rank[1]] for of_rank in whole]
    assert ranks.run(drawn, text, [1], world_size=1)[0][0][:2] == whole[0][0]  # rank 0 alone runs on after these
    other = ranks.run(drawn, drawing("model._target_=test_reading.Noise", "run.seed=1"), [1], world_size=2)
    assert not {one for of_rank in other for window in of_rank for one in window} & set(streams)
