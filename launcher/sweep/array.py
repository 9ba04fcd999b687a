"""The runs of a sweep as one array of Slurm: what is left is queued at once, and a last job writes the report."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from launcher import slurm_job
from launcher.errors import ConfigError, LauncherError
from launcher.plan.plan import Plan
from launcher.prepare import short
from launcher.run_dir import State, writing
from launcher.submit.slurm import (
    ASK_EVERY,
    Slurm,
    asks_to_cancel,
    has_ended,
    print_job,
    queue,
    say_job,
    settle_status,
)
from launcher.sweep.members import Member
from launcher.sweep.progress import following

SCRIPT, REPORT = "array.sbatch", "report.sbatch"
_OF_CLUSTER = ("nodes", "ranks_per_node", "device", "min_nodes")


@dataclass(frozen=True)
class Array:
    """The jobs of members, in their order."""

    job: str
    members: tuple[Member, ...]

    def job_of(self, member: Member) -> str:
        """Slurm's name for the job of one member."""
        return f"{self.job}_{self.members.index(member)}"


def check_array(members: Sequence[Member]) -> None:
    """That the members can be one array.

    Raises:
        ConfigError: some run elsewhere, or their scripts would differ.
    """
    queued = [one for one in members if one.is_queued]
    if queued and len(queued) < sum(one.drafted is not None for one in members):
        raise ConfigError("submit", "slurm", "all runs of a sweep start in one place: some of these are not for Slurm")
    planned = [one for one in queued if one.prepared is not None]
    scripts = [_backend(one).scripts.shared(_plan(one)) for one in planned]
    for other, script in zip(planned[1:], scripts[1:], strict=True):
        if script != scripts[0]:
            raise _difference(planned[0], other, scripts[0], script)


def _difference(first: Member, other: Member, *scripts: list[str]) -> LauncherError:
    """Why two members can't be one array: the key in which they differ, or the lines of their scripts."""
    lines = [", ".join(one for one in scripts[a] if one not in scripts[1 - a]) for a in (0, 1)]
    problem = f"{other.name} would have another batch script than {first.name}: {lines[1]} instead of {lines[0]}"
    hint = "runs of one array share a script; give these a sweep of their own"
    asked = [_asked(one) for one in (first, other)]
    for key, value in asked[1].items():
        if value != asked[0][key]:
            return ConfigError(key, value, problem, hint=hint)
    return LauncherError(f"{problem}\n  {hint}")


def _asked(member: Member) -> dict[str, Any]:
    """What a member's batch script follows from, by its keys."""
    assert member.drafted is not None
    config = member.drafted.config
    return {
        **{f"submit.slurm.{name}": value for name, value in vars(config.submit.slurm).items()},
        **{f"cluster.{name}": getattr(config.cluster, name) for name in _OF_CLUSTER},
        "checkpoint.stop_within": config.checkpoint.stop_within,
        "strategy": config.strategy.name,
    }


def submit_array(members: Sequence[Member], folder: Path, console: Console) -> Array:
    """Queues members whose folders are there. Raises LauncherError: Slurm refuses them."""
    first = members[0]
    logs = folder / "logs"
    with writing(logs):
        logs.mkdir(exist_ok=True)
    script = _backend(first).scripts.of_array(folder, [one.run for one in members], _plan(first))
    made = Array(queue(folder / SCRIPT, script), tuple(members))
    for one in members:
        say_job(one.run, made.job_of(one))
        one.state = State.submitted
    print_job(made.job, f", an array of {len(members)}", console)
    return made


def submit_report(array: Array, folder: Path, console: Console) -> None:
    """Queues the job that writes the sweep's report once all have ended, however they do. Raises LauncherError."""
    first = array.members[0]
    script = _backend(first).scripts.of_report(folder, _plan(first))
    after = (f"--dependency=afterany:{array.job}", "--kill-on-invalid-dep=yes")
    job = queue(folder / REPORT, script, *after)
    console.print(f"report  {short(folder)}/report.html, by job {job} once all have ended", highlight=False)


def wait_for(array: Array, console: Console, interrupted: Callable[[], bool], changed: Callable[[], None]) -> None:
    """Shows how far each member is and how it ends, until the user leaves; then the jobs run on, or are cancelled.

    Args:
        interrupted: whether the user wants to leave.
        changed: called when a member has ended.
    """
    left, is_cancelled = list(array.members), False
    with following(array.members, console) as view:
        while left:
            try:
                alive = slurm_job.living(array.job)
                for member in [one for one in left if array.job_of(one) not in alive]:
                    if has_ended(array.job_of(member)):
                        member.exit_code = settle_status(member.run, array.job_of(member))
                        member.take_end()
                        view.end(member)
                        changed()
                        left.remove(member)
                view.look(left)
                time.sleep(ASK_EVERY if left else 0)
                leaves = interrupted() and not is_cancelled
            except KeyboardInterrupt:
                leaves = True
            if leaves and left:
                view.pause()
                if not asks_to_cancel(array.job, console):
                    return
                is_cancelled = True
                view.go_on()


def _backend(member: Member) -> Slurm:
    assert member.prepared is not None
    backend = member.prepared.backend
    assert isinstance(backend, Slurm)
    return backend


def _plan(member: Member) -> Plan:
    assert member.prepared is not None
    return member.prepared.plan
