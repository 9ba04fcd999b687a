"""Ranks on this machine, under one elastic agent."""

import os
import signal
import subprocess
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from launcher.errors import Exit, LauncherError
from launcher.lock import holding
from launcher.observe.progress import follow
from launcher.outcome import SCRATCH, choose_scratch, of_stop, record, take_left
from launcher.plan.plan import Plan
from launcher.process import PARENT, STOP_SIGNALS
from launcher.run_dir import RunDir, State, writing
from launcher.submit.base import Launch, node_argv, node_environment


class Local:
    """This machine."""

    def render(self, run: RunDir, plan: Plan) -> Launch:
        return Launch([node_argv(run.path)], node_environment(plan))

    def submit(self, run: RunDir, plan: Plan, launch: Launch, console: Console, *, live: bool) -> int:
        log = run.logs / "agent.log"
        scratch = choose_scratch()
        own = {PARENT: str(os.getpid()), SCRATCH: str(scratch)}
        with holding(run), SignalsPassedOn() as signals:
            with writing(log), open(log, "ab") as output:
                agent = subprocess.Popen(
                    launch.argv[0],
                    env={**os.environ, **launch.environment, **own},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    cwd=plan.cwd,
                    # Ctrl-C in a terminal reaches the launcher alone, which passes it on once
                    start_new_session=True,
                )
            try:
                signals.to(agent)
                pids = {"launcher": os.getpid(), "agent": agent.pid}
                run.write_status(state=State.submitted, pids=pids, exit_code=None, error=None)
                follow(run.path, lambda: agent.poll() is None, live=live, console=console)
                code = agent.wait()
            finally:
                if agent.poll() is None:
                    agent.kill()
                    agent.wait()
                take_left(scratch, run)
        return _outcome(run, code, log, signals)


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
    """While inside, what asks this process to stop goes on to the agent; the second time it kills it, and so all."""

    def __init__(self) -> None:
        self._agent: subprocess.Popen[bytes] | None = None
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
        """Names the process that signals go to, and passes on what came before it was there."""
        self._agent = agent
        for number in self._seen[:1]:
            agent.send_signal(number)

    def _pass(self, number: int, _frame: FrameType | None) -> None:
        self._seen.append(number)
        if self._agent is not None and self._agent.poll() is None:
            self._agent.send_signal(number if len(self._seen) == 1 else signal.SIGKILL)
