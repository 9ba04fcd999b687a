"""What the gradient noise scale needs of a window: a part of it that is a random one, and passes by on its own."""

from launcher.config.choices import BatchNormPatch, StrategyName
from launcher.config.schema import Config
from launcher.errors import ConfigError
from launcher.plan.batch import MICRO, BatchPlan
from launcher.plan.division import Division
from launcher.plan.mesh import Mesh
from launcher.plan.timing import Timing
from launcher.plan.windows import WindowTable

KEY = "training.noise_scale"
FEWEST = 10
"""Measurements before an estimate is made of them."""


def check_noise_scale(config: Config, mesh: Mesh, division: Division, windows: WindowTable | None) -> list[str]:
    """What to know of measuring the noise scale with this division of a window, where that was asked for.

    Args:
        windows: None: not known yet.

    Raises:
        ConfigError: it can't; says what would.
    """
    given = config.training.noise_scale
    if given is None:
        return []
    if mesh.pp > 1:
        problem = "a pipeline never has a micro-batch's gradient by itself"
        raise ConfigError(KEY, given, f"{problem} (mesh.pp={mesh.pp})", hint="mesh.pp=1, in a short run")
    if division.micro_batch_tokens is not None or division.layout == "length":
        problem = "needs micro-batches that are a random part of the window, and a layout by length sorts it"
        raise ConfigError(KEY, given, problem, hint=f"batch.layout=arrival{_instead(division)}")
    if config.model_patches.batch_norm is BatchNormPatch.sync:
        problem = "a rank has no gradient of its own where statistics are those of all ranks"
        raise ConfigError(KEY, given, problem, hint="model_patches.batch_norm=ghost or group_norm")
    if config.strategy.name is StrategyName.fsdp and mesh.dp_shard == 1 < mesh.dp_replicate:
        problem = "fsdp reduces nothing among shards with mesh.dp_shard=1"
        raise ConfigError(KEY, given, problem, hint="strategy=ddp, which is the same here")
    largest = division.batch.global_batch_size if windows is None else max(windows.sizes)
    _check_parts(given, division.batch, largest)
    neighbours = (
        f"{KEY}: with data.shuffle=false a micro-batch holds neighbours of the data set; where these are alike, "
    )
    return [] if config.data.shuffle else [f"{neighbours}the noise scale comes out too large"]


def _instead(division: Division) -> str:
    return "" if division.micro_batch_tokens is None else f" with {MICRO} instead of batch.micro_batch_tokens"


def _check_parts(given: object, batch: BatchPlan, size: int) -> None:
    """That the largest window, of `size` samples, has a part that is smaller. Raises ConfigError."""
    if size == 1:
        problem = "a window of one sample has no part to compare it with"
        raise ConfigError(KEY, given, problem, hint="batch.global_batch_size=2 or more")
    if batch.data_parallel_degree == 1 and size <= batch.micro_batch_size:
        problem = (
            f"one rank takes the window of {size} samples in one micro-batch, so there is no smaller one to compare"
        )
        raise ConfigError(KEY, given, problem, hint=f"{MICRO}={size // 2}: two micro-batches, and the same update")


def measured_notes(config: Config, batch: BatchPlan, windows: WindowTable | None, timing: Timing) -> list[str]:
    """What to know of when the noise scale is measured, where that is known.

    Raises:
        ConfigError: it never is.
    """
    every, last, given = timing.noise_scale_every, timing.num_updates, config.training.noise_scale
    if every is None or last is None or windows is None:
        return []
    count, notes = every.count(last), []
    most = batch.micro_batch_size if batch.data_parallel_degree == 1 else 1  # samples of a window without a part
    before = 0
    for index, (stage, end) in enumerate(zip(windows.ramp, windows.stage_ends, strict=True)):
        first, before = before, end
        if stage.grow_to is None and stage.global_batch_size <= most:
            count -= every.count(min(end, last), first)
            size = stage.global_batch_size
            notes.append(
                f"{KEY}: nothing is measured in batch.ramp[{index}], whose windows of {size} have no smaller part"
            )
    if count == 0:
        raise ConfigError(KEY, given, f"is never measured in the {last} updates of the training", hint=_often(last))
    if count < FEWEST:
        often = f"it is measured {count} times in {last} updates, and the critical batch is worked out from {FEWEST} on"
        notes.append(f"{KEY}: {often} ({_often(last)})")
    return notes


def _often(num_updates: int) -> str:
    """An interval that gives an estimate."""
    return f"'{max(1, num_updates // (2 * FEWEST))} updates' measures more often"
