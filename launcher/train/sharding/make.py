"""The sharding of a configuration's strategy."""

from dataclasses import asdict

import torch
from torch import nn

from launcher.config.choices import PrecisionName, StrategyName
from launcher.config.schema import Config
from launcher.errors import ConfigError
from launcher.plan.plan import Plan
from launcher.plan.zero import deepspeed_keys
from launcher.train.optim import build_optimizer
from launcher.train.parallel.precision import LossScale, Precision
from launcher.train.parts import Parts
from launcher.train.sharding.base import Material, Sharding, Single
from launcher.train.sharding.ddp import DataParallel
from launcher.train.sharding.zero import Zero
from launcher.train.window import Place


def make_precision(config: Config, place: Place) -> Precision:
    """What this run's forwards compute in."""
    return Precision(config.precision.name, place.device.type)


def make_sharding(config: Config, plan: Plan, parts: Parts, place: Place) -> Sharding:
    """The sharding of the configuration's strategy; with one rank every strategy is that of one process."""

    def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return build_optimizer(model, config.optimizer, plan.param_groups)

    precision, scaler = make_precision(config, place), None
    if precision.name is PrecisionName.fp16:
        scaler = LossScale(config.precision.initial_scale, config.precision.scale_growth_interval)
    material = Material(parts.model, parts.task, make_optimizer, precision, place.degree, scaler)
    if config.strategy.name is StrategyName.single or place.degree == 1:
        return Single(material)
    if config.strategy.name is StrategyName.ddp:
        return DataParallel(material)
    if config.strategy.name.zero_stage:
        return _make_zero(config, plan, material, place)
    raise ConfigError("strategy", config.strategy.name.value, "isn't there yet", hint="strategy=ddp")


def _make_zero(config: Config, plan: Plan, material: Material, place: Place) -> Zero:
    trainable = sum(one.numel() for one in material.model.parameters() if one.requires_grad)
    keys = deepspeed_keys(config, asdict(plan), trainable, pin_memory=place.device.type == "cuda")
    return Zero(material, config.strategy, keys=keys, place=place)
