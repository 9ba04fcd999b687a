"""What a forward computes in. Parameters, gradients and their accumulation stay fp32 whatever it is."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from launcher.config.schema import PrecisionName


@dataclass(frozen=True)
class Precision:
    """A precision on a kind of device.

    bf16 is torch's autocast: matrix products in bfloat16, what needs it in fp32 (its documentation lists which). The
    model's output comes back in fp32, so that losses are formed and summed there.
    """

    name: PrecisionName
    device_type: str

    def call(self, model: Any, inputs: Mapping[str, Any]) -> Any:
        """The model's output for these inputs."""
        if self.name is PrecisionName.fp32:
            return model(**inputs)
        with torch.autocast(self.device_type, torch.bfloat16):
            output = model(**inputs)
        return tree_map(_full, output)


def _full(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype is torch.bfloat16 else value
