"""When a run is saved, beside its training, and what it goes on from."""

import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from launcher import checkpoints
from launcher.checkpoints import Checkpoint
from launcher.config.choices import OnError
from launcher.errors import LauncherError, StorageError
from launcher.plan.durations import Every
from launcher.run_dir import RunDir
from launcher.train.checkpoint import planner, store
from launcher.train.checkpoint.pieces import Piece, to_write
from launcher.train.checkpoint.store import Ranks
from launcher.train.sharding.base import Sharding
from launcher.train.sharding.state import State

_SETTINGS = ("lr", "params", "index", "lr_scale", "warmup_from", "lr_offset")
"""What of an optimizer's groups is set before every update, or by the plan."""


@dataclass(frozen=True)
class Schedule:
    """When a checkpoint is due; None, None: only when the run is stopped, and at its end."""

    updates: Every | None
    seconds: float | None
    keep_last: int
    is_async: bool
    on_error: OnError


@dataclass(frozen=True)
class Saved:
    """What a save has come to."""

    update: int
    stall_seconds: float
    """How long training stood still for it."""
    seconds: float
    """From its beginning until it was complete."""
    bytes: int
    problem: str | None = None
    """Why older ones couldn't be removed."""


class Saver:
    """The checkpoints of one run on one rank. All ranks call the same in the same order."""

    def __init__(
        self,
        run: RunDir,
        state: State,
        sharding: Sharding,
        ranks: Ranks,
        schedule: Schedule,
        say: Callable[[str], None],
    ) -> None:
        """
        Args:
            say: takes a line for the log.
        """
        self.schedule = schedule
        self._run, self._state, self._sharding, self._ranks, self._say = run, state, sharding, ranks, say
        self._first_groups = [_numbers(group) for group in sharding.optimizer.param_groups]
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[Saved] | None = None
        self._newest: int | None = None
        self._last = time.monotonic()
        self.done: list[Saved] = []
        """What has been saved and not yet been taken note of."""
        self.problems: list[str] = []
        """Why saves have failed, likewise."""

    def restore(self) -> dict[str, Any] | None:
        """Fills parameters, buffers and optimizer states from the newest whole checkpoint. Collective.

        Returns:
            What else it holds, as it was given to `save`; None: there is no checkpoint.

        Raises:
            LauncherError: it doesn't fit this model or this optimizer.
        """
        self.settle()
        found = store.newest(self._run, self._ranks, self._say)
        if found is None:
            return None
        progress = found.progress()
        self._fill(found)
        self._take(progress)
        self._newest, self._last = found.update, time.monotonic()
        return progress

    def _fill(self, checkpoint: Checkpoint) -> None:
        try:
            contents = planner.Contents(checkpoint.path)
            self._sharding.settle()
            self._state.make_room(contents.tensors)
            contents.fill(self._state.targets(contents.tensors))
            self._state.filled()
        except LauncherError as error:
            raise type(error)(f"{checkpoint.path}: {error}") from error

    def _take(self, progress: Mapping[str, Any]) -> None:
        """What belongs to the optimizer and to the scale of the loss."""
        for group in self._sharding.optimizer.param_groups:
            group.update(progress["optimizer_groups"].get(str(group["index"]), {}))
        scaler, saved = self._sharding.scaler, progress["loss_scale"]
        if scaler is not None and saved is not None:
            scaler.scale, scaler.updates = float(saved["scale"]), int(saved["updates"])

    def is_due(self, update: int) -> bool:
        """Whether a checkpoint is due after this window by their number. The same on every rank."""
        return self.schedule.updates is not None and self.schedule.updates.is_due(update)

    @property
    def is_time(self) -> bool:
        """Whether one is due by the clock, which differs among ranks: one of them has to decide."""
        return self.schedule.seconds is not None and time.monotonic() - self._last >= self.schedule.seconds

    def save(self, update: int, progress: Mapping[str, Any], *, wait: bool = False) -> None:
        """Saves what training has come to, beside it unless `wait`. Collective.

        Args:
            update: the window after which it is.
            progress: what else a run goes on from, for JSON.

        Raises:
            StorageError: a save has failed, and checkpoint.on_error is stop.
        """
        started = time.perf_counter()
        self.settle()
        if self._newest == update:
            return
        pieces = to_write(self._state.pieces())
        beside = self.schedule.is_async and not wait
        if beside:
            pieces = [replace(one, value=_copy(one.value)) for one in pieces]
        whole = {**progress, **self._own_progress()}
        write = _Write(self._run, update, pieces, whole, self._ranks, self.schedule.keep_last, started)
        self._writing = self._thread.submit(write, time.perf_counter() if beside else None)
        if not beside:
            self.settle()

    def settle(self) -> None:
        """Waits until nothing is being written.

        Raises:
            StorageError: what was, has failed, and checkpoint.on_error is stop.
        """
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            saved = writing.result()
        except StorageError as error:
            self.problems.append(str(error))
            self._say(f"no checkpoint could be saved: {error}")
            if self.schedule.on_error is OnError.stop:
                raise
            return
        finally:
            self._last = time.monotonic()
        self._newest = saved.update
        self.done.append(saved)
        if saved.problem is not None:
            self.problems.append(saved.problem)
            self._say(saved.problem)

    def poll(self) -> None:
        """Takes note of a save that has ended meanwhile. Raises as `settle`."""
        if self._writing is not None and self._writing.done():
            self.settle()

    def close(self) -> None:
        """Waits until nothing is being written, and writes nothing more."""
        self.settle()
        self._thread.shutdown()

    def _own_progress(self) -> dict[str, Any]:
        scaler = self._sharding.scaler
        groups = {}
        for first, group in zip(self._first_groups, self._sharding.optimizer.param_groups, strict=True):
            changed = {key: value for key, value in _numbers(group).items() if first.get(key) != value}
            groups[str(group["index"])] = changed
        scale = None if scaler is None else {"scale": scaler.scale, "updates": scaler.updates}
        return {"optimizer_groups": groups, "loss_scale": scale}


@dataclass(frozen=True)
class _Write:
    """What is left of a save when training goes on."""

    run: RunDir
    update: int
    pieces: list[Piece]
    progress: dict[str, Any]
    ranks: Ranks
    keep_last: int
    started: float

    def __call__(self, released: float | None) -> Saved:
        """`released`: when training went on; None: it waits for this."""
        size = store.write(self.run, self.update, self.pieces, self.progress, self.ranks)
        problem = None
        try:
            self.ranks.agreed(lambda: checkpoints.prune(self.run, self.keep_last) if self.ranks.rank == 0 else None)
        except StorageError as error:
            problem = f"an old checkpoint stays: {error}"
        ended = time.perf_counter()
        return Saved(self.update, (released or ended) - self.started, ended - self.started, size, problem)


def _copy(tensor: Tensor) -> Tensor:
    """The same on the host, in memory of its own."""
    copied = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return copied.copy_(tensor)


def _numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers that an optimizer keeps in a group of parameters."""
    return {
        key: value
        for key, value in group.items()
        if key not in _SETTINGS and isinstance(value, bool | int | float) and math.isfinite(value)
    }
