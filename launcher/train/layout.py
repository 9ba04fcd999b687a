"""How the samples of a window lie over ranks and micro-batches: the update is the same, padding and time aren't."""

from collections.abc import Sequence
from itertools import pairwise

from launcher.errors import ConfigError
from launcher.plan.batch import BatchPlan

Layout = list[list[list[int]]]
"""[rank][step] -> positions in the window; an empty list is a micro-batch without a sample of its own."""


def in_order_of_arrival(batch: BatchPlan, samples: int) -> Layout:
    """Consecutive samples to each rank, ranks differing by at most one."""
    return [
        [list(positions) for positions in batch.micro_slices(samples, rank)]
        for rank in range(batch.data_parallel_degree)
    ]


def in_whole_groups(batch: BatchPlan, samples: int, size: int) -> Layout:
    """As `in_order_of_arrival`, with consecutive groups of `size` samples instead of samples; the last one of a window
    may be smaller. The plan's micro-batches hold whole groups, and ranks take as many steps."""
    groups = BatchPlan.solve(-(-samples // size), batch.micro_batch_size // size, "auto", batch.data_parallel_degree)
    of_groups = in_order_of_arrival(groups, groups.global_batch_size)
    return [
        [[i for group in step for i in range(group * size, min((group + 1) * size, samples))] for step in rank]
        for rank in of_groups
    ]


def by_length(batch: BatchPlan, lengths: Sequence[int]) -> Layout:
    """Samples of like length together, so that little is padded, and ranks with like work, so that none waits.

    Sorted by length and cut into one run of neighbours for each micro-batch of the window; then the costliest
    micro-batch goes to the rank with the least work so far, each rank taking as many as any other. That greedy rule is
    longest processing time first (Graham 1969, doi:10.1137/0117039), with a bound on the number of jobs a rank takes.

    Args:
        lengths: of the window's samples, by position.
    """
    degree, steps = batch.data_parallel_degree, batch.num_micro_steps(len(lengths))
    longest_first = _longest_first(lengths)
    cuts = [len(lengths) * i // (degree * steps) for i in range(degree * steps + 1)]
    return _deal([longest_first[start:stop] for start, stop in pairwise(cuts)], lengths, degree)


def by_tokens(tokens: int, degree: int, lengths: Sequence[int]) -> Layout:
    """As `by_length`, with as many samples in a micro-batch as fit `tokens`, padding included; steps vary by window.

    Raises:
        ConfigError: a sample alone is longer.
    """
    longest_first = _longest_first(lengths)
    if lengths[longest_first[0]] > tokens:
        problem = f"a sample has {lengths[longest_first[0]]} tokens, and a micro-batch holds at least one sample"
        hint = f"batch.micro_batch_tokens={lengths[longest_first[0]]} or more, or shorter samples"
        raise ConfigError("batch.micro_batch_tokens", tokens, problem, hint=hint)
    runs: list[list[int]] = []
    for position in longest_first:
        if runs and lengths[runs[-1][0]] * (len(runs[-1]) + 1) <= tokens:
            runs[-1].append(position)
        else:
            runs.append([position])
    # every rank runs as many: the costliest are halved until the number divides
    while len(runs) % degree:
        divisible = [run for run in runs if len(run) > 1]
        costliest = max(divisible, key=lambda run: lengths[run[0]] * len(run), default=[])
        middle = len(costliest) // 2
        if costliest:
            runs.remove(costliest)
        runs += [costliest[:middle], costliest[middle:]] if costliest else [[]]
    return _deal(runs, lengths, degree)


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda position: (-lengths[position], position))


def _deal(runs: Sequence[list[int]], lengths: Sequence[int], degree: int) -> Layout:
    count = len(runs)
    steps = count // degree
    costs = [max((lengths[position] for position in run), default=0) * len(run) for run in runs]
    layout: Layout = [[] for _ in range(degree)]
    work = [0] * degree
    for index in sorted(range(count), key=lambda index: (-costs[index], index)):
        rank = min((one for one in range(degree) if len(layout[one]) < steps), key=lambda one: (work[one], one))
        layout[rank].append(runs[index])
        work[rank] += costs[index]
    return layout


def padded_tokens(layout: Layout, lengths: Sequence[int]) -> int:
    """Tokens that pass through the model with this layout, padding included."""
    return sum(max(lengths[p] for p in step) * len(step) for rank in layout for step in rank if step)
