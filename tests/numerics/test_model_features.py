"""What models have beside plain parameters, right under every way of spreading them: parts that a window doesn't touch,
frozen and tied parameters, several types, buffers, dropout, batch norm, windows that are skipped."""

from typing import Any

import plain
import pytest
import torch
from configs import PLAIN, config_text, own
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from toys import assembled, trained

from launcher.errors import LauncherError

pytestmark = pytest.mark.slow

STRATEGIES = {
    "ddp": (2, ["strategy=ddp"]),
    "fsdp": (3, ["strategy=fsdp"]),
    "fsdp each window": (2, ["strategy=fsdp", "strategy.reduce_each=window"]),
    "hsdp": (4, ["strategy=fsdp", "mesh.dp_replicate=2"]),
}
RECOMPUTE = ["none", "full", "selective"]


class Block(nn.Module):
    """One layer of a small network, with a buffer that its forward changes after use."""

    scale: Tensor

    def __init__(self, width: int, dropout: float, norm: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, dtype=dtype)
        self.norm = nn.BatchNorm1d(width) if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.gain = nn.Parameter(torch.ones(width, dtype=torch.float64))  # another type than the rest
        self.register_buffer("scale", torch.tensor(1.0))

    def forward(self, hidden: Tensor) -> Tensor:
        out = hidden + torch.tanh(self.linear(self.dropout(self.norm(hidden)))) * self.scale
        if self.training:
            self.scale = self.scale * 0.5
        return (out * self.gain).to(hidden.dtype)


class Network(nn.Module):
    """Layers with a frozen one, a head tied to the first weight, and a parameter that nothing touches."""

    def __init__(self, dropout: float = 0.0, norm: bool = False, width: int = 5, double: bool = False) -> None:
        super().__init__()
        dtype = torch.float64 if double else torch.float32
        self.first = nn.Linear(width, width, bias=False, dtype=dtype)
        self.layers = nn.ModuleList(Block(width, dropout, norm, dtype) for _ in range(3))
        self.layers[1].requires_grad_(False)
        self.head = nn.Linear(width, width, dtype=dtype)
        self.head.weight = self.first.weight
        self.unused = nn.Parameter(torch.ones(7, dtype=dtype))

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.first(rows.to(self.first.weight.dtype))
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden).square()  # type: ignore[no-any-return]


class Vectors:
    """Rows of random numbers."""

    def __init__(self, count: int = 22, width: int = 5, broken: int | None = None) -> None:
        self.rows = torch.randn(count, width, generator=torch.Generator().manual_seed(2))
        if broken is not None:
            self.rows[broken] = float("nan")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> list[float]:
        return self.rows[index].tolist()


def config(*more: str) -> str:
    return config_text(
        *PLAIN,
        *own("test_model_features.Network", "toys.Same", "test_model_features.Vectors"),
        "batch.global_batch_size=8",
        "batch.micro_batch_size=2",
        "training.duration=4 updates",
        "training.max_grad_norm=0.5",
        "optimizer.lr=0.1",
        "optimizer.momentum=0.9",
        "optimizer.weight_decay=0.01",
        *more,
    )


def same_on_all_ranks(found: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    for of_rank in found[1:]:
        for mine, other in zip(found[0], of_rank, strict=True):
            assert all(torch.equal(value, other["state"][name]) for name, value in mine["state"].items())
    return found[0]


@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_frozen_tied_unused_and_several_types(ranks: Any, strategy: str) -> None:
    degree, overrides = STRATEGIES[strategy]
    torch.manual_seed(0)
    expected = Network(double=True)
    frozen = {name: one.clone() for name, one in expected.named_parameters() if not one.requires_grad}
    trainable = [one for one in expected.parameters() if one.requires_grad]
    optimizer = torch.optim.SGD(trainable, 0.1, momentum=0.9, weight_decay=0.01)
    losses = []
    for start, stop in [(0, 8), (8, 16), (16, 22), (0, 8)]:
        rows = torch.tensor([Vectors()[i] for i in range(start, stop)])
        for layer in expected.layers:
            layer.scale = torch.tensor(1.0)  # type: ignore[assignment]
        # each micro-batch of a window meets its own scales, so the buffers are left out of this comparison
        optimizer.zero_grad()
        expected.eval()
        loss = expected(rows).sum() / len(rows)
        loss.backward()
        expected.unused.grad = torch.zeros_like(expected.unused)
        assert torch.nn.utils.clip_grad_norm_(trainable, 0.5) > 1
        optimizer.step()
        losses.append(loss.item())
    calm = [*overrides, "+model.double=true", "model._target_=test_model_features.Calm"]
    texts = [config(*calm, f"activation_checkpoint={one}") for one in RECOMPUTE]
    for run in same_on_all_ranks(ranks.run(trained, texts, world_size=degree)):
        state, reference = run["state"], expected.state_dict()
        assert {k: (v.shape, v.dtype) for k, v in state.items()} == {
            k: (v.shape, v.dtype) for k, v in reference.items()
        }
        assert plain.largest_difference(state, dict(reference)) <= 1e-12
        assert all(torch.equal(state[name], value) for name, value in frozen.items())
        assert torch.equal(state["head.weight"], state["first.weight"])
        assert float(state["unused"].max()) < 1  # its weight decay went on
        assert [line["loss"] for line in run["lines"]] == pytest.approx(losses, rel=1e-12)


class Calm(Network):
    """The network whose buffers stay as they are."""

    def train(self, mode: bool = True) -> "Calm":
        return super().train(False)


@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_recomputation_changes_no_bit(ranks: Any, strategy: str) -> None:
    """E01, E04, D06: dropout draws the same mask again, batch norm counts once, buffers are those of the forward."""
    degree, overrides = STRATEGIES[strategy]
    more = [*overrides, "+model.dropout=0.5", "+model.norm=true", "batch.global_batch_size=24", "+data.train.count=24"]
    texts = [config(*more, f"activation_checkpoint={one}") for one in RECOMPUTE]
    texts.append(config(*more, "activation_checkpoint=selective", "activation_checkpoint.every=2"))
    texts.append(config(*more, "activation_checkpoint=full", "activation_checkpoint.offload=true"))
    kept, *others = same_on_all_ranks(ranks.run(trained, texts, world_size=degree))
    steps = 24 // degree // 2
    assert int(kept["state"]["layers.0.norm.num_batches_tracked"]) == 4 * steps
    for other in others:
        assert [line["loss"] for line in other["lines"]] == [line["loss"] for line in kept["lines"]]
        assert [name for name, value in kept["state"].items() if not torch.equal(value, other["state"][name])] == []


@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_a_window_that_is_not_finite_changes_nothing_on_any_rank(ranks: Any, strategy: str) -> None:
    degree, overrides = STRATEGIES[strategy]
    after = config(*overrides, "+data.train.broken=3", "training.duration=1 updates")
    before = config(*overrides, "+data.train.broken=3", "training.duration=1 updates", "optimizer.lr=0")
    skipped, untouched = same_on_all_ranks(ranks.run(trained, [after, before], world_size=degree))
    assert [line["skipped"] for line in skipped["lines"]] == [True]
    torch.manual_seed(0)
    for name, value in Network().state_dict().items():
        assert torch.equal(skipped["state"][name], value), name
        assert torch.equal(untouched["state"][name], value), name


@pytest.mark.parametrize("strategy", list(STRATEGIES))
@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_bf16_under_every_strategy(ranks: Any, strategy: str, recompute: str) -> None:
    """E02: the losses are those of bf16 on one rank without recomputation, to the 8 bits of its products."""
    degree, overrides = STRATEGIES[strategy]
    sizes = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "intermediate_size": 24, "vocab_size": 14}
    text = [
        *PLAIN,
        *[f"model.{name}={value}" for name, value in sizes.items()],
        "task.vocab_size=14",
        "task.bos=13",
        "data=custom",
        "data.train._target_=toys.Sequences",
        "batch.global_batch_size=7",
        "batch.micro_batch_size=2",
        "precision=bf16",
        "training.duration=5 updates",
        "optimizer.lr=0.5",
    ]
    ((alone,),) = ranks.run(trained, [config_text(*text)], world_size=1)
    found = ranks.run(
        trained, [config_text(*text, *overrides, f"activation_checkpoint={recompute}")], world_size=degree
    )
    (run,) = same_on_all_ranks(found)
    losses = [line["loss"] for line in run["lines"]]
    assert losses == pytest.approx([line["loss"] for line in alone["lines"]], rel=1e-2)
    assert all(value.dtype is torch.float32 for value in run["state"].values())


def kinds(rank: int, world_size: int, text: str) -> tuple[str, int, list[str]]:
    """The sharding that a configuration gets, this rank's elements of the parameters, and the class of its model."""
    sharding = assembled(rank, world_size, text).sharding
    local = [getattr(one, "_local_tensor", one) for one in sharding.parameters]
    return type(sharding).__name__, sum(one.numel() for one in local), [type(one).__name__ for one in [sharding.model]]


def test_every_strategy_is_the_one_that_was_asked_for(ranks: Any) -> None:
    whole = sum(one.numel() for one in Network().parameters() if one.requires_grad)
    assert ranks.run(kinds, config("strategy=ddp"), world_size=2)[0][:2] == ("DataParallel", whole)
    name, elements, wrapped = ranks.run(kinds, config("strategy=fsdp"), world_size=2)[0]
    assert (name, wrapped) == ("FullyShard", ["FSDPNetwork"])
    assert whole / 2 <= elements < 0.65 * whole  # rows are shared out, and 5 rows don't halve
    _, elements, _ = ranks.run(kinds, config("strategy=fsdp", "mesh.dp_replicate=2"), world_size=4)[0]
    assert whole / 2 <= elements < 0.65 * whole


class Hooked(Calm):
    """A tenth of a gradient, by a user's hook; a part of the model is run again by torch's reentrant checkpoint."""

    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.first.weight.register_hook(lambda gradient: gradient * 0.1)
        self.reentrant = reentrant

    def forward(self, rows: Tensor) -> Tensor:
        if not self.reentrant:
            return super().forward(rows)
        hidden = self.first(rows)
        return checkpoint(self.head, hidden, use_reentrant=True).square()  # type: ignore[no-any-return]


def test_a_gradient_hook_works_under_ddp(ranks: Any) -> None:
    text = config("strategy=ddp", "model._target_=test_model_features.Hooked", "batch.layout=arrival")
    one = config("strategy=ddp", "model._target_=test_model_features.Hooked", "batch.micro_batch_size=8")
    (mine,) = same_on_all_ranks(ranks.run(trained, [text], world_size=2))
    ((alone,),) = ranks.run(trained, [one], world_size=1)
    assert plain.largest_difference(mine["state"], alone["state"]) <= 1e-6
    (without,) = same_on_all_ranks(
        ranks.run(trained, [config("model._target_=test_model_features.Calm")], world_size=2)
    )
    assert plain.largest_difference(mine["state"], without["state"]) > 1e-3


def test_a_reentrant_checkpoint_of_the_users_is_named(ranks: Any) -> None:
    text = config("strategy=ddp", "model._target_=test_model_features.Hooked", "+model.reentrant=true")
    with pytest.raises(LauncherError, match="use_reentrant=False"):
        ranks.run(trained, [text], world_size=2)
