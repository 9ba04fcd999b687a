"""The choices of the group schedule/decay, each with keys of its own."""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING


@dataclass
class DecayConfig:
    name: str = MISSING
    """The decay after the warmup: constant, linear, cosine, step or wsd."""


@dataclass
class ConstantDecay(DecayConfig):
    name: str = "constant"


@dataclass
class LinearDecay(DecayConfig):
    name: str = "linear"
    final: float = 0.0
    """The rate at the end as a share of the peak."""


@dataclass
class CosineDecay(DecayConfig):
    name: str = "cosine"
    final: float = 0.0
    """The rate at the end as a share of the peak."""


@dataclass
class StepDecay(DecayConfig):
    name: str = "step"
    at: list[Any] = field(default_factory=lambda: ["50%", "75%"])
    """Durations from the start of training at which the rate is multiplied by `factor`."""
    factor: float = 0.1
    """What the rate is multiplied by at each of them."""


@dataclass
class WsdDecay(DecayConfig):
    name: str = "wsd"
    decay: Any = "20%"
    """Warmup, stable, decay: how long the decay at the end is, as a duration."""
    final: float = 0.0
    """The rate at the end as a share of the peak."""
    shape: str = "sqrt"
    """The form of the decay: sqrt (1 - sqrt(x), Haegele et al. 2024) or linear."""


DECAYS: tuple[type[DecayConfig], ...] = (ConstantDecay, LinearDecay, CosineDecay, StepDecay, WsdDecay)
