"""From a configuration to a plan: everything that can be known without a step, worked out once."""

import json
from dataclasses import asdict, dataclass, field, fields, replace
from fractions import Fraction
from typing import Any

from launcher.config.choices import Device
from launcher.config.schema import BatchConfig, Config
from launcher.config.times import is_time, seconds
from launcher.config.validate import LARGEST
from launcher.errors import ConfigError
from launcher.plan.batch import BatchPlan, WindowTable
from launcher.plan.batch_norm import batch_norm_notes, check_batch_norm
from launcher.plan.division import divide
from launcher.plan.facts import Facts
from launcher.plan.mesh import World, asked_nodes, least_nodes, solve_mesh, solve_world
from launcher.plan.notes import half_notes, window_notes
from launcher.plan.pipeline import settle_pipeline
from launcher.plan.scaling import Scaled, rule_notes, scale
from launcher.plan.schedule import (
    Clock,
    Duration,
    LearningRate,
    MomentumWarmup,
    NeedsData,
    build_learning_rate,
    build_momentum,
)
from launcher.plan.strategy import settle_strategy


@dataclass(frozen=True)
class Plan:
    """The contents of plan.json. None: not known before the ranks see the model and the data."""

    global_batch_size: int
    micro_batch_size: int | None
    """None, like the steps: micro_batch_tokens bounds a micro-batch."""
    micro_batch_tokens: int | None
    gradient_accumulation_steps: int | None
    data_parallel_degree: int
    mesh: dict[str, int]
    world_size: int
    nodes: int
    ranks_per_node: int
    device: str
    strategy: str
    precision: str
    layout: str | None
    """How a window is laid out: length or arrival; None: not known yet."""
    seed: int
    samples_per_epoch: int | None
    """Samples used in an epoch: all, or without what drop_last leaves out."""
    updates_per_epoch: int | None
    num_updates: int | None
    warmup_updates: int | None
    validate_every_updates: int | None
    """None: only at the end."""
    log_every_updates: int | None
    checkpoint_every_updates: int | None
    """None: by time, or only at the end."""
    base_lr: float
    lr: float
    lr_table: list[list[float]] | None
    scaling_rule: str
    weight_decay: float | None
    param_groups: list[dict[str, Any]]
    stages: list[list[int]] | None
    """First and last layer of each stage of the pipeline, in order; without one a single stage."""
    memory: dict[str, Any] | None
    reduce_each: str | None
    """Under fsdp when a gradient is reduced: window or micro_batch."""
    activation_checkpoint: str
    reductions_per_window: int | None
    """How often each gradient travels; None: with micro_batch_tokens as often as a window has micro-batches."""
    facts: dict[str, Any]
    arithmetic: list[str]
    """Each line of the batch and rate arithmetic, with its numbers."""
    notes: list[str]
    pipeline: dict[str, Any] | None = None
    """schedule, stages_per_rank, microbatches_per_round (null: a window is one round), bubble (share of a step), costs
    (multiply-adds a token of each stage), rounds and filled_rounds (micro-batches of each round of a full window,
    without and with masked copies); null: no pipeline."""
    scaled_arguments: dict[str, Any] = field(default_factory=dict)
    """Arguments of the optimizer beside its rate and weight decay that the scaling rule has changed: betas, eps."""
    cwd: str = ""
    """Where the command was given: relative paths resolve against it."""
    pythonpath: list[str] = field(default_factory=list)
    launch: dict[str, Any] = field(default_factory=dict)
    config_sha256: str = ""
    """Of config.yaml: a file that was edited since isn't the run's any more."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """The plan in the text of a plan.json. Fields that this version doesn't know are left out."""
        known = {one.name for one in fields(cls)}
        return cls(**{name: value for name, value in json.loads(text).items() if name in known})

    @property
    def batch(self) -> BatchPlan:
        """The arithmetic of a window; with micro_batch_tokens one step of all a rank's samples."""
        per_rank = -(-self.global_batch_size // self.data_parallel_degree)
        return BatchPlan(
            self.global_batch_size,
            self.micro_batch_size or per_rank,
            self.gradient_accumulation_steps or 1,
            self.data_parallel_degree,
        )

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left that only the model or the data can say."""
        return self.num_updates is not None and self.samples_per_epoch is not None


@dataclass(frozen=True)
class _Timing:
    """What is measured in updates; None where it takes data that wasn't seen."""

    num_updates: int | None
    rate: LearningRate | None
    momentum: MomentumWarmup | None
    validate_every: int | None
    log_every: int | None
    checkpoint_every: int | None

    @property
    def momentum_lines(self) -> list[str]:
        return [] if self.momentum is None else [self.momentum.line()]

    def fields(self, windows: WindowTable | None) -> dict[str, Any]:
        """The fields of the plan that follow from it."""
        return {
            "samples_per_epoch": windows.samples_used_per_epoch if windows else None,
            "updates_per_epoch": windows.updates_per_epoch if windows else None,
            "num_updates": self.num_updates,
            "warmup_updates": self.rate.warmup_updates if self.rate else None,
            "validate_every_updates": self.validate_every,
            "log_every_updates": self.log_every,
            "checkpoint_every_updates": self.checkpoint_every,
            "lr_table": self.rate.table() if self.rate else None,
        }


def make_plan(config: Config, facts: Facts, *, world: World | None = None) -> Plan:
    """The plan of one run. `world`: the ranks, where they are known already (on a rank); None: worked out.

    Raises:
        ConfigError: what can't work, with the key, the value and what would.
    """
    is_new = world is None
    world = world or solve_world(config.cluster, config.strategy.name, facts.cuda_devices, config.submit)
    mesh = solve_mesh(config.mesh, world.size, config.strategy.name)
    division = divide(config.batch, mesh.data_parallel_degree, facts.knows_lengths)
    batch = division.batch
    if is_new:
        _check_fewer_nodes(config, world, batch)
    windows = windows_of(config, facts, batch)
    check_batch_norm(config.model_patches, division, windows, world.device)
    scaled = scale(config.scaling, config.optimizer, batch.global_batch_size)
    pipeline = settle_pipeline(config, mesh, division, facts)
    strategy = settle_strategy(config, mesh, world, division, facts, pipeline)
    timing = _timing(config, facts, windows, peak=scaled.lr)
    groups = param_groups(config.optimizer, scaled, facts.group_parameters)
    _check_rates(config, scaled.lr, groups)
    notes = [
        *world.notes,
        *(pipeline.notes if pipeline else division.notes()),
        *rule_notes(config.scaling, config.optimizer),
        *window_notes(batch, windows),
        *batch_norm_notes(config.model_patches, facts, batch, windows),
        *half_notes(facts),
        *strategy.notes,
        *(timing.rate.notes() if timing.rate else []),
    ]
    return Plan(
        **division.fields(),
        mesh=asdict(mesh),
        world_size=world.size,
        nodes=world.nodes,
        ranks_per_node=world.ranks_per_node,
        device=world.device.value,
        strategy=config.strategy.name.value,
        precision=config.precision.name.value,
        seed=config.run.seed,
        **timing.fields(windows),
        base_lr=float(config.optimizer["lr"]),
        lr=scaled.lr,
        scaling_rule=config.scaling.rule.value,
        weight_decay=scaled.weight_decay,
        param_groups=groups,
        scaled_arguments=scaled.arguments,
        **(pipeline.fields() if pipeline else {"stages": _one_stage(facts)}),
        memory=None,
        **strategy.fields(),
        facts=asdict(facts),
        arithmetic=[*division.lines(), *scaled.lines, *timing.momentum_lines],
        notes=notes,
    )


def solve_again(config: Config, plan: Plan, facts: Facts | None = None, *, nodes: int | None = None) -> Plan:
    """The plan of a run that is there, with what is known by now. What isn't solved stays: folders, commands, notes.

    Args:
        facts: None: those of the plan.
        nodes: how many there are; None: as many as in the plan.

    Raises:
        ConfigError: it can't work with these.
    """
    world = World(nodes or plan.nodes, plan.ranks_per_node, Device(plan.device))
    if world.nodes != asked_nodes(config.cluster, config.submit):
        config = replace(config, batch=_kept(config.batch, plan.global_batch_size, plan.micro_batch_size))
    solved = make_plan(config, facts or Facts(**plan.facts), world=world)
    notes = list(dict.fromkeys([*plan.notes, *solved.notes]))
    kept = {name: getattr(plan, name) for name in ("cwd", "pythonpath", "launch", "config_sha256")}
    return replace(solved, **kept, notes=notes)


def _kept(config: BatchConfig, global_batch_size: int, micro_batch_size: int | None) -> BatchConfig:
    """The same windows and micro-batches for another number of ranks, which takes other steps."""
    micro = config.micro_batch_size if config.micro_batch_tokens is not None else micro_batch_size
    steps = "auto"
    return replace(
        config, global_batch_size=global_batch_size, micro_batch_size=micro, gradient_accumulation_steps=steps
    )


def _check_fewer_nodes(config: Config, world: World, batch: BatchPlan) -> None:
    """That the run can go on with each number of nodes that cluster.min_nodes allows. Raises ConfigError."""
    kept = _kept(config.batch, batch.global_batch_size, batch.micro_batch_size)
    for nodes in range(least_nodes(config.cluster, config.submit), world.nodes):
        try:
            mesh = solve_mesh(config.mesh, nodes * world.ranks_per_node, config.strategy.name)
            divide(kept, mesh.data_parallel_degree, None)
        except ConfigError as error:
            problem = f"the run couldn't go on with {nodes} of {world.nodes} nodes: {error}"
            raise ConfigError("cluster.min_nodes", config.cluster.min_nodes, problem) from error


def _one_stage(facts: Facts) -> list[list[int]] | None:
    return None if facts.num_layers is None else [[0, facts.num_layers - 1]]


def windows_of(config: Config, facts: Facts, batch: BatchPlan) -> WindowTable | None:
    """Which window lies where; None while the length of the training set isn't known."""
    if facts.samples is None:
        return None
    return WindowTable(facts.samples, batch.global_batch_size, config.data.drop_last)


def learning_rate(config: Config, plan: Plan, facts: Facts) -> LearningRate:
    """The rate as a function of the updates applied, for a plan whose num_updates is known."""
    assert plan.num_updates is not None
    clock = _clock(facts, windows_of(config, facts, plan.batch), plan.num_updates)
    return build_learning_rate(config.schedule, clock, peak=plan.lr, base_lr=plan.base_lr, num_updates=plan.num_updates)


def _clock(facts: Facts, windows: WindowTable | None, num_updates: int | None) -> Clock:
    at_tokens: dict[Fraction | int, int] = {
        Fraction(tokens): updates for tokens, updates in facts.updates_at_tokens.items()
    }
    return Clock(windows, num_updates, at_tokens)


def _timing(config: Config, facts: Facts, windows: WindowTable | None, *, peak: float) -> _Timing:
    training = config.training
    duration = Duration.parse(training.duration, "training.duration")
    try:
        num_updates = _clock(facts, windows, None).updates(duration, "training.duration")
        if num_updates < 1:
            raise ConfigError("training.duration", training.duration, "must be at least one update")
        clock = _clock(facts, windows, num_updates)
        validate = _every(clock, training.validate_every, "training.validate_every")
        log = _every(clock, training.log_every, "training.log_every")
        every = config.checkpoint.every
        save = None if is_time(every) else _every(clock, every, "checkpoint.every")
        rate = build_learning_rate(
            config.schedule, clock, peak=peak, base_lr=float(config.optimizer["lr"]), num_updates=num_updates
        )
    except NeedsData:
        if facts.samples is not None:
            raise
        return _Timing(None, None, None, None, None, None)
    momentum = build_momentum(config.schedule, config.optimizer, rate.warmup_updates)
    return _Timing(num_updates, rate, momentum, validate, log, save)


def _every(clock: Clock, value: Any, key: str) -> int | None:
    """An interval in updates, at least one; None stays."""
    return None if value is None else max(1, clock.updates(Duration.parse(value, key), key))


def checkpoint_every_seconds(config: Config) -> float | None:
    """The time after which a checkpoint is due; None: it is due after updates, or never."""
    every = config.checkpoint.every
    return seconds(every, "checkpoint.every") if is_time(every) else None


def _check_rates(config: Config, lr: float, groups: list[dict[str, Any]]) -> None:
    """That no rate becomes infinite in the parameters' own precision."""
    given = config.optimizer["lr"]
    if lr > LARGEST:
        raise ConfigError("optimizer.lr", given, f"scaling.rule={config.scaling.rule.name} makes it {lr:g}: infinite")
    for index, group in enumerate(groups[:-1]):
        if group["lr"] > LARGEST:
            problem = f"makes the group's rate {group['lr']:g}: infinite in single precision"
            raise ConfigError(f"optimizer.groups[{index}].lr_scale", group["lr_scale"], problem)


def param_groups(optimizer: dict[str, Any], scaled: Scaled, counts: list[int]) -> list[dict[str, Any]]:
    """The optimizer's groups in the order of optimizer.groups, then the rest: what each matches, its rate at the peak,
    its weight decay, and its number of elements (None: not known yet)."""
    rest = {"match": None, "lr_scale": 1.0, "weight_decay": None}
    groups = []
    for index, group in enumerate([*optimizer["groups"], rest]):
        own = group["weight_decay"]
        groups.append(
            {
                "match": group["match"],
                "lr_scale": group["lr_scale"],
                "lr": scaled.lr * group["lr_scale"],
                "weight_decay": scaled.weight_decay if own is None else own * scaled.decay_factor,
                "parameters": counts[index] if index < len(counts) else None,
            }
        )
    return groups
