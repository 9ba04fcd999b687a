"""Reading ahead in workers changes nothing; what a sample draws follows from (seed, epoch, index) alone."""

from typing import Any

import pytest
import torch
from configs import PLAIN, config_text, own
from toys import Sequences, read, window_gradients

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


@pytest.mark.parametrize("layout", ["arrival", "length"])
@pytest.mark.parametrize("degree", [1, 2, 3, 4])
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
