"""What laying a window out by length saves: padded tokens over real ones and the time of an update, for both layouts.

Trains the main job, once with each layout, on the same ranks in one process group: window by window in turn, so that
what else the machine does meets both. The updates are the same; the last line says how far apart the two models are.

    python benchmarks/padding.py
    python benchmarks/padding.py --micro-batch-sizes 4 --global-batch-size 256
"""

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from setting import Quartiles, assembled, config_text, parts_of, run_on_ranks

from launcher.config.validate import parse
from launcher.train.fit import Fit
from launcher.train.window import Window

LAYOUTS = ("arrival", "length")


@dataclass
class Course:
    """A training with one layout, and what its windows took."""

    fit: Fit
    seconds: list[float] = field(default_factory=list)
    core_seconds: list[float] = field(default_factory=list)
    """In which the ranks ran on a core, all of them together."""
    padded_tokens: list[float] = field(default_factory=list)
    real_tokens: list[int] = field(default_factory=list)

    def update(self, number: int) -> None:
        """One update (from 1), from reading its window to the changed parameters."""
        dist.barrier()
        started, worked = time.perf_counter(), time.process_time()
        window = self.fit.windows.get(number)
        self.fit.runner.run(window)
        self.fit.sharding.step(self.fit.rate(number - 1), self.fit.policy.max_grad_norm)
        mine = [time.process_time() - worked, tokens_with_padding(window)]
        self.seconds.append(time.perf_counter() - started)
        core_seconds, padded_tokens = self.fit.place.sum(mine)
        self.core_seconds.append(core_seconds)
        self.padded_tokens.append(padded_tokens)
        assert window.tokens is not None
        self.real_tokens.append(window.tokens)


def tokens_with_padding(window: Window) -> int:
    """Tokens that this rank puts through the model."""
    return sum(micro.batch["input_ids"].numel() for micro in window.micro_batches)


def compare(rank: int, world_size: int, texts: list[str], micro_batch_size: int, warmup: int) -> None:
    """Trains with both layouts in turn; rank 0 prints what it took."""
    courses = []
    for text in texts:
        course = Course(assembled(rank, world_size, text, parts_of(parse(text)), None))
        course.fit.sharding.prepare()
        courses.append(course)
    for number in range(1, courses[0].fit.policy.num_updates + 1):
        for course in courses if number % 2 else reversed(courses):
            course.update(number)
    if rank == 0:
        show(courses, micro_batch_size, warmup)


@torch.no_grad()
def show(courses: list[Course], micro_batch_size: int, warmup: int) -> None:
    """Prints a row for each layout, their ratios, and how far apart the two models are."""
    print(f"micro_batch_size={micro_batch_size}, {len(courses[0].seconds) - warmup} windows")
    print("  layout   tokens with padding / real   window, ms: median [quartiles]   time on cores of all ranks, ms")
    for layout, course in zip(LAYOUTS, courses, strict=True):
        padding = sum(course.padded_tokens[warmup:]) / sum(course.real_tokens[warmup:])
        times = [Quartiles.of(one[warmup:]).text(".0f", 1e3) for one in (course.seconds, course.core_seconds)]
        print(f"  {layout:<8} {padding:<28.3f} {times[0]:<32} {times[1]}")
    for what, pair in (
        ("time", [course.seconds[warmup:] for course in courses]),
        ("time on cores", [course.core_seconds[warmup:] for course in courses]),
    ):
        ratio = Quartiles.of(pair[0]).median / Quartiles.of(pair[1]).median
        paired = Quartiles.of([one / other for one, other in zip(*pair, strict=True)])
        print(f"  arrival / length, {what}: {ratio:.2f} of the medians, {paired.text('.2f')} window by window")
    models = [course.fit.sharding.model.parameters() for course in courses]
    pairs = [(one, other) for one, other in zip(*models, strict=True)]
    apart = math.sqrt(sum(float((one - other).square().sum()) for one, other in pairs))
    norm = math.sqrt(sum(float(one.square().sum()) for one, _ in pairs))
    print(f"  the models are {apart / norm:.1e} of their norm apart", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Compares the two layouts for every micro-batch size that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--micro-batch-sizes", nargs="+", type=int, default=[8, 16])
    parser.add_argument("--global-batch-size", type=int, default=64)
    parser.add_argument("--updates", type=int, default=14, help="with each layout")
    parser.add_argument("--warmup", type=int, default=2, help="updates at the start that aren't counted")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("overrides", nargs="*", help="of the main job, such as data.train.max_bytes=1024")
    options = parser.parse_intermixed_args(arguments)
    if options.updates <= options.warmup:
        parser.error(f"--updates {options.updates}: must be above --warmup {options.warmup}")
    for size in options.micro_batch_sizes:
        common = [
            "data.validation=null",
            f"batch.global_batch_size={options.global_batch_size}",
            f"batch.micro_batch_size={size}",
            f"training.duration={options.updates} updates",
            *options.overrides,
        ]
        texts = [config_text([*common, f"batch.layout={layout}"]) for layout in LAYOUTS]
        run_on_ranks(compare, options.ranks, texts, size, options.warmup)


if __name__ == "__main__":
    main()
