"""One node's ranks under torch's elastic agent.

The agent starts the ranks, ends the others when one fails, and says once which failed first and why. Its exit code is
the run's.
"""

import json
import os
import signal
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, launch_agent

from launcher.errors import Exit
from launcher.outcome import record, scratch
from launcher.plan.plan import Plan
from launcher.run_dir import RunDir, State

SHUTDOWN_SECONDS = 10
"""What ranks are given between SIGTERM and SIGKILL."""

_TORN = ("connection closed by peer", "connection reset by peer", "connect timeout", "broken pipe", "ncclremoteerror")


@dataclass(frozen=True)
class Failure:
    """The rank that failed first."""

    rank: int
    exit_code: int
    """The run's exit code that follows."""
    reason: str
    """A message, a traceback, or the signal that ended it."""


def run_node(run_dir: Path, task: str = "train") -> int:
    """Runs this node's ranks to their end. Returns the run's exit code. `task`: what they do, train or verify."""
    run = RunDir(run_dir)
    error: dict[str, Any] | None = None
    with scratch() as folder:
        try:
            plan = Plan.from_json(run.plan.read_text(encoding="utf-8"))
            for stale in run.logs.glob("error_*.json"):
                stale.unlink()
            worker = ["-m", "launcher.train.worker", str(run.path), task]
            launch_agent(_launch_config(plan), sys.executable, worker)
            state, code = State.finished, int(Exit.FINISHED)
        except ChildFailedError as failed:
            failure = first_failure(failed.failures, run.logs, folder)
            state, code = State.failed, failure.exit_code
            error = {"rank": failure.rank, "reason": failure.reason, "log": str(run.rank_log(failure.rank))}
        except SignalException as stop:
            state, code = State.cancelled, 128 + stop.sigval
        except OSError as problem:
            state, code, error = State.failed, int(Exit.RANK_FAILED), {"rank": None, "reason": str(problem)}
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_IGN)  # nothing is left to stop
    record(run, state=state, exit_code=code, error=error)
    return code


def _launch_config(plan: Plan) -> LaunchConfig:
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=plan.ranks_per_node,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=OwnLogs(),
        shutdown_timeout=SHUTDOWN_SECONDS,
    )


class OwnLogs(LogsSpecs):
    """Ranks open their own log files and leave their own word of an error, under any way of starting them."""

    @property
    def root_log_dir(self) -> str:
        return ""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        return LogsDest(
            stdouts=dict.fromkeys(envs, ""),
            stderrs=dict.fromkeys(envs, ""),
            error_files=dict.fromkeys(envs, os.devnull),
        )


def first_failure(failures: dict[int, ProcessFailure], *folders: Path) -> Failure:
    """Which rank failed first, and why, by the words that ranks have left in `folders`.

    A rank that was killed leaves no word, and its neighbours blame themselves for the torn connection: so a killed rank
    comes first, then words that are not about a torn connection, then the earliest.
    """
    words = [_read(path) for folder in folders for path in sorted(folder.glob("error_*.json"))]
    spoken = {word["rank"] for word in words}
    ended = sorted(failures.items(), key=lambda item: item[1].timestamp)
    for rank, one in ended:
        by_agent = one.exitcode in (-signal.SIGTERM, -signal.SIGINT)
        if one.exitcode < 0 and not by_agent and rank not in spoken:
            return Failure(rank, Exit.RANK_FAILED, _killed_by(-one.exitcode))
    if words:
        word = min(words, key=lambda word: (_is_torn(word["message"]), word["time"]))
        code = int(word["exit_code"])
        return Failure(int(word["rank"]), Exit.RANK_FAILED if code in (1, Exit.REFUSED) else code, str(word["message"]))
    rank, one = ended[0]
    reason = _killed_by(-one.exitcode) if one.exitcode < 0 else f"ended with {one.exitcode} and left no word"
    return Failure(rank, one.exitcode if one.exitcode > 1 else Exit.RANK_FAILED, reason)


def _killed_by(number: int) -> str:
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    hint = " (the system may have run out of memory: see dmesg)" if number == signal.SIGKILL else ""
    return f"killed by {name}{hint}"


def _read(path: Path) -> dict[str, Any]:
    word: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return word


def _is_torn(message: str) -> bool:
    return any(one in message.lower() for one in _TORN)
