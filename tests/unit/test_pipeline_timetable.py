"""Where a pipeline cuts a model, how micro-batches flow through it, and how that is drawn."""

from collections.abc import Sequence
from functools import cache
from itertools import combinations, pairwise
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.image import imread
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import Schedule1F1B
from torch.distributed.pipelining.stage import PipelineStage

from launcher.config.choices import PipelineSchedule
from launcher.models.gpt import GPT
from launcher.plan.pipeline import Flow, filled_micro_batches, rank_of_stage
from launcher.plan.split import split_layers, stage_costs
from launcher.plan.timetable import Action, Orders, orders, place, span
from launcher.timetable import WIDTH, draw_picture, draw_text
from launcher.train.drawn_schedule import torch_orders
from launcher.train.parallel.costs import part_costs
from launcher.train.parallel.families import missing_parts

SCHEDULES = [one.value for one in PipelineSchedule]
LOOPED = ("interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble")
STAGES = {name: (2, 3) if name in LOOPED else (2,) if name == "zbv" else (1,) for name in SCHEDULES}
"""Stages a rank that each schedule is tried with."""


def _best(layers: Sequence[int], embed: int, head: int, stages: int) -> list[int]:
    """Of all splits that whose costliest stage costs least, then the most even, then the one with earlier layers."""
    weights = list(layers) if any(layers) else [1] * len(layers)

    def worth(counts: list[int]) -> tuple[int, int, list[int]]:
        costs = stage_costs([embed, *weights, head], counts)
        return max(costs), sum(cost * cost for cost in costs), [-count for count in counts]

    every = [[0, *cuts, len(layers)] for cuts in combinations(range(1, len(layers)), stages - 1)]
    return min(([b - a for a, b in pairwise(ends)] for ends in every), key=worth)


class TestSplit:
    def test_11_layers_on_3_stages(self):
        assert split_layers([1] * 11, 0, 0, 3) == [4, 4, 3]

    def test_a_heavy_head_takes_layers_from_its_stage(self):
        assert split_layers([4] * 12, 0, 9, 4) == [4, 4, 3, 1]

    def test_a_heavy_embedding_takes_layers_from_its_stage(self):
        assert split_layers([4] * 8, 9, 0, 2) == [3, 5]

    def test_layers_that_cost_nothing_count_alike(self):
        assert split_layers([0] * 6, 0, 0, 3) == [2, 2, 2]

    def test_as_many_stages_as_layers(self):
        assert split_layers([1, 5, 2], 3, 3, 3) == [1, 1, 1]

    def test_many_layers_are_quickly_split(self):
        assert sum(split_layers([7] * 400, 0, 50, 128)) == 400

    @settings(deadline=None, max_examples=300)
    @given(st.data())
    def test_no_split_is_better(self, data):
        layers = data.draw(st.lists(st.sampled_from([0, 1, 1, 2, 5]), min_size=1, max_size=8))
        embed, head = data.draw(st.sampled_from([0, 3])), data.draw(st.sampled_from([0, 4, 9]))
        stages = data.draw(st.integers(1, len(layers)))
        assert split_layers(layers, embed, head, stages) == _best(layers, embed, head, stages)


class Odd(nn.Module):
    """Layers of unlike size, one of them with an embedding of its own, and a part before them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 5)
        shared = nn.Linear(6, 7)
        own = nn.ModuleDict({"positions": nn.Embedding(50, 6), "up": nn.Linear(6, 5)})
        self.layers = nn.ModuleList([nn.Sequential(shared, shared), own, nn.LayerNorm(6)])


SIZES = {"hidden_size": 16, "num_layers": 3, "num_heads": 2, "intermediate_size": 24, "vocab_size": 100}
LAYER = 16 * 3 * 16 + 16 * 16 + 16 * 2 * 24 + 24 * 16


class TestCosts:
    @pytest.mark.parametrize("tie_head", [True, False])
    def test_a_tied_head_costs_what_its_own_would(self, tie_head):
        with torch.device("meta"):
            model = GPT(**SIZES, tie_head=tie_head)
        assert part_costs(model) == [0, *[LAYER] * 3, 1600]
        assert missing_parts(model) == []

    def test_each_matrix_counts_once_and_rows_of_embeddings_not(self):
        assert part_costs(Odd()) == [0, 42, 30, 0, 4 * 3 * 25]
        assert missing_parts(Odd()) == ["embed", "head"]

    def test_a_model_without_layers_has_no_parts(self):
        assert part_costs(nn.Linear(2, 2)) == []
        assert missing_parts(nn.Linear(2, 2)) == ["layers", "embed", "head"]


@cache
def _torchs(schedule: str, pp: int, per_rank: int, count: int) -> Orders | None:
    """The actions that torch's class makes; None where it refuses so many micro-batches."""
    try:
        made = torch_orders(schedule, pp, per_rank, count)
    except ValueError:
        return None
    return [[Action(*one) for one in order] for order in made]


@pytest.mark.slow
@pytest.mark.parametrize("pp", [2, 3, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
class TestTorch:
    def test_its_class_runs_what_rounds_are_filled_up_to_and_nothing_smaller(self, schedule, pp):
        for per_rank in STAGES[schedule]:
            for count in range(1, 10):
                runs = next(n for n in range(count, 99) if _torchs(schedule, pp, per_rank, n) is not None)
                assert filled_micro_batches(schedule, pp, pp * per_rank, count) == runs

    def test_its_actions_are_those_that_are_planned(self, schedule, pp):
        for per_rank in STAGES[schedule]:
            for count in range(1, 10):
                theirs = _torchs(schedule, pp, per_rank, count)
                assert theirs is None or theirs == orders(schedule, pp, per_rank, count)


@pytest.mark.parametrize("rank", range(3))
def test_1f1b_runs_in_the_order_that_is_drawn(rank):
    """torch's own table of the last rank counts from 1; what its class runs counts from 0."""
    stage = mock.create_autospec(PipelineStage, instance=True)
    stage.stage_index, stage.num_stages, stage.group_rank, stage.group_size = rank, 3, rank, 3
    for name in ("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops"):
        getattr(stage, name).return_value = []
    ran: list[Action] = []
    stage.forward_one_chunk.side_effect = lambda index, *_, **__: ran.append(Action("F", rank, index))
    stage.backward_one_chunk.side_effect = lambda index, **_: ran.append(Action("B", rank, index))
    schedule = Schedule1F1B(stage, 5, loss_fn=None)
    schedule._initialize_stage = lambda *_: None
    schedule._step_microbatches([()] * 5, [{}] * 5)
    assert ran == orders("1f1b", 3, 1, 5)[rank]


class TestTime:
    @pytest.mark.parametrize("pp", [2, 3, 4, 6])
    @pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved_1f1b", "looped_bfs"])
    def test_a_whole_backward_leaves_the_bubble_of_the_formula(self, schedule, pp):
        for per_rank in STAGES[schedule]:
            flow = Flow(schedule, pp, per_rank, None)
            for steps in range(pp, 5 * pp):
                runs = flow.filled(steps)
                assert flow.bubble(steps) == pytest.approx((pp - 1) / (per_rank * runs + pp - 1))

    @pytest.mark.parametrize("schedule", SCHEDULES)
    def test_from_two_rounds_of_the_ranks_on_the_bubble_stays(self, schedule):
        for pp in (2, 3, 5):
            for per_rank in STAGES[schedule]:
                runs = {filled_micro_batches(schedule, pp, pp * per_rank, one) for one in range(2 * pp, 9 * pp)}
                placed = {one: place(orders(schedule, pp, per_rank, one)) for one in runs}
                times = {one: max(row[-1].end for row in table) for one, table in placed.items()}
                assert len({time - 3 * per_rank * one for one, time in times.items()}) == 1
                assert times == {one: span(schedule, pp, per_rank, one) for one in runs}

    def test_the_bubbles_of_the_zero_bubble_schedules(self):
        # ZB1P leaves (pp - 1)(F + I - W) (Qi et al. 2024, table 2), ZB-V a wait for the first micro-batch alone
        assert Flow("interleaved_zero_bubble", 4, 2, None).bubble(8) == pytest.approx(3 / (3 * 2 * 8 + 3))
        assert Flow("zbv", 4, 2, None).bubble(8) == pytest.approx(3 / (3 * 2 * 8 + 3))
        assert Flow("zbv", 4, 2, None).bubble(1) > 0.5

    def test_rounds_follow_each_other(self):
        flow = Flow("1f1b", 2, 1, 3)
        assert flow.rounds(8) == [3, 3, 2]
        assert flow.bubble(8) == pytest.approx(1 - 8 / (8 + 3))
        assert Flow("1f1b", 2, 1, None).rounds(8) == [8]

    def test_copies_fill_up_every_round(self):
        assert Flow("1f1b", 4, 1, None).copies(1) == 3
        assert Flow("1f1b", 4, 1, 3).copies(8) == 1 + 1 + 2
        assert Flow("interleaved_1f1b", 4, 2, None).copies(9) == 1
        assert Flow("gpipe", 4, 1, None).copies(1) == 0

    def test_a_million_micro_batches_are_no_work(self):
        assert Flow("interleaved_1f1b", 8, 2, None).bubble(10**6) < 1e-5

    def test_actions_that_wait_for_each_other_are_no_timetable(self):
        with pytest.raises(ValueError, match="wait for each other"):
            place([[Action("B", 0, 0), Action("F", 0, 0)]])

    def test_stages_go_round_and_under_zbv_back(self):
        assert [rank_of_stage("interleaved_1f1b", 3, stage) for stage in range(6)] == [0, 1, 2, 0, 1, 2]
        assert [rank_of_stage("zbv", 3, stage) for stage in range(6)] == [0, 1, 2, 2, 1, 0]
        for schedule in SCHEDULES:
            per_rank = STAGES[schedule][0]
            for rank, order in enumerate(orders(schedule, 3, per_rank, 6)):
                assert {rank_of_stage(schedule, 3, one.stage) for one in order} == {rank}


class TestDrawing:
    def test_the_text_of_1f1b(self):
        assert draw_text(place(orders("1f1b", 2, 1, 3)), real=2) == [
            "time   0              5              10",
            "rank 0 F0 F1 .  .  B0--- F2 B1--- .  B2---",
            "rank 1 .  F0 B0--- F1 B1--- F2 B2--- .  .",
            "",
            "F  forward, 1 of time",
            "B  backward, 2 of time",
            "number: the micro-batch",
            "micro-batches from 2 on are masked copies that fill up",
        ]

    def test_stages_of_a_rank_are_told_apart(self):
        lines = draw_text(place(orders("zbv", 2, 2, 2)), real=2)
        assert lines[1].startswith("rank 0 0F0 0F1 .   3F0 3I0 3W0 3F1")
        assert "number after it: the micro-batch; before it: the stage" in lines

    @pytest.mark.parametrize("schedule", SCHEDULES)
    @pytest.mark.parametrize("count", [24, 1200])
    def test_a_long_one_is_wrapped_and_cut_with_a_word(self, schedule, count):
        lines = draw_text(place(orders(schedule, 4, STAGES[schedule][0], count)), real=count)
        assert max(map(len, lines)) <= WIDTH
        assert len(lines) < 50
        assert any(line.startswith("… and ") for line in lines) == (count == 1200 or len(lines) > 40)

    @pytest.mark.parametrize(
        ("schedule", "count", "real"), [("1f1b", 4, 1), ("interleaved_zero_bubble", 4, 4), ("gpipe", 300, 300)]
    )
    def test_the_picture(self, tmp_path: Path, schedule: str, count: int, real: int):
        path = tmp_path / "pipeline.png"
        draw_picture(place(orders(schedule, 4, STAGES[schedule][0], count)), path, title="$a title", real=real)
        image: Tensor = torch.from_numpy(imread(path))
        assert image.shape[0] > 300
        assert image.shape[1] > 800
        assert len(image[::7, ::7].flatten(0, 1).unique(dim=0)) > 5
        assert [one.name for one in tmp_path.iterdir()] == ["pipeline.png"]
