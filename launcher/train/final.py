"""What a run leaves: the final model, the result and the picture of the loss."""

import hashlib
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from launcher.config.schema import Config
from launcher.errors import NonFiniteError, StorageError
from launcher.models.hf import PretrainedFiles
from launcher.observe.plot import try_to_draw
from launcher.run_dir import RunDir, State, to_json, umask, write_atomic, writing
from launcher.train import heart
from launcher.train.evaluate import Reader, baseline_loss
from launcher.train.parallel.mesh import Place
from launcher.train.parts import Parts
from launcher.train.reporter import Progress
from launcher.train.sharding.base import Sharding


@dataclass(frozen=True)
class FinalState:
    """The whole model's state at the end of a run."""

    state: dict[str, Tensor]
    """Under the plain model's names, on the CPU; empty where only its hash was asked for."""
    sha256: str
    """Over the names, shapes, types and bytes of all tensors, in the order of the plain model's state."""


def gather(sharding: Sharding, *, keep: bool) -> FinalState:
    """The final state, which passes through every rank tensor by tensor. `keep`: whether this one holds on to it.

    Raises:
        NonFiniteError: a trained parameter is no number: nothing but the next loss would have said so.
    """
    state: dict[str, Tensor] = {}
    digest = hashlib.sha256()
    trained = sharding.trained_names
    broken = []
    for name, value in sharding.full_items():
        heart.beat()
        digest.update(f"{name} {value.dtype} {list(value.shape)}".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
        if name in trained and not value.isfinite().all():
            broken.append(name)
        if keep:
            state[name] = value
    if broken:
        shown = ", ".join(broken[:5]) + " …" * (len(broken) > 5)
        raise NonFiniteError(
            f"the last update left parameters that are not finite, and no model is written: {shown}; "
            "the learning rate is too high (optimizer.lr, lr_scale of optimizer.groups)"
        )
    return FinalState(state, digest.hexdigest())


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
    parts: Parts,
    reader: Reader,
    place: Place,
    sharding: Sharding,
    progress: Progress,
    started: float,
) -> None:
    """Writes the final model, the result and the picture of the loss."""
    final = gather(sharding, keep=place.is_first)
    hashes: list[Any] = [final.sha256]
    if place.degree > 1:
        hashes = [None] * place.degree
        dist.all_gather_object(hashes, final.sha256, group=place.group)
    if place.pipe is not None:
        of_stages: list[Any] = [None] * place.pipe.size
        dist.all_gather_object(of_stages, hashes, group=place.pipe.host_group)
        hashes = [one for stage in of_stages for one in stage]
    baseline = None
    if parts.validation is not None:
        baseline = baseline_loss(parts.train, parts.validation, reader)
    if not place.is_first:
        return
    files = getattr(parts.model, "pretrained", None)
    save_model(run, final.state, progress.update, files.tied if isinstance(files, PretrainedFiles) else {})
    validation = progress.validation
    result = {
        "update": progress.update,
        "applied": progress.applied,
        "train_loss": progress.train_loss,
        "validation_loss": validation.loss if validation else None,
        "validation_metrics": validation.metrics if validation else None,
        "baseline_loss": baseline,
        "weights_sha256": hashes,
        "reached": progress.reached,
        "seconds": time.monotonic() - started,
    }
    write_atomic(run.result, to_json(result))
    unit = getattr(parts.task, "loss_unit", "weighted mean")
    problem = try_to_draw(run.metrics, run.loss_png, baseline=baseline, title=config.run.name, unit=unit)
    undrawn = {} if problem is None else {"picture": problem}
    run.write_status(state=State.running, update=progress.update, applied=progress.applied, **undrawn)
