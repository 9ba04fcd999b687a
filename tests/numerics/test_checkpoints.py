"""A run saved under any strategy and layout is what one process would have, and goes on under any other."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import plain
import pytest
import torch
from test_update import GLOBAL, TOLERANCE, config, model
from torch import Tensor
from toys import Sequences, assembled

from launcher import checkpoints
from launcher.run_dir import RunDir
from launcher.tasks import CausalLM
from launcher.train.checkpoint import planner
from launcher.train.checkpoint.pieces import Piece

pytestmark = pytest.mark.slow

LAYERS = 4
MAX_NORM = 0.05
SAVED, END = 3, 5
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "single": (1, ["strategy=single"]),
    "ddp on 2": (2, []),
    "ddp on 3": (3, []),
    "fsdp on 2": (2, ["strategy=fsdp"]),
    "fsdp on 3": (3, ["strategy=fsdp"]),
    "fsdp on 4": (4, ["strategy=fsdp"]),
    "hsdp on 4": (4, ["strategy=fsdp", "mesh.dp_replicate=2"]),
    "zero1 on 2": (2, ["strategy=zero1"]),
    "zero1 on 4": (4, ["strategy=zero1"]),
    "zero2 on 3": (3, ["strategy=zero2"]),
    "zero2 on 4": (4, ["strategy=zero2"]),
    "zero3 on 2": (2, ["strategy=zero3"]),
    "zero3 on 4": (4, ["strategy=zero3"]),
    "zero3 offloaded on 2": (2, ["strategy=zero3", "strategy.offload=cpu"]),
    "pp on 2": (2, ["mesh.pp=2"]),
    "pp on 3": (3, ["mesh.pp=3"]),
    "pp x ddp": (4, ["mesh.pp=2"]),
    "pp x fsdp": (4, ["mesh.pp=2", "strategy=fsdp"]),
    "pp x zero1": (4, ["mesh.pp=2", "strategy=zero1"]),
    "zbv": (2, ["mesh.pp=2", "pipeline.schedule=zbv"]),
}
OPTIMIZERS: dict[str, tuple[list[str], Any, dict[str, Any]]] = {
    "sgd": (
        ["optimizer=sgd", "optimizer.lr=0.3", "optimizer.momentum=0.9"],
        torch.optim.SGD,
        {"lr": 0.3, "momentum": 0.9},
    ),
    "adamw": (
        ["optimizer=adamw", "optimizer.lr=0.01", "optimizer.eps=1e-5", "optimizer.betas=[0.9,0.95]",
         "optimizer.weight_decay=0.1", "optimizer.groups=[]"],
        torch.optim.AdamW,
        {"lr": 0.01, "eps": 1e-5, "betas": (0.9, 0.95), "weight_decay": 0.1},
    ),
}  # fmt: skip


WITH_SGD = ("ddp on 3", "fsdp on 4", "zero2 on 3", "zero3 on 2", "pp x fsdp")
"""The layouts that are tried with momentum too."""


def layouts(optimizer: str) -> list[str]:
    return list(LAYOUTS) if optimizer == "adamw" else list(WITH_SGD)


def text(optimizer: str, layout: str, updates: int) -> str:
    more = [*OPTIMIZERS[optimizer][0], *LAYOUTS[layout][1], f"model.num_layers={LAYERS}"]
    more += [f"training.max_grad_norm={MAX_NORM}", f"training.duration={updates} updates", "checkpoint.every=null"]
    return config("float32", 2, *more)


def run_to_the_end(rank: int, world_size: int, todo: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """Trains each configuration in its folder from the checkpoint that is there. Gives the state and where it began."""
    found = []
    for configuration, folder in todo:
        fit = assembled(rank, world_size, configuration, folder)
        said: list[str] = []
        fit.reporter.say = said.append  # type: ignore[method-assign]
        progress = fit.run()
        fit.close()
        found.append({"state": fit.sharding.full_state(), "said": said, "update": progress.update})
        fit.sharding.close()
    return found


def content(folder: Path) -> dict[str, Tensor]:
    """All tensors of the newest checkpoint of a run, whole."""
    (newest, *_) = checkpoints.completed(RunDir(folder))
    assert newest.problem() is None
    saved = planner.Contents(newest.path)
    whole = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in saved.tensors.items()}
    saved.fill([Piece(name, tuple(one.shape), one, (0,) * one.ndim) for name, one in whole.items()])
    return whole


def reference(optimizer: str, updates: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What one process has after so many updates: its state, and all that a checkpoint has to hold by name."""
    expected = model("float32", num_layers=LAYERS)
    _, kind, arguments = OPTIMIZERS[optimizer]
    made = kind(expected.parameters(), **arguments)
    task = CausalLM(vocab_size=14, bos=13)
    lines = plain.train(expected, task, Sequences(), GLOBAL, updates, made, MAX_NORM)
    assert min(line["grad_norm"] for line in lines) > 2 * MAX_NORM
    whole = {f"model.{name}": one.detach() for name, one in expected.named_parameters()}
    whole |= {f"model.{name}": one for name, one in expected.named_buffers()}
    names = {one: name for name, one in expected.named_parameters()}
    for parameter, values in made.state.items():
        whole |= {f"optimizer.{names[parameter]}.{key}": one for key, one in values.items()}
    return dict(expected.state_dict()), whole


@pytest.fixture(scope="module", params=list(OPTIMIZERS))
def saved(request: Any, ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A folder in which a run was saved after some updates under every layout."""
    optimizer, folder = request.param, tmp_path_factory.mktemp("saved")
    for world in (1, 2, 3, 4):
        todo = []
        for layout in [name for name in layouts(optimizer) if LAYOUTS[name][0] == world]:
            (folder / layout).mkdir()
            todo.append((text(optimizer, layout, SAVED), str(folder / layout)))
        ranks.run(run_to_the_end, todo, world_size=world, timeout=180)
    return optimizer, folder


def test_what_is_saved_is_what_one_process_has(saved: tuple[str, Path]) -> None:
    optimizer, folder = saved
    _, expected = reference(optimizer, SAVED)
    for layout in layouts(optimizer):
        found = content(folder / layout)
        assert set(found) == set(expected), layout
        for kind in ("model.", "optimizer."):
            mine = {name: one for name, one in found.items() if name.startswith(kind)}
            assert {name: one.shape for name, one in mine.items()} == {name: expected[name].shape for name in mine}
            of_kind = {name: one for name, one in expected.items() if name.startswith(kind)}
            difference = plain.largest_difference(mine, of_kind)
            assert difference <= TOLERANCE["float32"], f"{layout}, {kind}: {difference}"


def test_f06_a_run_goes_on_under_any_layout(ranks: Any, saved: tuple[str, Path], tmp_path: Path) -> None:
    """Each layout goes on from its own and from another's: with the test above that is every pair."""
    optimizer, folder = saved
    expected, _ = reference(optimizer, END)
    names = layouts(optimizer)
    for world in (1, 2, 3, 4):
        crossings = [
            (layout, names[(names.index(layout) + step) % len(names)])
            for layout in names
            for step in (0, 7)
            if LAYOUTS[layout][0] == world
        ]
        todo = []
        for layout, source in crossings:
            there = tmp_path / f"{source} to {layout}"
            shutil.copytree(folder / source, there)
            todo.append((text(optimizer, layout, END), str(there)))
        found = ranks.run(run_to_the_end, todo, world_size=world, timeout=240)
        for of_rank in found:
            for (layout, source), run in zip(crossings, of_rank, strict=True):
                assert f"goes on after update {SAVED}, from its checkpoint" in run["said"], (layout, source)
                assert run["update"] == END
                difference = plain.largest_difference(run["state"], expected)
                assert difference <= TOLERANCE["float32"], f"{source} to {layout}: {difference}"


DROPPING = [
    "model.dropout=0.3",
    "data.train._target_=toys.Restless",
    "data.shuffle=true",
    "schedule/decay=cosine",
    "schedule.warmup=2",
]
SAME: dict[str, tuple[int, list[str], str, list[int]]] = {
    "single": (1, ["strategy=single"], "adamw", [1, 2, 3, 4, 5, 6, 7]),
    "ddp on 2": (2, [], "adamw", [1, 4, 7]),
    "ddp on 3": (3, [], "sgd", [1, 2, 3, 4, 5, 6, 7]),
    "fsdp on 2": (2, ["strategy=fsdp"], "sgd", [1, 4, 7]),
    "fsdp on 3": (3, ["strategy=fsdp"], "adamw", [3, 6]),
}
"""Ranks, strategy, optimizer and the windows after which the run is stopped: those of every place in an epoch."""


def run_in_parts(rank: int, world_size: int, configuration: str, folder: str, stops: list[int]) -> list[dict[str, Any]]:
    """For each of `stops` a run that ends there and is begun again from its checkpoint; and first one that isn't."""
    found = []
    for stop in [None, *stops]:
        where = str(Path(folder, str(stop)))
        Path(where).mkdir(exist_ok=True)
        for last in [None] if stop is None else [stop, None]:
            fit = assembled(rank, world_size, configuration, where)
            if last is not None:
                fit.policy = replace(fit.policy, num_updates=last)
            fit.run()
            fit.close()
        found.append(fit.sharding.full_state())
    return found


@pytest.mark.parametrize("layout", list(SAME))
def test_f08_a_run_stopped_at_any_window_is_one_never_stopped(ranks: Any, layout: str, tmp_path: Path) -> None:
    """Bit for bit, with dropout, shuffling, a schedule that goes on, and data whose ranks draw differently."""
    world, overrides, optimizer, stops = SAME[layout]
    more = [*OPTIMIZERS[optimizer][0], *overrides, *DROPPING, "training.duration=8 updates", "checkpoint.every=null"]
    configuration = config("float32", 2, *more, f"training.max_grad_norm={MAX_NORM}")
    for of_rank in ranks.run(run_in_parts, configuration, str(tmp_path), stops, world_size=world, timeout=180):
        whole, *parts = of_rank
        for stop, one in zip(stops, parts, strict=True):
            different = [name for name in whole if not torch.equal(whole[name], one[name])]
            assert not different, f"stopped after {stop}: {different}"
