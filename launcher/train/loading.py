"""Micro-batches from loader workers, and an end to the rank that loses one of them."""

import os
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

from torch.utils.data import DataLoader

from launcher.errors import Exit, LauncherError
from launcher.train.reading import Collate, Item, Read, Samples, start_worker

_HINTS = {
    signal.SIGKILL: "the system may have run out of memory: see dmesg",
    signal.SIGBUS: "the system may have run out of shared memory: see df /dev/shm",
}


class LoaderError(LauncherError):
    """A loader worker has ended before its work was done."""

    exit_code = Exit.RANK_FAILED


def load(
    samples: Samples, task: Any, turns: Iterable[list[Item]], *, workers: int, pin_memory: bool = False
) -> Iterator[Read]:
    """The micro-batches of `turns`, read and collated in `workers` processes ahead of time, or with 0 in this one.

    A worker that ends too early raises LoaderError in a thread of its own, since this one may wait in a collective for
    a rank that will never come, where no signal's handler runs. Who needs these micro-batches sees to it that such an
    error ends the process (`worker.end_with_threads`).
    """
    counted = _Counted(turns)
    loader: DataLoader[Any] = DataLoader(
        samples,
        batch_sampler=counted,
        collate_fn=Collate(task),
        num_workers=workers,
        worker_init_fn=start_worker,
        pin_memory=pin_memory,
    )
    if workers == 0:
        yield from iter(loader)
        return
    with _own_handler(signal.SIGCHLD):
        reading: Any = iter(loader)
    for worker in reading._workers:
        worker._popen.terminate = worker._popen.kill  # `start_worker` lets SIGTERM pass
    watch = _Watch(reading._workers)
    try:
        for number, read in enumerate(reading, 1):
            if counted.is_done and number == counted.count:
                watch.close()  # from here on workers may end
            yield read
    finally:
        watch.close()


class _Counted:
    """A batch sampler that knows how many micro-batches were asked of it."""

    def __init__(self, turns: Iterable[list[Item]]) -> None:
        self._turns = turns
        self.count = 0
        self.is_done = False

    def __iter__(self) -> Iterator[list[Item]]:
        for turn in self._turns:
            self.count += 1
            yield turn
        self.is_done = True


@contextmanager
def _own_handler(number: signal.Signals) -> Iterator[None]:
    """Leaves the handler of a signal as it was: torch's loader raises from one, at whatever line the rank is."""
    before = signal.getsignal(number)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(number, signal.SIG_DFL if before is None else before)


class _Watch:
    """A thread that waits for the end of loader workers."""

    def __init__(self, workers: Iterable[BaseProcess]) -> None:
        self._workers = {worker.sentinel: worker for worker in workers}
        self._told, self._tell = os.pipe()
        self._is_open = True
        self._thread = threading.Thread(target=self._wait, name="loader workers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Workers may end from now on. Never waits: a daemon's thread may not run any more when a process ends."""
        if self._is_open:
            self._is_open = False
            os.write(self._tell, b".")
            os.close(self._tell)

    def _wait(self) -> None:
        ended = wait([self._told, *self._workers])
        is_closed = self._told in ended
        os.close(self._told)
        # a rank that leaves sends its workers away
        if not is_closed and threading.main_thread().is_alive():
            raise LoaderError(_end_of(next(self._workers[one] for one in ended if isinstance(one, int))))


def _end_of(worker: BaseProcess) -> str:
    """How a worker has ended, in words; its process is left for torch to collect."""
    assert worker.pid is not None
    how = os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
    assert how is not None
    what = f"a loader worker (process {worker.pid})"
    if how.si_code == os.CLD_EXITED:
        return f"{what} ended with exit code {how.si_status}; data.workers=0 shows where"
    number = how.si_status
    hint = f" ({_HINTS[signal.Signals(number)]})" if number in _HINTS else ""
    return f"{what} was killed by signal: {signal.strsignal(number)}{hint}"
