"""Micro-batches one after another."""

from contextlib import nullcontext

from torch import Tensor

from launcher.train import heart
from launcher.train.buffers import untouched_buffers
from launcher.train.randomness import seed_micro_batch
from launcher.train.sharding.base import Sharding
from launcher.train.sharding.first_gradient import FirstGradient
from launcher.train.window import Window


class SequentialRunner:
    """Every forward and backward of a window on one rank; gradient accumulation is what it does with several."""

    def __init__(self, sharding: Sharding, *, seed: int, rank: int, first: FirstGradient | None = None) -> None:
        """`first`: is told of each micro-batch; None: nobody asks for it."""
        self.sharding, self.seed, self.rank, self.first = sharding, seed, rank, first

    def run(self, window: Window) -> Tensor:
        """Leaves the window's gradient in the parameters: the sum of its losses over all ranks / its weight.

        Returns:
            The sum of this rank's losses (scalar, float64, on the device).
        """
        scale = self.sharding.factor(window.weight, len(window.micro_batches))
        loss_sum: Tensor | None = None
        last = len(window.micro_batches) - 1
        for step, micro in enumerate(window.micro_batches):
            heart.beat()
            seed_micro_batch(self.seed, window.update, self.rank, step)
            buffers = nullcontext() if micro.num_real else untouched_buffers(self.sharding.model)
            with self.sharding.micro_batch(last=step == last), buffers:
                scaled, total = self.sharding.forward(micro.batch, micro.num_real, scale)
                heart.beat(waits=step == last)  # the last backward reduces
                self.sharding.backward(scaled)
            if self.first is not None:
                self.first.end_of_micro_batch(micro.num_real, micro.weight, scale)
            loss_sum = total if loss_sum is None else loss_sum + total
        assert loss_sum is not None
        return loss_sum
