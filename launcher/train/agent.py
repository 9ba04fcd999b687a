"""The entry of one node: ``python -m launcher.train.agent RUN_DIR`` runs its ranks under torch's elastic agent."""

import argparse
import os
import signal
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import FrameType

from launcher.errors import LauncherError
from launcher.lock import holding
from launcher.outcome import RENDEZVOUS, SCRATCH, discard, of_stop, record
from launcher.process import LIFELINE, STOP_SIGNALS, end_with_input, end_with_parent
from launcher.run_dir import RunDir


def stop_on_signals(run: RunDir, node: int) -> None:
    """Until there are ranks to be stopped, a signal ends this process at once, and the run's status says so."""

    def stop(number: int, _frame: FrameType | None) -> None:
        state, code = of_stop(run, number)
        if node == 0:
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
    parser.add_argument("--node", type=int, default=0, help="which of the nodes this is, from 0")
    parser.add_argument(
        "--rendezvous",
        metavar="HOST:PORT",
        default=os.environ.get(RENDEZVOUS),
        help=f"where the first node listens, and the others find it (or {RENDEZVOUS}); not needed with one node",
    )
    arguments = parser.parse_args()
    stop_on_signals(RunDir(arguments.run_dir), arguments.node)  # before torch is imported, which takes seconds
    end_with_parent(signal.SIGTERM)
    is_looked_after = os.environ.pop(LIFELINE, "") != ""
    if is_looked_after:
        end_with_input(signal.SIGTERM)

    if not (arguments.run_dir / "plan.json").is_file():
        parser.error(f"{arguments.run_dir}: no run here; launcher train makes one")

    try:
        # the first node holds the folder for all, unless who has started it does
        with nullcontext() if arguments.node or is_looked_after else holding(RunDir(arguments.run_dir)):
            from launcher.train.elastic import run_node
            from launcher.train.meeting import Meeting

            meeting = Meeting.parse(arguments.node, arguments.rendezvous)
            code = run_node(arguments.run_dir, arguments.task, meeting, started)
    except LauncherError as error:
        parser.error(str(error))
    sys.exit(code)
