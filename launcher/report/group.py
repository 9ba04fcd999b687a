"""Which runs of a sweep belong together: seeds of one configuration, batches under one rule, rules of one training."""

from collections.abc import Sequence
from dataclasses import dataclass

from launcher.report.noise import FEWEST, Sample
from launcher.report.read import BATCH, SEED, Run

NAMES = (SEED, "run.name")
"""Keys in which runs of one configuration may differ."""
TUNING = ("scaling", "optimizer", "schedule")
"""Sections that say how a model is trained at a batch. Batches are compared across them, to find what serves best; runs
that differ in anything else train something else and aren't compared."""


@dataclass(frozen=True, eq=False)
class Configuration:
    """Runs with the same settings but the seed."""

    training: tuple[str, ...]
    """The overrides that say what is trained."""
    tuning: tuple[str, ...]
    """Those that say how it is trained at its batch."""
    runs: tuple[Run, ...]

    @property
    def batch(self) -> int | None:
        return next((run.global_batch_size for run in self.runs if run.global_batch_size is not None), None)

    @property
    def rule(self) -> str | None:
        return next((run.rule for run in self.runs if run.rule is not None), None)

    @property
    def scaling(self) -> tuple[str, ...]:
        """Those of `tuning` that say how the rate follows the batch."""
        return tuple(one for one in self.tuning if section(one) == "scaling")

    @property
    def chosen(self) -> tuple[str, ...]:
        """The rest of `tuning`: at each batch the best of several such may be chosen."""
        return tuple(one for one in self.tuning if one not in self.scaling)

    def counted(self, kind: str) -> tuple[Run, ...]:
        """The runs with a final loss, one for each seed."""
        by_seed: dict[int | None, Run] = {}
        for run in self.runs:
            if run.loss(kind) is not None and not run.has_diverged(kind):
                by_seed.setdefault(run.seed, run)
        return tuple(by_seed.values())

    def sample(self, kind: str) -> Sample | None:
        """The final losses, one for each seed; None: there is none yet."""
        losses = [run.loss(kind) for run in self.counted(kind)]
        return Sample(tuple(one for one in losses if one is not None)) if losses else None

    def repeated(self, kind: str) -> list[Run]:
        """Runs that finished with a seed that another one has too."""
        return [run for run in self.runs if run.loss(kind) is not None and run not in self.counted(kind)]

    def diverged(self, kind: str) -> list[Run]:
        return [run for run in self.runs if run.has_diverged(kind)]

    def without_loss(self, kind: str) -> list[Run]:
        """Runs that failed for another reason, or aren't finished."""
        return [run for run in self.runs if run.loss(kind) is None and not run.has_diverged(kind)]


@dataclass(frozen=True, eq=False)
class Family:
    """Configurations that train the same, at several batches and in several ways."""

    training: tuple[str, ...]
    configurations: tuple[Configuration, ...]

    @property
    def batches(self) -> list[int]:
        return sorted({one.batch for one in self.configurations if one.batch is not None})

    @property
    def reference_batch(self) -> int | None:
        """scaling.base_batch_size where it was tried, else the smallest batch."""
        bases = {run.base_batch_size for one in self.configurations for run in one.runs} & set(self.batches)
        return min([one for one in bases if one is not None] or self.batches, default=None)

    def reference(self, kind: str) -> Configuration | None:
        """The best configuration at the reference batch."""
        return best([one for one in self.configurations if one.batch == self.reference_batch], kind)


def best(configurations: Sequence[Configuration], kind: str) -> Configuration | None:
    """The one with the lowest mean loss, of those that no seed diverged under; None: there is none.

    One of a single seed only where there is no other: it has no noise to compare with.
    """
    samples = [(one, one.sample(kind)) for one in configurations if not one.diverged(kind)]
    able = [(sample.n < FEWEST, sample.mean, one) for one, sample in samples if sample is not None]
    return min(able, key=lambda three: three[:2])[2] if able else None


def families(runs: Sequence[Run]) -> list[Family]:
    """The runs of a sweep, grouped, each level in the order of the sweep and batches rising."""
    grouped: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        same = tuple(one for one in run.overrides if key(one) not in NAMES)
        grouped.setdefault(same, []).append(run)
    made = [_configuration(same, its) for same, its in grouped.items()]
    found: dict[tuple[str, ...], list[Configuration]] = {}
    for one in made:
        found.setdefault(one.training, []).append(one)
    order = {tuning: index for index, tuning in enumerate(dict.fromkeys(one.tuning for one in made))}

    def place(one: Configuration) -> tuple[int, int]:
        return order[one.tuning], one.batch or 0

    return [Family(training, tuple(sorted(ones, key=place))) for training, ones in found.items()]


def kind_of_loss(runs: Sequence[Run]) -> str:
    """The loss that runs are compared by: validation where all that have started are validated, else training."""
    started = [run for run in runs if run.losses or any(curve.losses for curve in run.curves.values())]
    return "validation" if started and all(run.is_validated for run in started) else "training"


def key(override: str) -> str:
    """``optimizer.lr`` of ``+optimizer.lr=0.1``."""
    return override.lstrip("+~").partition("=")[0]


def section(override: str) -> str:
    """``schedule`` of ``schedule/decay=cosine``."""
    return key(override).replace("/", ".").split(".")[0]


def _configuration(same: Sequence[str], runs: Sequence[Run]) -> Configuration:
    rest = [one for one in same if key(one) != BATCH]
    tuning = tuple(one for one in rest if section(one) in TUNING)
    return Configuration(tuple(one for one in rest if one not in tuning), tuning, tuple(runs))
