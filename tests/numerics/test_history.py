"""No bit depends on what ran before: a gradient is the same in the first window of a process as in a later one.

DistributedDataParallel's buckets, rebuilt after its first backward, are what broke this on three and more ranks.
"""

from typing import Any

import pytest
import torch
from configs import PLAIN, config_text, own
from toys import gradients_from

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("degree", [2, 3, 4])
def test_the_bits_of_a_gradient_do_not_depend_on_earlier_windows(ranks: Any, degree: int) -> None:
    text = config_text(
        *PLAIN,
        *own("toys.Scrambled", "toys.Same", "toys.Drawing", count=10),
        "batch.global_batch_size=5",
        "batch.micro_batch_size=1",
        "training.duration=2 epochs",
    )
    whole = ranks.run(gradients_from, text, 1, 4, world_size=degree, timeout=120)
    later = ranks.run(gradients_from, text, 4, 4, world_size=degree, timeout=120)
    for one, other in zip(whole, later, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
