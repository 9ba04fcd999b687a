"""The gradient noise scale: how large a batch may become before larger ones mostly repeat what they know.

McCandlish, Kaplan, Amodei and the OpenAI Dota Team 2018, "An Empirical Model of Large-Batch Training"
(arXiv:1812.06162): with the true gradient G and the covariance of the gradient of one sample, whose trace is S, a batch
of B samples gives a gradient whose squared norm is |G|^2 + S / B on average. Norms at two sizes tell S and |G|^2 apart
(their appendix A.1), and S / |G|^2 is the simple noise scale (their equation 2.9), an estimate of the critical batch.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from launcher.plan.durations import Every
from launcher.plan.noise_scale import FEWEST
from launcher.train.parallel.mesh import Place
from launcher.train.sharding.base import StepResult
from launcher.train.sharding.first_gradient import FirstGradient
from launcher.train.window import Window

CLEAR = 2.0
"""Standard errors that the squared gradient lies above zero, so that dividing by it says something."""


@dataclass(frozen=True)
class Estimate:
    """The critical batch, in samples."""

    batch: float
    error: float
    """Its standard error."""


def split(small: float, inverse_small: float, big: float, inverse_big: float) -> tuple[float, float]:
    """S and |G|^2 from squared norms at two batch sizes, both without bias (appendix A.1 of the paper).

    Args:
        small, big: the squared norms; `small` may be a mean over several small batches.
        inverse_small, inverse_big: 1 / samples, likewise.
    """
    noise = (small - big) / (inverse_small - inverse_big)
    return noise, big - noise * inverse_big


@dataclass
class Averages:
    """Exponential averages of S and |G|^2, each by itself, and of how they scatter.

    Each is free of the bias of its start: after t measurements the newest weighs (1 - b) / (1 - b^t) with
    b = 1 - 1 / memory, and the averages follow from those before it, mean by mean and spread by spread (D. H. D. West,
    Communications of the ACM 22, 1979).
    """

    memory: float
    count: int = 0
    noise: float = 0.0
    signal: float = 0.0
    noise_spread: float = 0.0
    """The weighted variance of the measurements of S; of |G|^2; and their covariance."""
    signal_spread: float = 0.0
    joint_spread: float = 0.0
    concentration: float = 0.0
    """The sum of the squared weights: 1 / it is how many equal ones they are worth."""

    def add(self, noise: float, signal: float) -> None:
        """Takes the measurement of one update."""
        self.count += 1
        keeps = 1 - 1 / self.memory
        new = (1 - keeps) / (1 - keeps**self.count)
        old, of_noise, of_signal = 1 - new, noise - self.noise, signal - self.signal
        self.noise += new * of_noise
        self.signal += new * of_signal
        self.noise_spread = old * (self.noise_spread + new * of_noise**2)
        self.signal_spread = old * (self.signal_spread + new * of_signal**2)
        self.joint_spread = old * (self.joint_spread + new * of_noise * of_signal)
        self.concentration = new**2 + old**2 * self.concentration

    def estimate(self) -> Estimate | None:
        """S / |G|^2 with the standard error that follows from how the measurements scatter, to first order (the delta
        method). None: there are too few, or |G|^2 isn't clearly above zero."""
        if self.count < FEWEST or self.concentration >= 1:
            return None
        # spread of single measurements, without the bias of taking it about their own mean, and of their means
        share = self.concentration / (1 - self.concentration)
        of_noise, of_signal, joint = (share * one for one in (self.noise_spread, self.signal_spread, self.joint_spread))
        if self.signal <= CLEAR * math.sqrt(of_signal):
            return None
        batch = self.noise / self.signal
        variance = (of_noise - 2 * batch * joint + batch**2 * of_signal) / self.signal**2
        return Estimate(max(0.0, batch), math.sqrt(max(0.0, variance)))


class NoiseScale:
    """Measures the noise scale of a training on this rank, every so many updates. It changes nothing of it."""

    def __init__(self, first: FirstGradient, place: Place, *, every: Every, memory: float) -> None:
        self.first, self._place, self._every = first, place, every
        self.averages = Averages(memory)

    def begin(self, window: Window) -> bool:
        """Whether this window is measured, which all ranks know alike."""
        is_due = self._every.is_due(window.update) and window.samples > 1
        if is_due:
            self.first.begin()
        return is_due

    def end(self, window: Window, step: StepResult) -> dict[str, Any]:
        """What there is to report once the window's step is done. Collective. {}: nothing could be measured."""
        square = self.first.square()
        if not step.applied:
            return {}
        has = square is not None and math.isfinite(square)
        mine = [1.0, square, 1 / self.first.samples] if has and square is not None else [0.0, 0.0, 0.0]
        parts, squares, inverses = self._place.sum(mine)
        if not parts or inverses / parts <= 1 / window.samples:
            return {}
        noise, signal = split(squares / parts, inverses / parts, step.grad_norm**2, 1 / window.samples)
        self.averages.add(noise, signal)
        found = self.averages.estimate()
        return {
            "gradient_noise": noise,
            "gradient_signal": signal,
            "critical_batch": None if found is None else found.batch,
            "critical_batch_error": None if found is None else found.error,
        }

    def to_dict(self) -> dict[str, Any]:
        """For a checkpoint; `take` is the way back."""
        return asdict(self.averages)

    def take(self, saved: Mapping[str, Any] | None) -> None:
        """Goes back or on to what `to_dict` gave. None: of a training that didn't measure."""
        self.averages = Averages(**{**(saved or {}), "memory": self.averages.memory})
