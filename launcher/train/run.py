"""One rank of a run, from its two files to its result."""

import hashlib
import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from launcher.config.choices import Device, Offload, OnNonfinite, StrategyName
from launcher.config.schema import Config
from launcher.config.validate import load
from launcher.errors import NonFiniteError, StorageError
from launcher.models.hf import PretrainedFiles
from launcher.observe.plot import try_to_draw
from launcher.observe.tracker import tracking
from launcher.plan.batch import MICRO_BATCH_CAP
from launcher.plan.facts import Facts, check_against
from launcher.plan.mesh import World
from launcher.plan.plan import Plan, learning_rate, make_plan, windows_of
from launcher.run_dir import RunDir, State, to_json, umask, write_atomic, writing
from launcher.train.evaluate import Reader, Validation, baseline_loss, validate
from launcher.train.fit import Fit, Policy, Progress, Reporter
from launcher.train.parts import Parts, build_data, build_model, build_task, defer_model, gather_facts
from launcher.train.runner.sequential import SequentialRunner
from launcher.train.sharding.base import Sharding
from launcher.train.sharding.make import make_precision, make_sharding
from launcher.train.window import Place, Windows

START_TIMEOUT = timedelta(minutes=30)
"""How long a collective may take before torch gives up."""


def run_rank(run: RunDir, attempt: int) -> None:
    """Trains this rank's part of the run. Leaves the model and the result in the run's folder (rank 0)."""
    started = time.monotonic()
    with joined(run) as (config, plan, place):
        train, validation = build_data(config)
        model, fill = defer_model(config) if config.strategy.name is StrategyName.fsdp else (build_model(config), None)
        parts = Parts(model, build_task(config), train, validation, *([fill] if fill else []))
        plan, facts = complete(config, plan, parts)
        if place.rank == 0:
            write_atomic(run.plan, to_json(plan.to_dict()))
            save_pretrained_files(run, parts.model)
            run.write_status(state=State.running, attempt=attempt)
        fit = assemble(config, plan, facts, parts, place, run, attempt)
        with tracking(run if place.rank == 0 else None, config.logging.wandb, attempt):
            progress = fit.run()
            finish(run, config, plan, parts, place, fit.sharding, progress, started)


@contextmanager
def joined(run: RunDir) -> Iterator[tuple[Config, Plan, Place]]:
    """The two files of a run, and this rank's place among the others, whom it leaves together with them."""
    config, plan = load(run.config), Plan.from_json(run.plan.read_text(encoding="utf-8"))
    for folder in reversed(plan.pythonpath):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    os.chdir(plan.cwd)
    torch.set_flush_denormal(True)  # numbers below 1e-38 slow a CPU down tenfold and mean nothing here
    place = join(plan, offloads=config.strategy.offload is not Offload.none)
    yield config, plan, place
    if place.degree > 1:
        dist.barrier(group=place.group)  # nobody leaves while another still writes or talks
    if dist.is_initialized():
        dist.destroy_process_group()


def join(plan: Plan, *, offloads: bool = False) -> Place:
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
        dist.init_process_group("cpu:gloo,cuda:nccl" if plan.device == "cuda" else "gloo", timeout=START_TIMEOUT)
        if plan.device == "cuda":
            group = dist.new_group(backend="gloo", timeout=START_TIMEOUT)
    return Place(rank, plan.data_parallel_degree, device, group)


def complete(config: Config, plan: Plan, parts: Parts) -> tuple[Plan, Facts]:
    """The plan with what only model and data could say, after a check that they are what it was made for."""
    seen = gather_facts(config, parts, plan.data_parallel_degree)
    check_against(Facts(**plan.facts), seen)
    world = World(plan.nodes, plan.ranks_per_node, Device(plan.device))
    solved = make_plan(config, seen, world=world).to_dict()
    keep = {name: plan.to_dict()[name] for name in ("cwd", "pythonpath", "launch")}
    keep["notes"] = list(dict.fromkeys([*plan.notes, *solved["notes"]]))
    return Plan(**{**solved, **keep}), seen


def assemble(
    config: Config, plan: Plan, facts: Facts, parts: Parts, place: Place, run: RunDir | None, attempt: int = 0
) -> Fit:
    """Everything that trains, put together. `run`: where rank 0 writes; None: nowhere."""
    table = windows_of(config, facts, plan.batch)
    assert table is not None
    assert plan.num_updates is not None
    seed = config.run.seed
    parts.model.train()
    sharding = make_sharding(config, plan, parts, place)
    assert plan.layout is not None
    windows = Windows(
        parts.train,
        parts.task,
        plan.batch,
        table,
        place,
        seed=seed,
        shuffle=config.data.shuffle,
        layout=plan.layout,
        workers=config.data.workers,
        num_updates=plan.num_updates,
        micro_batch_tokens=plan.micro_batch_tokens,
    )
    training = config.training
    stops_at_first = training.on_nonfinite is OnNonfinite.stop
    policy = Policy(
        plan.num_updates,
        training.max_grad_norm,
        plan.validate_every_updates,
        plan.log_every_updates or 1,
        1 if stops_at_first else training.max_skipped_in_a_row,
    )
    reader, precision = make_reader(config, plan, parts, place), make_precision(config, place)
    reader = replace(reader, equal_steps=sharding.forward_is_collective)
    check = None
    if parts.validation is not None:

        def check() -> Validation:
            return validate(parts.model, parts.validation, reader, precision)

    reporter = Reporter(
        run if place.rank == 0 else None, plan.num_updates, place, log_every=policy.log_every, attempt=attempt
    )
    runner = SequentialRunner(sharding, seed=seed, rank=place.rank)
    return Fit(windows, runner, sharding, learning_rate(config, plan, facts), policy, place, check, reporter)


def make_reader(config: Config, plan: Plan, parts: Parts, place: Place) -> Reader:
    """How this run reads a data set that it evaluates."""
    return Reader(parts.task, place, plan.micro_batch_size or MICRO_BATCH_CAP, config.run.seed, config.data.workers)


def weights_sha256(state: dict[str, Tensor]) -> str:
    """SHA-256 over the names, shapes, types and bytes of a state, in the order of the names."""
    digest = hashlib.sha256()
    for name in sorted(state):
        value = state[name]
        digest.update(f"{name} {value.dtype} {list(value.shape)}".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def check_finite(state: dict[str, Tensor], names: Iterable[str]) -> None:
    """That a training has not ended with parameters that are no numbers: nothing but its next loss would say so.

    Raises:
        NonFiniteError: one of `names` isn't finite in `state`.
    """
    broken = [name for name in names if not state[name].isfinite().all()]
    if broken:
        shown = ", ".join(broken[:5]) + " …" * (len(broken) > 5)
        raise NonFiniteError(
            f"the last update left parameters that are not finite, and no model is written: {shown}; "
            "the learning rate is too high (optimizer.lr, lr_scale of optimizer.groups)"
        )


def save_pretrained_files(run: RunDir, model: nn.Module) -> None:
    """Writes what of a pretrained model's folder is no weights, where the model has such a thing: all of it or nothing.

    Raises:
        StorageError: it can't be written.
    """
    files = getattr(model, "pretrained", None)
    if not isinstance(files, PretrainedFiles) or run.pretrained.is_dir():
        return
    temporary = run.pretrained.with_name(f".{run.pretrained.name}.tmp")
    with writing(run.pretrained):
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        files.write(temporary)
        os.replace(temporary, run.pretrained)


def save_model(run: RunDir, state: dict[str, Tensor], update: int, tied: Mapping[str, str]) -> None:
    """Writes the final model whole or not at all. `tied`: names of tensors that are another one's, for the reader.

    Raises:
        StorageError: it can't be written.
    """
    temporary = run.model.with_name(f".{run.model.name}.tmp")
    try:
        with writing(run.model):
            save_file(state, temporary, metadata={"format": "pt", "update": str(update), **tied})
            os.chmod(temporary, 0o666 & ~umask())  # save_file makes it readable by its owner alone
            os.replace(temporary, run.model)
    except SafetensorError as error:
        raise StorageError(run.model, str(error)) from error
    finally:
        temporary.unlink(missing_ok=True)


def finish(
    run: RunDir,
    config: Config,
    plan: Plan,
    parts: Parts,
    place: Place,
    sharding: Sharding,
    progress: Progress,
    started: float,
) -> None:
    """Writes the final model, the result and the picture of the loss."""
    state = sharding.full_state()
    check_finite(state, (name for name, one in parts.model.named_parameters() if one.requires_grad))
    hashes: list[Any] = [weights_sha256(state)]
    if place.degree > 1:
        hashes = [None] * place.degree
        dist.all_gather_object(hashes, weights_sha256(state), group=place.group)
    baseline = None
    if parts.validation is not None:
        baseline = baseline_loss(parts.train, parts.validation, make_reader(config, plan, parts, place))
    if place.rank != 0:
        return
    files = getattr(parts.model, "pretrained", None)
    save_model(run, state, progress.update, files.tied if isinstance(files, PretrainedFiles) else {})
    validation = progress.validation
    result = {
        "update": progress.update,
        "applied": progress.applied,
        "train_loss": progress.train_loss,
        "validation_loss": validation.loss if validation else None,
        "validation_metrics": validation.metrics if validation else None,
        "baseline_loss": baseline,
        "weights_sha256": hashes,
        "seconds": time.monotonic() - started,
    }
    write_atomic(run.result, to_json(result))
    unit = getattr(parts.task, "loss_unit", "weighted mean")
    problem = try_to_draw(run.metrics, run.loss_png, baseline=baseline, title=config.run.name, unit=unit)
    undrawn = {} if problem is None else {"picture": problem}
    run.write_status(state=State.running, update=progress.update, applied=progress.applied, **undrawn)
