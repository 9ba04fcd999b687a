"""What those who look after a run's ranks see of the wish to stop, and say of a start, in the run's status."""

import time
from contextlib import suppress
from pathlib import Path

from launcher.errors import LauncherError
from launcher.run_dir import RunDir, State
from launcher.train import stopping
from launcher.train.limits import Limits

SAY_EVERY = 1.0
"""Seconds between two looks at whether the status still says that the run is stopping."""


class StopWatch:
    """Sees that ranks are told to stop, and until when they have to.

    Args:
        folder: where the wish is left.
        began: when the time of the run began, by `time.monotonic`.
        says: whether this process writes the run's status.
    """

    def __init__(self, run: RunDir, folder: Path, limits: Limits, began: float, *, says: bool) -> None:
        self._run, self._folder, self._limits, self._began, self._says = run, folder, limits, began, says
        self._said = self._deadline = 0.0
        self.stop: str | None = None
        """Why the run was told to stop, once that was seen."""

    @property
    def is_over(self) -> bool:
        """Whether the ranks should have stopped by now."""
        return self.stop is not None and time.monotonic() > self._deadline

    def look(self) -> None:
        """Takes in a wish, and says so."""
        now, is_new = time.monotonic(), self.stop is None
        if is_new:
            limit = self._limits.time_limit
            if limit is not None and now - self._began > limit:
                stopping.ask(self._folder, stopping.TIME_LIMIT)
            self.stop = stopping.asked(self._folder)
            if self.stop is None:
                return
            self._deadline = now + self._limits.stop_within
        if not self._says or (now - self._said < SAY_EVERY and not is_new):
            return
        self._said = now
        with suppress(LauncherError):
            # the first rank, which writes there too, may not have known yet
            if is_new or self._run.read_status()["state"] != State.stopping.value:
                within = self._limits.stop_within
                said = {"why": self.stop, "within": within} if within else None
                self._run.write_status(state=State.stopping, stop=said)


def count_start(run: RunDir, *, restarts: int = 0, is_stopping: bool = False) -> int:
    """Gives a start of the ranks its number, over all starts of the run.

    Args:
        restarts: how many starts there were before it in this job, or this command.
        is_stopping: whether the run was told to stop.

    Raises:
        StorageError: the status can't be written.
    """
    attempt = 0
    with suppress(LauncherError):
        attempt = int(run.read_status().get("attempts_started") or 0)
    state = State.stopping if is_stopping else State.running if restarts else State.submitted
    stop = {} if is_stopping else {"stop": None}
    fresh = {} if restarts else {"exit_code": None, "error": None}  # a job that was queued again
    run.write_status(state=state, attempt=attempt, attempts_started=attempt + 1, **stop, **fresh)
    return attempt
