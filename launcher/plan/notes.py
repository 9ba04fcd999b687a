"""What a user should know of a plan beside its numbers."""

from launcher.plan.batch import BatchPlan, WindowTable
from launcher.plan.facts import Facts


def window_notes(batch: BatchPlan, windows: WindowTable | None) -> list[str]:
    """Where an epoch is shorter than a window."""
    if windows is None or windows.samples_per_epoch >= batch.global_batch_size:
        return []
    return [
        f"data.train has {windows.samples_per_epoch} samples, fewer than a window of {batch.global_batch_size}: "
        "every epoch is one update of all of them"
    ]


def batch_norm_notes(facts: Facts, batch: BatchPlan, windows: WindowTable | None) -> list[str]:
    """What batch norm makes of this division of a window."""
    if not facts.batch_norm_layers:
        return []
    layers = f"batch norm ({facts.batch_norm_layers} layers)"
    steps, degree = batch.gradient_accumulation_steps, batch.data_parallel_degree
    if steps == degree == 1:
        return [f"{layers}: its statistics are those of the whole window, since 1 rank takes it in 1 step"]
    sizes = {batch.global_batch_size}
    if windows is not None:
        last = windows.window(windows.updates_per_epoch)
        sizes.add(last.stop - last.start)
    parts = [part for size in sizes for rank in (0, degree - 1) for part in batch.micro_slices(size, rank) if part]
    fewest = min(map(len, parts))
    alone = ", which torch refuses where a channel has a single value" if fewest == 1 else ""
    return [
        f"{layers}: its statistics are those of one micro-batch on one rank, {batch.micro_batch_size} samples (the "
        f"smallest has {fewest}{alone}), so {steps} steps x {degree} ranks are not the same as one batch of "
        f"{batch.global_batch_size}, and another layout trains another model; group norm has no such effect "
        "(model.norm=group for launcher.models.ResNet)"
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
