"""How far a run is, and what its ranks say of it."""

import math
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from launcher.observe.metrics import MetricsFile, memory_peak_bytes
from launcher.observe.text import critical_batch_text
from launcher.plan.durations import Every
from launcher.run_dir import RunDir, State
from launcher.train import stopping
from launcher.train.checkpoint.saver import Saver
from launcher.train.evaluate import Validation
from launcher.train.parallel.mesh import Place
from launcher.train.sharding.base import StepResult
from launcher.train.window import Window

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
    validated: int = 0
    """The update after which that was."""
    reached: dict[str, Any] | None = None
    """The `update` after which a validation first reached the targets, and `what` it came to in words."""

    def to_dict(self) -> dict[str, Any]:
        """For a checkpoint; `take` is the way back."""
        validation = self.validation
        return {
            "update": self.update,
            "applied": self.applied,
            "skipped_in_a_row": self.skipped_in_a_row,
            "train_loss": self.train_loss,
            "validation": None if validation is None else asdict(validation),
            "validated": self.validated,
            "reached": self.reached,
        }

    def take(self, saved: Mapping[str, Any]) -> None:
        """Goes back or on to what `to_dict` gave."""
        self.update, self.applied = int(saved["update"]), int(saved["applied"])
        self.skipped_in_a_row = int(saved["skipped_in_a_row"])
        loss, validation = saved["train_loss"], saved["validation"]
        self.train_loss = math.nan if loss is None else float(loss)
        self.validation = None if validation is None else Validation(**validation)
        self.validated, self.reached = int(saved["validated"]), saved.get("reached")


class Reporter:
    """What a rank says of its training: rank 0 writes the run's files, every rank its own log."""

    def __init__(self, run: RunDir | None, plan_updates: int, place: Place, *, log_every: Every, attempt: int) -> None:
        self._run = run
        self._num_updates = plan_updates
        self._place = place
        self._log_every = log_every
        self._metrics = MetricsFile(run.metrics, attempt=attempt) if run is not None else None
        self._status_written = 0.0
        self._stall = 0.0
        self._rolled_back_to: int | None = None
        self._measured: dict[str, Any] = {}

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
            spike=int(step.spike),
            loss_scale=step.loss_scale,
            micro_batches=len(window.micro_batches),
            seconds=seconds,
            samples_per_s=window.samples / seconds,
            tokens_per_s=None if window.tokens is None else window.tokens / seconds,
            memory_peak_bytes=memory_peak_bytes(self._place.device),
            checkpoint_stall_seconds=self._stall,
            rolled_back_to=self._rolled_back_to,
            **self._measured,
        )
        measured, self._measured = self._measured, {}
        self._stall, self._rolled_back_to = 0.0, None
        if self._log_every.is_due(window.update) or window.update == self._num_updates:
            self.flush()
            said = f"update {window.update}/{self._num_updates}  loss {loss:.6g}  lr {lr:.4g}  {seconds:.3f} s"
            batch = critical_batch_text(measured.get("critical_batch"), measured.get("critical_batch_error"))
            self.say(f"{said}  {batch}".rstrip())
        if time.monotonic() - self._status_written > STATUS_EVERY:
            self.status(progress)

    def measured(self, fields: Mapping[str, Any]) -> None:
        """What else stands in the line of the next update."""
        self._measured = dict(fields)

    def validation(self, progress: Progress) -> None:
        """The line of a validation."""
        if self._metrics is None or progress.validation is None:
            return
        self._metrics.validation(
            update=progress.update, loss=progress.validation.loss, metrics=progress.validation.metrics
        )
        self.flush()
        self.say(f"update {progress.update}: validation loss {progress.validation.loss:.6g}")

    def reached(self, progress: Progress, what: str) -> None:
        """That the targets were. It stands in the status too, which says so why a run has ended before its last
        update."""
        progress.reached = {"update": progress.update, "what": what}
        self.note(progress.update, f"reached: {what}")
        self.status(progress)

    def note(self, update: int, text: str) -> None:
        """What people should know of the run by now: in the log, and in the metrics for who follows the run."""
        if self._metrics is None:
            return
        self._metrics.note(update=update, text=text)
        self.flush()
        self.say(f"update {update}: {text}")

    def checkpoints(self, saver: Saver) -> None:
        """What has been saved since the last time: in log and status, and the stall in the next update's line."""
        while saver.done:
            saved = saver.done.pop(0)
            self._stall += saved.stall_seconds
            if self._run is None:
                continue
            self.say(
                f"update {saved.update}: checkpoint, {saved.bytes:,} bytes in {saved.seconds:.3f} s, of which training "
                f"stood still for {saved.stall_seconds:.3f} s"
            )
            self._run.write_status(state=_state(), checkpoint=asdict(saved), checkpoint_problem=None)
        while saver.problems:
            problem = saver.problems.pop(0)
            if self._run is not None:
                self._run.write_status(state=_state(), checkpoint_problem=problem)

    def rollback(self, update: int, to: int) -> None:
        """What was trained after `to` up to `update` is undone, its samples stay used: in the next update's line."""
        self._rolled_back_to = to
        self.say(f"update {update}: back to what update {to} had come to, and on after this window")

    def status(self, progress: Progress) -> None:
        """How far the run is, and that it lives."""
        if self._run is not None:
            far = {"update": progress.update, "applied": progress.applied, "reached": progress.reached}
            self._run.write_status(state=_state(), **far)
            self._status_written = time.monotonic()

    def flush(self) -> None:
        if self._metrics is not None:
            self._metrics.flush()


def _state() -> State:
    return State.stopping if stopping.is_asked() else State.running
