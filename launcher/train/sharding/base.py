"""How parameters, gradients and optimizer states are spread, and when gradients travel."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from launcher.errors import LauncherError
from launcher.optim.local import local
from launcher.optim.norm import clip, sum_of_squares
from launcher.train.checkpoint.pieces import Named
from launcher.train.optim import set_rates
from launcher.train.parallel.precision import LossScale, Precision


@dataclass(frozen=True)
class StepResult:
    """What an update did."""

    grad_norm: float
    """Norm of the whole window's gradient before the clip; NaN or inf where it wasn't finite."""
    applied: bool
    """Whether parameters changed."""
    loss_scale: float | None = None
    """What the losses were multiplied by; None: not scaled."""
    overflow: bool = False
    """Whether only the scale of the loss was too large: it has been halved since."""
    spike: bool = False
    """Whether it was left out for its loss, which is finite and too high."""


@dataclass(frozen=True)
class Material:
    """What a sharding is made of."""

    model: nn.Module
    """The plain model, on the CPU; tensors of one that was deferred are on the meta device until `fill`."""
    task: Any
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    """Makes the optimizer of the model's parameters as they are by then: whole or sharded."""
    precision: Precision
    degree: int
    """Data-parallel ranks."""
    device: torch.device
    """Where this rank computes."""
    blocks: Mapping[str, nn.Module]
    """The parts of the model that are sharded as one each, by name."""
    fill: Callable[[nn.Module], None]
    """Gives the tensors of a part of the model their numbers; nothing where they have them."""
    scaler: LossScale | None = None
    """The scale of the loss, under fp16."""
    part: "PipelinePart | None" = None
    """In a pipeline: what of the model lies on this rank."""


class PipelinePart(Protocol):
    """What a rank's stages of a pipeline have to settle with the others. All of it is collective among them."""

    plain: nn.Module
    """The whole model, of which tensors that lie elsewhere may have no memory."""
    modules: Sequence[nn.Module]
    """The stages of this rank, each run as one."""

    @property
    def whole(self) -> nn.Module:
        """One module that holds what all of them hold, under the plain model's names."""
        ...

    def add_up_shared(self) -> None:
        """Gives parameters that lie on several stages the sum of their gradients."""
        ...

    def counted(self, parameters: Sequence[Tensor]) -> list[bool]:
        """Which of these parameters count here in a norm over all stages."""
        ...

    def sum(self, value: float) -> float:
        """The sum over all stages."""
        ...

    def named(self) -> Iterator[Named]:
        """The parameters and buffers of this rank, each once, under the plain model's first name for it."""
        ...

    def full_items(self, own: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """The whole model's state, tensor by tensor. `own`: the whole tensor of a name that lies on this rank."""
        ...


class LossModule(nn.Module):
    """The model and its task as one module whose output is the scaled loss of a micro-batch.

    Data-parallel wrappers see one forward and one scalar. Every trainable parameter hangs on that scalar, so that one
    which no sample touched takes part in the reduction like any other, at no cost.
    """

    touches_all = True
    """False: parameters hang on the scalar only where the model has used them."""

    def __init__(self, model: nn.Module, task: Any, precision: Precision) -> None:
        super().__init__()
        self.model = model
        self.task = task
        self.precision = precision
        self._trainable: list[nn.Parameter] = []

    def forward(self, batch: Mapping[str, Tensor] | None, num_real: int, scale: float) -> tuple[Tensor, Tensor]:
        """The scaled loss (scalar, to run backward from) and the loss sum of the real rows (scalar, float64, detached).

        Args:
            batch: tensors of [rows, …]; None: no rows at all.
            num_real: rows that count; those behind them are filled up and masked.
            scale: what the loss sum is multiplied by before the backward.
        """
        if not self._trainable:  # looked up once, and not before a wrapper may have put its own in their place
            self._trainable = [one for one in self.model.parameters() if one.requires_grad]
        if batch is None:
            return self._without_rows()
        output = self.precision.call(self.model, self.task.inputs(batch))
        scaled, total = scaled_loss(self.task, output, batch, num_real, scale)
        if self.touches_all:
            scaled = _Touch.apply(scaled, *self._trainable)  # type: ignore[no-untyped-call]
        return scaled, total

    def _without_rows(self) -> tuple[Tensor, Tensor]:
        """A loss of nothing, from which gradients arrive one by one, those of the last parameters first."""
        scaled = torch.zeros((), device=self._trainable[0].device)
        for parameter in self._trainable:
            scaled = _Touch.apply(scaled, parameter)  # type: ignore[no-untyped-call]
        return scaled, scaled.detach().double()


def scaled_loss(
    task: Any, output: Any, batch: Mapping[str, Tensor], num_real: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Of a model's output for `batch`: as `LossModule.forward`."""
    rows = row_losses(task, output, batch)
    if torch.is_grad_enabled() and not rows.requires_grad:
        raise LauncherError("task.loss: its result carries no gradient (detached, or made of numbers alone)")
    # sums and the divisor are not for the 8 or 11 bits of a half type
    rows = rows if rows.dtype is torch.float64 else rows.float()
    if num_real < rows.shape[0]:
        real = torch.arange(rows.shape[0], device=rows.device) < num_real
        rows = torch.where(real, rows, torch.zeros_like(rows))
    total = rows.sum()
    return total * scale, total.detach().double()


def row_losses(task: Any, output: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """The loss sums of a batch, [rows]. Raises TypeError where the task gives another shape."""
    losses = task.loss(output, batch)
    rows = next(iter(batch.values())).shape[0]
    if not isinstance(losses, Tensor) or losses.shape != (rows,):
        shape = list(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise TypeError(f"task.loss must give one sum of losses per row, shape [{rows}], not {shape}")
    return losses


class _Touch(torch.autograd.Function):
    """The loss unchanged, with every parameter as a further input whose gradient is none; zeros where a user's hook
    looks at it."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, *parameters: Tensor) -> Tensor:
        ctx.hooked = [one if one._backward_hooks else None for one in parameters]
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return (gradients[0], *[None if one is None else torch.zeros_like(one) for one in ctx.hooked])


class Sharding(ABC):
    """Parameters, gradients and optimizer states of one run on one rank.

    The contract: a runner asks `factor` of a window, calls `forward` and backward for each of its micro-batches inside
    `micro_batch`, each loss multiplied by that factor; then the gradients are the sum of the window's losses over all
    ranks divided by its weight (and under fp16 times a scale that `step` takes out), and `step` applies them once.
    """

    loss_factor: float = 1.0
    """What a wrapper's averaging divides by, to be multiplied in beforehand."""
    forward_is_collective: bool = False
    """Whether all ranks have to run the model equally often, in validation too."""

    def __init__(self, material: Material) -> None:
        self.model = material.model
        self.scaler = material.scaler
        self.degree = material.degree
        self.part = material.part
        self.module: nn.Module = LossModule(material.model, material.task, material.precision)
        self._make_optimizer = material.make_optimizer
        self._unscale = 1.0

    @cached_property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of this rank's parameters, made when it is first asked for."""
        return self._make_optimizer(self.model)

    @cached_property
    def parameters(self) -> list[Tensor]:
        """What the optimizer changes, in its order."""
        return [one for group in self.optimizer.param_groups for one in group["params"]]

    def prepare(self) -> None:  # noqa: B027 — most shardings have nothing to prepare
        """Called once on every rank before the first window."""

    def stage_backward(self, stage: nn.Module, *, last: bool) -> AbstractContextManager[None]:
        """What the backward of a pipeline's stage runs inside. `last`: of the window, for that stage."""
        return nullcontext()

    def end_of_window(self) -> None:  # noqa: B027 — most shardings are done by then
        """Called in a pipeline when all backwards of a window are through: gradients have to be complete."""

    def settle(self) -> None:  # noqa: B027 — most shardings always are
        """Called before the model's parameters are looked at: they are what the optimizer changes."""

    def close(self) -> None:  # noqa: B027 — most shardings hold nothing
        """Called once on every rank when nothing more is asked of this sharding."""

    def factor(self, weight: float, steps: int) -> float:
        """What each loss of a window is multiplied by.

        In fp16 a loss divided by a large window's weight would vanish, so there each is divided by the mean weight of a
        micro-batch and multiplied by the scale, and `step` takes the rest out of the gradient.

        Args:
            weight: of the window, over all ranks.
            steps: its micro-batches on a rank.
        """
        if self.scaler is None:
            return self.loss_factor / weight
        micro_batches = self.degree * steps
        # what averaging divides by comes in here too: on many ranks it would overflow half precision by itself
        self._unscale = self.loss_factor / (micro_batches * self.scaler.scale)
        return self.scaler.scale * micro_batches / weight

    @abstractmethod
    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        """What a forward and its backward run inside. `last`: of the window, so that gradients have to be complete."""

    def forward(self, batch: Mapping[str, Tensor] | None, num_real: int, scale: float) -> tuple[Tensor, Tensor]:
        """As `LossModule.forward`, through whatever wraps it."""
        scaled, total = self.module(batch, num_real, scale)
        return scaled, total

    def backward(self, scaled: Tensor) -> None:
        """The backward from the scaled loss of a micro-batch."""
        torch.autograd.backward(scaled)

    def step(self, lr: float, max_norm: float | None, *, finite: bool = True) -> StepResult:
        """One update from the window's gradients: finite? unscale, clip once by the norm over everything, apply, clear.

        Args:
            lr: the run's rate; each group takes it times its `lr_scale`.
            max_norm: the clip; None: not clipped.
            finite: whether the window's loss was, as all ranks agreed.
        """
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if self.part is not None:
            self.part.add_up_shared()
        gradients = [one.grad for one in self.parameters if one.grad is not None]
        if self.scaler is not None:
            torch._foreach_mul_([local(one) for one in gradients], self._unscale)
        grad_norm = math.sqrt(self._over_all_stages(gradients))
        applied = finite and grad_norm < float("inf")
        if applied:
            if max_norm is not None:
                clip([local(one) for one in gradients], max_norm, grad_norm)
            set_rates(self.optimizer, lr)
            self.optimizer.step()
        self.clear_gradients()
        return self.result(grad_norm, applied=applied, finite=finite)

    def skip(self) -> StepResult:
        """Forgets the gradients of a window whose loss is a spike, and changes nothing."""
        self.clear_gradients()
        return StepResult(math.nan, applied=False, loss_scale=self.scaler.scale if self.scaler else None, spike=True)

    def result(self, grad_norm: float, *, applied: bool, finite: bool) -> StepResult:
        """What an update did, after which the scale of the loss is that of the next window."""
        if self.scaler is None:
            return StepResult(grad_norm, applied)
        scale = self.scaler.scale
        overflow = finite and not applied and scale > 1
        self.scaler.update(overflow=not applied)
        return StepResult(grad_norm, applied, scale, overflow)

    def _over_all_stages(self, gradients: Sequence[Tensor]) -> float:
        if self.part is None:
            return self.sum_of_squares(gradients)
        counted = self.part.counted(self.parameters)
        return self.part.sum(self.sum_of_squares([one for one, own in zip(gradients, counted, strict=True) if own]))

    def sum_of_squares(self, gradients: Sequence[Tensor]) -> float:
        """The squared norm of the gradient over all ranks."""
        return float(sum_of_squares(gradients))

    def clear_gradients(self) -> None:
        """Forgets the gradients of the window."""
        self.optimizer.zero_grad(set_to_none=True)

    def full_items(self) -> Iterator[tuple[str, Tensor]]:
        """The whole model's state, tensor by tensor on the CPU, under the plain model's names and in its order; tied
        ones under each of theirs. Every rank has to go through all of it."""
        state = self.model.state_dict(keep_vars=True)

        def own(name: str) -> Tensor:
            return self.whole(state[name]).detach().to("cpu", copy=True).contiguous()

        if self.part is not None:
            yield from self.part.full_items(own)
            return
        for name in state:
            yield name, own(name)

    @property
    def trained_names(self) -> set[str]:
        """The trained parameters of the whole model by name, wherever they lie."""
        model = self.model if self.part is None else self.part.plain
        return {name for name, one in model.named_parameters(remove_duplicate=False) if one.requires_grad}

    def whole(self, value: Tensor) -> Tensor:
        """A tensor of the state as the plain model has it; collective."""
        return value.full_tensor() if isinstance(value, DTensor) else value

    def full_state(self) -> dict[str, Tensor]:
        """The whole model's state, on every rank."""
        return dict(self.full_items())


class Single(Sharding):
    """One rank: nothing travels."""

    def __init__(self, material: Material) -> None:
        material.fill(material.model)
        material.model.to(material.device)
        super().__init__(material)

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        return nullcontext()
