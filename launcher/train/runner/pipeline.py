"""Micro-batches through stages on different ranks: torch's pipeline schedules, with the launcher's windows and
shardings."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining._backward import stage_backward
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from launcher.errors import LauncherError
from launcher.train import heart
from launcher.train.buffers import untouched_buffers
from launcher.train.parallel.mesh import Place
from launcher.train.parallel.part import Part
from launcher.train.parallel.precision import Precision
from launcher.train.parallel.schedules import CLASSES
from launcher.train.parallel.stages import Family, Sketch, Span
from launcher.train.randomness import seed_micro_batch
from launcher.train.runner.divided import can_divide
from launcher.train.sharding.base import Sharding, scaled_loss
from launcher.train.window import MicroBatch, Window

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
        task: Any, precision: Precision, schedule: str, spans: Sequence[Span], recomputes: bool, seed: int,
    ) -> None:  # fmt: skip
        assert place.pipe is not None
        self.sharding, self._part, self._sketch, self._place, self._pipe = sharding, part, sketch, place, place.pipe
        self._task, self._precision, self._seed, self._family = task, precision, seed, family
        self._schedule_name, self._spans, self._recomputes = schedule, spans, recomputes
        self._is_tuple: list[bool] = []
        self._made: dict[bool, tuple[Any, Any]] = {}
        self._round = _Round([], 0, 0)
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=place.device)
        for module, span in zip(part.modules, part.spans, strict=True):
            module.forward = _Forward(self, module, span)

    @property
    def modules(self) -> Sequence[nn.Module]:
        """The stages of this rank."""
        return self._part.modules

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
        one = _Round(micro_batches, 0, first_step, collect=collect)
        if self._schedule_name == "zbv":  # torch's V has no forwards without backwards
            self._forwards(one)
        else:
            self._run(one)

    def _forwards(self, one: _Round) -> None:
        """Micro-batches one after another through all stages."""
        self._round = one
        self._check_shapes(one.micro_batches)
        given = self._sketch.hidden(self._task.inputs(one.micro_batches[0].batch), self._spans)
        self._is_tuple = [isinstance(one, tuple | list) for one in given]
        for step in range(len(one.micro_batches)):
            before: Any = None
            for module, span in zip(self._part.modules, self._part.spans, strict=True):
                if not span.is_first and self._part.ranks[span.index - 1] != self._pipe.rank:
                    before = self._receive(given[span.index - 1], self._part.ranks[span.index - 1])
                hidden = before if isinstance(before, tuple | list) else (before,)
                module.forward.step = step  # type: ignore[attr-defined]
                before = module(*hidden)
                if not span.is_last and self._part.ranks[span.index + 1] != self._pipe.rank:
                    for tensor in tree_leaves(before):
                        dist.send(tensor, group=self._pipe.group, group_dst=self._part.ranks[span.index + 1])

    def _receive(self, like: Any, rank: int) -> Any:
        made = tree_map(lambda one: torch.empty(one.shape, dtype=one.dtype, device=self._place.device), like)
        for tensor in tree_leaves(made):
            dist.recv(tensor, group=self._pipe.group, group_src=rank)
        return made

    def _run(self, one: _Round) -> None:
        self._round = one
        self._check_shapes(one.micro_batches)
        schedule = self._schedule(one)
        heart.beat(waits=True)  # until another stage has something for this one
        tickets = torch.arange(len(one.micro_batches), device=self._place.device)
        given = (tickets,) if any(span.is_first for span in self._part.spans) else ()
        try:
            schedule.step(*given, target=tickets, return_outputs=False)
        except RuntimeError as error:
            own = error.__cause__
            if own is not None and ("failed to run forward" in str(error) or "Failed to run stage back" in str(error)):
                raise own from None  # the model's own error, under torch's words
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
        self._is_tuple = [isinstance(one, tuple | list) for one in hidden]
        stages = [_Stage(self, module, span, hidden, trains=trains)
                  for module, span in zip(self._part.modules, self._part.spans, strict=True)]  # fmt: skip
        kind: Any = schedules.get_schedule_class(CLASSES[self._schedule_name])
        if not trains:
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
        heart.beat()
        seed_micro_batch(self._seed, one.update, self._place.rank, one.first_step + step, stage=span.index)
        quiet = one.collect is None and not micro.num_real
        with untouched_buffers(module) if quiet else nullcontext(), self._precision.autocast():
            hidden = tuple(given) if not span.is_first and self._is_tuple[span.index - 1] else given[0]
            output = self._family.run(module, span, self._task.inputs(micro.batch), hidden)
        heart.beat(waits=True)
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

    def can_divide(self, outputs: Sequence[Tensor], inputs: Sequence[Any], module: nn.Module) -> bool:
        """Whether the gradients of inputs and weights can be taken apart for a micro-batch; otherwise they come
        together, which is as right and fills no bubble. What is recomputed can be run through once only."""
        return not self._recomputes and can_divide(outputs, inputs, module.parameters())


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
        if backward_type == "weight":
            if bwd_kwargs["param_groups"] is None:  # done with the inputs
                return (), None
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        outputs, gradients, inputs = (bwd_kwargs[name] for name in ("stage_output", "output_grads", "input_values"))
        if backward_type == "input" and self._runner.can_divide(outputs, inputs, self.submod):
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        if gradients is None and isinstance(outputs, tuple):
            (outputs,) = outputs  # the loss
        with self._runner.backward_of(self.submod, last=last_backward):
            return stage_backward(outputs, gradients, inputs), None

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Nothing more: the sharding has been told of the last backward, or is at the end of the window."""


def _meta(tensor: Tensor, *, trains: bool) -> Tensor:
    made = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return made.requires_grad_(trains and tensor.requires_grad)


def _take_loss(output: Tensor, _target: Tensor) -> Tensor:
    """The last stage gives its loss itself."""
    return output
