"""Batch norm where a window lies over micro-batches and ranks.

A training forward works from the statistics of its own micro-batch and never reads the running ones, so nothing that
`buffers` does to them changes how parameters are trained; it decides what validation and the saved model see.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


def batch_norms(model: nn.Module) -> list[_BatchNorm]:
    """The batch norms of a model, of any dimension and SyncBatchNorm too."""
    return [module for module in model.modules() if isinstance(module, _BatchNorm)]


class GhostBatchNorm(_BatchNorm):
    """Batch norm over groups of `size` consecutive rows (Hoffer et al. 2017, arXiv:1705.08741, algorithm 1).

    With micro-batches of whole groups in the window's order, which rows share statistics depends neither on ranks nor
    on micro-batches. The running statistics don't either: those of a window's groups are averaged, and with g groups
    the old ones keep the share (1 - momentum)^g, as after g steps of torch's own.
    """

    def __init__(self, channels: int, size: int, eps: float, momentum: float | None) -> None:
        super().__init__(channels, eps, momentum, affine=False, track_running_stats=False)
        self.size = size
        self._share = 0.0
        """What a group of this rank adds to the running statistics of its window."""

    @classmethod
    def of(cls, norm: _BatchNorm, size: int) -> "GhostBatchNorm":
        """The same norm over groups of `size` rows; parameters and buffers are those of `norm`."""
        made = cls(norm.num_features, size, norm.eps, norm.momentum)
        made.affine, made.track_running_stats = norm.affine, True
        made.weight, made.bias = norm.weight, norm.bias
        made.running_mean, made.running_var = norm.running_mean, norm.running_var
        made.num_batches_tracked = norm.num_batches_tracked
        return made

    @torch.no_grad()
    def begin_window(self, samples: int, degree: int) -> None:
        """Makes room in the running statistics for a window of `samples`, whose groups lie on `degree` ranks: once it
        is through, the average over the ranks is that of before and of all groups."""
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        groups = -(-samples // self.size)
        if self.momentum is None:  # the average of all groups so far
            new = groups / (int(self.num_batches_tracked) + groups)
        else:
            new = 1 - (1 - self.momentum) ** groups
        self.running_mean *= 1 - new
        self.running_var *= 1 - new
        self.num_batches_tracked += groups
        self._share = new * degree / groups

    def forward(self, x: Tensor) -> Tensor:
        """[rows, channels, …] -> the same; while training each group of `size` rows by its own mean and variance."""
        if not self.training:
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)
        rest = len(x) % self.size
        if rest == 0:
            return self._normed(x, self.size)
        if rest == len(x):
            return self._normed(x, rest)
        return torch.cat([self._normed(x[:-rest], self.size), self._normed(x[-rest:], rest)])

    def _normed(self, x: Tensor, size: int) -> Tensor:
        """The rows in groups of `size`: a group's channels are channels of their own, so one call does them all."""
        assert self.running_mean is not None
        assert self.running_var is not None
        groups, channels, *rest = len(x) // size, *x.shape[1:]
        apart = x.reshape(groups, size, channels, *rest).transpose(0, 1).flatten(1, 2)
        mean, var = self.running_mean.repeat(groups), self.running_var.repeat(groups)
        weight, bias = (None if one is None else one.repeat(groups) for one in (self.weight, self.bias))
        # momentum 1: mean and var become those of the groups
        normed = F.batch_norm(apart, mean, var, weight, bias, True, 1.0, self.eps)
        with torch.no_grad():
            self.running_mean += self._share * mean.view(groups, channels).sum(0)
            self.running_var += self._share * var.view(groups, channels).sum(0)
        return normed.view(size, groups, channels, *rest).transpose(0, 1).flatten(0, 1)


def ghosts(model: nn.Module) -> list[GhostBatchNorm]:
    """The ghost batch norms of a model, each of which is told of every window."""
    return [norm for norm in batch_norms(model) if isinstance(norm, GhostBatchNorm)]
