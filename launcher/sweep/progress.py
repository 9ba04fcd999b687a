"""Following the jobs of a sweep: a bar for each run in a terminal, plain lines elsewhere."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn

from launcher.errors import LauncherError
from launcher.run_dir import State
from launcher.sweep.members import Member
from launcher.sweep.show import print_end

PARTS = 4
"""A plain line comes when a run starts, and after each of so many parts of it."""
MOST_BARS = 30
"""Runs up to which each has a bar."""


class Standing:
    """How far a run is, by its files."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self.state = State.submitted
        self.update = 0
        self.num_updates: int | None = None
        """None: not known before its ranks have seen the data."""

    def look(self) -> None:
        """Reads it. What can't be read now stays as it was."""
        try:
            status = self._member.run.read_status()
            self.state, self.update = State(status["state"]), int(status.get("update") or 0)
            if self.num_updates is None and self.state is not State.submitted:
                self.num_updates = self._member.run.read_json(self._member.run.plan).get("num_updates")
        except LauncherError:
            return

    @property
    def of(self) -> str:
        """``25/100``."""
        return f"{self.update}" if self.num_updates is None else f"{self.update}/{self.num_updates}"

    @property
    def part(self) -> int:
        """Which part of it is done; -1: it hasn't started."""
        if self.state is State.submitted:
            return -1
        return PARTS * self.update // self.num_updates if self.num_updates else 0


class View(Protocol):
    """A way to show them."""

    def look(self, members: Sequence[Member]) -> None: ...
    def end(self, member: Member) -> None: ...
    def pause(self) -> None: ...
    def go_on(self) -> None: ...


@contextmanager
def following(members: Sequence[Member], console: Console) -> Iterator[View]:
    """A view of `members`, for as long as they are followed."""
    view = Bars(members, console) if console.is_terminal and len(members) <= MOST_BARS else Lines(members, console)
    view.go_on()
    try:
        yield view
    finally:
        view.pause()


class Lines:
    """A line when a run starts, and now and then."""

    def __init__(self, members: Sequence[Member], console: Console) -> None:
        self._console = console
        self._standings = {member.num: Standing(member) for member in members}
        self._told = dict.fromkeys(self._standings, -1)

    def look(self, members: Sequence[Member]) -> None:
        """Says what is new of those that haven't ended."""
        for member in members:
            standing = self._standings[member.num]
            standing.look()
            if standing.part > self._told[member.num]:
                self._told[member.num] = standing.part
                self._console.print(f"[bold]run {member.num}[/bold]  update {standing.of}", highlight=False)

    def end(self, member: Member) -> None:
        """Says how one has ended."""
        print_end(member, self._console, f"[bold]run {member.num}[/bold]  ")

    def pause(self) -> None:
        """Nothing moves here."""

    go_on = pause


class Bars:
    """A bar for each run, above it what has ended."""

    def __init__(self, members: Sequence[Member], console: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TextColumn("{task.fields[of]}"))
        self._progress = Progress(*columns, console=console, refresh_per_second=2)
        self._standings = {member.num: Standing(member) for member in members}
        self._tasks = {
            member.num: self._progress.add_task(
                escape(f"run {member.num}  {' '.join(member.overrides)}"), total=None, of="waits"
            )
            for member in members
        }

    def look(self, members: Sequence[Member]) -> None:
        """Moves the bars of those that haven't ended."""
        for member in members:
            standing = self._standings[member.num]
            standing.look()
            of = "waits" if standing.part < 0 else standing.of
            self._progress.update(self._tasks[member.num], completed=standing.update, total=standing.num_updates, of=of)

    def end(self, member: Member) -> None:
        """Says how one has ended, instead of its bar."""
        task = self._tasks.pop(member.num, None)
        if task is not None:
            self._progress.remove_task(task)
        print_end(member, self._progress.console, f"[bold]run {member.num}[/bold]  ")

    def pause(self) -> None:
        """Leaves the terminal to a question."""
        self._progress.stop()

    def go_on(self) -> None:
        """Shows them."""
        self._progress.start()
