"""Time per update of the launcher's loop over that of a bare loop around DistributedDataParallel.

Both train the same model from the same weights on the same samples in the same micro-batches, on the same ranks in one
process group, a few updates in turn, so that what else the machine does meets both. The last line of each size says how
far apart the two models are at the end: both did the same updates.

    python benchmarks/overhead.py
    python benchmarks/overhead.py --sizes 10M --updates 100 --micro-batch-size 8
"""

import argparse
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from setting import SIZES, Quartiles, assembled, config_text, model_overrides, parts_of, run_on_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from launcher.config.validate import parse
from launcher.models import GPT
from launcher.train.parts import Parts, build_model

BOS, IGNORED = 256, -100
MAX_NORM, WEIGHT_DECAY = 1.0, 0.1
# Adam divides rounding by rounding where a gradient is nearly zero: with a smaller eps the models drift apart by that
EPS = 1e-5


class Bare:
    """The loop that one would write by hand: read, pad, forward and backward, clip, step.

    Its divisor is the number of tokens of the whole batch, which ranks have to agree on; nothing is logged.

    Args:
        order: [update][micro-batch] -> indices of the samples that this rank reads.
        rates: the learning rate of each update.
    """

    def __init__(self, model: GPT, data: Any, order: list[list[list[int]]], rates: list[float]) -> None:
        self.model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        self.data, self.order, self.rates = data, order, rates
        self.parameters = list(model.parameters())
        groups = [
            {"params": [one for one in self.parameters if one.ndim <= 1], "weight_decay": 0.0},
            {"params": [one for one in self.parameters if one.ndim > 1], "weight_decay": WEIGHT_DECAY},
        ]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=EPS)
        self.world_size = dist.get_world_size()

    def update(self, index: int) -> float:
        """One update, from 0. Returns this rank's sum of losses."""
        batches = [self.read(samples) for samples in self.order[index]]
        tokens = torch.tensor(float(sum((targets != IGNORED).sum() for _, targets in batches)))
        dist.all_reduce(tokens)
        loss_sum = torch.zeros(())
        for step, (input_ids, targets) in enumerate(batches):
            with nullcontext() if step == len(batches) - 1 else self.model.no_sync():
                logits = self.model(input_ids)
                loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
                (loss * (self.world_size / float(tokens))).backward()
            loss_sum += loss.detach()
        nn.utils.clip_grad_norm_(self.parameters, MAX_NORM)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rates[index]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss_sum)

    def read(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Inputs and targets, both int64 [rows, T]; each target is the byte after its input."""
        samples = [self.data[index] for index in indices]
        targets = np.full((len(samples), max(map(len, samples))), IGNORED)
        input_ids = np.zeros_like(targets)
        for row, sample in enumerate(samples):
            targets[row, : len(sample)] = sample
            input_ids[row, 0], input_ids[row, 1 : len(sample)] = BOS, sample[:-1]
        return torch.from_numpy(input_ids), torch.from_numpy(targets)


Clocks = tuple[float, float]
"""Seconds that have passed, and seconds in which this process ran on a core, all its threads together."""


def clocks() -> Clocks:
    """Both clocks now."""
    return time.perf_counter(), time.process_time()


def since(started: Clocks) -> Clocks:
    """What has passed on both."""
    passed, worked = clocks()
    return passed - started[0], worked - started[1]


@dataclass
class Turns:
    """Takes turns: a block of the launcher's updates, the same block of the bare loop's; every other pair reversed.

    The launcher's loop runs as it is. This stands after the last thing it does in an update, stops its clock, and runs
    the bare loop there whenever that is due.
    """

    bare: Callable[[int], float]
    num_updates: int
    block: int
    launcher_took: list[Clocks] = field(default_factory=list)
    bare_took: list[Clocks] = field(default_factory=list)
    _started: Clocks = (0.0, 0.0)

    def start(self) -> None:
        """Called right before the launcher's loop."""
        self._started = clocks()

    def after_update(self) -> None:
        """Called after each update of the launcher's loop."""
        self.launcher_took.append(since(self._started))
        done = len(self.launcher_took)
        if done == self.num_updates or done % self.block == 0:
            goes_first = (done // self.block) % 2 == 1  # the next pair starts with the bare loop
            self._run_bare(min(self.num_updates, done + self.block * goes_first))
        self._started = clocks()

    def _run_bare(self, until: int) -> None:
        while len(self.bare_took) < until:
            started = clocks()
            self.bare(len(self.bare_took))
            self.bare_took.append(since(started))


def compare(rank: int, world_size: int, text: str, options: argparse.Namespace, size: str, folder: str) -> None:
    """Trains with both loops on this rank, the launcher's in `folder`; rank 0 prints what it took."""
    config = parse(text)
    parts = parts_of(config)
    fit = assembled(rank, world_size, text, parts, Path(folder))
    updates = range(1, options.updates + 1)
    order = [[[item.sample for item in micro] for micro in fit.windows.micro_batches(one)] for one in updates]
    model = build_model(config)
    assert isinstance(model, GPT)
    bare = Bare(model, parts.train, order, [fit.rate(one - 1) for one in updates])
    turns = Turns(bare.update, options.updates, options.block)
    report = fit.reporter.update

    def report_and_turn(*args: Any) -> None:
        report(*args)
        turns.after_update()

    fit.reporter.update = report_and_turn  # type: ignore[method-assign]
    fit.sharding.prepare()
    fit.sharding.prepare = lambda: None  # type: ignore[method-assign]
    # what a rank says goes to its log, as in a run
    with open(f"{folder}/rank_{rank}.log", "w") as log, redirect_stdout(log):
        turns.start()
        fit.run()
        fit.close()  # the last checkpoint is written beside the loop
    if rank == 0:
        show(size, turns, parts, model, options.warmup)


@torch.no_grad()
def show(size: str, turns: Turns, parts: Parts, model: nn.Module, warmup: int) -> None:
    """Prints the times, their ratios, and how far apart the two models are."""
    print(f"{size}: {sum(one.numel() for one in model.parameters()):,} parameters")
    for index, what in enumerate(("time", "time on a core")):
        ours, bare = ([one[index] for one in took[warmup:]] for took in (turns.launcher_took, turns.bare_took))
        ratio = Quartiles.of(ours).median / Quartiles.of(bare).median
        paired = Quartiles.of([one / other for one, other in zip(ours, bare, strict=True)])
        print(f"  {what} of an update, median [quartiles] of {len(ours)}")
        print(f"    launcher  {Quartiles.of(ours).text('.1f', 1e3)} ms")
        print(f"    bare      {Quartiles.of(bare).text('.1f', 1e3)} ms")
        print(f"    ratio     {ratio:.3f} of the medians, {paired.text('.3f')} window by window")
    pairs = zip(parts.model.parameters(), model.parameters(), strict=True)
    apart = math.sqrt(sum(float((one - other).square().sum()) for one, other in pairs))
    norm = math.sqrt(sum(float(one.square().sum()) for one in model.parameters()))
    print(f"  the models are {apart / norm:.1e} of their norm apart", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Compares the two loops for every size that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES), help="models to train")
    parser.add_argument("--updates", type=int, default=60, help="that each loop makes")
    parser.add_argument("--warmup", type=int, default=4, help="updates at the start that aren't counted")
    parser.add_argument("--block", type=int, default=2, help="updates of one loop before the other's turn")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--global-batch-size", type=int, default=16)
    parser.add_argument("--micro-batch-size", type=int, default=4)
    parser.add_argument("--max-bytes", type=int, default=128, help="where samples are cut")
    parser.add_argument("--layout", choices=("arrival", "length"), default="arrival", help="of both loops")
    options = parser.parse_args(arguments)
    if options.updates <= options.warmup:
        parser.error(f"--updates {options.updates}: must be above --warmup {options.warmup}")
    for size in options.sizes:
        text = config_text(
            [
                *model_overrides(size),
                f"data.train.max_bytes={options.max_bytes}",
                "data.validation=null",
                f"batch.global_batch_size={options.global_batch_size}",
                f"batch.micro_batch_size={options.micro_batch_size}",
                f"batch.layout={options.layout}",
                f"training.duration={options.updates} updates",
                f"training.max_grad_norm={MAX_NORM}",
                f"optimizer.weight_decay={WEIGHT_DECAY}",
                f"optimizer.eps={EPS}",
            ]
        )
        with tempfile.TemporaryDirectory(prefix="overhead-") as folder:
            run_on_ranks(compare, options.ranks, text, options, size, folder)


if __name__ == "__main__":
    main()
