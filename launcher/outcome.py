"""How a node's run has ended: recorded in its folder or, where that can't be written, left for who started it."""

import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from launcher.errors import StorageError
from launcher.run_dir import RunDir, State, to_json

SCRATCH = "LAUNCHER_SCRATCH"
"""The environment variable that names a node's temporary folder. Who starts the node chooses the name, and removes what
is left of it where the node's agent was killed."""


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
    """A node's temporary folder, for as long as its ranks run."""
    folder = Path(os.environ.get(SCRATCH) or choose_scratch())
    folder.mkdir(0o700)
    os.environ[SCRATCH] = str(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


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
    shutil.rmtree(folder, ignore_errors=True)
    try:
        fields = json.loads(_left(folder).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    _left(folder).unlink(missing_ok=True)
    with suppress(StorageError):  # it is kept for who asks this process
        run.write_status(**{**fields, "state": State(fields["state"])})


def _left(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.json")
