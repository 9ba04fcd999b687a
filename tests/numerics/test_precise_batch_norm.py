"""Precise batch norm: the statistics of many samples, against a dozen plain lines, under any strategy."""

from typing import Any

import pytest
import torch
from configs import PLAIN, config_text
from test_batch_norm import Points
from torch import Tensor, nn
from toys import assembled

from launcher.config.choices import Device
from launcher.config.validate import parse
from launcher.errors import ConfigError
from launcher.plan.facts import Facts
from launcher.plan.mesh import World
from launcher.plan.plan import make_plan
from launcher.train.randomness import epoch_order

pytestmark = pytest.mark.slow

SEED = 3


class Deep(nn.Module):
    """The second batch norm sees what the first one has made of its group."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.BatchNorm2d(3), nn.BatchNorm1d(4)
        self.mix, self.drop, self.classifier = nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.second(self.mix(self.first(x).square().mean((2, 3))))
        logits: Tensor = self.classifier(self.drop(hidden))
        return logits


def config(samples: object, *more: str) -> str:
    return config_text(
        *PLAIN,
        f"run.seed={SEED}",
        *("model=custom", "model._target_=test_precise_batch_norm.Deep"),
        *("task=classification", "task.num_classes=2"),
        *("data=custom", "data.train._target_=test_batch_norm.Points", "+data.train.count=23"),
        "data.validation={_target_: test_batch_norm.Points, count: 9}",
        *("batch.global_batch_size=6", "batch.micro_batch_size=3", "training.duration=5 updates", "optimizer.lr=0.1"),
        *("data.drop_last=true", f"model_patches.precise_batch_norm={samples}"),
        *more,
    )


def results(rank: int, world_size: int, text: str) -> dict[str, Any]:
    """State and validation at the end, and the state once it is settled."""
    fit = assembled(rank, world_size, text)
    progress = fit.run()
    trained = {name: one.clone() for name, one in fit.sharding.full_state().items()}
    if fit.precise is not None:
        fit.precise.settle()
    return {"trained": trained, "final": fit.sharding.full_state(), "validation": progress.validation}


def by_hand(state: dict[str, Tensor], samples: int) -> dict[str, Tensor]:
    """The moments over the first samples in their order, in groups of three."""
    model, points = Deep().double(), Points(23)
    model.load_state_dict(state)
    first, second = [], []
    for group in epoch_order(SEED, 0, 23, shuffle=True)[:samples].reshape(-1, 3):
        x = points.x[torch.as_tensor(group)].double()
        model.eval()
        model.first.train()
        first.append(x.transpose(0, 1).flatten(1))
        second.append(model.mix(model.first(x).square().mean((2, 3))))
    values, hidden = torch.cat(first, 1), torch.cat(second)
    return {
        "first.running_mean": values.mean(1),
        "first.running_var": values.var(1),
        "second.running_mean": hidden.mean(0).detach(),
        "second.running_var": hidden.var(0).detach(),
    }


@pytest.mark.parametrize(("world", "more"), [(1, []), (2, []), (2, ["strategy=fsdp"]), (3, ["strategy=zero3"])])
def test_statistics_of_many_samples(ranks: Any, world: int, more: list[str]) -> None:
    # 20 samples are six groups of three, and two that are left out
    found = ranks.run(results, config(20, *more), world_size=world, timeout=120)
    expected = by_hand(found[0]["trained"], 18)
    for of_rank in found:
        for name, value in expected.items():
            # fp32: sums of at most 72 squares below 30, and the model's own rounding, 2^-24 each
            assert torch.allclose(of_rank["final"][name].double(), value, rtol=2e-5, atol=2e-6), name
        assert all(torch.equal(value, found[0]["final"][name]) for name, value in of_rank["final"].items())


def test_it_decides_what_validation_sees_and_nothing_else(ranks: Any) -> None:
    one, other = (ranks.run(results, config(samples), world_size=2)[0] for samples in (20, "null"))
    assert all(torch.equal(value, other["trained"][name]) for name, value in one["trained"].items())
    assert one["validation"].loss != other["validation"].loss
    model = Deep().eval()
    model.load_state_dict(one["final"])
    points = Points(9)
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model(points.x), torch.tensor([i % 2 for i in range(9)]))
    assert one["validation"].loss == pytest.approx(float(loss), rel=1e-5)


def test_ghost_groups_are_the_groups(ranks: Any) -> None:
    ghost = ["model_patches.batch_norm=ghost", "model_patches.ghost_size=3", "batch.micro_batch_size=6"]
    ((found),) = ranks.run(results, config(18, *ghost), world_size=1)
    for name, value in by_hand(found["trained"], 18).items():
        assert torch.allclose(found["final"][name].double(), value, rtol=2e-5, atol=2e-6), name


@pytest.mark.parametrize(
    ("key", "samples", "more", "facts"),
    [
        ("model_patches.precise_batch_norm", 1, [], Facts()),
        ("model_patches.precise_batch_norm", 20, [], Facts(batch_norm_layers=0)),
        ("model_patches.precise_batch_norm", 20, ["mesh.pp=2"], Facts(batch_norm_layers=2)),
    ],
)
def test_what_cannot_be_is_refused(key: str, samples: int, more: list[str], facts: Facts) -> None:
    with pytest.raises(ConfigError) as error:
        make_plan(parse(config(samples, *more)), facts, world=World(1, 2, Device.cpu))
    assert error.value.key == key
