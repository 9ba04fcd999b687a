"""The sharding of a configuration's strategy."""

from dataclasses import asdict
from functools import partial

import torch
from torch import nn

from launcher.config.choices import Offload, PrecisionName, ReduceEach, StrategyName
from launcher.config.schema import Config
from launcher.errors import ConfigError
from launcher.plan.plan import Plan
from launcher.plan.zero import deepspeed_keys
from launcher.train.optim import build_optimizer
from launcher.train.parallel.activation_checkpoint import recompute_blocks
from launcher.train.parallel.blocks import find_blocks
from launcher.train.parallel.mesh import Place
from launcher.train.parallel.part import Part
from launcher.train.parallel.precision import LossScale, Precision
from launcher.train.parts import Parts
from launcher.train.sharding.base import Material, Sharding, Single
from launcher.train.sharding.ddp import DataParallel, ZeroRedundancy
from launcher.train.sharding.first_gradient import FirstGradient
from launcher.train.sharding.fsdp import FullyShard
from launcher.train.sharding.zero import Zero


def _leave(_module: nn.Module) -> None:
    """Fills nothing: it is done."""


def make_precision(config: Config, place: Place) -> Precision:
    """What this run's forwards compute in."""
    return Precision(config.precision.name, place.device.type)


def make_sharding(
    config: Config,
    plan: Plan,
    parts: Parts,
    place: Place,
    part: Part | None = None,
    first: FirstGradient | None = None,
) -> Sharding:
    """The sharding of the configuration's strategy; with one rank every strategy is that of one process.

    Args:
        part: in a pipeline the stages of this rank.
        first: what looks at the first gradient of a window; None: nothing does.
    """
    is_late = config.strategy.name is StrategyName.fsdp  # its parameters are other ones by then
    if first is not None and not is_late:
        first.watch_parameters(parts.model)
    made = _make_sharding(config, plan, parts, place, part)
    if first is not None and is_late:
        watch = first.watch_reductions if isinstance(made, FullyShard) else first.watch_parameters
        watch(made.model)
    return made


def _make_sharding(config: Config, plan: Plan, parts: Parts, place: Place, part: Part | None) -> Sharding:
    def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
        arguments = config.optimizer | plan.scaled_arguments
        return build_optimizer(model, arguments, plan.param_groups, is_part=part is not None)

    precision, scaler = make_precision(config, place), None
    if precision.name is PrecisionName.fp16:
        scaler = LossScale(config.precision.initial_scale, config.precision.scale_growth_interval)
    strategy, fill = config.strategy, parts.fill
    is_deferred = strategy.name is StrategyName.fsdp and place.degree > 1
    if part is not None:
        fill = partial(part.fill, fill=parts.fill)
        if not is_deferred:
            for stage in part.modules:
                fill(stage)
                stage.to(place.device)
            fill = _leave
    model = parts.model if part is None else part.whole
    if part is not None and is_deferred:
        del part.whole  # it is another one once the stages have been sharded
    inside = set(model.modules())
    blocks = {name: one for name, one in find_blocks(parts.model, strategy.wrap).items() if one in inside}
    if part is not None and not any(one.requires_grad for one in model.parameters()):
        stages = " and ".join(str(span.index) for span in part.spans)
        raise ConfigError("mesh.pp", config.mesh.pp, f"nothing in stage {stages} is trained", hint="pipeline.split")
    recompute_blocks(list(blocks.values()) or ([model] if part is None else []), config.activation_checkpoint)
    material = Material(
        model, parts.task, make_optimizer, precision, place.degree, place.device, blocks, fill, scaler, part
    )
    if strategy.name is StrategyName.single or (place.degree == 1 and strategy.offload is Offload.none):
        return Single(material)
    if strategy.name is StrategyName.ddp:
        return DataParallel(material, group=place.device_group)
    if strategy.name is StrategyName.zero1 and part is not None:
        return ZeroRedundancy(material, group=place.device_group)
    if strategy.name is StrategyName.fsdp:
        assert plan.reduce_each is not None
        return FullyShard(
            material,
            strategy,
            reduce_each=ReduceEach(plan.reduce_each),
            replicate=plan.mesh["dp_replicate"],
            shard=plan.mesh["dp_shard"],
            pipe=place.pipe,
        )
    trainable = sum(one.numel() for one in model.parameters() if one.requires_grad)
    keys = deepspeed_keys(config, asdict(plan), trainable, pin_memory=place.device.type == "cuda")
    reduce_once = plan.reduce_each == ReduceEach.window.value
    return Zero(material, strategy.name, keys=keys, reduce_once=reduce_once, group=place.group)
