"""Small models and data for exact checks, and what ranks do with them."""

import random
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from launcher.config.choices import Device
from launcher.config.validate import parse
from launcher.plan.mesh import World
from launcher.plan.plan import make_plan
from launcher.run_dir import RunDir
from launcher.train.fit import Fit
from launcher.train.parallel.mesh import take_place
from launcher.train.parts import Parts, build_data, build_task, gather_facts, make_model
from launcher.train.run import assemble

SEQUENCES = 17


class Sequences:
    """Token sequences of very unequal lengths, 1 to `longest`."""

    def __init__(self, count: int = SEQUENCES, vocab_size: int = 13, longest: int = 9) -> None:
        generator = torch.Generator().manual_seed(7)
        lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
        self.samples = [torch.randint(0, vocab_size, (n,), generator=generator).tolist() for n in lengths]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> list[int]:
        return self.samples[index]


class Restless(Sequences):
    """Sequences that draw from torch's and Python's generators when they are read: an odd one draws more."""

    def __getitem__(self, index: int) -> list[int]:
        torch.rand(1 + 5 * (index % 2))
        random.random()
        return super().__getitem__(index)


class Masked:
    """Four sequences; every label of the first two is masked."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        tokens = [1 + index, 2, 3, 4]
        return {"input_ids": tokens, "labels": [-100] * 4 if index < 2 else tokens}


class Drawing:
    """Each sample is the numbers that Python's, NumPy's and torch's generators give while it is read."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> list[float]:
        return [random.random(), float(np.random.rand()), torch.rand(()).item()]


class Listed:
    """The samples as they are given."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


class Slope(nn.Module):
    """One weight from 1; with the task Same the gradient of each row is 1, or with `by_row` what the row says."""

    def __init__(self, by_row: bool = False) -> None:
        super().__init__()
        self.w, self.by_row = nn.Parameter(torch.ones(1)), by_row

    def forward(self, rows: Tensor) -> Tensor:
        return self.w.expand(rows.shape[0], 1) * (rows if self.by_row else torch.ones(rows.shape[0], 1))


class Scrambled(nn.Module):
    """Layers that run in another order than they are registered in, large enough for several buckets."""

    def __init__(self, width: int = 400) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(width, width) for _ in range(5))
        self.width = width

    def forward(self, rows: Tensor) -> Tensor:
        hidden = rows.mean(1, keepdim=True) * torch.linspace(-1, 1, self.width)
        for index in (3, 0, 4, 1, 2):
            hidden = torch.dropout(torch.tanh(self.parts[index](hidden)), 0.3, self.training)
        return hidden


class Same:
    """The loss of a row is what the model gives for it. A sample is a number, or a list of numbers."""

    def collate(self, samples: list[Any]) -> dict[str, Tensor]:
        return {"rows": torch.tensor(samples)}

    def inputs(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return batch

    def weight(self, batch: dict[str, Tensor]) -> Tensor:
        return torch.ones(batch["rows"].shape[0])

    def loss(self, output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return output.flatten(1).sum(1)


class Branches(nn.Module):
    """Two weights of which each sample uses one, and one that no sample uses: a sample is (branch, target)."""

    def __init__(self, size: int = 2) -> None:
        super().__init__()
        self.branches = nn.Parameter(torch.zeros(2, size))
        self.left, self.right = nn.Parameter(torch.zeros(size)), nn.Parameter(torch.zeros(size))
        self.unused = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, branch: Tensor) -> Tensor:
        used = set(branch.tolist())
        rows = torch.zeros(len(branch), self.left.numel())
        if 0 in used:
            rows = torch.where((branch == 0)[:, None], self.left, rows)
        if 1 in used:
            rows = torch.where((branch == 1)[:, None], self.right, rows)
        return rows


class BranchData:
    def __init__(self, branches: list[int], targets: list[float]) -> None:
        self.items = list(zip(branches, targets, strict=True))

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[int, float]:
        return self.items[index]


class BranchTask:
    def collate(self, samples: list[tuple[int, float]]) -> dict[str, Tensor]:
        branches, targets = zip(*samples, strict=True)
        return {"branch": torch.tensor(branches), "target": torch.tensor(targets)}

    def inputs(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"branch": batch["branch"]}

    def weight(self, batch: dict[str, Tensor]) -> Tensor:
        return torch.ones(len(batch["branch"]))

    def loss(self, output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return 0.5 * (output - batch["target"][:, None]).square().sum(1)


class Varied(nn.Module):
    """A tied pair, a frozen layer, a buffer that a forward changes, and sizes that neither 2 nor 3 divides."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.norm = nn.LayerNorm(5)
        self.register_buffer("calls", torch.zeros(3))
        self.head = nn.Linear(5, 11)
        self.head.weight = self.embedding.weight

    def forward(self, rows: Tensor) -> Tensor:
        self.calls += 1
        logits: Tensor = self.head(self.norm(torch.tanh(self.frozen(self.embedding(rows.long())))))
        return logits.logsumexp(-1) - logits[..., 3]


def assembled(rank: int, world_size: int, text: str, folder: str | None = None) -> Fit:
    """What a rank of a run trains with, from the text of a config.yaml. `folder`: the run's; None: nothing is saved."""
    config = parse(text)
    train, validation = build_data(config)
    model, fill = make_model(config)
    parts = Parts(model, build_task(config), train, validation, fill)
    facts = gather_facts(config, parts, world_size // config.mesh.pp)
    plan = make_plan(config, facts, world=World(1, world_size, Device.cpu))
    place = take_place(
        rank, plan.data_parallel_degree, config.mesh.pp, torch.device("cpu"), group=None, timeout=timedelta(minutes=5)
    )
    return assemble(config, plan, facts, parts, place, None if folder is None else RunDir(Path(folder)))


def window_gradients(rank: int, world_size: int, texts: list[str], updates: int) -> list[list[dict[str, Tensor]]]:
    """For each configuration the gradients of its first windows by parameter; nothing is applied."""
    found = []
    for text in texts:
        fit = assembled(rank, world_size, text)
        fit.sharding.prepare()
        gradients = []
        for update in range(1, updates + 1):
            fit.runner.run(fit.windows.get(update))
            named = fit.sharding.model.named_parameters()
            gradients.append({name: one.grad.clone() for name, one in named if one.grad is not None})
            fit.sharding.clear_gradients()
        found.append(gradients)
    return found


def read(rank: int, world_size: int, text: str, updates: int) -> list[dict[str, list[Any]]]:
    """The rows that this rank reads for each window, filled ones left out."""
    fit = assembled(rank, world_size, text)
    windows = [fit.windows.get(update) for update in range(1, updates + 1)]
    return [
        {
            name: [row for micro in window.micro_batches for row in micro.batch[name][: micro.num_real].tolist()]
            for name in window.micro_batches[0].batch
        }
        for window in windows
    ]


def trained(rank: int, world_size: int, texts: list[str]) -> list[dict[str, Any]]:
    """For each configuration the state after training, and what was reported of every update."""
    found = []
    for text in texts:
        fit = assembled(rank, world_size, text)
        lines: list[dict[str, Any]] = []

        def record(window: Any, loss: float, lr: float, step: Any, progress: Any, _s: float, kept: Any = lines) -> None:
            kept.append(
                {
                    "update": window.update,
                    "applied": progress.applied,
                    "loss": loss,
                    "lr": lr,
                    "grad_norm": step.grad_norm,
                    "skipped": not step.applied,
                    "loss_scale": step.loss_scale,
                    "micro_batches": len(window.micro_batches),
                    "weight": window.weight,
                    "epoch": window.epoch,
                    "indices": window.indices.tolist(),
                }
            )

        validations: list[int] = []
        fit.reporter.update = record  # type: ignore[method-assign]
        fit.reporter.validation = lambda progress, kept=validations: kept.append(progress.update)  # type: ignore
        progress = fit.run()
        found.append(
            {
                "state": fit.sharding.full_state(),
                "lines": lines,
                "validation": progress.validation,
                "validations": validations,
                "gradients_left": [one.grad is not None for one in fit.sharding.parameters],
            }
        )
    return found


class _Collectives(TorchDispatchMode):
    """Writes down the collectives that are called.

    Not torch's profiler, which sees gloo's threads from outside and in no order: once a rank that it had just watched
    died of a segmentation fault.
    """

    def __init__(self) -> None:
        super().__init__()
        self.called: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            tensors = [[one for one in tree_leaves(argument) if isinstance(one, Tensor)] for argument in args]
            self.called.append((func._opname, max(sum(one.numel() for one in some) for some in tensors)))
        return func(*args, **(kwargs or {}))


def travelled(of: Callable[[], Any]) -> list[tuple[str, int]]:
    """The collectives of a call, in turn: torch's names, with the elements of the whole."""
    with _Collectives() as collectives:
        of()
    return collectives.called


def gradients_from(rank: int, world_size: int, text: str, first: int, last: int) -> dict[str, Tensor]:
    """The whole gradients of window `last` in a training that starts at window `first`."""
    fit = assembled(rank, world_size, text)
    fit.sharding.prepare()
    for update in range(first, last + 1):
        fit.sharding.clear_gradients()
        fit.runner.run(fit.windows.get(update))
    named = fit.sharding.model.named_parameters()
    return {name: fit.sharding.whole(one.grad).clone() for name, one in named if one.grad is not None}
