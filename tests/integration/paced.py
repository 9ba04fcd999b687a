"""Data that takes its time and goes wrong at a sample; importable by the ranks that tests start."""

import os
import signal
import time
from pathlib import Path
from typing import Any

from scalar import Targets


class Paced(Targets):
    """Reading a sample takes `seconds`; that of number `at` does `how`: hang, kill (by SIGKILL), term (by SIGTERM, as a
    process that has no handler for it) or fail, unless the variable TOLD_TO_FAIL says no. `once`: a file that keeps it
    from doing so again, or wait, until somebody makes the file `once`. `hurry`: a file from whose being there on
    reading takes no time."""

    def __init__(
        self, targets: list[Any], seconds: float = 0.1, at: int = -1, how: str = "", once: str = "", hurry: str = ""
    ) -> None:
        super().__init__(targets)
        self.seconds, self.at, self.how, self.once, self.hurry = seconds, at, how, once, hurry

    def __getitem__(self, index: int) -> Any:
        if not (self.hurry and Path(self.hurry).exists()):
            time.sleep(self.seconds)
        if index == self.at and not self._is_over():
            self._do()
        return super().__getitem__(index)

    def _is_over(self) -> bool:
        return bool(self.once) and Path(self.once).exists()

    def _do(self) -> None:
        if self.how == "wait":
            while not self._is_over():
                time.sleep(0.05)
            return
        if self.once:
            Path(self.once).touch()
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "fail":
            if os.environ.get("TOLD_TO_FAIL") == "no":
                return
            raise RuntimeError("told to fail")
        if self.how == "term":
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1000)


class Noted(Paced):
    """The same, where each rank leaves the bytes of a text beside the run's."""

    def __init__(self, targets: list[Any], note: str, folder: str, seconds: float = 0.0, hurry: str = "") -> None:
        super().__init__(targets, seconds, hurry=hurry)
        Path(folder, f"note_{os.environ.get('RANK', 'none')}").write_bytes(note.encode())


def paced(samples: int, *more: str) -> list[str]:
    """Overrides of a run of 2 ranks that each read one of the targets 0, 1, 2, … an update."""
    from runs import mean

    base = [one for one in mean(list(range(samples))) if not one.startswith("data.train._target_")]
    ranks = ["cluster.ranks_per_node=2", "batch.global_batch_size=2", "optimizer.lr=0.5"]
    return [*base, "data.train._target_=paced.Paced", *ranks, *more]


def waits(at: int, file: Path) -> list[str]:
    """Overrides with which whoever reads sample `at` waits there until the file is made: so long the run is in the
    window with this sample, however long a test takes for what it does meanwhile."""
    return [f"+data.train.at={at}", "+data.train.how=wait", f"+data.train.once={file}"]


def hurries(seconds: float, file: Path) -> list[str]:
    """Overrides with which reading a sample takes `seconds` until the file is made, and no time from then on."""
    return [f"+data.train.seconds={seconds}", f"+data.train.hurry={file}"]


def expected(samples: int) -> float:
    """What the one weight comes to."""
    weight = 0.0
    for first in range(0, samples, 2):
        weight -= 0.5 * (weight - (2 * first + 1) / 2)
    return weight
