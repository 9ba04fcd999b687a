"""The entry of a rank: ``python -m launcher.train.worker RUN_DIR``. Reads two files, builds, fits."""

import atexit
import faulthandler
import json
import os
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from launcher.errors import Exit, LauncherError, StorageError
from launcher.outcome import ATTEMPT, SCRATCH
from launcher.process import end_with_parent, log_to
from launcher.run_dir import RunDir, write_atomic, writing
from launcher.train.hangs import STACKS
from launcher.train.stopping import take_signals


def error_file(folder: Path, rank: int, attempt: int) -> Path:
    """Where a rank leaves word of why it failed."""
    return folder / f"error_{attempt}_{rank}.json"


_word = threading.Lock()
"""Never released: the first thread of a rank that leaves word of an error is the one that ends it."""


def _leave_word(run: RunDir, rank: int, attempt: int, error: BaseException, code: int) -> None:
    _word.acquire()
    text = str(error) if isinstance(error, LauncherError) else "".join(traceback.format_exception(error))
    word = {
        "rank": rank,
        "exit_code": code,
        "time": time.time(),
        "type": type(error).__name__,
        "message": text.rstrip(),
        "is_message": isinstance(error, LauncherError),
    }
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)
    try:
        write_atomic(error_file(run.logs, rank, attempt), json.dumps(word))
    except StorageError:  # often the very reason
        if SCRATCH not in os.environ:
            raise
        write_atomic(error_file(Path(os.environ[SCRATCH]), rank, attempt), json.dumps(word))


def end_with_threads(run: RunDir, rank: int, attempt: int) -> None:
    """Lets a LauncherError in any thread end this process at once: its main thread may wait for ever for the others."""
    ordinary = threading.excepthook

    def hook(failed: threading.ExceptHookArgs) -> None:
        if not isinstance(failed.exc_value, LauncherError):
            ordinary(failed)  # a library's thread
            return
        _leave_word(run, rank, attempt, failed.exc_value, failed.exc_value.exit_code)
        os._exit(failed.exc_value.exit_code)

    threading.excepthook = hook


def main(run_dir: str, task: str = "train") -> int:
    """Runs one rank to its end. Returns its exit code. `task`: train or verify."""
    take_signals()
    run = RunDir(Path(run_dir))
    rank, attempt = int(os.environ["RANK"]), int(os.environ[ATTEMPT])
    end_with_parent(signal.SIGKILL)
    try:
        with writing(run.rank_log(rank)):
            log_to(run.rank_log(rank))
        faulthandler.enable()
        faulthandler.register(STACKS, all_threads=True)
        end_with_threads(run, rank, attempt)
        if task == "verify":
            from launcher.train.verify import verify_rank as do
        else:
            from launcher.train.run import run_rank as do
        do(run, attempt)
    except SystemExit as stop:
        if stop.code in (0, None):  # user code left early: the others would wait for this rank for ever
            error = RuntimeError("this rank ended by sys.exit(0) before the run was finished")
            _leave_word(run, rank, attempt, error, Exit.RANK_FAILED)
            return Exit.RANK_FAILED
        code = stop.code if isinstance(stop.code, int) else Exit.RANK_FAILED
        _leave_word(run, rank, attempt, RuntimeError(f"this rank ended by sys.exit({stop.code!r})"), code)
        return code
    except BaseException as error:
        code = error.exit_code if isinstance(error, LauncherError) else Exit.RANK_FAILED
        _leave_word(run, rank, attempt, error, code)
        return code
    return Exit.FINISHED


def run_and_leave(run_dir: str, task: str = "train") -> NoReturn:
    """Runs one rank, and ends this process with its exit code."""
    code = int(Exit.RANK_FAILED)
    atexit.register(lambda: leave(code))  # the first is the last to be called
    code = main(run_dir, task)
    if code:  # the others may hang in a collective with this rank: no farewell to anyone
        leave(code)
    sys.exit(code)


def leave(code: int) -> NoReturn:
    """Ends this process without freeing what it holds: see `run.joined`."""
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    run_and_leave(*sys.argv[1:])
