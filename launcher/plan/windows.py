"""Which window holds what: the samples of every update of a run, whose number may grow through a ramp."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import ceil, floor
from typing import Literal, NamedTuple

from launcher.errors import ConfigError, DataError
from launcher.plan.batch import GLOBAL

RAMP = "batch.ramp"


class Window(NamedTuple):
    """Where a window lies: positions `start` to `stop` (exclusive) in the order of the samples of `epoch` (from 0)."""

    epoch: int
    start: int
    stop: int


@dataclass(frozen=True)
class Stage:
    """A part of a ramp: windows of one size, or of one that grows, until something has passed since the start."""

    until: Fraction
    unit: Literal["updates", "samples", "epochs"]
    """What `until` counts. A stage ends with the window that reaches it."""
    global_batch_size: int
    said: str = ""
    """The end as the user said it."""
    grow_to: Fraction | None = None
    """None: one size. Else windows are whole multiples of `global_batch_size`: of as many as lie, rounded half to even,
    on a straight line from 1 at the start of the stage to `grow_to` / `global_batch_size` at its end (as Ultralytics
    accumulates in its warmup). `unit` is samples or epochs then."""

    @property
    def largest(self) -> int:
        """Samples of its largest window."""
        return batches_at_most(self.global_batch_size, self.grow_to) * self.global_batch_size


def batches_at_most(size: int, grow_to: Fraction | int | None) -> int:
    """How many batches of `size` samples the windows of a stage come to hold."""
    return 1 if grow_to is None else max(1, round(Fraction(grow_to) / size))


class _Run(NamedTuple):
    """Windows in a row, of one size, from a place in an epoch on, and again in each of the `epochs` from there."""

    update: int
    """Windows before it."""
    epoch: int
    position: int
    samples: int
    """Consumed before it."""
    size: int
    windows: int
    """Of one epoch."""
    used: int
    """Samples in them."""
    epochs: int | None
    """None: for good."""


@dataclass(frozen=True)
class WindowTable:
    """Which window, numbered from 1 over the whole run, holds which part of which epoch.

    A window never crosses an epoch. The last of an epoch may be shorter and is an update of its own, unless it is left
    out by `drop_last`. The size of a window is asked for here alone.

    Raises:
        DataError: the data set is empty.
        ConfigError: drop_last leaves no window at all, or a stage of the ramp holds no window.
    """

    samples_per_epoch: int
    """Samples of the training set."""
    global_batch_size: int
    """Samples of a full window, once the ramp is through."""
    drop_last: bool = False
    ramp: tuple[Stage, ...] = ()

    def __post_init__(self) -> None:
        if self.samples_per_epoch < 1:
            raise DataError(f"data.train is empty: samples_per_epoch is {self.samples_per_epoch}, must be at least 1")
        self._check_size(self.global_batch_size, GLOBAL)
        for index, stage in enumerate(self.ramp):
            self._check_size(stage.global_batch_size, f"{RAMP}[{index}].global_batch_size")
            self._check_size(stage.largest, f"{RAMP}[{index}].grow_to")
        assert self._runs, "walked through here, so that what is wrong with the ramp is said"

    def _check_size(self, size: int, key: str) -> None:
        if self.drop_last and self.samples_per_epoch < size:
            raise ConfigError(
                "data.drop_last",
                "true",
                f"leaves out every sample: data.train has {self.samples_per_epoch}, fewer than one window of "
                f"{key}={size}",
                hint=f"data.drop_last=false, or {key} of at most {self.samples_per_epoch}",
            )

    @cached_property
    def _walked(self) -> tuple[list[_Run], list[int]]:
        walk = _Walk(self)
        return list(walk), walk.ends

    @property
    def _runs(self) -> list[_Run]:
        return self._walked[0]

    @cached_property
    def _starts(self) -> list[int]:
        return [run.update for run in self._runs]

    @property
    def updates_per_epoch(self) -> int:
        """Windows in one epoch, once the ramp is through."""
        return self._runs[-1].windows

    @property
    def samples_used_per_epoch(self) -> int:
        """Samples in the windows of one such epoch: all of them, or all but the left-out rest."""
        return self._runs[-1].used

    @property
    def stage_ends(self) -> Sequence[int]:
        """The last window of each stage of the ramp."""
        return self._walked[1]

    @property
    def sizes(self) -> set[int]:
        """How many samples a window may hold, the last one of an epoch too."""
        found = set()
        for run in self._runs:
            rest = run.used - (run.windows - 1) * run.size
            found |= {rest} if run.windows == 1 else {run.size, rest}
        return found

    def window(self, update: int) -> Window:
        """Where the window of the number `update` lies.

        Raises:
            ValueError: the number is below 1.
        """
        if update < 1:
            raise ValueError(f"windows are numbered from 1, not {update}")
        run = self._run_of(update)
        epoch, index = divmod(update - 1 - run.update, run.windows)
        start = run.position + index * run.size
        return Window(run.epoch + epoch, start, min(start + run.size, run.position + run.used))

    def size(self, update: int) -> int:
        """Samples that the window `update` is meant to hold; the last one of an epoch may have fewer."""
        return self._run_of(update).size

    def _run_of(self, update: int) -> _Run:
        return self._runs[bisect_right(self._starts, update - 1) - 1]

    def samples_after(self, update: int) -> int:
        """Samples consumed once `update` windows are through; 0 at the start."""
        if update == 0:
            return 0
        run, last = self._run_of(update), self.window(update)
        return run.samples + (last.epoch - run.epoch) * run.used + last.stop - run.position

    def epochs_after(self, update: int) -> Fraction:
        """Epochs that have passed once `update` windows are through."""
        if update == 0:
            return Fraction(0)
        last = self.window(update)
        return last.epoch + Fraction(last.stop, self._used_in(last.epoch))

    def _used_in(self, epoch: int) -> int:
        """Samples in the windows of an epoch."""
        run = self._last_run(epoch)
        return run.position + run.used

    def _last_run(self, epoch: int) -> _Run:
        """The run that holds the last window of an epoch."""
        index = bisect_right(self._runs, epoch, key=lambda run: run.epoch) - 1
        return self._runs[index]

    def updates_for_samples(self, n: int) -> int:
        """The smallest number of windows that consumes at least `n` samples."""
        if n <= 0:
            return 0
        run = self._runs[bisect_left(self._runs, n, key=lambda run: run.samples) - 1]
        epochs, rest = divmod(n - run.samples, run.used)
        return run.update + epochs * run.windows + -(-rest // run.size)

    def updates_for_epochs(self, x: Fraction | float) -> int:
        """The smallest number of windows that reaches `x` epochs, where an epoch is the samples of its windows."""
        exact = x if isinstance(x, Fraction) else Fraction(repr(x))
        if exact <= 0:
            return 0
        epoch = ceil(exact) - 1  # the one that is reached
        run = self._last_run(epoch)
        part = ceil((exact - epoch) * self._used_in(epoch))
        before = run.samples + (epoch - run.epoch) * run.used - run.position
        return self.updates_for_samples(before + part)


class _Walk:
    """Through the ramp, stage by stage, and on for good."""

    def __init__(self, table: WindowTable) -> None:
        self._table = table
        self._update = self._epoch = self._position = self._samples = 0
        self.ends: list[int] = []
        """The last window of each stage that is through."""

    def __iter__(self) -> Iterator[_Run]:
        for index, stage in enumerate(self._table.ramp):
            before = self._update
            yield from self._constant(stage) if stage.grow_to is None else self._growing(stage)
            self.ends.append(self._update)
            if self._update == before:
                problem = f"holds no window: it ends where it begins, after {before} updates"
                raise ConfigError(f"{RAMP}[{index}].until", stage.said, problem)
        while self._position:  # the rest of an epoch
            yield from self._take(self._table.global_batch_size, None)
        size = self._table.global_batch_size
        windows = self._windows(size)
        used = min(windows * size, self._table.samples_per_epoch)
        yield _Run(self._update, self._epoch, 0, self._samples, size, windows, used, None)

    def _windows(self, size: int) -> int:
        """Windows of this size in what is left of the epoch."""
        full, rest = divmod(self._table.samples_per_epoch - self._position, size)
        return full + (rest > 0 and not self._table.drop_last)

    def _take(self, size: int, windows: int | None, epochs: int = 1) -> Iterator[_Run]:
        """As many windows of this size from here; None: all that fit in the epoch. Where none does, the next epoch
        begins."""
        fitting = self._windows(size)
        taken = fitting if windows is None else min(windows, fitting)
        used = min(taken * size, self._table.samples_per_epoch - self._position)
        if taken:
            yield _Run(self._update, self._epoch, self._position, self._samples, size, taken, used, epochs)
            self._update += taken * epochs
            self._samples += used * epochs
            self._epoch += epochs - 1
            self._position += used
        if not taken or self._position == self._table.samples_per_epoch:
            self._epoch, self._position = self._epoch + 1, 0

    def _constant(self, stage: Stage) -> Iterator[_Run]:
        size = stage.global_batch_size
        while (needed := self._needed(stage, size)) > 0:
            windows = self._windows(size)
            whole = self._whole_epochs(stage) if self._position == 0 and needed >= windows else 0
            yield from self._take(size, min(needed, windows), max(whole, 1))

    def _needed(self, stage: Stage, size: int) -> int:
        """Windows of `size` until the end of the stage, as far as this epoch goes."""
        windows = self._windows(size)
        if stage.unit == "updates":
            return int(stage.until) - self._update
        if stage.unit == "samples":
            return -(-(int(stage.until) - self._samples) // size)
        whole = floor(stage.until)
        if not windows:  # the epoch is over: a rest is left that only smaller windows could use
            return int(self._epoch + 1 < stage.until)
        if self._epoch < whole:
            return windows
        used = min(self._position + windows * size, self._table.samples_per_epoch)
        return -(-(ceil((stage.until - whole) * used) - self._position) // size) if self._epoch == whole else 0

    def _whole_epochs(self, stage: Stage) -> int:
        """Epochs from here that lie in the stage from end to end."""
        size, windows = stage.global_batch_size, self._windows(stage.global_batch_size)
        if stage.unit == "updates":
            return (int(stage.until) - self._update) // windows
        if stage.unit == "samples":
            return (int(stage.until) - self._samples) // min(windows * size, self._table.samples_per_epoch)
        return floor(stage.until) - self._epoch

    def _growing(self, stage: Stage) -> Iterator[_Run]:
        """Windows of whole batches. A batch at the end of an epoch counts as one, however short it is."""
        assert stage.grow_to is not None
        size, rise = stage.global_batch_size, stage.grow_to / stage.global_batch_size - 1
        per_epoch = -(-self._table.samples_per_epoch // size)
        first = self._batches(size, per_epoch)
        length = (stage.until / size if stage.unit == "samples" else stage.until * per_epoch) - first

        def many_at(batch: int) -> int:
            """Batches that a window holds where it ends with this one, counted from 0."""
            return max(1, round(1 + rise * min(Fraction(batch) / length, Fraction(1))))

        many = 1
        while self._needed(stage, size) > 0:
            passed = self._batches(size, per_epoch) - first
            while many < many_at(passed + many - 1):
                many += 1
            fitting = range(1, self._windows(many * size) + 1)
            alike = bisect_right(fitting, many, key=lambda n: many_at(passed + n * many - 1))
            yield from self._take(many * size, max(1, min(alike, self._needed(stage, many * size))))

    def _batches(self, size: int, per_epoch: int) -> int:
        return self._epoch * per_epoch + -(-self._position // size)
