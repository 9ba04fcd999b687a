"""The table of docs/strategies.md: what travels in a window under each strategy, counted as it is called."""

from pathlib import Path
from typing import Any

import pytest
from configs import PLAIN, config_text
from toys import assembled, travelled

from launcher.models import GPT

pytestmark = pytest.mark.slow

TABLE = Path(__file__).parents[2] / "docs" / "strategies.md"
SIZES = {"hidden_size": 32, "num_layers": 4, "num_heads": 2, "intermediate_size": 64, "vocab_size": 14}
NOTHING_KEPT = "+strategy.deepspeed.zero_optimization.stage3_param_persistence_threshold=0"
"""DeepSpeed keeps parameters of less than 100,000 elements whole otherwise: all of this model's."""
STRATEGIES = {
    "ddp": (2, ["strategy=ddp"]),
    "fsdp": (2, ["strategy=fsdp"]),
    "fsdp, reduce_each=window": (2, ["strategy=fsdp", "strategy.reduce_each=window"]),
    "fsdp, dp_replicate=2": (4, ["strategy=fsdp", "mesh.dp_replicate=2"]),
    "zero1": (2, ["strategy=zero1"]),
    "zero2": (2, ["strategy=zero2"]),
    "zero2, reduce_each=window": (2, ["strategy=zero2", "strategy.reduce_each=window"]),
    "zero3": (2, ["strategy=zero3", NOTHING_KEPT]),
    "zero3, reduce_each=window": (2, ["strategy=zero3", "strategy.reduce_each=window", NOTHING_KEPT]),
}


def counted(rank: int, world_size: int, text: str) -> tuple[int, int, int, int]:
    """Of the second window: how many collectives add up and their elements, how many gather and theirs."""
    fit = assembled(rank, world_size, text)
    fit.sharding.prepare()
    fit.runner.run(fit.windows.get(1))
    fit.sharding.step(0.1, 1.0)
    window = fit.windows.get(2)

    def update() -> None:
        fit.runner.run(window)
        fit.sharding.step(0.1, 1.0)

    events = travelled(update)
    fit.sharding.close()
    added = [size for name, size in events if name in ("allreduce_", "_reduce_scatter_base_") and size > 8]
    gathered = [size for name, size in events if name == "_allgather_base_" and size > 8]
    return len(added), sum(added), len(gathered), sum(gathered)


def row(ranks: Any, name: str) -> str:
    degree, overrides = STRATEGIES[name]
    text = config_text(
        *PLAIN,
        *[f"model.{key}={value}" for key, value in SIZES.items()],
        *("task.vocab_size=14", "task.bos=13", "data=custom", "data.train._target_=toys.Sequences"),
        "+data.train.count=32",
        f"batch.global_batch_size={4 * degree}",
        "batch.micro_batch_size=1",
        "training.duration=2 updates",
        *overrides,
    )
    of_ranks = ranks.run(counted, text, world_size=degree)
    assert len(set(of_ranks)) == 1, of_ranks
    added, added_elements, gathered, gathered_elements = of_ranks[0]
    parameters = sum(one.numel() for one in GPT(**SIZES).parameters())
    return (
        f"| {name} | {degree} | {added} | {added_elements / parameters:.1f} | {gathered} | "
        f"{gathered_elements / parameters:.1f} |"
    )


@pytest.mark.parametrize("name", list(STRATEGIES))
def test_the_table_is_what_travels(ranks: Any, name: str) -> None:
    (written,) = [line for line in TABLE.read_text(encoding="utf-8").splitlines() if line.startswith(f"| {name} |")]
    assert row(ranks, name) == written
