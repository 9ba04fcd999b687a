"""One node's ranks under torch's elastic agent.

The agent starts the ranks, starts them again where one was lost, ends the others when one fails, and says once which
failed first and why. Its exit code is the run's.
"""

import os
import signal
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import FrameType

from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousError, RendezvousHandler
from torch.distributed.launcher.api import LaunchConfig

from launcher.config.schema import Config
from launcher.config.times import seconds
from launcher.config.validate import load
from launcher.errors import Exit, LauncherError
from launcher.outcome import of_stop, record, scratch
from launcher.plan.mesh import asked_nodes
from launcher.plan.plan import Plan
from launcher.plan.targets import spent
from launcher.process import STOP_SIGNALS
from launcher.run_dir import RunDir, State
from launcher.train import heart, stopping
from launcher.train.budget import Budget, counting
from launcher.train.ends import End, Outcome, out_of_hours, outcome
from launcher.train.hangs import recorder_environment
from launcher.train.limits import Limits, limits
from launcher.train.meeting import JOIN_SECONDS, Handler, Meeting
from launcher.train.supervisor import Supervisor

AT_ONCE = Limits(stop_within=0, time_limit=None, hang_after=None, max_restarts=0)
"""Of ranks that leave nothing to go on from."""


def run_node(run_dir: Path, task: str, meeting: Meeting, started: float) -> int:
    """Runs this node's ranks to their end. Returns the run's exit code.

    Args:
        task: what they do, train or verify.
        meeting: where it meets the other nodes, and which it is: the first writes how the run has ended.
        started: when this node was started, by `time.monotonic`.
    """
    run = RunDir(run_dir)
    with scratch() as folder:
        state, code, error = _run(run, task, meeting, folder, started)
        for number in (*STOP_SIGNALS, signal.SIGQUIT):
            signal.signal(number, signal.SIG_IGN)  # nothing is left to stop
    if meeting.node == 0:
        record(run, state=state, exit_code=code, error=error)
    elif error is not None:
        print(error["reason"], file=sys.stderr, flush=True)
    return code


def _run(run: RunDir, task: str, meeting: Meeting, folder: Path, started: float) -> Outcome:
    try:
        plan, config = Plan.from_json(run.plan.read_text(encoding="utf-8")), load(run.config)
        allowed = limits(config) if task == "train" else replace(AT_ONCE, min_nodes=plan.nodes)
        if spent(run, allowed.device_hours) is not None:
            return out_of_hours(run, allowed.device_hours)
        if plan.device == "cuda":
            for name, value in recorder_environment(folder, run.logs).items():
                os.environ.setdefault(name, value)
        spec = _spec(plan, [str(run.path), task], config, meeting, allowed)
        supervisor = Supervisor(spec, OwnLogs(), run, meeting.node, folder, allowed, started)
        _take_signals(folder, supervisor)
        budget = Budget(run, folder, allowed.device_hours, started, lambda: heart.is_there(folder))
        with counting(budget) if task == "train" and meeting.node == 0 else nullcontext():
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
    end = End(result.is_failed(), supervisor.stop, supervisor.failure, supervisor.is_overdue)
    return outcome(run, folder, end, allowed)


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
    nodes = asked_nodes(config.cluster, config.submit)
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
