"""The window's gradient and the update against one process: any degree, any micro-batch, any window."""

from typing import Any

import plain
import pytest
import torch
from configs import PLAIN, config_text
from toys import Sequences, trained, window_gradients

from launcher.models import GPT
from launcher.tasks import CausalLM

pytestmark = pytest.mark.slow

SIZES = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "intermediate_size": 24, "vocab_size": 14}
GLOBAL = 7  # 17 samples: windows of 7, 7 and 3, which no degree but 1 divides
SEED = 3
# fp32: a sum of some hundred rounded terms, 2^-24 each; float64: the same at 2^-53
TOLERANCE = {"float32": 1e-6, "float64": 1e-12}


def config(dtype: str, micro: int | str, *more: str) -> str:
    return config_text(
        *PLAIN,
        f"run.seed={SEED}",
        *[f"model.{name}={value}" for name, value in SIZES.items()],
        f"+model.dtype={dtype}",
        "task.vocab_size=14",
        "task.bos=13",
        "data=custom",
        "data.train._target_=toys.Sequences",
        f"batch.global_batch_size={GLOBAL}",
        f"batch.micro_batch_size={micro}",
        *more,
    )


def model(dtype: str, **sizes: int) -> GPT:
    torch.manual_seed(SEED)
    return GPT(**{**SIZES, **sizes}, dtype=dtype)


@pytest.fixture(scope="module")
def task() -> CausalLM:
    return CausalLM(vocab_size=14, bos=13)


LAYOUTS = ["arrival", "length", "tokens"]
MICROS = {1: 9, 2: 10, 3: 14, 4: 20, 5: 100}
"""Sizes of a micro-batch in samples, and the bound in tokens that stands for each: the longest sample has 9."""


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("degree", [1, 2, 3, 4])
def test_gradient_of_a_window(ranks: Any, task: CausalLM, degree: int, layout: str) -> None:
    # every size in float64, where no wrong sum can hide; in float32 one, another for each degree and layout
    turn = 1 + (degree + LAYOUTS.index(layout)) % 5
    cells = [*[("float64", micro) for micro in MICROS], ("float32", turn)]
    texts = [
        config(dtype, "auto", f"batch.micro_batch_tokens={MICROS[micro]}")
        if layout == "tokens"
        else config(dtype, micro, f"batch.layout={layout}")
        for dtype, micro in cells
    ]
    samples = Sequences().samples
    windows = [samples[0:7], samples[7:14], samples[14:17]]
    reference = {
        dtype: [plain.window_gradient(model(dtype), task, window) for window in windows] for dtype in TOLERANCE
    }
    for of_rank in ranks.run(window_gradients, texts, len(windows), world_size=degree):
        for (dtype, micro), of_config in zip(cells, of_rank, strict=True):
            for window, (mine, expected) in enumerate(zip(of_config, reference[dtype], strict=True)):
                difference = plain.relative_difference(mine, expected)
                assert difference <= TOLERANCE[dtype], f"{dtype}, micro {micro}, window {window}: {difference}"


OPTIMIZERS = {
    "sgd": (
        ["optimizer=sgd", "optimizer.lr=0.5", "optimizer.momentum=0.9"],
        torch.optim.SGD,
        {"lr": 0.5, "momentum": 0.9},
    ),
    "adamw": (
        ["optimizer=adamw", "optimizer.lr=0.01", "optimizer.eps=1e-5", "optimizer.groups=[]"],
        torch.optim.AdamW,
        {"lr": 0.01, "eps": 1e-5, "betas": (0.9, 0.95), "weight_decay": 0.1},
    ),
}


@pytest.mark.parametrize("name", list(OPTIMIZERS))
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("degree", [1, 2, 3, 4])
def test_parameters_after_five_updates_with_a_clip_that_bites(
    ranks: Any, task: CausalLM, degree: int, dtype: str, name: str
) -> None:
    overrides, kind, arguments = OPTIMIZERS[name]
    max_norm = 0.05
    more = [*overrides, f"training.max_grad_norm={max_norm}", "training.duration=5 updates"]
    expected = model(dtype)
    lines = plain.train(expected, task, Sequences(), GLOBAL, 5, kind(expected.parameters(), **arguments), max_norm)
    assert min(line["grad_norm"] for line in lines) > 2 * max_norm  # the clip bites in every update
    found = ranks.run(
        trained, [config(dtype, 1, *more, "batch.layout=arrival"), config(dtype, 3, *more)], world_size=degree
    )
    for of_rank in found:
        for run in of_rank:
            assert plain.largest_difference(run["state"], dict(expected.state_dict())) <= TOLERANCE[dtype]
            for line, reference in zip(run["lines"], lines, strict=True):
                assert line["loss"] == pytest.approx(reference["loss"], rel=TOLERANCE[dtype])
                assert line["grad_norm"] == pytest.approx(reference["grad_norm"], rel=2 * TOLERANCE[dtype])
    assert all(
        torch.equal(first["state"][key], other["state"][key])
        for of_rank in found[1:]
        for first, other in zip(found[0], of_rank, strict=True)
        for key in first["state"]
    ), "ranks hold the same bits"
