"""The entry of one node: ``python -m launcher.train.agent RUN_DIR`` runs its ranks under torch's elastic agent."""

import argparse
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from launcher.errors import LauncherError
from launcher.lock import holding
from launcher.outcome import SCRATCH, discard, of_stop, record
from launcher.process import STOP_SIGNALS, end_with_parent
from launcher.run_dir import RunDir


def stop_on_signals(run: RunDir) -> None:
    """Until there are ranks to be stopped, a signal ends this process at once, and the run's status says so."""

    def stop(number: int, _frame: FrameType | None) -> None:
        state, code = of_stop(run, number)
        record(run, state=state, exit_code=code)
        if SCRATCH in os.environ:
            discard(Path(os.environ[SCRATCH]))
        os._exit(code)

    for number in STOP_SIGNALS:
        signal.signal(number, stop)


if __name__ == "__main__":
    started = time.monotonic()
    parser = argparse.ArgumentParser(prog="python -m launcher.train.agent", description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--task", choices=("train", "verify"), default="train", help="what the ranks do")
    arguments = parser.parse_args()
    stop_on_signals(RunDir(arguments.run_dir))  # before torch is imported, which takes seconds
    end_with_parent(signal.SIGTERM)

    if not (arguments.run_dir / "plan.json").is_file():
        parser.error(f"{arguments.run_dir}: no run here; launcher train makes one")

    try:
        with holding(RunDir(arguments.run_dir)):
            from launcher.train.elastic import run_node

            code = run_node(arguments.run_dir, arguments.task, started)
    except LauncherError as error:
        parser.error(str(error))
    sys.exit(code)
