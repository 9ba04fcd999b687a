"""Ranks on this machine, under one elastic agent."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from launcher.config.schema import Config
from launcher.errors import ConfigError, Exit, LauncherError
from launcher.lock import holding
from launcher.observe.progress import follow
from launcher.outcome import LISTENER, RENDEZVOUS, SCRATCH, choose_scratch, of_stop, record, take_left
from launcher.plan.mesh import available_cores, least_nodes
from launcher.plan.plan import Plan
from launcher.process import PARENT, STOP_SIGNALS
from launcher.run_dir import RunDir, State, writing
from launcher.submit.base import Launch, node_argv, node_environment

TOO_FEW_FOR = 60.0
"""Seconds with too few agents after which those that are left are waiting in vain."""
OTHERS_WITHIN = 15.0
"""Seconds that other nodes are given to end once the first one has."""


@dataclass(frozen=True)
class Node:
    """A node that was started."""

    agent: "subprocess.Popen[bytes]"
    log: Path


class Local:
    """This machine, where a run of several nodes has all of them."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def render(self, run: RunDir, plan: Plan) -> Launch:
        if plan.nodes > 1 and plan.device == "cuda":
            problem = "submit=local starts them all on this machine, where their ranks would share its GPUs"
            raise ConfigError("cluster.nodes", plan.nodes, problem, hint="cluster.nodes=1")
        argv = [node_argv(run.path, node) for node in range(plan.nodes)]
        return Launch(argv, node_environment(plan, plan.world_size, available_cores()))

    def submit(self, run: RunDir, plan: Plan, launch: Launch, console: Console, *, live: bool) -> int:
        with holding(run), SignalsPassedOn() as signals, ExitStack() as stack:
            nodes: list[Node] = []
            for start in _starts(run, plan, launch):
                nodes.append(stack.enter_context(start))
                signals.to(nodes[-1].agent)
            first = nodes[0].agent
            others = {f"agent_{number}": one.agent.pid for number, one in enumerate(nodes[1:], 1)}
            pids = {"launcher": os.getpid(), "agent": first.pid, **others}
            run.write_status(state=State.submitted, pids=pids, exit_code=None, error=None)
            meets = Meets([one.agent for one in nodes], least_nodes(self._config.cluster, self._config.submit))
            follow(run.path, lambda: first.poll() is None and meets.can(), live=live, console=console)
            if not meets.can():
                return _never_met(run, nodes)
            code = first.wait()
            for other in nodes[1:]:
                with suppress(subprocess.TimeoutExpired):
                    other.agent.wait(OTHERS_WITHIN)
        return _outcome(run, code, nodes[0].log, signals)


class Meets:
    """Whether enough of the agents live for them to meet: the first one waits for those that have ended before."""

    def __init__(self, agents: "list[subprocess.Popen[bytes]]", least: int) -> None:
        self._agents, self._least = agents, least
        self._since: float | None = None

    def can(self) -> bool:
        """False once too few have lived for longer than a run needs to see that for itself."""
        if sum(agent.poll() is None for agent in self._agents) >= self._least:
            self._since = None
            return True
        now = time.monotonic()
        self._since = self._since or now
        return now - self._since < TOO_FEW_FOR or self._agents[0].poll() is not None


def _never_met(run: RunDir, nodes: list[Node]) -> int:
    """Ends a run whose nodes can't meet any more. Returns its exit code."""
    ended = [(number, one.agent.poll()) for number, one in enumerate(nodes) if one.agent.poll() is not None]
    said = ", ".join(f"that of node {number} with {code}: see {nodes[number].log}" for number, code in ended)
    nodes[0].agent.kill()
    nodes[0].agent.wait()
    reason = f"agents have ended before all had met: {said}"
    record(run, state=State.failed, exit_code=Exit.RANK_FAILED, error={"rank": None, "reason": reason})
    return int(Exit.RANK_FAILED)


def _starts(run: RunDir, plan: Plan, launch: Launch) -> Iterator[AbstractContextManager[Node]]:
    """Each node, to be started; all have one place to meet."""
    environment = {**os.environ, **launch.environment, PARENT: str(os.getpid())}
    passed: tuple[int, ...] = ()
    if len(launch.argv) > 1:  # listens already, so that nobody takes the port in between
        listener = socket.create_server(("127.0.0.1", 0))
        environment[RENDEZVOUS] = f"localhost:{listener.getsockname()[1]}"
        passed = (listener.fileno(),)
    for number, argv in enumerate(launch.argv):
        log = run.logs / ("agent.log" if number == 0 else f"agent_{number}.log")
        own = {LISTENER: str(passed[0])} if passed else {}
        yield _node(run, log, argv, {**environment, **own}, plan.cwd, passed)
        if passed:
            listener.close()  # the first node's alone
            passed = ()


@contextmanager
def _node(
    run: RunDir, log: Path, argv: list[str], environment: dict[str, str], cwd: str, passed: tuple[int, ...]
) -> Iterator[Node]:
    """A node that has started. At the end it is ended, and what is left of it is taken over."""
    scratch = choose_scratch()
    with writing(log), open(log, "ab") as output:
        agent = subprocess.Popen(
            argv,
            env={**environment, SCRATCH: str(scratch)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=cwd,
            pass_fds=passed,
            # Ctrl-C in a terminal reaches the launcher alone, which passes it on once
            start_new_session=True,
        )
    try:
        yield Node(agent, log)
    finally:
        if agent.poll() is None:
            agent.kill()
            agent.wait()
        take_left(scratch, run)


def _outcome(run: RunDir, code: int, log: Path, signals: "SignalsPassedOn") -> int:
    try:
        said = run.read_status()["exit_code"]
    except LauncherError:
        said = None
    if said is not None:
        return int(said)
    if signals.first is not None:  # before the agent could take the signal, or at once by a second one
        state, code = of_stop(run, signals.first)
        code = 128 + signals.first if signals.at_once else code
        record(run, state=state, exit_code=code)
        return code
    if not run.plan.is_file():
        record(run, state=State.failed, exit_code=Exit.RANK_FAILED, error={"rank": None, "reason": _gone(run)})
        return Exit.RANK_FAILED
    # the agent itself was ended, or failed before it could say why
    code = 128 - code if code < 0 else code if code > 1 else int(Exit.RANK_FAILED)
    tail = "\n".join(_text(log).strip().splitlines()[-20:])
    reason = f"the agent ended with {code}" + (f":\n{tail}" if tail else "")
    record(run, state=State.failed, exit_code=code, error={"rank": None, "reason": reason})
    return code


def _gone(run: RunDir) -> str:
    return f"{run.path}: the run's folder has vanished"


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


class SignalsPassedOn:
    """While inside, what asks this process to stop goes on to the agents; the second time it kills them, and so all."""

    def __init__(self) -> None:
        self._agents: list[subprocess.Popen[bytes]] = []
        self._seen: list[int] = []
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "SignalsPassedOn":
        for number in STOP_SIGNALS:
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # nohup: the run outlives its terminal
            self._before[number] = signal.signal(number, self._pass)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def first(self) -> int | None:
        """The first signal that came, or None."""
        return self._seen[0] if self._seen else None

    @property
    def at_once(self) -> bool:
        """Whether a second one came."""
        return len(self._seen) > 1

    def to(self, agent: "subprocess.Popen[bytes]") -> None:
        """Names a process that signals go to, and passes on what came before it was there."""
        self._agents.append(agent)
        for number in self._seen[:1]:
            agent.send_signal(number)

    def _pass(self, number: int, _frame: FrameType | None) -> None:
        self._seen.append(number)
        for agent in self._agents:
            if agent.poll() is None:
                agent.send_signal(number if len(self._seen) == 1 else signal.SIGKILL)
