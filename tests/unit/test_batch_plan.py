"""The arithmetic of a window: small cases counted by hand, and properties over many random ones."""

from fractions import Fraction
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.errors import ConfigError, DataError
from launcher.plan.batch import MICRO_BATCH_CAP, BatchPlan, parse_count, rank_slice
from launcher.plan.windows import Window, WindowTable

sizes = st.integers(1, 400)
degrees = st.integers(1, 17)


def numbers(plan: BatchPlan) -> tuple[int, int, int, int]:
    return (
        plan.global_batch_size,
        plan.micro_batch_size,
        plan.gradient_accumulation_steps,
        plan.data_parallel_degree,
    )


@pytest.mark.parametrize("value", [8, "8", 8.0, "8.0", " 8 ", "8e0", "0.8e1", "+8"])
def test_whole_numbers_count_however_they_are_typed(value: object) -> None:
    assert parse_count("k", value) == 8
    assert type(parse_count("k", value)) is int


def test_auto_and_null_pass_where_they_are_allowed() -> None:
    assert parse_count("k", "1e1", allow_auto=True) == 10
    assert parse_count("k", "auto", allow_auto=True) == "auto"
    assert parse_count("k", None, allow_null=True) is None


@pytest.mark.parametrize(
    "value",
    [
        *[0, -1, "0", "-8", 2.5, "2.5", "1e-1", "1/2", True, False, None, [4], float("nan"), float("inf")],
        *["eight", "", "auto", "inf", "nan", "1_000", "1e999999999", "9" * 5000, "\u0668"],
    ],
)
def test_what_is_no_count_is_refused_by_name(value: object) -> None:
    with pytest.raises(ConfigError, match="at least 1") as error:
        parse_count("batch.gradient_accumulation_steps", value)
    assert error.value.key == "batch.gradient_accumulation_steps"


def test_refusal_says_what_was_given_what_is_allowed_and_the_nearest_spelling() -> None:
    with pytest.raises(ConfigError) as error:
        parse_count("batch.micro_batch_size", "atuo", allow_auto=True)
    assert str(error.value) == (
        "batch.micro_batch_size='atuo': must be a whole number of at least 1 or auto\n  did you mean 'auto'?"
    )


@pytest.mark.parametrize("value", [0, -1, "x", True, 1.5])
def test_solve_names_the_key_of_every_value_it_refuses(value: object) -> None:
    keys = ["batch.global_batch_size", "batch.micro_batch_size", "batch.gradient_accumulation_steps"]
    for place, key in enumerate([*keys, "data_parallel_degree"]):
        given_values: list[object] = [16, 2, 2, 4]
        given_values[place] = value
        with pytest.raises(ConfigError) as error:
            BatchPlan.solve(*given_values)
        assert error.value.key == key


@pytest.mark.parametrize(
    ("given_values", "solved"),
    [
        # Both automatic: the whole share of a rank in one step, up to the cap.
        ((32, "auto", "auto", 4), (32, 8, 1, 4)),
        ((100, "auto", "auto", 7), (100, 15, 1, 7)),
        # ceil(1000 / 4) = 250 samples a rank, ceil(250 / 16) = 16 steps.
        ((1000, "auto", "auto", 4), (1000, MICRO_BATCH_CAP, 16, 4)),
        ((1, "auto", "auto", 8), (1, 1, 1, 8)),
        # Steps follow from the micro-batch: ceil(100 / 7) = 15, ceil(15 / 4) = 4; ceil(3 / 4) = 1.
        ((100, 4, "auto", 7), (100, 4, 4, 7)),
        ((3, 4, "auto", 4), (3, 4, 1, 4)),
        ((16, 32, "auto", 1), (16, 32, 1, 1)),
        # The micro-batch follows from the steps and is not capped: 15 in 2 is 8 and 7; 15 in 4 is 4, 4, 4, 3.
        ((100, "auto", 2, 7), (100, 8, 2, 7)),
        ((100, "auto", 4, 7), (100, 4, 4, 7)),
        ((4096, "auto", 2, 1), (4096, 2048, 2, 1)),
        # The global batch follows from the other two.
        ((None, 2, 4, 4), (32, 2, 4, 4)),
        ((None, "2", "1e1", 3.0), (60, 2, 10, 3)),
        # All given, exact and not: 31 on 4 ranks is 8 for the fullest, 4 steps of 2.
        ((32, 2, 4, 4), (32, 2, 4, 4)),
        ((31, 2, 4, 4), (31, 2, 4, 4)),
        ((16, 16, 1, 1), (16, 16, 1, 1)),
        ((16, 4, 2, 2), (16, 4, 2, 2)),
    ],
)
def test_solved_by_hand(given_values: tuple[object, ...], solved: tuple[int, int, int, int]) -> None:
    assert numbers(BatchPlan.solve(*given_values)) == solved


def test_pipeline_stages_share_a_batch() -> None:
    # World 8 with pp 2 is 4 data-parallel ranks: 2 x 4 x 4 = 32 is right, and 64 = 2 x 4 x 8 is the wrong count.
    degree = 8 // 2
    assert BatchPlan.solve(32, 2, 4, degree).gradient_accumulation_steps == 4
    with pytest.raises(ConfigError) as error:
        BatchPlan.solve(64, 2, 4, degree)
    assert str(error.value) == (
        "batch.gradient_accumulation_steps=4: contradicts batch.global_batch_size=64, batch.micro_batch_size=2 and "
        "data_parallel_degree=4: ceil(ceil(64 / 4) / 2) = 8\n"
        "  nearest: batch.gradient_accumulation_steps=8, or batch.micro_batch_size=4, or "
        "batch.global_batch_size=32 (any from 25)"
    )


def test_null_global_batch_needs_both_numbers() -> None:
    for micro, steps in [("auto", 4), (4, "auto"), ("auto", "auto")]:
        with pytest.raises(ConfigError, match="follows from the other two") as error:
            BatchPlan.solve(None, micro, steps, 2)
        assert error.value.key == "batch.global_batch_size"


def test_steps_that_no_micro_batch_makes() -> None:
    # 5 samples a rank: micro 1, 2, 3, 4, 5 make 5, 3, 2, 2, 1 steps, so never 4.
    with pytest.raises(ConfigError) as error:
        BatchPlan.solve(10, "auto", 4, 2)
    assert "gradient_accumulation_steps=3 with batch.micro_batch_size=2" in str(error.value)
    assert "gradient_accumulation_steps=5 with batch.micro_batch_size=1" in str(error.value)
    # More steps than samples: only fewer steps can be named.
    with pytest.raises(ConfigError, match=r"steps=3 with batch\.micro_batch_size=1$"):
        BatchPlan.solve(3, "auto", 4, 1)


@given(total=sizes, micro=sizes | st.just("auto"), degree=degrees)
def test_every_global_batch_runs_on_every_degree(total: int, micro: object, degree: int) -> None:
    plan = BatchPlan.solve(total, micro, "auto", degree)
    assert plan.gradient_accumulation_steps == ceil(ceil(total / degree) / plan.micro_batch_size)
    assert plan.num_micro_steps(total) == plan.gradient_accumulation_steps
    assert BatchPlan.solve(*numbers(plan)) == plan


@given(total=sizes, steps=st.integers(1, 40), degree=degrees)
def test_automatic_micro_batch_makes_the_steps_or_there_is_none(total: int, steps: int, degree: int) -> None:
    share = ceil(total / degree)
    possible = [micro for micro in range(1, share + 1) if ceil(share / micro) == steps]
    if possible:
        assert BatchPlan.solve(total, "auto", steps, degree).micro_batch_size == possible[0]
    else:
        with pytest.raises(ConfigError, match="nearest"):
            BatchPlan.solve(total, "auto", steps, degree)


@given(micro=st.integers(1, 64), steps=st.integers(1, 64), degree=degrees)
def test_product_of_the_three_is_a_valid_global_batch(micro: int, steps: int, degree: int) -> None:
    plan = BatchPlan.solve(None, micro, steps, degree)
    assert plan == BatchPlan.solve(micro * steps * degree, micro, steps, degree)


@given(total=sizes, n=st.integers(0, 400), micro=st.integers(1, 60), degree=degrees)
def test_every_sample_lies_in_one_micro_batch_of_one_rank(total: int, n: int, micro: int, degree: int) -> None:
    n = min(n, total)
    plan = BatchPlan.solve(total, micro, "auto", degree)
    slices = [plan.micro_slices(n, rank) for rank in range(degree)]
    assert [i for rank in slices for part in rank for i in part] == list(range(n))
    assert {len(rank) for rank in slices} == {plan.num_micro_steps(n)}
    assert all(len(part) <= micro for rank in slices for part in rank)
    assert plan.num_micro_steps(n) <= plan.gradient_accumulation_steps
    # No step in which no rank has a sample.
    assert all(any(len(rank[step]) for rank in slices) for step in range(plan.num_micro_steps(n)))


@given(n=st.integers(0, 400), degree=degrees)
def test_ranks_differ_by_one_sample_and_the_earlier_hold_it(n: int, degree: int) -> None:
    counts = [len(rank_slice(n, degree, rank)) for rank in range(degree)]
    assert sum(counts) == n
    assert counts == sorted(counts, reverse=True)
    assert counts[0] - counts[-1] <= 1


def test_layout_by_hand() -> None:
    plan = BatchPlan.solve(10, 2, "auto", 4)
    # 3, 3, 2, 2 samples; the ranks with two have nothing left for the second step.
    assert [plan.micro_slices(10, rank) for rank in range(4)] == [
        [range(2), range(2, 3)],
        [range(3, 5), range(5, 6)],
        [range(6, 8), range(8, 8)],
        [range(8, 10), range(10, 10)],
    ]
    # A short window runs fewer steps; with fewer samples than ranks the later ranks have none.
    assert [list(plan.micro_slices(2, rank)[0]) for rank in range(4)] == [[0], [1], [], []]
    assert plan.num_micro_steps(2) == 1


def test_lines_where_it_is_exact() -> None:
    assert BatchPlan.solve(128, 4, 8, 4).lines() == [
        "samples a rank = ceil(128 / 4) = 32",
        "gradient_accumulation_steps = ceil(32 / 4) = 8",
        "4 samples x 8 steps x 4 ranks = 128",
    ]


def test_lines_where_it_is_not() -> None:
    # 100 = 2 x 15 + 5 x 14, and 15 = 4 + 4 + 4 + 3.
    assert BatchPlan.solve(100, 4, "auto", 7).lines() == [
        "samples a rank = ceil(100 / 7) = 15",
        "gradient_accumulation_steps = ceil(15 / 4) = 4",
        "4 samples x 4 steps x 7 ranks = 112, 12 more than the 100 of the window:",
        "  2 ranks with 15 samples, 5 ranks with one fewer",
        "  the last micro-batch is 1 row short of 4 (one more on the ranks with one fewer)",
    ]
    assert BatchPlan.solve(3, 1, "auto", 4).lines()[-1] == "  3 ranks with 1 sample, 1 rank with one fewer"
    assert BatchPlan.solve(6, 4, "auto", 1).lines()[-1] == "  the last micro-batch is 2 rows short of 4"


def test_advice_where_accumulation_is_no_need() -> None:
    assert BatchPlan.solve(64, 16, "auto", 4).advice() is None
    advice = BatchPlan.solve(100, 4, "auto", 7).advice()
    assert advice is not None
    assert "memory and not time" in advice
    assert "batch.micro_batch_size=15" in advice


def test_short_last_window_is_an_update_of_its_own() -> None:
    # 6 samples by 4, two epochs: windows of 4, 2, 4, 2.
    table = WindowTable(6, 4)
    assert table.updates_per_epoch == 2
    assert table.updates_for_epochs(2) == 4
    assert [table.window(k) for k in range(1, 5)] == [(0, 0, 4), (0, 4, 6), (1, 0, 4), (1, 4, 6)]
    assert [table.samples_after(k) for k in range(5)] == [0, 4, 6, 10, 12]


def test_data_set_smaller_than_one_window() -> None:
    table = WindowTable(3, 4)
    assert table.updates_for_epochs(1) == 1
    assert table.window(1) == Window(0, 0, 3)
    with pytest.raises(ConfigError, match="fewer than one window") as error:
        WindowTable(3, 4, drop_last=True)
    assert error.value.key == "data.drop_last"
    with pytest.raises(DataError, match="samples_per_epoch is 0"):
        WindowTable(0, 4)


def test_drop_last_leaves_out_the_short_window() -> None:
    # 10 samples on 4 ranks by micro-batch 1 and two steps: windows of 8 and 2, or of 8 alone.
    plan = BatchPlan.solve(None, 1, 2, 4)
    kept = WindowTable(10, plan.global_batch_size)
    assert [kept.window(k) for k in (1, 2)] == [(0, 0, 8), (0, 8, 10)]
    assert plan.num_micro_steps(2) == 1
    dropped = WindowTable(10, plan.global_batch_size, drop_last=True)
    assert (dropped.updates_per_epoch, dropped.samples_used_per_epoch) == (1, 8)
    assert dropped.window(2) == (1, 0, 8)
    assert dropped.samples_after(2) == 16
    assert dropped.updates_for_epochs(2) == 2


def test_fractions_of_an_epoch_end_on_the_window_that_reaches_them() -> None:
    table = WindowTable(10, 4)
    # Windows end at 4, 8 and 10 of 10 samples.
    reached = {"0": 0, "0.1": 1, "0.4": 1, "0.41": 2, "0.8": 2, "0.9": 3, "1": 3, "1.4": 4}
    assert {x: table.updates_for_epochs(Fraction(x)) for x in reached} == reached
    assert {x: table.updates_for_epochs(float(x)) for x in reached} == reached


def test_windows_are_numbered_from_one() -> None:
    with pytest.raises(ValueError, match="from 1"):
        WindowTable(10, 4).window(0)


@given(samples=sizes, total=sizes, drop_last=st.booleans(), epochs=st.integers(1, 3))
def test_windows_cover_every_epoch_once_and_never_cross(samples: int, total: int, drop_last: bool, epochs: int) -> None:
    table = WindowTable(samples, total, drop_last and samples >= total)
    seen: dict[int, list[int]] = {}
    consumed = 0
    for update in range(1, table.updates_for_epochs(epochs) + 1):
        window = table.window(update)
        positions = range(window.start, window.stop)
        assert 1 <= len(positions) <= total
        seen.setdefault(window.epoch, []).extend(positions)
        assert table.updates_for_samples(consumed + 1) == update
        consumed += len(positions)
        assert table.samples_after(update) == consumed
        assert table.updates_for_samples(consumed) == update
    assert seen == {epoch: list(range(table.samples_used_per_epoch)) for epoch in range(epochs)}
    assert samples - table.samples_used_per_epoch < total
