"""metrics.jsonl: one line an update, from rank 0."""

import os
import resource
from pathlib import Path
from typing import Any

import torch

from launcher.run_dir import json_line, writing


class MetricsFile:
    """Appends lines to metrics.jsonl, each whole; written out when `flush` is called or many have gathered."""

    def __init__(self, path: Path, *, attempt: int) -> None:
        self._path = path
        with writing(path):
            self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 — open as long as the run
            if _is_torn(path):  # by the end of an attempt before this one
                self._file.write("\n")
        self._attempt = attempt
        self._waiting: list[str] = []

    def train(self, **fields: Any) -> None:
        """The line of an update."""
        self._waiting.append(json_line({"kind": "train", "attempt": self._attempt, **fields}))

    def validation(self, **fields: Any) -> None:
        """The line of a validation."""
        self._waiting.append(json_line({"kind": "validation", "attempt": self._attempt, **fields}))

    def note(self, **fields: Any) -> None:
        """The line of something in words."""
        self._waiting.append(json_line({"kind": "note", "attempt": self._attempt, **fields}))

    def flush(self) -> None:
        """Hands the waiting lines to the system in one write. Raises StorageError where it takes them no more."""
        if self._waiting:
            with writing(self._path):
                self._file.write("".join(self._waiting))
                self._file.flush()
            self._waiting.clear()

    def close(self) -> None:
        self.flush()
        self._file.close()


def _is_torn(path: Path) -> bool:
    with open(path, "rb") as file:
        return file.seek(0, os.SEEK_END) > 0 and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) != b"\n"


def memory_peak_bytes(device: torch.device) -> int:
    """The most memory this rank has held: on the GPU what torch allocated, on CPU the process's resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
