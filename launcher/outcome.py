"""How a node's run has ended: recorded in its folder or, where that can't be written, left for who started it."""

import errno
import fcntl
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from launcher.checkpoints import completed
from launcher.errors import Exit, StorageError
from launcher.run_dir import RunDir, State, to_json

SCRATCH = "LAUNCHER_SCRATCH"
"""The environment variable that names a node's temporary folder. Who starts the node chooses the name, and removes what
is left of it where the node's agent was killed."""

RENDEZVOUS = "LAUNCHER_RENDEZVOUS"
"""The one that tells a node where it meets the others, as HOST:PORT."""

LISTENER = "LAUNCHER_LISTENER"
"""The one with the number of a socket that listens already, for the store of the first node."""

STEP = "LAUNCHER_STEP"
"""The one that names the folder of a step without agents, which all its ranks see: in it they find the wish to stop."""

ATTEMPT = "LAUNCHER_ATTEMPT"
"""The one that tells a rank how often the run's ranks had been started before."""

_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)

_SOCKET_PATH = 107 - len("/launcher-12345678/pymp-12345678/listener-12345678")
"""The longest path of a folder for temporary files below which loader workers can still open their sockets."""


def choose_scratch() -> Path:
    """A name for a node's temporary folder; it isn't made yet."""
    base = tempfile.gettempdir()
    if len(os.fsencode(base)) > _SOCKET_PATH and os.access("/tmp", os.W_OK):
        base = "/tmp"
    return Path(base, f"launcher-{secrets.token_hex(4)}")


@contextmanager
def scratch() -> Iterator[Path]:
    """A node's temporary folder, for as long as its ranks run. Removes those of nodes that were killed beside it."""
    folder = Path(os.environ.get(SCRATCH) or choose_scratch())
    sweep(folder.parent)
    with _held(_lock(folder)):
        folder.mkdir(0o700)
        os.environ[SCRATCH] = str(folder)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def sweep(base: Path) -> None:
    """Removes what nodes have left in `base` that were killed together with who started them.

    A node holds a lock while it runs, which the system lets go of when it ends, however it does. Folders without one,
    and those of other users, are nobody's to judge.
    """
    for lock in base.glob("launcher-*.lock"):
        folder = lock.with_suffix("")
        try:
            file = open(lock, "rb+")  # noqa: SIM115 — closed below
        except (FileNotFoundError, PermissionError):  # its node has just ended; another user's
            continue
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # it runs
                continue
            discard(folder)


def discard(folder: Path) -> None:
    """Removes a node's temporary folder, whether or not it was made."""
    shutil.rmtree(folder, ignore_errors=True)
    _lock(folder).unlink(missing_ok=True)


@contextmanager
def _held(path: Path) -> Iterator[None]:
    """Holds the lock in a file that is there for as long; where the file system has no locks there is no file."""
    while True:
        file = open(path, "wb")  # noqa: SIM115 — closed below
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            path.unlink(missing_ok=True)
            break
        if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            break
        file.close()  # swept away between the two lines above
    with file:
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _lock(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.lock")


def of_stop(run: RunDir, number: int) -> tuple[State, int]:
    """State and exit code of a run that was ended because of signal `number`: one with a checkpoint is resumable."""
    return (State.stopped, int(Exit.STOPPED)) if completed(run) else (State.cancelled, 128 + number)


def record(run: RunDir, *, state: State, exit_code: int, error: dict[str, Any] | None = None) -> None:
    """Writes how the run has ended into its status. Raises nothing."""
    fields = {"state": state.value, "exit_code": exit_code, "error": error}
    try:
        run.write_status(state=state, exit_code=exit_code, error=error)
    except StorageError as problem:
        print(problem, flush=True)
        if SCRATCH in os.environ:
            with suppress(OSError):
                _left(Path(os.environ[SCRATCH])).write_text(to_json(fields), encoding="utf-8")


def take_left(folder: Path, run: RunDir) -> None:
    """Takes over what `record` couldn't write in the node whose temporary folder was `folder`, and removes both."""
    discard(folder)
    try:
        fields = json.loads(_left(folder).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    _left(folder).unlink(missing_ok=True)
    with suppress(StorageError):  # it is kept for who asks this process
        run.write_status(**{**fields, "state": State(fields["state"])})


def _left(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.json")
