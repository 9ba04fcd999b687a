"""What batch norm makes of a division of a window: what can't work, and what to know."""

from launcher.config.choices import BatchNormPatch, Device
from launcher.config.schema import ModelPatchesConfig
from launcher.errors import ConfigError
from launcher.plan.batch import MICRO, MICRO_BATCH_CAP, BatchPlan
from launcher.plan.division import Division
from launcher.plan.facts import Facts
from launcher.plan.windows import WindowTable

KEY = "model_patches.batch_norm"
SIZE = "model_patches.ghost_size"
PRECISE = "model_patches.precise_batch_norm"


def check_batch_norm(
    patches: ModelPatchesConfig, division: Division, windows: WindowTable | None, device: Device, facts: Facts, pp: int
) -> None:
    """That what batch norm is replaced by works on this device and with this layout.

    Raises:
        ConfigError: it doesn't; says what would.
    """
    if patches.precise_batch_norm is not None:
        _check_precise(patches, patches.precise_batch_norm, facts, pp)
    if patches.batch_norm is BatchNormPatch.sync:
        _check_sync(division, windows, device)
    elif patches.batch_norm is BatchNormPatch.ghost:
        assert patches.ghost_size is not None
        _check_ghost(division, patches.ghost_size)


def _check_precise(patches: ModelPatchesConfig, samples: int, facts: Facts, pp: int) -> None:
    if facts.batch_norm_layers == 0:
        raise ConfigError(PRECISE, samples, "has no effect: the model has no batch norm", hint=f"{PRECISE}=null")
    if pp > 1:
        problem = "needs the whole model in one forward, and mesh.pp cuts it into stages"
        raise ConfigError(PRECISE, samples, problem, hint=f"mesh.pp=1, or {PRECISE}=null")
    if patches.batch_norm is BatchNormPatch.sync:
        problem = f"needs groups that one rank has, and {KEY}=sync takes statistics over all ranks, each with its group"
        raise ConfigError(PRECISE, samples, problem, hint=f"{KEY}=ghost with {SIZE}, or {PRECISE}=null")


def _check_sync(division: Division, windows: WindowTable | None, device: Device) -> None:
    if device is not Device.cuda:
        problem = f"torch's SyncBatchNorm works on GPUs alone, and the ranks are on {device.value}"
        raise ConfigError(KEY, "sync", problem, hint=f"{KEY}=group_norm, or {KEY}=ghost with {SIZE}")
    if division.micro_batch_tokens is not None or division.layout == "length":
        problem = "may leave a rank without samples of its own in some micro-batch, whose copies would be counted"
        raise ConfigError(KEY, "sync", f"a layout by length {problem}", hint="batch.layout=arrival")
    batch = division.batch
    for size in sorted(_sizes(batch, windows)):
        steps = zip(*(batch.micro_slices(size, rank) for rank in range(batch.data_parallel_degree)), strict=True)
        if any(not part for step in steps for part in step):
            problem = (
                f"in a window of {size} samples some rank has none in some micro-batch, and its copies would count"
            )
            raise ConfigError(KEY, "sync", problem, hint=f"data.drop_last=true, or another {MICRO}")


def _check_ghost(division: Division, size: int) -> None:
    if division.micro_batch_tokens is not None or division.layout == "length":
        problem = f"groups of {size} samples in the window's order need a layout by arrival"
        raise ConfigError(KEY, "ghost", problem, hint="batch.layout=arrival")
    micro = division.batch.micro_batch_size
    if micro % size:
        fits = max(micro // size, 1) * size
        raise ConfigError(SIZE, size, f"must divide {MICRO}={micro}", hint=f"{MICRO}={fits}")


def precise_groups(asked: int, size: int, there: int) -> tuple[int, int]:
    """How many of the samples that are asked for and there count, and in groups of what size: whole ones."""
    count = min(asked, there)
    size = min(size, count)
    return count // size * size, size


def accumulation_notes(patches: ModelPatchesConfig, facts: Facts, division: Division) -> list[str]:
    """What a larger micro-batch would do, where it makes the same update: not where statistics change with it."""
    advice = division.batch.advice()
    if advice is None or division.micro_batch_tokens is not None:
        return []
    if patches.batch_norm is BatchNormPatch.ghost:
        assert patches.ghost_size is not None
        return [] if division.batch.samples_per_rank % patches.ghost_size else [advice]
    if patches.batch_norm is BatchNormPatch.group_norm or facts.batch_norm_layers == 0:
        return [advice]
    return [] if facts.batch_norm_layers else [f"{advice}, and the model no batch norm"]


def batch_norm_notes(
    patches: ModelPatchesConfig, facts: Facts, division: Division, windows: WindowTable | None
) -> list[str]:
    """What batch norm makes of this division of a window, and what it is evaluated with."""
    if not facts.batch_norm_layers:
        return []
    return [*_window_notes(patches, facts, division.batch, windows), *_precise_notes(patches, facts, division)]


def _precise_notes(patches: ModelPatchesConfig, facts: Facts, division: Division) -> list[str]:
    asked = patches.precise_batch_norm
    if asked is None or facts.samples is None:
        return []
    micro = MICRO_BATCH_CAP if division.micro_batch_tokens is not None else division.batch.micro_batch_size
    count, size = precise_groups(asked, patches.ghost_size or micro, facts.samples)
    there = f"; data.train has {facts.samples}" if asked > facts.samples else ""
    return [f"{PRECISE}={asked}: evaluations take statistics over {count} samples in groups of {size}{there}"]


def _window_notes(
    patches: ModelPatchesConfig, facts: Facts, batch: BatchPlan, windows: WindowTable | None
) -> list[str]:
    layers = f"batch norm ({facts.batch_norm_layers} layers)"
    steps, degree = batch.gradient_accumulation_steps, batch.data_parallel_degree
    if patches.batch_norm is BatchNormPatch.ghost:
        assert patches.ghost_size is not None
        fewest = min((size - 1) % patches.ghost_size + 1 for size in _sizes(batch, windows))
        return [
            f"{layers}: its statistics are those of {patches.ghost_size} consecutive samples of a window (the smallest "
            f"group has {fewest}{_alone(fewest)}), however the window is divided; ranks differ by whole groups"
        ]
    if steps == degree == 1:
        return [f"{layers}: its statistics are those of the whole window, since 1 rank takes it in 1 step"]
    parts = [
        part
        for size in _sizes(batch, windows)
        for rank in (0, degree - 1)
        for part in batch.micro_slices(size, rank)
        if part
    ]
    fewest = min(map(len, parts))
    if patches.batch_norm is BatchNormPatch.sync:
        of, split = f"all {degree} ranks, {batch.micro_batch_size * degree} samples", f"{steps} steps are"
        if steps == 1:
            return [f"{layers}: its statistics are those of the whole window, over {of}"]
    else:
        least = f"(the smallest has {fewest}{_alone(fewest)})"
        of, split = f"one rank, {batch.micro_batch_size} samples {least}", f"{steps} steps x {degree} ranks are"
    return [
        f"{layers}: its statistics are those of one micro-batch on {of}, so {split} not the same as one batch of "
        f"{batch.global_batch_size}, and another layout trains another model; {KEY}=group_norm has no such effect, and "
        f"{KEY}=ghost gives one result for every layout"
    ]


def _sizes(batch: BatchPlan, windows: WindowTable | None) -> set[int]:
    """The sizes of windows that occur: the full one, and others where the length of the data is known."""
    return {batch.global_batch_size} | (set() if windows is None else windows.sizes)


def _alone(fewest: int) -> str:
    return ", which torch refuses where a channel has a single value" if fewest == 1 else ""
