"""One node's ranks under torch's elastic agent.

The agent starts the ranks, starts them again where one was lost, ends the others when one fails, and says once which
failed first and why. Its exit code is the run's.
"""

import os
import signal
import sys
import uuid
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed.elastic.rendezvous.registry as rendezvous
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.launcher.api import LaunchConfig

from launcher.checkpoints import completed
from launcher.config.validate import load
from launcher.errors import Exit, LauncherError
from launcher.outcome import of_stop, record, scratch
from launcher.plan.plan import Plan
from launcher.process import STOP_SIGNALS
from launcher.run_dir import RunDir, State
from launcher.train import stopping
from launcher.train.failures import Failure
from launcher.train.hangs import recorder_environment
from launcher.train.supervisor import Limits, Supervisor, limits

RENDEZVOUS_SECONDS = 900
"""How long a node waits for the others, and for its own store."""
AT_ONCE = Limits(stop_within=0, time_limit=None, hang_after=None, max_restarts=0)
"""Of ranks that leave nothing to go on from."""

Outcome = tuple[State, int, dict[str, Any] | None]
"""State, exit code and error of a run."""


def run_node(run_dir: Path, task: str, started: float) -> int:
    """Runs this node's ranks to their end. Returns the run's exit code.

    Args:
        task: what they do, train or verify.
        started: when this node was started, by `time.monotonic`.
    """
    run = RunDir(run_dir)
    with scratch() as folder:
        _take_signals(folder)
        state, code, error = _run(run, task, folder, started)
        for number in (*STOP_SIGNALS, signal.SIGQUIT):
            signal.signal(number, signal.SIG_IGN)  # nothing is left to stop
    record(run, state=state, exit_code=code, error=error)
    return code


def _run(run: RunDir, task: str, folder: Path, started: float) -> Outcome:
    try:
        plan = Plan.from_json(run.plan.read_text(encoding="utf-8"))
        allowed = limits(load(run.config)) if task == "train" else AT_ONCE
        if plan.device == "cuda":
            for name, value in recorder_environment(folder, run.logs).items():
                os.environ.setdefault(name, value)
        spec = _spec(plan, [str(run.path), task], allowed.max_restarts)
        supervisor = Supervisor(spec, OwnLogs(), run, folder, allowed, started)
        try:
            result = supervisor.run()
        finally:
            spec.rdzv_handler.shutdown()
    except SignalException as stop:  # SIGQUIT, which is at once
        return *of_stop(run, stop.sigval), None
    except (OSError, LauncherError) as problem:
        return State.failed, int(Exit.RANK_FAILED), {"rank": None, "reason": str(problem)}
    if not result.is_failed():
        return _ended(run, folder, supervisor)
    if supervisor.stop is not None and (supervisor.failure is None or supervisor.failure.is_lost):
        return _broken_off(run, supervisor, allowed)
    assert supervisor.failure is not None
    return State.failed, supervisor.failure.exit_code, _error(run, supervisor.failure, allowed)


def _ended(run: RunDir, folder: Path, supervisor: Supervisor) -> Outcome:
    """Every rank has ended well: finished or stopped."""
    if not stopping.has_mark(folder):
        return State.finished, int(Exit.FINISHED), None
    # a rank may have been asked that couldn't pass it on
    state, code = of_stop(run, stopping.number_of(supervisor.stop or "SIGTERM"))
    error = None if state is State.stopped else {"rank": None, "reason": "no checkpoint could be saved: see its logs"}
    return state, code, error


def _broken_off(run: RunDir, supervisor: Supervisor, allowed: Limits) -> Outcome:
    """The ranks were ended, or one was lost, before they had stopped."""
    assert supervisor.stop is not None
    state, code = of_stop(run, stopping.number_of(supervisor.stop))
    failure = supervisor.failure
    if supervisor.is_overdue and allowed.stop_within:
        what = f"finishing the window and saving took longer than checkpoint.stop_within={allowed.stop_within:g} s"
    elif failure is not None and failure.signal not in STOP_SIGNALS:
        what = f"rank {failure.rank} {failure.how} while the run was stopping"
    else:
        return state, code, None
    newest = completed(run)
    then = f"the run will go on from update {newest[0].update}" if newest else "there is no checkpoint to go on from"
    return state, code, {"rank": None, "reason": f"{what}; {then}"}


def _error(run: RunDir, failure: Failure, allowed: Limits) -> dict[str, Any]:
    reason = failure.reason
    if failure.is_lost and allowed.needs_checkpoint and not completed(run):
        reason += "\nit wasn't started again, for there is no checkpoint yet (training.max_restarts=auto)"
    elif failure.is_lost and allowed.max_restarts:
        reason += f"\ntraining.max_restarts={allowed.max_restarts} is used up"
    return {"rank": failure.rank, "reason": reason, "log": str(run.rank_log(failure.rank))}


def _take_signals(folder: Path) -> None:
    """From now on a signal that asks this process to stop is a wish to all its ranks."""

    def note(number: int, _frame: FrameType | None) -> None:
        stopping.ask(folder, signal.Signals(number).name)

    for number in STOP_SIGNALS:
        signal.signal(number, note)
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"  # the only one left to torch's agent, which takes one


def _spec(plan: Plan, arguments: list[str], max_restarts: int) -> WorkerSpec:
    """What torch's `launch_agent` makes of a configuration, for an agent of our own."""
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # ranks started again would meet the old store
    config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=plan.ranks_per_node, logs_specs=OwnLogs())
    parameters = RendezvousParameters(
        backend="c10d",
        endpoint="localhost:0",
        run_id=uuid.uuid4().hex,
        min_nodes=1,
        max_nodes=1,
        local_addr="localhost",
        timeout=RENDEZVOUS_SECONDS,
    )
    return WorkerSpec(
        role=config.role,
        local_world_size=plan.ranks_per_node,
        entrypoint=sys.executable,
        args=("-m", "launcher.train.worker", *arguments),
        rdzv_handler=rendezvous.get_rendezvous_handler(parameters),
        max_restarts=max_restarts,
        monitor_interval=0.1,
        local_addr="localhost",
        numa_options=config.numa_options,
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
