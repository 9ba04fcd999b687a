"""How a window lies over ranks and micro-batches: every sample once, every rank as many steps, little padding."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.errors import ConfigError
from launcher.plan.batch import BatchPlan
from launcher.train.layout import Layout, by_length, by_tokens, in_order_of_arrival, padded_tokens

LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=60)


def positions(layout: Layout) -> list[int]:
    return sorted(position for rank in layout for step in rank for position in step)


@given(LENGTHS, st.integers(1, 8), st.integers(1, 9))
def test_by_length_holds_every_sample_once_and_as_many_steps_on_every_rank(
    lengths: list[int], degree: int, micro: int
) -> None:
    batch = BatchPlan.solve(len(lengths), micro, "auto", degree)
    layout = by_length(batch, lengths)
    assert positions(layout) == list(range(len(lengths)))
    assert {len(rank) for rank in layout} == {batch.gradient_accumulation_steps}
    assert max(len(step) for rank in layout for step in rank) <= micro


@given(LENGTHS, st.integers(1, 8), st.integers(50, 200))
def test_by_tokens_holds_every_sample_once_within_the_bound(lengths: list[int], degree: int, tokens: int) -> None:
    layout = by_tokens(tokens, degree, lengths)
    assert positions(layout) == list(range(len(lengths)))
    assert len({len(rank) for rank in layout}) == 1
    assert all(max(lengths[p] for p in step) * len(step) <= tokens for rank in layout for step in rank if step)


def test_by_length_pads_little_and_shares_the_work() -> None:
    lengths = [8, 1, 7, 2, 6, 3, 5, 4]
    batch = BatchPlan.solve(8, 2, "auto", 2)
    layout = by_length(batch, lengths)
    # runs of neighbours (8,7) (6,5) (4,3) (2,1) cost 16, 12, 8, 4: the costliest with the cheapest
    assert [[[lengths[p] for p in step] for step in rank] for rank in layout] == [[[8, 7], [2, 1]], [[6, 5], [4, 3]]]
    assert padded_tokens(layout, lengths) == 40
    assert padded_tokens(in_order_of_arrival(batch, 8), lengths) == 2 * (8 + 7 + 6 + 5)


def test_a_sample_longer_than_the_bound_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"batch\.micro_batch_tokens=10: a sample has 11 tokens"):
        by_tokens(10, 2, [3, 11])
