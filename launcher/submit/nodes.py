"""The nodes of a run that this process looks after, each a process or a container: followed to their end."""

import os
import signal
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import TimeoutExpired
from types import FrameType
from typing import Any, Protocol

from rich.console import Console

from launcher.errors import Exit, LauncherError
from launcher.observe.progress import follow
from launcher.outcome import of_stop, record
from launcher.process import STOP_SIGNALS
from launcher.run_dir import RunDir, State

TOO_FEW_FOR = 60.0
"""Seconds with too few agents after which those that are left are waiting in vain."""
OTHERS_WITHIN = 15.0
"""Seconds that other nodes are given to end once the first one has."""


class Agent(Protocol):
    """What runs a node's ranks, as `subprocess.Popen` has it."""

    pid: int

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int) -> None: ...
    def kill(self) -> None: ...
    def how(self, code: int) -> str:
        """How it has ended, in words; `code`: its exit code."""
        ...


@dataclass(frozen=True)
class Node:
    """A node that was started."""

    agent: Agent
    log: Path


def log_of(run: RunDir, node: int) -> Path:
    """Where the output of a node's agent goes."""
    return run.logs / ("agent.log" if node == 0 else f"agent_{node}.log")


def run_nodes(
    run: RunDir,
    starts: Iterable[AbstractContextManager[Node]],
    least: int,
    signals: "SignalsPassedOn",
    console: Console,
    *,
    live: bool,
) -> int:
    """Starts nodes and follows them to their end. Returns the run's exit code, which stands in its status too.

    Args:
        starts: each node, to be started; one that is left is ended with all it has.
        least: the nodes without which the run doesn't go on.
        signals: what asks this process to stop; the nodes are told.
    """
    with ExitStack() as stack:
        nodes: list[Node] = []
        for start in starts:
            nodes.append(stack.enter_context(start))
            signals.to(nodes[-1].agent)
        first = nodes[0].agent
        others = {f"agent_{number}": one.agent.pid for number, one in enumerate(nodes[1:], 1)}
        pids = {"launcher": os.getpid(), "agent": first.pid, **others}
        run.write_status(state=State.submitted, pids=pids, exit_code=None, error=None)
        meets = Meets([one.agent for one in nodes], least)
        follow(run.path, lambda: first.poll() is None and meets.can(), live=live, console=console)
        if not meets.can():
            return _never_met(run, nodes)
        code = first.wait()
        for other in nodes[1:]:
            with suppress(TimeoutExpired):
                other.agent.wait(OTHERS_WITHIN)
        how = first.how(code)
    return _outcome(run, code, how, nodes[0].log, signals)


class Meets:
    """Whether enough of the agents live for them to meet: the first one waits for those that have ended before."""

    def __init__(self, agents: list[Agent], least: int) -> None:
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


def _outcome(run: RunDir, code: int, how: str, log: Path, signals: "SignalsPassedOn") -> int:
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
    reason = how + (f":\n{tail}" if tail else "")
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
        self._agents: list[Agent] = []
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

    def to(self, agent: Agent) -> None:
        """Names an agent that signals go to, and passes on what came before it was there."""
        self._agents.append(agent)
        for number in self._seen[:1]:
            agent.send_signal(number)

    def _pass(self, number: int, _frame: FrameType | None) -> None:
        self._seen.append(number)
        for agent in self._agents:
            if agent.poll() is None:
                if len(self._seen) == 1:
                    agent.send_signal(number)
                else:
                    agent.kill()
