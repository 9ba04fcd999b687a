"""The heart of a rank: when it last did something, and where, for the agent to see.

A rank beats before it starts on something of its own and, with `waits`, before it waits for other ranks: of ranks that
hang in one collective, those who wait are distinguished from those they wait for. Never while it reads data, since a
data set that hangs is a hang.
"""

import mmap
import struct
import time
from dataclasses import dataclass
from pathlib import Path

from launcher.run_dir import writing

_LAYOUT = struct.Struct("<dq?")

_memory: mmap.mmap | None = None
_update = 0


@dataclass(frozen=True)
class Pulse:
    """What a heart said last."""

    time: float
    """Of the last beat, as `time.monotonic` gives it to every process of a machine."""
    update: int
    """The window that the rank was at."""
    waits: bool
    """Whether it had done its part and waited for others."""


def _path(folder: Path, rank: int) -> Path:
    return folder / f"heart_{rank}"


def start(folder: Path, rank: int) -> None:
    """Gives this process a heart; its clock runs from the first beat on.

    Raises:
        StorageError: there is no room for 17 bytes.
    """
    global _memory
    path = _path(folder, rank)
    with writing(path):
        path.write_bytes(bytes(_LAYOUT.size))  # written, so that the memory below can't be missing a block
        with open(path, "r+b") as file:
            _memory = mmap.mmap(file.fileno(), _LAYOUT.size)


def start_alone() -> None:
    """Gives this process a heart that nobody else sees."""
    global _memory
    _memory = mmap.mmap(-1, _LAYOUT.size)


def own_pulse() -> Pulse | None:
    """What this process's heart said last; None: it hasn't beaten yet, or there is none."""
    return None if _memory is None else _pulse(_memory[: _LAYOUT.size])


def beat(update: int | None = None, *, waits: bool = False) -> None:
    """One beat, in about a microsecond; none in a process that was given no heart. `update`: the window from now on."""
    global _update
    if update is not None:
        _update = update
    if _memory is not None:
        _LAYOUT.pack_into(_memory, 0, time.monotonic(), _update, waits)


def pulse(folder: Path, rank: int) -> Pulse | None:
    """What the heart of `rank` said last; None: it hasn't beaten yet."""
    try:
        data = _path(folder, rank).read_bytes()
    except FileNotFoundError:
        return None
    return None if len(data) < _LAYOUT.size else _pulse(data)


def _pulse(data: bytes) -> Pulse | None:
    said = Pulse(*_LAYOUT.unpack(data))
    return said if said.time else None


def is_there(folder: Path) -> bool:
    """Whether ranks have been given hearts by now."""
    return any(folder.glob("heart_*"))


def clear(folder: Path) -> None:
    """Removes the hearts of ranks that have ended."""
    for path in folder.glob("heart_*"):
        path.unlink()
