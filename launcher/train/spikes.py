"""The guard against loss spikes: whether a window's loss lies far above those before it."""

from dataclasses import dataclass, field
from math import inf
from statistics import median

from launcher.config.choices import LossSpike

FEWEST = 10
"""Losses that there have to be before one is judged."""
NORMAL = 1.4826
"""What the median absolute deviation of normal numbers is multiplied by for their standard deviation."""


@dataclass
class SpikeGuard:
    """Judges the loss of each window by those of the last ones that were applied. All ranks judge alike."""

    action: LossSpike = LossSpike.none
    deviations: float = 10.0
    window: int = 50
    losses: list[float] = field(default_factory=list)
    """The last ones, which belong to a checkpoint."""

    def add(self, loss: float) -> None:
        """Remembers the loss of a window that was applied."""
        if self.action is not LossSpike.none:
            self.losses.append(loss)
            del self.losses[: -self.window]

    @property
    def limit(self) -> float:
        """What a loss may be at most: the median of the last ones and so many of their deviations, each at least a
        hundredth of the median; inf where it isn't known yet, or nobody asks."""
        if self.action is LossSpike.none or len(self.losses) < FEWEST:
            return inf
        middle = median(self.losses)
        deviation = NORMAL * median(abs(one - middle) for one in self.losses)
        return middle + self.deviations * max(deviation, abs(middle) / 100)

    def is_one(self, loss: float) -> bool:
        """Whether this loss is a spike. One that isn't finite is another matter."""
        return self.limit < loss < inf
