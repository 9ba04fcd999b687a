"""A run through a ramp of the global batch is that of one process, under every strategy and from any checkpoint."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import plain
import pytest
import torch
from test_update import TOLERANCE, config, model
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from toys import Sequences, assembled, trained

from launcher.tasks import CausalLM

pytestmark = pytest.mark.slow

MAX_NORM, LR = 0.05, 0.7
SIZES = [3, 3, 3, 3, 5, 5, 5, 5, 2, 7, 7, 3]  # of 17 samples three times: by 3 to 10 samples, by 5 to 2 epochs, by 7
NOMINAL = [3, 3, 3, 3, 5, 5, 5, 5, 5, 7, 7, 7]
RAMP = "[{until: 10 samples, global_batch_size: 3}, {until: 2 epochs, global_batch_size: 5}]"
OVERRIDES = [
    *(f"batch.ramp={RAMP}", f"training.max_grad_norm={MAX_NORM}", "training.duration=3 epochs"),
    *("optimizer=sgd", f"optimizer.lr={LR}", "optimizer.momentum=0.9", "checkpoint.every=null"),
    *("scaling.rule=linear", "scaling.base_batch_size=7", "schedule.warmup='9 samples'", "schedule/decay=linear"),
]
LAYOUTS = {
    "single": (1, ["strategy=single"]),
    "ddp": (2, []),
    "ddp on 3": (3, ["batch.layout=arrival"]),
    "fsdp": (2, ["strategy=fsdp"]),
    "zero2": (2, ["strategy=zero2"]),
    "pipeline": (2, ["mesh.pp=2"]),
}


def rate(update: int) -> float:
    """By hand: up over the first 9 samples, down to 0 at the end of all 51, times the window's share of 7."""
    before, after = sum(SIZES[: update - 1]), sum(SIZES[:update])
    share = after / 9 if before < 9 else 1 - (before - 9) / (51 - 9)
    return LR * NOMINAL[update - 1] / 7 * share


def reference(dtype: str) -> tuple[dict[str, Tensor], list[float]]:
    """State and loss of each update of one process."""
    expected, task, data = model(dtype), CausalLM(vocab_size=14, bos=13), Sequences()
    optimizer = torch.optim.SGD(expected.parameters(), lr=1.0, momentum=0.9)
    losses, start = [], 0
    for update, size in enumerate(SIZES, 1):
        batch = task.collate([data[i % 17] for i in range(start, start + size)])
        loss = task.loss(expected(**task.inputs(batch)), batch).sum() / task.weight(batch).sum()
        optimizer.zero_grad()
        loss.backward()
        assert float(clip_grad_norm_(expected.parameters(), MAX_NORM)) > 2 * MAX_NORM
        optimizer.param_groups[0]["lr"] = rate(update)
        optimizer.step()
        start += size
        losses.append(loss.item())
    return dict(expected.state_dict()), losses


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_a_ramped_run_is_that_of_one_process(ranks: Any, layout: str) -> None:
    degree, more = LAYOUTS[layout]
    dtype = "float32" if layout == "zero2" else "float64"
    state, losses = reference(dtype)
    text = config(dtype, 2, *OVERRIDES, *more)
    for (run,) in ranks.run(trained, [text], world_size=degree, timeout=120):
        lines = run["lines"]
        assert [len(line["indices"]) for line in lines] == SIZES
        assert [line["lr"] for line in lines] == pytest.approx([rate(update) for update in range(1, 13)], rel=1e-12)
        assert [line["epoch"] for line in lines] == pytest.approx([sum(SIZES[:n]) / 17 for n in range(1, 13)])
        assert [line["loss"] for line in lines] == pytest.approx(losses, rel=TOLERANCE[dtype])
        assert plain.largest_difference(run["state"], state) <= TOLERANCE[dtype]


def through(rank: int, world_size: int, text: str, folder: str, ends: list[int]) -> dict[str, Tensor]:
    """The state after training in one folder, anew from its checkpoint after each of `ends` updates."""
    for end in ends:
        fit = assembled(rank, world_size, text, folder)
        fit.policy = replace(fit.policy, num_updates=end)
        assert fit.run().update == end
        fit.close()
    return fit.sharding.full_state()


@pytest.mark.parametrize("layout", ["ddp on 3", "fsdp"])
def test_a_ramp_goes_on_from_a_checkpoint_within_it(ranks: Any, tmp_path: Path, layout: str) -> None:
    degree, more = LAYOUTS[layout]
    text = config("float32", 2, *OVERRIDES, *more)
    runs = []
    for name, ends in (("once", [12]), ("often", [2, 7, 10, 12])):
        folder = tmp_path / name
        folder.mkdir()
        runs.append(ranks.run(through, text, str(folder), ends, world_size=degree, timeout=120)[0])
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])


def test_validation_by_epochs_comes_with_every_epoch_of_a_ramp(ranks: Any) -> None:
    held_out = ["data.validation={_target_: toys.Sequences, count: 5}", "training.validate_every=1 epochs"]
    ((run,),) = ranks.run(trained, [config("float32", 2, *OVERRIDES, *held_out, "strategy=single")], world_size=1)
    assert run["validations"] == [5, 9, 12]
