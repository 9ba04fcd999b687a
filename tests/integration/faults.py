"""Data that goes wrong on purpose; importable by the ranks that tests start."""

import os
import signal
import sys
import time
from typing import Any

from scalar import Targets


class Faulty(Targets):
    """Reading sample `at` does `how`: raise, kill, exit0, exit7 or hang."""

    def __init__(self, targets: list[Any], at: int, how: str) -> None:
        super().__init__(targets)
        self.at, self.how = at, how

    def __getitem__(self, index: int) -> Any:
        if index == self.at:
            if self.how == "raise":
                raise ValueError("this sample is broken")
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how.startswith("exit"):
                sys.exit(int(self.how.removeprefix("exit")))
            time.sleep(1000)
        return super().__getitem__(index)
