"""How fast a run is saved and filled again, and how long its training stands still for it, against torch.save and
torch.load of the same tensors by one process.

Parameters and AdamW's states, 12 bytes a parameter. All ways in turn, round after round, each file flushed to the disk;
what is read was written a moment ago and comes from the system's memory on both sides.

    python benchmarks/checkpoints.py
    python benchmarks/checkpoints.py --size 0.4M --rounds 3 --strategies ddp fsdp
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from setting import SIZES, Quartiles, assembled, config_text, model_overrides, parts_of, run_on_ranks

from launcher.config.validate import parse
from launcher.train.fit import Fit


def text(strategy: str, size: str) -> str:
    more = ["cluster.device=cpu", "training.duration=1 updates", "checkpoint.every=null", "batch.global_batch_size=2"]
    more += ["data.validation=null", "cluster.ranks_per_node=2"]
    return config_text([*model_overrides(size), f"strategy={strategy}", *more])


def timed(do: Callable[[], object]) -> float:
    """Seconds until all ranks have done it."""
    dist.barrier()
    started = time.perf_counter()
    do()
    dist.barrier()
    return time.perf_counter() - started


def save_plainly(state: dict[str, torch.Tensor], path: Path) -> None:
    with open(path, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def plain_state(fit: Fit) -> dict[str, torch.Tensor]:
    """What one process would save: parameters, and two moments of each."""
    state = fit.sharding.full_state()
    for key in ("exp_avg", "exp_avg_sq"):
        state |= {f"{name}.{key}": torch.ones_like(one) for name, one in fit.sharding.full_items()}
    return state


class Way:
    """A strategy, and what its saves and loads took."""

    def __init__(self, name: str, fit: Fit) -> None:
        assert fit.saver is not None
        self.name, self.saver, self.progress = name, fit.saver, fit.progress.to_dict()
        self.saves: list[float] = []
        self.loads: list[float] = []
        self.stalls: list[float] = []

    def round(self, number: int) -> None:
        """One of everything; `number`: from 1."""
        self.saves.append(timed(lambda: self.saver.save(2 * number, self.progress, wait=True)))
        self.saver.save(2 * number + 1, self.progress)
        self.saver.settle()
        self.stalls.append(self.saver.done[-1].stall_seconds)
        self.loads.append(timed(self.saver.restore))


def measure(rank: int, world_size: int, strategies: list[str], size: str, rounds: int, folder: str) -> None:
    """Saves and loads in turn; rank 0 prints what it took."""
    ways, plain = [], Path(folder, "plain.pt")
    for strategy in strategies:
        config = text(strategy, size)
        fit = assembled(rank, world_size, config, parts_of(parse(config)), Path(folder, strategy))
        fit.reporter.say = lambda _: None  # type: ignore[method-assign]
        fit.run()  # so that there are optimizer states
        ways.append(Way(strategy, fit))
    state = plain_state(fit)
    saves, loads = [], []
    for number in range(1, rounds + 1):
        saves.append(timed(lambda: save_plainly(state, plain) if rank == 0 else None))
        loads.append(timed(lambda: torch.load(plain, weights_only=True) if rank == 0 else None))
        for way in ways:
            way.round(number)
    if rank == 0:
        report(sum(one.numel() * one.element_size() for one in state.values()) / 1e6, saves, loads, ways)


def report(megabytes: float, saves: list[float], loads: list[float], ways: list[Way]) -> None:
    """Prints MB/s, how many times as fast as torch that is, and the stall as a share of torch.save's time."""

    def rate(seconds: list[float]) -> str:
        return Quartiles.of([megabytes / one for one in seconds]).text(".0f")

    def ratio(over: list[float], under: list[float]) -> str:
        return Quartiles.of([one / other for one, other in zip(over, under, strict=True)]).text(".2f")

    print(f"{megabytes:.0f} MB, {len(saves)} rounds on 2 ranks; median [quartiles]")
    heads = ("save, MB/s", "x torch.save", "load, MB/s", "x torch.load", "stall, share of it")
    print(" " * 16 + " ".join(f"{one:<20}" for one in heads))
    print(f"one process     {rate(saves):<20} {'1':<20} {rate(loads):<20} 1")
    for way in ways:
        cells = [rate(way.saves), ratio(saves, way.saves), rate(way.loads), ratio(loads, way.loads)]
        print(f"{way.name:<15} " + " ".join(f"{one:<20}" for one in cells) + f" {ratio(way.stalls, saves)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="10M")
    parser.add_argument("--strategies", nargs="+", default=["ddp", "fsdp", "zero1", "zero3"])
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="checkpoints-") as folder:
        run_on_ranks(measure, 2, arguments.strategies, arguments.size, arguments.rounds, folder)
