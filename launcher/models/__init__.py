"""Models that can be trained without a line of one's own."""

from launcher.models.gpt import GPT
from launcher.models.hf import hf_causal_lm
from launcher.models.resnet import ResNet

__all__ = ["GPT", "ResNet", "hf_causal_lm"]
