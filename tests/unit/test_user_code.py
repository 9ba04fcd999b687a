"""What is checked of a user's loss, metrics and lengths, and what is kept from the bits of a half type."""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from configs import PLAIN, config_text, own
from torch import Tensor, nn

from launcher.config.choices import Device, PrecisionName
from launcher.config.validate import parse
from launcher.errors import ConfigError, LauncherError
from launcher.plan.facts import Facts
from launcher.plan.mesh import World
from launcher.plan.plan import make_plan
from launcher.plan.windows import WindowTable
from launcher.train.evaluate import Reader, validate
from launcher.train.parallel.mesh import Place
from launcher.train.parallel.precision import Precision
from launcher.train.parts import Parts, build_data, build_model, build_task, count_updates, gather_facts, sample_lengths
from launcher.train.randomness import epoch_order
from launcher.train.reading import Samples
from launcher.train.sharding.base import LossModule

HERE = Place(0, 1, torch.device("cpu"))


class Rows(nn.Module):
    """The rows times a weight of one."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))

    def forward(self, rows: Tensor) -> Tensor:
        return self.w * rows


class Numbers:
    """A task on numbers; what its parts give is up to a test."""

    def __init__(self, loss: Any = lambda output: output, metrics: Any = None) -> None:
        self._loss = loss
        if metrics is not None:
            self.metrics = lambda output, batch: metrics(output)

    def collate(self, samples: list[float]) -> dict[str, Tensor]:
        return {"rows": torch.tensor(samples)}

    def inputs(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return batch

    def weight(self, batch: dict[str, Tensor]) -> Tensor:
        return torch.ones(len(batch["rows"]))

    def loss(self, output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        losses: Tensor = self._loss(output)
        return losses

    def length(self, sample: Any) -> int:
        return len(sample) if isinstance(sample, list) else 1


class Halves(nn.Module):
    """Parameters of two half types, and one of a half type that is not trained."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.body = nn.Linear(width, width, dtype=torch.bfloat16)
        self.scale = nn.Parameter(torch.ones(2, dtype=torch.float16))
        self.shift = nn.Parameter(torch.ones(2))
        self.frozen = nn.Parameter(torch.ones(2, dtype=torch.bfloat16), requires_grad=False)


class Long:
    """Three samples, and as many lengths as asked for."""

    def __init__(self, lengths: int) -> None:
        self.lengths = [1] * lengths

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> float:
        return float(index)


class Cut:
    """Samples that are cut at random, as augmentation does."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> list[int]:
        most = random.randint(1, 1000) + int(np.random.randint(1000)) + int(torch.randint(1000, ()))
        return [0] * most


def loss_of(loss: Any, rows: list[float], num_real: int | None = None) -> tuple[Tensor, Tensor]:
    module = LossModule(Rows(), Numbers(loss), Precision(PrecisionName.fp32, "cpu"))
    found: tuple[Tensor, Tensor] = module(
        {"rows": torch.tensor(rows)}, len(rows) if num_real is None else num_real, 1.0
    )
    return found


@pytest.mark.parametrize("loss", [lambda output: output.detach(), lambda output: torch.ones(len(output))])
def test_a_loss_without_a_gradient_is_refused(loss: Any) -> None:
    with pytest.raises(LauncherError, match=r"task\.loss: its result carries no gradient"):
        loss_of(loss, [1.0, 2.0])
    with torch.no_grad():  # as an evaluation
        assert loss_of(loss, [1.0])[1].isfinite()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_real", [4, 5])
def test_losses_of_a_half_type_are_summed_in_fp32(dtype: torch.dtype, num_real: int) -> None:
    large = 2048.0  # neither type has 2051
    scaled, total = loss_of(lambda output: output.to(dtype), [large, 1.0, 1.0, 1.0, 0.0], num_real)
    assert float(total) == 2051.0
    assert (scaled.dtype, float(scaled.detach())) == (torch.float32, 2051.0)


@pytest.mark.parametrize(
    ("value", "said"), [(lambda output: output.mean(), r"not \[\]"), (lambda output: 0.5, "not float")]
)
def test_metrics_of_the_wrong_size_are_refused(value: Any, said: str) -> None:
    task = Numbers(metrics=lambda output: {"hits": value(output)})
    with pytest.raises(TypeError, match=rf"task\.metrics: 'hits' must be one value per row, shape \[2\], {said}"):
        validate(Rows(), [1.0, 2.0], Reader(task, HERE, 2, 0), Precision(PrecisionName.fp32, "cpu"))


@pytest.mark.parametrize("lengths", [0, 2, 4])
def test_lengths_of_the_wrong_number_are_refused(lengths: int) -> None:
    text = config_text(*own("test_user_code.Rows", "test_user_code.Numbers", "test_user_code.Long", lengths=lengths))
    with pytest.raises(ConfigError, match="one number for each of its 3 samples"):
        build_data(parse(text))
    assert build_data(parse(text.replace(f"lengths: {lengths}", "lengths: 3")))[0].lengths == [1, 1, 1]


def test_tokens_are_counted_over_any_number_of_epochs() -> None:
    lengths, windows = np.array([1, 2, 3]), WindowTable(3, 2, False)  # windows of 3 and 3 tokens
    targets = {5: 2, 6: 2, 7: 3, 6 * 10**12: 2 * 10**12, 6 * 10**12 + 1: 2 * 10**12 + 1}
    found = count_updates(lengths, windows, list(targets), seed=0, shuffle=False)
    assert found == {str(target): updates for target, updates in targets.items()}


@pytest.mark.parametrize("drop_last", [False, True])
def test_tokens_are_those_of_the_runs_own_order(drop_last: bool) -> None:
    lengths, windows = np.array([1, 20, 300, 4000, 50000]), WindowTable(5, 2, drop_last)
    read, tokens = [], 0
    for epoch in range(4):
        order = epoch_order(7, epoch, 5, shuffle=True)
        for first in range(0, 4 if drop_last else 5, 2):
            tokens += int(lengths[order[first : first + 2]].sum())
            read.append(tokens)
    found = count_updates(lengths, windows, read, seed=7, shuffle=True)
    assert found == {str(one): update for update, one in enumerate(read, 1)}


def test_lengths_are_those_of_the_samples_as_the_first_epoch_reads_them() -> None:
    random.seed(1)
    lengths = sample_lengths(Numbers(), Cut(), 5)
    random.seed(2)
    assert lengths.tolist() == sample_lengths(Numbers(), Cut(), 5).tolist()
    assert lengths.tolist() == [len(Samples(Cut(), 5).read(0, index)) for index in range(20)]
    assert lengths.tolist() != sample_lengths(Numbers(), Cut(), 6).tolist()


def test_parameters_of_a_half_type_are_said_in_the_plan() -> None:
    config = parse(
        config_text(*own("test_user_code.Halves", "test_user_code.Numbers", "test_user_code.Long", lengths=3))
    )
    facts = gather_facts(config, Parts(build_model(config), build_task(config), *build_data(config)))
    assert facts.half_parameters == {"bfloat16": 12, "float16": 2}
    notes = make_plan(config, facts, world=World(1, 1, Device.cpu)).notes
    (first, second) = [note for note in notes if note.startswith("parameters are")]
    assert first.startswith("parameters are bfloat16 (12 of 16): their gradients are summed and their updates rounded")
    assert " to 8 bits" in first
    assert "precision=bf16" in first
    assert " to 11 bits" in second
    assert "precision=fp16" in second
    whole = replace(facts, half_parameters={})
    assert not [note for note in make_plan(config, whole).notes if note.startswith("parameters are")]


def test_a_groups_own_weight_decay_is_scaled_like_the_others() -> None:
    groups = (
        "optimizer.groups=[{match: bias, weight_decay: 0.5, lr_scale: 3}, {match: norm}, {match: w, weight_decay: 0}]"
    )
    more = [groups, "optimizer.weight_decay=0.25", "batch.global_batch_size=64", "scaling.base_batch_size=16"]

    def decays(rule: str) -> list[float]:
        config = parse(config_text(*PLAIN, *more, f"scaling.weight_decay={rule}"))
        return [group["weight_decay"] for group in make_plan(config, Facts()).param_groups]

    assert decays("none") == [0.5, 0.25, 0.0, 0.25]
    assert decays("linear") == [2.0, 1.0, 0.0, 1.0]
