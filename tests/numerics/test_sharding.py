"""Sharded training against one process: the same parameters, losses and norms under every strategy."""

from typing import Any

import plain
import pytest
import torch
from test_update import GLOBAL, OPTIMIZERS, TOLERANCE, config, model
from toys import Sequences, trained

from launcher.tasks import CausalLM

pytestmark = pytest.mark.slow

MAX_NORM = 0.05
STRATEGIES = {
    "ddp": (2, []),
    "fsdp": (2, ["strategy=fsdp"]),
    "fsdp each window": (3, ["strategy=fsdp", "strategy.reduce_each=window"]),
    "fsdp each micro-batch": (3, ["strategy=fsdp", "strategy.reduce_each=micro_batch"]),
    "fsdp kept": (2, ["strategy=fsdp", "strategy.reshard_after_forward=false"]),
    "fsdp as one block": (2, ["strategy=fsdp", "strategy.wrap=[]"]),
    "fsdp offloaded": (2, ["strategy=fsdp", "strategy.offload=cpu"]),
    "hsdp": (4, ["strategy=fsdp", "mesh.dp_replicate=2"]),
    "hsdp each micro-batch": (4, ["strategy=fsdp", "mesh.dp_shard=2", "strategy.reduce_each=micro_batch"]),
    "copies": (2, ["strategy=fsdp", "mesh.dp_shard=1"]),
}
"""All but DeepSpeed's, which are in test_zero."""


@pytest.fixture(scope="module")
def task() -> CausalLM:
    return CausalLM(vocab_size=14, bos=13)


CELLS = [
    (1, "arrival", "none"),
    (3, "length", "none"),
    (3, "arrival", "full"),
    (1, "length", "full"),
    (1, "length", "selective"),
    (3, "arrival", "selective"),
]
"""Micro-batch sizes, layouts and kinds of recomputation: each two of them meet."""


@pytest.mark.parametrize(("optimizer", "dtype"), [("sgd", "float32"), ("adamw", "float32"), ("sgd", "float64")])
@pytest.mark.parametrize("name", list(STRATEGIES))
def test_parameters_after_five_updates(ranks: Any, task: CausalLM, name: str, optimizer: str, dtype: str) -> None:
    degree, strategy = STRATEGIES[name]
    overrides, kind, arguments = OPTIMIZERS[optimizer]
    expected = model(dtype)
    lines = plain.train(expected, task, Sequences(), GLOBAL, 5, kind(expected.parameters(), **arguments), MAX_NORM)
    assert min(line["grad_norm"] for line in lines) > 2 * MAX_NORM
    more = [*overrides, *strategy, f"training.max_grad_norm={MAX_NORM}", "training.duration=5 updates"]
    texts = [
        config(dtype, micro, *more, f"batch.layout={layout}", f"activation_checkpoint={recompute}")
        for micro, layout, recompute in (CELLS if (optimizer, dtype) == ("sgd", "float32") else CELLS[::2])
    ]
    found = ranks.run(trained, texts, world_size=degree, timeout=180)
    for of_rank in found:
        for run in of_rank:
            assert {k: v.shape for k, v in run["state"].items()} == {
                k: v.shape for k, v in expected.state_dict().items()
            }
            assert plain.largest_difference(run["state"], dict(expected.state_dict())) <= TOLERANCE[dtype]
            for line, reference in zip(run["lines"], lines, strict=True):
                assert line["loss"] == pytest.approx(reference["loss"], rel=TOLERANCE[dtype])
                assert line["grad_norm"] == pytest.approx(reference["grad_norm"], rel=2 * TOLERANCE[dtype])
    for mine, other in zip(found[0], found[-1], strict=True):
        assert all(torch.equal(value, other["state"][key]) for key, value in mine["state"].items())
