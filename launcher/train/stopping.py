"""The wish that a run stops: a node's agent and its ranks leave it to each other in the node's temporary folder, or in
the folder of a step without agents."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from launcher.outcome import SCRATCH, STEP
from launcher.process import STOP_SIGNALS

TIME_LIMIT, DEVICE_HOURS = "training.time_limit", "targets.device_hours"
"""Who asks where it isn't a signal."""

_WISH, _MARK = "stop", "stopped"
_is_asked = False
"""Whether this process was asked itself."""


def ask(folder: Path, why: str) -> None:
    """Leaves the wish for every rank of the node to see. `why`: a signal's name, or the key of a limit; the first one
    stays."""
    with suppress(FileExistsError):
        os.symlink(why, folder / _WISH)  # a name and what it says in one step, so that nobody reads half of it


def asked(folder: Path) -> str | None:
    """Why the node's ranks shall stop; None: they needn't."""
    try:
        return os.readlink(folder / _WISH)
    except FileNotFoundError:
        return None


def number_of(why: str) -> signal.Signals:
    """The signal that a wish stands for."""
    return signal.SIGTERM if why in (TIME_LIMIT, DEVICE_HOURS) else signal.Signals[why]


def take_signals() -> None:
    """From now on a signal that asks to stop is a wish, also one that came while `held_back` kept it waiting."""
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN or number != signal.SIGHUP:  # nohup
            signal.signal(number, _note)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def _note(number: int, _frame: FrameType | None) -> None:
    global _is_asked
    _is_asked = True
    folder = _folder()
    if folder is not None:
        with suppress(OSError):
            ask(Path(folder), signal.Signals(number).name)


def _folder() -> str | None:
    """Where ranks find the wish and leave the mark; None: nobody looks after this one."""
    return os.environ.get(STEP) or os.environ.get(SCRATCH)


@contextmanager
def held_back() -> Iterator[None]:
    """Processes started inside keep the signals that ask to stop waiting until they call `take_signals`."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def is_asked() -> bool:
    """Whether this rank knows of the wish. Costs a few microseconds."""
    folder = _folder()
    return _is_asked or (folder is not None and os.path.lexists(os.path.join(folder, _WISH)))


def leave_mark() -> None:
    """Says to who looks after the ranks that they have agreed to stop, and have done what belongs to it."""
    folder = _folder()
    if folder is not None:
        Path(folder, _MARK).touch()


def has_mark(folder: Path) -> bool:
    """Whether the ranks that ended had stopped, and weren't finished."""
    return (folder / _MARK).exists()
