"""What a user should know of a plan beside its numbers."""

from launcher.plan.batch import BatchPlan
from launcher.plan.facts import Facts
from launcher.plan.windows import WindowTable


def window_notes(batch: BatchPlan, windows: WindowTable | None) -> list[str]:
    """Where an epoch is shorter than a window."""
    if windows is None or windows.samples_per_epoch >= batch.global_batch_size:
        return []
    return [
        f"data.train has {windows.samples_per_epoch} samples, fewer than a window of {batch.global_batch_size}: "
        "every epoch is one update of all of them"
    ]


def half_notes(facts: Facts) -> list[str]:
    """Where parameters themselves are in half precision."""
    bits, precision = {"bfloat16": 8, "float16": 11}, {"bfloat16": "bf16", "float16": "fp16"}
    return [
        f"parameters are {dtype} ({count} of {facts.trainable_parameters}): their gradients are summed and their "
        f"updates rounded to {bits[dtype]} bits, not accumulated in fp32, so small updates are lost and layouts agree "
        f"no better than that; fp32 parameters with precision={precision[dtype]} compute in {dtype} and keep both"
        for dtype, count in facts.half_parameters.items()
    ]
