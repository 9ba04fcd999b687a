"""The residual network: its size, its parts, its norms, and what it refuses."""

import pytest
import torch
from torch import nn

from launcher.errors import ConfigError
from launcher.models import ResNet
from launcher.models.resnet import Bottleneck

SMALL = {"num_classes": 5, "in_channels": 1, "width": 8, "stem": "cifar", "norm_groups": 4}


def parameters(model):
    return sum(one.numel() for one in model.parameters())


@pytest.mark.parametrize(("depth", "expected"), [(18, 11_689_512), (34, 21_797_672), (50, 25_557_032)])
def test_published_sizes(depth, expected):
    with torch.device("meta"):
        assert parameters(ResNet(depth, 1000)) == expected
        assert parameters(ResNet(depth, 1000, norm="group")) == expected


@pytest.mark.parametrize(("stem", "sides"), [("imagenet", [16, 16, 8, 4, 2]), ("cifar", [64, 64, 32, 16, 8])])
@pytest.mark.parametrize("depth", [18, 50])
def test_each_stage_halves_the_image(stem, sides, depth):
    model = ResNet(depth, 3, width=4, stem=stem)
    hidden = model.embed(torch.zeros(2, 3, 64, 64))
    shapes = [hidden.shape]
    for layer in model.layers:
        hidden = layer(hidden)
        shapes.append(hidden.shape)
    assert list(dict.fromkeys(shape[2] for shape in shapes)) == list(dict.fromkeys(sides))
    assert hidden.shape == (2, 32 * (4 if depth == 50 else 1), sides[-1], sides[-1])
    assert model.head(hidden).shape == (2, 3)


def test_forward_is_head_of_layers_of_embed():
    model = ResNet(18, **SMALL).eval()
    x = torch.randn(3, 1, 8, 8)
    hidden = model.embed(x)
    for layer in model.layers:
        hidden = layer(hidden)
    assert torch.equal(model(x), model.head(hidden))


def test_the_stride_of_a_bottleneck_is_in_its_3x3():
    strides = {
        (block.conv1.stride[0], block.conv2.stride[0], block.conv3.stride[0])
        for block in ResNet(50, 10, width=8).layers
    }
    assert strides == {(1, 1, 1), (1, 2, 1)}
    assert all(isinstance(block, Bottleneck) for block in ResNet(50, 10, width=8).layers)


def test_rows_influence_one_another_under_batch_norm_alone():
    torch.manual_seed(0)
    x = torch.randn(4, 1, 8, 8)
    group = ResNet(18, norm="group", **SMALL)
    assert not any(isinstance(one, nn.BatchNorm2d) for one in group.modules())
    assert torch.allclose(group(x)[:1], group(x[:1]), atol=1e-5)
    batch = ResNet(18, **SMALL)
    assert not any(isinstance(one, nn.GroupNorm) for one in batch.modules())
    assert not torch.allclose(batch(x)[:2], batch(x[:2]), atol=1e-2)


def test_initial_weights():
    torch.manual_seed(0)
    model = ResNet(18, 10, width=64)
    weight = model.layers[0].conv1.weight.detach()
    assert float(weight.std()) == pytest.approx((2 / (64 * 9)) ** 0.5, rel=0.02)
    assert float(weight.mean()) == pytest.approx(0, abs=1e-3)
    torch.manual_seed(0)
    with torch.device("meta"):
        later = ResNet(18, 10, width=64)
    later.to_empty(device="cpu")
    torch.manual_seed(0)
    later.reset_parameters()
    torch.manual_seed(0)
    model.reset_parameters()
    for (name, one), other in zip(model.state_dict().items(), later.state_dict().values(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.parametrize("depth", [18, 50])
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_blocks_that_start_as_the_identity(depth, norm):
    model = ResNet(depth, norm=norm, zero_init_last_gamma=True, **SMALL)
    hidden = torch.rand(2, 32 if depth == 50 else 8, 8, 8)
    assert torch.equal(model.layers[1](hidden), hidden)
    assert not torch.equal(ResNet(depth, norm=norm, **SMALL).layers[1](hidden), hidden)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"depth": 19}, "model.depth=19: must be one of 18, 34, 50"),
        ({"stem": "mnist"}, "model.stem=mnist: must be one of imagenet, cifar"),
        ({"norm": "layer"}, "model.norm=layer: must be one of batch, group"),
        ({"norm": "group", "norm_groups": 3}, "model.norm_groups=3: must divide model.width=8"),
        ({"width": 0}, "model.width=0"),
        ({"num_classes": 0}, "model.num_classes=0"),
        ({"strides": [1, 2]}, r"model.strides=\[1, 2\]: must be four"),
    ],
)
def test_arguments_that_cannot_work(arguments, message):
    with pytest.raises(ConfigError, match=message):
        ResNet(**{"depth": 18, **SMALL, **arguments})
