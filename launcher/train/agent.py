"""The entry of one node: ``python -m launcher.train.agent RUN_DIR`` runs its ranks under torch's elastic agent."""

import argparse
import os
import signal
import sys
from pathlib import Path
from types import FrameType

from launcher.errors import LauncherError
from launcher.lock import holding
from launcher.outcome import SCRATCH, discard, record
from launcher.process import end_with_parent
from launcher.run_dir import RunDir, State


def cancel_on_signals(run: RunDir) -> None:
    """Until the elastic agent listens for signals itself, one ends this process, and the run's status says so."""

    def cancel(number: int, _frame: FrameType | None) -> None:
        record(run, state=State.cancelled, exit_code=128 + number)
        if SCRATCH in os.environ:
            discard(Path(os.environ[SCRATCH]))
        os._exit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, cancel)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m launcher.train.agent", description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--task", choices=("train", "verify"), default="train", help="what the ranks do")
    arguments = parser.parse_args()
    cancel_on_signals(RunDir(arguments.run_dir))  # before torch is imported, which takes seconds
    end_with_parent(signal.SIGTERM)

    if not (arguments.run_dir / "plan.json").is_file():
        parser.error(f"{arguments.run_dir}: no run here; launcher train makes one")

    try:
        with holding(RunDir(arguments.run_dir)):
            from launcher.train.elastic import run_node

            code = run_node(arguments.run_dir, arguments.task)
    except LauncherError as error:
        parser.error(str(error))
    sys.exit(code)
