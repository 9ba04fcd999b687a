"""What a strategy on DeepSpeed takes: checked before a rank starts, without importing it."""

from collections.abc import Mapping
from ctypes.util import find_library
from typing import Any

from launcher.config.choices import Device, Offload, PrecisionName, ReduceEach, SubmitKind
from launcher.config.parallel import StrategyConfig
from launcher.config.schema import Config
from launcher.errors import ConfigError, nearest
from launcher.plan.mesh import World

ELEMENTWISE = frozenset({"Adadelta", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"})
"""Optimizers of torch whose update of an element depends on that element's own gradients and states alone."""

EXPERT_KEYS = frozenset(
    {
        "zero_optimization",
        "aio",
        "comms_logger",
        "disable_python_gc",
        "dump_state",
        "flops_profiler",
        "memory_breakdown",
        "steps_per_print",
        "wall_clock_breakdown",
    }
)
"""Keys of DeepSpeed's configuration that say how it works and not what is trained."""

EXPERT_ZERO_KEYS = frozenset(
    {
        "allgather_bucket_size",
        "allgather_partitions",
        "contiguous_gradients",
        "enable_sanity_checks",
        "leaf_module",
        "log_trace_cache_warnings",
        "max_live_parameters",
        "max_reuse_distance",
        "model_persistence_threshold",
        "module_granularity_threshold",
        "overlap_comm",
        "parameter_alignment",
        "param_persistence_threshold",
        "prefetch_bucket_size",
        "reduce_bucket_size",
        "reduce_scatter",
        "round_robin_gradients",
        "stage3_allgather_sequential",
        "stage3_max_live_parameters",
        "stage3_max_reuse_distance",
        "stage3_model_persistence_threshold",
        "stage3_module_granularity_threshold",
        "stage3_param_persistence_threshold",
        "stage3_prefetch_bucket_size",
        "stage3_use_all_reduce_for_fetch_params",
        "sub_group_size",
        "use_all_reduce_for_fetch_params",
        "use_multi_rank_bucket_allreduce",
    }
)
"""Keys below `zero_optimization` that say the same."""

_OFF = {"enabled": False}
_HALF = ("follows from precision", "precision=fp32, bf16 or fp16")
_OWN: dict[str, tuple[str, str]] = {
    **dict.fromkeys(
        ("fp16", "bf16", "bfloat16", "torch_autocast", "amp", "data_types", "communication_data_type"), _HALF
    ),
    "optimizer": ("is optimizer's", "optimizer=… with its own keys"),
    "scheduler": ("is schedule's", "schedule/decay=… and schedule.warmup"),
    **dict.fromkeys(
        ("prescale_gradients", "gradient_predivide_factor", "gradient_allreduce_op", "managed_gradient_accumulation"),
        ("is settled: the gradient of a window is the sum of its losses / its weight", "leave it out"),
    ),
    **dict.fromkeys(
        ("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"),
        ("is settled: optimizers are torch's", "leave it out"),
    ),
}
_OFFLOAD = ("is strategy.offload's", "strategy.offload=optimizer, cpu or nvme")
_OWN_ZERO: dict[str, tuple[str, str]] = {
    **dict.fromkeys(
        ("offload_optimizer", "offload_param", "cpu_offload", "cpu_offload_param", "cpu_offload_use_pin_memory"),
        _OFFLOAD,
    ),
    **dict.fromkeys(
        ("ignore_unused_parameters", "compute_grad_norm"),
        ("is settled: unused parameters have gradient zero, and every norm is reported", "leave it out"),
    ),
}


def check_zero(config: Config, world: World, batch: Mapping[str, Any]) -> list[str]:
    """Notes on a strategy on DeepSpeed; [] for any other.

    Args:
        batch: global_batch_size, micro_batch_size and gradient_accumulation_steps of the plan.

    Raises:
        ConfigError: what DeepSpeed can't do, or a key of strategy.deepspeed that the plan settles otherwise.
    """
    strategy = config.strategy
    if not strategy.name.zero_stage:
        return []
    _check_precision(config, world.device)
    _check_optimizer(config.optimizer, strategy.name.value)
    _check_offload(strategy, config.submit.kind)
    if strategy.name.zero_stage == 1 and strategy.reduce_each is ReduceEach.micro_batch:
        problem = "zero1 keeps whole gradients, so they are reduced once a window"
        raise ConfigError("strategy.reduce_each", strategy.reduce_each, problem, hint="strategy=zero2")
    _check_keys(config, batch)
    if world.size == 1 and strategy.offload is Offload.none:
        if not strategy.deepspeed:
            return []
        return [f"strategy={strategy.name.value} on one rank is plain training: strategy.deepspeed does nothing"]
    if strategy.offload is Offload.nvme:
        return ["strategy.offload=nvme: no checkpoint is saved, for none can hold what lies on that disk"]
    if strategy.offload in (Offload.optimizer, Offload.cpu) and world.device is Device.cpu:
        return [f"strategy.offload={strategy.offload.value}: on CPU everything lies in the host's memory anyway"]
    return []


def deepspeed_keys(config: Config, batch: Mapping[str, Any], trainable: int, *, pin_memory: bool) -> dict[str, Any]:
    """DeepSpeed's configuration: what the plan settles, and the expert's keys of strategy.deepspeed.

    Args:
        batch: micro_batch_size and gradient_accumulation_steps of the plan; DeepSpeed's counters aren't used.
        trainable: elements of all trainable parameters; its buffers of fixed size need be no larger.
        pin_memory: whether what waits in the host's memory is pinned.
    """
    strategy = config.strategy
    zero: dict[str, Any] = {"stage": strategy.name.zero_stage, "reduce_bucket_size": min(trainable, 500_000_000)}
    waiting = {"device": "cpu", "pin_memory": pin_memory}
    if strategy.offload is Offload.nvme:
        waiting = {"device": "nvme", "nvme_path": strategy.nvme_path, "pin_memory": pin_memory}
    if strategy.offload is not Offload.none:
        zero["offload_optimizer"] = waiting
    if strategy.offload in (Offload.cpu, Offload.nvme):
        zero["offload_param"] = waiting
    expert = {name: value for name, value in strategy.deepspeed.items() if name in EXPERT_KEYS}
    own = expert.pop("zero_optimization", {})
    return {
        "steps_per_print": None,
        **expert,
        "train_micro_batch_size_per_gpu": batch["micro_batch_size"] or 1,
        "gradient_accumulation_steps": batch["gradient_accumulation_steps"] or 1,
        "gradient_clipping": config.training.max_grad_norm or 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # torch's optimizers: DeepSpeed's own would be compiled first
        "zero_optimization": {**zero, **{name: value for name, value in own.items() if name in EXPERT_ZERO_KEYS}},
    }


def _check_precision(config: Config, device: Device) -> None:
    if config.precision.name is PrecisionName.fp16 and device is Device.cpu:
        problem = f"DeepSpeed has no fp16 on CPU (strategy={config.strategy.name.value}, cluster.device=cpu)"
        raise ConfigError("precision", "fp16", problem, hint="strategy=fsdp precision=fp16, or precision=bf16")


def _check_optimizer(optimizer: Mapping[str, Any], strategy: str) -> None:
    target, said = str(optimizer["_target_"]), optimizer.get("elementwise")
    if said is not None and not isinstance(said, bool):
        raise ConfigError("optimizer.elementwise", said, "must be true, false or null")
    slices = f"strategy={strategy} gives an optimizer slices of tensors"
    package, _, name = target.rpartition(".")
    if package.split(".")[0] == "launcher" or package.split(".")[:2] == ["torch", "optim"]:
        if name == "Adagrad":
            problem = f"DeepSpeed makes Adagrad anew, without its parameter groups (strategy={strategy})"
            raise ConfigError("optimizer._target_", target, problem, hint="strategy=fsdp")
        if name not in ELEMENTWISE or said is False:
            raise ConfigError(
                "optimizer._target_", target, f"{slices}, and this one needs whole ones", hint="strategy=fsdp"
            )
    elif not said:
        problem = f"{slices}: say whether {target} works on any slice of a tensor as on the whole"
        hint = "+optimizer.elementwise=true if it does; strategy=fsdp if it needs whole ones"
        raise ConfigError("optimizer.elementwise", said, problem, hint=hint)


def _check_offload(strategy: StrategyConfig, place: SubmitKind) -> None:
    stage, offload = strategy.name.zero_stage, strategy.offload
    if offload in (Offload.cpu, Offload.nvme) and stage < 3:
        problem = f"takes parameters too, which {strategy.name.value} keeps on every rank"
        raise ConfigError("strategy.offload", offload, problem, hint="strategy.offload=optimizer, or strategy=zero3")
    if offload is Offload.nvme:
        if strategy.nvme_path is None:
            raise ConfigError("strategy.nvme_path", None, "must be the folder that strategy.offload=nvme writes to")
        if place is SubmitKind.local and find_library("aio") is None:  # elsewhere the ranks have another machine
            problem = "needs the library libaio, which isn't installed here"
            raise ConfigError("strategy.offload", offload, problem, hint="install libaio, or strategy.offload=cpu")


def _check_keys(config: Config, batch: Mapping[str, Any]) -> None:
    given = config.strategy.deepspeed
    settled = {
        "train_batch_size": (batch["global_batch_size"], "batch.global_batch_size"),
        "train_micro_batch_size_per_gpu": (batch["micro_batch_size"], "batch.micro_batch_size"),
        "gradient_accumulation_steps": (batch["gradient_accumulation_steps"], "batch.gradient_accumulation_steps"),
        "gradient_clipping": (config.training.max_grad_norm or 0.0, "training.max_grad_norm"),
    }
    _check_section("strategy.deepspeed", given, EXPERT_KEYS, settled, _OWN)
    zero = given.get("zero_optimization", {})
    if not isinstance(zero, dict):
        raise ConfigError("strategy.deepspeed.zero_optimization", zero, "must be a section of keys")
    stage = {"stage": (config.strategy.name.zero_stage, "strategy")}
    _check_section("strategy.deepspeed.zero_optimization", zero, EXPERT_ZERO_KEYS, stage, _OWN_ZERO)


def _check_section(
    where: str,
    given: Mapping[str, Any],
    expert: frozenset[str],
    settled: Mapping[str, tuple[Any, str]],
    own: Mapping[str, tuple[str, str]],
) -> None:
    for name, value in given.items():
        key = f"{where}.{name}"
        if name in settled:
            planned, ours = settled[name]
            if value != planned or isinstance(value, bool):
                raise ConfigError(key, value, f"the plan has {planned}", hint=f"{ours} settles it: leave this key out")
        elif name in own:
            problem, hint = own[name]
            if value != _OFF:
                raise ConfigError(key, value, problem, hint=hint)
        elif name not in expert:
            known = f"keys that leave the update as it is planned: {', '.join(sorted(expert))}"
            raise ConfigError(key, value, "isn't taken", hint=nearest(str(name), [*expert, *settled, *own]) or known)
