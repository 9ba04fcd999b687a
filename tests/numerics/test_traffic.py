"""Communication counted, not believed: how often gradients travel."""

from typing import Any

import pytest
import torch
from configs import PLAIN, config_text, own
from torch.profiler import ProfilerActivity, profile
from toys import assembled

pytestmark = pytest.mark.slow


def all_reduced_bytes(rank: int, world_size: int, text: str, updates: int) -> list[list[int]]:
    """For each window the sizes in bytes of the tensors of floating-point gradients that were reduced."""
    fit = assembled(rank, world_size, text)
    fit.sharding.prepare()
    found = []
    for update in range(1, updates + 1):
        window = fit.windows.get(update)
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
            fit.runner.run(window)
        events = [event for event in profiler.events() if event.name == "gloo:all_reduce"]
        found.append([4 * int(torch.tensor(event.input_shapes[0]).prod()) for event in events])
        fit.sharding.clear_gradients()
    return found


@pytest.mark.parametrize("steps", [1, 8])
def test_d02_gradients_travel_once_a_window(ranks: Any, steps: int) -> None:
    text = config_text(
        *PLAIN,
        *own("scalar.Scalar", "scalar.SquaredError", "scalar.Targets"),
        "+model.size=1000",
        f"+data.train.targets={[[[1.0] * 1000]] * (2 * 2 * steps)}",
        f"batch.global_batch_size={2 * steps}",
        "batch.micro_batch_size=1",
        "training.duration=1 epochs",
    )
    for of_rank in ranks.run(all_reduced_bytes, text, 2, world_size=2):
        assert of_rank == [[4000], [4000]]  # one bucket: each of the 1,000 gradients once
