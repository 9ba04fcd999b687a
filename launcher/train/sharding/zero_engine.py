"""DeepSpeed's engine as `Zero` drives it: made on the ranks' own process group, and told when gradients travel."""

import hashlib
import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
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
        from deepspeed.runtime.zero import parameter_offload, partition_parameters
        from deepspeed.utils import groups, logger
    finally:
        logging.disable(before)
    logger.setLevel(logging.WARNING)
    logger.addFilter(_is_news)
    # what it calls of torch is no concern of a user's, and is said again and again
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+_tensor` is deprecated", FutureWarning)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it is compiled, a minute or more
    comm.cdb = None
    groups._release_process_group_references()
    parameter_offload.FWD_MODULE_STACK.clear()
    # modules and parameters are numbered through a process's life, and ranks compare their numbers
    partition_parameters.Init.param_id = 0
    parameter_offload.DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__[0][0] = 0
    return deepspeed


def _is_news(record: logging.LogRecord) -> bool:
    """Whether DeepSpeed says more than that it wasn't tested with this optimizer: the launcher was."""
    return "untested optimizer" not in record.getMessage()


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

    Under stage 3 a backward gathers parameters too, and the two have to alternate alike on all ranks. So ranks ask each
    other whether they use the same parameters; where they don't, gradients stay until the backward has ended.
    """

    def __init__(
        self, engine: Any, parameters: Sequence[nn.Parameter], stage: int, group: dist.ProcessGroup | None
    ) -> None:
        self._zero, self._stage, self._ranks = engine.optimizer, stage, group
        self._order = list(reversed(parameters))
        groups = () if stage == 3 else self._zero.bit16_groups
        self._group = {id(one): index for index, members in enumerate(groups) for one in members}
        self._arrived: set[int] = set()
        self._sent = 0
        self._is_open = False
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._arrive)  # type: ignore[no-untyped-call]
        # autograd asks of a gradient the size that a parameter had when it was first met: kept, it is never that of a
        # divided one
        self._accumulators = [_accumulator(one) for one in self._order] if stage == 3 else []

    @contextmanager
    def open(self) -> Iterator[None]:
        """A forward and backward after which the gradients so far have been reduced on all ranks."""
        self._is_open = self._stage < 3  # under stage 3 once ranks have agreed
        self._sent = 0
        self._arrived.clear()
        try:
            yield
            for parameter in self._order[self._sent :]:
                self._send(parameter)
            self._zero.overlapping_partition_gradients_reduce_epilogue()
        finally:
            self._is_open = False

    def agree(self, _gradient: Tensor | None = None) -> None:
        """Asked at the start of a backward under stage 3: whether all ranks use the same parameters in it."""
        used = bytes(torch._C._will_engine_execute_node(one) for one in self._accumulators)
        digest = int.from_bytes(hashlib.sha256(used).digest()[:7])
        extremes = torch.tensor([digest, -digest])
        dist.all_reduce(extremes, dist.ReduceOp.MIN, group=self._ranks)
        smallest, largest = extremes.tolist()
        self._is_open = smallest == -largest
        self._arrived = {id(one) for one, is_used in zip(self._order, used, strict=True) if not is_used}

    def _arrive(self, parameter: Tensor) -> None:
        if not self._is_open:
            return
        self._arrived.add(id(parameter))
        while self._sent < len(self._order) and id(self._order[self._sent]) in self._arrived:
            self._send(self._order[self._sent])
            self._sent += 1

    def _send(self, parameter: nn.Parameter) -> None:
        if parameter.grad is None:
            # under stage 3 the parameter itself is empty by now, and torch wants a gradient of its size
            parameter.grad = torch.zeros_like(parameter)
            parameter.grad.data = parameter.new_zeros(getattr(parameter, "ds_shape", parameter.shape))
        self._zero._coalesce_grad_reduction = False
        try:
            if self._stage == 3:
                self._zero.reduce_ready_partitions_and_remove_grads(parameter)
            else:
                self._zero.setup_buckets()
                self._zero.reduce_ready_partitions_and_remove_grads(parameter, self._group[id(parameter)])
        finally:
            self._zero._coalesce_grad_reduction = True


def _accumulator(parameter: nn.Parameter) -> Any:
    """The node of autograd that adds up a parameter's gradient."""
    from deepspeed.runtime.zero import GatheredParameters

    with GatheredParameters([parameter]):
        expanded = parameter.expand_as(parameter)
        assert expanded.grad_fn is not None
        return expanded.grad_fn.next_functions[0][0]
