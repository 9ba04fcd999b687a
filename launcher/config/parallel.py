"""The schema of how ranks share the work: strategy, mesh, pipeline, recomputation and precision."""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from launcher.config.choices import Offload, PipelineSchedule, PrecisionName, Recompute, ReduceEach, StrategyName


@dataclass
class StrategyConfig:
    name: StrategyName = MISSING
    """single: one rank; ddp: every rank holds a copy of the model; fsdp: parameters, gradients and optimizer states lie
    spread over mesh.dp_shard ranks (torch's FSDP2); zero1, zero2, zero3: optimizer states, then gradients too, then
    parameters too lie spread over all ranks (DeepSpeed). The update is the same under each."""
    wrap: list[str] | None = None
    """Classes of the modules that are sharded and recomputed as one block each, by name or dotted path; null: the
    model's `layers`, and a model without them is one block."""
    reduce_each: ReduceEach = ReduceEach.auto
    """When gradients are reduced under fsdp, zero2 and zero3: window (once, which keeps a whole gradient on each rank
    from the first micro-batch on), micro_batch (each time: less memory, more traffic); auto: window where a window is
    one micro-batch, else micro_batch. zero1 keeps whole gradients anyway, and reduces them once."""
    reshard_after_forward: bool | None = None
    """Whether a block gives its gathered parameters back between forward and backward under fsdp; null: yes for blocks,
    no for what lies outside them."""
    offload: Offload = Offload.none
    """What waits in the host's memory: optimizer (zero1 to zero3: optimizer states), cpu (fsdp and zero3: parameters
    too), nvme (zero3: on a disk at strategy.nvme_path, with libaio)."""
    nvme_path: str | None = None
    """The folder that strategy.offload=nvme writes to."""
    deepspeed: dict[str, Any] = field(default_factory=dict)
    """Keys of DeepSpeed's own configuration that the plan doesn't settle, for zero1 to zero3; one that contradicts the
    plan is refused."""


@dataclass
class ActivationCheckpointConfig:
    name: Recompute = MISSING
    """none: activations are kept for the backward; full: each block keeps its input alone and runs again; selective: it
    keeps its matrix products and attention too, and the rest runs again. The update is the same."""
    every: int | None = None
    """Under selective: instead, each n-th block runs again whole and the others keep everything."""
    offload: bool = False
    """What blocks keep waits in the host's memory until the backward, under none as well."""


@dataclass
class PrecisionConfig:
    name: PrecisionName = MISSING
    """fp32; bf16, fp16: matrix products in half precision (autocast), parameters, gradients and their sums in fp32.
    fp16 scales the loss, so that small gradients don't vanish."""
    initial_scale: float = 65536.0
    """What fp16 multiplies the loss by at first; it is halved when a gradient overflows, and doubled after
    `scale_growth_interval` updates without."""
    scale_growth_interval: int = 2000
    """Updates without an overflow after which the scale of fp16 is doubled."""


@dataclass
class MeshConfig:
    dp_replicate: int | None = None
    """Ranks that hold copies of each other; -1: the rest of the world; null: 1 under strategies that shard, else the
    rest."""
    dp_shard: int | None = None
    """Ranks that share one copy; -1: the rest of the world; null: the rest under strategies that shard, else 1."""
    pp: int = 1
    """Ranks that a model is cut over, each with layers of its own; 1: no pipeline. World = dp_replicate x dp_shard x
    pp, and the ranks of a pipeline share their samples."""


@dataclass
class PipelineConfig:
    schedule: PipelineSchedule = PipelineSchedule["1f1b"]
    """The order in which micro-batches flow: gpipe (Huang et al. 2019), 1f1b (PipeDream-Flush, Narayanan et al. 2021)
    with one stage a rank; interleaved_1f1b (the same paper), looped_bfs (Lamy-Poirier 2023), interleaved_zero_bubble
    (ZB1P, Qi et al. 2024) with several; zbv (ZB-V, the same paper) with two. The update is the same under each."""
    split: Any = "auto"
    """The number of layers of each stage, first to last, as in `pipeline.split=[5,6]`; auto: the split whose costliest
    stage costs least, with two stages a rank where the schedule has several."""
    microbatches_per_round: Any = None
    """At most so many micro-batches go through the pipeline in one run of the schedule; null: all of a window. A bound
    saves memory and costs a bubble each round."""
