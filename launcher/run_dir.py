"""The files of a run, where the submitting half and the ranks meet: names, atomic writes, status."""

import errno
import fcntl
import json
import os
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from launcher.errors import LauncherError, StorageError

LOCKED_FOR = 2.0
"""Seconds that a writer of the status waits for another one."""


class State(Enum):
    """Where a run stands; the values of ``state`` in status.json."""

    planned = "planned"
    submitted = "submitted"
    running = "running"
    stopping = "stopping"
    stopped = "stopped"
    finished = "finished"
    failed = "failed"
    cancelled = "cancelled"


def write_atomic(path: Path, text: str) -> None:
    """Writes `text` to `path` whole or not at all: beside it, flushed to the disk, then renamed over it.

    Raises:
        StorageError: the disk is full, or the folder has vanished.
    """
    write_together({path: text})


def write_together(texts: Mapping[Path, str]) -> None:
    """Writes the texts of files as `write_atomic` does, and none of them where one doesn't fit on the disk.

    Raises:
        StorageError: the disk is full, or the folder has vanished.
    """
    temporaries: dict[Path, str] = {}
    try:
        for path, text in texts.items():
            with writing(path):
                descriptor, temporaries[path] = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
                with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                    file.write(text)
                    file.flush()
                    os.fsync(file.fileno())
                os.chmod(temporaries[path], 0o666 & ~umask())
        for path, temporary in temporaries.items():
            with writing(path):
                os.replace(temporary, path)
    except BaseException:
        for temporary in temporaries.values():
            Path(temporary).unlink(missing_ok=True)
        raise


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """What the system refuses inside is said with the name of the file. Raises StorageError."""
    try:
        yield
    except OSError as error:
        raise StorageError(path, error) from error


def umask() -> int:
    """The permissions that this process leaves out of new files."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def to_json(value: object) -> str:
    """JSON with an indent; non-finite numbers become null, since JSON has none and a reader must not choke."""
    return json.dumps(_finite(value), indent=2, ensure_ascii=False) + "\n"


def json_line(value: object) -> str:
    """One line of JSON; non-finite numbers become null."""
    return json.dumps(_finite(value), ensure_ascii=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


@contextmanager
def _one_writer(folder: Path) -> Iterator[None]:
    """Keeps others out, so that what one writes isn't lost to one who has read before. Not where the file system has no
    locks, and not for long: one who was stopped in the middle keeps nobody waiting."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:  # what is written next says why
        yield
        return
    end = time.monotonic() + LOCKED_FOR
    try:
        while time.monotonic() < end:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno != errno.EWOULDBLOCK:
                    break
                time.sleep(0.005)
        yield
    finally:
        os.close(descriptor)


_unwritten: dict[Path, dict[str, Any]] = {}
"""The last status of a run, by its folder, where this process couldn't write it."""


@dataclass(frozen=True)
class RunDir:
    """The folder of one run. Made by the submitting side alone; ranks only write into it."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def status(self) -> Path:
        return self.path / "status.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        return self.path / "model.safetensors"

    @property
    def pretrained(self) -> Path:
        """What belongs beside the weights in a folder that `from_pretrained` reads; there where the model knows it."""
        return self.path / "pretrained"

    @property
    def result(self) -> Path:
        return self.path / "result.json"

    @property
    def verification(self) -> Path:
        return self.path / "verify.json"

    @property
    def loss_png(self) -> Path:
        return self.path / "loss.png"

    @property
    def wandb(self) -> Path:
        """The tracker's id of this run, and what went wrong with it."""
        return self.path / "wandb.json"

    @property
    def usage(self) -> Path:
        """What the run has used of its devices, over all of its attempts."""
        return self.path / "usage.json"

    def device_seconds(self) -> float:
        """Ranks times seconds that the run has had so far; 0 where nothing has counted them yet."""
        with suppress(LauncherError, KeyError, TypeError, ValueError):
            return float(self.read_json(self.usage)["device_seconds"])
        return 0.0

    def rank_log(self, rank: int) -> Path:
        return self.logs / f"rank_{rank}.log"

    @classmethod
    def existing(cls, path: str | Path) -> "RunDir":
        """The run in `path`. Raises LauncherError where there is none."""
        run = cls(Path(path).resolve())
        if not run.plan.is_file():
            raise LauncherError(f"{path}: no run here (a run's folder holds plan.json and config.yaml)")
        return run

    def create(self, config_yaml: str, plan_json: str) -> None:
        """Fills a new folder with the two files that ranks read. Refuses a folder that already holds a run, or what one
        has left: a new run would go on from its checkpoints.

        Raises:
            LauncherError: it is refused, or can't be written; the folder is as it was.
        """
        left = [*self.checkpoints.glob("update_*"), *filter(Path.exists, [self.metrics])]
        if left and not self.config.exists():
            raise LauncherError(
                f"{self.path}: an earlier run has left {left[0].relative_to(self.path)} here, which a new run would "
                "take for its own; remove this folder, or give hydra.run.dir another"
            )
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            # exclusive creation decides which of several starts owns the folder
            file = open(self.config, "x", encoding="utf-8")  # noqa: SIM115 — what fails from here on is undone
        except FileExistsError:
            raise LauncherError(
                f"{self.path}: this folder already holds a run; give hydra.run.dir another folder, or leave it out"
            ) from None
        except OSError as error:
            raise LauncherError(f"{self.path}: the run's folder can't be written: {error.strerror}") from error
        try:
            with writing(self.config), file:
                file.write(config_yaml)
            write_atomic(self.plan, plan_json)
            self.write_status(state=State.planned)
        except StorageError as error:
            for one in (self.config, self.plan):  # half a run would keep the next one out
                one.unlink(missing_ok=True)
            raise LauncherError(str(error)) from error

    def read_json(self, path: Path) -> dict[str, Any]:
        """The object in a JSON file of this run; raises LauncherError where it is no whole JSON object."""
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise LauncherError(f"{path}: can't be read: {error}") from error
        if not isinstance(value, dict):
            raise LauncherError(f"{path}: not a JSON object")
        return value

    def read_status(self) -> dict[str, Any]:
        """What stands in status.json, or what this process couldn't write there."""
        return _unwritten.get(self.path) or self.read_json(self.status)

    def write_status(self, *, state: State, **fields: Any) -> None:
        """Updates status.json: keeps what stands there, sets `state`, the heartbeat (Unix seconds) and `fields`.

        Raises:
            StorageError: it can't be written; `read_status` gives it to this process all the same.
        """
        with _one_writer(self.path):
            self._write_status(state, fields)

    def _write_status(self, state: State, fields: dict[str, Any]) -> None:
        old: dict[str, Any] = {
            "state": state.value,
            "exit_code": None,
            "update": 0,
            "applied": 0,
            "attempt": 0,
            "host": socket.gethostname(),
            "pids": {},
            "heartbeat": None,
            "error": None,
        }
        with suppress(LauncherError):  # none yet, or its folder has vanished
            old |= self.read_status()
        new = old | {"state": state.value, "heartbeat": time.time()} | fields
        try:
            write_atomic(self.status, to_json(new))
        except StorageError:
            _unwritten[self.path] = new
            raise
        _unwritten.pop(self.path, None)
