"""Where a backward can be divided in that of the inputs and that of the weights without losing a gradient."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.pipelining._backward import (
    _get_grad_fn_or_grad_acc,
    construct_reverse_graph,
    get_param_groups,
)


def can_divide(outputs: Sequence[Tensor], inputs: Iterable[Any], weights: Iterable[nn.Parameter]) -> bool:
    """Whether torch's divided backward reaches every weight that an ordinary backward reaches.

    torch keeps what the backward of the inputs leaves at the nodes where paths from the weights meet paths from the
    inputs, and starts the backward of the weights there. A weight from which the outputs can also be reached past all
    of these nodes, as one behind frozen layers, would lose a gradient without a word. An output that is a view can't be
    let go of in between either.
    """
    if any(one._is_view() for one in outputs):
        return False
    ends = [node for one in outputs if one.requires_grad and (node := _get_grad_fn_or_grad_acc(one)) is not None]
    starts = [node for one in inputs if isinstance(one, Tensor) and (node := _get_grad_fn_or_grad_acc(one)) is not None]
    leaves = [node for one in weights if (node := _get_grad_fn_or_grad_acc(one)) is not None]
    groups = get_param_groups(starts, leaves, construct_reverse_graph(ends))
    met = {node for group in groups for node in group["intermediates"]}
    wanted, seen = set(leaves), set(met)
    waiting = [node for node in ends if node not in met]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in wanted:
            return False
        waiting += [other for other, _ in node.next_functions if other is not None]
    return True
