"""What the scaling rules make of the optimizer's values is what the optimizer has, under every strategy."""

from typing import Any

import plain
import pytest
import torch
from test_update import TOLERANCE, config, model
from toys import Sequences, assembled, trained

from launcher.tasks import CausalLM

pytestmark = pytest.mark.slow

WINDOW = 8
STRATEGIES = ["ddp", "fsdp", "zero1", "zero2", "zero3"]
# k = 8 / 2: twice the rate, four times the distance of the betas from 1 and the weight decay, half of eps. eps is
# large, for Adam divides the rounding of small gradients by it
SCALED = [
    "optimizer=adamw",
    "optimizer.lr=0.005",
    "optimizer.betas=[0.9,0.95]",
    "optimizer.eps=2e-3",
    "optimizer.weight_decay=0.025",
    "scaling.rule=sqrt",
    "scaling.adam_betas_and_eps=true",
    "scaling.weight_decay=linear",
    "scaling.base_batch_size=2",
    f"batch.global_batch_size={WINDOW}",
    "training.duration=3 updates",
]
BY_HAND: dict[str, Any] = {"lr": 0.01, "betas": (0.6, 0.8), "eps": 1e-3}
DECAYS = [0.0, 0.1]


def groups(rank: int, world_size: int, texts: list[str]) -> list[list[dict[str, Any]]]:
    """The groups of each configuration's optimizer without their parameters."""
    fits = [assembled(rank, world_size, text) for text in texts]
    return [
        [
            {key: group[key] for key in ("lr", "betas", "eps", "weight_decay")}
            for group in fit.sharding.optimizer.param_groups
        ]
        for fit in fits
    ]


def test_every_strategy_trains_with_the_scaled_values(ranks: Any) -> None:
    texts = [config("float32", 2, *SCALED, f"strategy={name}") for name in STRATEGIES]
    for of_rank in ranks.run(groups, texts, world_size=2, timeout=120):
        for found in of_rank:
            assert [group["weight_decay"] for group in found] == pytest.approx(DECAYS, rel=1e-12)
            for group in found:
                assert list(group["betas"]) == list(BY_HAND["betas"])
                assert (group["lr"], group["eps"]) == pytest.approx((BY_HAND["lr"], BY_HAND["eps"]), rel=1e-12)

    expected = model("float32")
    split: list[list[Any]] = [[], []]
    for one in expected.parameters():
        split[one.ndim > 1].append(one)
    sets = [{"params": params, "weight_decay": decay} for params, decay in zip(split, DECAYS, strict=True)]
    optimizer = torch.optim.AdamW(sets, **BY_HAND)
    plain.train(expected, CausalLM(vocab_size=14, bos=13), Sequences(), WINDOW, 3, optimizer, None)
    for of_rank in ranks.run(trained, texts, world_size=2, timeout=120):
        for run in of_rank:
            assert plain.largest_difference(run["state"], dict(expected.state_dict())) <= TOLERANCE["float32"]


class Rising(torch.optim.SGD):
    """SGD whose momentum is 0.5, 0.7 and 0.9 in its first updates."""

    def step(self) -> None:  # type: ignore[override]
        self.updates = getattr(self, "updates", 0) + 1
        for group in self.param_groups:
            group["momentum"] = min(0.3 + 0.2 * self.updates, 0.9)
            group["lr"] = 0.1 * min(self.updates / 3, 1)
        super().step()


def test_every_strategy_trains_with_the_momentum_of_the_warmup(ranks: Any) -> None:
    more = ["optimizer=sgd", "optimizer.lr=0.1", "optimizer.momentum=0.9", "optimizer.nesterov=true"]
    more += ["schedule.warmup='3 updates'", "schedule.warmup_momentum=0.3", "training.duration=5 updates"]
    expected = model("float32")
    optimizer = Rising(expected.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    plain.train(expected, CausalLM(vocab_size=14, bos=13), Sequences(), WINDOW, 5, optimizer, None)
    texts = [
        config("float32", 2, *more, f"batch.global_batch_size={WINDOW}", f"strategy={name}") for name in STRATEGIES
    ]
    for of_rank in ranks.run(trained, texts, world_size=2, timeout=120):
        for run in of_rank:
            assert plain.largest_difference(run["state"], dict(expected.state_dict())) <= TOLERANCE["float32"]
