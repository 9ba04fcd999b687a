"""Micro-batches through stages on different ranks: torch's pipeline schedules, with the launcher's windows and
shardings."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining._backward import stage_backward
from torch.utils._pytree import tree_map_only

from launcher.errors import LauncherError
from launcher.plan.pipeline import SPLIT_BACKWARD
from launcher.train.buffers import untouched_buffers
from launcher.train.parallel.mesh import Place
from launcher.train.parallel.part import Part
from launcher.train.parallel.precision import Precision
from launcher.train.parallel.stages import Family, Sketch, Span
from launcher.train.randomness import seed_micro_batch
from launcher.train.sharding.base import Sharding, scaled_loss
from launcher.train.window import MicroBatch, Window

SCHEDULES: dict[str, Any] = {
    "gpipe": schedules.ScheduleGPipe,
    "1f1b": schedules.Schedule1F1B,
    "interleaved_1f1b": schedules.ScheduleInterleaved1F1B,
    "looped_bfs": schedules.ScheduleLoopedBFS,
    "interleaved_zero_bubble": schedules.ScheduleInterleavedZeroBubble,
    "zbv": schedules.ScheduleZBVZeroBubble,
}
Collect = Callable[[MicroBatch, Any], None]
"""Takes a micro-batch and the model's output for it."""


@dataclass
class _Round:
    """What runs through the schedule once."""

    micro_batches: Sequence[MicroBatch]
    update: int
    first_step: int
    """Of the window."""
    is_last: bool = True
    scale: float = 1.0
    collect: Collect | None = None
    """In an evaluation: what becomes of the output."""


class PipelineRunner:
    """A window's micro-batches through the stages of a pipeline, round after round."""

    def __init__(
        self, sharding: Sharding, part: Part, sketch: Sketch, family: Family, place: Place, *,
        task: Any, precision: Precision, schedule: str, spans: Sequence[Span], seed: int,
    ) -> None:  # fmt: skip
        assert place.pipe is not None
        self.sharding, self._part, self._sketch, self._place, self._pipe = sharding, part, sketch, place, place.pipe
        self._task, self._precision, self._seed, self._family = task, precision, seed, family
        self._schedule_name, self._spans = schedule, spans
        self._made: dict[bool, tuple[Any, Any]] = {}
        self._round = _Round([], 0, 0)
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=place.device)
        for module, span in zip(part.modules, part.spans, strict=True):
            module.forward = _Forward(self, module, span)

    def run(self, window: Window) -> Tensor:
        """Leaves the window's gradient in the parameters of this rank's stages, as `SequentialRunner.run`.

        Returns:
            The sum of the losses of this rank's samples (scalar, float64), on every rank of the pipeline.
        """
        scale = self.sharding.factor(window.weight, len(window.micro_batches))
        self._loss_sum.zero_()
        start = 0
        for number, size in enumerate(window.rounds, 1):
            micro_batches = window.micro_batches[start : start + size]
            self._run(_Round(micro_batches, window.update, start, number == len(window.rounds), scale))
            start += size
        self.sharding.end_of_window()
        return torch.tensor(self._pipe.sum([float(self._loss_sum)])[0], dtype=torch.float64)

    def evaluate(self, micro_batches: Sequence[MicroBatch], first_step: int, collect: Collect) -> None:
        """One round of forwards; `collect` is called with each output on the rank of the last stage."""
        self._run(_Round(micro_batches, 0, first_step, collect=collect))

    def _run(self, one: _Round) -> None:
        self._round = one
        self._check_shapes(one.micro_batches)
        schedule = self._schedule(one)
        tickets = torch.arange(len(one.micro_batches), device=self._place.device)
        given = (tickets,) if any(span.is_first for span in self._part.spans) else ()
        try:
            schedule.step(*given, target=tickets, return_outputs=False)
        except RuntimeError as error:
            if error.__cause__ is not None and "failed to run forward" in str(error):
                raise error.__cause__ from None  # the model's own error, under torch's words
            raise

    def _check_shapes(self, micro_batches: Sequence[MicroBatch]) -> None:
        first, *rest = [{name: tuple(v.shape) for name, v in one.batch.items()} for one in micro_batches]
        other = next((one for one in rest if one != first), None)
        if other is not None:
            raise LauncherError(
                f"mesh.pp: micro-batches of one round need one shape, and task.collate gives {first} and {other}: a "
                "task whose samples differ in length needs length(sample), and pads to the longest"
            )

    def _schedule(self, one: _Round) -> Any:
        """torch's schedule for micro-batches of this shape and number. Another shape needs other connections."""
        inputs = self._task.inputs(one.micro_batches[0].batch)
        shapes = {name: (tuple(v.shape), v.dtype) if isinstance(v, Tensor) else v for name, v in inputs.items()}
        trains = one.collect is None
        key = (len(one.micro_batches), str(shapes))
        if trains not in self._made or self._made[trains][0] != key:
            self._made[trains] = (key, self._make(inputs, len(one.micro_batches), trains=trains))
        for stage in self._made[trains][1].launcher_stages:
            stage.submod.forward.step = 0
        return self._made[trains][1]

    def _make(self, inputs: Mapping[str, Any], count: int, *, trains: bool) -> Any:
        hidden = self._sketch.hidden(inputs, self._spans)
        stages = [_Stage(self, module, span, hidden, trains=trains)
                  for module, span in zip(self._part.modules, self._part.spans, strict=True)]  # fmt: skip
        kind = SCHEDULES[self._schedule_name]
        if not trains and self._schedule_name != "zbv":
            kind = schedules.ScheduleGPipe if len(stages) == 1 else schedules.ScheduleLoopedBFS
        is_single = issubclass(kind, schedules.PipelineScheduleSingle)
        made = kind(
            stages[0] if is_single else stages, count, loss_fn=_take_loss if trains else None, scale_grads=False
        )
        made.launcher_stages = stages
        return made

    def forward(self, module: nn.Module, span: Span, given: Sequence[Any], step: int) -> Any:
        """The forward of one stage for the micro-batch `step` of the round."""
        one = self._round
        micro = one.micro_batches[step]
        seed_micro_batch(self._seed, one.update, self._place.rank, one.first_step + step, stage=span.index)
        quiet = one.collect is None and not micro.num_real
        with untouched_buffers(module) if quiet else nullcontext(), self._precision.autocast():
            hidden = given[0] if len(given) == 1 else tuple(given)
            output = self._family.run(module, span, self._task.inputs(micro.batch), hidden)
        if not span.is_last:
            return tree_map_only(Tensor, Tensor.contiguous, output)
        output = self._precision.result(output)
        if one.collect is not None:
            if micro.num_real:
                one.collect(micro, output)
            return torch.zeros((), device=self._place.device)
        scaled, total = scaled_loss(self._task, output, micro.batch, micro.num_real, one.scale)
        self._loss_sum += total
        return scaled

    def backward_of(self, module: nn.Module, *, last: bool) -> Any:
        """What the backward of a stage runs inside."""
        return self.sharding.stage_backward(module, last=last and self._round.is_last)

    @property
    def divides_backward(self) -> bool:
        """Whether torch's schedule takes the gradients of inputs and weights apart."""
        return self._schedule_name in SPLIT_BACKWARD


class _Forward:
    """The forward of a stage as a module's: which micro-batch it is follows from the order, which no schedule changes
    within a stage."""

    def __init__(self, runner: PipelineRunner, module: nn.Module, span: Span) -> None:
        self._runner, self._module, self._span = runner, module, span
        self.step = 0

    def __call__(self, *given: Any) -> Any:
        step, self.step = self.step, self.step + 1
        return self._runner.forward(self._module, self._span, given, step)


class _Stage(pipelining.PipelineStage):
    """torch's stage, whose gradients travel when the launcher's sharding says so."""

    def __init__(
        self, runner: PipelineRunner, module: nn.Module, span: Span, hidden: Sequence[Any], *, trains: bool
    ) -> None:
        device, group = runner._place.device, runner._pipe.group
        before = torch.zeros(1, dtype=torch.long) if span.is_first else hidden[span.index - 1]
        after = torch.zeros(()) if span.is_last else hidden[span.index]
        if span.is_last and trains:
            after = after.requires_grad_()
        args = [tree_map_only(Tensor, lambda one: _meta(one, trains=trains), one) for one in (before, after)]
        super().__init__(module, span.index, span.count, device, args[0], args[1], group=group)
        self._runner = runner

    def _post_metadata_inference_cleanup(self) -> None:
        """Nothing to clean up: shapes are given. torch would forget the gradients of earlier rounds under FSDP."""

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        if self._runner.divides_backward:
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        with self._runner.backward_of(self.submod, last=last_backward):
            given = (bwd_kwargs[name] for name in ("stage_output", "output_grads", "input_values"))
            return stage_backward(*given), None

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Nothing more: the sharding has been told of the last backward, or is at the end of the window."""


def _meta(tensor: Tensor, *, trains: bool) -> Tensor:
    made = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return made.requires_grad_(trains and tensor.requires_grad)


def _take_loss(output: Tensor, _target: Tensor) -> Tensor:
    """The last stage gives its loss itself."""
    return output
