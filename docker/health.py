"""Whether the run of this container gives signs of life: the image's health check.

A container in which no node of a run works has nothing to be judged by, and is healthy.
"""

import sys
from pathlib import Path

from launcher.errors import LauncherError
from launcher.observe.status import read_run

AGENT = b"launcher.train.agent"


def run_of(command: list[bytes]) -> str | None:
    """The run's folder in the command of a node's agent; None: it is another command."""
    if AGENT not in command or command[-1] == AGENT:
        return None
    return command[command.index(AGENT) + 1].decode(errors="surrogateescape")


def main() -> int:
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            run = run_of(process.read_bytes().rstrip(b"\0").split(b"\0"))
        except OSError:  # it has ended
            continue
        if run is None:
            continue
        try:
            status = read_run(Path(run))
        except LauncherError as error:
            print(error)
            return 1
        if status.is_silent:
            print(f"no sign of life for {status.heartbeat_age:.0f} s")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
