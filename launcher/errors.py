"""What can go wrong in a way the user can mend, and the exit codes of INTERFACE: one place for both halves."""

from collections.abc import Iterable
from difflib import get_close_matches
from enum import Enum, IntEnum
from pathlib import Path


class Exit(IntEnum):
    """Exit codes of the commands, of a Slurm job and of a container."""

    FINISHED = 0
    REFUSED = 2
    RANK_FAILED = 3
    BAD_NUMBERS = 4
    DIFFERENCE = 5
    STOPPED = 75


class LauncherError(Exception):
    """An error whose message says all there is to say: no traceback is shown for it."""

    exit_code: Exit = Exit.REFUSED


class ConfigError(LauncherError):
    """A configuration or a plan that can't work. The message names the key, what was given and what is allowed."""

    def __init__(self, key: str, given: object, problem: str, *, hint: str = "") -> None:
        self.key, self.given, self.problem, self.hint = key, given, problem, hint
        super().__init__(f"{key}={shown(given)}: {problem}" + (f"\n  {hint}" if hint else ""))


def shown(given: object) -> object:
    """A value as it is spelt on the command line."""
    if isinstance(given, Enum):
        return given.name
    return "null" if given is None else str(given).lower() if isinstance(given, bool) else given


class WrongValueError(ValueError):
    """A value that something is worked out from, by whom doesn't know its key."""

    def __init__(self, value: object, problem: str) -> None:
        self.value, self.problem = value, problem
        super().__init__(f"{shown(value)} {problem}")


class DataError(LauncherError):
    """Data that can't be trained on: an empty set, a missing folder, a label out of range. Names the thing."""


class StorageError(LauncherError):
    """A file of a run that can't be written: the disk is full, or the run's folder has vanished."""

    exit_code = Exit.RANK_FAILED

    def __init__(self, path: Path, why: OSError | str) -> None:
        said = why if isinstance(why, str) else why.strerror or str(why)
        super().__init__(f"{path}: can't be written: {said if path.parent.is_dir() else 'its folder has vanished'}")


class NonFiniteError(LauncherError):
    """The numbers failed: non-finite gradients beyond what training.on_nonfinite allows."""

    exit_code = Exit.BAD_NUMBERS


def nearest(word: str, known: Iterable[str]) -> str:
    """``did you mean 'x'?`` for the closest known spelling, or an empty string."""
    close = get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"did you mean '{close[0]}'?" if close else ""
