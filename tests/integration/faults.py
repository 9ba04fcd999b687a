"""Data that goes wrong on purpose; importable by the ranks that tests start."""

import atexit
import os
import signal
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from scalar import Scalar, Targets
from torch import Tensor, nn


class Faulty(Targets):
    """Reading sample `at` does `how`: raise, kill, exit0, exit7 or hang; nothing where HEALED is in the environment."""

    def __init__(self, targets: list[Any], at: int, how: str) -> None:
        super().__init__(targets)
        self.at, self.how = at, how

    def __getitem__(self, index: int) -> Any:
        if index == self.at and "HEALED" not in os.environ:
            if self.how == "raise":
                raise ValueError("this sample is broken")
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how.startswith("exit"):
                sys.exit(int(self.how.removeprefix("exit")))
            time.sleep(1000)
        return super().__getitem__(index)


class Layer(nn.Linear):
    """A layer that fails on rank 1 in its third forward, where the others wait for it in a collective."""

    def __init__(self, width: int, fails: bool) -> None:
        super().__init__(width, width)
        self.fails, self.forwards = fails, 0

    def forward(self, hidden: Tensor) -> Tensor:
        self.forwards += 1
        if self.fails and self.forwards == 3 and os.environ["RANK"] == "1":
            raise ValueError("this layer is broken")
        return super().forward(hidden)


class Layered(nn.Module):
    """Three layers, of which the second may fail; the loss is the mean square of what comes out."""

    def __init__(self, width: int = 4, fails: bool = False, coupled: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width, fails and index == 1) for index in range(3))
        self.width, self.coupled = width, coupled

    def forward(self, rows: Tensor) -> Tensor:
        hidden = rows[:, None] * torch.linspace(-1, 1, self.width)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return hidden - hidden.mean(0) if self.coupled else hidden


class Square:
    """The loss of a row is the mean square of the output."""

    def collate(self, samples: list[float]) -> dict[str, Tensor]:
        return {"rows": torch.tensor(samples)}

    def inputs(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return batch

    def weight(self, batch: dict[str, Tensor]) -> Tensor:
        return torch.ones(len(batch["rows"]))

    def loss(self, output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return output.square().mean(1)


class Held(Scalar):
    """After its first forward a thread of one group never comes back, as one that waits for Python's lock while another
    frees the group under that lock; at the end of the process a line is printed."""

    def __init__(self) -> None:
        super().__init__()
        self.is_held = False

    def forward(self, targets: Tensor) -> Tensor:
        if not self.is_held and dist.is_initialized():
            self.is_held = True
            atexit.register(print, "farewell")
            work = dist.all_reduce(torch.zeros(1), group=dist.new_group(), async_op=True)
            work.get_future().then(lambda _: threading.Event().wait())
        return super().forward(targets)


class Staged(Layered):
    """The same, for a pipeline. `how` the layer `at` fails in its third forward: raise, backward, kill or exit7."""

    def __init__(self, how: str = "", at: int = 1, width: int = 4) -> None:
        super().__init__(width)
        self.layers = nn.ModuleList(Failing(width, how if index == at else "") for index in range(4))

    def embed(self, rows: Tensor) -> Tensor:
        return rows[:, None] * torch.linspace(-1, 1, self.width)

    def head(self, hidden: Tensor) -> Tensor:
        return hidden

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.embed(rows)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


class Failing(nn.Linear):
    """A layer that fails in its third forward, or in the backward of that."""

    def __init__(self, width: int, how: str) -> None:
        super().__init__(width, width)
        self.how, self.forwards = how, 0

    def forward(self, hidden: Tensor) -> Tensor:
        if hidden.is_meta:  # only asked what it would give
            return super().forward(hidden)
        self.forwards += 1
        output = torch.tanh(super().forward(hidden))
        if self.forwards == 3:
            if self.how == "raise":
                raise ValueError("this layer is broken")
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how.startswith("exit"):
                sys.exit(int(self.how.removeprefix("exit")))
            if self.how == "backward":
                output.register_hook(_break)
        return output


def _break(_gradient: Tensor) -> None:
    raise ValueError("this layer is broken")
