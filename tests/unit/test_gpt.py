"""The transformer: its parts in order, what each position sees, and where its weights come from."""

import inspect
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from omegaconf import OmegaConf

from launcher.errors import ConfigError
from launcher.models import GPT
from launcher.models.gpt import rotary_tables, rotate
from launcher.tasks import CausalLM

SIZES = {"hidden_size": 16, "num_layers": 3, "num_heads": 2, "intermediate_size": 24, "dtype": "float64"}


def model(seed=0, **changes):
    torch.manual_seed(seed)
    return GPT(**{**SIZES, **changes})


def tokens(rows, length):
    return torch.randint(0, 256, (rows, length), generator=torch.Generator().manual_seed(1))


def test_forward_is_head_of_layers_of_embed():
    gpt, x = model(), tokens(2, 7)
    hidden = gpt.embed(x)
    assert hidden.shape == (2, 7, 16)
    for layer in gpt.layers:
        hidden = layer(hidden)
        assert hidden.shape == (2, 7, 16)
    assert torch.equal(gpt(input_ids=x), gpt.head(hidden))
    assert gpt(x).shape == (2, 7, 257)


def test_no_position_sees_a_later_one():
    gpt, x = model(), tokens(1, 12)
    changed = x.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 256
    first, second = gpt(x), gpt(changed)
    torch.testing.assert_close(first[0, :7], second[0, :7], rtol=0, atol=1e-14)
    assert ((first - second)[0, 7:].abs().amax(dim=-1) > 1e-9).all()


def test_position_matters():
    out = model()(torch.tensor([[5, 6, 7], [6, 5, 7]]))
    assert (out[0, 2] - out[1, 2]).abs().max() > 1e-9


def test_rotation_is_that_of_complex_numbers_and_only_distance_counts():
    cos, sin = rotary_tables(9, 8, torch.float64, torch.device("cpu"))
    x = torch.randn(9, 8, dtype=torch.float64)
    turned = rotate(x, cos, sin)
    for position in range(9):
        for pair in range(4):
            angle = position * 10_000 ** (-2 * pair / 8)
            expected = complex(x[position, pair], x[position, pair + 4]) * complex(math.cos(angle), math.sin(angle))
            got = complex(turned[position, pair], turned[position, pair + 4])
            assert abs(got - expected) < 1e-12
    same = rotate(x[:1].expand(9, 8), cos, sin)
    scores = same @ same.T
    torch.testing.assert_close(scores[0, 3], scores[5, 8], rtol=1e-12, atol=1e-12)


def test_a_layer_against_its_formula():
    gpt, x = model(num_layers=1), tokens(2, 5)
    layer = gpt.layers[0]

    def norm(values):
        return values / (values.square().mean(-1, keepdim=True) + torch.finfo(values.dtype).eps).sqrt()

    hidden = gpt.embed(x)
    query, key, value = (norm(hidden) @ layer.query_key_value.weight.T).view(2, 5, 3, 2, 8).unbind(2)
    cos, sin = rotary_tables(5, 8, torch.float64, torch.device("cpu"))
    query, key = (rotate(t.transpose(1, 2), cos, sin) for t in (query, key))
    scores = (query @ key.transpose(-1, -2) / math.sqrt(8)).masked_fill(~torch.ones(5, 5).tril().bool(), -math.inf)
    mixed = (scores.softmax(-1) @ value.transpose(1, 2)).transpose(1, 2).reshape(2, 5, 16)
    after = hidden + mixed @ layer.attention_output.weight.T
    gate, up = (norm(after) @ layer.gate_and_up.weight.T).split(24, -1)
    expected = after + (gate * torch.sigmoid(gate) * up) @ layer.down.weight.T
    torch.testing.assert_close(layer(hidden), expected, rtol=1e-10, atol=1e-12)


def test_loss_and_gradient_of_padded_rows_are_the_sums_of_the_rows_alone():
    gpt, task = model(), CausalLM()
    samples = [b"def f(x):\n    return x", b"class A: pass", b"x"]
    losses = task.loss(gpt(**task.inputs(batch := task.collate(samples))), batch)
    losses.sum().backward()
    together = [parameter.grad.clone() for parameter in gpt.parameters()]
    gpt.zero_grad()
    for index, sample in enumerate(samples):
        batch = task.collate([sample])
        alone = task.loss(gpt(**task.inputs(batch)), batch)
        torch.testing.assert_close(losses[index : index + 1], alone, rtol=1e-12, atol=0)
        alone.sum().backward()
    for parameter, expected in zip(gpt.parameters(), together, strict=True):
        assert (parameter.grad - expected).norm() <= 1e-12 * expected.norm()


def test_a_tied_head_is_one_tensor_with_two_names():
    tied, untied = model(tie_head=True), model(tie_head=False)
    assert tied.lm_head.weight is tied.token_embedding.weight
    assert {"lm_head.weight", "token_embedding.weight"} <= tied.state_dict().keys()
    assert tied.state_dict().keys() == untied.state_dict().keys()
    assert len(list(untied.parameters())) == len(list(tied.parameters())) + 1


def test_weights_come_from_the_seed_alone_and_can_be_drawn_again():
    first, second = model(seed=3).state_dict(), model(seed=3).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], model(seed=4).state_dict()["lm_head.weight"])


@pytest.mark.parametrize("tie_head", [True, False])
def test_from_the_meta_device(tie_head):
    with torch.device("meta"):
        gpt = GPT(**SIZES, tie_head=tie_head)
    gpt.to_empty(device="cpu")
    if tie_head:
        gpt.lm_head.weight = gpt.token_embedding.weight
    other = model(seed=9, tie_head=tie_head)
    for each in (gpt, other):
        torch.manual_seed(5)
        each.reset_parameters()
    assert not list(gpt.buffers())
    assert torch.equal(gpt(tokens(1, 5)), other(tokens(1, 5)))


def test_spread_of_the_initial_weights():
    torch.manual_seed(0)
    gpt = GPT(hidden_size=128, num_layers=8, num_heads=4, intermediate_size=256, tie_head=False)
    for name, parameter in gpt.named_parameters():
        if "norm" in name:
            assert (parameter == 1).all()
        else:
            std = 0.02 / 4 if name.endswith(("attention_output.weight", "down.weight")) else 0.02
            assert parameter.std().item() == pytest.approx(std, rel=0.03), name
    start = CausalLM().collate([bytes(range(256))])
    loss = CausalLM().loss(gpt(start["input_ids"]), start).item() / 256
    assert loss == pytest.approx(math.log(257), rel=0.02)


def test_dropout_follows_torchs_generator_and_rests_in_evaluation():
    gpt, x = model(dropout=0.5), tokens(1, 6)
    outputs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outputs.append(gpt(x))
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])
    gpt.eval()
    assert torch.equal(gpt(x), gpt(x))


def test_an_input_that_is_too_long_is_refused():
    gpt = model(max_length=4)
    assert gpt(tokens(1, 4)).shape == (1, 4, 257)
    with pytest.raises(ValueError, match=r"5 tokens is longer than model.max_length=4"):
        gpt(tokens(1, 5))


@pytest.mark.parametrize(
    "changes",
    [{"num_heads": 3}, {"num_heads": 16}, {"num_layers": 0}, {"dropout": 1.0}, {"dtype": "int64"}, {"dtype": "doubel"}],
)
def test_sizes_that_cannot_work(changes):
    with pytest.raises(ConfigError, match=f"model.{next(iter(changes))}="):
        model(**changes)


def test_the_default_model_is_about_a_million_parameters_and_repeats_no_default_wrongly():
    conf = OmegaConf.load(Path(__file__).parents[2] / "conf/model/gpt.yaml")
    assert conf.pop("_target_") == "launcher.models.GPT"
    for name, parameter in inspect.signature(GPT).parameters.items():
        if parameter.default is not inspect.Parameter.empty and name in conf:
            assert conf[name] == parameter.default, name
    gpt = GPT(**OmegaConf.to_container(conf))
    assert sum(parameter.numel() for parameter in gpt.parameters()) == pytest.approx(1e6, rel=0.15)


def test_half_precision_keeps_positions_apart():
    cos, _ = rotary_tables(512, 64, torch.bfloat16, torch.device("cpu"))
    exact, _ = rotary_tables(512, 64, torch.float64, torch.device("cpu"))
    assert cos.dtype == torch.bfloat16
    torch.testing.assert_close(cos.double(), exact, rtol=0, atol=4e-3)
    assert F.mse_loss(cos[510].double(), cos[511].double()) > 1e-3
