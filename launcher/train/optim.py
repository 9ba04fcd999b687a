"""The optimizer and its parameter groups."""

import inspect
import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from launcher.errors import ConfigError, LauncherError
from launcher.plan.schedule import LearningRate
from launcher.train.build import build, check_signature, locate

_FUSED = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD)
"""Optimizers of torch with a fused update, which is taken on a GPU unless `fused` or `foreach` says otherwise."""
_RESERVED = ("lr", "groups", "elementwise")


def group_parameters(
    named: Iterable[tuple[str, nn.Parameter]], groups: Sequence[dict[str, Any]], *, is_part: bool = False
) -> list[list[nn.Parameter]]:
    """The trainable parameters by group: those of the first entry of `groups` that matches, the rest last.

    Args:
        is_part: whether these are only some of the model's, so that a group may have none.

    Raises:
        ConfigError: a group's regular expression matches no parameter.
        LauncherError: nothing is trainable.
    """
    split: list[list[nn.Parameter]] = [[] for _ in range(len(groups) + 1)]
    for name, parameter in named:
        if parameter.requires_grad:
            index = next(
                (i for i, group in enumerate(groups) if _matches(group["match"], name, parameter)), len(groups)
            )
            split[index].append(parameter)
    if not any(split):
        raise LauncherError("model: no parameter is trainable (requires_grad is false for all of them)")
    for index, group in enumerate(groups):
        if not split[index] and not is_part and group["match"] != "norms_and_biases":
            raise ConfigError(f"optimizer.groups[{index}].match", group["match"], "matches no trainable parameter")
    return split


def _matches(match: str, name: str, parameter: nn.Parameter) -> bool:
    if match == "norms_and_biases":
        return parameter.ndim <= 1
    return re.search(match, name) is not None


def set_momentum(optimizer: torch.optim.Optimizer, momentum: float) -> None:
    """Gives every group this momentum from the next update on."""
    for group in optimizer.param_groups:
        group["momentum"] = momentum


def set_group_warmup(optimizer: torch.optim.Optimizer, rate: LearningRate, applied: int) -> None:
    """What groups with a `warmup_from` of their own add to the run's rate in the next update."""
    for group in optimizer.param_groups:
        own = group.get("warmup_from")
        if own is not None:
            group["lr_offset"] = (1 - rate.risen(applied)) * (own - rate.start * group["lr_scale"])


def set_rates(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Gives every group its rate where that of the run is `lr`."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"] + group.get("lr_offset", 0.0)


def _all_on_a_gpu(groups: Sequence[Sequence[nn.Parameter]]) -> bool:
    return all(one.device.type == "cuda" for group in groups for one in group)


def build_optimizer(
    model: nn.Module, config: dict[str, Any], planned_groups: Sequence[dict[str, Any]], *, is_part: bool = False
) -> torch.optim.Optimizer:
    """The optimizer of `config` over the model's trainable parameters, in the plan's groups. `is_part`: the model is a
    stage of one.

    Each of its param_groups carries `lr_scale` and maybe `warmup_from`, for the learning rate is set before every
    update, and `index`, its place among the planned ones.
    """
    target = locate(config["_target_"], "optimizer._target_")
    spec = {name: value for name, value in config.items() if name not in _RESERVED}
    given = {name: value for name, value in spec.items() if name != "_target_"}
    _check_step(target, config["_target_"])
    check_signature(target, given, "optimizer", given_by_launcher={"params": None, "lr": None})
    split = group_parameters(model.named_parameters(), config["groups"], is_part=is_part)
    groups = []
    for index, (parameters, planned) in enumerate(zip(split, planned_groups, strict=True)):
        group: dict[str, Any] = {"params": parameters, "lr": planned["lr"], "lr_scale": planned["lr_scale"]}
        group["index"] = index
        if "warmup_from" in planned:
            group["warmup_from"] = planned["warmup_from"]
        if planned["weight_decay"] is not None:
            _check_decay(target, config)
            group["weight_decay"] = planned["weight_decay"]
        if parameters:
            groups.append(group)
    if target in _FUSED and not {"fused", "foreach"} & spec.keys() and _all_on_a_gpu(split):
        spec["fused"] = True
    made = build(spec, "optimizer", params=groups, lr=planned_groups[-1]["lr"])
    if not isinstance(made, torch.optim.Optimizer):
        raise ConfigError("optimizer._target_", config["_target_"], "must make a torch.optim.Optimizer")
    _check_step(type(made), config["_target_"])
    return made


def _check_step(target: Any, path: str) -> None:
    """That an optimizer's step can be called; what is no class is known by what it makes. Raises ConfigError."""
    if not isinstance(target, type) or not issubclass(target, torch.optim.Optimizer):
        return
    closure = inspect.signature(target.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        problem = "its step() needs a closure, which would run a window many times: choose another"
        raise ConfigError("optimizer._target_", path, problem)


def _check_decay(target: Any, config: dict[str, Any]) -> None:
    """That the weight decay which a group has of its own or of the optimizer is taken. Raises ConfigError."""
    if "weight_decay" in inspect.signature(target).parameters:
        return
    own = {f"groups[{index}].weight_decay": one["weight_decay"] for index, one in enumerate(config["groups"])}
    given = {"weight_decay": config.get("weight_decay"), **own}
    key, value = next((name, one) for name, one in given.items() if one is not None)
    hint = "to start from no arguments and no groups: optimizer=custom"
    raise ConfigError(f"optimizer.{key}", value, f"{config['_target_']} takes no weight_decay", hint=hint)
