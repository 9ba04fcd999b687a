"""One rank of a run, from its two files to its result."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from launcher.config.choices import Offload, OnNonfinite
from launcher.config.schema import Config
from launcher.config.times import seconds
from launcher.config.validate import load
from launcher.observe.tracker import tracking
from launcher.outcome import SCRATCH, STEP
from launcher.plan.batch import MICRO_BATCH_CAP
from launcher.plan.durations import Every
from launcher.plan.facts import Facts, check_against
from launcher.plan.plan import Plan, solve_again
from launcher.plan.timing import Timing, make_timing, windows_of
from launcher.plan.windows import WindowTable
from launcher.run_dir import RunDir, State, to_json, write_atomic
from launcher.train import heart, stopping
from launcher.train.alone import watch_this_rank
from launcher.train.checkpoint.make import make_saver
from launcher.train.evaluate import Pipeline, Reader, Validation, validate
from launcher.train.final import finish, save_pretrained_files
from launcher.train.fit import Fit, Policy, Runner
from launcher.train.noise_scale import NoiseScale
from launcher.train.parallel.mesh import Place, take_place
from launcher.train.parallel.precision import Precision
from launcher.train.parts import Parts, build_data, build_task, gather_facts, make_model
from launcher.train.precise import PreciseBatchNorm
from launcher.train.reporter import Reporter
from launcher.train.rounds import Rounds
from launcher.train.runner.sequential import SequentialRunner
from launcher.train.sharding.first_gradient import FirstGradient
from launcher.train.sharding.make import make_precision, make_sharding
from launcher.train.spikes import SpikeGuard
from launcher.train.targets import Outlook, judged_after
from launcher.train.window import Windows

if TYPE_CHECKING:
    from launcher.train.runner.stages import Stages

START_TIMEOUT = timedelta(minutes=30)
"""How long a collective may take before torch gives up, where nobody watches for hangs."""
NEVER = timedelta(days=365)


def run_rank(run: RunDir, attempt: int) -> None:
    """Trains this rank's part of the run. Leaves the model and the result in the run's folder (rank 0)."""
    started = time.monotonic()
    if SCRATCH in os.environ:
        heart.start(Path(os.environ[SCRATCH]), int(os.environ["RANK"]))
    with joined(run) as (config, plan, place):
        if STEP in os.environ:
            watch_this_rank(run, place.rank, config)
        train, validation = build_data(config)
        model, fill = make_model(config)
        parts = Parts(model, build_task(config), train, validation, fill)
        plan, facts = complete(config, plan, parts)
        if place.is_first:
            write_atomic(run.plan, to_json(plan.to_dict()))
            save_pretrained_files(run, parts.model)
            run.write_status(state=State.running, attempt=attempt)
        fit = assemble(config, plan, facts, parts, place, run, attempt)
        with tracking(run if place.is_first else None, config.logging.wandb, attempt):
            progress = fit.run()
            fit.close()  # a save that fails gives its room back before the model needs it
            if fit.stopped:
                stopping.leave_mark()
                return
            if fit.precise is not None:
                fit.precise.settle()
            reader = make_reader(config, plan, parts, place)
            finish(run, config, parts, reader, place, fit.sharding, progress, started)


@contextmanager
def joined(run: RunDir) -> Iterator[tuple[Config, Plan, Place]]:
    """The two files of a run, and this rank's place among the others, whom it leaves together with them.

    The groups stay as they are until the process ends: whoever frees one waits for its threads, and does so under
    Python's lock where a DDP reducer was the last to hold it, while gloo's threads may wait for that very lock.
    """
    config, plan = load(run.config), Plan.from_json(run.plan.read_text(encoding="utf-8"))
    for folder in reversed(plan.pythonpath):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    os.chdir(plan.cwd)
    torch.set_flush_denormal(True)  # numbers below 1e-38 slow a CPU down tenfold and mean nothing here
    place = join(plan, offloads=config.strategy.offload is not Offload.none, timeout=collective_timeout(config))
    yield config, plan, place
    if place.world_size > 1:
        dist.barrier(group=place.world_group)  # nobody leaves while another still writes or talks


def collective_timeout(config: Config) -> timedelta:
    """How long a rank waits for others before torch gives up: longer than a hang, which the agent explains better."""
    after = config.training.hang_after
    return START_TIMEOUT + (NEVER if after is None else timedelta(seconds=seconds(after, "training.hang_after")))


def join(plan: Plan, *, offloads: bool = False, timeout: timedelta = START_TIMEOUT) -> Place:
    """Meets the other ranks and says where this one stands. `offloads`: a rank alone makes a group too."""
    rank, world, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    if world != plan.world_size:
        raise RuntimeError(f"the plan is for {plan.world_size} ranks, and {world} were started")
    device, group = torch.device("cpu"), None
    if plan.device == "cuda":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    if world > 1 or offloads:
        # what is offloaded under CUDA is reduced on the host
        dist.init_process_group("cpu:gloo,cuda:nccl" if plan.device == "cuda" else "gloo", timeout=timeout)
        if plan.device == "cuda":
            group = dist.new_group(backend="gloo", timeout=timeout)
    pp = plan.mesh["pp"]
    return take_place(rank, plan.data_parallel_degree, pp, device, group=group, timeout=timeout)


def complete(config: Config, plan: Plan, parts: Parts) -> tuple[Plan, Facts]:
    """The plan with what only model and data could say, after a check that they are what it was made for."""
    seen = gather_facts(config, parts, plan.data_parallel_degree)
    check_against(Facts(**plan.facts), seen)
    return solve_again(config, plan, seen), seen


def assemble(
    config: Config, plan: Plan, facts: Facts, parts: Parts, place: Place, run: RunDir | None, attempt: int = 0
) -> Fit:
    """Everything that trains, put together. `run`: where rank 0 writes; None: nowhere."""
    assert plan.num_updates is not None
    seed = config.run.seed
    parts.model.train()
    stages = _stages(config, plan, parts, place)
    table = windows_of(config, facts, plan.batch)
    assert table is not None
    timing = make_timing(config, facts, table, peak=plan.lr)
    noise = _noise_scale(config, timing, place)
    first = None if noise is None else noise.first
    sharding = make_sharding(config, plan, parts, place, None if stages is None else stages.part, first)
    windows = _windows(config, plan, table, parts, place, None if stages is None else stages.rounds)
    assert timing.rate is not None, "known with num_updates"
    policy = _policy(config, plan, timing)
    reader, precision = make_reader(config, plan, parts, place), make_precision(config, place)
    reader = replace(reader, equal_steps=sharding.forward_is_collective)
    runner: Runner = SequentialRunner(sharding, seed=seed, rank=place.rank, first=first)
    pipeline = None
    if stages is not None:
        reader = replace(reader, rounds=stages.rounds)
        runner = pipeline = stages.runner(sharding, parts.task, precision, seed=seed)
    precise = _precise(config, plan, parts, sharding.model, reader, precision)
    check = _check(parts, sharding.model, reader, precision, pipeline, precise)
    reporter = Reporter(
        run if place.is_first else None, plan.num_updates, place, log_every=policy.log_every, attempt=attempt
    )
    saver = None if run is None else make_saver(config, timing, run, sharding, place, reporter.say)
    return Fit(
        windows, runner, sharding, timing.rate, policy, place, check, reporter, saver, _spikes(config),
        momentum=timing.momentum, precise=precise, noise=noise, targets=config.targets,
        outlook=_outlook(config, plan, place, run),
    )  # fmt: skip


def _windows(
    config: Config, plan: Plan, table: WindowTable, parts: Parts, place: Place, rounds: Rounds | None
) -> Windows:
    assert plan.layout is not None
    return Windows(
        parts.train,
        parts.task,
        plan.batch,
        table,
        place,
        seed=config.run.seed,
        shuffle=config.data.shuffle,
        layout=plan.layout,
        workers=config.data.workers,
        num_updates=plan.num_updates,
        micro_batch_tokens=plan.micro_batch_tokens,
        rounds=rounds,
        group_size=config.model_patches.ghost_size,
    )


def _check(
    parts: Parts,
    model: nn.Module,
    reader: Reader,
    precision: Precision,
    pipeline: Pipeline | None,
    precise: PreciseBatchNorm | None,
) -> Callable[[], Validation] | None:
    """What validates; None: there is nothing to validate with."""
    if parts.validation is None:
        return None

    def check() -> Validation:
        with nullcontext() if precise is None else precise.lent():
            return validate(model, parts.validation, reader, precision, pipeline)

    return check


def _precise(
    config: Config, plan: Plan, parts: Parts, model: nn.Module, reader: Reader, precision: Precision
) -> PreciseBatchNorm | None:
    patches = config.model_patches
    if patches.precise_batch_norm is None:
        return None
    size = patches.ghost_size or reader.micro_batch_size
    return PreciseBatchNorm(model, parts.train, reader, precision, samples=patches.precise_batch_norm, size=size)


def _outlook(config: Config, plan: Plan, place: Place, run: RunDir | None) -> Outlook | None:
    is_asked = config.targets.device_hours is not None or config.targets.samples_per_s is not None
    if not run or not is_asked or not place.is_first:
        return None
    assert plan.num_updates is not None
    return Outlook(config.targets, plan.world_size, run.device_seconds, judged_after(plan.ramp, plan.num_updates))


def _noise_scale(config: Config, timing: Timing, place: Place) -> NoiseScale | None:
    every = timing.noise_scale_every
    if every is None:
        return None
    return NoiseScale(FirstGradient(), place, every=every, memory=config.training.noise_scale_memory)


def _spikes(config: Config) -> SpikeGuard:
    training = config.training
    return SpikeGuard(training.loss_spike, training.loss_spike_deviations, training.loss_spike_window)


def _stages(config: Config, plan: Plan, parts: Parts, place: Place) -> "Stages | None":
    if place.pipe is None:
        return None
    from launcher.train.runner.stages import cut_into_stages  # and with it torch's pipelining, which others don't need

    return cut_into_stages(config, plan, parts, place)


def _policy(config: Config, plan: Plan, timing: Timing) -> Policy:
    assert plan.num_updates is not None
    training = config.training
    return Policy(
        plan.num_updates,
        training.max_grad_norm,
        timing.validate_every,
        timing.log_every or Every(1),
        1 if training.on_nonfinite is OnNonfinite.stop else training.max_skipped_in_a_row,
    )


def make_reader(config: Config, plan: Plan, parts: Parts, place: Place) -> Reader:
    """How this run reads a data set that it evaluates."""
    return Reader(parts.task, place, plan.micro_batch_size or MICRO_BATCH_CAP, config.run.seed, config.data.workers)
