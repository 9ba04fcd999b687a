"""verify is green on what is right, and red on every divisor that is broken by hand."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from configs import config_text, own
from torch import Tensor, nn
from toys import Sequences

import launcher.train.sharding.base as base
import launcher.train.verify as verification
from launcher.config.choices import Device
from launcher.config.validate import parse
from launcher.optim.local import local
from launcher.plan.mesh import World
from launcher.train.parallel.mesh import Place
from launcher.train.parallel.part import Part
from launcher.train.sharding.ddp import DataParallel
from launcher.train.sharding.fsdp import FullyShard
from launcher.train.verify import Cell, Report, verify
from launcher.train.window import Windows

pytestmark = pytest.mark.slow

SIZES = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "intermediate_size": 24, "vocab_size": 14}
GPT = [
    *[f"model.{name}={value}" for name, value in SIZES.items()],
    *("task.vocab_size=14", "task.bos=13", "data=custom", "data.train._target_=toys.Sequences"),
]


class Coupled(nn.Module):
    """Rows that influence one another."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)

    def forward(self, rows: Tensor) -> Tensor:
        out: Tensor = self.linear(rows.float())
        return (out - out.mean()).square()


class Numbers(Sequences):
    def __getitem__(self, index: int) -> list[int]:
        return self.samples[index][:1]


def _no_degree(sharding: Any) -> None:
    sharding.loss_factor = 1.0


def _twice(sharding: Any) -> None:
    sharding.loss_factor = 2.0


def _own_weight(windows: Any) -> None:
    get = windows.get
    windows.get = lambda update: replace(window := get(update), weight=window.weight * (1 + len(window.micro_batches)))


def _local_norm(sharding: Any) -> None:
    sharding.sum_of_squares = lambda gradients: float(base.sum_of_squares([local(one) for one in gradients]))


def _own_stages_norm(part: Any) -> None:
    part.sum = lambda value: value


BROKEN: dict[str, tuple[type, Callable[[Any], None], str]] = {
    "ddp averages over ranks": (DataParallel, _no_degree, "ddp"),
    "fsdp counts twice": (FullyShard, _twice, "fsdp"),
    "fsdp clips by its own part's norm": (FullyShard, _local_norm, "fsdp"),
    "a window's weight is wrong": (Windows, _own_weight, ""),
    "a stage clips by its own norm": (Part, _own_stages_norm, "pp"),
}


def verified(rank: int, world_size: int, text: str, broken: str | None, only: tuple[str, ...]) -> list[Cell]:
    """The rows of a verification on these ranks: of all strategies and pipelines, or of those whose names begin so."""
    report, place = Report(None), Place(rank, world_size, torch.device("cpu"))
    cells = verification.spread

    def some(degree: int, *, knows_lengths: bool) -> Any:
        return (one for one in cells(degree, knows_lengths=knows_lengths) if one.strategy.startswith(only or ""))

    pipelines = verification.pipelines
    verification.spread = some
    if only and "pp" not in only:
        verification.pipelines = lambda _config, _degree: iter(())
    kind, damage, _ = BROKEN[broken] if broken else (None, None, "")
    make = kind.__init__ if kind else None

    def damaged(self: Any, *args: Any, **kwargs: Any) -> None:
        assert make is not None
        assert damage is not None
        make(self, *args, **kwargs)
        damage(self)

    try:
        if kind:
            kind.__init__ = damaged  # type: ignore[misc]
        verify(parse(text), place, World(1, world_size, Device.cpu), report)
    finally:
        verification.spread, verification.pipelines = cells, pipelines
        if kind:
            kind.__init__ = make  # type: ignore[misc]
    return report.cells


@pytest.mark.parametrize(("degree", "only"), [(1, ()), (2, ()), (4, ("fsdp", "pp"))])
def test_every_strategy_agrees_with_one_process(ranks: Any, degree: int, only: tuple[str, ...]) -> None:
    (first, *_) = ranks.run(verified, config_text(*GPT), None, only, world_size=degree, timeout=300)
    assert [(one.strategy, one.reason) for one in first if not one.passed and not one.strategy.startswith("zero")] == []
    kinds = {(one.strategy, one.overrides.get("dp_replicate")) for one in first if one.passed}
    assert {("ddp", None), ("fsdp", None)} <= kinds if degree > 1 else ("single", None) in kinds  # ddp's: of pipelines
    assert (("fsdp", 2) in kinds) == (degree == 4)
    assert {one.recompute for one in first} == {"none", "full", "selective"}
    assert {"arrival", "length"} <= {one.layout for one in first}
    assert all(one.tolerance < 1e-5 for one in first[1:] if one.tolerance is not None)


@pytest.mark.parametrize("broken", list(BROKEN))
def test_a_broken_divisor_is_red(ranks: Any, broken: str) -> None:
    _, _, strategy = BROKEN[broken]
    (first, *_) = ranks.run(verified, config_text(*GPT), broken, (strategy or "ddp",), world_size=2, timeout=300)
    own_process, *rows = first
    assert own_process.passed
    assert rows
    assert not any(one.passed for one in rows), [one for one in rows if one.passed]


def test_a_model_whose_rows_influence_one_another_is_said(ranks: Any) -> None:
    text = config_text(*own("test_verify.Coupled", "toys.Same", "test_verify.Numbers"))
    (first, *_) = ranks.run(verified, text, None, ("ddp",), world_size=2)
    assert first[0].passed is False
    assert "influence one another" in first[0].reason
