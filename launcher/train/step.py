"""Who looks after the ranks of a job that has no agents: ``python -m launcher.train.step RUN_DIR srun …`` in the batch
script, around the srun that starts one task a rank. Its exit code is the run's."""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import IO

from launcher.config.validate import load
from launcher.errors import Exit, LauncherError
from launcher.lock import holding
from launcher.outcome import ATTEMPT, STEP, record
from launcher.plan.targets import spent
from launcher.process import STOP_SIGNALS
from launcher.run_dir import RunDir, State, writing
from launcher.train import stopping
from launcher.train.agent import stop_on_signals
from launcher.train.budget import Budget, counting
from launcher.train.ends import End, Outcome, out_of_hours, outcome
from launcher.train.failures import clear_words, first_failure, read_words
from launcher.train.limits import limits
from launcher.train.watch import StopWatch, count_start

LOOK_EVERY = 0.1
_TASKS = re.compile(r"^srun: error: \S+: tasks? ([\d,\[\]-]+): (.+?)(?: \(core dumped\))?$")
_CODE = re.compile(r"^Exited with exit code (\d+)$")
_SIGNALS = {str(signal.strsignal(one)): int(one) for one in signal.Signals} | {"Out Of Memory": int(signal.SIGKILL)}


class Said:
    """What srun says of its tasks on its standard error, which is passed on."""

    def __init__(self) -> None:
        self.exits: dict[int, int] = {}
        """The exit codes of the ranks that ended badly by themselves, in their order; negative for a signal."""
        self._are_ended = False

    def read(self, lines: Iterable[str]) -> None:
        """Takes in what srun says, to its end."""
        for line in lines:
            sys.stderr.write(line)
            sys.stderr.flush()
            self.take(line.rstrip("\n"))

    def take(self, line: str) -> None:
        """Takes in one line. What srun ends itself, once a rank has failed, has not failed by itself."""
        self._are_ended = self._are_ended or "Terminating StepId" in line or "Terminating JobId" in line
        found = _TASKS.match(line)
        if found is None:
            return
        code = _CODE.match(found[2])
        exit_code = int(code[1]) if code is not None else -_SIGNALS.get(found[2], 0)
        if exit_code and not (self._are_ended and exit_code < 0):
            self.exits |= {rank: exit_code for rank in _numbers(found[1]) if rank not in self.exits}


def _numbers(text: str) -> list[int]:
    """Those in a list as Slurm writes it: ``0,2-3``."""
    found: list[int] = []
    for one in text.strip("[]").split(","):
        first, _, last = one.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def run_step(run: RunDir, argv: list[str], started: float) -> int:
    """Starts the ranks by `argv` and looks after them to their end. Returns the run's exit code.

    Args:
        started: when this process was started, by `time.monotonic`.
    """
    folder = run.path / "step"
    try:
        state, code, error = _run(run, folder, argv, started)
    except (OSError, LauncherError) as problem:
        state, code, error = State.failed, int(Exit.RANK_FAILED), {"rank": None, "reason": str(problem)}
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # nothing is left to stop
    shutil.rmtree(folder, ignore_errors=True)
    record(run, state=state, exit_code=code, error=error)
    return code


def _run(run: RunDir, folder: Path, argv: list[str], started: float) -> Outcome:
    allowed = limits(load(run.config))
    if spent(run, allowed.device_hours) is not None:
        return out_of_hours(run, allowed.device_hours)
    with writing(folder):
        shutil.rmtree(folder, ignore_errors=True)  # of a start that was killed
        folder.mkdir()
    attempt = count_start(run)
    clear_words(run.logs)
    environment = {**os.environ, STEP: str(folder), ATTEMPT: str(attempt)}
    _take_signals(folder)
    srun = subprocess.Popen(
        argv, env=environment, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace"
    )
    assert srun.stderr is not None
    with counting(Budget(run, folder, allowed.device_hours, started, lambda: _is_running(run))):
        end = _watch(srun, srun.stderr, StopWatch(run, folder, allowed, started, says=True), run, folder, attempt)
    if end.is_failed and end.failure is None and end.stop is None:
        code = 128 - srun.returncode if srun.returncode < 0 else srun.returncode
        reason = f"srun ended with {code} before a rank could say why: see the job's output in {run.logs}"
        return State.failed, max(code, int(Exit.RANK_FAILED)), {"rank": None, "reason": reason}
    return outcome(run, folder, end, allowed)


def _is_running(run: RunDir) -> bool:
    with suppress(LauncherError):
        return run.read_status().get("state") == State.running.value
    return False


def _take_signals(folder: Path) -> None:
    """From now on a signal that asks this process to stop is a wish to all ranks."""

    def note(number: int, _frame: FrameType | None) -> None:
        stopping.ask(folder, signal.Signals(number).name)

    for number in STOP_SIGNALS:
        signal.signal(number, note)


def _watch(
    srun: "subprocess.Popen[str]", errors: IO[str], watch: StopWatch, run: RunDir, folder: Path, attempt: int
) -> End:
    """How the ranks have ended, once they have."""
    said, is_overdue = Said(), False
    reader = threading.Thread(target=said.read, args=(errors,), daemon=True)
    reader.start()
    while srun.poll() is None:
        if watch.stop is None and stopping.asked(folder) is not None:
            time.sleep(LOOK_EVERY)  # by then it has been read what srun said before the ranks were told
        # once a task has ended badly srun ends the others by SIGTERM, which is nobody's wish that the run stops
        if watch.stop is not None or not said.exits:
            watch.look()
        if watch.is_over and not is_overdue:
            is_overdue = True
            _kill_ranks()
        time.sleep(LOOK_EVERY)
    reader.join(timeout=5)
    if srun.returncode == 0:
        return End(False, watch.stop, None)
    words = read_words(attempt, run.logs)
    failure = first_failure(said.exits, words)[0] if said.exits or words else None
    if failure is not None and failure.signal in STOP_SIGNALS:  # it couldn't take it yet, or not any more
        stopping.ask(folder, signal.Signals(failure.signal).name)
        watch.look()
    return End(True, watch.stop, failure, is_overdue)


def _kill_ranks() -> None:
    """Ends every task of the job but its batch script, at once."""
    job = os.environ.get("SLURM_JOB_ID", "")
    subprocess.run(["scancel", "--signal=KILL", job], stdin=subprocess.DEVNULL, check=False)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit("usage: python -m launcher.train.step RUN_DIR srun …")
    began, this_run = time.monotonic(), RunDir(Path(sys.argv[1]))
    stop_on_signals(this_run, 0)
    try:
        with holding(this_run):
            sys.exit(run_step(this_run, sys.argv[2:], began))
    except LauncherError as refused:
        print(f"launcher.train.step: {refused}", file=sys.stderr)
        sys.exit(int(refused.exit_code))
