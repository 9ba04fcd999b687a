"""LAMB: Adam whose step for each tensor is as long as the tensor itself, times the learning rate."""

import math
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from launcher.errors import ConfigError
from launcher.optim.group import GroupOptimizer
from launcher.optim.local import LocalStep, local, trained
from launcher.optim.norm import whole_norms


class LAMB(GroupOptimizer):
    """Algorithm 2 of You et al. 2020 (arXiv:1904.00962), with phi the identity.

    With r = m / (sqrt(v) + eps) of the corrected moments and u = r + weight_decay x, a tensor x moves by
    lr norm(x) / norm(u) u. A tensor without weight decay (norms and biases, as a rule) takes Adam's step lr r, and so
    does one whose norm or step is zero; `always_adapt` gives every tensor the ratio.

    Args:
        params: as any optimizer of torch takes them; tensors may be sharded (DTensor): their norms are whole ones.
        lr: the rate.
        betas: decay of the averages of the gradient and of its square.
        eps: added to the root of the second average.
        weight_decay: the factor of x in u.
        always_adapt: whether tensors without weight decay take the ratio too.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        always_adapt: bool = False,
    ) -> None:
        if not all(0 <= beta < 1 for beta in betas):
            raise ConfigError("optimizer.betas", list(betas), "must lie from 0 to below 1")
        if not eps > 0:
            raise ConfigError("optimizer.eps", eps, "must be above 0")
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "always_adapt": always_adapt})

    def update(self, group: dict[str, Any]) -> None:
        (beta1, beta2), decay = group["betas"], group["weight_decay"]
        steps: list[LocalStep] = []
        for parameter in trained(group):
            state = self.state[parameter]
            if not state:
                state.update(step=0, exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter))
            state["step"] += 1
            gradient, mean, square = local(parameter.grad), local(state["exp_avg"]), local(state["exp_avg_sq"])
            mean.lerp_(gradient, 1 - beta1)
            square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            root = square.sqrt().div_(math.sqrt(1 - beta2 ** state["step"])).add_(group["eps"])
            update = (mean / root).div_(1 - beta1 ** state["step"])
            if decay:
                update.add_(local(parameter), alpha=decay)
            steps.append(LocalStep(parameter, update))
        ratios = [1.0] * len(steps)
        if decay or group["always_adapt"]:
            sizes, lengths = whole_norms([one.parameter for one in steps]), whole_norms([one.whole for one in steps])
            ratios = [size / length if size and length else 1.0 for size, length in zip(sizes, lengths, strict=True)]
        for one, ratio in zip(steps, ratios, strict=True):
            local(one.parameter).add_(one.update, alpha=-group["lr"] * ratio)
