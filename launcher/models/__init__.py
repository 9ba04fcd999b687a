"""Models that can be trained without a line of one's own."""

from launcher.models.gpt import GPT
from launcher.models.resnet import ResNet

__all__ = ["GPT", "ResNet"]
