"""fp16: the scale of the loss leaves no trace in what is clipped, logged or applied; an overflow costs one window."""

from typing import Any

import plain
import pytest
import torch
from configs import PLAIN, config_text, own
from torch import Tensor, nn
from toys import Sequences, trained

from launcher.errors import NonFiniteError
from launcher.models import GPT
from launcher.tasks import CausalLM

pytestmark = pytest.mark.slow

STRATEGIES = {"ddp": (2, []), "fsdp": (2, ["strategy=fsdp"]), "hsdp": (4, ["strategy=fsdp", "mesh.dp_replicate=2"])}


class Product(nn.Module):
    """A weight of 1 times what comes in, as a matrix product, which fp16 rounds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.linear.weight)

    def forward(self, rows: Tensor) -> Tensor:
        return self.linear(rows)  # type: ignore[no-any-return]


class Numbers:
    """Samples of one number each."""

    def __init__(self, values: list[float]) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> list[float]:
        return [self.values[index]]


@pytest.mark.parametrize("scale", [1, 1024, 16384])
@pytest.mark.parametrize("name", list(STRATEGIES))
def test_b02_b03_the_norm_is_that_of_the_unscaled_gradient(ranks: Any, name: str, scale: int) -> None:
    degree, strategy = STRATEGIES[name]
    targets = [[[10.0, 0.0]], [[-4.0, 8.0]], [[10.0, 0.0]], [[-4.0, 8.0]]]
    texts = [
        config_text(
            *PLAIN,
            *own("scalar.Scalar", "scalar.SquaredError", "scalar.Targets", targets=targets),
            *strategy,
            "+model.size=2",
            "precision=fp16",
            f"precision.initial_scale={scale}",
            "batch.global_batch_size=4",
            f"batch.micro_batch_size={micro}",
            "training.max_grad_norm=1",
            "training.duration=1 updates",
        )
        for micro in (1, 2)
    ]
    for of_rank in ranks.run(trained, texts, world_size=degree):
        for run in of_rank:
            assert run["state"]["w"].tolist() == pytest.approx([0.6, 0.8], rel=1e-6)
            assert run["lines"][0]["grad_norm"] == pytest.approx(5, rel=1e-6)
            assert run["lines"][0]["loss"] == pytest.approx((100 + 80) / 4, rel=1e-6)
            assert run["lines"][0]["loss_scale"] == scale


@pytest.mark.parametrize("name", list(STRATEGIES))
def test_b05_an_overflow_skips_the_window_on_every_rank_and_takes_no_rate(ranks: Any, name: str) -> None:
    degree, strategy = STRATEGIES[name]
    # the gradient of the output is the scale itself: 65536 is no number of 16 bits, 32768 is
    text = config_text(
        *PLAIN,
        *own("test_fp16.Product", "toys.Same", "test_fp16.Numbers", values=[1.0] * 20),
        *strategy,
        "precision=fp16",
        "precision.scale_growth_interval=2",
        "batch.global_batch_size=4",
        "batch.micro_batch_size=1",
        "training.duration=5 updates",
        "training.max_skipped_in_a_row=1",
        "schedule.warmup=4 updates",
        "optimizer.lr=0.4",
        "optimizer.momentum=0.5",
    )
    found = ranks.run(trained, [text], world_size=degree)
    for ((run,),) in zip(found, strict=True):
        lines = run["lines"]
        assert [line["skipped"] for line in lines] == [True, False, False, True, False]
        assert [line["loss_scale"] for line in lines] == [65536, 32768, 32768, 65536, 32768]
        assert [line["lr"] for line in lines] == pytest.approx([0.1, 0.1, 0.2, 0.3, 0.3])
        assert [line["applied"] for line in lines] == [0, 1, 2, 2, 3]
        # gradient 1 each time; velocities 1, 1.5, 1.75
        assert run["state"]["linear.weight"].item() == pytest.approx(1 - 0.1 - 0.2 * 1.5 - 0.3 * 1.75, rel=1e-6)


def test_numbers_that_no_scale_explains_end_the_run(ranks: Any) -> None:
    text = config_text(
        *PLAIN,
        *own("test_fp16.Product", "toys.Same", "test_fp16.Numbers", values=[1.0, 1.0, 1e30, 1.0]),
        "precision=fp16",
        "batch.global_batch_size=4",
        "training.on_nonfinite=stop",
        "training.duration=2 updates",
    )
    with pytest.raises(NonFiniteError, match="update 1"):
        ranks.run(trained, [text], world_size=2)


@pytest.mark.parametrize("name", list(STRATEGIES))
def test_b04_fp16_follows_fp32_with_one_scale_a_window(ranks: Any, name: str) -> None:
    degree, strategy = STRATEGIES[name]
    sizes = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "intermediate_size": 24, "vocab_size": 14}
    text = config_text(
        *PLAIN,
        *[f"model.{key}={value}" for key, value in sizes.items()],
        *strategy,
        "precision=fp16",
        "precision.initial_scale=1024",
        "task.vocab_size=14",
        "task.bos=13",
        "data=custom",
        "data.train._target_=toys.Sequences",
        "optimizer.lr=0.5",
        "training.max_grad_norm=0.05",
        "batch.global_batch_size=7",
        "batch.micro_batch_size=1",
        "training.duration=5 updates",
    )
    torch.manual_seed(0)
    model = GPT(**sizes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    lines = plain.train(model, CausalLM(vocab_size=14, bos=13), Sequences(), 7, 5, optimizer, 0.05)
    for of_rank in ranks.run(trained, [text], world_size=degree):
        assert not any(line["skipped"] for line in of_rank[0]["lines"])
        for line, reference in zip(of_rank[0]["lines"], lines, strict=True):
            # products rounded to 11 bits
            assert line["loss"] == pytest.approx(reference["loss"], rel=2**-12)
            assert line["loss"] != reference["loss"]
            assert line["grad_norm"] == pytest.approx(reference["grad_norm"], rel=2**-8)
        assert plain.largest_difference(of_rank[0]["state"], dict(model.state_dict())) <= 2**-10
