"""How parameters, gradients and optimizer states are spread, and when gradients travel."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from launcher.errors import LauncherError
from launcher.train.parallel.precision import Precision


@dataclass(frozen=True)
class StepResult:
    """What an update did."""

    grad_norm: float
    """Norm of the whole window's gradient before the clip; NaN or inf where it wasn't finite."""
    applied: bool
    """Whether parameters changed."""


class LossModule(nn.Module):
    """The model and its task as one module whose output is the scaled loss of a micro-batch.

    Data-parallel wrappers see one forward and one scalar. Every trainable parameter hangs on that scalar, so that one
    which no sample touched takes part in the reduction like any other, at no cost.
    """

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
        rows = row_losses(self.task, output, batch)
        if torch.is_grad_enabled() and not rows.requires_grad:
            raise LauncherError("task.loss: its result carries no gradient (detached, or made of numbers alone)")
        # sums and the divisor are not for the 8 or 11 bits of a half type
        rows = rows if rows.dtype is torch.float64 else rows.float()
        if num_real < rows.shape[0]:
            real = torch.arange(rows.shape[0], device=rows.device) < num_real
            rows = torch.where(real, rows, torch.zeros_like(rows))
        total = rows.sum()
        scaled: Tensor = _Touch.apply(total * scale, *self._trainable)  # type: ignore[no-untyped-call]
        return scaled, total.detach().double()

    def _without_rows(self) -> tuple[Tensor, Tensor]:
        """A loss of nothing, from which gradients arrive one by one, those of the last parameters first."""
        scaled = torch.zeros((), device=self._trainable[0].device)
        for parameter in self._trainable:
            scaled = _Touch.apply(scaled, parameter)  # type: ignore[no-untyped-call]
        return scaled, scaled.detach().double()


def row_losses(task: Any, output: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """The loss sums of a batch, [rows]. Raises TypeError where the task gives another shape."""
    losses = task.loss(output, batch)
    rows = next(iter(batch.values())).shape[0]
    if not isinstance(losses, Tensor) or losses.shape != (rows,):
        shape = list(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise TypeError(f"task.loss must give one sum of losses per row, shape [{rows}], not {shape}")
    return losses


class _Touch(torch.autograd.Function):
    """The loss unchanged, with every parameter as a further input whose gradient is none."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, *parameters: Tensor) -> Tensor:
        ctx.count = len(parameters)
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return (gradients[0], *[None] * ctx.count)


class Sharding(ABC):
    """Parameters, gradients and optimizer states of one run on one rank.

    The contract: a runner calls `forward` and backward for every micro-batch of a window inside `micro_batch`, each
    loss multiplied by `loss_factor` / window weight; then the gradients are the sum of the window's losses over all
    ranks divided by its weight, and `step` applies them once.
    """

    loss_factor: float = 1.0
    """What a wrapper's averaging divides by, to be multiplied in beforehand."""

    def __init__(self, model: nn.Module, task: Any, optimizer: torch.optim.Optimizer, precision: Precision) -> None:
        self.model = model
        self.optimizer = optimizer
        self.module: nn.Module = LossModule(model, task, precision)
        self.parameters = [one for group in optimizer.param_groups for one in group["params"]]

    def prepare(self) -> None:  # noqa: B027 — most shardings have nothing to prepare
        """Called once on every rank before the first window."""

    @abstractmethod
    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        """What a forward and its backward run inside; gradients travel in the last of a window only."""

    def forward(self, batch: Mapping[str, Tensor] | None, num_real: int, scale: float) -> tuple[Tensor, Tensor]:
        """As `LossModule.forward`, through whatever wraps it."""
        scaled, total = self.module(batch, num_real, scale)
        return scaled, total

    def step(self, lr: float, max_norm: float | None, *, finite: bool = True) -> StepResult:
        """One update from the window's gradients: finite? clip once by the norm over everything, apply, clear.

        Args:
            lr: the run's rate; each group takes it times its `lr_scale`.
            max_norm: the clip; None: not clipped.
            finite: whether the window's loss was, as all ranks agreed.
        """
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        norm = get_total_norm([one.grad for one in self.parameters])
        grad_norm = float(norm)
        applied = finite and grad_norm < float("inf")
        if applied:
            if max_norm is not None:
                clip_grads_with_norm_(self.parameters, max_norm, norm)
            for group in self.optimizer.param_groups:
                group["lr"] = lr * group["lr_scale"]
            self.optimizer.step()
        self.clear_gradients()
        return StepResult(grad_norm, applied)

    def clear_gradients(self) -> None:
        """Forgets the gradients of the window."""
        self.optimizer.zero_grad(set_to_none=True)

    def full_state(self) -> dict[str, Tensor]:
        """The whole model's state on the CPU, under the plain model's names; tied ones under each of theirs."""
        state = self.model.state_dict()
        return {name: value.detach().to("cpu", copy=True).contiguous() for name, value in state.items()}


class Single(Sharding):
    """One rank: nothing travels."""

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        return nullcontext()
