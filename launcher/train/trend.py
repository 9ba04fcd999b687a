"""Whether a training gets worse against its own history: a loss that drifts up, a rate that falls."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from statistics import fmean, median, variance
from typing import Any

BLOCK = 50
"""Updates that are compared as one."""
IN_A_ROW = 2
"""Blocks that have to be worse before anything is said."""
DEVIATIONS = 6.0
"""Standard errors of the difference of two blocks' means by which a loss has to lie above the best. The best of many
blocks is low by chance alone, by up to three of its own."""
SHARE = 0.01
"""And the share of the best by which it has to."""
SLOW = 0.8
"""A rate is said to have fallen below this share of the best block's."""


@dataclass
class Trend:
    """Compares blocks of updates with the best one so far. Each of the two is said once a run."""

    losses: list[float] = field(default_factory=list)
    """Of the block that isn't full yet."""
    best_loss: float | None = None
    """The mean of the best block, and its squared standard error."""
    best_error: float = 0.0
    higher: int = 0
    """Blocks in a row that lie above it."""
    said: list[str] = field(default_factory=list)
    """Of loss and rate those that were said."""
    _rates: list[float] = field(default_factory=list)
    _best_rate: float = 0.0
    _slower: int = 0

    def to_dict(self) -> dict[str, Any]:
        """For a checkpoint; `take` is the way back. A rate is of an attempt: another one may run elsewhere."""
        return {name: value for name, value in asdict(self).items() if not name.startswith("_")}

    @classmethod
    def take(cls, saved: Mapping[str, Any] | None) -> "Trend":
        """What `to_dict` gave; None: a training that had none."""
        return cls(**(saved or {}))

    def add(self, loss: float, samples_per_s: float) -> list[str]:
        """Takes an update that was applied. Returns what there is to say."""
        self.losses.append(loss)
        self._rates.append(samples_per_s)
        lines = self._of_losses() if len(self.losses) == BLOCK else []
        return lines + (self._of_rates() if len(self._rates) == BLOCK else [])

    def _of_losses(self) -> list[str]:
        mean, error = fmean(self.losses), variance(self.losses) / BLOCK
        self.losses = []
        if self.best_loss is None or mean < self.best_loss:
            self.best_loss, self.best_error, self.higher = mean, error, 0
            return []
        limit = self.best_loss + max(DEVIATIONS * math.sqrt(error + self.best_error), SHARE * abs(self.best_loss))
        self.higher = self.higher + 1 if mean > limit else 0
        if self.higher < IN_A_ROW or "loss" in self.said:
            return []
        self.said.append("loss")
        return [f"the loss drifts up: {mean:.4g} over the last {BLOCK} updates, {self.best_loss:.4g} at its best"]

    def _of_rates(self) -> list[str]:
        rate = median(self._rates)
        self._rates = []
        self._best_rate = max(self._best_rate, rate)
        self._slower = self._slower + 1 if rate < SLOW * self._best_rate else 0
        if self._slower < IN_A_ROW or "rate" in self.said:
            return []
        self.said.append("rate")
        return [
            f"the rate has fallen: {rate:.4g} samples/s over the last {BLOCK} updates, {self._best_rate:.4g} at best"
        ]
