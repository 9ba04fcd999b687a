"""What the agent says of a run in its status while the run is followed: a lost rank, a wish to stop."""

from typing import Any

from launcher.errors import LauncherError
from launcher.run_dir import RunDir, State


class News:
    """The lines that have come up since the last look; none of what stood there before the first."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        status = self._status()
        self._told = len(status.get("failures") or [])
        self._stopping = False

    def read(self) -> list[str]:
        """One line for each thing that happened."""
        status = self._status()
        failures = status.get("failures") or []
        lines = [restart_text(one) for one in failures[self._told :] if one["goes_on"]]
        self._told = max(self._told, len(failures))
        if status.get("state") == State.stopping.value and status.get("stop") and not self._stopping:
            self._stopping = True
            lines.append(_stopping_text(status["stop"]))
        return lines

    def _status(self) -> dict[str, Any]:
        try:
            return self._run.read_status()
        except LauncherError:
            return {}


def restart_text(failure: dict[str, Any]) -> str:
    """A failure after which the ranks are started again, as status.json has it."""
    when = "before its first update" if failure["update"] is None else f"at update {failure['update']}"
    start = "the start" if failure["from_update"] is None else f"update {failure['from_update']}"
    count = f"restart {failure['restart']} of {failure['max_restarts']}"
    return f"rank {failure['rank']} {failure['how']} {when}: starting again from {start} ({count})"


def _stopping_text(stop: dict[str, Any]) -> str:
    asked = "" if stop["why"] == "SIGINT" else f" ({stop['why']})"
    within = f"at most {stop['within']:g} s"
    return f"stopping{asked}: finishing the window and saving, {within}; Ctrl-C again ends at once"
