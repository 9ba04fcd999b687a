"""What a user should know of a plan beside its numbers."""

from typing import Any

from launcher.config.schema import ScalingConfig
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


def rule_notes(scaling: ScalingConfig, optimizer: dict[str, Any]) -> list[str]:
    """Where the scaling rule was found for other optimizers."""
    target = str(optimizer.get("_target_", "")).rpartition(".")[2].lower()
    if scaling.rule.value == "linear" and "adam" in target:
        return ["scaling.rule=linear was found for SGD; for the Adam family sqrt is derived in Malladi et al. 2022"]
    if scaling.rule.value == "sqrt" and target == "sgd":
        return ["scaling.rule=sqrt suits the Adam family; for SGD linear is the usual rule (Goyal et al. 2017)"]
    return []
