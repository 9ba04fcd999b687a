"""FSDP: what travels and how often, the same bits whatever ran before, models that are never whole, refusals."""

from functools import partial
from typing import Any

import pytest
import torch
from configs import PLAIN, config_text, own
from safetensors.torch import save_file
from test_model_features import Network
from torch import Tensor, nn
from toys import assembled, gradients_from, trained, travelled

from launcher.config.choices import Device
from launcher.config.validate import parse
from launcher.errors import ConfigError
from launcher.models import GPT
from launcher.plan.facts import Facts
from launcher.plan.mesh import World
from launcher.plan.plan import make_plan
from launcher.train.parallel.blocks import check_blocks
from launcher.train.parts import Parts, build_task, defer_model, gather_facts

pytestmark = pytest.mark.slow

SIZES = {"hidden_size": 32, "num_layers": 3, "num_heads": 2, "intermediate_size": 64, "vocab_size": 14}


def config(window: int, micro: int, *more: str) -> str:
    return config_text(
        *PLAIN,
        "strategy=fsdp",
        *[f"model.{name}={value}" for name, value in SIZES.items()],
        *("task.vocab_size=14", "task.bos=13", "data=custom", "data.train._target_=toys.Sequences"),
        f"batch.global_batch_size={window}",
        f"batch.micro_batch_size={micro}",
        "training.duration=5 updates",
        *more,
    )


def traffic(rank: int, world_size: int, text: str) -> list[dict[str, list[int]]]:
    """For two windows the elements of each gradient that is reduced among shards, and among copies of them."""
    fit = assembled(rank, world_size, text)
    found = []
    for update in (1, 2):
        window = fit.windows.get(update)
        events = travelled(partial(fit.runner.run, window))
        shards = [size for name, size in events if name == "_reduce_scatter_base_"]
        copies = [size for name, size in events if name == "allreduce_"]
        found.append({"shards": shards, "copies": copies})
        fit.sharding.clear_gradients()
    return found


@pytest.mark.parametrize(
    ("degree", "more", "times", "copies"),
    [
        (2, ["strategy.reduce_each=window"], 1, 0),
        (2, ["strategy.reduce_each=micro_batch"], 4, 0),
        (2, [], 4, 0),
        (4, ["mesh.dp_replicate=2"], 2, 1),
        (4, ["mesh.dp_replicate=2", "strategy.reduce_each=window"], 1, 1),
    ],
)
def test_gradients_travel_as_often_as_the_plan_says(
    ranks: Any, degree: int, more: list[str], times: int, copies: int
) -> None:
    elements = sum(one.numel() for one in GPT(**SIZES).parameters())
    for of_rank in ranks.run(traffic, config(8, 1, *more), world_size=degree):
        for window in of_rank:
            # three layers and what lies outside them, each a collective of its own; odd rows are filled up
            assert len(window["shards"]) == 4 * times
            assert elements * times <= sum(window["shards"]) < 1.1 * elements * times
            assert len(window["copies"]) == 4 * copies
            assert elements / 2 * copies <= sum(window["copies"]) < 0.6 * elements * max(copies, 1e-9)
    assert plans(config(8, 1, *more), degree)["reductions_per_window"] == times


def plans(text: str, degree: int) -> dict[str, Any]:
    return make_plan(parse(text), Facts(samples=17, knows_lengths=True), world=World(1, degree, Device.cpu)).to_dict()


@pytest.mark.parametrize(("degree", "more"), [(2, []), (3, []), (4, ["mesh.dp_replicate=2"])])
def test_no_bit_depends_on_earlier_windows(ranks: Any, degree: int, more: list[str]) -> None:
    text = config(5, 1, "model.dropout=0.3", *more)
    whole = ranks.run(gradients_from, text, 1, 4, world_size=degree)
    later = ranks.run(gradients_from, text, 4, 4, world_size=degree)
    for one, other in zip(whole, later, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_validation_of_fewer_samples_than_ranks(ranks: Any) -> None:
    """A forward is collective, so ranks without samples of their own take part with one that doesn't count."""
    more = ["training.validate_every=2", "optimizer.lr=0.01"]
    texts = [config(7, 2, *more, f"data.validation={{_target_: toys.Sequences, count: {n}}}") for n in (1, 4, 17)]
    (alone,) = ranks.run(trained, texts, world_size=1)
    for of_rank in ranks.run(trained, texts, world_size=3):
        for mine, expected in zip(of_rank, alone, strict=True):
            assert mine["validations"] == [2, 4, 5]
            assert mine["validation"].loss == pytest.approx(expected["validation"].loss, rel=1e-6)
            assert mine["validation"].metrics == pytest.approx(expected["validation"].metrics, rel=1e-6)


def starts(rank: int, world_size: int, text: str) -> tuple[dict[str, Tensor], bool]:
    """The state before the first update, and whether the model was ever without numbers."""
    deferred = any(one.is_meta for one in defer_model(parse(text))[0].parameters())
    return assembled(rank, world_size, text).sharding.full_state(), deferred


LARGE = ["model.hidden_size=64", "model.intermediate_size=100", "model.vocab_size=300", "model.tie_head=false"]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_first_weights_are_those_of_an_ordinary_start(ranks: Any, dtype: str) -> None:
    torch.manual_seed(11)
    sizes = {**SIZES, "hidden_size": 64, "intermediate_size": 100, "vocab_size": 300}
    expected = GPT(**sizes, tie_head=False, dtype=dtype).state_dict()
    for state, deferred in ranks.run(
        starts, config(8, 1, "run.seed=11", *LARGE, f"+model.dtype={dtype}"), world_size=3
    ):
        assert deferred
        assert state.keys() == expected.keys()
        assert [name for name, value in expected.items() if not torch.equal(state[name], value)] == []


def test_weights_from_a_file_reach_a_model_that_is_never_whole(ranks: Any, tmp_path: Any) -> None:
    torch.manual_seed(5)
    sizes = {**SIZES, "hidden_size": 64, "intermediate_size": 100, "vocab_size": 300}
    expected = {name: value.clone() for name, value in GPT(**sizes).state_dict().items()}
    save_file(expected, tmp_path / "weights.safetensors")
    text = config(8, 1, *LARGE[:3], f"+model_weights={tmp_path}/weights.safetensors")
    for state, deferred in ranks.run(starts, text, world_size=2):
        assert deferred
        assert [name for name, value in expected.items() if not torch.equal(state[name], value)] == []


class SharedBlocks(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        self.layers[1].weight = self.layers[0].weight  # type: ignore[assignment]

    def forward(self, rows: Tensor) -> Tensor:
        return self.layers[1](self.layers[0](rows))  # type: ignore[no-any-return]


class Odd(nn.Module):
    """Models that can't be divided, each for a reason of its own."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        if kind == "scalar":
            self.scale = nn.Parameter(torch.ones(()))
        if kind == "empty":
            self.nothing = nn.Parameter(torch.ones(0, 3))
        if kind == "hook":
            self.layers[0].weight.register_hook(lambda gradient: gradient * 0.1)
        if kind == "held":
            self.kept = [self.layers[1].bias]
        if kind == "lstm":  # keeps such a list, and keeps it up to date
            self.recurrent = nn.LSTM(2, 2)


ODD = [
    ("scalar", "fsdp", "'scale', which is a single number"),
    ("scalar", "zero2", "'scale', which is a single number"),
    ("empty", "zero1", "'nothing', which is empty"),
    ("hook", "fsdp", "the gradient hook of 'layers.0.weight' would be lost"),
    ("held", "fsdp", "'kept' would still hold 'layers.1.bias'"),
    ("held", "zero3", "'kept' would still hold 'layers.1.bias'"),
]


@pytest.mark.parametrize(("kind", "strategy", "said"), ODD)
def test_what_cannot_be_divided_is_refused_before_a_rank_starts(kind: str, strategy: str, said: str) -> None:
    settings = parse(config_text(f"strategy={strategy}"))
    with pytest.raises(ConfigError, match=said):
        check_blocks(Odd(kind), settings.strategy)
    check_blocks(Odd(kind), parse(config_text("strategy=ddp")).strategy)


def test_what_can_be_is_not() -> None:
    for kind in ("lstm", "plain"):
        check_blocks(Odd(kind), parse(config_text("strategy=fsdp")).strategy)
    with pytest.raises(ConfigError, match="'layers' has no forward of its own"):
        check_blocks(Odd("plain"), parse(config_text("strategy=fsdp", "strategy.wrap=[ModuleList]")).strategy)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ([], "layers.1.weight is the same parameter as layers.0.weight"),
        (["strategy.wrap=[Lineal]"], "strategy.wrap=Lineal: no module of the model has this class\n.*'Linear'"),
    ],
)
def test_blocks_that_cannot_be_sharded_apart_are_refused(more: list[str], said: str) -> None:
    text = config_text(*own("test_fsdp.SharedBlocks", "toys.Same", "toys.Masked"), "strategy=fsdp", *more)
    settings = parse(text)
    model, _ = defer_model(settings)
    with pytest.raises(ConfigError, match=said):
        gather_facts(settings, Parts(model, build_task(settings), Network(), None))
