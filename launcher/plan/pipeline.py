"""What a pipeline comes to: which layers each stage has, how micro-batches flow, and how long ranks wait."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

from launcher.config.parallel import PipelineConfig
from launcher.config.schema import Config
from launcher.errors import ConfigError, nearest
from launcher.plan.batch import MICRO, BatchPlan, parse_count
from launcher.plan.division import Division
from launcher.plan.facts import Facts
from launcher.plan.mesh import Mesh
from launcher.plan.split import split_layers, stage_costs
from launcher.plan.timetable import span

SPLIT, ROUND, SCHEDULE = "pipeline.split", "pipeline.microbatches_per_round", "pipeline.schedule"

ONE_STAGE = ("gpipe", "1f1b")
"""Schedules with one stage a rank. zbv has two, the others two or more."""
SPLIT_BACKWARD = ("interleaved_zero_bubble", "zbv")
"""Schedules that run the backward of the weights apart from that of the input."""
CUT_TYPES = ("llama", "mistral", "qwen2", "qwen3", "gpt2")
"""Types of transformers' models whose forward is known to do nothing else between embedding and layers, or layers and
head, so that it can be cut."""
LITTLE = 0.1
"""Up to this share of a step a bubble is left without advice."""
MOST_SIZES = 4096
"""Micro-batch sizes that are looked at for one that needs no copies."""


def filled_micro_batches(schedule: str, pp: int, stages: int, m: int) -> int:
    """The smallest number of micro-batches, at least `m`, that torch's class of this schedule can run in a round.

    1F1B needs one for each of its stages. The interleaved ones go through groups of at least pp, all of one size.
    """
    if schedule == "1f1b":
        return max(m, stages)
    if schedule in ("interleaved_1f1b", "interleaved_zero_bubble"):
        while m % max(1, m // pp):  # a multiple of pp always fits
            m += 1
    return m


@dataclass(frozen=True)
class Flow:
    """How micro-batches go through a pipeline, whatever their number."""

    schedule: str
    pp: int
    stages_per_rank: int
    microbatches_per_round: int | None
    """The most that go through in one run of the schedule; None: all of a window."""

    def filled(self, m: int) -> int:
        """Micro-batches that a round of `m` runs, with the masked copies that fill it up."""
        return filled_micro_batches(self.schedule, self.pp, self.pp * self.stages_per_rank, m)

    def rounds(self, steps: int) -> list[int]:
        """Micro-batches of each round of a window of `steps` of them."""
        most = self.microbatches_per_round or steps
        full, rest = divmod(steps, most)
        return [most] * full + [rest] * (rest > 0)

    def copies(self, steps: int) -> int:
        """Micro-batches that only fill up the rounds of a window of `steps`."""
        return sum(self.filled(one) - one for one in self.rounds(steps))

    def bubble(self, steps: int) -> float:
        """Share of a window's time in which ranks wait for each other, where all stages cost the same, nothing takes
        time between them, and rounds follow each other. Copies count as work.

        For one round of m >= pp micro-batches with v stages a rank it is (pp - 1) / (v m + pp - 1) under every schedule
        that leaves the backward whole (Narayanan et al. 2021, section 2.2); the others are simulated.
        """
        runs = [self.filled(one) for one in self.rounds(steps)]
        time = sum(span(self.schedule, self.pp, self.stages_per_rank, one) for one in runs)
        return 1 - 3 * self.stages_per_rank * sum(runs) / time


@dataclass(frozen=True)
class PipelinePlan:
    """How a model is cut into stages, and how a full window goes through them."""

    flow: Flow
    stages: list[list[int]] | None
    """First and last layer of each stage, of all of them in order; None: the model wasn't asked."""
    costs: list[int] | None
    """Multiply-adds a token of each stage; None: not known."""
    rounds: list[int]
    """Micro-batches of a data-parallel rank in each round of a full window, without those that fill it up."""
    bubble: float
    """Share of a full window's time in which ranks wait for each other; see Flow.bubble."""
    notes: list[str] = field(default_factory=list)

    @property
    def filled_rounds(self) -> list[int]:
        """Micro-batches that run in each round of a full window, with those that fill it up."""
        return [self.flow.filled(one) for one in self.rounds]

    def fields(self) -> dict[str, Any]:
        """The fields of the plan that follow from it."""
        pipeline = {
            "schedule": self.flow.schedule,
            "stages_per_rank": self.flow.stages_per_rank,
            "microbatches_per_round": self.flow.microbatches_per_round,
            "bubble": self.bubble,
            "costs": self.costs,
            "rounds": self.rounds,
            "filled_rounds": self.filled_rounds,
        }
        return {"stages": self.stages, "pipeline": pipeline}


def rank_of_stage(schedule: str, pp: int, stage: int) -> int:
    """The pipeline rank that a stage lies on: round and round, and under zbv down the ranks and up again."""
    loop, rank = divmod(stage, pp)
    return pp - 1 - rank if schedule == "zbv" and loop % 2 else rank


def settle_pipeline(config: Config, mesh: Mesh, division: Division, facts: Facts) -> PipelinePlan | None:
    """The plan of the pipeline; None: there is none.

    Raises:
        ConfigError: a key that would be ignored, a model that can't be cut so, or a split that doesn't fit it.
    """
    asked, pp = config.pipeline, mesh.pp
    if pp == 1:
        _check_unused(asked)
        return None
    if division.micro_batch_tokens is not None:
        problem = f"micro-batches of a round need one shape (mesh.pp={pp})"
        raise ConfigError("batch.micro_batch_tokens", division.micro_batch_tokens, problem, hint=f"{MICRO}=…")
    if facts.batch_norm_layers:
        problem = "fills up micro-batches with copies, which batch norm would count in its statistics"
        raise ConfigError("mesh.pp", pp, problem, hint="model_patches.batch_norm=group_norm, or mesh.pp=1")
    schedule = asked.schedule.value
    bound = parse_count(ROUND, asked.microbatches_per_round, allow_null=True)
    counts = _given_counts(asked.split)
    per_rank = _stages_per_rank(schedule, pp, counts)
    stages, costs = None, None
    if facts.samples is not None or facts.num_layers is not None:
        counts, costs = _cut(config, facts, pp, per_rank, counts)
        ends = list(accumulate(counts))
        stages = [[end - count, end - 1] for count, end in zip(counts, ends, strict=True)]
    flow = Flow(schedule, pp, per_rank, bound)
    steps = division.batch.gradient_accumulation_steps
    notes = [*_filled_notes(flow, division.batch), *_bubble_notes(flow, division.batch), *_balance_notes(costs)]
    return PipelinePlan(flow, stages, costs, flow.rounds(steps), flow.bubble(steps), notes)


def _check_unused(asked: PipelineConfig) -> None:
    unset = PipelineConfig()
    for key, name in ((SCHEDULE, "schedule"), (SPLIT, "split"), (ROUND, "microbatches_per_round")):
        given = getattr(asked, name)
        if given != getattr(unset, name):
            raise ConfigError(key, given, "has no meaning without a pipeline (mesh.pp=1)", hint="mesh.pp=2 or more")


def _given_counts(split: Any) -> list[int] | None:
    """The number of layers of each stage, where they were given; None: auto."""
    if split == "auto":
        return None
    if not isinstance(split, list) or not split:
        hint = (nearest(split, ["auto"]) if isinstance(split, str) else "") or f"{SPLIT}=[2,3] for two stages"
        raise ConfigError(SPLIT, split, "must be auto or a list with the number of layers of each stage", hint=hint)
    return [parse_count(f"{SPLIT}[{index}]", one) for index, one in enumerate(split)]


def _stages_per_rank(schedule: str, pp: int, counts: list[int] | None) -> int:
    fixed = 1 if schedule in ONE_STAGE else 2
    if counts is None:
        return fixed
    given, per_rank = len(counts), len(counts) // pp
    if schedule in (*ONE_STAGE, "zbv"):
        has, fits = f"exactly {fixed}", given == fixed * pp
    else:
        has, fits = "two or more", given % pp == 0 and per_rank >= 2
    if not fits:
        needed = f"{fixed * pp}" + ("" if has.startswith("exactly") else f", {3 * pp}, …")
        problem = f"{_many(given, 'stage')}: {SCHEDULE}={schedule} has {has} on each of mesh.pp={pp} ranks"
        problem += f", so {needed} numbers"
        others = "interleaved_1f1b" if per_rank >= 2 else "1f1b"
        hint = f"{SCHEDULE}={others} takes {given}" if given % pp == 0 else f"{SPLIT}=auto"
        raise ConfigError(SPLIT, _listed(counts), problem, hint=hint)
    return per_rank


def _many(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}{'es' if what.endswith('ch') else 's'}"


def _listed(counts: Sequence[int]) -> str:
    return f"[{','.join(map(str, counts))}]"


def _cut(
    config: Config, facts: Facts, pp: int, per_rank: int, counts: list[int] | None
) -> tuple[list[int], list[int] | None]:
    """The number of layers of each stage and what each costs, of a model that was asked."""
    layers, stages = facts.num_layers, pp * per_rank
    missing = facts.missing_parts or (["layers", "embed", "head"] if layers is None else [])
    if missing == ["type"]:
        problem = f"mesh.pp={pp} cuts a model into stages, and models of transformers can be cut of the types "
        problem += ", ".join(CUT_TYPES)
        raise ConfigError("model", "hf", problem, hint="mesh.pp=1 strategy=fsdp spreads any type")
    if layers is None or missing:
        what = "no layers to cut between" if layers is None else f"layers, and no {' and no '.join(missing)}"
        shapes = {"layers": "`layers` (ModuleList)", "embed": "`embed(**inputs)`", "head": "`head(hidden)`"}
        hint = f"add {', '.join(shapes[one] for one in missing)}; forward is head(layers(embed(inputs)))"
        problem = f"mesh.pp={pp} cuts a model into stages, and this one offers {what}"
        raise ConfigError("model._target_", config.model["_target_"], problem, hint=hint)
    if stages > layers:
        most = layers // per_rank
        problem = (
            f"{pp} ranks x {_many(per_rank, 'stage')} = {stages} stages, and the model has {_many(layers, 'layer')}"
        )
        hint = f"mesh.pp={most} is the most under {SCHEDULE}={config.pipeline.schedule.value}"
        one = "" if per_rank == 1 or pp > layers else f"; {SCHEDULE}=1f1b has one stage a rank"
        raise ConfigError("mesh.pp", pp, problem, hint=(hint if most > 1 else "mesh.pp=1: no pipeline") + one)
    if counts is None:
        embed, *costs, head = facts.part_costs or [0] * (layers + 2)
        counts = split_layers(costs, embed, head, stages)
    elif sum(counts) != layers:
        problem = f"{' + '.join(map(str, counts))} = {sum(counts)} layers, and the model has {layers}"
        raise ConfigError(SPLIT, _listed(counts), problem, hint=f"{SPLIT}=auto")
    return counts, stage_costs(facts.part_costs, counts) if facts.part_costs else None


def _filled_notes(flow: Flow, batch: BatchPlan) -> list[str]:
    steps = batch.gradient_accumulation_steps
    copies = flow.copies(steps)
    if not copies:
        return []
    bound = flow.microbatches_per_round
    if bound is not None and bound < steps and flow.filled(bound) > bound:
        better = f"{ROUND}={flow.filled(bound)} needs none in a full round"
    else:
        size = _size_without_copies(flow, batch)
        fewest = flow.pp * batch.data_parallel_degree
        better = f"{MICRO}={size} needs none" if size else f"batch.global_batch_size={fewest} or more can do without"
    ran, share = _many(steps, "micro-batch"), copies / (copies + steps)
    return [
        f"{SCHEDULE}={flow.schedule} can't run the {ran} of a full window as they are: {copies} more fill it up, "
        f"masked copies that change nothing and are {share:.0%} of the work; {better}"
    ]


def _size_without_copies(flow: Flow, batch: BatchPlan) -> int | None:
    """The micro-batch size nearest to the planned one under which a full window needs no copies."""
    share = batch.samples_per_rank
    planned = min(batch.micro_batch_size, share)
    for away in range(1, min(share, MOST_SIZES)):
        for size in (planned - away, planned + away):
            if 1 <= size <= share and not flow.copies(-(-share // size)):
                return size
    return None


def _bubble_notes(flow: Flow, batch: BatchPlan) -> list[str]:
    """What would make ranks wait less, where they wait for more than a little."""
    steps, share = batch.gradient_accumulation_steps, batch.samples_per_rank
    now = flow.bubble(steps)
    if now <= LITTLE:
        return []
    if flow.microbatches_per_round is not None and flow.microbatches_per_round < steps:
        whole = replace(flow, microbatches_per_round=None).bubble(steps)
        return [f"ranks wait {now:.1%} of a step; {whole:.1%} with {ROUND}=null, which keeps more activations"]
    best, size = now, None
    for wanted in range(steps + 1, 10 * flow.pp + 1):
        micro = -(-share // wanted)
        more = -(-share // micro)
        if not flow.copies(more) and flow.bubble(more) < best:
            best, size = flow.bubble(more), micro
        if best <= LITTLE:
            break
    return [f"ranks wait {now:.1%} of a step; {best:.1%} with {MICRO}={size}"] if size is not None else []


def _balance_notes(costs: Sequence[int] | None) -> list[str]:
    """Where one stage costs more than its share, which isn't counted as waiting."""
    if not costs or max(costs) * len(costs) <= (1 + LITTLE) * sum(costs):
        return []
    times = max(costs) * len(costs) / sum(costs)
    return [
        f"stage {costs.index(max(costs))} has {times:.2f} times an even share of the work, and the others wait for it "
        "besides; more layers, or fewer stages, can be cut more evenly"
    ]
