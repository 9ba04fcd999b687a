"""The reference: a dozen plain lines of PyTorch on one process. It shares nothing with the launcher but the model's and
the task's code."""

from typing import Any

from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_


def window_gradient(model: nn.Module, task: Any, samples: list[Any]) -> dict[str, Tensor]:
    batch = task.collate(samples)
    model.zero_grad()
    (task.loss(model(**task.inputs(batch)), batch).sum() / task.weight(batch).sum()).backward()
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


def train(
    model: nn.Module, task: Any, data: Any, global_batch_size: int, updates: int, optimizer: Any, max_norm: float | None
) -> list[dict[str, float]]:
    """Trains in order, epoch after epoch, and gives loss and gradient norm of each update."""
    starts = list(range(0, len(data), global_batch_size))
    lines = []
    for update in range(updates):
        start = starts[update % len(starts)]
        batch = task.collate([data[i] for i in range(start, min(start + global_batch_size, len(data)))])
        loss = task.loss(model(**task.inputs(batch)), batch).sum() / task.weight(batch).sum()
        optimizer.zero_grad()
        loss.backward()
        norm = clip_grad_norm_(model.parameters(), float("inf") if max_norm is None else max_norm)
        optimizer.step()
        lines.append({"loss": loss.item(), "grad_norm": norm.item()})
    return lines


def relative_difference(mine: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    """norm of (g - g_ref) / norm of g_ref over all parameters, in float64."""
    assert mine.keys() == reference.keys()
    difference = sum(float((mine[n].double() - reference[n].double()).square().sum()) for n in reference)
    return (difference / sum(float(one.double().square().sum()) for one in reference.values())) ** 0.5


def largest_difference(mine: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    """max|p - p_ref| / max|p_ref| over all parameters, in float64."""
    assert mine.keys() == reference.keys()
    difference = max(float((mine[n].double() - reference[n].double()).abs().max()) for n in reference)
    return difference / max(float(one.double().abs().max()) for one in reference.values())
