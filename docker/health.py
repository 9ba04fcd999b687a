"""Whether the run of this container gives signs of life: the image's health check.

A container in which no node of a run works has nothing to be judged by, and is healthy.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from launcher.errors import LauncherError
from launcher.observe.status import read_run

AGENT = "launcher.train.agent"


def runs(processes: Path) -> Iterator[Path]:
    """The folders of the runs whose agents are among `processes`, a folder like /proc."""
    for one in processes.glob("[0-9]*/cmdline"):
        try:
            words = one.read_bytes().decode(errors="surrogateescape").split("\0")
        except OSError:  # it has ended
            continue
        if words[1:3] == ["-m", AGENT]:
            yield Path(words[3])


def problem(run: Path) -> str | None:
    """What is wrong with a run; None: nothing."""
    try:
        status = read_run(run)
    except LauncherError as error:
        return str(error)
    return f"no sign of life for {status.heartbeat_age:.0f} s" if status.is_silent else None


def main(processes: Path = Path("/proc")) -> int:
    """Prints what is wrong. Returns 1 where something is."""
    problems = list(filter(None, map(problem, runs(processes))))
    print("\n".join(problems), end="")
    return min(1, len(problems))


if __name__ == "__main__":
    sys.exit(main())
