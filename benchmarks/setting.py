"""What the benchmarks share: ranks in one process group on this machine, a run put together on them, and quartiles."""

import gc
import os
import statistics
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from launcher.config.choices import Device
from launcher.config.compose import Arguments, compose, hydra_session, task_config
from launcher.config.freeze import freeze
from launcher.config.schema import Config
from launcher.config.validate import parse, validate
from launcher.plan.mesh import World
from launcher.plan.plan import make_plan
from launcher.run_dir import RunDir
from launcher.train.fit import Fit
from launcher.train.parallel.mesh import take_place
from launcher.train.parts import Parts, build_data, build_model, build_task, gather_facts
from launcher.train.run import START_TIMEOUT, assemble

SIZES = {
    "0.4M": {"hidden_size": 128, "num_layers": 2, "num_heads": 2, "intermediate_size": 344},
    "10M": {"hidden_size": 384, "num_layers": 6, "num_heads": 6, "intermediate_size": 1024},
}
"""Models by about how many parameters they have."""


@dataclass(frozen=True)
class Quartiles:
    """The middle half of some measurements."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Quartiles":
        if len(values) < 2:
            return cls(values[0], values[0], values[0])
        return cls(*statistics.quantiles(values, n=4, method="inclusive"))

    def text(self, form: str, factor: float = 1.0) -> str:
        """The median, and the quartiles in brackets."""
        low, median, high = (format(value * factor, form) for value in (self.low, self.median, self.high))
        return f"{median} [{low}, {high}]"


def model_overrides(size: str) -> list[str]:
    """The overrides that make the default model one of SIZES."""
    return [f"model.{name}={value}" for name, value in SIZES[size].items()]


def config_text(overrides: Sequence[str]) -> str:
    """The text of the config.yaml of the default run with these overrides."""
    arguments = Arguments(overrides)
    with hydra_session(arguments) as hydra:
        composed = task_config(compose(hydra, arguments))
        validate(composed)
        return freeze(composed)


def run_on_ranks(function: Callable[..., None], world_size: int, *args: Any) -> None:
    """Calls `function(rank, world_size, *args)` on ranks of one thread each, inside one gloo group."""
    os.environ["OMP_NUM_THREADS"] = "1"  # read when a rank imports torch
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        mp.spawn(_rank, (world_size, f"{folder}/store", function, args), nprocs=world_size)


def _rank(rank: int, world_size: int, store: str, function: Callable[..., None], args: Iterable[Any]) -> None:
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # as on every rank of a run
    dist.init_process_group("gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size)
    try:
        function(rank, world_size, *args)
        dist.barrier()
    finally:
        gc.collect()  # a DDP reducer that outlives the group frees it under Python's lock, and may wait for ever
        dist.destroy_process_group()


def parts_of(config: Config) -> Parts:
    """The model, the task and the data of a configuration."""
    train, validation = build_data(config)
    return Parts(build_model(config), build_task(config), train, validation)


def assembled(rank: int, world_size: int, text: str, parts: Parts, folder: Path | None) -> Fit:
    """What a rank trains with. `folder`: the run's, where rank 0 writes metrics.jsonl and status.json and all
    their checkpoints; None: nothing is written."""
    config = parse(text)
    pp = config.mesh.pp
    facts = gather_facts(config, parts, world_size // pp)
    plan = make_plan(config, facts, world=World(1, world_size, Device.cpu))
    place = take_place(rank, world_size // pp, pp, torch.device("cpu"), group=None, timeout=START_TIMEOUT)
    run = None if folder is None else RunDir(folder)
    if run is not None and rank == 0:
        run.create(text, "{}")
    dist.barrier()
    return assemble(config, plan, facts, parts, place, run)
