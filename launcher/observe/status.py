"""Where a run stands, or every run of a sweep, from their files alone."""

import shlex
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from launcher.checkpoints import newest_whole
from launcher.errors import LauncherError
from launcher.observe.records import latest_updates, latest_with, pace, readable, seconds_left
from launcher.observe.text import critical_batch_text, duration_text, loss_text, rate_text, reached_text
from launcher.run_dir import RunDir, State
from launcher.slurm_job import Job, is_there, look_up

SILENT_AFTER = 60.0
"""Seconds without a heartbeat after which a running run gives no sign of life, and containers that nobody can be
asked of are taken to be gone."""
RECENT = 20
"""Updates that the rate and the time left are worked out from."""

_ALIVE = (State.running, State.stopping)
_COLOURS = {State.finished: "green", State.failed: "red", State.stopped: "yellow", State.cancelled: "yellow"}


@dataclass(frozen=True)
class RunStatus:
    """Where a run stands; None: not known, or not yet."""

    path: Path
    state: State
    exit_code: int | None
    update: int
    applied: int
    num_updates: int | None
    attempt: int
    loss: float | None
    """Of the last update; None too where it wasn't finite."""
    samples_per_s: float | None
    seconds_left: float | None
    heartbeat_age: float | None
    """Seconds since the run last said that it lives."""
    error: str | None
    is_gone: bool = False
    """Whether the process that looks after its ranks was one of this machine, and has ended."""
    checkpoint: int | None = None
    """The update of the newest complete checkpoint."""
    critical_batch: str = ""
    """The last one that is known, in words."""
    reached: str | None = None
    """When it has come to its targets, in words."""
    job: Job | None = None
    """Its job, where a scheduler has it and still waits to start it or runs it."""

    @property
    def is_resumable(self) -> bool:
        """Whether it has ended, or can't be running any more, and isn't finished."""
        if self.job is not None:  # which goes on by itself
            return False
        return self.is_silent or self.state in (State.stopped, State.failed, State.cancelled)

    @property
    def is_silent(self) -> bool:
        """Whether it should be running and hasn't been heard of for long, or can't be any more."""
        if self.job is not None and self.job.state != "RUNNING":
            return False
        if self.is_gone:
            return self.state is State.submitted or self.state in _ALIVE
        return self.state in _ALIVE and self.heartbeat_age is not None and self.heartbeat_age > SILENT_AFTER


def read_run(run_dir: Path) -> RunStatus:
    """Where the run in `run_dir` stands.

    Raises:
        LauncherError: there is no run, or its files can't be read.
    """
    run = RunDir.existing(run_dir)
    with readable(run.path):
        return _read(run)


def _read(run: RunDir) -> RunStatus:
    plan = run.read_json(run.plan)
    # the plan is written first
    status: dict[str, Any] = run.read_status() if run.status.exists() else {"state": State.planned.value}
    try:
        state = State(status.get("state"))
    except ValueError:
        raise LauncherError(f"{run.status}: unknown state {status.get('state')!r}") from None
    job, of_job = _job(status, state)
    if of_job is not None:
        state, error = of_job
        status |= {"exit_code": job and job.exit_code, "error": error}
    update, attempt = int(status.get("update") or 0), int(status.get("attempt") or 0)
    # of an attempt that has only begun nothing is known yet, and what the one before it says is past
    recent = [one for one in latest_updates(run.metrics)[-RECENT:] if one.get("attempt", 0) >= attempt]
    last = recent[-1] if recent else {}
    if state in _ALIVE:  # status.json is written less often than the metrics
        update = max(update, int(last.get("update") or 0))
    heartbeat = status.get("heartbeat")
    return RunStatus(
        path=run.path,
        state=state,
        exit_code=status.get("exit_code"),
        update=update,
        applied=int(status.get("applied") or 0),
        num_updates=plan.get("num_updates"),
        attempt=attempt,
        loss=last.get("loss"),
        samples_per_s=pace(recent)[0],
        seconds_left=seconds_left(plan, update, recent) if state in _ALIVE else None,
        heartbeat_age=max(0.0, time.time() - heartbeat) if heartbeat else None,
        error=_error_text(status.get("error")),
        is_gone=_is_gone(status),
        critical_batch=_critical_batch(run, plan, attempt),
        reached=reached_text(status["reached"]) if status.get("reached") else None,
        job=job if job is not None and not job.has_ended else None,
        checkpoint=newest.update if (newest := newest_whole(run)[0]) is not None else None,
    )


def _critical_batch(run: RunDir, plan: dict[str, Any], attempt: int) -> str:
    if plan.get("noise_scale_every_updates") is None:  # not measured: no reason to look through all of the metrics
        return ""
    last = latest_with(run.metrics, "critical_batch", attempt)
    if last is None:
        return ""
    said = critical_batch_text(last["critical_batch"], last["critical_batch_error"])
    return f"{said} (samples, by the noise of the gradients up to update {last['update']})"


def _job(status: dict[str, Any], state: State) -> tuple[Job | None, tuple[State, str] | None]:
    """The job of a run, and what it says of a run that couldn't say itself how it has ended."""
    name = (status.get("job") or {}).get("id")
    if name is None or state is State.finished:
        return None, None
    job = look_up(str(name))
    if state in (State.stopped, State.failed, State.cancelled) or not is_there():
        return job, None
    if job is None:
        return None, (State.failed, f"Slurm doesn't know job {name} any more")
    if not job.has_ended:
        return job, None
    ended = State.cancelled if job.state == "CANCELLED" else State.failed
    return job, (ended, f"job {name} ended as {job.state} before the run could say how")


def _is_gone(status: dict[str, Any]) -> bool:
    agent = (status.get("pids") or {}).get("agent")
    if agent is None or status.get("host") != socket.gethostname() or not Path("/proc/self").exists():
        return False
    try:
        return b"launcher.train.agent" not in Path(f"/proc/{agent}/cmdline").read_bytes()  # else it has its number
    except OSError:
        return True


def _error_text(error: Any) -> str | None:
    if not isinstance(error, dict):
        return None if error is None else str(error)
    who = "" if error.get("rank") is None else f"rank {error['rank']}: "
    return who + str(error.get("reason", error))


def find_runs(folder: Path) -> list[Path]:
    """The folders of the run in `folder`, or of those up to three levels below it, numbered ones by number.

    Raises:
        LauncherError: there is none.
    """
    if not folder.is_dir():
        raise LauncherError(f"{folder}: no such folder")
    if (folder / "plan.json").is_file():
        return [folder]
    found = {plan.parent for levels in (1, 2, 3) for plan in folder.glob("*/" * levels + "plan.json")}
    if not found:
        raise LauncherError(
            f"{folder}: no run here: a run's folder holds plan.json, and a sweep's folder such folders, up to three "
            "levels below it"
        )
    return sorted(found, key=lambda path: [_order(part) for part in path.parts])


def _order(part: str) -> tuple[int, int, str]:
    return (0, int(part), part) if part.isdecimal() else (1, 0, part)


def render_status(folder: Path, console: Console) -> None:
    """Prints a table of the run in `folder`, or of every run of a sweep's folder, and what is wrong with any of them.

    Raises:
        LauncherError: there is no run.
    """
    paths = find_runs(folder)
    rows, problems, was_restarted = [], [], False
    for path in paths:
        name = path.resolve().name if path == folder else str(path.relative_to(folder))
        try:
            status = read_run(path)
            with readable(path):
                row, found = _row(name, status), _problems(status, whole=len(paths) == 1)
        except LauncherError as error:
            if path == folder:
                raise
            rows.append([escape(name), "[red]unreadable[/red]"])
            problems.append(f"{name}: {error}")
            continue
        rows.append(row)
        was_restarted |= status.attempt > 0
        problems += [f"{name}: {problem}" for problem in found]
        if status.is_resumable:
            problems.append(f"{name}: {_how_to_go_on(status, path)}")
    console.print(_table(rows, with_attempt=was_restarted))
    for problem in problems:
        console.print(problem, markup=False, highlight=False, soft_wrap=True)


def _how_to_go_on(status: RunStatus, path: Path) -> str:
    total = "" if status.num_updates is None else f"/{status.num_updates}"
    start = "the beginning (no checkpoint)" if status.checkpoint is None else f"update {status.checkpoint}{total}"
    return f"goes on from {start}: launcher resume {shlex.quote(str(path))}"


def _table(rows: list[list[str]], *, with_attempt: bool) -> Table:
    """A table of rows that `_row` made. Attempts are shown where there is more than one: 80 columns are few."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("run", overflow="fold", min_width=8)
    names = ["state", "update", "loss", "rate", "left", "heartbeat", *(["attempt"] if with_attempt else [])]
    for name in names:
        table.add_column(name, justify="left" if name == "state" else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row[: len(names) + 1])
    return table


def _row(name: str, status: RunStatus) -> list[str]:
    colour = _COLOURS.get(status.state, "red" if status.is_silent else "cyan")
    total = "" if status.num_updates is None else f"/{status.num_updates}"
    age = "-" if status.heartbeat_age is None else f"{duration_text(status.heartbeat_age)} ago"
    return [
        escape(name),
        f"[{colour}]{status.state.value}[/{colour}]",
        f"{status.update}{total}",
        "-" if status.loss is None else loss_text(status.loss),
        rate_text(status.samples_per_s),
        duration_text(status.seconds_left),
        age,
        str(status.attempt),
    ]


def _problems(status: RunStatus, *, whole: bool) -> list[str]:
    problems = []
    if status.job is not None:
        why = f" ({status.job.reason})" if status.job.reason else ""
        problems.append(f"job {status.job.id} is {status.job.state}{why}; scancel {status.job.id} ends it")
    if status.is_silent:
        gone = ": its processes have ended" if status.is_gone else ""
        problems.append(f"no sign of life for {duration_text(status.heartbeat_age)}{gone}")
    if status.critical_batch and whole:
        problems.append(status.critical_batch)
    if status.reached:
        problems.append(status.reached)
    if status.error:
        code = "" if status.exit_code is None else f" (exit {status.exit_code})"
        # of several runs the last line of each, which is what a traceback ends with
        error = status.error if whole else status.error.strip().splitlines()[-1]
        problems.append(f"{status.state.value}{code}: {error}")
    return problems
