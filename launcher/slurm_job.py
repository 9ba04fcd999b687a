"""What Slurm says of a job, asked in the order in which it knows: the queue, the controller's memory, accounting."""

import os
import re
import shutil
import subprocess
from dataclasses import dataclass

ANSWER_WITHIN = 20.0
"""Seconds that an answer is waited for."""
KNOWN_BY = "SLURM_CONF"
"""The only variable of Slurm's that a command given inside a job hands on."""
IN_JOB = "LAUNCHER_IN_JOB"
"""Set where the ranks start in the job that is around the command, as slurm/train.sbatch does: nothing is queued. Empty
or 0 is as if it weren't."""

_ENDED = frozenset(
    (
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "REVOKED",
        "TIMEOUT",
    )
)


@dataclass(frozen=True)
class Job:
    """Where a job stands."""

    id: str
    state: str
    """Slurm's word: PENDING, RUNNING, COMPLETED, …"""
    reason: str = ""
    """Why it waits."""
    exit_code: int | None = None

    @property
    def has_ended(self) -> bool:
        return self.state in _ENDED


def environment() -> dict[str, str]:
    """This environment without what a job around this process has set: a job of its own must not inherit it."""
    inherited = ("SLURM_", "SBATCH_", "SRUN_")
    return {name: value for name, value in os.environ.items() if name == KNOWN_BY or not name.startswith(inherited)}


def around() -> str | None:
    """The job around this command in which its ranks start; None: they don't."""
    return os.environ.get("SLURM_JOB_ID", "") if os.environ.get(IN_JOB, "0") not in ("", "0") else None


def starts_before() -> int:
    """How often the job around this process had been queued again."""
    return int(os.environ.get("SLURM_RESTART_COUNT") or 0)


def is_there() -> bool:
    """Whether this machine has Slurm's commands."""
    return shutil.which("sbatch") is not None


def look_up(job: str) -> Job | None:
    """Where a job stands; None: nobody knows it, or Slurm doesn't answer here."""
    return _of_queue(job) or _of_controller(job) or _of_accounting(job)


def living(job: str) -> set[str]:
    """Of a job those that wait or run, by one question: itself, or the members of an array as JOB_INDEX."""
    return set(_ask("squeue", "--noheader", "--array", "--jobs", job, "--format", "%i").split())


def cancel(job: str) -> None:
    """Asks Slurm to end a job, or all of an array; its runs save."""
    _ask("scancel", job)


def _ask(*argv: str) -> str:
    try:
        done = subprocess.run(
            argv, env=environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=ANSWER_WITHIN
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _of_queue(job: str) -> Job | None:
    state, _, reason = _ask("squeue", "--noheader", "--jobs", job, "--format", "%T %r").partition(" ")
    return Job(job, state, "" if reason == "None" else reason) if state else None


def _of_controller(job: str) -> Job | None:
    said = _ask("scontrol", "--oneliner", "show", "job", job)
    state, code = re.search(r"\bJobState=(\S+)", said), re.search(r"\bExitCode=(\d+):(\d+)", said)
    if state is None:
        return None
    return Job(job, state[1], exit_code=None if code is None else _code(int(code[1]), int(code[2])))


def _of_accounting(job: str) -> Job | None:
    said = _ask("sacct", "--noheader", "--parsable2", "--allocations", "--jobs", job, "--format", "State,ExitCode")
    state, _, codes = said.partition("|")
    code, _, number = codes.partition(":")
    if not state:
        return None
    is_known = code.isdecimal() and number.isdecimal()
    return Job(job, state.split()[0], exit_code=_code(int(code), int(number)) if is_known else None)


def _code(code: int, number: int) -> int:
    return 128 + number if number else code
