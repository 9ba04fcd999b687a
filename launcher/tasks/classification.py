"""One class for each sample."""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from launcher.errors import ConfigError, DataError
from launcher.tasks.base import Batch


class Classification:
    """Names the class of a sample, which is a pair (x, y) or a dict of `x` and `y`; every sample counts 1.

    Args:
        num_classes: classes are in [0, num_classes); the model's output is [rows, num_classes].
    """

    loss_unit = "nats per sample"
    """What a loss is in, for the axis of a picture."""

    def __init__(self, num_classes: int) -> None:
        if num_classes < 1:
            raise ConfigError("task.num_classes", num_classes, "must be at least 1")
        self.num_classes = num_classes

    def collate(self, samples: list[Any]) -> Batch:
        """`x` float32 [rows, ...] and `y` int64 [rows].

        Raises:
            DataError: a class out of range, samples of different shapes, or no (x, y).
        """
        pairs = [_pair(sample, index) for index, sample in enumerate(samples)]
        labels = [self._label(y, index) for index, (_, y) in enumerate(pairs)]
        features = [torch.as_tensor(x, dtype=torch.float32) for x, _ in pairs]
        shapes = {tuple(x.shape) for x in features}
        if len(shapes) > 1:
            raise DataError(f"samples of one batch have different shapes: {sorted(shapes)}")
        x = torch.stack(features) if features else torch.empty(0)
        return {"x": x, "y": torch.tensor(labels, dtype=torch.int64)}

    def inputs(self, batch: Batch) -> dict[str, Any]:
        """`x`, float32 [rows, ...]."""
        return {"x": batch["x"]}

    def weight(self, batch: Batch) -> Tensor:
        """Ones, int64 [rows]."""
        return torch.ones_like(batch["y"])

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        """Cross entropy of each row in nats, [rows]; in float32, or float64 where the logits are."""
        logits = output if output.dtype == torch.float64 else output.float()
        return F.cross_entropy(logits, batch["y"], reduction="none")

    def metrics(self, output: Tensor, batch: Batch) -> dict[str, Tensor]:
        """`accuracy`: 1 where the likeliest class is the right one, float32 [rows]."""
        return {"accuracy": (output.argmax(dim=-1) == batch["y"]).float()}

    def target_counts(self, batch: Batch) -> Tensor:
        """How often each class occurs in the batch, int64 [num_classes]."""
        return torch.bincount(batch["y"], minlength=self.num_classes)

    def _label(self, value: Any, index: int) -> int:
        array = np.asarray(value)
        if array.size != 1 or array.dtype.kind not in "iu":
            raise DataError(f"label of sample {index} of the batch must be one integer, not {value!r}")
        label = int(array.item())
        if not 0 <= label < self.num_classes:
            raise DataError(
                f"label {label} of sample {index} of the batch is out of range: 0 to {self.num_classes - 1}"
            )
        return label


def _pair(sample: Any, index: int) -> tuple[Any, Any]:
    if isinstance(sample, dict):
        if {"x", "y"} <= sample.keys():
            return sample["x"], sample["y"]
    elif isinstance(sample, tuple | list) and len(sample) == 2:
        return sample[0], sample[1]
    raise DataError(
        f"sample {index} of the batch must be a pair (x, y) or a dict of x and y, not {type(sample).__name__}"
    )
