"""What a run uses of its devices, counted over all of its attempts, and the end of what it may use."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from launcher.config.targets import HOUR
from launcher.errors import StorageError
from launcher.plan.plan import Plan
from launcher.run_dir import RunDir, to_json, write_atomic
from launcher.train import stopping

LOOK_EVERY = 0.5
"""Seconds between two looks at the clock."""
WRITE_EVERY = 10.0
"""Seconds of a killed agent that may go uncounted."""


class Budget:
    """Counts for the process that looks after a run, the agent of its first node where there are any, which writes down
    what it counts."""

    def __init__(
        self, run: RunDir, folder: Path, hours: float | None, started: float, are_up: Callable[[], bool]
    ) -> None:
        """
        Args:
            folder: where a wish to stop is left for the ranks.
            hours: that it may use in all; None: without end.
            started: when the process that counts was started, by `time.monotonic`.
            are_up: whether there are ranks that can save.
        """
        self._run, self._folder, self._hours, self._are_up = run, folder, hours, are_up
        self._seconds, self._counted = run.device_seconds(), started
        self._written = float("-inf")
        self._ranks = 0

    def count(self) -> None:
        """Counts until now. Asks the ranks, once there are any that can save, to stop when their device-hours are used
        up."""
        now = time.monotonic()
        is_due = now - self._written >= WRITE_EVERY
        if is_due:  # nodes may have been lost since
            with suppress(OSError, ValueError, TypeError):
                self._ranks = Plan.from_json(self._run.plan.read_text(encoding="utf-8")).world_size
        self._seconds += (now - self._counted) * self._ranks
        self._counted = now
        if is_due:
            self.write()
        if self._hours is not None and self._seconds >= self._hours * HOUR and self._are_up():
            stopping.ask(self._folder, stopping.DEVICE_HOURS)

    def write(self) -> None:
        """Writes down what was counted; a disk that takes no more is said by what matters more."""
        self._written = self._counted
        with suppress(StorageError):
            write_atomic(self._run.usage, to_json({"device_seconds": self._seconds}))


@contextmanager
def counting(budget: Budget) -> Iterator[None]:
    """Counts while inside, on a thread."""
    is_over = threading.Event()

    def count() -> None:
        budget.count()
        while not is_over.wait(LOOK_EVERY):
            budget.count()

    thread = threading.Thread(target=count, name="device-hours", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        budget.count()
        budget.write()
