"""Ghost batch norm trains one model, whatever ranks, micro-batches and strategy: that of a dozen plain lines."""

from typing import Any

import pytest
import torch
from plain import largest_difference
from test_batch_norm import Normed, Points, config, states
from torch import Tensor, nn
from toys import trained

from launcher.config.validate import parse
from launcher.train.parts import build_model

pytestmark = pytest.mark.slow

SIZE, WINDOW, UPDATES = 2, 7, 4  # of 12 points: windows of 7 and 5, whose last groups have one point
PATCH = ("model_patches.batch_norm=ghost", f"model_patches.ghost_size={SIZE}", f"training.duration={UPDATES} updates")


def by_hand() -> dict[str, Tensor]:
    model: Any = build_model(parse(config(WINDOW, SIZE)))
    assert isinstance(model, Normed)
    norm = nn.BatchNorm2d(3)  # of a group, with the running statistics of that group alone
    mean, var = torch.zeros(3), torch.ones(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    points, windows = Points(), [range(7), range(7, 12)]
    for update in range(UPDATES):
        window = list(windows[update % 2])
        groups = [window[i : i + SIZE] for i in range(0, len(window), SIZE)]
        loss, means, variances = torch.zeros(()), [], []
        for group in groups:
            x = points.x[group]
            means.append(x.mean((0, 2, 3)))
            variances.append(x.var((0, 2, 3)))
            normed = nn.functional.batch_norm(x, None, None, model.norm.weight, model.norm.bias, True, 0.0, norm.eps)
            logits = model.classifier(normed.square().mean((2, 3)))
            loss = loss + nn.functional.cross_entropy(logits, torch.tensor([i % 2 for i in group]), reduction="sum")
        optimizer.zero_grad()
        (loss / len(window)).backward()
        optimizer.step()
        old = 0.9 ** len(groups)
        mean = old * mean + (1 - old) * torch.stack(means).mean(0)
        var = old * var + (1 - old) * torch.stack(variances).mean(0)
    state = dict(model.state_dict())
    return state | {"norm.running_mean": mean, "norm.running_var": var, "norm.num_batches_tracked": torch.tensor(14)}


@pytest.mark.parametrize("degree", [1, 2, 3])
def test_any_division_gives_the_same_model(ranks: Any, degree: int) -> None:
    texts = [config(WINDOW, micro, *PATCH) for micro in (2, 4, 8)]
    texts.append(config(WINDOW, 2, *PATCH, "activation_checkpoint=full"))
    texts += [config(WINDOW, 2, *PATCH, f"strategy={name}") for name in (("fsdp", "zero2") if degree == 2 else ())]
    expected = by_hand()
    for state in states(ranks.run(trained, texts, world_size=degree)):
        # four updates of sums of some ten rounded terms
        assert largest_difference(state, expected) <= 1e-6
