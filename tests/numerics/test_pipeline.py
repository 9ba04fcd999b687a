"""Pipelines against one process: the same parameters, losses and norms on every rank, under every schedule and
sharding."""

from typing import Any

import plain
import pytest
import torch
from configs import config_text, own
from test_update import GLOBAL, OPTIMIZERS, TOLERANCE, config, model
from torch import Tensor, nn
from toys import Same, Sequences, assembled, trained

from launcher.config.choices import PipelineSchedule
from launcher.errors import ConfigError
from launcher.tasks import CausalLM
from launcher.train.deferred import LARGE

pytestmark = pytest.mark.slow

MAX_NORM = 0.05
LAYERS = 5
CASES = {
    "gpipe": (2, ["pipeline.schedule=gpipe"]),
    "1f1b": (2, []),
    "interleaved_1f1b": (2, ["pipeline.schedule=interleaved_1f1b"]),
    "looped_bfs": (2, ["pipeline.schedule=looped_bfs"]),
    "interleaved_zero_bubble": (2, ["pipeline.schedule=interleaved_zero_bubble"]),
    "zbv": (2, ["pipeline.schedule=zbv"]),
    "three stages": (3, ["mesh.pp=3"]),
    "x ddp": (4, []),
    "x fsdp": (4, ["strategy=fsdp"]),
    "x fsdp each window": (4, ["strategy=fsdp", "strategy.reduce_each=window"]),
    "x fsdp copies": (4, ["strategy=fsdp", "mesh.dp_replicate=2"]),
    "x fsdp kept": (4, ["strategy=fsdp", "strategy.reshard_after_forward=false", "strategy.reduce_each=micro_batch"]),
    "x zero1": (4, ["strategy=zero1"]),
    "looped_bfs x fsdp": (4, ["strategy=fsdp", "pipeline.schedule=looped_bfs"]),
    "interleaved_zero_bubble x ddp": (4, ["pipeline.schedule=interleaved_zero_bubble"]),
    "zbv x zero1": (4, ["strategy=zero1", "pipeline.schedule=zbv"]),
}
ROUNDS = [
    (1, ["batch.layout=length"]),
    (2, ["batch.layout=arrival", "pipeline.microbatches_per_round=2"]),
    (7, ["batch.layout=length", "activation_checkpoint=full"]),
]
"""Micro-batch sizes, and how a window is cut into rounds of them: the size of 7 fills most of a round with copies."""


def layered(dtype: str, micro: int, *more: str, layers: int = LAYERS) -> str:
    return config(dtype, micro, f"model.num_layers={layers}", *more)


def assert_trained_as_one_process(
    ranks: Any, world: int, dtype: str, optimizer: str, rounds: list[tuple[int, list[str]]], *more: str, layers: int
) -> None:
    """After five updates with a clip that bites: parameters, losses and norms on every rank, for each of `rounds`."""
    task = CausalLM(vocab_size=14, bos=13)
    overrides, kind, arguments = OPTIMIZERS[optimizer]
    expected = model(dtype, num_layers=layers)
    lines = plain.train(expected, task, Sequences(), GLOBAL, 5, kind(expected.parameters(), **arguments), MAX_NORM)
    assert min(line["grad_norm"] for line in lines) > 2 * MAX_NORM
    fixed = [*overrides, *more, f"training.max_grad_norm={MAX_NORM}", "training.duration=5 updates"]
    texts = [layered(dtype, micro, *fixed, *cut, layers=layers) for micro, cut in rounds]
    for of_rank in ranks.run(trained, texts, world_size=world, timeout=180):
        for run in of_rank:
            assert list(run["state"]) == list(expected.state_dict())
            assert plain.largest_difference(run["state"], dict(expected.state_dict())) <= TOLERANCE[dtype]
            for line, reference in zip(run["lines"], lines, strict=True):
                assert line["loss"] == pytest.approx(reference["loss"], rel=TOLERANCE[dtype])
                assert line["grad_norm"] == pytest.approx(reference["grad_norm"], rel=2 * TOLERANCE[dtype])


EXACT = ("1f1b", "zbv", "x ddp", "x fsdp")
"""In float64 too."""


@pytest.mark.parametrize(
    ("name", "optimizer", "dtype"),
    [
        *[(name, optimizer, "float32") for name in CASES for optimizer in ("sgd", "adamw")],
        *[(name, "sgd", "float64") for name in EXACT],
    ],
)
def test_parameters_after_five_updates(ranks: Any, name: str, optimizer: str, dtype: str) -> None:
    world, mesh = CASES[name]
    turn = list(CASES).index(name) % 3
    if dtype == "float64" or optimizer == "adamw":
        rounds = [ROUNDS[turn]]
    else:  # all where there is a pipeline alone, and elsewhere those that the others of this name leave
        rounds = ROUNDS if world < 4 else [one for one in ROUNDS if one is not ROUNDS[turn]]
    pp = [] if any("mesh.pp" in one for one in mesh) else ["mesh.pp=2"]
    assert_trained_as_one_process(ranks, world, dtype, optimizer, rounds, *pp, *mesh, layers=LAYERS)


@pytest.mark.parametrize("schedule", [one.value for one in PipelineSchedule])
def test_four_stages_under_every_schedule(ranks: Any, schedule: str) -> None:
    # eight layers: four ranks of one or of two stages each
    more = ["mesh.pp=4", f"pipeline.schedule={schedule}"]
    assert_trained_as_one_process(ranks, 4, "float32", "sgd", ROUNDS[:1], *more, layers=8)


class Gated(nn.Module):
    """Two tensors between layers, parameters of the model itself, layers inside another module, and members that no
    forward uses, one of them frozen."""

    def __init__(self, layers: int = 4, width: int = 6) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.linspace(-1, 1, width))
        self.unused = nn.Linear(3, 3)
        self.frozen = nn.Linear(1, width).requires_grad_(False)
        self.body = nn.ModuleDict({"layers": nn.ModuleList(GatedLayer(width) for _ in range(layers))})
        self.body["norm"] = nn.LayerNorm(width)
        self.end = nn.Parameter(torch.linspace(1, 2, width))

    @property
    def layers(self) -> nn.ModuleList:
        return self.body["layers"]  # type: ignore[return-value]

    def embed(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return rows[:, None] * self.start, self.frozen(rows[:, None])

    def head(self, hidden: tuple[Tensor, Tensor]) -> Tensor:
        value, gate = hidden
        return (self.body["norm"](value + gate) * self.end).sum(-1)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.embed(rows)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


class GatedLayer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, hidden: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        value, gate = hidden
        return value + torch.tanh(self.linear(value)) * gate, gate * 0.9


@pytest.mark.parametrize(
    ("world", "more"),
    [
        (2, ["mesh.pp=2"]),
        (3, ["mesh.pp=3", "pipeline.split=[1,2,1]"]),
        (2, ["mesh.pp=2", "pipeline.schedule=zbv"]),
        (4, ["mesh.pp=2", "strategy=fsdp", "strategy.wrap=[GatedLayer]"]),
        (4, ["mesh.pp=2"]),
    ],
)
def test_a_model_of_ones_own_with_whatever_between_its_layers(ranks: Any, world: int, more: list[str]) -> None:
    chosen = own("test_pipeline.Gated", "toys.Same", "test_fp16.Numbers", values=[0.5, -1.0, 2.0, 1.5, -0.25])
    fixed = ["optimizer=adamw", "optimizer.lr=0.01", "optimizer.eps=1e-3", "training.duration=3 epochs"]
    size = ["batch.global_batch_size=3", "batch.micro_batch_size=1", "training.max_grad_norm=0.1"]
    texts = [config_text(*chosen, *fixed, *size, *extra) for extra in (["strategy=ddp"], more)]
    (alone,) = ranks.run(trained, texts[:1], world_size=1)
    for (run,) in ranks.run(trained, texts[1:], world_size=world):
        assert list(run["state"]) == list(alone[0]["state"])
        assert plain.largest_difference(run["state"], alone[0]["state"]) <= TOLERANCE["float32"]
        assert [line["grad_norm"] for line in run["lines"]] == pytest.approx(
            [line["grad_norm"] for line in alone[0]["lines"]], rel=2e-6
        )


@pytest.mark.parametrize(
    ("world", "more"),
    [
        (4, ["mesh.pp=2", "batch.global_batch_size=5"]),
        (4, ["mesh.pp=2", "batch.global_batch_size=1"]),
        (3, ["mesh.pp=3", "batch.global_batch_size=7", "pipeline.schedule=interleaved_1f1b"]),
    ],
)
def test_windows_smaller_than_the_pipeline_and_eleven_layers(ranks: Any, world: int, more: list[str]) -> None:
    settings = ["model.num_layers=11", "training.duration=4 updates", "optimizer=sgd", "optimizer.lr=0.5"]
    held_out = ["data.validation={_target_: toys.Sequences, count: 5}", "training.validate_every=2"]
    texts = [config("float32", 1, *settings, *held_out, *extra) for extra in (more[1:2], more)]
    (alone,) = ranks.run(trained, texts[:1], world_size=1)
    for (run,) in ranks.run(trained, texts[1:], world_size=world):
        assert plain.largest_difference(run["state"], alone[0]["state"]) <= TOLERANCE["float32"]
        assert run["validation"].loss == pytest.approx(alone[0]["validation"].loss, rel=1e-6)
        assert run["validations"] == alone[0]["validations"] == [2, 4]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_is_that_of_one_process(ranks: Any, precision: str) -> None:
    settings = [f"precision={precision}", "model.num_layers=4", "training.duration=3 updates", "optimizer=sgd"]
    settings += ["optimizer.lr=0.5", "batch.layout=arrival"]
    texts = [config("float32", 2, *settings, *extra) for extra in ([], ["mesh.pp=2"])]
    (alone,) = ranks.run(trained, texts[:1], world_size=1)
    for (run,) in ranks.run(trained, texts[1:], world_size=2):
        # the same products in half precision; only shapes, and so the order of sums, differ
        assert [line["loss"] for line in run["lines"]] == pytest.approx(
            [line["loss"] for line in alone[0]["lines"]], rel=2**-8
        )
        assert [line["loss_scale"] for line in run["lines"]] == [line["loss_scale"] for line in alone[0]["lines"]]
        assert plain.largest_difference(run["state"], alone[0]["state"]) <= 2**-8


def test_dropout_and_recomputation_draw_the_same_in_every_run(ranks: Any) -> None:
    settings = ["model.num_layers=4", "model.dropout=0.3", "mesh.pp=2", "training.duration=3 updates"]
    texts = [config("float32", 2, *settings, f"activation_checkpoint={kind}") for kind in ("none", "none", "full")]
    first, again, recomputed = ranks.run(trained, texts, world_size=2)[0]
    assert all(torch.equal(value, again["state"][name]) for name, value in first["state"].items())
    assert plain.largest_difference(recomputed["state"], first["state"]) <= TOLERANCE["float32"]


def memory_of_stages(rank: int, world_size: int, text: str) -> tuple[int, int]:
    """Elements of large parameters that this rank has in memory: of its own stages, and of the whole model."""
    fit = assembled(rank, world_size, text)
    own = {id(one): one.numel() for one in fit.sharding.model.parameters() if one.numel() >= LARGE}
    plain = fit.sharding.part.plain.parameters()  # type: ignore[union-attr]
    held = {id(one): one.numel() for one in plain if one.numel() >= LARGE and not one.is_meta}
    return sum(own.values()), sum(held.values())


def test_a_rank_holds_its_own_stages_alone(ranks: Any) -> None:
    sizes = [f"model.{name}={value}" for name, value in (("hidden_size", 64), ("intermediate_size", 96))]
    text = config("float32", 2, *sizes, "model.num_layers=4", "mesh.pp=2", "model.tie_head=false")
    found = ranks.run(memory_of_stages, text, world_size=2)
    assert all(own == held > 0 for own, held in found)


class Odd(nn.Module):
    """Four layers, of which `how` names one peculiarity."""

    def __init__(self, how: str = "", width: int = 6) -> None:
        super().__init__()
        self.how, self.width = how, width
        self.start = nn.Linear(1, width)
        self.layers = nn.ModuleList(OddLayer(how, index, width) for index in range(4))
        self.end = nn.Linear(width, 1)
        self.shift = nn.Parameter(torch.ones(width))
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("heads", torch.zeros(1))
        self.last = nn.Linear(1, 1)
        if how == "frozen":
            for one in (self.start, self.layers[0]):
                one.requires_grad_(False)

    def embed(self, rows: Tensor) -> Any:
        if self.how == "buffers":
            self.calls += 1
        hidden = self.start(rows[:, None]) * (2 if self.training else 1)
        return (hidden,) if self.how == "one tuple" else hidden

    def head(self, hidden: Any) -> Tensor:
        if self.how == "buffers":
            self.heads = self.heads + 1
        hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        scale = len(self.layers) if self.how == "depth" else 1
        out = self.end(hidden + self.shift) * scale
        return (out if self.training else self.last(out)).squeeze(1)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.embed(rows)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


class OddLayer(nn.Module):
    def __init__(self, how: str, index: int, width: int) -> None:
        super().__init__()
        self.how, self.index = how, index
        self.linear, self.gate = nn.Linear(width, width), nn.Parameter(torch.ones(width))

    def forward(self, hidden: Any) -> Any:
        if self.how == "one tuple":
            return (hidden[0] + torch.tanh(self.linear(hidden[0])) * self.gate,)
        if self.how == "detached" and self.index == 2:
            hidden = hidden.detach()
        out = hidden + torch.tanh(self.linear(hidden)) * self.gate
        if self.how == "beside the path" and self.index == 1:
            out = out.detach() + self.gate  # the gate reaches the loss, and what came in doesn't
        return out.view(out.shape) if self.how == "view" else out


IL, IZB, ZBV, LB = (
    f"pipeline.schedule={name}" for name in ("interleaved_1f1b", "interleaved_zero_bubble", "zbv", "looped_bfs")
)


@pytest.mark.parametrize(
    ("how", "world", "more"),
    [
        *[(how, 2, [schedule]) for how in ("frozen", "detached", "beside the path", "view") for schedule in (IZB, ZBV)],
        ("", 2, [ZBV, "activation_checkpoint=selective"]),
        ("one tuple", 2, [IL]),
        ("buffers", 2, [IL]),
        ("buffers", 2, [ZBV]),
        ("", 4, [LB, "strategy=fsdp"]),
    ],
)
def test_models_in_which_something_is_odd(ranks: Any, how: str, world: int, more: list[str]) -> None:
    chosen = own("test_pipeline.Odd", "toys.Same", "test_fp16.Numbers", values=[0.5, -1.0, 2.0, 1.5, -0.25, 3.0, 0.1])
    chosen += [f"+model.how='{how}'", "data.validation={_target_: test_fp16.Numbers, values: [1.0,2.0,-3.0]}"]
    chosen = [one.replace("toys.Same", "test_pipeline.Flat") for one in chosen]
    fixed = ["optimizer=sgd", "optimizer.lr=0.1", "training.duration=2 epochs", "training.max_grad_norm=0.1"]
    fixed += ["batch.global_batch_size=4", "batch.micro_batch_size=1", "training.validate_every=2"]
    texts = [config_text(*chosen, *fixed, *extra) for extra in (["strategy=ddp"], ["mesh.pp=2", *more])]
    (alone,) = ranks.run(trained, texts[:1], world_size=1)
    for (run,) in ranks.run(trained, texts[1:], world_size=world):
        assert plain.largest_difference(run["state"], alone[0]["state"]) <= TOLERANCE["float32"]
        assert run["validation"].loss == pytest.approx(alone[0]["validation"].loss, rel=1e-6)
        assert [line["grad_norm"] for line in run["lines"]] == pytest.approx(
            [line["grad_norm"] for line in alone[0]["lines"]], rel=2e-6
        )


class Flat(Same):
    """The same, of samples that are lists of one number; the loss is the square of what the model gives."""

    def collate(self, samples: list[Any]) -> dict[str, Tensor]:
        return {"rows": torch.tensor(samples).flatten()}

    def loss(self, output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return output.square()


def test_a_head_that_looks_at_all_layers_is_refused(ranks: Any) -> None:
    chosen = own("test_pipeline.Odd", "test_pipeline.Flat", "test_fp16.Numbers", values=[0.5, 1.0])
    text = config_text(*chosen, "+model.how=depth", "mesh.pp=2", "batch.global_batch_size=2")
    with pytest.raises(ConfigError, match="looks at the layers"):
        ranks.run(trained, [text], world_size=2)


def divided(rank: int, world_size: int, text: str) -> list[bool]:
    """For each backward of a stage's inputs in one window whether it was divided."""
    fit = assembled(rank, world_size, text)
    said: list[bool] = []
    runner: Any = fit.runner
    can_divide = runner.can_divide
    runner.can_divide = lambda *given: said.append(can_divide(*given)) or said[-1]
    fit.runner.run(fit.windows.get(1))
    return said


@pytest.mark.parametrize("schedule", [IZB, ZBV])
def test_the_backward_of_a_transformer_is_divided(ranks: Any, schedule: str) -> None:
    for said in ranks.run(divided, layered("float32", 1, "mesh.pp=2", schedule), world_size=2):
        assert said
        assert all(said)
