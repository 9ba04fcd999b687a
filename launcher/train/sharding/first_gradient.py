"""The gradient of the first samples of a window on a rank, before those of other samples or other ranks are added."""

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

from launcher.errors import ConfigError
from launcher.optim.norm import sum_of_squares


class FirstGradient:
    """The squared norm of what this rank's first micro-batch of a window adds to the gradient.

    It is looked at where it passes by anyway, and nothing is copied: parameter by parameter as a backward leaves it, or
    under FSDP, whose whole gradients are its own, block by block as they are handed to the reduction. A rank that
    reduces once a window (`strategy.reduce_each=window`) hands over all of its micro-batches there: they are its first
    samples then.
    """

    def __init__(self) -> None:
        self._is_open = False
        self._squares: list[Tensor] = []
        self._scale = 1.0
        self.samples = 0
        """Behind the gradient; 0: none."""
        self._weight = 0.0

    def watch_parameters(self, model: nn.Module) -> None:
        """Looks at every trained parameter of `model`. Before anything else has a hook there: ZeRO takes gradients away
        in its own."""
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._take_gradient)  # type: ignore[no-untyped-call]

    def watch_reductions(self, model: nn.Module) -> None:
        """Looks at every reduction of a model that FSDP has sharded.

        Raises:
            ConfigError: its parameters are of several types, for which FSDP takes no listener.
        """
        for module in model.modules():
            if isinstance(module, FSDPModule):
                try:
                    module.set_custom_reduce_scatter(_Listening(self))
                except ValueError as error:
                    problem = "can't be measured under strategy=fsdp where a block holds parameters of several types"
                    raise ConfigError("training.noise_scale", "on", problem, hint="strategy=ddp") from error

    def begin(self) -> None:
        """A window begins that is to be measured."""
        self._is_open, self._squares, self.samples, self._weight = True, [], 0, 0.0

    def take(self, gradient: Tensor) -> None:
        """A part of the gradient that no other micro-batch or rank has added to."""
        if self._is_open:
            self._squares.append(sum_of_squares([gradient]))

    def end_of_micro_batch(self, samples: int, weight: float, scale: float) -> None:
        """A micro-batch of this rank has been through its backward.

        Args:
            samples, weight: of its real rows.
            scale: what its losses were multiplied by.
        """
        if self._is_open:
            self.samples, self._weight, self._scale = self.samples + samples, self._weight + weight, scale
            self._is_open = not self._squares

    def square(self) -> float | None:
        """The squared norm of the mean gradient, by weight, of the window's first samples here. None: they have no
        weight, or there are none."""
        self._is_open = False
        if not self.samples or not self._weight or not self._squares:
            return None
        return sum(float(one) for one in self._squares) / (self._scale * self._weight) ** 2

    def _take_gradient(self, parameter: Tensor) -> None:
        if self._is_open and parameter.grad is not None:
            self.take(parameter.grad)


class _Listening(DefaultReduceScatter):
    """FSDP's own reduction, which shows what it is given: the padding in it is zero."""

    def __init__(self, first: FirstGradient) -> None:
        self._first = first

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work:
        self._first.take(input_tensor)
        work: dist.Work = super().__call__(output_tensor, input_tensor, group, op, async_op)
        return work
