"""The loop: window, runner, step, observe."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from launcher.config.choices import LossSpike
from launcher.config.targets import TargetsConfig
from launcher.errors import NonFiniteError
from launcher.observe.text import some
from launcher.plan.durations import Every
from launcher.plan.schedule import LearningRate, MomentumWarmup
from launcher.train import heart, stopping
from launcher.train.batch_norm import ghosts
from launcher.train.buffers import Buffers, restore_buffers
from launcher.train.checkpoint.saver import Saver
from launcher.train.evaluate import Validation
from launcher.train.noise_scale import NoiseScale
from launcher.train.optim import set_group_warmup, set_momentum
from launcher.train.parallel.mesh import Place
from launcher.train.precise import PreciseBatchNorm
from launcher.train.reporter import Progress, Reporter
from launcher.train.sharding.base import Sharding, StepResult
from launcher.train.spikes import SpikeGuard
from launcher.train.targets import Outlook, came_to, is_reached
from launcher.train.trend import Trend
from launcher.train.window import Window, Windows


@dataclass(frozen=True)
class Policy:
    """What the loop does when."""

    num_updates: int
    max_grad_norm: float | None
    validate_every: Every | None
    log_every: Every
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
    reporter: Reporter
    saver: Saver | None = None
    """None: nothing is saved."""
    spikes: SpikeGuard = field(default_factory=SpikeGuard)
    progress: Progress = field(default_factory=Progress)
    momentum: MomentumWarmup | None = None
    """None: it doesn't change."""
    precise: PreciseBatchNorm | None = None
    """What gives batch norm its statistics for an evaluation; None: those of the training are taken."""
    noise: NoiseScale | None = None
    """None: it isn't measured."""
    targets: TargetsConfig = field(default_factory=TargetsConfig)
    outlook: Outlook | None = None
    """None: there is no rate and no budget to judge."""

    def __post_init__(self) -> None:
        self._upcoming: Window | None = None
        self._ghosts = ghosts(self.sharding.model)
        self._buffers = Buffers(self.sharding.model, self.place)
        self._must_stop = self._must_save = False
        self._spike: int | None = None
        """The window whose loss was one, until it has been dealt with."""
        self._went_back: list[int] = []
        """After which update each checkpoint was that training has gone back to."""
        self._trend = Trend()
        self._ends_here = False
        """Whether the targets were reached, and that ends the run."""
        self.stopped = False
        """Whether `run` came back before the last update, since all ranks have agreed to stop."""

    def run(self) -> Progress:
        """Trains from where the newest checkpoint ends to the last update or to its targets, where these end it, or
        until all ranks have agreed to stop.

        Raises:
            NonFiniteError: more updates in a row than allowed had non-finite values.
            StorageError: a checkpoint couldn't be saved, and checkpoint.on_error is stop.
        """
        self.sharding.prepare()
        progress = self.progress
        if self._restore():
            self.reporter.say(f"goes on after update {progress.update}, from its checkpoint")
        heart.beat(progress.update + 1)
        self._agree(*self.place.sum(self._wishes()))
        self._look_at_targets()
        while not self._is_done and not self._must_stop:
            self._validate_if_due()  # of a run that was stopped just before it
            if self._is_done:
                break
            self._next_update()
            self._go_back_after_a_spike()
            if self._must_stop and not self._is_done:
                break  # what is due by now waits until the run goes on
            self._validate_if_due()
            self._save(is_last=self._is_done)
        self.stopped = not self._is_done
        if self.stopped:
            self._save(is_last=True)
        self.reporter.status(progress)
        self.reporter.flush()
        return progress

    @property
    def _is_done(self) -> bool:
        return self._ends_here or self.progress.update >= self.policy.num_updates

    def _next_update(self) -> None:
        """One window, from its samples to what is said of it."""
        progress = self.progress
        started = time.perf_counter()
        heart.beat(progress.update + 1)
        window = self._upcoming or self.windows.get(progress.update + 1)
        self._upcoming = None
        lr = self.rate(progress.applied)
        set_group_warmup(self.sharding.optimizer, self.rate, progress.applied)
        if self.momentum is not None:
            set_momentum(self.sharding.optimizer, self.momentum(progress.applied))
        loss, step = self._update(window, lr)
        progress.update += 1
        progress.applied += step.applied
        progress.train_loss = loss
        seconds = time.perf_counter() - started
        self.reporter.update(window, loss, lr, step, progress, seconds)
        self._check_numbers(window, loss, step)
        said = self._trend.add(loss, window.samples / seconds) if step.applied else []
        if self.outlook is not None:
            said += self.outlook.add(window.update, window.samples, seconds, self._samples_left())
        for text in said:
            self.reporter.note(progress.update, text)

    def _samples_left(self) -> int:
        """Of the whole training."""
        table = self.windows.table
        return table.samples_after(self.policy.num_updates) - table.samples_after(self.progress.update)

    def close(self) -> None:
        """Waits until the last checkpoint is complete. Raises as `run`."""
        if self.saver is not None:
            self.saver.close()
            self.reporter.checkpoints(self.saver)

    def _restore(self) -> bool:
        """Takes the newest checkpoint, where there is one."""
        saved = None if self.saver is None else self.saver.restore()
        if saved is None:
            return False
        self.progress.take(saved)
        self.spikes.losses = list(saved["losses"])
        self._trend = Trend.take(saved.get("trend"))
        if self.noise is not None:
            self.noise.take(saved.get("noise_scale"))
        self._upcoming = None
        return True

    def _go_back_after_a_spike(self) -> None:
        """Takes the newest checkpoint, where that is asked for, and leaves out what lies between: the windows that led
        to the spike and its own.

        Raises:
            NonFiniteError: it has gone back to that one as often as updates may be skipped in a row.
        """
        spike, self._spike = self._spike, None
        if spike is None or self.spikes.action is not LossSpike.rollback or not self._restore():
            return
        back_to = self.progress.update
        self.progress.update = spike
        self._went_back = [*(one for one in self._went_back if one == back_to), back_to]
        if len(self._went_back) > self.policy.max_skipped_in_a_row:
            raise NonFiniteError(
                f"update {spike}: its loss was a spike, and training has gone back to update {back_to} "
                f"{len(self._went_back)} times (training.max_skipped_in_a_row)"
            )
        self.reporter.rollback(spike, back_to)

    def _save(self, *, is_last: bool) -> None:
        if self.saver is None:
            return
        if is_last or self._must_save or self.saver.is_due(self.progress.update):
            # a copy: the guard goes on with its own while this is written
            noise = None if self.noise is None else self.noise.to_dict()
            progress = {**self.progress.to_dict(), "losses": list(self.spikes.losses)}
            progress |= {"noise_scale": noise, "trend": self._trend.to_dict()}
            self.reporter.flush()  # no update is in a checkpoint and not in the metrics
            self.saver.save(self.progress.update, progress, wait=self.stopped)
        self.saver.poll()
        self.reporter.checkpoints(self.saver)

    def _update(self, window: Window, lr: float) -> tuple[float, StepResult]:
        """The window's mean loss over all ranks and what its step did."""
        if window.weight == 0:
            self._agree(*self.place.sum(self._wishes()))
            return math.nan, StepResult(math.nan, applied=False)
        before = self._buffers.keep()
        for norm in self._ghosts:
            norm.begin_window(window.samples, self.place.degree)
        is_measured = self.noise is not None and self.noise.begin(window)
        loss_sum = self.runner.run(window)
        if self.windows.reads_ahead and window.update < self.policy.num_updates:
            # the device is still busy with what the runner has queued, and loader workers have read on
            self._upcoming = self.windows.get(window.update + 1)
        mine = [*self._wishes(), float(loss_sum), *self._buffers.changed(before)]
        stop, save, total, *changed = self.place.sum(mine)
        self._agree(stop, save)
        loss = total / window.weight
        if self.spikes.is_one(loss):
            step = self.sharding.skip()
        else:
            step = self.sharding.step(lr, self.policy.max_grad_norm, finite=math.isfinite(loss))
        if not step.applied:
            restore_buffers(before)
        elif changed:
            self._buffers.agree(before, changed)
        if self.noise is not None and is_measured:
            self.reporter.measured(self.noise.end(window, step))
        return loss, step

    def _wishes(self) -> list[float]:
        """Whether this rank wishes to stop, and whether it is the one to say that it is time for a checkpoint."""
        is_time = self.saver is not None and self.place.is_first and self.saver.is_time
        return [stopping.is_asked(), is_time]

    def _agree(self, *wishes: float) -> None:
        """Takes to heart how many data-parallel ranks wish what: one of any stage is enough, and all do it then."""
        self._must_stop, self._must_save = (wish > 0 for wish in self.place.everywhere(wishes))

    def _validate_if_due(self) -> None:
        progress, every = self.progress, self.policy.validate_every
        update = progress.update
        is_due = update == self.policy.num_updates or (every is not None and every.is_due(update))
        if self.validate is None or not is_due or update == progress.validated:
            return
        progress.validation, progress.validated = self.validate(), update
        self.reporter.validation(progress)
        self._look_at_targets()

    def _look_at_targets(self) -> None:
        """Whether the validation after this update reaches what is stated; all ranks say so alike.

        Raises:
            ConfigError: the task gives no such metric.
        """
        progress, targets = self.progress, self.targets
        if not targets.states_quality or progress.validation is None or progress.validated != progress.update:
            return
        mine = [float(is_reached(targets, progress.validation))]
        (reached,) = self.place.everywhere(self.place.sum(mine))
        if not reached:
            return
        self._ends_here = targets.stop_when_reached
        if progress.reached is None:
            self.reporter.reached(progress, came_to(targets, progress.validation))

    def _check_numbers(self, window: Window, loss: float, step: StepResult) -> None:
        if step.applied:
            self.progress.skipped_in_a_row = 0
            self.spikes.add(loss)
            return
        if window.weight == 0:
            self.reporter.say(f"update {window.update}: skipped, its weight is 0 (every label is masked)")
            return
        if step.overflow:
            text = f"update {window.update}: skipped, its gradient overflowed at the loss scale {step.loss_scale:g}"
            self.reporter.say(f"{text}, which is halved")
            return
        self.progress.skipped_in_a_row += 1
        what, many = f"not finite (loss {loss:g}, gradient norm {step.grad_norm:g})", "were not finite"
        if step.spike:
            self._spike = window.update
            what, many = f"its loss {loss:g} lies above {self.spikes.limit:g} (training.loss_spike)", "were skipped"
        samples = some(window.indices.tolist())
        self.reporter.say(f"update {window.update}: skipped, {what}; samples {samples}")
        if self.progress.skipped_in_a_row >= self.policy.max_skipped_in_a_row:
            self.reporter.flush()
            raise NonFiniteError(
                f"update {window.update}: {self.progress.skipped_in_a_row} updates in a row {many}, the last one: "
                f"{what}; its window holds the samples {samples}"
            )
