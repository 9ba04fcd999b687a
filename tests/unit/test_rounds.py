"""How a window's micro-batches are divided into rounds of a pipeline."""

import itertools

import pytest

from launcher.train.rounds import Rounds


def cost(rounds: Rounds, lengths: list[int], division: list[range]) -> float:
    return sum((rounds.filled(len(one)) + rounds.bubble) * max(lengths[i] for i in one) for one in division)


def divisions(count: int, most: int) -> list[list[range]]:
    found = []
    for cuts in itertools.product((False, True), repeat=count - 1):
        edges = [0, *(i + 1 for i, is_cut in enumerate(cuts) if is_cut), count]
        found.append([range(a, b) for a, b in itertools.pairwise(edges)])
    return [one for one in found if all(len(part) <= most for part in one)]


@pytest.mark.parametrize("most", [None, 3])
@pytest.mark.parametrize("bubble", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("lengths", [[9, 9, 9, 9, 9, 9], [512, 300, 80, 60, 50, 40, 10], [5], [4, 1], [1, 7, 2, 7]])
def test_no_other_division_takes_less_time(lengths: list[int], bubble: float, most: int | None) -> None:
    rounds = Rounds(most, lambda count: max(count, 2), bubble)
    found = rounds.divide(lengths)
    assert [step for one in found for step in one] == list(range(len(lengths)))
    least = min(cost(rounds, lengths, one) for one in divisions(len(lengths), most or len(lengths)))
    assert cost(rounds, lengths, found) == pytest.approx(least)


def test_micro_batches_of_one_length_are_one_round() -> None:
    assert Rounds(None, lambda count: count, 1.0).divide([7] * 9) == [range(9)]
