"""LARS: momentum whose step for each tensor is in proportion to the tensor itself."""

from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from launcher.errors import ConfigError
from launcher.optim.group import GroupOptimizer
from launcher.optim.local import local, trained
from launcher.optim.norm import whole_norms


class LARS(GroupOptimizer):
    """Algorithm 1 of You, Gitman and Ginsburg 2017 (arXiv:1708.03888).

    The rate of a tensor x with gradient g is lr times trust norm(x) / (norm(g) + weight_decay norm(x)), and the
    velocity is v = momentum v + rate (g + weight_decay x). A tensor without weight decay (norms and biases, as a rule)
    takes the rate lr, and so does one whose norm or gradient is zero; `always_adapt` gives every tensor the ratio.

    Args:
        params: as any optimizer of torch takes them; tensors may be sharded (DTensor): their norms are whole ones.
        lr: the rate.
        momentum: what is kept of the velocity.
        weight_decay: the factor of x that is added to the gradient.
        trust: eta of the paper.
        nesterov: whether the step looks ahead, rate (g + weight_decay x) + momentum v.
        always_adapt: whether tensors without weight decay take the ratio too.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 1e-4,
        trust: float = 1e-3,
        nesterov: bool = False,
        always_adapt: bool = False,
    ) -> None:
        if not 0 <= momentum < 1:
            raise ConfigError("optimizer.momentum", momentum, "must lie from 0 to below 1")
        if not trust > 0:
            raise ConfigError("optimizer.trust", trust, "must be above 0")
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust}
        super().__init__(params, {**defaults, "nesterov": nesterov, "always_adapt": always_adapt})

    def update(self, group: dict[str, Any]) -> None:
        decay, momentum = group["weight_decay"], group["momentum"]
        parameters = trained(group)
        ratios = [1.0] * len(parameters)
        if decay or group["always_adapt"]:
            sizes, slopes = (
                whole_norms(parameters),
                whole_norms([one.grad for one in parameters if one.grad is not None]),
            )
            ratios = [
                group["trust"] * size / (slope + decay * size) if size and slope else 1.0
                for size, slope in zip(sizes, slopes, strict=True)
            ]
        for parameter, ratio in zip(parameters, ratios, strict=True):
            state = self.state[parameter]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            velocity = local(state["momentum_buffer"])
            step = local(parameter.grad).add(local(parameter), alpha=decay).mul_(group["lr"] * ratio)
            velocity.mul_(momentum).add_(step)
            local(parameter).sub_(step.add_(velocity, alpha=momentum) if group["nesterov"] else velocity)
