"""Accumulating gradients is the same update: a linear model, one batch of 32 against four micro-batches of 8.

Run it with `python examples/equivalence.py`. Every micro-batch adds the gradient of its *summed* loss, divided by the
number of samples in the whole window. A mean in each micro-batch, and a mean of those means, gives the same numbers
only as long as all micro-batches are equally large.
"""

import torch
from torch import nn

from launcher.plan.batch import BatchPlan

WINDOW, MICRO = 32, 8


def gradient(model: nn.Module, x: torch.Tensor, y: torch.Tensor, micro_batch_size: int) -> torch.Tensor:
    """The gradient of the mean squared error over all rows of x and y, as one vector, by way of micro-batches."""
    model.zero_grad()
    for rows in range(0, len(x), micro_batch_size):
        part = slice(rows, rows + micro_batch_size)
        loss = nn.functional.mse_loss(model(x[part]), y[part], reduction="sum")
        torch.autograd.backward(loss / len(x))
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


def main() -> float:
    """The largest difference between the two gradients, relative to the largest entry."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(WINDOW, 10, generator=generator)
    y = torch.randn(WINDOW, 1, generator=generator)
    model = nn.Linear(10, 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(generator=generator)
    whole = gradient(model, x, y, WINDOW)
    accumulated = gradient(model, x, y, MICRO)
    return float((whole - accumulated).abs().max() / whole.abs().max())


def plan() -> BatchPlan:
    """128 samples an update from micro-batches of 4 on 4 devices: what is left open, the steps, follows."""
    return BatchPlan.solve(128, 4, "auto", 4)


if __name__ == "__main__":
    print(f"one batch of {WINDOW} against {WINDOW // MICRO} x {MICRO}: gradients differ by {main():.1e}")
    batch = plan()
    print(
        f"{batch.micro_batch_size} samples x {batch.gradient_accumulation_steps} steps x "
        f"{batch.data_parallel_degree} devices = {batch.global_batch_size} samples an update"
    )
