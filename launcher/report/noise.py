"""What the seeds say of the noise in a loss, and whether one mean lies above another by more than that."""

import math
from dataclasses import dataclass

CONFIDENCE = 0.95
"""A loss is called higher where chance alone would give such a difference in at most one of twenty cases."""
FEWEST = 2
"""Seeds from which on there is an estimate of the noise."""

_PANELS = 1000


@dataclass(frozen=True)
class Sample:
    """The final losses of one configuration, one a seed."""

    values: tuple[float, ...]

    @property
    def n(self) -> int:
        return len(self.values)

    @property
    def mean(self) -> float:
        return math.fsum(self.values) / self.n

    @property
    def standard_error(self) -> float | None:
        """Of the mean: s / sqrt(n), with the n - 1 in the variance; None where one seed says nothing of the noise."""
        if self.n < FEWEST:
            return None
        variance = math.fsum((value - self.mean) ** 2 for value in self.values) / (self.n - 1)
        return math.sqrt(variance / self.n)


@dataclass(frozen=True)
class Comparison:
    """A loss beside that of the reference."""

    difference: float
    """Of the means; above 0: worse than the reference."""
    margin: float | None
    """The largest difference that the noise explains; None: no estimate of the noise."""

    @property
    def holds(self) -> bool | None:
        """Whether the loss is no higher than the reference's, as far as the noise lets one see; None: not known."""
        return None if self.margin is None else self.difference <= self.margin


def compare(one: Sample, reference: Sample) -> Comparison:
    """Welch's test of one mean against another, one-sided: a lower loss always holds.

    The margin is t(CONFIDENCE, df) times sqrt(a + b), where a and b are the squared standard errors of both means and
    df = (a + b)² / (a² / (n_a - 1) + b² / (n_b - 1)): B. L. Welch, "The generalization of 'Student's' problem when
    several different population variances are involved", Biometrika 34 (1947); F. E. Satterthwaite, "An approximate
    distribution of estimates of variance components", Biometrics Bulletin 2 (1946). Variances may differ, and so may
    the numbers of seeds. With one seed on either side there is no margin.
    """
    difference = one.mean - reference.mean
    if one.standard_error is None or reference.standard_error is None:
        return Comparison(difference, None)
    a, b = one.standard_error**2, reference.standard_error**2
    if a + b == 0:
        return Comparison(difference, 0.0)
    share = a / (a + b)
    freedom = 1 / (share**2 / (one.n - 1) + (1 - share) ** 2 / (reference.n - 1))
    return Comparison(difference, t_quantile(CONFIDENCE, freedom) * math.sqrt(a + b))


def t_quantile(probability: float, freedom: float) -> float:
    """The quantile of Student's t distribution, for a probability from 1/2 to below 1 and `freedom` of at least 1.

    With t = sqrt(freedom) tan(angle) the density becomes a power of the cosine, whose integral is halved into.
    """
    log_scale = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - math.log(math.pi) / 2
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        if math.exp(log_scale) * _cosine_integral(freedom - 1, middle) < probability - 0.5:
            low = middle
        else:
            high = middle
    return math.sqrt(freedom) * math.tan((low + high) / 2)


def _cosine_integral(power: float, end: float) -> float:
    """The integral of cos(x) ** power from 0 to `end`, by Simpson's rule."""
    step = end / _PANELS
    values = [math.pow(max(0.0, math.cos(index * step)), power) for index in range(_PANELS + 1)]
    return step / 3 * (values[0] + values[-1] + 4 * math.fsum(values[1:-1:2]) + 2 * math.fsum(values[2:-1:2]))
