"""The order in which each rank of a pipeline works, and when: torch's schedules without torch.

Tests hold the orders equal to those of torch.distributed.pipelining.schedules (2.13).
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

DURATION = {"F": 1, "B": 2, "I": 1, "W": 1}
"""Time of an action in forwards of one stage, as the papers of these schedules count: a backward takes two, and its two
halves, that of the input and that of the weights, one each."""


class Action(NamedTuple):
    """One thing that a rank does; its text is torch's, as in ``2F5``."""

    kind: str
    """F: forward, B: backward, I: backward of the input alone, W: backward of the weights alone."""
    stage: int
    micro_batch: int


class Placed(NamedTuple):
    """An action and when it starts and ends."""

    action: Action
    start: int
    end: int


Orders = Sequence[Sequence[Action]]
"""The actions of each pipeline rank, in order."""


def orders(schedule: str, pp: int, stages_per_rank: int, micro_batches: int) -> Orders:
    """What each of `pp` ranks does in one run of `schedule` over a number of micro-batches that it can run."""
    made = {"gpipe": _gpipe, "1f1b": _one_forward_one_backward, "looped_bfs": _looped, "zbv": _zbv}.get(schedule)
    if made is not None:
        return [list(made(rank, pp, stages_per_rank, micro_batches)) for rank in range(pp)]
    splits = schedule == "interleaved_zero_bubble"
    return [list(_interleaved(rank, pp, stages_per_rank, micro_batches, splits=splits)) for rank in range(pp)]


def place(given: Orders) -> list[list[Placed]]:
    """When each action starts and ends where every rank starts the next of its actions as soon as it can, all stages
    cost the same, and nothing takes time between ranks.

    Raises:
        ValueError: the actions wait for each other for ever.
    """
    last_stage = max(action.stage for actions in given for action in actions)
    ends: dict[Action, int] = {}
    placed: list[list[Placed]] = [[] for _ in given]
    left = sum(map(len, given))
    while left:
        before = left
        for actions, row in zip(given, placed, strict=True):
            while len(row) < len(actions):
                action = actions[len(row)]
                ready = _ready(action, last_stage, ends)
                if ready is None:
                    break
                start = max(ready, row[-1].end if row else 0)
                ends[action] = start + DURATION[action.kind]
                row.append(Placed(action, start, ends[action]))
                left -= 1
        if left == before:
            raise ValueError(f"{left} actions wait for each other")
    return placed


def _ready(action: Action, last_stage: int, ends: dict[Action, int]) -> int | None:
    """When what this action needs is there; None: not yet known."""
    kind, stage, micro_batch = action
    if kind == "W":
        return ends.get(Action("I", stage, micro_batch))
    if kind == "F":
        return 0 if stage == 0 else ends.get(Action("F", stage - 1, micro_batch))
    if stage == last_stage:
        return ends.get(Action("F", stage, micro_batch))
    return ends.get(Action(kind, stage + 1, micro_batch))


@lru_cache(maxsize=256)
def span(schedule: str, pp: int, stages_per_rank: int, micro_batches: int) -> int:
    """How long one run of the schedule takes, in forwards of one stage. Of it each rank works 3 a stage and
    micro-batch; the rest is the bubble.

    From 2 pp micro-batches on the bubble stays the same (a test holds it), so that a long run follows from a short one.
    """
    simulated = min(micro_batches, 4 * pp)
    placed = place(orders(schedule, pp, stages_per_rank, simulated))
    return max(row[-1].end for row in placed) + 3 * stages_per_rank * (micro_batches - simulated)


def _gpipe(rank: int, pp: int, stages_per_rank: int, micro_batches: int) -> Iterator[Action]:
    for kind in "FB":
        yield from (Action(kind, rank, index) for index in range(micro_batches))


def _one_forward_one_backward(rank: int, pp: int, stages_per_rank: int, micro_batches: int) -> Iterator[Action]:
    ahead = pp - 1 - rank
    for index in range(micro_batches + ahead):
        if index < micro_batches:
            yield Action("F", rank, index)
        if index >= ahead:
            yield Action("B", rank, index - ahead)


def _looped(rank: int, pp: int, stages_per_rank: int, micro_batches: int) -> Iterator[Action]:
    stages = range(rank, pp * stages_per_rank, pp)
    for stage in stages:
        yield from (Action("F", stage, index) for index in range(micro_batches))
    for stage in reversed(stages):
        yield from (Action("B", stage, index) for index in reversed(range(micro_batches)))


def _interleaved(rank: int, pp: int, stages_per_rank: int, micro_batches: int, *, splits: bool) -> Iterator[Action]:
    """`splits`: the backward of the weights waits, so that the one of the input travels on sooner."""
    group = micro_batches // max(1, micro_batches // pp)
    total = stages_per_rank * micro_batches

    def taken(step: int, *, backward: bool) -> tuple[int, int]:
        """Stage and micro-batch: groups of micro-batches go through one stage of the rank after another."""
        turn, index = divmod(step, group)
        loop, local = divmod(turn, stages_per_rank)
        local = stages_per_rank - 1 - local if backward else local
        return local * pp + rank, loop * group + index

    hop = 1 if splits else 2
    ahead = min((stages_per_rank - 1) * group + hop * (pp - 1 - rank), total)
    yield from (Action("F", *taken(step, backward=False)) for step in range(ahead))
    for step in range(total):
        if ahead + step < total:
            yield Action("F", *taken(ahead + step, backward=False))
        yield Action("I" if splits else "B", *taken(step, backward=True))
        if splits and step >= rank:
            yield Action("W", *taken(step - rank, backward=True))
    if splits:
        yield from (Action("W", *taken(step, backward=True)) for step in range(max(0, total - rank), total))


def _zbv(rank: int, pp: int, stages_per_rank: int, micro_batches: int) -> Iterator[Action]:
    """Two stages a rank, going down the ranks and up again. Those past `micro_batches` are left out of a longer run."""
    count = max(2 * pp - 1, micro_batches)
    stages = (rank, 2 * pp - 1 - rank)
    seen = {(kind, way): 0 for kind in "FIW" for way in (0, 1)}

    def do(kinds: str, way: int) -> Iterator[Action]:
        for kind in kinds:
            index = seen[kind, way]
            seen[kind, way] += 1
            if index < micro_batches:
                yield Action(kind, stages[way], index)

    for _ in range(2 * (pp - rank) - 1):
        yield from do("F", 0)
    for _ in range(rank):
        yield from do("F", 1)
        yield from do("F", 0)
    for _ in range(pp - rank):
        yield from do("FIW", 1)
    while seen["F", 1] < seen["F", 0] or seen["F", 0] < count:
        yield from do("F" if seen["F", 0] < count else "", 0)
        yield from do("IW", 0)
        yield from do("FIW", 1)
    for _ in range(rank):
        yield from do("I", 0)
        yield from do("I", 1)
    for _ in range(pp - rank):
        yield from do("IW", 0)
    for way in (1, 0):
        while seen["W", way] < seen["I", way]:
            yield from do("W", way)
