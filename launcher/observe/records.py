"""Reading metrics.jsonl: while it is written, whole, or its end alone."""

import errno
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from launcher.errors import LauncherError

Record = dict[str, Any]

_END = 64 * 1024
"""Bytes at the end of the file that hold the latest updates."""


_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
"""What a file says that isn't there yet, or whose folder has vanished."""


@contextmanager
def readable(run_dir: Path) -> Iterator[None]:
    """While inside, what is missing or of another type in the files of a run is a LauncherError."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise LauncherError(f"{run_dir}: its files are damaged: {type(error).__name__}: {error}") from error


class Tail:
    """The lines that have been added to a file since the last look. A line that isn't whole yet is left."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0

    def read(self) -> list[Record]:
        """The new records, in order; none while the file doesn't exist."""
        try:
            with open(self._path, "rb") as file:
                if file.seek(0, 2) < self._position:  # cut off, as after a restart that drops what it repeats
                    self._position = 0
                file.seek(self._position)
                data = file.read()
        except OSError as error:
            if error.errno in _GONE:
                return []
            raise
        whole = data[: data.rfind(b"\n") + 1]
        self._position += len(whole)
        return list(_records(whole))


def _records(data: bytes) -> Iterator[Record]:
    for line in data.splitlines():
        try:
            record = json.loads(line)
        except ValueError:  # torn where a rank was killed in the middle of it
            continue
        if isinstance(record, dict) and isinstance(record.get("update"), int):
            yield record


def read_metrics(path: Path) -> tuple[list[Record], list[Record]]:
    """The training and the validation records, each in the order of updates, of the highest attempt of each update.

    What an earlier attempt has written of updates from the first of a later one on doesn't count: they are repeated.
    """
    kinds: dict[str, dict[int, Record]] = {"train": {}, "validation": {}}
    first: dict[int, int] = {}
    for record in Tail(path).read():
        known = kinds.get(str(record.get("kind")))
        if known is None:
            continue
        update, attempt = record["update"], record.get("attempt", 0)
        if record["kind"] == "train":
            first[attempt] = min(update, first.get(attempt, update))
        before = known.get(update)
        if before is None or attempt >= before.get("attempt", 0):
            known[update] = record

    def counts(record: Record) -> bool:
        attempt = record.get("attempt", 0)
        return all(record["update"] < start for later, start in first.items() if later > attempt)

    train, validation = (
        [known[update] for update in sorted(known) if counts(known[update])] for known in kinds.values()
    )
    return train, validation


def latest_updates(path: Path) -> list[Record]:
    """The training records at the end of the file that belong to its last attempt, without reading all of it."""
    train = [one for one in _last_records(path) if one.get("kind") == "train"]
    return [one for one in train if one.get("attempt", 0) == train[-1].get("attempt", 0)]


def latest_with(path: Path, field: str, attempt: int) -> Record | None:
    """The last training record from `attempt` on in which `field` isn't null. The file is read from its end, as far as
    it takes."""
    length = _END
    while True:
        train = [one for one in _last_records(path, length) if one.get("kind") == "train"]
        found = [one for one in train if one.get(field) is not None and one.get("attempt", 0) >= attempt]
        if found:
            return found[-1]
        is_before = bool(train) and train[0].get("attempt", 0) < attempt
        if is_before or not path.exists() or length >= path.stat().st_size:
            return None
        length *= 8


def next_attempt(path: Path) -> int:
    """The number of the attempt that goes on: one above the highest that has written a line; 0 for the first."""
    return 1 + max((int(one.get("attempt", 0)) for one in _last_records(path)), default=-1)


def _last_records(path: Path, length: int = _END) -> list[Record]:
    try:
        with open(path, "rb") as file:
            start = max(0, file.seek(0, 2) - length)
            file.seek(start)
            data = file.read()
    except FileNotFoundError:
        return []
    first = data.find(b"\n") + 1 if start else 0
    return list(_records(data[first : data.rfind(b"\n") + 1]))


def seconds_left(plan: Mapping[str, Any], update: int, records: Sequence[Mapping[str, Any]]) -> float | None:
    """How long a run goes on after `update` at the pace of `records`; None: nothing was measured, or its length isn't
    known. `plan`: what plan.json holds; in a ramp, where updates differ in size, samples are counted."""
    samples_per_s, seconds = pace(records)
    num_updates = plan.get("num_updates")
    if seconds is None or num_updates is None:
        return None
    epoch = records[-1].get("epoch")
    if plan.get("ramp") and plan.get("num_samples") and samples_per_s and epoch is not None:
        return float(max(0.0, plan["num_samples"] - epoch * plan["samples_per_epoch"]) / samples_per_s)
    return float(max(0, num_updates - update) * seconds)


def pace(records: Sequence[Mapping[str, Any]]) -> tuple[float | None, float | None]:
    """Samples a second and seconds an update over `records`; None where nothing was measured."""
    seconds = [float(one["seconds"]) for one in records if one.get("seconds")]
    if not seconds:
        return None, None
    samples = sum(float(one.get("samples") or 0) for one in records if one.get("seconds"))
    return samples / sum(seconds), sum(seconds) / len(seconds)
