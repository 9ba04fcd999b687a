"""The statistics of batch norm over many samples for the parameters as they are now."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from launcher.plan.batch_norm import precise_groups
from launcher.train.batch_norm import batch_norms
from launcher.train.buffers import untouched_buffers
from launcher.train.evaluate import Reader
from launcher.train.parallel.precision import Precision
from launcher.train.randomness import epoch_order
from launcher.train.reading import Item
from launcher.train.window import MicroBatch


class PreciseBatchNorm:
    """Gives every batch norm the mean and variance of its inputs over `samples` training samples (Wu and Johnson 2021,
    arXiv:2105.07576, section 3): all rows and positions count once, which is what the paper's aggregate of moments
    comes to for groups of any size.

    The samples are the same each time. They go through the model in groups of `size`, each of which is normalised by
    its own statistics as in training; all else is as in evaluation. Which rank takes a group changes nothing.
    """

    def __init__(
        self, model: nn.Module, data: Any, reader: Reader, precision: Precision, *, samples: int, size: int
    ) -> None:
        self._model, self._data, self._reader, self._precision = model, data, reader, precision
        count, self._size = precise_groups(samples, size, len(data))
        order = epoch_order(reader.seed, 0, len(data), shuffle=True)
        self._indices = [int(one) for one in order[:count]]

    @property
    def _norms(self) -> list[_BatchNorm]:
        return [norm for norm in batch_norms(self._model) if norm.running_mean is not None]

    @contextmanager
    def lent(self) -> Iterator[None]:
        """While inside, the buffers are those of `settle`; afterwards they are as before, so that nothing depends on
        when this was done."""
        with untouched_buffers(self._model):
            self.settle()
            yield

    @torch.no_grad()
    def settle(self) -> None:
        """Puts the statistics into the running ones. Collective."""
        norms = self._norms
        sums = self._summed([torch.zeros(2 * norm.num_features + 1, dtype=torch.float64) for norm in norms])
        for norm, of_norm in zip(norms, sums, strict=True):
            count, mean, square = of_norm[0], of_norm[1 : norm.num_features + 1], of_norm[norm.num_features + 1 :]
            mean, square = mean / count, square / count
            assert norm.running_mean is not None
            assert norm.running_var is not None
            norm.running_mean.copy_(mean)
            norm.running_var.copy_((square - mean.square()).clamp(min=0) * count / (count - 1).clamp(min=1))

    def _summed(self, sums: list[Tensor]) -> list[Tensor]:
        """For each batch norm [count, sums, sums of squares] of its inputs over all ranks."""
        norms, place = self._norms, self._reader.place
        was_training = self._model.training
        with ExitStack() as stack:
            stack.enter_context(untouched_buffers(self._model))
            self._model.eval()
            stack.callback(self._model.train, was_training)
            real = [0]
            for norm, of_norm in zip(norms, sums, strict=True):
                norm.train()
                hook = norm.register_forward_pre_hook(lambda _, inputs, kept=of_norm: _add(kept, inputs[0], real[0]))
                stack.callback(hook.remove)
            for micro in self._micro_batches():
                real[0] = micro.num_real
                self._precision.call(self._model, self._reader.task.inputs(micro.batch))
        if place.degree > 1:
            together = torch.cat(sums)
            dist.all_reduce(together, group=place.group)
            sums = list(torch.split(together, [len(one) for one in sums]))
        return sums

    def _micro_batches(self) -> Iterator[MicroBatch]:
        size, place = self._size, self._reader.place
        groups = [self._indices[start : start + size] for start in range(0, len(self._indices), size)]
        turns = [[Item(0, index, True) for index in group] for group in groups[place.rank :: place.degree]]
        if self._reader.equal_steps and len(turns) < -(-len(groups) // place.degree):
            turns.append([Item(0, index, False) for index in groups[0]])
        return self._reader.turns(self._data, turns)


def _add(kept: Tensor, inputs: Tensor, real: int) -> None:
    """Adds what goes into a batch norm, [rows, channels, …], to its sums, unless its rows are copies."""
    if not real:
        return
    values = inputs.detach().transpose(0, 1).flatten(1).double()
    kept[0] += values.shape[1]
    channels = values.shape[0]
    kept[1 : channels + 1] += values.sum(1).cpu()
    kept[channels + 1 :] += values.square().sum(1).cpu()
