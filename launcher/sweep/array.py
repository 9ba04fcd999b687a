"""The runs of a sweep as one array of Slurm: what is left is queued at once, and a last job writes the report."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

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
        ConfigError: some run elsewhere, or they ask for different things.
    """
    queued = [one for one in members if one.is_queued]
    if queued and len(queued) < sum(one.drafted is not None for one in members):
        raise ConfigError("submit", "slurm", "all runs of a sweep start in one place: some of these are not for Slurm")
    planned = [one for one in queued if one.prepared is not None]
    for other in planned[1:]:
        asked = [set(_backend(one).scripts.options(_plan(one))) for one in (planned[0], other)]
        if asked[0] != asked[1]:
            differing = ", ".join(sorted(asked[0] ^ asked[1]))
            text = f"{other.name} asks Slurm for other things than {planned[0].name}: {differing}"
            raise LauncherError(f"{text}\n  runs of one array ask for the same; give these a sweep of their own")


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
