"""Following a run by its files: a live bar in a terminal, plain lines elsewhere."""

import json
import math
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

from launcher.errors import LauncherError
from launcher.observe.news import News
from launcher.observe.records import Record, Tail, pace, seconds_left
from launcher.observe.text import critical_batch_text, duration_text, loss_text, lr_text, rate_text
from launcher.run_dir import RunDir

POLL = 0.2
"""Seconds between two looks at the files."""
RECENT = 20
"""Updates that the rate and the time left are worked out from."""
LINES = 10
"""About so many plain lines a run."""
SKIPS_TOLD = 3
"""Skipped updates that are told one by one; further ones are only counted."""
NARROW = 110
"""Columns of a terminal below which the bar leaves out what matters least."""


def follow(run_dir: Path, alive: Callable[[], bool], *, live: bool, console: Console, every: float = POLL) -> None:
    """Shows the updates and validations of a run until `alive` says that it has ended, to the last that was written.

    What stood in the files before counts, and isn't shown again. Of a run that goes on from a checkpoint only what came
    before that counts: its status says which attempt begins, and after which update.
    """
    run = RunDir(run_dir)
    tail, news = Tail(run.metrics), News(run)
    course = Course(run)
    for record in tail.read():
        course.take(record)
    with suppress(LauncherError):
        status = run.read_status()
        course.go_on(int(status.get("attempt") or 0), int(status.get("update") or 0))
    with Bar(console, course) if live and console.is_terminal else Lines(console, course) as view:
        while True:
            # asked before the look, so that what is written before the end is seen
            is_running = alive()
            for record in tail.read():
                _show(course, view, record)
            for line in news.read():
                view.say(line)
            view.refresh()
            if not is_running:
                return
            time.sleep(every)


def _show(course: "Course", view: "View", record: Record) -> None:
    if record.get("kind") == "note" and record.get("attempt", 0) >= course.attempt:
        view.say(f"update {course.of(record['update'])}  {record.get('text')}")
    goes_on = course.has_started and record.get("attempt", 0) > course.attempt
    if not course.take(record):
        return
    if goes_on:
        view.say(f"attempt {course.attempt}: goes on with update {course.of(record['update'])}")
    if record["kind"] == "validation":
        view.say(_validation_text(course, record))
        return
    if record.get("skipped"):
        count = len(course.skipped)
        if count <= SKIPS_TOLD:
            why = "every weight is 0" if record.get("weight") == 0 else "not finite"
            why = "a spike of the loss" if record.get("spike") else why
            more = "; further ones are only counted" if count == SKIPS_TOLD else ""
            view.say(f"update {course.of(record['update'])}  skipped, {why}{more}")
    view.update(record)


def _validation_text(course: "Course", record: Record) -> str:
    metrics = record.get("metrics")
    others = metrics.items() if isinstance(metrics, dict) else ()
    parts = [f"update {course.of(record['update'])}", f"validation loss {loss_text(record.get('loss'))}"]
    return "  ".join(parts + [f"{name} {loss_text(value)}" for name, value in others])


class Course:
    """How far a run is, from the records seen so far."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._plan: dict[str, Any] = {}
        self.last: Record | None = None
        self.attempt = 0
        self.skipped: set[int] = set()
        self._start = 0
        self._recent: deque[Record] = deque(maxlen=RECENT)
        self.critical_batch = ""
        """As it was measured last, in words."""

    @property
    def has_started(self) -> bool:
        return self.last is not None

    @property
    def update(self) -> int:
        return self._start if self.last is None else int(self.last["update"])

    @property
    def num_updates(self) -> int | None:
        """None until the ranks have completed plan.json, where the plan needed the data."""
        number = self._planned("num_updates")
        return None if number is None else int(number)

    @property
    def epoch(self) -> float | None:
        """Epochs that have passed."""
        per_epoch = self._planned("updates_per_epoch")
        if per_epoch and not self._plan.get("ramp"):  # in a ramp an epoch has more of them
            return self.update / float(per_epoch)
        return None if self.last is None else self.last.get("epoch")

    @property
    def samples_per_s(self) -> float | None:
        return pace(self._recent)[0]

    @property
    def seconds_left(self) -> float | None:
        if self.num_updates is None:  # looks into plan.json as long as it isn't there
            return None
        return seconds_left(self._plan, self.update, self._recent)

    def of(self, update: int) -> str:
        """``25/100``."""
        return f"{update}" if self.num_updates is None else f"{min(update, self.num_updates)}/{self.num_updates}"

    def go_on(self, attempt: int, update: int) -> None:
        """A new attempt begins after `update`; nothing changes where records of it were taken already."""
        if attempt <= self.attempt:
            return
        self.attempt, self._start, self.last = attempt, update, None
        self.skipped = {one for one in self.skipped if one <= update}
        self._recent.clear()

    def take(self, record: Record) -> bool:
        """Counts a record in. False: it says nothing new, since it is of an earlier attempt or an unknown kind."""
        attempt = record.get("attempt", self.attempt)
        if record.get("kind") not in ("train", "validation") or attempt < self.attempt:
            return False
        if attempt > self.attempt:  # it repeats what came after the checkpoint that it started from
            self.attempt = attempt
            self.skipped = {update for update in self.skipped if update < record["update"]}
            self._recent.clear()
        if record["kind"] == "train":
            self.last = record
            self._recent.append(record)
            if record.get("skipped"):
                self.skipped.add(record["update"])
            if "critical_batch" in record:
                self.critical_batch = critical_batch_text(record["critical_batch"], record["critical_batch_error"])
        return True

    def _planned(self, name: str) -> Any:
        if self._plan.get(name) is None:
            try:
                self._plan = json.loads(self._run.plan.read_text(encoding="utf-8"))
            except (OSError, ValueError):
                return None
        return self._plan.get(name)


class View(Protocol):
    """A way to show a run."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...
    def say(self, text: str) -> None: ...
    def update(self, record: Record) -> None: ...
    def refresh(self) -> None: ...


class Lines:
    """Plain lines: the first update, about every tenth of the run, the last, and what is said in between."""

    def __init__(self, console: Console, course: Course) -> None:
        self._console = console
        self._course = course
        self._shown: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown is not None and self._shown != self._course.update:
            self._line()

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def update(self, record: Record) -> None:
        update, total = self._course.update, self._course.num_updates
        every = 100 if total is None else math.ceil(total / LINES)
        if self._shown is None or update // every != self._shown // every or update == total:
            self._line()

    def refresh(self) -> None:
        """Nothing moves here."""

    def _line(self) -> None:
        course = self._course
        assert course.last is not None
        self._shown = course.update
        parts = [f"update {course.of(course.update)}"]
        if course.epoch is not None:
            parts.append(f"epoch {course.epoch:.2f}")
        parts += [f"loss {loss_text(course.last.get('loss'))}", f"lr {lr_text(course.last.get('lr'))}"]
        parts.append(rate_text(course.samples_per_s))
        if course.critical_batch:
            parts.append(course.critical_batch)
        if course.skipped:
            parts.append(f"{len(course.skipped)} skipped")
        if course.seconds_left is not None:
            parts.append(f"{duration_text(course.seconds_left)} left")
        self.say("  ".join(parts))


class Bar:
    """A live bar in a terminal."""

    def __init__(self, console: Console, course: Course) -> None:
        self._course = course
        self._progress = Progress(*_columns(console), console=console, refresh_per_second=5)
        self._task = self._progress.add_task("starting ranks", total=None, **self._fields())

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.refresh()
        self._progress.stop()

    def say(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False)

    def update(self, record: Record) -> None:
        self._progress.update(self._task, description="training")

    def refresh(self) -> None:
        total, update = self._course.num_updates, self._course.update
        done = update if total is None else min(update, total)
        self._progress.update(self._task, completed=done, total=total, **self._fields())

    def _fields(self) -> dict[str, Any]:
        course, last = self._course, self._course.last or {}
        skipped = f"  {len(course.skipped)} skipped" if course.skipped else ""
        return {
            "of": course.of(course.update),
            "loss": f"loss {loss_text(last.get('loss'))}" if last else "",
            "lr": f"lr {lr_text(last.get('lr'))}" if last else "",
            "rate": rate_text(course.samples_per_s) + skipped if last else "",
            "left": f"{duration_text(course.seconds_left)} left" if course.seconds_left is not None else "",
        }


def _columns(console: Console) -> list[ProgressColumn]:
    is_narrow = console.width < NARROW
    names = ["loss", "rate", "left"] if is_narrow else ["loss", "lr", "rate", "left"]
    columns: list[ProgressColumn] = [TextColumn("{task.description}"), BarColumn(bar_width=8 if is_narrow else 24)]
    columns += [TextColumn("{task.fields[of]}"), TaskProgressColumn()]
    columns += [TextColumn(f"{{task.fields[{name}]}}", markup=False) for name in names]
    return columns if is_narrow else [*columns[:-1], TimeElapsedColumn(), columns[-1]]
