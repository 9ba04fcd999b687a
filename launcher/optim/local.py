"""This rank's part of tensors that may be sharded."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class LocalStep:
    """Where a parameter goes, as this rank's part."""

    parameter: nn.Parameter
    update: Tensor

    @property
    def whole(self) -> Tensor:
        """The update as a tensor that is sharded like its parameter."""
        like = self.parameter
        if not isinstance(like, DTensor):
            return self.update
        return DTensor.from_local(
            self.update, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )


def local(tensor: Tensor | None) -> Tensor:
    """What this rank holds; a change of it is one of the tensor."""
    assert tensor is not None
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def trained(group: dict[str, Any]) -> list[nn.Parameter]:
    """The parameters of a group that have a gradient."""
    return [one for one in group["params"] if one.grad is not None]
