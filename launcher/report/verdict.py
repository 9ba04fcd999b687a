"""Which batches hold: whose loss is no higher than the reference's, as far as the seeds' noise lets one see."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from launcher.config.targets import device_hours
from launcher.observe.plot import smoothed
from launcher.report.group import Configuration, Family, best
from launcher.report.noise import Comparison, Sample, compare
from launcher.report.read import Curve, Run


class Judgement(Enum):
    """What is said of a configuration beside the reference."""

    reference = "reference"
    holds = "holds"
    higher = "higher"
    diverged = "diverged"
    unknown = "not judged"
    smaller = "smaller batch"


@dataclass(frozen=True)
class Judged:
    """A configuration beside the reference."""

    configuration: Configuration
    judgement: Judgement
    sample: Sample | None
    comparison: Comparison | None
    """None: one of the two has no loss."""


@dataclass(frozen=True)
class Series:
    """The batches under one rule, rising; of several configurations at a batch the best."""

    scaling: tuple[str, ...]
    judged: tuple[Judged, ...]

    @property
    def reached(self) -> int | None:
        """The largest batch that holds together with all smaller ones from the reference on; None: none does."""
        reached = None
        for one in self.judged:
            if one.judgement is Judgement.smaller:
                continue
            if one.judgement not in (Judgement.reference, Judgement.holds):
                break
            reached = one.configuration.batch
        return reached


@dataclass(frozen=True)
class Verdict:
    """What a family's runs say."""

    family: Family
    kind: str
    """Of the loss: validation or training."""
    reference: Configuration | None
    judged: tuple[Judged, ...]
    """All configurations whose batch is known."""
    series: tuple[Series, ...]

    @property
    def sample(self) -> Sample | None:
        """The losses of the reference."""
        return None if self.reference is None else self.reference.sample(self.kind)

    @property
    def target(self) -> float | None:
        """The validation loss that was stated before the runs, where all that state one state the same; else the
        highest final loss of the reference's seeds: what each of them has come to."""
        if self.stated is not None:
            return self.stated
        return None if self.sample is None else max(self.sample.values)

    @property
    def stated(self) -> float | None:
        """targets.validation_loss of the runs; None: there is none, or several."""
        stated = {run.target for one in self.family.configurations for run in one.runs} - {None}
        return min(one for one in stated if one is not None) if self.kind == "validation" and len(stated) == 1 else None

    @property
    def reached(self) -> int | None:
        """The largest batch that one of the series has reached, above the reference batch; None: none."""
        reached = [one.reached for one in self.series if one.reached is not None]
        largest = max(reached, default=None)
        return None if largest == self.family.reference_batch else largest

    @property
    def is_judged(self) -> bool:
        """Whether there is an estimate of the noise for at least one larger batch, or one that diverged."""
        base = self.family.reference_batch or 0
        larger = [one for one in self.judged if (one.configuration.batch or 0) > base]
        return any(one.judgement is not Judgement.unknown for one in larger)

    def of(self, configuration: Configuration) -> Judged | None:
        """What is said of a configuration; None: its batch isn't known."""
        return next((one for one in self.judged if one.configuration is configuration), None)


def judge(family: Family, kind: str) -> Verdict:
    """The verdict on a family by its losses of one kind."""
    known = [one for one in family.configurations if one.batch is not None]
    reference = family.reference(kind)
    judged = tuple(_judge(one, family.reference_batch or 0, reference, kind) for one in known)
    groups: dict[tuple[str, ...], dict[int, list[Configuration]]] = {}
    for one in known:
        groups.setdefault(one.scaling, {}).setdefault(one.batch or 0, []).append(one)
    series = []
    for scaling, by_batch in groups.items():
        shown = [_shown(by_batch[batch], reference, kind) for batch in sorted(by_batch)]
        series.append(Series(scaling, tuple(judged[known.index(one)] for one in shown)))
    return Verdict(family, kind, reference, judged, tuple(series))


def _shown(ones: Sequence[Configuration], reference: Configuration | None, kind: str) -> Configuration:
    """The configuration that stands for a batch: the reference, else the best, else one that diverged."""
    if reference in ones:
        return ones[ones.index(reference)]
    return best(ones, kind) or next((one for one in ones if one.diverged(kind)), ones[0])


def _judge(one: Configuration, base: int, reference: Configuration | None, kind: str) -> Judged:
    own = one.sample(kind)
    sample = None if reference is None else reference.sample(kind)
    comparison = None if own is None or sample is None else compare(own, sample)
    holds = None if comparison is None else comparison.holds
    judgement = {None: Judgement.unknown, True: Judgement.holds, False: Judgement.higher}[holds]
    if one.diverged(kind):
        judgement = Judgement.diverged
    elif one is reference:
        judgement = Judgement.reference
    elif (one.batch or 0) < base:
        judgement = Judgement.smaller
    return Judged(one, judgement, own, comparison)


def shown_curve(run: Run, kind: str) -> Curve:
    """The curve of a run as it is drawn and read: the training loss smoothed, for each value is one window's."""
    curve = run.curves.get(kind, Curve())
    if kind == "validation":
        return curve
    return Curve(curve.updates, curve.samples, curve.seconds, tuple(smoothed(curve.losses)))


def device_hours_to(target: float, runs: Sequence[Run], kind: str) -> list[float]:
    """For each run that came to a loss of at most `target`: ranks times hours that its updates had taken by then."""
    sized = [(run, run.world_size) for run in runs if run.world_size is not None]
    reached = [(_reached(target, run, kind), size) for run, size in sized]
    return [device_hours(curve.seconds[at], size) for (curve, at), size in reached if at is not None]


def samples_to(target: float, runs: Sequence[Run], kind: str) -> list[float]:
    """For each run that came to a loss of at most `target`: the samples that it had seen by then."""
    reached = [_reached(target, run, kind) for run in runs]
    return [curve.samples[at] for curve, at in reached if at is not None]


def _reached(target: float, run: Run, kind: str) -> tuple[Curve, int | None]:
    """The shown curve of a run, and where on it the loss first came to at most `target`; None: nowhere."""
    curve = shown_curve(run, kind)
    return curve, next((at for at, loss in enumerate(curve.losses) if loss <= target), None)
