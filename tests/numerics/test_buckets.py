"""DistributedDataParallel's buckets: settled before the first window, alike on all ranks, and never changed again.

It rebuilds them once, in the order in which gradients first arrived; the bits of a sum over three and more ranks depend
on them.
"""

from functools import partial
from typing import Any

import pytest
import toys
from configs import PLAIN, config_text, own
from toys import assembled

from launcher.train.sharding.ddp import DataParallel

pytestmark = pytest.mark.slow


def over_windows(rank: int, world_size: int, text: str, updates: int) -> tuple[dict[str, Any], list[list[int]]]:
    """What DDP logs of its buckets at the start of window 1, and the bytes that travel in turn in each window."""
    fit = assembled(rank, world_size, text)
    assert isinstance(fit.sharding, DataParallel)
    fit.sharding.prepare()
    travelled = []
    for update in range(1, updates + 1):
        window = fit.windows.get(update)
        events = toys.travelled(partial(fit.runner.run, window))
        travelled.append([4 * size for name, size in events if name == "allreduce_"])
        fit.sharding.clear_gradients()
    # a forward that synchronises writes the log, before it rebuilds buckets, and once they are rebuilt never again:
    # these are the buckets that window 1 found
    return dict(fit.sharding.ddp._get_ddp_logging_data()), travelled


@pytest.mark.parametrize("degree", [2, 3])
def test_buckets_are_settled_by_the_preparation(ranks: Any, degree: int) -> None:
    text = config_text(
        *PLAIN,
        *own("toys.Scrambled", "toys.Same", "toys.Drawing", count=10),
        "batch.global_batch_size=5",
        "batch.micro_batch_size=1",
        "training.duration=2 epochs",
    )
    found = ranks.run(over_windows, text, 4, world_size=degree)
    logged, _ = found[0]
    buckets = numbers(logged["rebuilt_per_bucket_param_indices"])
    # from the order of the parameters alone, and not that of the backward
    assert [one for bucket in buckets for one in bucket] == list(reversed(range(10)))
    assert len(buckets) > 1
    sizes = [size for (size,) in numbers(logged["rebuilt_bucket_sizes"])]
    for of_rank, travelled in found:
        assert of_rank["rebuilt_per_bucket_param_indices"] == logged["rebuilt_per_bucket_param_indices"]
        assert travelled == [sizes] * 4


def numbers(logged: str) -> list[list[int]]:
    """`1 2, 3` as [[1, 2], [3]]."""
    return [[int(one) for one in part.split()] for part in logged.split(",")]
