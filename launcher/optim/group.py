"""What optimizers that go group by group have in common."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, overload

import torch
from torch.optim.optimizer import Optimizer


class GroupOptimizer(Optimizer):
    """An optimizer whose update is one of each parameter group in turn."""

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self.update(group)
        return loss

    @abstractmethod
    def update(self, group: dict[str, Any]) -> None:
        """The update of one group; no gradients are recorded."""
