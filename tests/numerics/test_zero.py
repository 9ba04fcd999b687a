"""DeepSpeed's ZeRO against one process: every stage gives the same update."""

from typing import Any

import plain
import pytest
import torch
from test_update import GLOBAL, OPTIMIZERS, TOLERANCE, config, model
from toys import Sequences, trained

from launcher.tasks import CausalLM

pytestmark = pytest.mark.slow

STAGES = ["zero1", "zero2", "zero3"]
PARTED = "+strategy.deepspeed.zero_optimization.stage3_param_persistence_threshold=0"
"""Small parameters lie divided too; by itself stage 3 keeps them whole."""


@pytest.fixture(scope="module")
def task() -> CausalLM:
    return CausalLM(vocab_size=14, bos=13)


@pytest.mark.parametrize("name", list(OPTIMIZERS))
@pytest.mark.parametrize("degree", [2, 3])
@pytest.mark.parametrize("strategy", STAGES)
def test_parameters_after_five_updates_with_a_clip_that_bites(
    ranks: Any, task: CausalLM, strategy: str, degree: int, name: str
) -> None:
    overrides, kind, arguments = OPTIMIZERS[name]
    max_norm = 0.05
    more = [*overrides, f"strategy={strategy}", f"training.max_grad_norm={max_norm}", "training.duration=5 updates"]
    expected = model("float32")
    lines = plain.train(expected, task, Sequences(), GLOBAL, 5, kind(expected.parameters(), **arguments), max_norm)
    assert min(line["grad_norm"] for line in lines) > 2 * max_norm  # the clip bites in every update
    texts = [
        config("float32", micro, *more, *parted, f"batch.layout={layout}")
        for micro in (1, 3)
        for layout in ("arrival", "length")
        for parted in ([], [PARTED])[: 1 + (strategy == "zero3")]
    ]
    found = ranks.run(trained, texts, world_size=degree)
    for of_rank in found:
        for run in of_rank:
            difference = plain.largest_difference(run["state"], dict(expected.state_dict()))
            print(strategy, degree, name, difference)
            assert difference <= TOLERANCE["float32"]
            for line, reference in zip(run["lines"], lines, strict=True):
                assert line["loss"] == pytest.approx(reference["loss"], rel=TOLERANCE["float32"])
                assert line["grad_norm"] == pytest.approx(reference["grad_norm"], rel=2 * TOLERANCE["float32"])
    assert all(
        torch.equal(first["state"][key], other["state"][key])
        for of_rank in found[1:]
        for first, other in zip(found[0], of_rank, strict=True)
        for key in first["state"]
    ), "ranks hold the same bits"
