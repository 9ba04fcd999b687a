"""What a strategy, a precision and recomputation come to, and what they can't be together."""

from dataclasses import dataclass, field
from typing import Any

from launcher.config.choices import Offload, PrecisionName, Recompute, ReduceEach, StrategyName
from launcher.config.parallel import ActivationCheckpointConfig, PrecisionConfig, StrategyConfig
from launcher.config.schema import Config
from launcher.errors import ConfigError
from launcher.plan.division import Division
from launcher.plan.facts import Facts
from launcher.plan.mesh import Mesh, World
from launcher.plan.noise_scale import check_noise_scale
from launcher.plan.pipeline import SPLIT_BACKWARD, PipelinePlan
from launcher.plan.windows import WindowTable
from launcher.plan.zero import check_zero


@dataclass(frozen=True)
class StrategyPlan:
    """What the strategy settles."""

    reduce_each: ReduceEach | None
    """Under a strategy that shards: window or micro_batch."""
    recompute: Recompute
    reductions: int | None
    notes: list[str] = field(default_factory=list)

    def fields(self) -> dict[str, Any]:
        """The fields of the plan that follow from it."""
        return {
            "reduce_each": None if self.reduce_each is None else self.reduce_each.value,
            "activation_checkpoint": self.recompute.value,
            "reductions_per_window": self.reductions,
        }


def settle_strategy(
    config: Config,
    mesh: Mesh,
    world: World,
    division: Division,
    facts: Facts,
    pipeline: PipelinePlan | None,
    windows: WindowTable | None,
) -> StrategyPlan:
    """The plan of the strategy. `pipeline`: None where there is none.

    Raises:
        ConfigError: a key that the strategy would ignore, or a value that can't work.
    """
    strategy, recompute = config.strategy, config.activation_checkpoint
    _check_keys(strategy)
    _check_recompute(recompute)
    _check_precision(config.precision)
    if pipeline is None:
        notes = [*_notes(config, facts), *check_zero(config, world, division.fields())]
    else:
        notes = [*_notes(config, facts), *_check_stages(strategy, pipeline, mesh)]
    notes += check_noise_scale(config, mesh, division, windows)
    if mesh.data_parallel_degree == 1:
        return StrategyPlan(ReduceEach.window if strategy.name.shards else None, recompute.name, 0, notes)
    if not strategy.name.shards:
        return StrategyPlan(None, recompute.name, 1, notes)
    steps = None if division.micro_batch_tokens is not None else division.batch.gradient_accumulation_steps
    if pipeline is not None:
        steps = sum(pipeline.filled_rounds)
    each = strategy.reduce_each
    if strategy.name is StrategyName.zero1:  # keeps whole gradients anyway
        each = ReduceEach.window
    if each is ReduceEach.auto:
        each = ReduceEach.window if steps == 1 else ReduceEach.micro_batch
        if each is ReduceEach.micro_batch and facts.trainable_parameters:
            notes.append(_trade(facts.trainable_parameters // mesh.pp, steps))
    return StrategyPlan(each, recompute.name, 1 if each is ReduceEach.window else steps, notes)


def _check_stages(strategy: StrategyConfig, pipeline: PipelinePlan, mesh: Mesh) -> list[str]:
    """Notes on a strategy in the stages of a pipeline. Raises ConfigError for a key that would be ignored there."""
    is_each = strategy.reduce_each is ReduceEach.micro_batch
    splits = pipeline.flow.schedule in SPLIT_BACKWARD
    if splits and strategy.name is StrategyName.fsdp and mesh.data_parallel_degree > 1:
        problem = (
            "works out the gradients of the weights apart, when FSDP has given the weights back: torch 2.13 gets them "
            "wrong under strategy=fsdp"
        )
        hint = "pipeline.schedule=interleaved_1f1b, or strategy=ddp or zero1"
        raise ConfigError("pipeline.schedule", pipeline.flow.schedule, problem, hint=hint)
    if strategy.name is not StrategyName.zero1:
        return []
    problem = f"DeepSpeed has no part in a pipeline (mesh.pp={mesh.pp}), where torch's ZeroRedundancyOptimizer serves"
    if strategy.deepspeed:
        raise ConfigError("strategy.deepspeed", strategy.deepspeed, problem, hint="leave it out")
    if strategy.offload is not Offload.none:
        raise ConfigError("strategy.offload", strategy.offload, problem, hint="leave it out")
    if is_each:
        problem = "zero1 keeps whole gradients, so they are reduced once a window"
        raise ConfigError("strategy.reduce_each", strategy.reduce_each, problem, hint="strategy=fsdp")
    if mesh.data_parallel_degree == 1:
        return ["strategy=zero1: each stage lies on one rank, so there is nothing to spread"]
    return [
        "strategy=zero1: a stage runs its own backward, which DeepSpeed's engine doesn't allow, so torch's "
        "ZeroRedundancyOptimizer takes its place and spreads the optimizer states of each stage"
    ]


def _trade(parameters: int, steps: int | None) -> str:
    often = "each micro-batch" if steps is None else f"{steps} times a window"
    return (
        f"gradients are reduced {often} and never whole on a rank; strategy.reduce_each=window reduces them once, and "
        f"keeps {parameters * 4 / 2**20:,.0f} MiB of them on every rank meanwhile"
    )


def _check_keys(strategy: StrategyConfig) -> None:
    name = strategy.name
    each, reshard = strategy.reduce_each, strategy.reshard_after_forward
    if each is not ReduceEach.auto and not name.shards:
        problem = f"has no meaning under strategy={name.value}, only under fsdp, zero2 and zero3"
        raise ConfigError("strategy.reduce_each", each.value, problem)
    if reshard is not None and name is not StrategyName.fsdp:
        problem = f"has no meaning under strategy={name.value}, only under fsdp"
        raise ConfigError("strategy.reshard_after_forward", reshard, problem)
    if strategy.deepspeed and not name.zero_stage:
        problem = f"has no meaning under strategy={name.value}, only under zero1 to zero3"
        raise ConfigError("strategy.deepspeed", strategy.deepspeed, problem)
    if strategy.offload is not Offload.none and not name.shards:
        problem = f"strategy={name.value} keeps everything on the device"
        raise ConfigError("strategy.offload", strategy.offload.value, problem, hint="strategy=fsdp or zero1 to zero3")
    if name is StrategyName.fsdp and strategy.offload not in (Offload.none, Offload.cpu):
        problem = "strategy=fsdp moves parameters, gradients and optimizer states together"
        raise ConfigError("strategy.offload", strategy.offload.value, problem, hint="strategy.offload=cpu")
    if strategy.nvme_path is not None and strategy.offload is not Offload.nvme:
        raise ConfigError("strategy.nvme_path", strategy.nvme_path, "has no meaning without strategy.offload=nvme")


def _check_recompute(recompute: ActivationCheckpointConfig) -> None:
    if recompute.every is None:
        return
    if recompute.name is not Recompute.selective:
        problem = f"has no meaning under activation_checkpoint={recompute.name.value}, only under selective"
        raise ConfigError("activation_checkpoint.every", recompute.every, problem)
    if recompute.every < 1:
        raise ConfigError("activation_checkpoint.every", recompute.every, "must be at least 1")


def _check_precision(precision: PrecisionConfig) -> None:
    if not 0 < precision.initial_scale < float("inf"):
        raise ConfigError("precision.initial_scale", precision.initial_scale, "must be a finite number above 0")
    if precision.scale_growth_interval < 1:
        given = precision.scale_growth_interval
        raise ConfigError("precision.scale_growth_interval", given, "must be at least 1")
    plain = PrecisionConfig()
    for name in ("initial_scale", "scale_growth_interval"):
        value = getattr(precision, name)
        if precision.name is not PrecisionName.fp16 and value != getattr(plain, name):
            problem = f"has no effect under precision={precision.name.value}, which scales no loss"
            raise ConfigError(f"precision.{name}", value, problem, hint="precision=fp16, or leave it out")


def _notes(config: Config, facts: Facts) -> list[str]:
    notes = []
    strategy, recompute = config.strategy, config.activation_checkpoint
    wraps = strategy.name is StrategyName.fsdp or recompute.name is not Recompute.none or recompute.offload
    if strategy.wrap is not None and not wraps:
        notes.append(f"strategy.wrap: nothing is wrapped under strategy={strategy.name.value} without recomputation")
    if wraps and strategy.wrap is None and facts.parameters is not None and facts.num_layers is None:
        notes.append(
            "the model offers no `layers`, so it is one block: little memory is saved; strategy.wrap=[ClassName] names "
            "the classes of its layers"
        )
    if config.precision.name is PrecisionName.fp16 and config.cluster.device.value == "cpu":
        notes.append("precision=fp16 is slow on most CPUs; bf16 needs no loss scale")
    return notes
