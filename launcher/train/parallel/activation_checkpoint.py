"""Activations that are computed again in the backward instead of being kept."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from launcher.config.choices import Recompute
from launcher.config.parallel import ActivationCheckpointConfig
from launcher.train.buffers import borrowed_buffers, keep_buffers

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]

_aten = torch.ops.aten
SAVED = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.baddbmm.default,
        _aten.convolution.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_fused_attention_overrideable.default,
    }
)
"""Matrix products and attention: what selective recomputation keeps, since it costs the most to do again."""


def recompute_blocks(blocks: Iterable[nn.Module], config: ActivationCheckpointConfig) -> None:
    """Makes blocks compute their activations again as `config` says. Names, parameters and state stay as they are.

    It is torch's non-reentrant checkpoint around each block's own forward, inside of whatever shards the block. Dropout
    draws the same mask again. Buffers are those from before the first forward again, and what the second does to them
    is forgotten: batch statistics count each micro-batch once.
    """
    if config.name is Recompute.none and not config.offload:
        return
    for number, block in enumerate(blocks, 1):
        whole = config.name is Recompute.full or (config.every is not None and number % config.every == 0)
        selective = config.name is Recompute.selective and config.every is None
        block.forward = _Recomputing(block, whole=whole, selective=selective, offload=config.offload)


class _Recomputing:
    """The forward of a block."""

    def __init__(self, block: nn.Module, *, whole: bool, selective: bool, offload: bool) -> None:
        self._block, self._forward = block, block.forward
        self._recomputes, self._selective, self._offload = whole or selective, selective, offload

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        with _kept_on_the_host() if self._offload else nullcontext():
            if not self._recomputes:
                return self._forward(*args, **kwargs)
            return checkpoint(self._forward, *args, use_reentrant=False, context_fn=self._contexts, **kwargs)

    def _contexts(self) -> Contexts:
        """What the first and the second forward run inside."""
        first: AbstractContextManager[Any] = nullcontext()
        second: AbstractContextManager[Any] = nullcontext()
        if self._selective:
            first, second = create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]
        kept = keep_buffers(self._block)
        # buffers first: their copying is no part of what selective recomputation follows
        return first, _all_of(borrowed_buffers(kept), second) if kept else second


def _policy(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in SAVED else CheckpointPolicy.PREFER_RECOMPUTE


@contextmanager
def _all_of(*contexts: AbstractContextManager[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for one in contexts:
            stack.enter_context(one)
        yield


def _kept_on_the_host() -> AbstractContextManager[Any]:
    """As torch's save_on_cpu, but for parameters, which stay where they are."""
    return torch.autograd.graph.saved_tensors_hooks(_pack, _unpack)


Packed = tuple[torch.device, Tensor]


def _pack(tensor: Tensor) -> Packed:
    base = tensor if tensor._base is None else tensor._base
    if isinstance(base, nn.Parameter) or tensor.device.type == "cpu":
        return tensor.device, tensor
    host = torch.empty(tensor.size(), dtype=tensor.dtype, layout=tensor.layout, pin_memory=True)
    return tensor.device, host.copy_(tensor)


_unpack: Callable[[Packed], Tensor] = lambda packed: packed[1].to(packed[0], non_blocking=True)  # noqa: E731
