"""Ranks for tests: processes that are started once, and a fresh process group for every function run on them."""

import contextlib
import faulthandler
import gc
import itertools
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Self

from launcher.process import end_with_parent

START_TIMEOUT = 120.0
"""Seconds within which a new rank has imported torch."""
GRACE = 10.0
"""Seconds that the other ranks have to end after one has failed, since they may wait for it in a collective."""
STACKS_TIMEOUT = 5.0
"""Seconds within which a rank has written down where it stands."""
MOST_THREADS = 100
"""Of a rank that is kept. Groups that something still refers to after their end (engines of DeepSpeed hold themselves
by hooks on gradients) keep three threads each, one of which looks for messages a hundred times a second: 127 of them,
after one file of tests, took 15 % of a core in a rank that had nothing to do."""


class RankError(Exception):
    """A rank that died, or raised something that can't travel between processes."""


class _Where(Exception):
    """The traceback of a rank, as the cause of its exception."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@dataclass
class _Task:
    function: Callable[..., Any]
    args: tuple[Any, ...]
    world_size: int
    store: str
    timeout: float


@dataclass
class _Outcome:
    ended: float
    """A clock that all processes of a machine share: of several failures the first is the cause."""
    value: Any = None
    error: tuple[type[BaseException], tuple[Any, ...], dict[str, Any]] | None = None
    where: str | None = None
    """The traceback, where the function raised."""


@dataclass
class _Rank:
    process: Any
    connection: Connection
    stacks: Path
    is_ready: bool = False


class RankPool:
    """Runs functions on up to `max_size` ranks, in processes that are started when they are first needed."""

    def __init__(self, max_size: int) -> None:
        self.max_size = max_size
        self._context = multiprocessing.get_context("spawn")
        self._ranks: list[_Rank] = []
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._numbers = itertools.count()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        return [rank.process.pid for rank in self._ranks]

    def run(
        self, function: Callable[..., Any], *args: Any, timeout: float = 120.0, world_size: int | None = None
    ) -> list[Any]:
        """Calls ``function(rank, world_size, *args)`` on every rank, inside a gloo group of them alone.

        Args:
            function: a function at the top of a module, since it travels by name.
            timeout: seconds from the moment when all ranks are there.
            world_size: how many ranks; None: all of the pool.

        Returns:
            What each rank returned, in their order.

        Raises:
            TimeoutError: with the stack of every rank. The next run gets new processes.
            RankError: a rank died.
            Exception: what the first failing rank raised, caused by that rank's traceback.
        """
        world_size = self.max_size if world_size is None else world_size
        assert 1 <= world_size <= self.max_size, f"{world_size} of at most {self.max_size} ranks"
        store = str(Path(self._folder.name) / f"store_{next(self._numbers)}")
        task = pickle.dumps(_Task(function, args, world_size, store, timeout))
        try:
            ranks = self._start(world_size)
            for number, rank in enumerate(ranks):
                rank.connection.send_bytes(pickle.dumps((number, sys.path, task)))
            outcomes = self._gather(ranks, timeout)
        except BaseException:
            self._kill()
            raise
        failed = [outcome for outcome in outcomes if outcome is not None and outcome.where is not None]
        if None in outcomes or any(_num_threads(rank) > MOST_THREADS for rank in ranks):
            self._kill()
        if failed:
            _raise(min(failed, key=lambda outcome: outcome.ended))
        return [outcome.value for outcome in outcomes if outcome is not None]

    def close(self) -> None:
        """Ends all processes."""
        for rank in self._ranks:
            rank.connection.close()
        deadline = time.monotonic() + GRACE
        for rank in self._ranks:
            rank.process.join(max(0.0, deadline - time.monotonic()))
        self._kill()
        self._folder.cleanup()

    def _start(self, world_size: int) -> list[_Rank]:
        while len(self._ranks) < world_size:
            ours, theirs = self._context.Pipe()
            stacks = Path(self._folder.name) / f"stacks_{next(self._numbers)}"
            # a daemon could start no loader workers
            process = self._context.Process(target=_serve, args=(theirs, str(stacks)), daemon=False)
            with _environment(OMP_NUM_THREADS="1"):
                process.start()
            theirs.close()
            self._ranks.append(_Rank(process, ours, stacks))
        ranks = self._ranks[:world_size]
        deadline = time.monotonic() + START_TIMEOUT
        for number, rank in enumerate(ranks):
            if not rank.is_ready:
                if not rank.connection.poll(max(0.0, deadline - time.monotonic())):
                    raise RankError(f"rank {number} was not ready within {START_TIMEOUT:.0f} s")
                _receive(rank, number)
                rank.is_ready = True
        return ranks

    def _gather(self, ranks: list[_Rank], timeout: float) -> list[_Outcome | None]:
        """The outcome of every rank; None for one that didn't end after another had failed."""
        outcomes: list[_Outcome | None] = [None] * len(ranks)
        waiting = {rank.connection: number for number, rank in enumerate(ranks)}
        deadline, failed = time.monotonic() + timeout, False
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready and failed:
                break
            if not ready:
                raise TimeoutError(
                    f"ranks {sorted(waiting.values())} of {len(ranks)} were not done in {timeout:g} s\n{_stacks(ranks)}"
                )
            for connection in ready:
                assert isinstance(connection, Connection)
                number = waiting.pop(connection)
                outcome = outcomes[number] = _outcome(ranks[number], number)
                if outcome.where is not None and not failed:
                    failed, deadline = True, time.monotonic() + GRACE
        return outcomes

    def _kill(self) -> None:
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.process.join()
            rank.process.close()
            rank.connection.close()
        self._ranks.clear()


def _num_threads(rank: _Rank) -> int:
    tasks = Path(f"/proc/{rank.process.pid}/task")
    return sum(1 for _ in tasks.iterdir()) if tasks.exists() else 0


def _receive(rank: _Rank, number: int) -> bytes:
    try:
        return rank.connection.recv_bytes()
    except (EOFError, ConnectionError):
        rank.process.join()
        where = rank.stacks.read_text()  # what a fault of memory left
        raise RankError(f"rank {number} died with exit code {rank.process.exitcode}\n{where}".rstrip()) from None


def _outcome(rank: _Rank, number: int) -> _Outcome:
    outcome = pickle.loads(_receive(rank, number))
    assert isinstance(outcome, _Outcome)
    if outcome.where is not None:
        outcome.where = f"on rank {number}:\n{outcome.where}"
    return outcome


def _raise(outcome: _Outcome) -> None:
    if outcome.error is None:
        raise RankError(outcome.where)
    kind, args, attributes = outcome.error
    # a class whose __init__ takes other arguments than it passes on can't be called with what it holds
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(attributes)
    raise error from _Where(outcome.where)


def _stacks(ranks: list[_Rank]) -> str:
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank.process.pid, signal.SIGUSR1)
    return "\n".join(f"--- rank {number}\n{_stack(rank)}" for number, rank in enumerate(ranks))


def _stack(rank: _Rank) -> str:
    deadline, seen = time.monotonic() + STACKS_TIMEOUT, ""
    while time.monotonic() < deadline:
        text = rank.stacks.read_text()
        if text and text == seen:
            return text
        seen = text
        time.sleep(0.1)  # the signal's handler in the other process has no way to say that it is done
    return seen or "no answer"


@contextlib.contextmanager
def _environment(**values: str) -> Any:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _serve(connection: Connection, stacks: str) -> None:
    """A rank's process: does what it is told until the other end is closed."""
    end_with_parent(signal.SIGKILL)
    with open(stacks, "w") as file:
        faulthandler.enable(file=file, all_threads=True)
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        import torch

        torch.set_num_threads(1)
        connection.send_bytes(b"ready")
        while True:
            try:
                message = connection.recv_bytes()
            except (EOFError, ConnectionError):
                return
            connection.send_bytes(_carry_out(message))
            gc.collect()


def _carry_out(message: bytes) -> bytes:
    rank, path, task = pickle.loads(message)
    try:
        sys.path[:] = path
        outcome = _call(rank, pickle.loads(task))
        return pickle.dumps(outcome)
    except BaseException as error:
        return pickle.dumps(_failure(error))


def _call(rank: int, task: _Task) -> _Outcome:
    import torch
    import torch.distributed as dist

    environment, folder = dict(os.environ), os.getcwd()
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(task.store, task.world_size),
        rank=rank,
        world_size=task.world_size,
        # later than the pool's own, which shows where the ranks stand
        timeout=timedelta(seconds=task.timeout + 60),
    )
    torch.manual_seed(0)
    try:
        # a rank that leaves while another still connects to it, or still reads from it, would fail that one
        dist.barrier()
        value = task.function(rank, task.world_size, *task.args)
        dist.barrier()
        return _Outcome(value=value, ended=time.monotonic())
    except BaseException as error:
        return _failure(error)
    finally:
        gc.collect()  # a DDP reducer that outlives the group frees it under Python's lock, and may wait for ever
        dist.destroy_process_group()
        if "torch.distributed.tensor" in sys.modules:
            # by itself it keeps meshes for shapes that it has met, also when their groups are gone
            from torch.distributed.tensor.debug import _clear_sharding_prop_cache

            _clear_sharding_prop_cache()
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(False)
        torch.set_grad_enabled(True)


def _failure(error: BaseException) -> _Outcome:
    where = "".join(traceback.format_exception(error))
    packed = (type(error), error.args, dict(error.__dict__))
    try:
        pickle.loads(pickle.dumps(packed))
    except Exception:
        return _Outcome(ended=time.monotonic(), where=where)
    return _Outcome(ended=time.monotonic(), error=packed, where=where)
