"""What a task has to offer: the bridge between samples, the model's output and a loss that is a sum."""

from typing import Any, Protocol, runtime_checkable

from torch import Tensor

Batch = dict[str, Tensor]
"""The tensors of one micro-batch; the first dimension of each is its rows."""


@runtime_checkable
class Task(Protocol):
    """The methods that every task has. Nothing needs to be subclassed.

    A loss is a sum, never a mean: the launcher divides the sum over a whole window by the window's whole weight, once.
    """

    def collate(self, samples: list[Any]) -> Batch:
        """The batch of `samples`, one row each, in their order."""
        ...

    def inputs(self, batch: Batch) -> dict[str, Any]:
        """The keyword arguments that the model is called with."""
        ...

    def weight(self, batch: Batch) -> Tensor:
        """What each row counts, shape [rows]; from the batch alone, since it's needed before the first forward."""
        ...

    def loss(self, output: Any, batch: Batch) -> Tensor:
        """The sum of the losses of each row, shape [rows]."""
        ...


@runtime_checkable
class HasMetrics(Protocol):
    """A task with further numbers for validation."""

    def metrics(self, output: Any, batch: Batch) -> dict[str, Tensor]:
        """Name -> value of each row, shape [rows]; shown as averages by weight."""
        ...


@runtime_checkable
class HasLength(Protocol):
    """A task whose samples differ in cost."""

    def length(self, sample: Any) -> int:
        """The cost of a sample: its number of input tokens, or whatever stands for it."""
        ...


@runtime_checkable
class HasTargetCounts(Protocol):
    """A task whose targets are classes, so that the best constant guess is known."""

    def target_counts(self, batch: Batch) -> Tensor:
        """How often each class is a target in the batch, shape [num_classes]; adds up over batches."""
        ...
