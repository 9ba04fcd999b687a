"""The gradient noise scale of a problem whose mean gradient and covariance are known, under every strategy."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from configs import PLAIN, config_text, own
from torch import Tensor, nn
from toys import assembled

from launcher.plan.batch import BatchPlan
from launcher.run_dir import RunDir

SIZE = 96
"""Elements of each of the two weights."""
STRATEGIES = ("ddp", "fsdp", "zero1", "zero2", "zero3")


class Pushes:
    """Samples (branch, weight, direction): the gradient of each is weight x direction, whatever the parameters are."""

    def __init__(self, count: int, *, weights: bool = False, branches: bool = True) -> None:
        draws = torch.Generator().manual_seed(3)
        directions = torch.randn(count, SIZE, generator=draws, dtype=torch.float64)
        # the trace of the covariance is about SIZE, the squared mean a twentieth of that
        self.directions = directions + math.sqrt(1 / 20)
        heavy = torch.rand(count, generator=draws) < 0.5
        self.weights = 1.0 + 2.0 * heavy.double() * weights
        self.branches = [index % 2 if branches else 0 for index in range(count)]

    def __len__(self) -> int:
        return len(self.directions)

    def __getitem__(self, index: int) -> tuple[int, float, list[float]]:
        return self.branches[index], float(self.weights[index]), self.directions[index].tolist()

    @property
    def gradients(self) -> Tensor:
        """Of every sample, [samples, elements]."""
        sums = self.weights[:, None] * self.directions
        parts = torch.zeros(len(self), 2, SIZE, dtype=torch.float64)
        parts[range(len(self)), self.branches] = sums
        return parts.flatten(1)


class Pushed(nn.Module):
    """Two weights of which each sample uses one, one that no sample uses, and one that isn't trained."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Parameter(torch.zeros(SIZE)), nn.Parameter(torch.zeros(SIZE))
        self.unused = nn.Parameter(torch.ones(5))
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)

    def forward(self, branch: Tensor, direction: Tensor) -> Tensor:
        used = set(branch.tolist())
        total = torch.zeros(len(branch))
        for index, weight in enumerate((self.left, self.right)):
            if index in used:
                total = total + torch.where(branch == index, direction @ weight, torch.zeros(()))
        return total


class PushTask:
    """The loss of a sample is its weight times its direction's share of the parameters."""

    def collate(self, samples: list[Any]) -> dict[str, Tensor]:
        branches, weights, directions = zip(*samples, strict=True)
        return {
            "branch": torch.tensor(branches),
            "weight": torch.tensor(weights),
            "direction": torch.tensor(directions),
        }

    def inputs(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"branch": batch["branch"], "direction": batch["direction"]}

    def weight(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["weight"]

    def loss(self, output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return output * batch["weight"]


def config(data: dict[str, Any], batch: int, micro: int, *more: str, updates: int = 5) -> str:
    return config_text(
        *[one for one in PLAIN if one != "data.shuffle=false"],
        *own("test_noise_scale.Pushed", "test_noise_scale.PushTask", "test_noise_scale.Pushes", **data),
        "optimizer.lr=0.01",
        "training.max_grad_norm=0.5",  # the norm that is measured is the one before
        "training.noise_scale=1",
        "training.noise_scale_memory=1e6",
        f"training.duration={updates} updates",
        "training.validate_every=null",
        f"batch.global_batch_size={batch}",
        f"batch.micro_batch_size={micro}",
        *more,
    )


def measured(rank: int, world_size: int, texts: list[str]) -> list[dict[str, Any]]:
    """For each configuration what was measured of each update, the state afterwards, and the samples of each window."""
    found = []
    for text in texts:
        fit = assembled(rank, world_size, text)
        lines: list[dict[str, Any]] = []
        fit.reporter.measured = lambda fields, kept=lines: kept.append(dict(fields))  # type: ignore[method-assign]
        windows = [fit.windows.indices(update).tolist() for update in range(1, fit.policy.num_updates + 1)]
        fit.run()
        found.append({"lines": lines, "state": fit.sharding.full_state(), "windows": windows})
        fit.sharding.close()
    return found


def expected(data: Pushes, window: list[int], batch: BatchPlan, *, whole_ranks: bool = False) -> tuple[float, float]:
    """S and |G|^2 of one window, by the formulas of the paper from gradients that are known."""
    gradients, weights = data.gradients, data.weights

    def square(indices: list[int]) -> float:
        return float((gradients[indices].sum(0) / weights[indices].sum()).square().sum())

    parts = []
    for rank in range(batch.data_parallel_degree):
        steps = [[window[position] for position in step] for step in batch.micro_slices(len(window), rank)]
        parts.append([one for step in steps for one in step] if whole_ranks else steps[0])
    parts = [one for one in parts if one]
    small = sum(map(square, parts)) / len(parts)
    one_by_small = sum(1 / len(one) for one in parts) / len(parts)
    noise = (small - square(window)) / (one_by_small - 1 / len(window))
    return noise, square(window) - noise / len(window)


def divisions() -> list[Any]:
    """(ranks, strategy and its keys, window, micro-batch)"""
    found = [(1, ("strategy=single",), 12, 3), (1, ("strategy=fsdp",), 12, 3), (1, ("strategy=single",), 7, 2)]
    found += [(2, (f"strategy={name}",), batch, micro) for name in STRATEGIES for batch, micro in ((12, 6), (12, 2))]
    # windows of three on two ranks, whose epoch ends on a window of two; on three ranks one of them has nothing there
    found += [(2, ("strategy=ddp",), 3, 1), (2, ("strategy=fsdp",), 3, 1), (3, ("strategy=ddp",), 3, 1)]
    found += [(2, ("strategy=fsdp", "strategy.reduce_each=window"), 12, 2)]
    found += [(4, ("strategy=fsdp", "mesh.dp_replicate=2"), 12, 1)]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("degree", [1, 2, 3, 4])
def test_every_window_is_measured_by_the_formulas_of_the_paper(ranks: Any, degree: int) -> None:
    arguments = {"count": 17, "weights": True}
    cases = [one for one in divisions() if one[0] == degree]
    texts = [config(arguments, batch, micro, *strategy, updates=7) for _, strategy, batch, micro in cases]
    data = Pushes(17, weights=True)
    for (_, strategy, batch, micro), found in zip(cases, ranks.run(measured, texts, world_size=degree)[0], strict=True):
        plan = BatchPlan.solve(batch, micro, "auto", degree)
        whole = "strategy.reduce_each=window" in strategy
        assert len(found["lines"]) == 7
        for window, line in zip(found["windows"], found["lines"], strict=True):
            if len(window) <= micro and degree == 1:  # all of it is one micro-batch: there is nothing smaller
                assert line == {}
                continue
            noise, signal = expected(data, window, plan, whole_ranks=whole)
            # gradients in fp32, and a difference of two numbers that are up to ten times as large
            assert line["gradient_noise"] == pytest.approx(noise, rel=1e-4, abs=1e-4), (strategy, window)
            assert line["gradient_signal"] == pytest.approx(signal, rel=1e-4, abs=1e-4), (strategy, window)


@pytest.mark.slow
@pytest.mark.parametrize("degree", [1, 2])
def test_the_scale_of_the_loss_is_none_of_it(ranks: Any, degree: int) -> None:
    data = Pushes(24)
    texts = [config({"count": 24}, 12, 3, "precision=fp16", f"precision.initial_scale={scale}") for scale in (1, 1024)]
    for found in ranks.run(measured, texts, world_size=degree)[0]:
        assert len(found["lines"]) == 5
        for window, line in zip(found["windows"], found["lines"], strict=True):
            noise, _ = expected(data, window, BatchPlan.solve(12, 3, "auto", degree))
            assert line["gradient_noise"] == pytest.approx(noise, rel=2e-2)  # products in 11 bits


@pytest.mark.slow
@pytest.mark.parametrize("weights", [False, True])
def test_a_known_noise_scale_is_found_within_a_tenth(ranks: Any, weights: bool) -> None:
    # of unequal weights a mean over few samples isn't quite without bias: about 1 / micro-batch of it
    count, batch, micro = (6400, 64, 16) if weights else (2400, 16, 4)
    arguments = {"count": count, "weights": weights, "branches": False}
    data = Pushes(count, weights=weights, branches=False)
    mean = data.gradients.sum(0) / data.weights.sum()
    apart = (data.gradients - data.weights[:, None] * mean) / data.weights.mean()
    trace = float(apart.square().sum()) / (count - 1)
    # windows of one epoch are drawn without replacement
    true = trace / (float(mean.square().sum()) - trace / count)
    for degree, strategy in ((1, "single"), (2, "ddp"), (2, "fsdp")):
        texts = [config(arguments, batch, micro, f"strategy={strategy}", updates=count // batch)]
        lines = ranks.run(measured, texts, world_size=degree)[0][0]["lines"]
        found, error = lines[-1]["critical_batch"], lines[-1]["critical_batch_error"]
        assert found == pytest.approx(true, rel=0.1), strategy
        assert abs(found - true) < 3 * error, strategy
        assert error < 0.1 * true, strategy


@pytest.mark.slow
def test_measuring_changes_no_bit(ranks: Any) -> None:
    for degree, strategy in ((1, "single"), (2, "ddp"), (2, "fsdp"), (3, "ddp"), (3, "fsdp")):
        with_it = config({"count": 17, "weights": True}, 12, 2, f"strategy={strategy}", "optimizer.momentum=0.9")
        without = with_it.replace("noise_scale: 1\n", "noise_scale: null\n")
        texts = [with_it, without.replace("noise_scale_memory: 1000000.0\n", "noise_scale_memory: 100.0\n")]
        assert texts[0] != texts[1]
        one, other = ranks.run(measured, texts, world_size=degree)[0]
        assert len(one["lines"]) == 5
        assert not other["lines"]
        assert one["state"].keys() == other["state"].keys()
        for name, value in one["state"].items():
            assert torch.equal(value, other["state"][name]), (strategy, name)


def gone_on(rank: int, world_size: int, text: str, folder: str | None, updates: int) -> dict[str, Any]:
    """What was measured of the updates up to `updates`, from a checkpoint in `folder` where there is one."""
    fit = assembled(rank, world_size, text, folder)
    object.__setattr__(fit.policy, "num_updates", updates)
    lines: list[dict[str, Any]] = []
    fit.reporter.measured = lambda fields, kept=lines: kept.append(dict(fields))  # type: ignore[method-assign]
    fit.run()
    fit.close()
    return {"lines": lines, "state": fit.sharding.full_state()}


@pytest.mark.slow
@pytest.mark.parametrize(("degree", "strategy"), [(1, "single"), (2, "ddp"), (2, "fsdp")])
def test_the_averages_go_on_with_the_run(ranks: Any, tmp_path: Path, degree: int, strategy: str) -> None:
    text = config({"count": 60}, 4, 1, f"strategy={strategy}", updates=30).replace("memory: 1000000.0", "memory: 5.0")
    assert "memory: 5.0" in text
    whole = ranks.run(gone_on, text, None, 30, world_size=degree)[0]
    run = RunDir(tmp_path)
    run.create(text, json.dumps({}))
    first = ranks.run(gone_on, text, str(tmp_path), 17, world_size=degree)[0]
    second = ranks.run(gone_on, text, str(tmp_path), 30, world_size=degree)[0]
    assert first["lines"] + second["lines"] == whole["lines"]
    assert all(torch.equal(value, whole["state"][name]) for name, value in second["state"].items())
