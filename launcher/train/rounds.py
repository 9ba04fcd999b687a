"""How the micro-batches of a window run through a pipeline: round after round, those of a round alike in shape."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from launcher.train.reading import Item


@dataclass(frozen=True)
class Rounds:
    """How micro-batches are divided into runs of a pipeline's schedule."""

    most: int | None
    """Micro-batches of a round at most; None: any number."""
    filled: Callable[[int], int]
    """How many micro-batches a round of so many is filled up to, so that the schedule can run it."""
    bubble: float = 0.0
    """What a round costs beside its micro-batches, in the time of one of them: stages that wait for the first or after
    the last."""

    def divide(self, lengths: Sequence[float]) -> list[range]:
        """Which micro-batches make up each round, so that all rounds together take the least time.

        In a round all are as long as the longest: many rounds pad little, few wait little.

        Args:
            lengths: of the micro-batches in their order.
        """
        count = len(lengths)
        most = self.most or count
        best: list[tuple[float, int]] = [(0.0, 0)]
        for stop in range(1, count + 1):
            longest, choices = 0.0, []
            for start in range(stop - 1, max(-1, stop - 1 - most), -1):
                longest = max(longest, lengths[start])
                choices.append((best[start][0] + (self.filled(stop - start) + self.bubble) * longest, start))
            best.append(min(choices))
        found = [range(best[count][1], count)]
        while found[0].start:
            stop = found[0].start
            found.insert(0, range(best[stop][1], stop))
        return found

    def alike(self, turns: Sequence[list[Item]], rows: int, longest: Item) -> list[list[Item]]:
        """The micro-batches of a round with as many rows each, and as many as the schedule needs: copies fill up.

        Args:
            rows: of each.
            longest: the sample whose length all are padded to.
        """
        shape = longest._replace(is_real=False, is_shape=True)
        found = []
        for turn in [*turns, *[[]] * (self.filled(len(turns)) - len(turns))]:
            copied = (turn or [longest])[0]._replace(is_real=False)
            found.append([*turn, *[copied] * (rows - len(turn)), shape])
        return found
