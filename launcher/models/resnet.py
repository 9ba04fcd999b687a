"""Residual networks for images that can be cut into stages, sharded and checkpointed block by block."""

from collections.abc import Callable, Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from launcher.errors import ConfigError

BLOCKS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3)}
"""Blocks of each stage by depth (He et al. 2015, arXiv:1512.03385, table 1)."""
EXPANSION = 4
"""How many times wider the output of a bottleneck is than its 3x3 convolution."""

Norm = Callable[[int], nn.Module]


class ResNet(nn.Module):
    """A residual network; with depth 50 the stride of a block is in its 3x3 convolution (the variant named v1.5).

    The plain model is `head(layers(embed(x)))`, and what flows between the blocks is one tensor [rows, C, H, W].

    Sources: He et al. 2015 (arXiv:1512.03385) for the network and its stem for small images (section 4.2), He et al.
    2015 (arXiv:1502.01852) for the initial weights, Wu and He 2018 for group norm, Goyal et al. 2017, section 5.1, for
    branches that start at zero.

    Args:
        depth: 18 and 34 have two 3x3 convolutions a block, 50 has bottlenecks.
        num_classes: width of the output.
        in_channels: 3 for colours, 1 for grey.
        width: channels of the first of four stages; each further one has twice as many.
        stem: `imagenet` begins with a 7x7 convolution and a pool that make the image four times smaller each way,
            `cifar` with a 3x3 convolution that leaves its size.
        strides: by how much each stage makes the image smaller; [1, 2, 2, 2] as published.
        norm: `batch`, whose statistics couple the rows of a micro-batch, or `group`, which treats each row by itself.
        norm_groups: groups of the group norm; divides `width`.
        zero_init_last_gamma: the last norm of every block starts at zero, so that the block starts as the identity.
    """

    def __init__(
        self,
        depth: int,
        num_classes: int,
        in_channels: int = 3,
        width: int = 64,
        stem: str = "imagenet",
        strides: Sequence[int] = (1, 2, 2, 2),
        norm: str = "batch",
        norm_groups: int = 32,
        zero_init_last_gamma: bool = False,
    ) -> None:
        super().__init__()
        _check(depth=depth, stem=stem, norm=norm, strides=strides)
        for name, size in (("num_classes", num_classes), ("in_channels", in_channels), ("width", width)):
            if size < 1:
                raise ConfigError(f"model.{name}", size, "must be at least 1")
        new_norm: Norm = nn.BatchNorm2d
        if norm == "group":
            if norm_groups < 1 or width % norm_groups:
                raise ConfigError("model.norm_groups", norm_groups, f"must divide model.width={width}")

            def new_norm(channels: int) -> nn.Module:
                return nn.GroupNorm(norm_groups, channels)

        self.zero_init_last_gamma = zero_init_last_gamma
        self.stem = _stem(stem, in_channels, width, new_norm)
        block = Bottleneck if depth >= 50 else BasicBlock
        blocks, channels = [], width
        for stage, count in enumerate(BLOCKS[depth]):
            for index in range(count):
                stride = strides[stage] if index == 0 else 1
                blocks.append(block(channels, width << stage, stride, new_norm))
                channels = blocks[-1].out_channels
        self.layers = nn.ModuleList(blocks)
        self.classifier = nn.Linear(channels, num_classes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws every parameter of the model again, in a fixed order, from torch's global generator alone."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, nn.BatchNorm2d | nn.GroupNorm | nn.Linear):
                module.reset_parameters()
        if self.zero_init_last_gamma:
            for block in self.layers:
                assert isinstance(block, BasicBlock | Bottleneck)
                block.zero_last_gamma()

    def embed(self, x: Tensor) -> Tensor:
        """[rows, in_channels, H, W] -> [rows, width, H', W'], H' = H / 4 for the imagenet stem, H for that of cifar."""
        hidden: Tensor = self.stem(x)
        return hidden

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [rows, num_classes] of what the last block gives, [rows, C, H, W]."""
        logits: Tensor = self.classifier(hidden.mean(dim=(2, 3)))
        return logits

    def forward(self, x: Tensor) -> Tensor:
        """Logits [rows, num_classes] of images [rows, in_channels, H, W]."""
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions, added to what came in."""

    def __init__(self, in_channels: int, channels: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.out_channels = channels
        self.conv1 = _conv(in_channels, channels, 3, stride)
        self.norm1 = norm(channels)
        self.conv2 = _conv(channels, channels, 3)
        self.norm2 = norm(channels)
        self.shortcut = _shortcut(in_channels, channels, stride, norm)

    def zero_last_gamma(self) -> None:
        """Makes the block begin as its shortcut alone."""
        _zero_gamma(self.norm2)

    def forward(self, hidden: Tensor) -> Tensor:
        """[rows, in_channels, H, W] -> [rows, channels, H / stride, W / stride]."""
        branch = F.relu(self.norm1(self.conv1(hidden)))
        return F.relu(self.norm2(self.conv2(branch)) + self.shortcut(hidden))


class Bottleneck(nn.Module):
    """A 1x1, a 3x3 and a 1x1 convolution, added to what came in; the 3x3 carries the stride."""

    def __init__(self, in_channels: int, channels: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.out_channels = EXPANSION * channels
        self.conv1 = _conv(in_channels, channels, 1)
        self.norm1 = norm(channels)
        self.conv2 = _conv(channels, channels, 3, stride)
        self.norm2 = norm(channels)
        self.conv3 = _conv(channels, self.out_channels, 1)
        self.norm3 = norm(self.out_channels)
        self.shortcut = _shortcut(in_channels, self.out_channels, stride, norm)

    def zero_last_gamma(self) -> None:
        """Makes the block begin as its shortcut alone."""
        _zero_gamma(self.norm3)

    def forward(self, hidden: Tensor) -> Tensor:
        """[rows, in_channels, H, W] -> [rows, 4 channels, H / stride, W / stride]."""
        branch = F.relu(self.norm1(self.conv1(hidden)))
        branch = F.relu(self.norm2(self.conv2(branch)))
        return F.relu(self.norm3(self.conv3(branch)) + self.shortcut(hidden))


def _conv(in_channels: int, channels: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(in_channels, channels, size, stride, padding=size // 2, bias=False)


def _stem(kind: str, in_channels: int, width: int, norm: Norm) -> nn.Sequential:
    if kind == "cifar":
        return nn.Sequential(_conv(in_channels, width, 3), norm(width), nn.ReLU())
    return nn.Sequential(_conv(in_channels, width, 7, 2), norm(width), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1))


def _shortcut(in_channels: int, channels: int, stride: int, norm: Norm) -> nn.Module:
    if stride == 1 and in_channels == channels:
        return nn.Identity()
    return nn.Sequential(_conv(in_channels, channels, 1, stride), norm(channels))


def _zero_gamma(norm: nn.Module) -> None:
    assert isinstance(norm.weight, Tensor)
    nn.init.zeros_(norm.weight)


def _check(*, depth: int, stem: str, norm: str, strides: Sequence[int]) -> None:
    for name, given, allowed in (
        ("depth", depth, tuple(BLOCKS)),
        ("stem", stem, ("imagenet", "cifar")),
        ("norm", norm, ("batch", "group")),
    ):
        if given not in allowed:
            raise ConfigError(f"model.{name}", given, f"must be one of {', '.join(map(str, allowed))}")
    if len(strides) != len(BLOCKS[depth]) or min(strides) < 1:
        raise ConfigError(
            "model.strides", list(strides), "must be four whole numbers of at least 1, one for each stage"
        )
