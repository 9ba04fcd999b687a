"""Where a pipeline cuts a model: contiguous layers, at least one a stage."""

from collections.abc import Sequence
from itertools import accumulate


def split_layers(layers: Sequence[int], embed: int, head: int, stages: int) -> list[int]:
    """The number of layers of each of `stages` stages, so that the costliest costs least.

    Among those splits it is the one with the smallest sum of squared costs, and then the one that has more layers on
    earlier stages: the last one also works out the loss, which isn't counted.

    Args:
        layers: the cost of each layer; where all are 0, layers count alike.
        embed: what the first stage has beside its layers.
        head: what the last stage has beside its layers.
        stages: at most as many as there are layers.
    """
    costs = list(layers) if any(layers) else [1] * len(layers)
    costs[0] += embed
    costs[-1] += head
    sums = [0, *accumulate(costs)]
    bound = _smallest_bound(costs, stages)
    return _most_even(sums, stages, bound)


def stage_costs(part_costs: Sequence[int], counts: Sequence[int]) -> list[int]:
    """The cost of each stage of so many layers; `part_costs` is [embed, each layer, head]."""
    embed, *layers, head = part_costs
    ends = list(accumulate(counts))
    costs = [sum(layers[end - count : end]) for count, end in zip(counts, ends, strict=True)]
    costs[0] += embed
    costs[-1] += head
    return costs


def _smallest_bound(costs: Sequence[int], stages: int) -> int:
    """The smallest cost that no stage need exceed. Fewer stages than allowed can always be cut further."""
    low, high = max(costs), sum(costs)
    while low < high:
        middle = (low + high) // 2
        needed, filled = 1, 0
        for cost in costs:
            if filled + cost > middle:
                needed, filled = needed + 1, 0
            filled += cost
        low, high = (low, middle) if needed <= stages else (middle + 1, high)
    return low


def _most_even(sums: Sequence[int], stages: int, bound: int) -> list[int]:
    """The counts with the smallest sum of squared costs of which none is over `bound`; earlier ones are the larger."""
    count = len(sums) - 1
    # of the layers from `start` on in the stages that are left: the smallest sum of squares, and where the first ends
    best: list[tuple[int, int] | None] = [None] * count + [(0, count)]
    ends: list[list[tuple[int, int] | None]] = []
    for left in range(1, stages + 1):
        before, best = best, [None] * (count + 1)
        for start in range(count - left, -1, -1):
            for end in range(start + 1, count - left + 2):
                cost = sums[end] - sums[start]
                if cost > bound:
                    break
                rest, so_far = before[end], best[start]
                if rest is not None and (so_far is None or rest[0] + cost * cost <= so_far[0]):
                    best[start] = (rest[0] + cost * cost, end)
        ends.append(best)
    counts, start = [], 0
    for chosen in reversed(ends):
        found = chosen[start]
        assert found is not None
        counts.append(found[1] - start)
        start = found[1]
    return counts
