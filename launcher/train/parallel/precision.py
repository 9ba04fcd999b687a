"""What a forward computes in. Parameters, gradients and their accumulation stay fp32 whatever it is."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from launcher.config.choices import PrecisionName


@dataclass(frozen=True)
class Precision:
    """A precision on a kind of device.

    bf16 and fp16 are torch's autocast: matrix products in half precision, what needs it in fp32 (its documentation
    lists which). The model's output comes back in fp32, so that losses are formed and summed there.
    """

    name: PrecisionName
    device_type: str

    def autocast(self) -> AbstractContextManager[Any]:
        """What a forward runs inside."""
        if self.name is PrecisionName.fp32:
            return nullcontext()
        return torch.autocast(self.device_type, _HALF[self.name])

    def call(self, model: Any, inputs: Mapping[str, Any]) -> Any:
        """The model's output for these inputs."""
        with self.autocast():
            output = model(**inputs)
        return self.result(output)

    def result(self, output: Any) -> Any:
        """A model's output as losses are formed of it."""
        return output if self.name is PrecisionName.fp32 else tree_map(_full, output)


_HALF = {PrecisionName.bf16: torch.bfloat16, PrecisionName.fp16: torch.float16}


def _full(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in _HALF.values() else value


@dataclass
class LossScale:
    """What fp16 multiplies a loss by, so that small gradients don't vanish; the rule is that of torch.amp.GradScaler.

    It holds for a whole window: a window whose gradient overflows is skipped on every rank, and the next has half.
    """

    scale: float
    growth_interval: int
    updates: int = 0
    """Updates since it last changed."""

    def update(self, *, overflow: bool) -> None:
        """After a window: halved where its gradient overflowed, doubled after so many that didn't."""
        self.updates = 0 if overflow else self.updates + 1
        if overflow:
            self.scale /= 2
        elif self.updates == self.growth_interval:
            self.scale, self.updates = self.scale * 2, 0
