"""One node's ranks under torch's elastic agent.

The agent starts the ranks, starts them again where one was lost, ends the others when one fails, and says once which
failed first and why. Its exit code is the run's.
"""

import os
import signal
import sys
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousError, RendezvousHandler
from torch.distributed.launcher.api import LaunchConfig

from launcher.checkpoints import completed
from launcher.config.schema import Config
from launcher.config.times import seconds
from launcher.config.validate import load
from launcher.errors import Exit, LauncherError
from launcher.outcome import of_stop, record, scratch
from launcher.plan.batch import parse_count
from launcher.plan.plan import Plan
from launcher.plan.targets import spent
from launcher.process import STOP_SIGNALS
from launcher.run_dir import RunDir, State
from launcher.train import stopping
from launcher.train.budget import Budget, counting
from launcher.train.failures import Failure
from launcher.train.hangs import recorder_environment
from launcher.train.meeting import JOIN_SECONDS, Handler, Meeting
from launcher.train.supervisor import Limits, Supervisor, limits

AT_ONCE = Limits(stop_within=0, time_limit=None, hang_after=None, max_restarts=0)
"""Of ranks that leave nothing to go on from."""

Outcome = tuple[State, int, dict[str, Any] | None]
"""State, exit code and error of a run."""


def run_node(run_dir: Path, task: str, meeting: Meeting, started: float) -> int:
    """Runs this node's ranks to their end. Returns the run's exit code.

    Args:
        task: what they do, train or verify.
        meeting: where it meets the other nodes, and which it is: the first writes how the run has ended.
        started: when this node was started, by `time.monotonic`.
    """
    run = RunDir(run_dir)
    with scratch() as folder:
        of_task = _train if task == "train" else _run
        state, code, error = of_task(run, task, meeting, folder, started)
        for number in (*STOP_SIGNALS, signal.SIGQUIT):
            signal.signal(number, signal.SIG_IGN)  # nothing is left to stop
    if meeting.node == 0:
        record(run, state=state, exit_code=code, error=error)
    elif error is not None:
        print(error["reason"], file=sys.stderr, flush=True)
    return code


def _train(run: RunDir, task: str, meeting: Meeting, folder: Path, started: float) -> Outcome:
    """As `_run`, with device-hours counted by the first node. Where they were used up before it, no rank starts."""
    hours = None
    with suppress(OSError, LauncherError):  # which is said where the run's files are read again
        hours = load(run.config).targets.device_hours
    if spent(run, hours) is not None:
        return _out_of_hours(run, hours)
    with counting(Budget(run, folder, hours, started)) if meeting.node == 0 else nullcontext():
        return _run(run, task, meeting, folder, started)


def _run(run: RunDir, task: str, meeting: Meeting, folder: Path, started: float) -> Outcome:
    try:
        plan, config = Plan.from_json(run.plan.read_text(encoding="utf-8")), load(run.config)
        allowed = limits(config) if task == "train" else replace(AT_ONCE, min_nodes=plan.nodes)
        if plan.device == "cuda":
            for name, value in recorder_environment(folder, run.logs).items():
                os.environ.setdefault(name, value)
        spec = _spec(plan, [str(run.path), task], config, meeting, allowed)
        supervisor = Supervisor(spec, OwnLogs(), run, meeting.node, folder, allowed, started)
        _take_signals(folder, supervisor)
        result = _run_ranks(supervisor, spec.rdzv_handler)
    except SignalException as stop:  # SIGQUIT, which is at once, or one that came while there were no ranks
        return *of_stop(run, stop.sigval), None
    except RendezvousClosedError:  # a node that was told to stop, or has failed, while all met
        return *of_stop(run, signal.SIGTERM), {"rank": None, "reason": "another node has left while the nodes met"}
    except RendezvousError as problem:
        reason = f"not enough nodes came within {JOIN_SECONDS} s: {problem}"
        return State.failed, int(Exit.RANK_FAILED), {"rank": None, "reason": reason}
    except (OSError, LauncherError) as problem:
        return State.failed, int(Exit.RANK_FAILED), {"rank": None, "reason": str(problem)}
    if not result.is_failed():
        return _ended(run, config, folder, supervisor)
    if supervisor.stop is not None and (supervisor.failure is None or supervisor.failure.is_lost):
        return _broken_off(run, supervisor, allowed)
    assert supervisor.failure is not None
    return State.failed, supervisor.failure.exit_code, _error(run, supervisor.failure, allowed)


def _run_ranks(supervisor: Supervisor, handler: RendezvousHandler) -> RunResult:
    """This node's ranks, to their end.

    The first node, and one that is told to stop while all meet, end the run for all. Any other may fail or give up, and
    those who stay meet again.
    """
    assert isinstance(handler, Handler)
    ends_it = supervisor.is_first
    try:
        result: RunResult = supervisor.run()
        return result
    except SignalException:
        ends_it = True
        raise
    finally:
        if ends_it:
            handler.shutdown()
        else:
            handler.leave()


def _ended(run: RunDir, config: Config, folder: Path, supervisor: Supervisor) -> Outcome:
    """Every rank has ended well: finished or stopped."""
    if not stopping.has_mark(folder):
        return State.finished, int(Exit.FINISHED), None
    if supervisor.stop == stopping.DEVICE_HOURS:
        return _out_of_hours(run, config.targets.device_hours)
    # a rank may have been asked that couldn't pass it on
    state, code = of_stop(run, stopping.number_of(supervisor.stop or "SIGTERM"))
    error = None if state is State.stopped else {"rank": None, "reason": "no checkpoint could be saved: see its logs"}
    return state, code, error


def _out_of_hours(run: RunDir, hours: float | None) -> Outcome:
    """The run may use its devices no longer."""
    state, code = of_stop(run, stopping.number_of(stopping.DEVICE_HOURS))
    reason = f"{stopping.DEVICE_HOURS}={hours:g} is used up; with more the run goes on"
    return state, code, {"rank": None, "reason": reason}


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


def _take_signals(folder: Path, supervisor: Supervisor) -> None:
    """From now on a signal that asks this process to stop is a wish to all its ranks, if it has any."""

    def note(number: int, _frame: FrameType | None) -> None:
        stopping.ask(folder, signal.Signals(number).name)
        if supervisor.waits_for_nodes:
            raise SignalException("told to stop while the nodes met", signal.Signals(number))

    for number in STOP_SIGNALS:
        signal.signal(number, note)
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"  # the only one left to torch's agent, which takes one


def _spec(plan: Plan, arguments: list[str], config: Config, meeting: Meeting, allowed: Limits) -> WorkerSpec:
    """What torch's `launch_agent` makes of a configuration, for an agent of our own. Raises LauncherError."""
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # ranks started again would meet the old store
    nodes = parse_count("cluster.nodes", config.cluster.nodes)
    launch = LaunchConfig(nodes, nodes, nproc_per_node=plan.ranks_per_node, logs_specs=OwnLogs())
    last_call = seconds(config.cluster.wait_for_nodes, "cluster.wait_for_nodes")
    return WorkerSpec(
        role=launch.role,
        local_world_size=plan.ranks_per_node,
        entrypoint=sys.executable,
        args=("-m", "launcher.train.worker", *arguments),
        rdzv_handler=meeting.handler(allowed.min_nodes, nodes, last_call),
        max_restarts=allowed.max_restarts,
        monitor_interval=0.1,
        local_addr=meeting.local_addr,
        numa_options=launch.numa_options,
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
