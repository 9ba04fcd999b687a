"""DeepSpeed's engine as `Zero` drives it: made on the ranks' own process group, and told when gradients travel."""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def load_deepspeed(device_type: str) -> Any:
    """The package, on a process group that torch has made already. It compiles nothing and says warnings alone.

    What it keeps of an earlier group is forgotten, so that one process can make several engines, each on a fresh group.
    """
    if device_type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ.setdefault("LOCAL_RANK", "0")  # it insists on one; a rank that was started by an agent has its own
    # while it is imported it sets its logger to INFO and talks
    before = logging.root.manager.disable
    logging.disable(logging.INFO)
    try:
        import deepspeed
        import deepspeed.ops
        from deepspeed.comm import comm
        from deepspeed.runtime.zero import parameter_offload
        from deepspeed.utils import groups, logger
    finally:
        logging.disable(before)
    logger.setLevel(logging.WARNING)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it is compiled, a minute or more
    comm.cdb = None
    groups._release_process_group_references()
    parameter_offload.FWD_MODULE_STACK.clear()
    return deepspeed


def make_engine(
    module: nn.Module, optimizer: torch.optim.Optimizer, keys: Mapping[str, Any], device: torch.device
) -> Any:
    """DeepSpeed's engine around `module`. It leaves gradients where they are until `Reduction` takes them."""
    deepspeed = load_deepspeed(device.type)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=dict(keys), dist_init_required=False)
    engine.enable_backward_allreduce = False
    engine.optimizer._coalesce_grad_reduction = True
    return engine


class Reduction:
    """Gradients travel in one order on every rank, and none is left out.

    By themselves DeepSpeed's hooks put gradients into buckets as they arrive, and leave out parameters without one.
    Where ranks use different parameters in a micro-batch their buckets would hold different things, which are added up
    all the same; and under stage 3 a parameter that none has used would keep the gradient of an earlier window. So its
    hooks are kept still, as in its own `coalesce_grad_reduction`, and a gradient goes into a bucket as soon as all
    before it in the order have gone. The order is that of the parameters backwards, which is about that of a backward.
    """

    def __init__(self, engine: Any, parameters: Sequence[nn.Parameter], stage: int) -> None:
        self._zero, self._stage = engine.optimizer, stage
        self._order = list(reversed(parameters))
        groups = () if stage == 3 else self._zero.bit16_groups
        self._group = {id(one): index for index, group in enumerate(groups) for one in group}
        self._arrived: set[int] = set()
        self._sent = 0
        self._is_open = False
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._arrive)

    @contextmanager
    def open(self) -> Iterator[None]:
        """A forward and backward after which the gradients so far have been reduced on all ranks."""
        self._is_open = True
        try:
            yield
            self._finish()
        finally:
            self._is_open, self._sent = False, 0
            self._arrived.clear()

    def _arrive(self, parameter: Tensor) -> None:
        if not self._is_open:
            return
        self._arrived.add(id(parameter))
        while self._sent < len(self._order) and id(self._order[self._sent]) in self._arrived:
            self._send(self._order[self._sent])
            self._sent += 1

    def _finish(self) -> None:
        for parameter in self._order[self._sent :]:
            if parameter.grad is None:
                # under stage 3 the parameter itself is empty by now, and torch wants a gradient of its size
                parameter.grad = torch.zeros_like(parameter)
                parameter.grad.data = parameter.new_zeros(getattr(parameter, "ds_shape", parameter.shape))
            self._send(parameter)
        self._zero.overlapping_partition_gradients_reduce_epilogue()

    def _send(self, parameter: nn.Parameter) -> None:
        self._zero._coalesce_grad_reduction = False
        try:
            if self._stage == 3:
                self._zero.reduce_ready_partitions_and_remove_grads(parameter)
            else:
                self._zero.setup_buckets()
                self._zero.reduce_ready_partitions_and_remove_grads(parameter, self._group[id(parameter)])
        finally:
            self._zero._coalesce_grad_reduction = True
