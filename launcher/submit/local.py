"""Ranks on this machine, under one elastic agent."""

import os
import signal
import subprocess
from types import FrameType

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
        with open(log, "ab") as output:
            agent = subprocess.Popen(
                launch.argv[0],
                env={**os.environ, **launch.environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=plan.cwd,
                # Ctrl-C in a terminal reaches the launcher alone, which passes it on once
                start_new_session=True,
            )
        run.write_status(state=State.submitted, pids={"launcher": os.getpid(), "agent": agent.pid})
        with _passing_signals_to(agent):
            follow(run.path, lambda: agent.poll() is None, live=live, console=console)
            code = agent.wait()
        return _outcome(run, code, log.read_text(encoding="utf-8", errors="replace"))


def _outcome(run: RunDir, code: int, agent_log: str) -> int:
    status = run.read_status()
    if status["exit_code"] is None:  # the agent itself was ended, or failed before it could say why
        code = 128 - code if code < 0 else code or 3
        tail = "\n".join(agent_log.strip().splitlines()[-20:])
        reason = f"the agent ended with {code}" + (f":\n{tail}" if tail else "")
        run.write_status(state=State.failed, exit_code=code, error={"rank": None, "reason": reason})
        return code
    return int(status["exit_code"])


class _passing_signals_to:  # noqa: N801 — used as a context manager, named for how it reads
    """While inside, SIGINT and SIGTERM of this process go on to `agent` as SIGTERM; a second one kills it."""

    def __init__(self, agent: "subprocess.Popen[bytes]") -> None:
        self._agent = agent
        self._seen = 0
        self._before: dict[int, object] = {}

    def __enter__(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._before[number] = signal.signal(number, self._pass)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _pass(self, number: int, _frame: FrameType | None) -> None:
        self._seen += 1
        if self._agent.poll() is None:
            self._agent.send_signal(number if self._seen == 1 else signal.SIGKILL)
