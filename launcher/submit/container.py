"""A node's container, as the `docker run` that is attached to it."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from launcher.errors import LauncherError
from launcher.outcome import record
from launcher.process import LIFELINE
from launcher.run_dir import RunDir, State, writing
from launcher.submit.engine import answers, ask, state_of
from launcher.submit.nodes import Node

LOOK_EVERY = 0.5
"""Seconds between two looks at a container whose command has ended before it."""
AGAIN_EVERY = 2.0
"""Seconds after which a container that isn't stopping is told again: a signal is lost while it starts."""
KILLED = 128 + signal.SIGKILL
REFUSED = 125
"""What `docker run` ends with where it fails itself."""


class Container(subprocess.Popen[bytes]):
    """Lives as long as its container does, also where the command was killed."""

    def __init__(self, command: list[str], run: RunDir, output: Any) -> None:
        self.name, self._run = name_in(command), run
        self.state: dict[str, Any] | None = None
        """What the engine says of it, once it has ended."""
        self._code: int | None = None
        self._looked = 0.0
        self._asked: tuple[int, float] | None = None
        super().__init__(
            command,
            env={**os.environ, LIFELINE: "1"},
            stdin=subprocess.PIPE,  # ends with this process, and the node with it
            stdout=output,
            stderr=output,
            start_new_session=True,  # Ctrl-C in a terminal reaches the launcher alone, which passes it on once
        )

    def poll(self) -> int | None:
        if self._code is not None:
            return self._code
        code = super().poll()
        if code is None:
            self._tell_again()
            return None
        if time.monotonic() - self._looked < LOOK_EVERY:
            return None
        self._looked = time.monotonic()
        state = state_of(self.name)
        if state is not None and state["Running"]:
            return None
        self.state = state
        self._code = code if state is None or not state.get("StartedAt", "").startswith("2") else state["ExitCode"]
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                assert timeout is not None
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(0.05)
        return code

    def send_signal(self, sig: int) -> None:
        self._asked = (sig, time.monotonic())
        super().send_signal(sig)  # the command passes it on

    def _tell_again(self) -> None:
        if self._asked is None or time.monotonic() - self._asked[1] < AGAIN_EVERY:
            return
        number = self._asked[0]
        self._asked = (number, time.monotonic())
        with suppress(LauncherError):
            if self._run.read_status()["state"] != State.stopping.value:
                ask("kill", f"--signal={signal.Signals(number).name}", self.name)

    def kill(self) -> None:
        with suppress(LauncherError):
            ask("kill", self.name)
            return
        super().kill()

    def how(self, code: int) -> str:
        state = self.state or {}
        if state.get("OOMKilled"):
            return f"the container {self.name} ran out of memory and was killed"
        if self.state is None and not answers():
            return f"the Docker engine doesn't answer any more, and docker ended with {code}"
        if code == KILLED:
            return f"the container {self.name} was killed"
        if code == REFUSED:
            return f"docker couldn't run the container {self.name}"
        return f"the container {self.name} ended with {code}"


def name_in(command: list[str]) -> str:
    """What the container of a `docker run` is called."""
    return next(one.removeprefix("--name=") for one in command if one.startswith("--name="))


@contextmanager
def container(command: list[str], run: RunDir, log: Path) -> Iterator[Node]:
    """A node whose container has started. At the end it has ended."""
    with writing(log), open(log, "ab") as output:
        made = Container(command, run, output)
    assert made.stdin is not None
    try:
        yield Node(made, log)
    finally:
        if made.poll() is None:
            made.kill()
            with suppress(subprocess.TimeoutExpired):
                made.wait(10)
        with suppress(OSError):
            made.stdin.close()
        if (made.state or {}).get("OOMKilled"):
            say_memory(run, made)


def say_memory(run: RunDir, ended: Container) -> None:
    """Adds to the error of a run that has failed that a container had too little memory."""
    with suppress(LauncherError):
        status = run.read_status()
        error, code = status.get("error"), status.get("exit_code")
        if error and code and "ran out of memory" not in error["reason"]:
            reason = (
                f"{error['reason']}\nthe container {ended.name} ran out of memory: submit.docker.memory gives it more"
            )
            record(run, state=State(status["state"]), exit_code=int(code), error={**error, "reason": reason})
