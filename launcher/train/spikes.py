"""The guard against loss spikes: whether a window's loss lies far above those before it."""

from collections import deque
from collections.abc import Sequence
from statistics import median

from launcher.config.choices import LossSpike

FEWEST = 10
"""Losses that there have to be before one is judged."""
NORMAL = 1.4826
"""What the median absolute deviation of normal numbers is multiplied by for their standard deviation."""


class SpikeGuard:
    """Remembers the losses of the last windows that were applied. The same on every rank, as the losses are."""

    def __init__(self, action: LossSpike, deviations: float, window: int) -> None:
        self.action, self._deviations = action, deviations
        self._losses: deque[float] = deque(maxlen=window)

    @property
    def losses(self) -> list[float]:
        """What is remembered, for a checkpoint."""
        return list(self._losses)

    def take(self, losses: Sequence[float]) -> None:
        """Remembers these and nothing else."""
        self._losses.clear()
        self._losses.extend(losses)

    def add(self, loss: float) -> None:
        """Remembers the loss of a window that was applied."""
        if self.action is not LossSpike.none:
            self._losses.append(loss)

    def limit(self) -> float | None:
        """What a loss may be at most: the median of the last ones and so many of their deviations; None: not known yet,
        or nobody asks."""
        if self.action is LossSpike.none or len(self._losses) < FEWEST:
            return None
        middle = median(self._losses)
        return middle + self._deviations * NORMAL * median(abs(one - middle) for one in self._losses)
