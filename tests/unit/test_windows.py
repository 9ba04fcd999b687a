"""Which window holds what through a ramp: counted by hand, and against a walk that goes window by window."""

from collections.abc import Iterator
from fractions import Fraction
from math import ceil
from typing import Literal

import pytest
from accumulation import ultralytics
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.errors import ConfigError
from launcher.plan.windows import Stage, Window, WindowTable

Unit = Literal["updates", "samples", "epochs"]


def stage(until: int | str, unit: Unit, size: int, grow_to: int | None = None) -> Stage:
    return Stage(Fraction(until), unit, size, grow_to=None if grow_to is None else Fraction(grow_to))


def first(table: WindowTable, count: int) -> list[tuple[int, int, int]]:
    return [tuple(table.window(update)) for update in range(1, count + 1)]


def test_a_stage_ends_with_the_window_that_reaches_its_end() -> None:
    # 10 samples: by 2 until 5 samples are through, by 3 until two epochs are, then by 6
    table = WindowTable(10, 6, ramp=(stage(5, "samples", 2), stage(2, "epochs", 3)))
    assert first(table, 10) == [
        *[(0, 0, 2), (0, 2, 4), (0, 4, 6)],
        *[(0, 6, 9), (0, 9, 10), (1, 0, 3), (1, 3, 6), (1, 6, 9), (1, 9, 10)],
        (2, 0, 6),
    ]
    assert list(table.stage_ends) == [3, 9]
    assert table.updates_per_epoch == 2
    assert [table.size(update) for update in (1, 3, 4, 5, 9, 10)] == [2, 2, 3, 3, 3, 6]
    assert [table.samples_after(update) for update in range(11)] == [0, 2, 4, 6, 9, 10, 13, 16, 19, 20, 26]
    assert table.sizes == {1, 2, 3, 4, 6}


def test_a_ramp_that_ends_within_an_epoch_leaves_its_rest_to_full_windows() -> None:
    table = WindowTable(10, 4, ramp=(stage(3, "updates", 1),))
    assert first(table, 6) == [(0, 0, 1), (0, 1, 2), (0, 2, 3), (0, 3, 7), (0, 7, 10), (1, 0, 4)]
    dropped = WindowTable(10, 4, drop_last=True, ramp=(stage(3, "updates", 1),))
    assert first(dropped, 6) == [(0, 0, 1), (0, 1, 2), (0, 2, 3), (0, 3, 7), (1, 0, 4), (1, 4, 8)]
    assert [dropped.epochs_after(update) for update in (3, 4, 5)] == [Fraction(3, 7), 1, Fraction(3, 2)]


def test_a_long_ramp_over_little_data_is_no_long_list() -> None:
    table = WindowTable(3, 2, ramp=(stage(10**15, "updates", 1),))
    assert table.window(10**15 + 1) == Window(10**15 // 3, 1, 3)
    assert table.samples_after(10**15) == 10**15


@pytest.mark.parametrize(("samples", "batch"), [(1617, 16), (1000, 8), (640, 24), (100, 64), (100, 128), (7, 16)])
def test_growing_windows_are_those_of_ultralytics(samples: int, batch: int) -> None:
    full = max(round(64 / batch), 1) * batch
    table = WindowTable(samples, full, ramp=(stage(3, "epochs", batch, grow_to=64),))
    by_hand = ultralytics(samples, 5, batch, 64, warmup=3)
    windows = [table.window(update) for update in range(1, len(by_hand) + 1)]
    assert [ceil((one.stop - one.start) / batch) for one in windows] == by_hand
    assert windows[-1].epoch == 4
    assert windows[-1].stop == samples


def test_a_stage_without_a_window_is_refused() -> None:
    with pytest.raises(ConfigError, match="holds no window") as error:
        WindowTable(10, 4, ramp=(stage(3, "updates", 1), stage(3, "samples", 2)))
    assert error.value.key == "batch.ramp[1].until"
    with pytest.raises(ConfigError, match="leaves out every sample") as error:
        WindowTable(10, 4, drop_last=True, ramp=(stage(3, "updates", 11),))
    assert "batch.ramp[0].global_batch_size=11" in str(error.value)


def walk(samples: int, full: int, drop_last: bool, ramp: tuple[Stage, ...]) -> Iterator[tuple[int, int, int, int]]:
    """The windows one after another, with the stage of each."""
    update, consumed, epoch, position, index = 0, 0, 0, 0, 0
    while True:
        while index < len(ramp):
            one = ramp[index]
            used = position + (samples - position) // one.global_batch_size * one.global_batch_size
            used = used if drop_last else samples
            passed = {
                "updates": Fraction(update),
                "samples": Fraction(consumed),
                "epochs": epoch + Fraction(position, used) if used else Fraction(epoch),
            }[one.unit]
            if passed < one.until:
                break
            index += 1
        size = ramp[index].global_batch_size if index < len(ramp) else full
        if position == samples or (drop_last and position + size > samples):
            epoch, position = epoch + 1, 0
            continue
        stop = min(position + size, samples)
        yield index, epoch, position, stop
        update, consumed, position = update + 1, consumed + stop - position, stop


stages = st.builds(
    lambda until, unit, size: Stage(Fraction(until, 8) if unit == "epochs" else Fraction(until), unit, size),
    st.integers(1, 40),
    st.sampled_from(["updates", "samples", "epochs"]),
    st.integers(1, 9),
)


@settings(max_examples=300, deadline=None)
@given(
    samples=st.integers(9, 30),
    full=st.integers(1, 9),
    drop_last=st.booleans(),
    ramp=st.lists(stages, max_size=3).map(tuple),
)
def test_any_ramp_as_window_by_window(samples: int, full: int, drop_last: bool, ramp: tuple[Stage, ...]) -> None:
    walked = walk(samples, full, drop_last, ramp)
    by_hand = [next(walked) for _ in range(200)]
    if {index for index, *_ in by_hand} != set(range(len(ramp) + 1)):
        with pytest.raises(ConfigError, match="holds no window"):
            WindowTable(samples, full, drop_last, ramp)
        return
    table = WindowTable(samples, full, drop_last, ramp)
    assert first(table, 200) == [(epoch, start, stop) for _, epoch, start, stop in by_hand]
    assert list(table.stage_ends) == [sum(one[0] <= index for one in by_hand) for index in range(len(ramp))]
    assert {stop - start for _, _, start, stop in by_hand} <= table.sizes
    consumed, ends = 0, {}
    for update, (_, epoch, start, stop) in enumerate(by_hand, 1):
        assert table.updates_for_samples(consumed + 1) == update
        consumed += stop - start
        assert table.samples_after(update) == consumed
        assert table.updates_for_samples(consumed) == update
        ends[epoch] = (update, stop)
    for epoch in range(max(ends)):
        update, used = ends[epoch]
        assert table.updates_for_epochs(epoch + 1) == update
        assert table.epochs_after(update) == epoch + 1
        half = next(u for u, (_, e, _, stop) in enumerate(by_hand, 1) if e == epoch and 2 * stop >= used)
        assert table.updates_for_epochs(epoch + Fraction(1, 2)) == half
