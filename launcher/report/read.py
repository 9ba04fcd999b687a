"""What the runs of a sweep have left, read from their files alone."""

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from launcher.config.validate import read as read_config
from launcher.errors import Exit, LauncherError
from launcher.observe.records import Record, read_metrics, readable
from launcher.observe.status import read_run
from launcher.run_dir import RunDir, State

SWEEP = "sweep.json"
SEED, BATCH = "run.seed", "batch.global_batch_size"


@dataclass(frozen=True)
class Curve:
    """Losses over a run, finite ones alone."""

    updates: tuple[int, ...] = ()
    samples: tuple[float, ...] = ()
    """Seen up to there, each time they were."""
    seconds: tuple[float, ...] = ()
    """That the updates up to there took, without the start, validations and waiting for checkpoints."""
    losses: tuple[float, ...] = ()


@dataclass(frozen=True, eq=False)
class Run:
    """A run as its files tell it; None: not known, or not yet."""

    num: int
    overrides: tuple[str, ...]
    """Those that not all runs of the sweep have in common."""
    path: Path
    state: str
    exit_code: int | None = None
    reason: str | None = None
    """Why it failed, in one line."""
    seed: int | None = None
    global_batch_size: int | None = None
    lr: float | None = None
    """The peak of its learning rate."""
    warmup_updates: int | None = None
    num_updates: int | None = None
    rule: str | None = None
    base_batch_size: int | None = None
    is_validated: bool = False
    update: int = 0
    """How far it came."""
    missing: int = 0
    """Updates without a line in metrics.jsonl."""
    losses: Mapping[str, float | None] = field(default_factory=dict)
    """At its end, by "validation" and "training"; None: not finite. Empty: it isn't finished."""
    curves: Mapping[str, Curve] = field(default_factory=dict)
    samples: float = 0
    seconds: float = 0
    """Of all its updates, as in the curves."""
    world_size: int | None = None
    target: float | None = None
    """The validation loss that was stated before it started."""
    critical_batch: tuple[float, float] | None = None
    """In samples, and its standard error, as the run measured it last; None: it didn't."""

    @property
    def name(self) -> str:
        return f"run {self.num}" + (f" ({' '.join(self.overrides)})" if self.overrides else "")

    def loss(self, kind: str) -> float | None:
        """Its final loss, where it has a finite one."""
        return self.losses.get(kind)

    def has_diverged(self, kind: str) -> bool:
        """Whether its numbers failed: it ended for that reason, or with a loss that isn't finite."""
        return self.exit_code == Exit.BAD_NUMBERS or (kind in self.losses and self.losses[kind] is None)


@dataclass(frozen=True)
class Source:
    """What a report is about."""

    folder: Path
    name: str
    is_sweep: bool
    runs: tuple[Run, ...]
    notes: tuple[str, ...] = ()
    """What couldn't be read."""


def read(folder: Path) -> Source:
    """The sweep, or the one run, in `folder`; also while it runs.

    Raises:
        LauncherError: there is neither.
    """
    if not folder.is_dir():
        raise LauncherError(f"{folder}: no such folder")
    record, where = folder / SWEEP, folder.resolve()
    if not record.is_file():
        if not (folder / "plan.json").is_file():
            raise LauncherError(
                f"{folder}: no sweep and no run here: a sweep's folder holds {SWEEP}, a run's plan.json; sweeps stand "
                "below sweeps/, as in launcher report sweeps/NAME/TIME"
            )
        run, notes = _run(Run(0, (), where, State.planned.value))
        return Source(where, where.name, False, (run,), tuple(notes))
    runs, notes = [], []
    for member in _members(record):
        run, problems = _run(_started(member, where))
        runs.append(run)
        notes += problems
    return Source(where, where.name, True, tuple(runs), tuple(notes))


def _members(record: Path) -> list[dict[str, Any]]:
    try:
        members = json.loads(record.read_text(encoding="utf-8"))["members"]
        return [{"num": int(one["num"]), "dir": str(one["dir"])} | dict(one) for one in members]
    except (OSError, ValueError, KeyError, TypeError) as error:
        said = "it is empty: the sweep is just being started" if not record.stat().st_size else str(error)
        raise LauncherError(f"{record}: can't be read: {said}") from error


def _started(member: Mapping[str, Any], folder: Path) -> Run:
    """A member as sweep.json alone tells it."""
    overrides = tuple(map(str, member.get("overrides") or ()))
    return Run(
        num=member["num"],
        overrides=overrides,
        path=_moved(Path(member["dir"]), folder),
        state=str(member.get("state")),
        exit_code=member.get("exit_code"),
        reason=_last_line(member.get("error")),
        seed=_number(overrides, SEED),
        global_batch_size=_number(overrides, BATCH),
    )


def _moved(path: Path, folder: Path) -> Path:
    """Where a member is now, whose sweep's folder may have been moved or copied since."""
    for count in range(1, len(path.parts)):
        here = folder.joinpath(*path.parts[-count:])
        if (here / "plan.json").is_file():
            return here
    return path


def _number(overrides: Sequence[str], key: str) -> int | None:
    values = [one.partition("=")[2] for one in overrides if one.lstrip("+").partition("=")[0] == key]
    return int(values[-1]) if values and values[-1].isdecimal() else None


def _last_line(text: Any) -> str | None:
    lines = str(text or "").strip().splitlines()
    return lines[-1] if lines else None


def _run(run: Run) -> tuple[Run, list[str]]:
    """`run` with what its own folder tells, and what couldn't be read there."""
    folder = RunDir(run.path)
    notes: list[str] = []
    if not folder.plan.is_file():
        return run, notes
    for tell in (_planned, _ended, _measured):
        try:
            with readable(run.path):
                run = tell(run, folder)
        except LauncherError as error:
            notes = list(dict.fromkeys([*notes, f"{run.name}: {error}"]))
    if run.missing:
        missing = "1 update has" if run.missing == 1 else f"{run.missing} updates have"
        notes.append(f"{run.name}: {missing} no line in metrics.jsonl; its samples and its time leave them out")
    return run, notes


def _peak(plan: dict[str, Any]) -> float | None:
    """The highest rate that a run is planned to have. In a ramp it may stay below that of a full window."""
    rates = [float(rate) for _, rate in plan.get("lr_table") or []]
    return max(rates) if plan.get("ramp") and rates else plan.get("lr")


def _planned(run: Run, folder: RunDir) -> Run:
    plan = folder.read_json(folder.plan)
    base = target = None
    with suppress(LauncherError, OSError, UnicodeDecodeError):
        config = read_config(folder.config.read_text(encoding="utf-8"))
        base, target = config.scaling.base_batch_size, config.targets.validation_loss
    return replace(
        run,
        seed=plan.get("seed"),
        global_batch_size=plan.get("global_batch_size"),
        lr=_peak(plan),
        warmup_updates=plan.get("warmup_updates"),
        num_updates=plan.get("num_updates"),
        rule=plan.get("scaling_rule"),
        base_batch_size=base,
        world_size=plan.get("world_size"),
        target=target,
        is_validated=(plan.get("facts") or {}).get("validation_samples") is not None,
    )


def _ended(run: Run, folder: RunDir) -> Run:
    now = read_run(run.path)
    state = f"{now.state.value}, no sign of life" if now.is_silent else now.state.value
    run = replace(run, state=state, exit_code=now.exit_code, reason=_last_line(now.error), update=now.update)
    if folder.result.is_file():
        result = folder.read_json(folder.result)
        names = {"training": "train_loss", "validation": "validation_loss"}
        kinds = [kind for kind in names if kind == "training" or run.is_validated]
        run = replace(run, losses={kind: _finite(result.get(names[kind])) for kind in kinds})
    return run


def _measured(run: Run, folder: RunDir) -> Run:
    train, validation = read_metrics(folder.metrics)
    seen: list[tuple[int, float, float]] = [(0, 0.0, 0.0)]
    for one in train:
        _, samples, seconds = seen[-1]
        seen.append((one["update"], samples + (one.get("samples") or 0), seconds + (one.get("seconds") or 0)))
    return replace(
        run,
        is_validated=run.is_validated or bool(validation),
        missing=max(0, seen[-1][0] - len(train)),
        curves={"training": _curve(train, seen), "validation": _curve(validation, seen)},
        samples=seen[-1][1],
        seconds=seen[-1][2],
        critical_batch=_critical_batch(train),
    )


def _critical_batch(train: Sequence[Record]) -> tuple[float, float] | None:
    for one in reversed(train):
        batch, error = _finite(one.get("critical_batch")), _finite(one.get("critical_batch_error"))
        if batch is not None and error is not None:
            return batch, error
    return None


def _curve(records: Sequence[Record], seen: Sequence[tuple[int, float, float]]) -> Curve:
    points, index = [], 0
    for one in records:
        while index + 1 < len(seen) and seen[index + 1][0] <= one["update"]:
            index += 1
        loss = _finite(one.get("loss"))
        if loss is not None:
            points.append((one["update"], *seen[index][1:], loss))
    return Curve(*zip(*points, strict=True)) if points else Curve()


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
