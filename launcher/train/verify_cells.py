"""Which ways of spreading a model a verification runs."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

from torch import nn

from launcher.config.choices import PipelineSchedule, Recompute
from launcher.config.schema import Config
from launcher.train.parallel.families import missing_parts
from launcher.train.parts import sketch_model


@dataclass
class Cell:
    """One way of spreading a model, and how far it came from one process."""

    strategy: str
    recompute: str
    layout: str
    overrides: dict[str, Any] = field(default_factory=dict)
    """Keys of strategy and mesh."""
    parameters: float | None = None
    """Norm of the difference in how parameters moved / norm of that move; the larger of the first and last update."""
    loss: float | None = None
    """Largest relative difference of a logged loss."""
    grad_norm: float | None = None
    tolerance: float | None = None
    passed: bool | None = None
    """None: it can't run here."""
    reason: str = ""


def spread(degree: int, *, knows_lengths: bool) -> Iterator[Cell]:
    """Every strategy, recomputation and layout that so many data-parallel ranks can have."""
    ways: list[tuple[str, dict[str, Any]]] = [("single", {})]
    if degree > 1:
        ways = [("ddp", {}), ("fsdp", {}), ("fsdp", {"reduce_each": "window"})]
        if degree % 2 == 0 and degree > 2:
            ways.append(("fsdp", {"dp_replicate": 2}))
        ways += [("zero1", {}), ("zero2", {}), ("zero3", {})]
    for strategy, overrides in ways:
        for recompute in Recompute:
            for layout in ("arrival", "length") if knows_lengths else ("arrival",):
                yield Cell(strategy, recompute.value, layout, overrides)


def pipelines(config: Config, degree: int) -> Iterator[Cell]:
    """Two stages and as many as there are ranks, each schedule, beside every strategy that a stage can have."""
    model = sketch_model(config)
    if degree < 2 or missing_parts(model):
        return
    layers = len(cast(nn.ModuleList, model.layers))
    for pp in sorted({2, degree}):
        if degree % pp or pp > layers:
            continue
        for strategy in ("ddp", "fsdp", "zero1") if degree > pp else ("ddp",):
            yield Cell(strategy, "none", "arrival", {"pp": pp})
        yield Cell("ddp", "full", "arrival", {"pp": pp})
        for schedule in PipelineSchedule:
            stages = pp if schedule.value in ("gpipe", "1f1b") else 2 * pp
            if schedule.value != "1f1b" and stages <= layers:
                yield Cell("ddp", "none", "arrival", {"pp": pp, "schedule": schedule.value})
