"""Which rank failed first and why, by how ranks have ended and by the words that they have left."""

import json
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.errors import Exit

_TORN = (
    "connection closed by peer",
    "connection reset by peer",
    "connect timeout",
    "broken pipe",
    "timed out waiting",
    "ncclremoteerror",
)
_TORN_TYPES = ("RuntimeError", "DistError", "DistBackendError", "DistNetworkError", "DistStoreError")
_DEVICE_TYPES = ("AcceleratorError", "DistBackendError")
_DEVICE = ("CUDA error", "NCCL")

Word = dict[str, Any]
"""What a rank leaves of an error of its own; see `worker`."""


@dataclass(frozen=True)
class Failure:
    """The rank that failed first."""

    rank: int
    exit_code: int
    """The run's exit code that follows."""
    reason: str
    """A message, a traceback, or the signal that ended it."""
    how: str
    """The same in a few words: ``was killed by SIGKILL``."""
    is_lost: bool = False
    """Whether it was killed or lost, so that the ranks may be started again; otherwise it failed by itself."""
    signal: int | None = None
    """What killed it."""


def first_failure(exits: Mapping[int, int], words: Sequence[Word], hint: str = "") -> tuple[Failure, bool]:
    """Which rank failed first, and whether that is certain: one whose connection was torn may only be the first seen.

    A rank that was killed leaves no word, and its neighbours blame themselves for the torn connection: so a killed rank
    comes first, then words that are not about a torn connection, then the earliest. An abort comes after these: torch
    ends a rank with one when others have left.

    Args:
        exits: the exit codes of the ranks that have ended by themselves, in the order in which that was seen; negative
            for a signal.
        words: what ranks have left.
        hint: what may be behind a SIGKILL.
    """
    spoken = {word["rank"] for word in words}
    killed = [rank for rank, code in exits.items() if code < 0 and rank not in spoken]
    own = [word for word in words if not _is_torn(word)]
    at_once = [rank for rank in killed if exits[rank] != -signal.SIGABRT or not own]
    if at_once:
        return _killed(at_once[0], -exits[at_once[0]], hint), True
    if words:
        word = min(words, key=lambda word: (_is_torn(word), word["time"]))
        return _said(word), not _is_torn(word)
    rank, code = next(iter(exits.items()))
    how = f"ended with {code} and left no word"
    return Failure(rank, code if code > 1 else Exit.RANK_FAILED, how, how), True


def _killed(rank: int, number: int, hint: str) -> Failure:
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    reason = f"killed by {name}" + (f" ({hint})" if hint and number == signal.SIGKILL else "")
    return Failure(rank, Exit.RANK_FAILED, reason, f"was killed by {name}", is_lost=True, signal=number)


def _said(word: Word) -> Failure:
    rank, code, message = int(word["rank"]), int(word["exit_code"]), str(word["message"])
    code = Exit.RANK_FAILED if code in (1, Exit.REFUSED) else code
    if _is_torn(word):
        return Failure(rank, code, message, "lost its connection to another rank", is_lost=True)
    if _is_of_device(word):
        return Failure(rank, code, message, "had an error of its device", is_lost=True)
    return Failure(rank, code, message, f"failed: {message.splitlines()[-1] if message else word['type']}")


def _is_torn(word: Word) -> bool:
    text = str(word["message"]).lower()
    return word["type"] in _TORN_TYPES and any(one in text for one in _TORN)


def _is_of_device(word: Word) -> bool:
    if word["is_message"] or word["type"] == "OutOfMemoryError":
        return False
    own = str(word["message"]).splitlines()[-1:]
    is_runtime = word["type"] == "RuntimeError" and any(one in own[0] for one in _DEVICE if own)
    return word["type"] in _DEVICE_TYPES or is_runtime


def read_words(attempt: int, *folders: Path) -> list[Word]:
    """What ranks of this attempt have left in `folders`. Those of an earlier one may still do so: a node that was lost
    and comes back."""
    return [
        json.loads(path.read_text(encoding="utf-8"))
        for folder in folders
        for path in sorted(folder.glob(f"error_{attempt}_*.json"))
    ]


def clear_words(*folders: Path) -> None:
    """Removes what ranks have left in an attempt before this one."""
    for folder in folders:
        for path in folder.glob("error_*.json"):
            path.unlink(missing_ok=True)


class Memory:
    """Whether the system has ended processes of this node for want of memory, by its control group's own count."""

    def __init__(self) -> None:
        self._counted = _killed_for_memory()

    def hint(self) -> str:
        """What may be behind a SIGKILL."""
        before, self._counted = self._counted, _killed_for_memory()
        if before is not None and self._counted is not None and self._counted > before:
            return "the system ran out of memory and ended it"
        return "the system may have run out of memory: see dmesg"


def _killed_for_memory() -> int | None:
    """How many processes of this control group the system has ended for want of memory; None: it doesn't say."""
    for path in _counters():
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except OSError:
            continue
        for name, _, value in (line.partition(" ") for line in lines):
            if name == "oom_kill":
                return int(value)
    return None


def _counters() -> list[Path]:
    """The files that count it: memory.events of control groups version 2, memory.oom_control of version 1. In a
    container a group may be seen as the root of what is mounted."""
    found = []
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            root, name = Path("/sys/fs/cgroup"), "memory.events"
        elif "memory" in controllers.split(","):
            root, name = Path("/sys/fs/cgroup/memory"), "memory.oom_control"
        else:
            continue
        found += [root / group.lstrip("/") / name, root / name]
    return found
