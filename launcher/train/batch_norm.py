"""Batch norm where a window lies over micro-batches and ranks: what its running statistics hold, and what they don't.

A training forward works from the statistics of its own micro-batch and never reads the running ones, so nothing here
changes how parameters are trained; it decides what validation and the saved model see.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from launcher.train.window import Place


def batch_norms(model: nn.Module) -> list[_BatchNorm]:
    """The batch norms of a model, of any dimension and SyncBatchNorm too."""
    return [module for module in model.modules() if isinstance(module, _BatchNorm)]


@contextmanager
def untouched_buffers(model: nn.Module) -> Iterator[None]:
    """Leaves every buffer as it was, whatever the forward and the backward inside do to it."""
    before = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    yield
    with torch.no_grad():
        for buffer, value in before:
            buffer.copy_(value)


class BatchStatistics:
    """The running statistics of a model's batch norms, the same on every data-parallel rank after every update.

    An average of running means and variances commutes with their exponential decay, so it could be taken later. It is
    taken after each update because then no bit depends on when a run was validated, saved or stopped.
    """

    def __init__(self, model: nn.Module, place: Place) -> None:
        norms = batch_norms(model)
        self._place = place
        self._moments = [one for norm in norms for one in (norm.running_mean, norm.running_var) if one is not None]
        self._counts = [norm.num_batches_tracked for norm in norms if norm.num_batches_tracked is not None]

    def copy(self) -> list[Tensor]:
        """What `restore` takes back."""
        return [buffer.detach().clone() for buffer in (*self._moments, *self._counts)]

    @torch.no_grad()
    def restore(self, before: list[Tensor]) -> None:
        """Takes back what has come in since `before`: a forward that isn't finite would spoil them for good."""
        for buffer, value in zip((*self._moments, *self._counts), before, strict=True):
            buffer.copy_(value)

    @torch.no_grad()
    def average(self) -> None:
        """Running means and variances become those of all ranks, in float32 at least, and counts the largest: a rank
        without a sample of its own in some micro-step has counted fewer."""
        if self._place.degree == 1 or not self._moments:
            return
        exact = torch.float64 if any(one.dtype == torch.float64 for one in self._moments) else torch.float32
        moments = torch.cat([one.flatten().to(exact) for one in self._moments]).cpu()
        dist.all_reduce(moments, group=self._place.group)
        moments = (moments / self._place.degree).to(self._moments[0].device)
        parts = torch.split(moments, [one.numel() for one in self._moments])
        for buffer, values in zip(self._moments, parts, strict=True):
            buffer.copy_(values.view_as(buffer))
        if self._counts:
            counts = torch.stack(self._counts).cpu()
            dist.all_reduce(counts, dist.ReduceOp.MAX, group=self._place.group)
            for buffer, count in zip(self._counts, counts, strict=True):
                buffer.copy_(count)
