"""What a pipeline of two stages costs against two copies of the model: the time of a window for both, and the share
that ranks should wait by the formula.

The same model on the same two ranks, window by window in turn, so that what else the machine does meets both. All
samples have one length, so that nothing is padded; both layouts of ranks run as many micro-batches of as many rows.
With two copies no rank waits, so their time over that of the pipeline is the share in which the stages work. The
formula says m / (m + 1) for m micro-batches; stages that don't cost the same take more.

    python benchmarks/pipeline.py
    python benchmarks/pipeline.py --schedules 1f1b zbv --micro-batches 2 8 32
"""

import argparse
import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from setting import Quartiles, assembled, config_text, parts_of, run_on_ranks

from launcher.config.validate import parse
from launcher.plan.pipeline import Flow
from launcher.train.fit import Fit

LENGTH, ROWS = 128, 4
MODEL = ("model.hidden_size=128", "model.num_layers=8", "model.num_heads=4", "model.intermediate_size=344")


class Fixed:
    """Sequences of one length."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.samples = torch.randint(256, (count, LENGTH), generator=generator).numpy()
        self.lengths = [LENGTH] * count

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> object:
        return self.samples[index]


@dataclass
class Course:
    """A training, and what its windows took in seconds."""

    fit: Fit
    seconds: list[float] = field(default_factory=list)

    def update(self, number: int) -> None:
        """One update (from 1), from reading its window to the changed parameters."""
        dist.barrier()
        started = time.perf_counter()
        window = self.fit.windows.get(number)
        self.fit.runner.run(window)
        self.fit.sharding.step(self.fit.rate(number - 1), self.fit.policy.max_grad_norm)
        dist.barrier()
        self.seconds.append(time.perf_counter() - started)


def text(schedule: str | None, micro_batches: int, updates: int) -> str:
    """The configuration of two copies (None), or of two stages under a schedule."""
    window = micro_batches * ROWS
    spread = ["strategy=ddp"] if schedule is None else ["mesh.pp=2", f"pipeline.schedule={schedule}"]
    return config_text(
        [
            *MODEL,
            *spread,
            "data=custom",
            "data.train._target_=pipeline.Fixed",
            f"+data.train.count={window}",
            f"batch.global_batch_size={window}",
            f"batch.micro_batch_size={ROWS}",
            f"training.duration={updates} updates",
            "cluster.device=cpu",
        ]
    )


def compare(rank: int, world_size: int, texts: list[str], names: list[str], micro_batches: int, warmup: int) -> None:
    """Trains every way in turn; rank 0 prints what it took."""
    courses = [Course(assembled(rank, world_size, one, parts_of(parse(one)), None)) for one in texts]
    for course in courses:
        course.fit.sharding.prepare()
    for number in range(1, courses[0].fit.policy.num_updates + 1):
        for course in courses if number % 2 else reversed(courses):
            course.update(number)
    if rank == 0:
        copies = courses[0].seconds[warmup:]
        for name, course in zip(names, courses, strict=True):
            own = course.seconds[warmup:]
            share = Quartiles.of([one / other for one, other in zip(copies, own, strict=True)])
            line = f"{micro_batches:>4}  {name:<24} {Quartiles.of(own).text('.0f', 1e3):<26}"
            if name != "two copies":
                works = 1 - Flow(name, 2, 1 if name in ("1f1b", "gpipe") else 2, None).bubble(micro_batches)
                line += f" {share.text('.2f'):<24} {works:.2f}"
            print(line, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[2, 4, 8, 16, 32])
    parser.add_argument("--schedules", nargs="+", default=["1f1b"])
    parser.add_argument("--updates", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=2)
    arguments = parser.parse_args()
    print("   m  on 2 ranks               window, ms: median [quartiles]  working: measured   by the formula")
    for count in arguments.micro_batches:
        ways = [None, *arguments.schedules]
        run_on_ranks(
            compare,
            2,
            [text(one, count, arguments.updates) for one in ways],
            [one or "two copies" for one in ways],
            count,
            arguments.warmup,
        )
