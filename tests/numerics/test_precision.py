"""bf16: what it rounds, and what it must not."""

from typing import Any

import plain
import pytest
import torch
from configs import PLAIN, config_text, own
from toys import Sequences, trained

from launcher.models import GPT
from launcher.tasks import CausalLM

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("degree", [1, 2])
def test_a10_small_updates_are_not_rounded_away(ranks: Any, degree: int) -> None:
    text = config_text(
        *PLAIN,
        *own("toys.Slope", "toys.Same", "toys.Drawing", count=4),
        "precision=bf16",
        "optimizer.lr=0.001",
        "batch.global_batch_size=4",
        "training.duration=100 updates",
    )
    for of_rank in ranks.run(trained, [text], world_size=degree):
        # bfloat16 near 1 has steps of 2^-8: parameters held in it would stay at 1
        assert of_rank[0]["state"]["w"].item() == pytest.approx(0.9, abs=1e-5)
        assert of_rank[0]["state"]["w"].dtype is torch.float32


@pytest.mark.parametrize(("degree", "micro"), [(1, 1), (2, 3), (3, 2)])
def test_bf16_follows_fp32_to_its_own_rounding(ranks: Any, degree: int, micro: int) -> None:
    sizes = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "intermediate_size": 24, "vocab_size": 14}
    text = config_text(
        *PLAIN,
        *[f"model.{name}={value}" for name, value in sizes.items()],
        "precision=bf16",
        "task.vocab_size=14",
        "task.bos=13",
        "data=custom",
        "data.train._target_=toys.Sequences",
        "optimizer.lr=0.5",
        "training.max_grad_norm=0.05",
        "batch.global_batch_size=7",
        f"batch.micro_batch_size={micro}",
        "training.duration=5 updates",
    )
    torch.manual_seed(0)
    model = GPT(**sizes)
    task = CausalLM(vocab_size=14, bos=13)
    lines = plain.train(model, task, Sequences(), 7, 5, torch.optim.SGD(model.parameters(), lr=0.5), 0.05)
    for of_rank in ranks.run(trained, [text], world_size=degree):
        for line, reference in zip(of_rank[0]["lines"], lines, strict=True):
            # products rounded to 8 bits; the errors of some thousand of them average out well below 2^-8
            assert line["loss"] == pytest.approx(reference["loss"], rel=2**-9)
            assert line["loss"] != reference["loss"]
            assert line["grad_norm"] == pytest.approx(reference["grad_norm"], rel=2**-5)
        assert all(value.dtype is torch.float32 for value in of_rank[0]["state"].values())
