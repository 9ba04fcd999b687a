"""Ranks on this machine, under one elastic agent."""

import os
import signal
import subprocess
from types import FrameType
from typing import Any

from rich.console import Console

from launcher.observe.progress import follow
from launcher.plan.plan import Plan
from launcher.run_dir import RunDir, State
from launcher.submit.base import Launch, node_argv, node_environment


class Local:
    """This machine."""

    def render(self, run: RunDir, plan: Plan) -> Launch:
        return Launch([node_argv(run.path)], node_environment(plan))

    def submit(self, run: RunDir, plan: Plan, launch: Launch, console: Console, *, live: bool) -> int:
        log = run.logs / "agent.log"
        with SignalsPassedOn() as signals:
            with open(log, "ab") as output:
                agent = subprocess.Popen(
                    launch.argv[0],
                    env={**os.environ, **launch.environment, "LAUNCHER_PARENT_PID": str(os.getpid())},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    cwd=plan.cwd,
                    # Ctrl-C in a terminal reaches the launcher alone, which passes it on once
                    start_new_session=True,
                )
            signals.to(agent)
            run.write_status(state=State.submitted, pids={"launcher": os.getpid(), "agent": agent.pid})
            follow(run.path, lambda: agent.poll() is None, live=live, console=console)
            code = agent.wait()
        return _outcome(run, code, log.read_text(encoding="utf-8", errors="replace"), signals.first)


def _outcome(run: RunDir, code: int, agent_log: str, stopped_by: int | None) -> int:
    status = run.read_status()
    if status["exit_code"] is None and stopped_by is not None:  # before the agent could take the signal
        run.write_status(state=State.cancelled, exit_code=128 + stopped_by)
        return 128 + stopped_by
    if status["exit_code"] is None:  # the agent itself was ended, or failed before it could say why
        code = 128 - code if code < 0 else code or 3
        tail = "\n".join(agent_log.strip().splitlines()[-20:])
        reason = f"the agent ended with {code}" + (f":\n{tail}" if tail else "")
        run.write_status(state=State.failed, exit_code=code, error={"rank": None, "reason": reason})
        return code
    return int(status["exit_code"])


class SignalsPassedOn:
    """While inside, SIGINT, SIGTERM and SIGHUP of this process go on to the agent; the second one kills it."""

    def __init__(self) -> None:
        self._agent: subprocess.Popen[bytes] | None = None
        self._seen: list[int] = []
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "SignalsPassedOn":
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
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

    def to(self, agent: "subprocess.Popen[bytes]") -> None:
        """Names the process that signals go to, and passes on what came before it was there."""
        self._agent = agent
        for number in self._seen[:1]:
            agent.send_signal(number)

    def _pass(self, number: int, _frame: FrameType | None) -> None:
        self._seen.append(number)
        if self._agent is not None and self._agent.poll() is None:
            self._agent.send_signal(number if len(self._seen) == 1 else signal.SIGKILL)
