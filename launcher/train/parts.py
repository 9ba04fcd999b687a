"""Model, task, data and the facts about them, from the configuration."""

from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from launcher.config.choices import StrategyName
from launcher.config.schema import Config
from launcher.errors import ConfigError, DataError, LauncherError
from launcher.plan.division import divide
from launcher.plan.facts import Facts, needing_tokens, token_targets
from launcher.plan.ramp import check_sizes, ramp_ends
from launcher.plan.timing import table_of
from launcher.plan.windows import WindowTable
from launcher.train.batch_norm import batch_norms
from launcher.train.build import build
from launcher.train.deferred import Blueprint, defer
from launcher.train.optim import group_parameters
from launcher.train.parallel.blocks import check_blocks
from launcher.train.parallel.costs import part_costs
from launcher.train.parallel.families import missing_parts
from launcher.train.patches import patch_model
from launcher.train.randomness import epoch_order, seed_model, seed_sample
from launcher.train.reading import sample_length

_MOST_EPOCHS = 100_000
"""Epochs that are walked through for a duration in tokens where each leaves out other samples."""

_TASK_METHODS = ("collate", "inputs", "weight", "loss")


@dataclass(frozen=True)
class Parts:
    """What is trained, with what and on what."""

    model: nn.Module
    task: Any
    train: Any
    validation: Any | None
    fill: Callable[[nn.Module], None] = lambda _module: None
    """Gives the tensors of a part of a deferred model their numbers."""


def build_data(config: Config) -> tuple[Any, Any | None]:
    """The training set and the validation set (or None).

    Raises:
        LauncherError: a set can't be made, is empty or has no length.
    """
    sets: list[Any] = []
    for key, spec in (("data.train", config.data.train), ("data.validation", config.data.validation)):
        if spec is None:
            sets.append(None)
            continue
        made = build(spec, key)
        if not isinstance(made, Sized) or not hasattr(made, "__getitem__"):
            raise ConfigError(
                f"{key}._target_", spec["_target_"], "must have __len__ and __getitem__ (a map-style set)"
            )
        lengths = getattr(made, "lengths", None)
        if lengths is not None:
            _check_lengths(lengths, len(made), f"{key}._target_", spec["_target_"])
        if len(made) == 0:
            raise DataError(f"{key}: the data set is empty ({spec['_target_']})")
        sets.append(made)
    return sets[0], sets[1]


def _check_lengths(lengths: Any, samples: int, key: str, target: str) -> None:
    if not (isinstance(lengths, Sized) and len(lengths) == samples):
        raise ConfigError(key, target, f"its lengths must hold one number for each of its {samples} samples")
    numbers = np.asarray(lengths)
    if samples and (not np.issubdtype(numbers.dtype, np.integer) or numbers.min() < 0):
        wrong = numbers.min() if np.issubdtype(numbers.dtype, np.integer) else numbers.dtype
        raise ConfigError(key, target, f"its lengths must be whole numbers of at least 0, not {wrong}")


def build_task(config: Config) -> Any:
    """The task. Raises ConfigError where it lacks one of the methods of a task."""
    task = build(config.task, "task")
    lacking = [name for name in _TASK_METHODS if not callable(getattr(task, name, None))]
    if lacking:
        raise ConfigError("task._target_", config.task["_target_"], f"lacks the method {', '.join(lacking)}")
    return task


def build_model(config: Config, *, device: str = "cpu", load: bool = True) -> nn.Module:
    """The model with its initial weights, which depend on run.seed alone, or those of model_weights.

    Args:
        device: where it is made; on the meta device it has no weights.
        load: whether to read the file of model_weights; else it is only looked at.

    Raises:
        LauncherError: it is no nn.Module, or the weights don't fit it.
    """
    seed_model(config.run.seed)
    with torch.device(device):
        model = build(config.model, "model")
    if not isinstance(model, nn.Module):
        raise ConfigError("model._target_", config.model["_target_"], "must make a torch.nn.Module")
    model = patch_model(model, config.model_patches)
    _check_state(model, config.model["_target_"])
    if config.model_weights is not None:
        check_weights(model, config.model_weights)
        if load and device != "meta":
            model.load_state_dict(load_file(config.model_weights), strict=True)
    return model


def make_model(config: Config) -> tuple[nn.Module, Callable[[nn.Module], None]]:
    """The model as the strategy takes it, and what fills a part of it: deferred where it is sharded part by part or cut
    into stages, whole elsewhere. Raises as `build_model`."""
    if config.strategy.name is StrategyName.fsdp or config.mesh.pp > 1:
        return defer_model(config)
    return build_model(config), lambda _module: None


def defer_model(config: Config) -> tuple[nn.Module, Callable[[nn.Module], None]]:
    """The model of `build_model` without memory for its large tensors, and what fills a part of it.

    One whose constructor can't be followed is made whole, and said.
    """
    try:
        blueprint = defer(lambda: build_model(config, load=False))
    except LauncherError as error:  # what is wrong in itself is wrong again
        print(f"the model is made whole on every rank before it is sharded: {error}", flush=True)
        return build_model(config), lambda _module: None
    if config.model_weights is None:
        return blueprint.model, blueprint.fill
    file: Any = safe_open(config.model_weights, framework="pt")
    file = file.__enter__()  # open as long as parts of the model are filled from it
    names = set(file.keys())
    with torch.no_grad():
        for name, tensor in blueprint.model.state_dict(keep_vars=True).items():
            if not tensor.is_meta:
                tensor.copy_(file.get_tensor(name))

    def value(name: str, tensor: Tensor) -> Tensor:
        return file.get_tensor(name).to(tensor.dtype) if name in names else blueprint.value(name, tensor)

    return blueprint.model, Blueprint(blueprint.model, value).fill


def sketch_model(config: Config) -> nn.Module:
    """The model without memory for its weights, on the meta device; one that needs numbers while it is made (`.item()`
    of a tensor) on the CPU. Raises as `build_model`."""
    try:
        return build_model(config, device="meta")
    except LauncherError as error:
        if error.__cause__ is None:  # not raised by the model's own code
            raise
    return build_model(config)


def _check_state(model: nn.Module, target: str) -> None:
    """That a safetensors file can hold the model's whole state. Raises ConfigError."""
    for name, value in model.state_dict().items():
        if isinstance(value, Tensor) and value.layout is torch.strided:
            continue
        kind = f"a tensor of layout {value.layout}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        hint = "keep it in a buffer, or out of the state_dict"
        problem = f"its state_dict has {kind} under '{name}', and a safetensors file holds dense tensors alone"
        raise ConfigError("model._target_", target, problem, hint=hint)


def check_weights(model: nn.Module, path: str) -> None:
    """That a safetensors file holds this model's state, by its names and shapes, without reading the weights.

    Raises:
        ConfigError: the file can't be read, or names or shapes differ.
    """
    try:
        with safe_open(path, framework="pt") as file:
            shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 — not a dict
    except Exception as error:
        raise ConfigError("model_weights", path, f"can't be read as a safetensors file: {error}") from error
    wanted = {name: list(value.shape) for name, value in model.state_dict().items()}
    other = [f"{name} {shape} for {wanted[name]}" for name, shape in shapes.items() if shape != wanted.get(name, shape)]
    problems = [
        ("lacks", sorted(wanted.keys() - shapes.keys())),
        ("holds beside them", sorted(shapes.keys() - wanted.keys())),
        ("differs in shape", other),
    ]
    said = "; ".join(f"{what} {', '.join(names[:5])}{' …' * (len(names) > 5)}" for what, names in problems if names)
    if said:
        raise ConfigError("model_weights", path, f"doesn't fit the model: {said}")


def gather_facts(config: Config, parts: Parts, degree: int = 1) -> Facts:
    """What the plan needs to know of the model and the data. `degree` matters where global_batch_size is null."""
    check_blocks(parts.model, config.strategy)
    _check_vocabulary(parts.model, parts.task)
    parameters = {id(one): one for one in parts.model.parameters()}.values()
    groups = group_parameters(parts.model.named_parameters(), config.optimizer["groups"])
    layers = getattr(parts.model, "layers", None)
    return Facts(
        samples=len(parts.train),
        validation_samples=None if parts.validation is None else len(parts.validation),
        parameters=sum(one.numel() for one in parameters),
        trainable_parameters=sum(one.numel() for one in parameters if one.requires_grad),
        half_parameters=_half_parameters(parts.model),
        group_parameters=[sum(one.numel() for one in group) for group in groups],
        knows_lengths=callable(getattr(parts.task, "length", None)),
        num_layers=len(layers) if isinstance(layers, nn.ModuleList) and len(layers) else None,
        part_costs=part_costs(parts.model),
        missing_parts=missing_parts(parts.model),
        batch_norm_layers=len(batch_norms(parts.model)),
        cuda_devices=torch.cuda.device_count() if torch.cuda.is_available() else 0,
        updates_at_tokens=_updates_at_tokens(config, parts, degree),
    )


def _check_vocabulary(model: nn.Module, task: Any) -> None:
    """That a model which says how many tokens it knows knows those of the task. Raises ConfigError."""
    known, asked = getattr(model, "vocab_size", None), getattr(task, "vocab_size", None)
    if isinstance(known, int) and isinstance(asked, int) and asked > known:
        problem = f"the model has {known} tokens, so ids are from 0 to {known - 1}"
        raise ConfigError("task.vocab_size", asked, problem, hint=f"task.vocab_size={known}, and task.bos within it")


def _half_parameters(model: nn.Module) -> dict[str, int]:
    counts = {torch.bfloat16: 0, torch.float16: 0}
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype in counts:
            counts[parameter.dtype] += parameter.numel()
    return {str(dtype).removeprefix("torch."): count for dtype, count in counts.items() if count}


def _updates_at_tokens(config: Config, parts: Parts, degree: int) -> dict[str, int]:
    targets = token_targets(config)
    if not targets:
        return {}
    if not callable(getattr(parts.task, "length", None)):
        key, value = needing_tokens(config)
        raise ConfigError(key, value, "the task has no length(sample), so tokens can't be counted")
    lengths = sample_lengths(parts.task, parts.train, config.run.seed)
    full = divide(config.batch, degree, None).batch.global_batch_size
    return count_through_ramp(config, lengths, full, targets)


def count_through_ramp(config: Config, lengths: np.ndarray, full: int, targets: Sequence[Fraction]) -> dict[str, int]:
    """As `count_updates` for the windows of this configuration, whose ramp may itself go by tokens.

    Args:
        full: samples of a window after the ramp.
    """
    seed, shuffle = config.run.seed, config.data.shuffle
    found: dict[str, int] = {}
    for index, end in enumerate(ramp_ends(config)):
        if end.unit == "tokens":  # takes the windows of the stages before it, and of its own for as long as it lasts
            size, _ = check_sizes(config.batch.ramp[index], index)
            windows = table_of(config, len(lengths), size, found, stages=index)
            found |= count_updates(lengths, windows, [end.value], seed=seed, shuffle=shuffle)
    windows = table_of(config, len(lengths), full, found)
    return count_updates(lengths, windows, targets, seed=seed, shuffle=shuffle)


def sample_lengths(task: Any, data: Any, seed: int) -> np.ndarray:
    """The length of every sample in tokens, int64 [samples], as the task counts them.

    Raises:
        DataError: one of them is no length.
    """

    def read() -> Iterator[int]:
        for index in range(len(data)):
            seed_sample(seed, 0, index)
            yield sample_length(task, data[index])

    return np.fromiter(read(), dtype=np.int64, count=len(data))


def count_updates(
    lengths: np.ndarray, windows: WindowTable, targets: Sequence[Fraction], *, seed: int, shuffle: bool
) -> dict[str, int]:
    """For each number of tokens the first window after which so many have been read, in the run's own order."""
    if lengths.sum() <= 0:
        raise DataError("data.train: no sample has any tokens")
    found: dict[str, int] = {}
    tokens, epoch = 0, 0
    is_whole = not windows.drop_last or (
        not windows.ramp and windows.samples_used_per_epoch == windows.samples_per_epoch
    )
    for target in sorted(targets):
        if is_whole:  # every epoch holds as many tokens: only the last one is walked through
            epoch = max(epoch, (ceil(target) - 1) // int(lengths.sum()))
            tokens = epoch * int(lengths.sum())
        while str(target) not in found:
            order = epoch_order(seed, epoch, windows.samples_per_epoch, shuffle=shuffle)
            first, last = (windows.updates_for_epochs(Fraction(epoch + i)) for i in (0, 1))
            bounds = [windows.window(update) for update in range(first + 1, last + 1)]
            ends = tokens + np.cumsum([lengths[order[one.start : one.stop]].sum() for one in bounds])
            index = int(np.searchsorted(ends, float(target)))
            if index < len(ends):
                found[str(target)] = first + 1 + index
            else:
                if ends[-1] == tokens or epoch > _MOST_EPOCHS:
                    raise DataError(f"{float(target):g} tokens aren't reached in {epoch} epochs of data.train")
                tokens, epoch = int(ends[-1]), epoch + 1
    return found
