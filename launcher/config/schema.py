"""What the user says: every key of the configuration with its type, default and meaning.

The only place where a default stands. The YAML files in ``conf/`` hold choices and differences. The reference in
``docs/configuration.md`` is generated from here.

Durations are ``90 epochs``, ``2000 updates``, ``1e9 tokens``, ``1e6 samples`` or ``10%`` (of the training duration); a
bare integer is updates. Times are ``90 seconds``, ``10 minutes``, ``2 hours``, ``1 days`` or ``1:30:00``; a bare number
is seconds.
"""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from launcher.config.choices import (
    BatchNormPatch,
    DecayRule,
    Layout,
    LossSpike,
    OnError,
    OnNonfinite,
    Resume,
    Retry,
    Rule,
    WandbMode,
    WarmupFrom,
)
from launcher.config.decays import DecayConfig
from launcher.config.parallel import (
    ActivationCheckpointConfig,
    MeshConfig,
    PipelineConfig,
    PrecisionConfig,
    StrategyConfig,
)
from launcher.config.places import ClusterConfig, SubmitConfig
from launcher.config.targets import TargetsConfig


@dataclass
class RunConfig:
    name: str = "run"
    """Name of the run; made safe for paths where it names a folder."""
    seed: int = 0
    """Seed of everything that is random: initial weights, order of the samples, augmentation, dropout."""


@dataclass
class DataConfig:
    train: Any = MISSING
    """The training set: `_target_` of a map-style data set (`__len__`, `__getitem__`) and its arguments."""
    validation: Any = None
    """The validation set, likewise; null: none. Where a choice has none: `+data.validation._target_=…`."""
    shuffle: bool = True
    """A new order of the samples every epoch, from (run.seed, epoch) alone."""
    drop_last: bool = False
    """Leave out the shorter last window of an epoch."""
    workers: int = 0
    """Processes on each rank that read and collate samples ahead of the training; 0: the rank reads by itself. What is
    trained doesn't depend on it."""


@dataclass
class RampConfig:
    until: Any = MISSING
    """When the stage ends, as a duration from the start of the training: with the window that reaches it."""
    global_batch_size: Any = MISSING
    """Samples in an update of this stage."""
    grow_to: Any = None
    """Windows grow in whole multiples of the stage's global_batch_size, in a straight line of samples, to this many
    samples at its end, rounded (the accumulate ramp of Ultralytics); null: they don't grow."""


@dataclass
class BatchConfig:
    global_batch_size: Any = 64
    """Samples in one optimizer update (a window), over all ranks and steps; null: follows from the other two."""
    micro_batch_size: Any = "auto"
    """Samples one rank puts through one forward and backward; auto: the largest with one step a window, at most 16."""
    gradient_accumulation_steps: Any = "auto"
    """Micro-batches a rank runs in one full window: ceil(ceil(global / data_parallel_degree) / micro)."""
    micro_batch_tokens: Any = None
    """Instead of a number of samples: as many as fit this many tokens, padding included, in a layout by length."""
    layout: Layout = Layout.auto
    """length: samples of like length share a micro-batch; arrival: in order; auto: length where the task knows lengths.
    The update is the same."""
    ramp: list[Any] = field(default_factory=list)
    """Other global batches at the start, a list of stages: [{until: 1e9 tokens, global_batch_size: 128}, …]; after the
    last one it is batch.global_batch_size. The learning rate follows by scaling.rule; weight decay doesn't."""


@dataclass
class TrainingConfig:
    duration: Any = "1 epochs"
    """How long to train, as a duration; ends on a window."""
    max_grad_norm: float | None = 1.0
    """The gradient is clipped once a window to this norm over all ranks; null: not clipped."""
    validate_every: Any = "20%"
    """How often to validate, as a duration; null: only at the end."""
    log_every: Any = 1
    """How often metrics are written out, as a duration; every update has its line all the same."""
    on_nonfinite: OnNonfinite = OnNonfinite.skip
    """What an update with non-finite values does: skip it, or stop the run (exit 4)."""
    max_skipped_in_a_row: int = 10
    """So many skipped updates in a row end the run (exit 4)."""
    loss_spike: LossSpike = LossSpike.none
    """What an update does whose loss lies far above those before it: none, skip (its samples are consumed, nothing
    changes), or rollback (parameters and optimizer go back to the newest checkpoint, and training goes on after this
    window: those between are left out)."""
    loss_spike_deviations: float = 10.0
    """How far above is far: so many deviations above the median of the last `loss_spike_window` losses, where a
    deviation is 1.4826 times their median absolute deviation (one standard deviation of normal ones), and at least a
    hundredth of the median."""
    loss_spike_window: int = 50
    """Losses that a loss is compared with; fewer at the start, and none before there are 10."""
    noise_scale: Any = None
    """How often to measure the gradient noise scale, as a duration (`10 updates`): an estimate of the critical batch,
    from which on larger ones save few updates (McCandlish et al. 2018). null: never. It changes no update."""
    noise_scale_memory: float = 100.0
    """Measurements of the noise scale that its averages look back on: each weighs 1 - 1 / this of the next one."""
    time_limit: Any = None
    """How long the run may take, as a time from its start on this allocation; then it stops with a checkpoint (exit
    75). null: no limit."""
    hang_after: Any = "30 minutes"
    """A rank that has done nothing for so long hangs: every rank's stacks go to its log, and the run is restarted or
    ended (exit 3). null: never."""
    max_restarts: Any = "auto"
    """How often ranks are started again after one was killed, lost or hung, from the newest checkpoint; auto: 3 times,
    and not before there is one, for a run that fails so early would most likely fail again. A rank that raised an
    error of its own ends the run at once."""


@dataclass
class GroupConfig:
    match: str = MISSING
    """A regular expression searched in the parameter's name, or `norms_and_biases`: parameters of one dimension."""
    lr_scale: float = 1.0
    """The group's learning rate as a multiple of the run's."""
    weight_decay: float | None = None
    """The group's weight decay; null: the optimizer's."""
    warmup_from: float | None = None
    """The rate that the group starts from in the warmup, whence it goes in equal steps to its own peak; null: as
    schedule.warmup_from says."""


@dataclass
class ModelPatchesConfig:
    batch_norm: BatchNormPatch = BatchNormPatch.keep
    """What becomes of the model's batch norm: keep; sync, statistics over the micro-batches of all ranks (on GPUs);
    group_norm, a group norm of 32 groups or the largest divisor below, which treats each sample by itself; ghost,
    statistics over groups of ghost_size samples in the window's order, the same for any ranks and micro-batches."""
    ghost_size: int | None = None
    """Samples that share statistics under batch_norm=ghost; divides the micro-batch."""
    precise_batch_norm: int | None = None
    """Before a validation and for the final model, batch norm's running statistics are those of so many training
    samples with the parameters as they are then (precise BN, Wu and Johnson 2021); null: the moving averages of
    training."""


@dataclass
class ScalingConfig:
    rule: Rule = Rule.none
    """How the learning rate follows the global batch size: none, linear (times global / base, Goyal et al. 2017) or
    sqrt (times its square root, for the Adam family)."""
    base_batch_size: int | None = None
    """The global batch size that optimizer.lr is meant for; needed by every rule but none."""
    adam_betas_and_eps: bool = False
    """With rule sqrt: whether Adam's betas and eps follow too, as in Malladi et al. 2022: with k = global / base each
    beta becomes 1 - k (1 - beta) and eps becomes eps / sqrt(k). A beta that would fall below 0 is refused."""
    weight_decay: DecayRule = DecayRule.none
    """Whether the weight decay is multiplied by global / base too (linear) or stays (none)."""


@dataclass
class ScheduleConfig:
    warmup: Any = 0
    """How long the rate rises to its peak, as a duration; 0: no warmup."""
    warmup_from: WarmupFrom = WarmupFrom.zero
    """Where the warmup starts: zero, or the unscaled rate (Goyal's gradual warmup)."""
    decay: DecayConfig = MISSING
    """How the rate falls after the warmup: a choice of the group schedule/decay, with keys of its own."""
    warmup_momentum: float | None = None
    """Where optimizer.momentum starts: it rises in equal steps to its own value during the warmup; null: it doesn't
    change."""


@dataclass
class CheckpointConfig:
    every: Any = "10 minutes"
    """How often to save a checkpoint, as a duration or a time (`500 updates`, `10 minutes`); null: only where the run
    is stopped and at its end."""
    keep_last: int = 2
    """Checkpoints that are kept, the newest ones."""
    async_save: bool = True
    """Train on while a checkpoint is written."""
    resume: Resume = Resume.never
    """What `launcher train` does where its folder already holds a run: never, it is refused; auto, that run goes on
    from its newest checkpoint, provided that nothing differs that would change the result. Restarted ranks and
    `launcher resume` go on either way."""
    stop_within: Any = "60 seconds"
    """How long a run that is told to stop may take to finish its window and save; then its ranks are ended, and it goes
    on from the checkpoint before."""
    on_error: OnError = OnError.go_on
    """What a save that fails does (a full disk, no permission): go_on, said and tried again when the next is due; stop,
    the run ends (exit 3). The checkpoints before stay."""


@dataclass
class WandbConfig:
    mode: WandbMode = WandbMode.disabled
    """disabled; offline: recorded in the run's folder, for `wandb sync`; online: sent too. WANDB_MODE has no say."""
    project: str | None = None
    """null: WANDB_PROJECT, else wandb's own default. An environment variable in it is resolved: it is an address."""
    entity: str | None = None
    """The user or team; null: WANDB_ENTITY, else the user who is logged in. Resolved, as the project is."""
    group: str | None = None
    """Runs of one group are shown together; null: WANDB_RUN_GROUP, else none. `${oc.env:…}` stays a reference here, as
    in every file of a run: set WANDB_RUN_GROUP for its value."""
    tags: list[str] = field(default_factory=list)
    """Words to find the run by; none: WANDB_TAGS. `${oc.env:…}` stays a reference here, as in every file of a run: set
    WANDB_TAGS for its value."""


@dataclass
class LoggingConfig:
    progress: bool = True
    """Show a live progress bar where the output is a terminal; plain lines elsewhere."""
    wandb: WandbConfig = field(default_factory=WandbConfig)
    """The tracker: one run a job, opened by the first rank. What it can't send delays nothing and stops nothing."""


@dataclass
class SweepConfig:
    resume: str | None = None
    """The folder of a sweep that `launcher train -m` goes on with: finished runs stay, those with a checkpoint go on
    from it, the others start. The command is the sweep's own; what would change a run's result is refused."""
    retry: Retry = Retry.unfinished
    """Which runs `sweep.resume` runs: unfinished (all that aren't finished), or failed (those that failed alone)."""


SECTIONS: dict[str, type] = {
    "run": RunConfig,
    "data": DataConfig,
    "batch": BatchConfig,
    "training": TrainingConfig,
    "targets": TargetsConfig,
    "model_patches": ModelPatchesConfig,
    "scaling": ScalingConfig,
    "schedule": ScheduleConfig,
    "strategy": StrategyConfig,
    "activation_checkpoint": ActivationCheckpointConfig,
    "precision": PrecisionConfig,
    "mesh": MeshConfig,
    "pipeline": PipelineConfig,
    "checkpoint": CheckpointConfig,
    "cluster": ClusterConfig,
    "submit": SubmitConfig,
    "logging": LoggingConfig,
    "sweep": SweepConfig,
}
"""The strict sections, in the order in which a reader meets them. Beside them `model`, `task` and `optimizer` are open
under their `_target_`, and `model_weights` is a file or null."""


@dataclass
class Config:
    """The whole configuration as both halves see it: validated, resolved, ready to use."""

    run: RunConfig
    model: dict[str, Any]
    task: dict[str, Any]
    data: DataConfig
    batch: BatchConfig
    training: TrainingConfig
    targets: TargetsConfig
    model_patches: ModelPatchesConfig
    optimizer: dict[str, Any]
    """`_target_`, `lr` (the rate at scaling.base_batch_size), `groups`, and the optimizer's own arguments."""
    scaling: ScalingConfig
    schedule: ScheduleConfig
    strategy: StrategyConfig
    activation_checkpoint: ActivationCheckpointConfig
    precision: PrecisionConfig
    mesh: MeshConfig
    pipeline: PipelineConfig
    checkpoint: CheckpointConfig
    cluster: ClusterConfig
    submit: SubmitConfig
    logging: LoggingConfig
    sweep: SweepConfig
    model_weights: str | None = None
    """A safetensors file that the model's weights start from."""
