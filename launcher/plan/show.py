"""The plan as people read it."""

import shlex
from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table

from launcher.plan.pipeline import rank_of_stage
from launcher.plan.plan import Plan


def render_plan(plan: Plan, where: str) -> RenderableType:
    """The plan as a table, each line of the arithmetic, the learning rate, and what to know."""
    table = Table(title="Plan", show_header=False, title_justify="left", title_style="bold")
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _rows(plan, where):
        table.add_row(name, escape(value))
    parts: list[RenderableType] = [table, "[bold]Arithmetic[/bold]", *[f"  {escape(line)}" for line in plan.arithmetic]]
    if plan.lr_table:
        parts += ["[bold]Learning rate[/bold]", *[f"  {escape(line)}" for line in _rate_lines(plan)]]
    parts += [f"[yellow]note[/yellow] {escape(note)}" for note in plan.notes]
    return Group(*parts)


def _rows(plan: Plan, where: str) -> list[tuple[str, str]]:
    mesh = " x ".join(f"{name} {degree}" for name, degree in plan.mesh.items())
    facts: dict[str, Any] = plan.facts
    rows = [
        ("global batch size", _global_batch(plan)),
        ("as", _division(plan)),
        ("layout", f"by {plan.layout}" if plan.layout else "known once the ranks see the task"),
        ("ranks", f"{_ranks(plan)}, strategy {plan.strategy}, {plan.precision} ({mesh})"),
        ("updates", _updates(plan)),
        ("learning rate", _rate(plan)),
        ("weight decay", "none" if plan.weight_decay is None else f"{plan.weight_decay:g}"),
    ]
    for group in plan.param_groups:
        if group["parameters"] != 0:
            rows.append((f"  {group['match'] or 'all the rest'}", _group(group)))
    if facts.get("parameters") is not None:
        layers = "" if facts["num_layers"] is None else f" in {facts['num_layers']} layers"
        rows.append(
            ("model", f"{facts['parameters']:,} parameters{layers}, {facts['trainable_parameters']:,} trainable")
        )
    if facts.get("samples") is not None:
        held_out = facts.get("validation_samples")
        validation = "no validation" if held_out is None else f"{held_out:,} for validation"
        rows.append(("data", f"{facts['samples']:,} samples to train on, {validation}"))
    if plan.activation_checkpoint != "none":
        rows.append(("activations", f"{plan.activation_checkpoint} recomputation"))
    rows += _pipeline(plan)
    rows.append(("reductions a window", _reductions(plan)))
    rows += [("target", one) for one in plan.targets]
    rows.append(("folder", where))
    if not plan.launch.get("docker"):  # which are too long for a table
        rows += [("command", shlex.join(argv)) for argv in plan.launch.get("argv", [])]
    return rows


def _global_batch(plan: Plan) -> str:
    """The stages of the ramp and what follows, or the one size."""
    said = []
    for stage in plan.ramp or []:
        size = f"{stage['global_batch_size']}" + (f" to {stage['grow_to']}" if stage["grow_to"] else "")
        last = stage["last_update"]
        said.append(f"{size} until {stage['until'] if last is None else f'update {last}'}")
    return ", ".join([*said, f"{'then ' * bool(said)}{plan.global_batch_size} samples an update"])


def _ranks(plan: Plan) -> str:
    nodes = "" if plan.nodes == 1 else f" on {plan.nodes} nodes"
    return f"{plan.world_size}{nodes} on {plan.device}"


def _pipeline(plan: Plan) -> list[tuple[str, str]]:
    """How the window flows through the pipeline, and what each of its stages holds."""
    if plan.pipeline is None:
        return []
    made, pp = plan.pipeline, plan.mesh["pp"]
    per_rank = made["stages_per_rank"]
    stages = "1 stage" if per_rank == 1 else f"{per_rank} stages"
    rows = [
        ("pipeline", f"{made['schedule']}, {stages} on each of {pp} ranks, which wait {made['bubble']:.1%} of a step"),
        ("  rounds", _rounds(made["rounds"], made["filled_rounds"]) + _by_length(plan)),
    ]
    costs = made["costs"]
    for stage, (first, last) in enumerate(plan.stages or []):
        layers = f"layer {first}" if first == last else f"layers {first} to {last}"
        share = f", {costs[stage] / sum(costs):.1%} of the work" if costs and sum(costs) else ""
        where = "" if per_rank == 1 else f" on rank {rank_of_stage(made['schedule'], pp, stage)}"
        rows.append((f"  stage {stage}", f"{layers}{where}{share}"))
    return rows


def _rounds(rounds: list[int], filled: list[int]) -> str:
    """How often how many micro-batches go through: rounds of a window are alike but for its last."""
    said = []
    for real, runs in dict.fromkeys(zip(rounds, filled, strict=True)):
        times, copies = rounds.count(real), f" and {runs - real} copies" if runs > real else ""
        said.append(f"{times} of {real} micro-batch{'es' * (real > 1)}{copies}")
    return ", ".join(said)


def _by_length(plan: Plan) -> str:
    return ", or more where lengths differ" if plan.layout == "length" else ""


def _reductions(plan: Plan) -> str:
    if plan.reductions_per_window is None:
        return "one a micro-batch"
    each = "" if plan.reduce_each is None else f", each {plan.reduce_each.replace('_', '-')}"
    return f"{plan.reductions_per_window} (how often gradients travel{each})"


def _division(plan: Plan) -> str:
    ranks = f"{plan.data_parallel_degree} data-parallel ranks"
    if plan.micro_batch_tokens is not None:
        return f"micro-batches of up to {plan.micro_batch_tokens} tokens on {ranks}"
    return f"micro-batches of {plan.micro_batch_size} x {plan.gradient_accumulation_steps} steps x {ranks}"


def _group(group: dict[str, Any]) -> str:
    count = "" if group["parameters"] is None else f"{group['parameters']:,} parameters, "
    decay = "" if group["weight_decay"] is None else f", weight decay {group['weight_decay']:g}"
    warmup = f" (from {group['warmup_from']:g} in the warmup)" if "warmup_from" in group else ""
    return f"{count}learning rate {group['lr']:g}{warmup}{decay}"


def _updates(plan: Plan) -> str:
    if plan.num_updates is None:
        return "known once the ranks see the data"
    if plan.updates_per_epoch is None:
        return f"{plan.num_updates}"
    if plan.ramp is not None:
        return f"{plan.num_updates}; an epoch is {plan.updates_per_epoch} full ones, {plan.samples_per_epoch:,} samples"
    epochs = plan.num_updates / plan.updates_per_epoch
    return (
        f"{plan.num_updates} = {epochs:.4g} epochs of {plan.updates_per_epoch} updates, "
        f"{plan.samples_per_epoch:,} samples each"
    )


def _rate(plan: Plan) -> str:
    is_there = (plan.lr_table or [[0, 0]])[0][1] == plan.lr  # a warmup from the base rate, unscaled
    reached = f", reached after {plan.warmup_updates} updates of warmup"
    warmup = "" if not plan.warmup_updates or is_there else reached
    scaled = "" if plan.scaling_rule == "none" else f" ({plan.scaling_rule} from {plan.base_lr:g})"
    if plan.ramp is not None and scaled:
        warmup = f"; {plan.warmup_updates} updates of warmup" if plan.warmup_updates else ""
        return f"{plan.lr:g}{scaled} for a full window, less in the ramp{warmup}"
    return f"{plan.lr:g}{scaled}{warmup}"


def _rate_lines(plan: Plan, most: int = 12) -> list[str]:
    table = plan.lr_table or []
    if len(table) > most:
        chosen = sorted(
            {round(i * (len(table) - 1) / (most - 1)) for i in range(most)} | {max(0, (plan.warmup_updates or 0) - 1)}
        )
        table = [table[i] for i in chosen if i < len(table)]
    return [f"after {int(applied):>6} updates: {rate:.6g}" for applied, rate in table]


def print_commands(commands: Sequence[list[str]], console: Console) -> None:
    """Prints commands as they can be given, a line each."""
    for command in commands:
        console.print(shlex.join(command), markup=False, highlight=False, soft_wrap=True)


def print_plan(plan: Plan, where: str, console: Console) -> None:
    """Prints the plan on `console`."""
    console.print(render_plan(plan, where))
