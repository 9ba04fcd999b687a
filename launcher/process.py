"""A process of a run: it ends with the one that started it, and prints into a file of its own."""

import ctypes
import os
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path

PARENT = "LAUNCHER_PARENT_PID"
"""The environment variable in which a process tells its children who they end with."""

LIFELINE = "LAUNCHER_LIFELINE"
"""The one that tells a node in a container that its standard input ends with the process that looks after it, which
holds the run's folder too."""

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""What asks a run to stop: a user's Ctrl-C, a scheduler, a terminal that closes."""

_PR_SET_PDEATHSIG = 1


def end_with_parent(end: signal.Signals) -> None:
    """Asks Linux to send this process `end` when the one that started it ends, also when that was killed.

    Called before anything slow. A parent that ended even earlier is found by its id.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(end))
    expected = os.environ.get(PARENT)
    if expected is not None and os.getppid() != int(expected):
        os.kill(os.getpid(), end)
    os.environ[PARENT] = str(os.getpid())


def end_with_input(end: signal.Signals) -> None:
    """Sends this process `end` when its standard input ends, from a thread of its own."""

    def wait() -> None:
        with suppress(OSError):
            while os.read(0, 4096):
                pass
        os.kill(os.getpid(), end)

    threading.Thread(target=wait, name="lifeline", daemon=True).start()


def children(process: int) -> list[int]:
    """The ids of the processes that `process` has started and that haven't been collected yet; none where it has ended
    or the system doesn't say."""
    found: list[int] = []
    for task in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(OSError):
            found += [int(one) for one in task.read_text(encoding="utf-8").split()]
    return sorted(found)


def log_to(path: Path) -> None:
    """Sends everything that this process and the libraries in it print to `path`, appended."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
