r"""Models of a few numbers whose right answer is known without a computer, for exact checks of a whole run.

The mean: one number w, starting at 0, and a loss of (w - t)^2 / 2 for every target t. With plain SGD at a rate of 1,
one update takes w from 0 to the mean of all targets of the window, and any other way of averaging takes it elsewhere.
The samples [6] and [0, 0, 0] hold four targets, so w ends at 6 / 4 = 1.5 (the weights are in model.safetensors of the
run's folder):

    cd examples && launcher train \
        model=custom model._target_=scalar.Scalar \
        task=custom task._target_=scalar.SquaredError \
        data=custom data.train._target_=scalar.Targets '+data.train.targets=[6,[0,0,0]]' \
        batch.global_batch_size=2 training.duration='1 updates' cluster.device=cpu \
        data.shuffle=false schedule/decay=constant schedule.warmup=0 scaling.rule=none \
        training.max_grad_norm=null optimizer=sgd optimizer.lr=1

With `+model.size=2` and `'+data.train.targets=[[[10,0]],[[-4,8]]]'` w is a vector; the gradient is minus the mean
(3, 4) of the two targets and has norm 5, so `training.max_grad_norm=1` takes w to (0.6, 0.8).

The count: one number for each sample, and the loss of sample i is -w[i], so that its gradient is -1. At a rate of 1,
every visit adds 1 / (samples in that window) to w[i], and the sum of w is the number of updates:

    cd examples && launcher train \
        model=custom model._target_=scalar.Counter +model.num_samples=6 \
        task=custom task._target_=scalar.Visits \
        data=custom data.train._target_=scalar.Indices +data.train.num_samples=6 \
        batch.global_batch_size=4 training.duration='2 epochs' cluster.device=cpu \
        data.shuffle=false schedule/decay=constant schedule.warmup=0 scaling.rule=none \
        training.max_grad_norm=null optimizer=sgd optimizer.lr=1
"""

from typing import Any

import torch
from torch import Tensor, nn

from launcher.errors import DataError


class Scalar(nn.Module):
    """One trained parameter `w` of shape [size], zero at the start.

    Args:
        size: how many numbers; 1 is the scalar.
        dtype: the parameter's type by name.
    """

    def __init__(self, size: int = 1, dtype: str = "float32") -> None:
        super().__init__()
        self.w = nn.Parameter(torch.empty(size, dtype=getattr(torch, dtype)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Back to zero."""
        nn.init.zeros_(self.w)

    def forward(self, targets: Tensor) -> Tensor:
        """w for every target of [rows, T, size]: the same shape."""
        return self.w.expand(targets.shape)


class Targets:
    """The samples as they are given: each a target, or a list of targets; a target is a number or a list of `size`."""

    def __init__(self, targets: list[Any]) -> None:
        self.targets = targets

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> Any:
        return self.targets[index]


class SquaredError:
    """The loss (w - t)^2 / 2 summed over the targets of a row; a row counts its number of targets."""

    def collate(self, samples: list[Any]) -> dict[str, Tensor]:
        """`targets` float64 [rows, T, size] and `mask` bool [rows, T], true where a target is."""
        rows = [self._rows(sample) for sample in samples]
        if any(len(row) == 0 for row in rows):
            raise DataError(f"sample {[len(row) for row in rows].index(0)} of the batch has length 0")
        mask = [torch.ones(len(row), dtype=torch.bool) for row in rows]
        return {
            "targets": nn.utils.rnn.pad_sequence(rows, batch_first=True),
            "mask": nn.utils.rnn.pad_sequence(mask, batch_first=True),
        }

    def inputs(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """`targets`, of which the model reads the shape alone."""
        return {"targets": batch["targets"]}

    def weight(self, batch: dict[str, Tensor]) -> Tensor:
        """Targets of each row, [rows]."""
        return batch["mask"].sum(dim=1)

    def loss(self, output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        """Sum of each row, [rows]."""
        targets = batch["targets"].to(output.dtype)
        losses = 0.5 * (output - targets).square().sum(dim=-1)
        return torch.where(batch["mask"], losses, 0.0).sum(dim=1)

    def length(self, sample: Any) -> int:
        """Targets of a sample."""
        return len(self._rows(sample))

    @staticmethod
    def _rows(sample: Any) -> Tensor:
        targets = torch.as_tensor(sample, dtype=torch.float64)
        return targets.reshape(-1, 1) if targets.ndim < 2 else targets


class Counter(nn.Module):
    """One trained number `w[i]` for each sample i, all zero at the start."""

    def __init__(self, num_samples: int, dtype: str = "float32") -> None:
        super().__init__()
        self.w = nn.Parameter(torch.empty(num_samples, dtype=getattr(torch, dtype)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Back to zero."""
        nn.init.zeros_(self.w)

    def forward(self, index: Tensor) -> Tensor:
        """w of the samples `index` [rows]: [rows]."""
        return self.w[index]


class Indices:
    """The samples 0, 1, ..., num_samples - 1."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.num_samples:
            raise IndexError(index)
        return index


class Visits:
    """The loss -w[i]; every sample counts 1."""

    def collate(self, samples: list[int]) -> dict[str, Tensor]:
        """`index` int64 [rows]."""
        return {"index": torch.tensor(samples, dtype=torch.int64)}

    def inputs(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """`index`."""
        return {"index": batch["index"]}

    def weight(self, batch: dict[str, Tensor]) -> Tensor:
        """Ones, [rows]."""
        return torch.ones_like(batch["index"])

    def loss(self, output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        """[rows]."""
        return -output
