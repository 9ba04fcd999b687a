"""Buffers of a user's own that a forward changes: one state on all ranks, put back where nothing may change them."""

from typing import Any

import pytest
import torch
from configs import PLAIN, config_text, own
from torch import Tensor, nn
from toys import trained

from launcher.errors import LauncherError


class Values:
    """One number a sample: 1, 2, 3, …"""

    def __init__(self, count: int, broken: int | None = None) -> None:
        self.count, self.broken = count, broken

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> list[float]:
        return [float("nan") if index == self.broken else index + 1.0]


class Remembering(nn.Module):
    """Buffers of every kind; the loss is the weight, whatever the rows are."""

    mean: Tensor
    total: Tensor
    seen: Tensor
    large: Tensor
    constant: Tensor

    def __init__(self, grows: bool = False) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))
        self.grows = grows
        self.register_buffer("mean", torch.zeros(()))  # replaced by a new tensor
        self.register_buffer("total", torch.zeros((), dtype=torch.float64))  # changed in place
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("large", torch.zeros(12, dtype=torch.bool))
        self.register_buffer("constant", torch.tensor([0.1, float("nan")]))
        self.instance = nn.InstanceNorm1d(1, track_running_stats=True)

    def forward(self, rows: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean = 0.5 * self.mean + 0.5 * rows.mean()
            self.total += rows.sum()
            self.seen += rows.numel()
            self.large[rows.flatten().nan_to_num().long() - 1] = True
            if self.training:
                self.instance(rows[:, :, None] * torch.tensor([1.0, 2.0]))
            if self.grows:
                self.total = torch.cat((self.total.reshape(-1), rows.flatten().double()))
        return self.w * rows


def config(window: int, micro: int, *more: str, samples: int = 12) -> str:
    return config_text(
        *PLAIN,
        *own("test_buffers.Remembering", "toys.Same", "test_buffers.Values", count=samples),
        f"batch.global_batch_size={window}",
        f"batch.micro_batch_size={micro}",
        "training.duration=1 updates",
        *more,
    )


def states(found: list[list[dict[str, Any]]]) -> list[dict[str, Tensor]]:
    """Of rank 0, one for each configuration, after a check that all ranks hold the same bits."""
    for of_rank in found[1:]:
        for mine, other in zip(found[0], of_rank, strict=True):
            for name, value in mine["state"].items():
                assert torch.equal(value.nan_to_num(), other["state"][name].nan_to_num()), name
    return [one["state"] for one in found[0]]


def test_ranks_agree_on_every_kind_of_buffer(ranks: Any) -> None:
    (state,) = states(ranks.run(trained, [config(7, 2)], world_size=2))
    # rank 0 reads 1 2, 3 4 and rank 1 reads 5 6, 7
    assert float(state["mean"]) == ((1.5 / 2 + 3.5) / 2 + (5.5 / 2 + 7) / 2) / 2
    assert float(state["total"]) == (10 + 18) / 2
    assert int(state["seen"]) == 4
    assert state["large"].tolist() == [True] * 7 + [False] * 5
    assert float(state["constant"][0]) == float(torch.tensor(0.1))
    mine, theirs = 0.9 * 0.1 * 1.5 * 1.5 + 0.1 * 1.5 * 3.5, 0.9 * 0.1 * 1.5 * 5.5 + 0.1 * 1.5 * 7
    assert float(state["instance.running_mean"]) == pytest.approx((mine + theirs) / 2, rel=1e-6)


def test_filled_rows_skipped_updates_and_validation_leave_them_alone(ranks: Any) -> None:
    fresh = Remembering().state_dict()
    texts = [
        config(3, 1, "+data.train.broken=1"),
        config(3, 1),
        config(3, 1, "data.validation={_target_: test_buffers.Values, count: 5}"),
    ]
    skipped, plain, validated = states(ranks.run(trained, texts, world_size=2))
    for name in ("mean", "total", "seen", "large", "instance.running_mean", "instance.num_batches_tracked"):
        assert torch.equal(skipped[name], fresh[name]), name
        assert torch.equal(plain[name], validated[name]), name
    # rank 0 reads 1, 2 and rank 1 reads 3 and then a copy that doesn't count
    assert float(plain["total"]) == 3
    assert int(plain["seen"]) == 2


def test_a_buffer_that_grows_works_on_one_rank_and_is_refused_on_two(ranks: Any) -> None:
    texts = [config(4, 2, "+model.grows=true")]
    (state,) = states(ranks.run(trained, texts, world_size=1))
    assert state["total"].shape == (5,)
    with pytest.raises(LauncherError, match=r"buffer 'total' has changed its shape"):
        ranks.run(trained, texts, world_size=2)
