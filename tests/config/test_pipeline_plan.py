"""The plan of a pipeline: what is refused by name, what is settled, and how it is shown and drawn."""

import json
from pathlib import Path

import pytest
from configs import config_text

from launcher import drawing, prepare
from launcher.config.choices import Device, PipelineSchedule
from launcher.config.validate import parse
from launcher.errors import ConfigError, LauncherError
from launcher.plan.facts import Facts, ask_all
from launcher.plan.mesh import World
from launcher.plan.plan import Plan, make_plan

pytestmark = pytest.mark.thorough

LAYERS = 8
FACTS = Facts(samples=320, num_layers=LAYERS, part_costs=[0, *[10] * LAYERS, 5], trainable_parameters=2**20)
BATCH = ("batch.global_batch_size=32", "batch.micro_batch_size=2")


def plan(*overrides: str, ranks: int = 4, facts: Facts = FACTS) -> Plan:
    return make_plan(parse(config_text(*BATCH, *overrides)), facts, world=World(1, ranks, Device.cpu))


PP2 = ["mesh.pp=2"]
REFUSED = {
    "no degree": (["mesh.pp=0"], ["mesh.pp=0: must be at least 1"]),
    "no rest": (["mesh.pp=-1"], ["mesh.pp=-1: must be at least 1"]),
    "a degree that doesn't divide": (
        ["mesh.pp=3"],
        ["mesh.pp=3: doesn't divide the world of 4 ranks", "mesh.pp=1 or 2 or 4, or a multiple of 3 ranks"],
    ),
    "single": (["strategy=single", *PP2], ["strategy=single: runs on one rank, not on the 2", "strategy=ddp"]),
    "zero2": (["strategy=zero2", *PP2], ["mesh.pp=2", "strategy=zero2", "own backward", "strategy=fsdp mesh.pp=2"]),
    "zero3": (["strategy=zero3", *PP2], ["mesh.pp=2", "strategy=zero3", "own backward", "strategy=fsdp mesh.pp=2"]),
    "deepspeed's keys": (
        ["strategy=zero1", "+strategy.deepspeed={wall_clock_breakdown:true}", *PP2],
        ["strategy.deepspeed={'wall_clock_breakdown': True}", "ZeroRedundancyOptimizer", "leave it out"],
    ),
    "offload of zero1": (
        ["strategy=zero1", "strategy.offload=optimizer", *PP2],
        ["strategy.offload=optimizer", "DeepSpeed has no part in a pipeline (mesh.pp=2)"],
    ),
    "each micro-batch of zero1": (
        ["strategy=zero1", "strategy.reduce_each=micro_batch", *PP2],
        ["strategy.reduce_each=micro_batch", "once a window", "strategy=fsdp"],
    ),
    **{
        f"each micro-batch of {schedule}": (
            ["strategy=fsdp", f"pipeline.schedule={schedule}", *PP2],
            [f"pipeline.schedule={schedule}", "gets them wrong", "interleaved_1f1b"],
        )
        for schedule in ("zbv", "interleaved_zero_bubble")
    },
    "a schedule of nothing": (["pipeline.schedule=gpipe"], ["pipeline.schedule=gpipe", "(mesh.pp=1)", "mesh.pp=2"]),
    "a split of nothing": (["pipeline.split=[8]"], ["pipeline.split=[8]", "has no meaning without a pipeline"]),
    "rounds of nothing": (["pipeline.microbatches_per_round=2"], ["pipeline.microbatches_per_round=2", "no meaning"]),
    "tokens": (
        ["batch.micro_batch_size=auto", "batch.micro_batch_tokens=64", *PP2],
        ["batch.micro_batch_tokens=64", "need one shape", "batch.micro_batch_size"],
    ),
    "no round": (["pipeline.microbatches_per_round=0", *PP2], ["pipeline.microbatches_per_round=0", "or null"]),
    "a word": (["pipeline.split=atuo", *PP2], ["pipeline.split=atuo: must be auto or a list", "did you mean 'auto'"]),
    "a number": (["pipeline.split=4", *PP2], ["pipeline.split=4: must be auto or a list", "[2,3]"]),
    "an empty stage": (["pipeline.split=[8,0]", *PP2], ["pipeline.split[1]=0", "at least 1"]),
    "half a layer": (["pipeline.split=[6.5,1.5]", *PP2], ["pipeline.split[0]=6.5", "a whole number"]),
    "too few stages": (
        ["pipeline.split=[8]", *PP2],
        [
            "pipeline.split=[8]: 1 stage:",
            "pipeline.schedule=1f1b has exactly 1 on each of mesh.pp=2 ranks, so 2 numbers",
        ],
    ),
    "several stages of 1f1b": (
        ["pipeline.split=[2,2,2,2]", *PP2],
        ["pipeline.split=[2,2,2,2]", "so 2 numbers", "pipeline.schedule=interleaved_1f1b takes 4"],
    ),
    "one stage of zbv": (
        ["pipeline.schedule=zbv", "pipeline.split=[4,4]", *PP2],
        ["pipeline.split=[4,4]", "has exactly 2", "so 4 numbers", "pipeline.schedule=1f1b takes 2"],
    ),
    "three stages of zbv": (
        ["pipeline.schedule=zbv", "pipeline.split=[1,1,1,1,2,2]", *PP2],
        ["has exactly 2", "pipeline.schedule=interleaved_1f1b takes 6"],
    ),
    "no multiple": (
        ["pipeline.schedule=looped_bfs", "pipeline.split=[2,2,2,1,1]", *PP2],
        ["pipeline.split=[2,2,2,1,1]: 5 stages", "has two or more", "so 4, 6, … numbers", "pipeline.split=auto"],
    ),
    "another sum": (["pipeline.split=[4,3]", *PP2], ["pipeline.split=[4,3]: 4 + 3 = 7 layers, and the model has 8"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_by_name(name):
    overrides, expected = REFUSED[name]
    with pytest.raises(ConfigError) as refused:
        plan(*overrides)
    for text in expected:
        assert text in str(refused.value)
    assert len(str(refused.value).splitlines()) <= 2


@pytest.mark.parametrize(
    ("overrides", "ranks", "layers", "expected"),
    [
        (["mesh.pp=8"], 8, 5, ["8 ranks x 1 stage = 8 stages, and the model has 5 layers", "mesh.pp=5 is the most"]),
        (
            ["mesh.pp=4", "pipeline.schedule=zbv"],
            4,
            5,
            [
                "4 ranks x 2 stages = 8 stages",
                "mesh.pp=2 is the most under pipeline.schedule=zbv; ",
                "1f1b has one stage",
            ],
        ),
        (["mesh.pp=4"], 4, 1, ["and the model has 1 layer\n", "mesh.pp=1: no pipeline"]),
    ],
)
def test_more_stages_than_layers_are_refused_with_the_most_there_can_be(overrides, ranks, layers, expected):
    with pytest.raises(ConfigError) as refused:
        plan(*overrides, ranks=ranks, facts=Facts(samples=320, num_layers=layers))
    assert refused.value.key == "mesh.pp"
    for text in expected:
        assert text in str(refused.value)


def test_a_model_that_cannot_be_cut_is_named():
    with pytest.raises(ConfigError, match="offers no layers to cut between") as refused:
        plan("mesh.pp=2", facts=Facts(samples=320))
    assert refused.value.key == "model._target_"
    assert "launcher.models.GPT" in str(refused.value)
    assert "`layers` (ModuleList), `embed(**inputs)`, `head(hidden)`" in str(refused.value)
    with pytest.raises(ConfigError, match=r"add `layers` \(ModuleList\); forward is"):
        plan("mesh.pp=2", facts=Facts(samples=320, missing_parts=["layers"]))
    with pytest.raises(
        ConfigError, match=r"offers layers, and no embed and no head\n  add `embed\(\*\*inputs\)`, `head"
    ):
        plan("mesh.pp=2", facts=Facts(samples=320, num_layers=8, missing_parts=["embed", "head"]))


@pytest.mark.parametrize("schedule", [one.value for one in PipelineSchedule])
def test_every_schedule_is_planned_by_its_name(schedule):
    made = plan("mesh.pp=2", f"pipeline.schedule={schedule}")
    stages = 2 if schedule in ("gpipe", "1f1b") else 4
    assert made.pipeline["schedule"] == schedule
    assert made.pipeline["stages_per_rank"] == stages // 2
    assert len(made.stages) == len(made.pipeline["costs"]) == stages
    assert (made.stages[0][0], made.stages[-1][1]) == (0, LAYERS - 1)
    assert all(before[1] + 1 == after[0] for before, after in zip(made.stages, made.stages[1:], strict=False))
    assert 0 < made.pipeline["bubble"] < 0.2


def test_the_degree_of_the_pipeline_takes_no_samples():
    made = plan("mesh.pp=2", ranks=8)
    assert (made.world_size, made.data_parallel_degree) == (8, 4)
    assert made.mesh == {"dp_replicate": 4, "dp_shard": 1, "pp": 2}
    assert made.gradient_accumulation_steps == 4
    assert plan("mesh.pp=2", "strategy=fsdp", ranks=8).mesh == {"dp_replicate": 1, "dp_shard": 4, "pp": 2}
    mixed = plan("mesh.pp=2", "strategy=fsdp", "mesh.dp_replicate=2", ranks=8)
    assert mixed.mesh == {"dp_replicate": 2, "dp_shard": 2, "pp": 2}
    assert plan("mesh.pp=4").reductions_per_window == 0


def test_layers_are_split_by_cost_or_as_given():
    heavy = Facts(samples=320, num_layers=8, part_costs=[0, *[10] * 8, 35])
    made = plan("mesh.pp=2", facts=heavy)
    assert made.stages == [[0, 5], [6, 7]]
    assert made.pipeline["costs"] == [60, 55]
    made = plan("mesh.pp=2", "pipeline.split=[3,5]", facts=heavy)
    assert made.stages == [[0, 2], [3, 7]]
    assert made.pipeline["costs"] == [30, 85]
    assert any("stage 1 has 1.48 times an even share" in note for note in made.notes)
    made = plan("mesh.pp=2", "pipeline.schedule=interleaved_1f1b", "pipeline.split=[1,1,1,1,2,2]")
    assert made.pipeline["stages_per_rank"] == 3
    unknown = plan("mesh.pp=2", facts=Facts(samples=320, num_layers=5))
    assert (unknown.stages, unknown.pipeline["costs"]) == ([[0, 2], [3, 4]], None)


def test_stages_wait_for_the_model_where_torch_is_absent():
    made = plan("mesh.pp=2", facts=Facts())
    assert made.stages is None
    assert made.pipeline["costs"] is None
    assert made.pipeline["bubble"] == pytest.approx(1 / 9)


def test_without_a_pipeline_there_is_one_stage():
    made = plan()
    assert (made.stages, made.pipeline) == ([[0, 7]], None)


def test_rounds_are_filled_up_and_said():
    made = plan("mesh.pp=4", "batch.micro_batch_size=16")
    assert (made.pipeline["rounds"], made.pipeline["filled_rounds"]) == ([2], [4])
    (note,) = [note for note in made.notes if "fill it up" in note]
    assert note.startswith("pipeline.schedule=1f1b can't run the 2 micro-batches of a full window as they are: 2 more")
    assert "50% of the work; batch.micro_batch_size=10 needs none" in note
    assert not [note for note in plan("mesh.pp=4", "batch.micro_batch_size=10").notes if "fill it up" in note]
    bounded = plan("mesh.pp=4", "pipeline.microbatches_per_round=3")
    assert (bounded.pipeline["rounds"], bounded.pipeline["filled_rounds"]) == ([3] * 5 + [1], [4] * 6)
    assert any("pipeline.microbatches_per_round=4 needs none in a full round" in note for note in bounded.notes)
    tiny = plan("mesh.pp=4", "batch.global_batch_size=3")
    assert any("batch.global_batch_size=4 or more can do without" in note for note in tiny.notes)
    interleaved = plan("mesh.pp=2", "pipeline.schedule=interleaved_1f1b", "batch.global_batch_size=28")
    assert (interleaved.pipeline["rounds"], interleaved.pipeline["filled_rounds"]) == ([7], [8])


def test_what_makes_the_bubble_smaller_is_said():
    made = plan("mesh.pp=2", "batch.micro_batch_size=8")
    assert made.pipeline["bubble"] == pytest.approx(1 / 3)
    assert "ranks wait 33.3% of a step; 5.9% with batch.micro_batch_size=1" in plan_notes(made, "ranks wait")
    assert not plan_notes(made, "accumulation saves memory and not time")
    bounded = plan("mesh.pp=2", "pipeline.microbatches_per_round=2")
    assert "ranks wait 33.3% of a step; 11.1% with pipeline.microbatches_per_round=null" in plan_notes(bounded, "wait")


def plan_notes(made: Plan, part: str) -> str:
    return "\n".join(note for note in made.notes if part in note)


def test_the_strategies_that_a_stage_can_have():
    made = plan("mesh.pp=2", "strategy=zero1", "optimizer=lamb")
    assert made.reductions_per_window == 1
    assert "ZeroRedundancyOptimizer takes its place" in plan_notes(made, "zero1")
    assert "nothing to spread" in plan_notes(plan("mesh.pp=4", "strategy=zero1"), "zero1")
    assert plan("mesh.pp=2", "strategy=zero1", "precision=fp16").precision == "fp16"
    sharded = plan("mesh.pp=2", "strategy=fsdp", "activation_checkpoint=full", "strategy.wrap=[Layer]")
    assert (sharded.reduce_each, sharded.reductions_per_window) == ("micro_batch", 8)
    assert "keeps 2 MiB" in plan_notes(sharded, "never whole")
    filled = plan("mesh.pp=2", "strategy=fsdp", "batch.global_batch_size=28", "pipeline.schedule=interleaved_1f1b")
    assert filled.reductions_per_window == 8


def test_a_type_of_transformers_that_is_not_known_is_named():
    with pytest.raises(ConfigError, match="of the types llama, mistral") as refused:
        plan("mesh.pp=2", facts=Facts(samples=320, num_layers=8, missing_parts=["type"]))
    assert refused.value.key == "model"


RANKS = ("cluster.device=cpu", "cluster.ranks_per_node=4", "mesh.pp=2")


@pytest.fixture
def facts(command, monkeypatch):
    monkeypatch.setattr(prepare, "ask", lambda *_: FACTS)


def test_the_plan_shows_stages_rounds_and_waiting(command, facts):
    said = command("plan", *BATCH, "pipeline.schedule=zbv", *RANKS)
    assert said.code == 0
    for text in (
        "zbv, 2 stages on each of 2 ranks",
        "1 of 8 micro-batches",
        "layers 6 to 7 on rank 0, 29.4% of the work",
    ):
        assert text in said.out
    assert "2 of 3 micro-batches, 1 of 2" in command("plan", *BATCH, "pipeline.microbatches_per_round=3", *RANKS).out


def test_the_plan_as_json(command, facts):
    made = json.loads(command("plan", "--json", *BATCH, *RANKS).out)
    assert made["mesh"]["pp"] == 2
    assert made["stages"] == [[0, 3], [4, 7]]
    assert made["pipeline"] == {
        "schedule": "1f1b",
        "stages_per_rank": 1,
        "microbatches_per_round": None,
        "bubble": pytest.approx(1 / 9),
        "costs": [40, 45],
        "rounds": [8],
        "filled_rounds": [8],
    }
    assert made["facts"]["part_costs"] == FACTS.part_costs


def test_a_misspelt_schedule_is_refused_with_all_there_are(command):
    said = command("plan", "pipeline.schedule=1f1", *RANKS)
    assert said.code == 2
    assert "allowed: one of gpipe, 1f1b, interleaved_1f1b, looped_bfs, interleaved_zero_bubble, zbv" in said.err


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--draw"], "--draw: there is no pipeline to draw (mesh.pp=1)\n  mesh.pp=2 or more"),
        (["--draw=picture.pdf", *RANKS], "--draw=picture.pdf: must be the name of a PNG"),
        (["--draw=", *RANKS], "must be the name of a PNG"),
        (["--draw=nowhere/picture.png", *RANKS], "--draw=nowhere/picture.png: there is no folder nowhere"),
        (["--draw", "-m", "run.seed=1,2", *RANKS], "--draw draws the pipeline of one run"),
        (["--drwa", *RANKS], "unrecognized arguments: --drwa"),
    ],
)
def test_what_cannot_be_drawn_is_refused(command, argv, text):
    said = command("plan", *argv)
    assert said.code == 2
    assert text in said.err
    assert not said.out
    assert not list(Path().iterdir())


def test_without_torch_nothing_is_drawn(command, monkeypatch):
    monkeypatch.setattr(drawing, "torch_is_installed", lambda: False)
    said = command("plan", "--draw", *RANKS)
    assert said.code == 2
    assert "--draw: the order of a schedule's actions is torch's" in said.err


@pytest.mark.slow
def test_the_plan_is_drawn(command):
    said = command("plan", "--draw", *BATCH, "pipeline.schedule=interleaved_zero_bubble", *RANKS)
    assert said.code == 0, said.err
    assert "Timetable of interleaved_zero_bubble, 8 micro-batches\n" in said.out
    assert "rank 0 0F0 0F1 2F0 2F1" in said.out
    assert "picture pipeline.png" in said.out
    assert [one.name for one in Path().iterdir()] == ["pipeline.png"]
    drawn = command("plan", "--json", "--draw=other.PNG", *BATCH, *RANKS)
    assert json.loads(drawn.out)["pipeline"]["schedule"] == "1f1b"
    assert sorted(one.name for one in Path().iterdir()) == ["other.PNG", "pipeline.png"]


@pytest.mark.slow
def test_a_model_is_asked_for_its_parts():
    gpt = ["model.num_layers=3", "cluster.device=cpu", "data.train.max_bytes=64"]
    texts = [config_text(*gpt, "mesh.pp=2", "cluster.ranks_per_node=2", "data.validation=null"), config_text(*gpt)]
    for said in ask_all(texts, []):
        assert not isinstance(said, LauncherError), said
        assert len(said.part_costs) == 5
        assert said.missing_parts == []
