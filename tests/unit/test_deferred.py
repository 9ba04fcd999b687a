"""A model without memory gets the numbers of an ordinary start, whatever is asked for first."""

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from launcher.models import GPT
from launcher.train.deferred import CannotDefer, defer

SIZES = {"hidden_size": 96, "num_layers": 3, "num_heads": 4, "intermediate_size": 200}


class Parts(nn.Module):
    """What constructors do: views, copies, every initialisation, tensors made of others, buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(300, 50, padding_idx=0)
        self.recurrent = nn.LSTM(64, 64)
        self.convolution = nn.Conv2d(32, 64, 3)
        self.encoder = nn.TransformerEncoderLayer(64, 4)
        nn.init.orthogonal_(self.encoder.linear1.weight)
        nn.init.trunc_normal_(self.encoder.linear2.weight)  # draws again and again, until all are in range
        nn.init.trunc_normal_(self.encoder.linear1.weight, a=1.5, b=1.6)
        nn.init.kaiming_uniform_(self.convolution.weight)
        self.register_buffer("mask", torch.triu(torch.ones(100, 100), 1).bool())
        self.own = nn.Parameter(torch.randn(100, 100) * 0.02)
        self.made_of_it = nn.Parameter(self.own.detach().clone().t().contiguous() + 1)
        with torch.no_grad():
            self.made_of_it[3:7].zero_()
            self.made_of_it.data.mul_(2)
        self.small = nn.Parameter(torch.zeros(3))
        with torch.no_grad():
            self.small.copy_(self.own[0, :3])
        self.scale = self.own.detach().abs().max().item()
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(80, 80))
        self.spectral = nn.utils.spectral_norm(nn.Linear(80, 80))
        self.frozen = nn.Linear(80, 80).requires_grad_(False)
        self.last = nn.Parameter(torch.poisson(torch.full((100, 100), 3.0)))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tied": lambda: GPT(**SIZES),
    "untied float64": lambda: GPT(**SIZES, tie_head=False, dtype="float64"),
    "all kinds": Parts,
}


@pytest.mark.parametrize("name", list(MODELS))
def test_the_numbers_are_those_of_an_ordinary_start(name: str) -> None:
    torch.manual_seed(3)
    plain = MODELS[name]()
    after = torch.get_rng_state()
    torch.manual_seed(3)
    blueprint = defer(MODELS[name])
    assert torch.equal(torch.get_rng_state(), after)
    model = blueprint.model
    assert sum(one.is_meta for one in model.parameters()) >= 10
    for module in reversed(list(model.modules())):  # not in the order in which they were made
        blueprint.fill(module)
    assert torch.equal(torch.get_rng_state(), after)
    state, expected = model.state_dict(), plain.state_dict()
    assert state.keys() == expected.keys()
    assert [key for key, value in expected.items() if not torch.equal(state[key], value)] == []
    for (key, mine), (_, other) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert (mine.requires_grad, mine.dtype, mine.stride()) == (other.requires_grad, other.dtype, other.stride()), (
            key
        )
    for key in ("scale",):
        assert getattr(model, key, None) == getattr(plain, key, None)


def test_tied_parameters_stay_tied() -> None:
    blueprint = defer(lambda: GPT(**SIZES))
    blueprint.fill(blueprint.model)
    assert blueprint.model.lm_head.weight is blueprint.model.token_embedding.weight


def test_only_what_is_asked_for_has_memory() -> None:
    blueprint = defer(lambda: GPT(**SIZES))
    blueprint.fill(blueprint.model.layers[1])  # type: ignore[index]
    large = [one for one in blueprint.model.named_parameters() if one[1].numel() >= 4096]
    assert [name for name, one in large if not one.is_meta] == [
        name for name, _ in large if name.startswith("layers.1.")
    ]


class Refused(nn.Module):
    def __init__(self, make: Callable[[], Tensor]) -> None:
        super().__init__()
        self.w = nn.Parameter(make())


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: torch.randn(100, 100)[torch.randn(100, 100) > 0].float(), "nonzero"),
        (lambda: torch.randn(100, 100, generator=torch.Generator()), "generator of its own"),
        (lambda: torch.empty(100, 100, device="meta"), "'w' is made on the meta device by the model itself"),
    ],
)
def test_what_cannot_be_done_later_is_said(make: Callable[[], Tensor], why: str) -> None:
    with pytest.raises(CannotDefer, match=re.escape(why)):
        defer(lambda: Refused(make))
