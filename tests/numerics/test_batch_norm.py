"""Batch norm under accumulation and ranks: said at plan time, never fed by filled rows, one state on all ranks."""

from typing import Any

import pytest
import torch
from configs import PLAIN, config_text
from torch import Tensor, nn
from toys import assembled, trained

from launcher.config.choices import Device
from launcher.config.validate import parse
from launcher.plan.facts import Facts
from launcher.plan.mesh import World
from launcher.plan.plan import make_plan
from launcher.train.parts import Parts, build_data, build_model, build_task, gather_facts

Moments = tuple[Tensor, Tensor]


class Points:
    """Small images of three colours, each colour around a mean of its own, in two classes."""

    def __init__(self, count: int = 12, broken: int | None = None) -> None:
        generator = torch.Generator().manual_seed(5)
        self.x = torch.randn(count, 3, 2, 2, generator=generator) + torch.tensor([1.0, -2.0, 3.0])[:, None, None]
        if broken is not None:
            self.x[broken] = float("nan")

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.x[index], index % 2


class Normed(nn.Module):
    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3, momentum=momentum)
        self.classifier = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.norm(x).square().mean((2, 3)))
        return logits


def config(window: int, micro: int, *more: str) -> str:
    return config_text(
        *PLAIN,
        "model=custom",
        "model._target_=test_batch_norm.Normed",
        "task=classification",
        "task.num_classes=2",
        "data=custom",
        "data.train._target_=test_batch_norm.Points",
        f"batch.global_batch_size={window}",
        f"batch.micro_batch_size={micro}",
        "training.duration=1 updates",
        "optimizer.lr=0.1",
        *more,
    )


def moments(*micro_batches: list[int]) -> Moments:
    """The running mean and variance after these micro-batches, as the documentation of BatchNorm2d defines them."""
    mean, var = torch.zeros(3), torch.ones(3)
    for indices in micro_batches:
        values = Points().x[indices].transpose(0, 1).flatten(1)
        mean, var = 0.9 * mean + 0.1 * values.mean(1), 0.9 * var + 0.1 * values.var(1)
    return mean, var


def mean_of(one: Moments, other: Moments) -> Moments:
    return (one[0] + other[0]) / 2, (one[1] + other[1]) / 2


def close(state: dict[str, Tensor], expected: Moments) -> bool:
    found = state["norm.running_mean"], state["norm.running_var"]
    return all(torch.allclose(one, other, rtol=1e-6, atol=1e-6) for one, other in zip(found, expected, strict=True))


def states(found: list[list[dict[str, Any]]]) -> list[dict[str, Tensor]]:
    """Of rank 0, one for each configuration, after a check that all ranks hold the same bits."""
    for of_rank in found[1:]:
        for mine, other in zip(found[0], of_rank, strict=True):
            for name, value in mine["state"].items():
                assert torch.equal(value, other["state"][name]), name
    return [one["state"] for one in found[0]]


def test_one_update_of_four_micro_batches_counts_four(ranks: Any) -> None:
    (state,) = states(ranks.run(trained, [config(12, 3)], world_size=1))
    assert int(state["norm.num_batches_tracked"]) == 4
    assert close(state, moments([0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]))


def test_ranks_average_their_statistics(ranks: Any) -> None:
    (state,) = states(ranks.run(trained, [config(12, 2)], world_size=2))
    assert int(state["norm.num_batches_tracked"]) == 3
    assert close(state, mean_of(moments([0, 1], [2, 3], [4, 5]), moments([6, 7], [8, 9], [10, 11])))


def test_a_filled_micro_batch_leaves_the_statistics_alone(ranks: Any) -> None:
    assert ranks.run(num_real, config(5, 2), world_size=2) == [[2, 1], [2, 0]]
    (state,) = states(ranks.run(trained, [config(5, 2)], world_size=2))
    assert int(state["norm.num_batches_tracked"]) == 2
    assert close(state, mean_of(moments([0, 1], [2]), moments([3, 4])))


def num_real(rank: int, world_size: int, text: str) -> list[int]:
    return [one.num_real for one in assembled(rank, world_size, text).windows.get(1).micro_batches]


def test_fewer_samples_than_ranks(ranks: Any) -> None:
    (state,) = states(ranks.run(trained, [config(1, 1)], world_size=3))
    assert int(state["norm.num_batches_tracked"]) == 1
    mean, var = moments([0])
    assert close(state, (mean / 3, (var + 2) / 3))


def test_a_skipped_update_leaves_the_statistics_alone(ranks: Any) -> None:
    texts = [config(6, 2, "+data.train.broken=4"), config(6, 2, "+data.train.broken=4", "training.duration=2 updates")]
    skipped, after = states(ranks.run(trained, texts, world_size=2))
    assert int(skipped["norm.num_batches_tracked"]) == 0
    assert close(skipped, moments())
    assert close(after, mean_of(moments([6, 7], [8]), moments([9, 10], [11])))


@pytest.mark.parametrize("momentum", ["0.1", "null"])
def test_no_bit_depends_on_validation(ranks: Any, momentum: str) -> None:
    data = ["data.validation={_target_: test_batch_norm.Points}", "training.duration=6 updates"]
    every = ["1", "4", "null"]
    texts = [config(5, 2, *data, f"+model.momentum={momentum}", f"training.validate_every={n}") for n in every]
    found = ranks.run(trained, texts, world_size=3)
    first, *others = states(found)
    assert all(torch.equal(value, other[name]) for other in others for name, value in first.items())
    assert len({str(one["validation"]) for of_rank in found for one in of_rank}) == 1


def notes(facts: Facts, window: int, micro: int, degree: int) -> list[str]:
    plan = make_plan(parse(config(window, micro)), facts, world=World(1, degree, Device.cpu))
    return [note for note in plan.notes if note.startswith("batch norm")]


def facts_of(*model: str) -> Facts:
    overrides = ["model=resnet", "data=digits", "task=classification", "task.num_classes=10", *model]
    settings = parse(config_text(*overrides))
    return gather_facts(settings, Parts(build_model(settings), build_task(settings), *build_data(settings)))


def test_batch_norm_is_said_in_the_plan() -> None:
    facts = facts_of()
    assert facts.batch_norm_layers == 20
    (note,) = notes(facts, 64, 8, 2)
    assert note.startswith("batch norm (20 layers): its statistics are those of one micro-batch on one rank, 8 samples")
    assert "(the smallest has 1, which torch refuses where a channel has a single value)" in note
    assert "4 steps x 2 ranks are not the same as one batch of 64" in note
    assert "model_patches.batch_norm=group_norm has no such effect" in note
    assert "the smallest has 4)" in notes(Facts(samples=120, batch_norm_layers=1), 24, 4, 2)[0]
    (whole,) = notes(facts, 16, 16, 1)
    assert "the whole window" in whole


def test_other_norms_are_not() -> None:
    facts = facts_of("model.norm=group")
    assert facts.batch_norm_layers == 0
    assert notes(facts, 64, 8, 2) == []
    assert notes(Facts(samples=100), 64, 8, 2) == []
