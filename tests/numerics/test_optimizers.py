"""LAMB and LARS against a dozen lines after their papers, whole and sharded."""

from collections.abc import Callable
from typing import Any

import plain
import pytest
import torch
from configs import PLAIN, config_text
from test_update import GLOBAL, config, model
from torch import Tensor, nn
from toys import Sequences, trained

from launcher.config.choices import Device
from launcher.config.validate import parse
from launcher.errors import ConfigError
from launcher.optim import LAMB, LARS
from launcher.plan.facts import Facts
from launcher.plan.mesh import World
from launcher.plan.plan import make_plan
from launcher.tasks import CausalLM

DECAY, LR, MAX_NORM = 0.1, 0.05, 0.05
STRATEGIES = {
    "single": (1, []),
    "ddp": (2, []),
    "fsdp": (3, ["strategy=fsdp"]),
    "hsdp": (4, ["strategy=fsdp", "mesh.dp_replicate=2"]),
}


class Lamb:
    """Algorithm 2 of arXiv:1904.00962."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters, self.t = parameters, 0
        self.m = [torch.zeros_like(one) for one in parameters]
        self.v = [torch.zeros_like(one) for one in parameters]

    @torch.no_grad()
    def step(self) -> None:
        self.t += 1
        for x, m, v in zip(self.parameters, self.m, self.v, strict=True):
            assert x.grad is not None
            m.copy_(0.9 * m + 0.1 * x.grad)
            v.copy_(0.99 * v + 0.01 * x.grad**2)
            r = (m / (1 - 0.9**self.t)) / ((v / (1 - 0.99**self.t)).sqrt() + 1e-5)
            decay = DECAY if x.ndim > 1 else 0.0
            u = r + decay * x
            x -= LR * (x.norm() / u.norm() if decay else 1.0) * u


class Lars:
    """Algorithm 1 of arXiv:1708.03888."""

    def __init__(self, parameters: list[nn.Parameter], nesterov: bool = False) -> None:
        self.parameters, self.nesterov = parameters, nesterov
        self.v = [torch.zeros_like(one) for one in parameters]

    @torch.no_grad()
    def step(self) -> None:
        for x, v in zip(self.parameters, self.v, strict=True):
            assert x.grad is not None
            decay = DECAY if x.ndim > 1 else 0.0
            rate = LR * (0.3 * x.norm() / (x.grad.norm() + decay * x.norm()) if decay else 1.0)
            step = rate * (x.grad + decay * x)
            v.copy_(0.9 * v + step)
            x -= step + 0.9 * v if self.nesterov else v


OPTIMIZERS: dict[str, tuple[list[str], Callable[[list[nn.Parameter]], Any]]] = {
    "lamb": (["optimizer=lamb", "optimizer.betas=[0.9,0.99]", "optimizer.eps=1e-5"], Lamb),
    "lars": (["optimizer=lars", "optimizer.trust=0.3"], Lars),
    "lars nesterov": (
        ["optimizer=lars", "optimizer.trust=0.3", "optimizer.nesterov=true"],
        lambda parameters: Lars(parameters, nesterov=True),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize("name", list(STRATEGIES))
def test_norms_are_those_of_whole_tensors(ranks: Any, name: str, optimizer: str) -> None:
    degree, strategy = STRATEGIES[name]
    overrides, kind = OPTIMIZERS[optimizer]
    more = [*overrides, *strategy, f"optimizer.lr={LR}", f"optimizer.weight_decay={DECAY}"]
    more += [f"training.max_grad_norm={MAX_NORM}", "training.duration=5 updates"]
    for dtype, tolerance in (("float64", 1e-12), ("float32", 1e-6)):
        expected = model(dtype)
        reference = _Zeroing(expected, kind(list(expected.parameters())))
        task = CausalLM(vocab_size=14, bos=13)
        lines = plain.train(expected, task, Sequences(), GLOBAL, 5, reference, MAX_NORM)
        assert min(line["grad_norm"] for line in lines) > MAX_NORM
        for of_rank in ranks.run(trained, [config(dtype, 2, *more)], world_size=degree):
            assert plain.largest_difference(of_rank[0]["state"], dict(expected.state_dict())) <= tolerance


class _Zeroing:
    """An optimizer with torch's zero_grad."""

    def __init__(self, of: nn.Module, optimizer: Any) -> None:
        self.step, self.zero_grad = optimizer.step, of.zero_grad


def test_a_tensor_of_zeros_and_a_gradient_of_zeros_move_by_the_plain_step() -> None:
    for kind, moved in ((LAMB, 0.1), (LARS, 0.1)):
        zero, still = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.ones(4))
        zero.grad, still.grad = torch.ones(4), torch.zeros(4)
        kind([zero, still], lr=0.1, weight_decay=0.5).step()
        assert zero.tolist() == pytest.approx([-moved] * 4, rel=1e-5)
        assert bool(still.isfinite().all())


def test_closures_and_state_are_those_of_any_optimizer() -> None:
    parameter = nn.Parameter(torch.ones(3, 3))

    def loss() -> Tensor:
        value = parameter.square().sum()
        parameter.grad = None
        value.backward()
        return value.detach()

    for kind in (LAMB, LARS):
        optimizer = kind([parameter], lr=0.01)
        assert float(optimizer.step(loss)) > 0  # type: ignore[call-overload]
        again = kind([parameter], lr=0.01)
        again.load_state_dict(optimizer.state_dict())
        assert str(again.state_dict()) == str(optimizer.state_dict())


@pytest.mark.parametrize("optimizer", ["lamb", "lars"])
def test_zero_refuses_them_with_what_works(optimizer: str) -> None:
    text = config_text(*PLAIN[:-1], f"optimizer={optimizer}", "strategy=zero2")
    with pytest.raises(ConfigError, match=r"(?s)optimizer._target_=launcher.optim.*strategy=fsdp"):
        make_plan(parse(text), Facts(samples=64), world=World(1, 2, Device.cpu))


@pytest.mark.parametrize(
    ("kind", "arguments", "key"),
    [(LAMB, {"betas": (0.9, 1.0)}, "betas"), (LAMB, {"eps": 0}, "eps"), (LARS, {"momentum": 1}, "momentum")],
)
def test_values_that_cannot_work(kind: Any, arguments: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=f"optimizer.{key}"):
        kind([nn.Parameter(torch.ones(1))], **arguments)
