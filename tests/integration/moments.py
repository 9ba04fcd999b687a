"""A model and data that stop a run at a moment a test waits for; importable by the ranks that tests start."""

import os
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from scalar import Scalar, Targets

MARKS = "MOMENTS_MARKS"
"""The environment variable with the folder in which a run marks where it is."""
STOP = "MOMENTS_STOP"
"""The one with the name of the moment that a run stays at."""


def reach(moment: str) -> None:
    """Says that this run has come to `moment`, and stays there if a test asked for that."""
    Path(os.environ[MARKS], moment).touch()
    if os.environ.get(STOP) == moment:
        time.sleep(1000)


class Data(Targets):
    """Reading sample `at` is the moment `moment`; each takes `pause` seconds."""

    def __init__(self, targets: list[Any], at: int, moment: str, pause: float = 0) -> None:
        super().__init__(targets)
        self.at, self.moment, self.pause = at, moment, pause

    def __getitem__(self, index: int) -> Any:
        if index == self.at:
            reach(self.moment)
        time.sleep(self.pause)
        return super().__getitem__(index)


class Model(Scalar):
    """Made for the plan, made on a rank, and asked for its state when the trained model is written: three moments."""

    def __init__(self, size: int = 1) -> None:
        super().__init__(size)
        reach("plan" if self.w.is_meta else "build")

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The state: it is asked for when the model is made, too."""
        if Path(os.environ[MARKS], "train").exists():
            reach("final")
        return super().state_dict(*args, **kwargs)


class Heavy(Scalar):
    """Four bytes times `size` that are saved with it and take no part."""

    def __init__(self, size: int = 500_000) -> None:
        super().__init__()
        self.register_buffer("ballast", torch.zeros(size))


class Harmful(Targets):
    """Reading sample `at` fills the disk of the run's folder to the last block, or removes that folder."""

    def __init__(self, targets: list[Any], at: int, how: str, run: str) -> None:
        super().__init__(targets)
        self.at, self.how, self.run = at, how, Path(run)

    def __getitem__(self, index: int) -> Any:
        if index == self.at and self.how == "vanish":
            shutil.rmtree(self.run)
        if index == self.at and self.how == "fill":
            with suppress(OSError), open(self.run / "filler", "ab", buffering=0) as file:
                while file.write(bytes(1024)):
                    pass
        if index > self.at:
            time.sleep(0.05)  # the status is written every second
        return super().__getitem__(index)
