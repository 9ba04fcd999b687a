"""A run's model cut for its pipeline, and the runner over the stages."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from launcher.config.choices import Recompute
from launcher.config.schema import Config
from launcher.plan.pipeline import filled_micro_batches, rank_of_stage
from launcher.plan.plan import Plan
from launcher.train.parallel.families import family_of
from launcher.train.parallel.mesh import Place
from launcher.train.parallel.part import Part
from launcher.train.parallel.precision import Precision
from launcher.train.parallel.stages import Family, Sketch, Span, spans_of
from launcher.train.parts import Parts, sketch_model
from launcher.train.randomness import seed_sample
from launcher.train.reading import collate
from launcher.train.rounds import Rounds
from launcher.train.runner.pipeline import PipelineRunner
from launcher.train.sharding.base import Sharding


@dataclass(frozen=True)
class Stages:
    """What of the model lies on this rank, and how windows flow through it."""

    part: Part
    sketch: Sketch
    family: Family
    spans: Sequence[Span]
    """Of the whole pipeline."""
    rounds: Rounds
    schedule: str
    recomputes: bool
    place: Place

    def runner(self, sharding: Sharding, task: Any, precision: Precision, *, seed: int) -> PipelineRunner:
        """The runner over these stages once they are sharded."""
        return PipelineRunner(
            sharding, self.part, self.sketch, self.family, self.place,
            task=task, precision=precision, schedule=self.schedule, spans=self.spans,
            recomputes=self.recomputes, seed=seed,
        )  # fmt: skip


def cut_into_stages(config: Config, plan: Plan, parts: Parts, place: Place) -> Stages:
    """Cuts a run's model as its plan says."""
    assert place.pipe is not None
    assert plan.stages is not None
    assert plan.pipeline is not None
    family = family_of(parts.model)
    schedule, spans, pp = plan.pipeline["schedule"], spans_of(plan.stages), place.pipe.size
    precision = Precision(config.precision.name, place.device.type)
    sketch = Sketch(partial(_without_memory, config), family, place.device, precision)
    seed_sample(config.run.seed, 0, 0)
    inputs = parts.task.inputs(collate(parts.task, [parts.train[0]]))
    anatomy = sketch.anatomy(inputs)
    recomputes = config.activation_checkpoint.name is not Recompute.none or config.activation_checkpoint.offload
    ranks = [rank_of_stage(schedule, pp, one.index) for one in spans]
    part = Part(parts.model, anatomy, family, spans, ranks, place)
    rounds = Rounds(
        plan.pipeline["microbatches_per_round"],
        partial(filled_micro_batches, schedule, pp, len(spans)),
        bubble=(pp - 1) * pp / len(spans),
    )
    return Stages(part, sketch, family, spans, rounds, schedule, recomputes, place)


def _without_memory(config: Config) -> nn.Module:
    return sketch_model(config).to("meta")  # one that needs numbers while it is made is on the CPU
