"""The ranks that numerics tests run on: results in order, failures with their traceback, hangs with their stacks."""

import os
import signal
import threading

import pytest
import torch
import torch.distributed as dist
from ranks import MOST_THREADS, RankError, RankPool

from launcher.errors import ConfigError


def _sum_of_ranks(rank: int, world_size: int, factor: float) -> tuple[int, int, float, int]:
    value = torch.tensor(factor * (rank + 1))
    dist.all_reduce(value)
    return rank, dist.get_world_size(), float(value), torch.get_num_threads()


def _raise_on_last(rank: int, world_size: int) -> None:
    if rank == world_size - 1:
        raise ConfigError("batch.micro_batch_size", 0, "must be at least 1")
    dist.barrier()


def _raise_unpicklable(rank: int, world_size: int) -> None:
    class Local(Exception):
        pass

    raise Local(f"raised on {rank}")


def _hang_on_last(rank: int, world_size: int) -> None:
    if rank == world_size - 1:
        threading.Event().wait()
    dist.barrier()


def _die_on_last(rank: int, world_size: int) -> None:
    if rank == world_size - 1:
        os._exit(7)
    dist.barrier()


def _fault_on_last(rank: int, world_size: int) -> None:
    if rank == world_size - 1:
        signal.raise_signal(signal.SIGSEGV)
    dist.barrier()


def _pid(rank: int, world_size: int) -> int:
    return os.getpid()


def _leave_traces(rank: int, world_size: int) -> None:
    torch.set_default_dtype(torch.float64)
    os.environ["LEFT_BEHIND"] = "1"


def _traces(rank: int, world_size: int) -> tuple[torch.dtype, bool]:
    return torch.get_default_dtype(), "LEFT_BEHIND" in os.environ


def _leave_threads(rank: int, world_size: int) -> None:
    for _ in range(MOST_THREADS):
        threading.Thread(target=threading.Event().wait, daemon=True).start()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_run_has_a_group_of_its_own(ranks: RankPool, world_size: int) -> None:
    total = 0.5 * world_size * (world_size + 1) / 2
    assert ranks.run(_sum_of_ranks, 0.5, world_size=world_size) == [
        (rank, world_size, total, 1) for rank in range(world_size)
    ]


def test_processes_are_kept_and_what_a_run_sets_is_not(ranks: RankPool) -> None:
    before = ranks.run(_pid, world_size=2)
    ranks.run(_leave_traces, world_size=2)
    assert ranks.run(_traces, world_size=2) == [(torch.float32, False)] * 2
    assert ranks.run(_pid, world_size=2) == before


def test_processes_that_keep_too_many_threads_are_replaced(ranks: RankPool) -> None:
    before = ranks.run(_pid, world_size=2)
    ranks.run(_leave_threads, world_size=2)
    assert set(before).isdisjoint(ranks.run(_pid, world_size=2))


def test_what_a_rank_raises_is_raised_with_its_traceback(ranks: RankPool) -> None:
    with pytest.raises(ConfigError, match="must be at least 1") as caught:
        ranks.run(_raise_on_last, world_size=2)
    assert caught.value.key == "batch.micro_batch_size"
    assert "on rank 1" in str(caught.value.__cause__)
    assert "in _raise_on_last" in str(caught.value.__cause__)
    with pytest.raises(RankError, match="raised on"):
        ranks.run(_raise_unpicklable, world_size=2)
    assert len(ranks.run(_pid, world_size=2)) == 2


@pytest.mark.slow
def test_a_hang_shows_every_stack_and_a_death_is_told() -> None:
    with RankPool(2) as pool:
        with pytest.raises(TimeoutError, match=r"ranks \[0, 1\] of 2 were not done in 2 s") as caught:
            pool.run(_hang_on_last, timeout=2)
        first, second = str(caught.value).split("--- rank ")[1:]
        assert "in barrier" in first
        assert "in _hang_on_last" in first
        assert "threading.py" in second
        assert "in _hang_on_last" in second
        assert pool.pids == []
        with pytest.raises(RankError, match="rank 1 died with exit code 7"):
            pool.run(_die_on_last)
        with pytest.raises(
            RankError, match=r"(?s)rank 1 died with exit code -11\nFatal Python error.*in _fault_on_last"
        ):
            pool.run(_fault_on_last)
        pids = pool.run(_pid)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
