"""What is learned: how samples become a batch, and the model's output a loss."""

from launcher.tasks.base import Batch, HasLength, HasMetrics, HasTargetCounts, Task
from launcher.tasks.causal_lm import CausalLM
from launcher.tasks.classification import Classification

__all__ = ["Batch", "CausalLM", "Classification", "HasLength", "HasMetrics", "HasTargetCounts", "Task"]
