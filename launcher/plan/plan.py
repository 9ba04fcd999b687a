"""From a configuration to a plan: everything that can be known without a step, worked out once."""

import json
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from launcher.config.choices import Device
from launcher.config.schema import BatchConfig, Config
from launcher.config.times import is_time, seconds
from launcher.config.validate import LARGEST
from launcher.errors import ConfigError
from launcher.plan.batch import BatchPlan
from launcher.plan.batch_norm import accumulation_notes, batch_norm_notes, check_batch_norm
from launcher.plan.division import divide
from launcher.plan.facts import Facts
from launcher.plan.mesh import World, asked_nodes, least_nodes, solve_mesh, solve_world
from launcher.plan.noise_scale import measured_notes
from launcher.plan.notes import half_notes, window_notes
from launcher.plan.pipeline import settle_pipeline
from launcher.plan.ramp import ramp_lines
from launcher.plan.scaling import Scaled, rule_notes, scale
from launcher.plan.strategy import settle_strategy
from launcher.plan.targets import target_lines, target_notes
from launcher.plan.timing import make_timing, windows_of


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
    num_samples: int | None = None
    """Samples of the whole training."""
    ramp: list[dict[str, Any]] | None = None
    """Its stages: global_batch_size, grow_to (null: it doesn't grow), until, and first and last update (null: not known
    yet); null: there is none."""
    noise_scale_every_updates: int | None = None
    """How often the gradient noise scale is measured; None: never, or not known yet."""
    targets: list[str] = field(default_factory=list)
    """What the run is meant to come to, in words."""
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
    check_batch_norm(config.model_patches, division, windows, world.device, facts, mesh.pp)
    scaled = scale(config.scaling, config.optimizer, batch.global_batch_size)
    pipeline = settle_pipeline(config, mesh, division, facts)
    strategy = settle_strategy(config, mesh, world, division, facts, pipeline, windows)
    timing = make_timing(config, facts, windows, peak=scaled.lr)
    groups = param_groups(config.optimizer, scaled, facts.group_parameters)
    _check_rates(config, scaled.lr, groups)
    notes = [
        *world.notes,
        *(pipeline.notes if pipeline else accumulation_notes(config.model_patches, facts, division)),
        *rule_notes(config.scaling, config.optimizer),
        *window_notes(batch, windows),
        *batch_norm_notes(config.model_patches, facts, division, windows),
        *half_notes(facts),
        *strategy.notes,
        *timing.notes(windows),
        *measured_notes(config, batch, windows, timing),
        *target_notes(config, timing),
    ]
    return Plan(
        **division.fields(),
        mesh=asdict(mesh),
        **world.fields(),
        strategy=config.strategy.name.value,
        precision=config.precision.name.value,
        seed=config.run.seed,
        **timing.fields(config, windows),
        base_lr=float(config.optimizer["lr"]),
        lr=scaled.lr,
        scaling_rule=config.scaling.rule.value,
        weight_decay=scaled.weight_decay,
        param_groups=groups,
        scaled_arguments=scaled.arguments,
        **(pipeline.fields() if pipeline else {"stages": _one_stage(facts)}),
        memory=None,
        targets=target_lines(config.targets, world.size, timing.samples(windows)),
        **strategy.fields(),
        facts=asdict(facts),
        arithmetic=[*division.lines(), *scaled.lines, *ramp_lines(config, windows, scaled.lr), *timing.lines],
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
    rest = {"match": None, "lr_scale": 1.0, "weight_decay": None, "warmup_from": None}
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
                **({} if group["warmup_from"] is None else {"warmup_from": group["warmup_from"]}),
            }
        )
    return groups
