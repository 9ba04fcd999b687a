"""A sweep as people read it: its plan as one table, and what became of it."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from launcher.observe.text import loss_text, short_numbers
from launcher.prepare import short
from launcher.run_dir import State
from launcher.sweep.members import Member

WIDEST = 18
"""Characters that the overrides of a run get in a narrow terminal."""

_COLOURS = {State.finished: "green", State.failed: "red", State.stopped: "yellow", State.cancelled: "yellow"}


def print_plans(members: Sequence[Member], folder: Path, console: Console, *, whole: bool) -> None:
    """Prints a row for each member that can start, and what to know of them. `whole`: these are all there will be."""
    first, last = members[0].num, members[-1].num
    part = f"Run {first} of a sweep" if first == last else f"Runs {first} to {last} of a sweep"
    title = f"Sweep of {_number(members)}" if whole else part
    table = _table(title, members)
    for name in ("global\nbatch", "micro x gas\nx degree", "lr", "warmup", "updates"):
        table.add_column(name, justify="right")
    table.add_column("folder", overflow="fold", min_width=6)
    for member in members:
        if member.prepared is not None:
            table.add_row(*_row(member, folder))
    console.print(table)
    console.print(f"folder  {short(folder)}", markup=False, highlight=False, soft_wrap=True)
    notes: dict[str, list[int]] = {}
    for member in members:
        for note in member.prepared.plan.notes if member.prepared else ():
            notes.setdefault(note, []).append(member.num)
    for note, nums in notes.items():
        whose = "" if len(nums) == len(members) else f" (run {', '.join(map(str, nums))})"
        console.print(f"[yellow]note[/yellow]{whose} {escape(note)}")


def print_left(members: Sequence[Member], console: Console) -> None:
    """Prints how much of a sweep that goes on is left."""
    finished = sum(member.state is State.finished for member in members)
    left = [str(member.num) for member in members if member.is_left]
    runs = f"runs {', '.join(left)}" if len(left) > 1 else f"run {left[0]}" if left else "nothing"
    console.print(
        f"[bold]resume[/bold] {finished} of {_number(members)} finished; left to run: {runs}", highlight=False
    )


def _table(title: str, members: Sequence[Member]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="cyan")
    longest = max((len(short_numbers(one)) for member in members for one in member.overrides), default=0)
    table.add_column("num", justify="right")
    table.add_column("overrides", overflow="fold", min_width=min(longest, WIDEST))
    return table


def _row(member: Member, folder: Path) -> list[str]:
    assert member.prepared is not None
    plan = member.prepared.plan
    below = member.where.is_relative_to(folder)
    return [
        str(member.num),
        escape(short_numbers("\n".join(member.overrides))),
        str(plan.global_batch_size),
        f"{plan.micro_batch_size} x {plan.gradient_accumulation_steps} x {plan.data_parallel_degree}",
        f"{plan.lr:.5g}",
        "-" if plan.warmup_updates is None else str(plan.warmup_updates),
        "-" if plan.num_updates is None else str(plan.num_updates),
        escape(str(member.where.relative_to(folder)) if below else short(member.where)),
    ]


def print_start(member: Member, console: Console) -> None:
    """Prints that a member starts, and where."""
    console.print(f"[bold]run {member.num}[/bold]  {escape(' '.join(member.overrides))}", highlight=False)


def print_end(member: Member, console: Console, lead: str = "") -> None:
    """Prints in one line what became of a member, behind `lead`."""
    colour = _COLOURS.get(member.state, "cyan")
    said = f"{lead}[{colour}]{member.state.value}[/{colour}]"
    if member.exit_code:
        said += f" (exit {member.exit_code})"
    if member.metric is not None:
        said += f"  loss {loss_text(member.metric)}"
    if member.reason:
        said += f"  {escape(headline(member.reason))}"
    console.print(said, highlight=False, soft_wrap=True)


def print_summary(members: Sequence[Member], folder: Path, console: Console) -> None:
    """Prints what became of all members; of each that failed, why and where more of it stands."""
    table = _table("Sweep", members)
    table.add_column("state")
    table.add_column("loss", justify="right")
    for member in members:
        colour = _COLOURS.get(member.state, "cyan")
        loss = "-" if member.metric is None else loss_text(member.metric)
        state = f"[{colour}]{member.state.value}[/{colour}]"
        table.add_row(str(member.num), escape(short_numbers("\n".join(member.overrides))), state, loss)
    console.print(table)
    for member in members:
        if member.has_failed:
            lines = [f"{member.name} {member.state.value} (exit {member.exit_code})"]
            lines[0] += f": {headline(member.reason)}" if member.reason else ""
            lines += [f"  log     {short(Path(member.log))}"] if member.log else []
            console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
    console.print(f"{_counts(members)}\nfolder  {short(folder)}", markup=False, highlight=False, soft_wrap=True)


def _counts(members: Sequence[Member]) -> str:
    states = [member.state for member in members]
    counts = [f"{states.count(state)} {state.value}" for state in State if state in states]
    return f"{_number(members)}: {', '.join(counts)}"


def _number(members: Sequence[Member]) -> str:
    return "1 run" if len(members) == 1 else f"{len(members)} runs"


def headline(reason: str) -> str:
    """The line of a reason that says most: of a traceback what was raised, and else the first line.

    >>> headline('Traceback (most recent call last):\\n  File "a.py", line 1\\n    g()\\nValueError: broken\\nmore')
    'ValueError: broken'
    """
    lines = [line for line in reason.splitlines() if line.strip()]
    frames = [index for index, line in enumerate(lines) if line.startswith("  File ")]
    if not frames:
        return lines[0].strip() if lines else ""
    who, _, _ = lines[0].partition("Traceback")
    raised = [line for line in lines[frames[-1] :] if not line.startswith(" ")]
    return who + (raised[0] if raised else lines[-1].strip())
