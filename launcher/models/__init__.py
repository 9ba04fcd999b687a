"""Models that can be trained without a line of one's own."""

from launcher.models.gpt import GPT

__all__ = ["GPT"]
