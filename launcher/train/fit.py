"""The loop: window, runner, step, observe."""

import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from torch import Tensor

from launcher.errors import NonFiniteError
from launcher.observe.metrics import MetricsFile, memory_peak_bytes
from launcher.observe.text import some
from launcher.plan.schedule import LearningRate
from launcher.run_dir import RunDir, State
from launcher.train.buffers import Buffers, restore_buffers
from launcher.train.checkpoint.saver import Saver
from launcher.train.evaluate import Validation
from launcher.train.parallel.mesh import Place
from launcher.train.sharding.base import Sharding, StepResult
from launcher.train.window import Window, Windows

STATUS_EVERY = 1.0
"""Seconds between two writes of status.json."""


@dataclass
class Progress:
    """How far a run is."""

    update: int = 0
    applied: int = 0
    skipped_in_a_row: int = 0
    train_loss: float = math.nan
    validation: Validation | None = None

    def to_dict(self) -> dict[str, Any]:
        """For a checkpoint; `take` is the way back."""
        validation = self.validation
        return {
            "update": self.update,
            "applied": self.applied,
            "skipped_in_a_row": self.skipped_in_a_row,
            "train_loss": self.train_loss,
            "validation": None if validation is None else asdict(validation),
        }

    def take(self, saved: Mapping[str, Any]) -> None:
        """Goes back or on to what `to_dict` gave."""
        self.update, self.applied = int(saved["update"]), int(saved["applied"])
        self.skipped_in_a_row = int(saved["skipped_in_a_row"])
        loss, validation = saved["train_loss"], saved["validation"]
        self.train_loss = math.nan if loss is None else float(loss)
        self.validation = None if validation is None else Validation(**validation)


@dataclass(frozen=True)
class Policy:
    """What the loop does when."""

    num_updates: int
    max_grad_norm: float | None
    validate_every: int | None
    log_every: int
    max_skipped_in_a_row: int
    """1: the first update with non-finite values ends the run."""


class Runner(Protocol):
    """How the micro-batches of a window flow."""

    def run(self, window: Window) -> Tensor:
        """Leaves the window's gradient in the parameters. Returns the sum of the losses of this rank's samples."""
        ...


@dataclass
class Fit:
    """One training on one rank."""

    windows: Windows
    runner: Runner
    sharding: Sharding
    rate: LearningRate
    policy: Policy
    place: Place
    validate: Callable[[], Validation] | None
    reporter: "Reporter"
    saver: Saver | None = None
    """None: nothing is saved."""
    progress: Progress = field(default_factory=Progress)

    def __post_init__(self) -> None:
        self._upcoming: Window | None = None
        self._buffers = Buffers(self.sharding.model, self.place)

    def run(self) -> Progress:
        """Trains to the last update, from where the newest checkpoint ends.

        Raises:
            NonFiniteError: more updates in a row than allowed had non-finite values.
            StorageError: a checkpoint couldn't be saved, and checkpoint.on_error is stop.
        """
        self.sharding.prepare()
        self._restore()
        progress = self.progress
        while progress.update < self.policy.num_updates:
            started = time.perf_counter()
            window = self._upcoming or self.windows.get(progress.update + 1)
            self._upcoming = None
            lr = self.rate(progress.applied)
            loss, step = self._update(window, lr)
            progress.update += 1
            progress.applied += step.applied
            progress.train_loss = loss
            self.reporter.update(window, loss, lr, step, progress, time.perf_counter() - started)
            self._check_numbers(window, loss, step)
            if self.validate is not None and self._validation_is_due():
                progress.validation = self.validate()
                self.reporter.validation(progress)
            self._save(is_last=progress.update == self.policy.num_updates)
        self.reporter.flush()
        return progress

    def close(self) -> None:
        """Waits until the last checkpoint is complete. Raises as `run`."""
        if self.saver is not None:
            self.saver.close()
            self.reporter.checkpoints(self.saver)

    def _restore(self) -> None:
        saved = None if self.saver is None else self.saver.restore()
        if saved is not None:
            self.progress.take(saved)
            self.reporter.say(f"goes on after update {self.progress.update}, from its checkpoint")

    def _save(self, *, is_last: bool) -> None:
        if self.saver is None:
            return
        if is_last or self.saver.is_due(self.progress.update):
            self.saver.save(self.progress.update, self.progress.to_dict())
        self.saver.poll()
        self.reporter.checkpoints(self.saver)

    def _update(self, window: Window, lr: float) -> tuple[float, StepResult]:
        """The window's mean loss over all ranks and what its step did."""
        if window.weight == 0:
            return math.nan, StepResult(math.nan, applied=False)
        before = self._buffers.keep()
        loss_sum = self.runner.run(window)
        if self.windows.reads_ahead and window.update < self.policy.num_updates:
            # the device is still busy with what the runner has queued, and loader workers have read on
            self._upcoming = self.windows.get(window.update + 1)
        total, *changed = self.place.sum([float(loss_sum), *self._buffers.changed(before)])
        loss = total / window.weight
        step = self.sharding.step(lr, self.policy.max_grad_norm, finite=math.isfinite(loss))
        if not step.applied:
            restore_buffers(before)
        elif changed:
            self._buffers.agree(before, changed)
        return loss, step

    def _validation_is_due(self) -> bool:
        update, every = self.progress.update, self.policy.validate_every
        return update == self.policy.num_updates or (every is not None and update % every == 0)

    def _check_numbers(self, window: Window, loss: float, step: StepResult) -> None:
        if step.applied:
            self.progress.skipped_in_a_row = 0
            return
        if window.weight == 0:
            self.reporter.say(f"update {window.update}: skipped, its weight is 0 (every label is masked)")
            return
        if step.overflow:
            text = f"update {window.update}: skipped, its gradient overflowed at the loss scale {step.loss_scale:g}"
            self.reporter.say(f"{text}, which is halved")
            return
        self.progress.skipped_in_a_row += 1
        what = f"loss {loss:g}, gradient norm {step.grad_norm:g}"
        self.reporter.say(
            f"update {window.update}: skipped, not finite ({what}); samples {some(window.indices.tolist())}"
        )
        if self.progress.skipped_in_a_row >= self.policy.max_skipped_in_a_row:
            self.reporter.flush()
            raise NonFiniteError(
                f"update {window.update}: {self.progress.skipped_in_a_row} updates in a row were not finite ({what}); "
                f"the last of these windows holds the samples {some(window.indices.tolist())}"
            )


class Reporter:
    """What a rank says of its training: rank 0 writes the run's files, every rank its own log."""

    def __init__(self, run: RunDir | None, plan_updates: int, place: Place, *, log_every: int, attempt: int) -> None:
        self._run = run
        self._num_updates = plan_updates
        self._place = place
        self._log_every = log_every
        self._metrics = MetricsFile(run.metrics, attempt=attempt) if run is not None else None
        self._status_written = 0.0

    def say(self, text: str) -> None:
        """A line in this rank's log. A full disk is said by the files that matter more."""
        with suppress(OSError):
            print(text, flush=True)

    def update(
        self, window: Window, loss: float, lr: float, step: StepResult, progress: Progress, seconds: float
    ) -> None:
        """The line of an update."""
        if self._metrics is None:
            return
        self._metrics.train(
            update=window.update,
            applied=progress.applied,
            epoch=window.epoch,
            samples=window.samples,
            tokens=window.tokens,
            weight=window.weight,
            loss=loss,
            lr=lr,
            grad_norm=step.grad_norm,
            skipped=int(not step.applied),
            loss_scale=step.loss_scale,
            micro_batches=len(window.micro_batches),
            seconds=seconds,
            samples_per_s=window.samples / seconds,
            tokens_per_s=None if window.tokens is None else window.tokens / seconds,
            memory_peak_bytes=memory_peak_bytes(self._place.device),
        )
        if window.update % self._log_every == 0 or window.update == self._num_updates:
            self.flush()
            self.say(f"update {window.update}/{self._num_updates}  loss {loss:.6g}  lr {lr:.4g}  {seconds:.3f} s")
        if time.monotonic() - self._status_written > STATUS_EVERY:
            self.status(progress)

    def validation(self, progress: Progress) -> None:
        """The line of a validation."""
        if self._metrics is None or progress.validation is None:
            return
        self._metrics.validation(
            update=progress.update, loss=progress.validation.loss, metrics=progress.validation.metrics
        )
        self.flush()
        self.say(f"update {progress.update}: validation loss {progress.validation.loss:.6g}")

    def checkpoints(self, saver: Saver) -> None:
        """The lines of the checkpoints that have been completed since the last time."""
        while saver.done:
            saved = saver.done.pop(0)
            if self._metrics is None:
                continue
            self._metrics.checkpoint(
                update=saved.update,
                checkpoint_stall_seconds=saved.stall_seconds,
                checkpoint_seconds=saved.seconds,
                checkpoint_bytes=saved.bytes,
            )
            self.flush()
            self.say(f"update {saved.update}: checkpoint, {saved.bytes:,} bytes in {saved.seconds:.3f} s")

    def status(self, progress: Progress) -> None:
        """How far the run is, and that it lives."""
        if self._run is not None:
            self._run.write_status(state=State.running, update=progress.update, applied=progress.applied)
            self._status_written = time.monotonic()

    def flush(self) -> None:
        if self._metrics is not None:
            self._metrics.flush()
