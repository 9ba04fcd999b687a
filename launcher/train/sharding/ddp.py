"""Every rank holds a copy of the model; gradients are summed once a window."""

import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from launcher.errors import LauncherError
from launcher.train.sharding.base import Material, Sharding


class DataParallel(Sharding):
    """torch's DistributedDataParallel, told which micro-batch is the last of a window."""

    def __init__(self, material: Material, *, group: ProcessGroup | None = None) -> None:
        material.fill(material.model)
        material.model.to(material.device)
        super().__init__(material)
        # Batch statistics are the launcher's business, so DDP leaves them alone. The bucket is the gradient's
        # memory: no second copy of it.
        self.ddp = DistributedDataParallel(
            self.module, process_group=group, forward_sync_buffers=False, gradient_as_bucket_view=True
        )
        self.module = self.ddp
        self.loss_factor = float(material.degree)

    def prepare(self) -> None:
        """Fixes the layout of the buckets before the first window.

        DDP rebuilds its buckets after its first backward in the order in which gradients arrived, and the bits of a sum
        over three and more ranks depend on them. Two backwards without rows settle it from the order of the parameters
        alone, so that a run that starts at any window adds in the same order. Gradients of the last parameters come
        first there, as in most models, so that buckets fill up and travel while the backward goes on.
        """
        for _ in range(2):
            with self.micro_batch(last=True):
                scaled, _total = self.forward(None, 0, 1.0)
                self.backward(scaled)
            self.clear_gradients()

    def end_of_window(self) -> None:
        """The window's one reduction: stages of a pipeline have left their sums in the buckets' own memory."""
        with self.micro_batch(last=True):
            scaled, _total = self.forward(None, 0, 1.0)
            self.backward(scaled)

    def backward(self, scaled: Tensor) -> None:
        try:
            super().backward(scaled)
        except RuntimeError as error:
            if "mark a variable ready only once" not in str(error):
                raise
            raise LauncherError(
                "the model runs a part of itself again in the backward with torch's reentrant checkpoint, which "
                "DistributedDataParallel can't follow: give that checkpoint use_reentrant=False, or leave it out and "
                "take activation_checkpoint=full"
            ) from error

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        if last:
            yield
        else:
            with self.ddp.no_sync():
                yield


class ZeroRedundancy(DataParallel):
    """ZeRO-1 inside a stage of a pipeline, which runs its own backward, so that DeepSpeed's engine can't: torch's
    ZeroRedundancyOptimizer. Each rank updates whole parameters and tells the others."""

    def __init__(self, material: Material, *, group: ProcessGroup | None = None) -> None:
        super().__init__(material, group=group)
        self._group = group

    @cached_property
    def optimizer(self) -> torch.optim.Optimizer:
        whole = super().optimizer
        arguments = inspect.signature(type(whole)).parameters
        defaults = {name: value for name, value in whole.defaults.items() if name in arguments}
        groups = [dict(one) for one in whole.param_groups]
        with warnings.catch_warnings():  # of torch's own use of torch.jit, while its package is imported
            warnings.simplefilter("ignore", DeprecationWarning)
            from torch.distributed.optim import ZeroRedundancyOptimizer
        return ZeroRedundancyOptimizer(groups, type(whole), process_group=self._group, **defaults)
