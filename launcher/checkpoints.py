"""The checkpoints of a run as files: which are there, which are whole, and which one is the newest."""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.errors import LauncherError, StorageError
from launcher.run_dir import RunDir, to_json, write_atomic, writing

MANIFEST = "manifest.json"
PROGRESS = "progress.json"
"""The file of a checkpoint that holds what is no tensor."""
FORMAT = 1
"""The version of what a checkpoint holds."""

_NAME = re.compile(r"update_([0-9]{10,})")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was completed: it was renamed to its own name when all of it was there."""

    path: Path

    @property
    def update(self) -> int:
        """The window after which it was taken."""
        match = _NAME.fullmatch(self.path.name)
        assert match is not None
        return int(match[1])

    def files(self) -> dict[str, tuple[int, str]]:
        """The size and the SHA-256 of every file, as manifest.json says.

        Raises:
            LauncherError: it can't be read, is of another version's format, or of another update than its name says.
        """
        path = self.path / MANIFEST
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            files = {str(name): (int(one["size"]), str(one["sha256"])) for name, one in found["files"].items()}
            number, update = int(found["format"]), int(found["update"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise LauncherError(f"{path}: can't be read: {error}") from error
        if number != FORMAT:
            raise LauncherError(f"{path}: a checkpoint of format {number}; this launcher reads {FORMAT}")
        if update != self.update:
            raise LauncherError(
                f"{path}: the checkpoint of update {update}, in a folder that another one's name was given"
            )
        return files

    def progress(self) -> dict[str, Any]:
        """What of it is no tensor. Raises LauncherError."""
        path = self.path / PROGRESS
        try:
            found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise LauncherError(f"{path}: can't be read: {error}") from error
        return found

    def applied(self) -> int | None:
        """The updates that had changed parameters; None: it doesn't say."""
        try:
            return int(self.progress()["applied"])
        except (LauncherError, ValueError, KeyError, TypeError):
            return None

    def problem(self, *, part: int = 0, parts: int = 1) -> str | None:
        """Why it can't be used, in words: a file that is missing, cut off or changed; None: it is whole.

        Args:
            part, parts: read the contents of each `parts`-th file alone, from the one of number `part`; with 0 parts
                only sizes are looked at.
        """
        try:
            files = self.files()
        except LauncherError as error:
            return str(error)
        for index, (name, (said, checksum)) in enumerate(sorted(files.items())):
            path = self.path / name
            try:
                size = path.stat().st_size
                if size != said:
                    return f"{path}: {size} bytes instead of {said}"
                if parts and index % parts == part and sha256(path) != checksum:
                    return f"{path}: its contents have changed (another checksum)"
            except OSError as error:
                return f"{path}: can't be read: {error.strerror or error}"
        return None


def path_of(run: RunDir, update: int) -> Path:
    """Where the checkpoint after window `update` stands, or will."""
    return run.checkpoints / f"update_{update:010d}"


def completed(run: RunDir) -> list[Checkpoint]:
    """The checkpoints that were completed, the newest first. Their contents aren't looked at."""
    try:
        names = [one.name for one in os.scandir(run.checkpoints)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = [Checkpoint(run.checkpoints / name) for name in names if _NAME.fullmatch(name)]
    return sorted(found, key=lambda one: one.update, reverse=True)


def newest_whole(run: RunDir) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint whose files are there in their sizes, their contents unread (None: there is none), and what
    is wrong with newer ones."""
    problems: list[str] = []
    for one in completed(run):
        problem = one.problem(parts=0)
        if problem is None:
            return one, problems
        problems.append(problem)
    return None, problems


def sha256(path: Path) -> str:
    """The checksum of a file's contents. Raises OSError."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def complete(run: RunDir, temporary: Path, update: int, files: Mapping[str, Mapping[str, Any]]) -> Checkpoint:
    """Makes what was written and flushed in `temporary` the checkpoint of `update`: manifest, then one rename.

    Args:
        files: for each file its size and sha256.

    Raises:
        StorageError: it can't be written; nothing of it is there then.
    """
    target = path_of(run, update)
    write_atomic(temporary / MANIFEST, to_json({"format": FORMAT, "update": update, "files": dict(files)}))
    with writing(target):
        flush(temporary)
        if target.exists():  # of an attempt before this one, or a damaged one: this one is newer
            _remove(target)
        os.replace(temporary, target)
        flush(target.parent)
    return Checkpoint(target)


def flush(path: Path) -> None:
    """Sees to it that a file, or the names in a folder, are on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def prune(run: RunDir, keep_last: int) -> None:
    """Removes all but the newest `keep_last` checkpoints, at least one. Raises StorageError."""
    assert keep_last >= 1
    for one in completed(run)[keep_last:]:
        _remove(one.path)


def put_aside(checkpoint: Checkpoint) -> None:
    """Gives a damaged checkpoint a name under which it is none, and is there to be looked at."""
    aside = checkpoint.path.with_name(f"{checkpoint.path.name}.damaged")
    with writing(aside):
        shutil.rmtree(aside, ignore_errors=True)
        os.replace(checkpoint.path, aside)


def put_aside_after(run: RunDir, update: int, attempt: int) -> None:
    """Gives the checkpoints of later updates names under which they are none, so that ranks start from that of
    `update`. `attempt`: the one that does, which is in these names, so that no two are alike. Raises StorageError."""
    for one in completed(run):
        if one.update > update:
            aside = one.path.with_name(f"{one.path.name}.before_attempt_{attempt}")
            with writing(aside):
                os.replace(one.path, aside)


def clear_unfinished(run: RunDir) -> None:
    """Removes what saves and removals that never ended have left. Only where nobody else writes there."""
    for one in run.checkpoints.glob(".*"):
        if one.is_dir():
            shutil.rmtree(one, ignore_errors=True)


def _remove(path: Path) -> None:
    """First its name and then its files, so that no half one is ever there."""
    going = path.with_name(f".{path.name}.gone")
    shutil.rmtree(going, ignore_errors=True)
    try:
        os.replace(path, going)
    except FileNotFoundError:
        return
    except OSError as error:
        raise StorageError(path, error) from error
    shutil.rmtree(going, ignore_errors=True)
