"""Pipelines against one process: the same parameters, losses and norms on every rank, under every schedule and
sharding."""

from typing import Any

import plain
import pytest
from test_update import GLOBAL, OPTIMIZERS, TOLERANCE, config, model
from toys import Sequences, trained

from launcher.tasks import CausalLM

pytestmark = pytest.mark.slow

MAX_NORM = 0.05
LAYERS = 5
CASES = {
    "gpipe": (2, ["pipeline.schedule=gpipe"]),
    "1f1b": (2, []),
    "interleaved_1f1b": (2, ["pipeline.schedule=interleaved_1f1b"]),
    "looped_bfs": (2, ["pipeline.schedule=looped_bfs"]),
    "interleaved_zero_bubble": (2, ["pipeline.schedule=interleaved_zero_bubble"]),
    "zbv": (2, ["pipeline.schedule=zbv"]),
    "four stages": (4, ["mesh.pp=4"]),
    "three stages": (3, ["mesh.pp=3"]),
    "x ddp": (4, []),
    "x fsdp": (4, ["strategy=fsdp"]),
    "x fsdp each window": (4, ["strategy=fsdp", "strategy.reduce_each=window"]),
    "x zero1": (4, ["strategy=zero1"]),
}


def layered(dtype: str, micro: int, *more: str) -> str:
    return config(dtype, micro, f"model.num_layers={LAYERS}", *more)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("optimizer", "dtype"), [("sgd", "float32"), ("adamw", "float32"), ("sgd", "float64")])
def test_parameters_after_five_updates(ranks: Any, name: str, optimizer: str, dtype: str) -> None:
    world, mesh = CASES[name]
    task = CausalLM(vocab_size=14, bos=13)
    overrides, kind, arguments = OPTIMIZERS[optimizer]
    expected = model(dtype, num_layers=LAYERS)
    lines = plain.train(expected, task, Sequences(), GLOBAL, 5, kind(expected.parameters(), **arguments), MAX_NORM)
    assert min(line["grad_norm"] for line in lines) > 2 * MAX_NORM
    pp = [] if any("mesh.pp" in one for one in mesh) else ["mesh.pp=2"]
    more = [*overrides, *pp, *mesh, f"training.max_grad_norm={MAX_NORM}", "training.duration=5 updates"]
    texts = [
        layered(dtype, micro, *more, f"batch.layout={layout}", *rest)
        for micro, layout, rest in (
            (1, "length", []),
            (2, "arrival", ["pipeline.microbatches_per_round=2"]),
            (7, "length", ["activation_checkpoint=full"]),
        )
    ]
    found = ranks.run(trained, texts, world_size=world, timeout=180)
    for of_rank in found:
        for run in of_rank:
            assert list(run["state"]) == list(expected.state_dict())
            assert plain.largest_difference(run["state"], dict(expected.state_dict())) <= TOLERANCE[dtype]
            for line, reference in zip(run["lines"], lines, strict=True):
                assert line["loss"] == pytest.approx(reference["loss"], rel=TOLERANCE[dtype])
                assert line["grad_norm"] == pytest.approx(reference["grad_norm"], rel=2 * TOLERANCE[dtype])
