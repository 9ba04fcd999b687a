"""How the optimizer's values follow the global batch size.

Every rule starts from the configuration's own values, so a plan that is made again, as after a restart, scales once.
"""

from dataclasses import dataclass, field
from fractions import Fraction
from math import floor, isfinite, sqrt
from typing import Any

from launcher.config.choices import DecayRule, Rule
from launcher.config.schema import ScalingConfig
from launcher.errors import ConfigError
from launcher.plan.batch import exact_number

BASE = "scaling.base_batch_size"
ADAM = "scaling.adam_betas_and_eps"
_ADAM_FAMILY = ("adam", "lamb", "rmsprop")
_SGD_FAMILY = ("sgd", "lars")


@dataclass(frozen=True)
class Scaled:
    """The optimizer's values for this batch, and the lines that show how they came about."""

    lr: float
    weight_decay: float | None
    """None: the optimizer has none of its own."""
    decay_factor: float
    """What every weight decay is multiplied by, those of the groups too."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the optimizer that a rule has changed: betas and eps."""
    lines: tuple[str, ...] = ()


def scale(scaling: ScalingConfig, optimizer: dict[str, Any], global_batch_size: int) -> Scaled:
    """What the values of `optimizer`, which suit `scaling.base_batch_size`, become for a window of this many samples.

    With k = global / base. linear: lr = base x k (Goyal et al. 2017, arXiv:1706.02677, section 2.1). sqrt: lr = base x
    sqrt(k) (Krizhevsky 2014, arXiv:1404.5997; for Adam Malladi et al. 2022, arXiv:2205.10287), and where it is asked
    for the rest of the latter's rule (section 5): betas 1 - k (1 - beta), eps / sqrt(k). A weight decay stays as it is
    unless its own rule is linear.

    Raises:
        ConfigError: a rule without a usable base_batch_size, a rate that is none, nothing to scale, or a beta that
            would leave [0, 1).
    """
    lr, base, decay = float(optimizer["lr"]), scaling.base_batch_size, optimizer.get("weight_decay")
    if not isfinite(lr) or lr < 0:
        raise ConfigError("optimizer.lr", lr, "must be a finite number of at least 0")
    if base is not None and base < 1:
        raise ConfigError(BASE, base, "must be a whole number of at least 1")
    if scaling.adam_betas_and_eps and scaling.rule is not Rule.sqrt:
        problem = f"belongs to the square root rule for Adam, and scaling.rule is {scaling.rule.value}"
        raise ConfigError(ADAM, "true", problem, hint="scaling.rule=sqrt")
    if scaling.rule is Rule.none and scaling.weight_decay is DecayRule.none:
        unused = "" if base is None else f"; {BASE} has no effect"
        return Scaled(lr, decay, 1.0, lines=(f"lr = {lr:g} (scaling.rule=none{unused})",))
    if base is None:
        asking = "rule" if scaling.rule is not Rule.none else "weight_decay"
        problem = f"scaling.{asking}={getattr(scaling, asking).value} needs the global batch size that the optimizer's "
        raise ConfigError(BASE, "null", problem + "values are meant for")
    ratio = f"{global_batch_size} / {base}"
    rate, lines = _rate(scaling.rule, lr, Fraction(global_batch_size, base), ratio)
    factor, decay_lines = _decay(scaling.weight_decay, optimizer, Fraction(global_batch_size, base), ratio)
    lines += decay_lines
    arguments: dict[str, Any] = {}
    if scaling.adam_betas_and_eps:
        arguments, more = _adam(optimizer, global_batch_size, base)
        lines += more
    return Scaled(rate, None if decay is None else decay * factor, factor, arguments, tuple(lines))


def scaled_rate(rule: Rule, lr: float, k: Fraction) -> float:
    """The rate for k times the batch that `lr` is meant for."""
    return lr if rule is Rule.none else lr * float(k) if rule is Rule.linear else lr * sqrt(k)


def _rate(rule: Rule, lr: float, k: Fraction, ratio: str) -> tuple[float, list[str]]:
    scaled = scaled_rate(rule, lr, k)
    if rule is Rule.none:
        return lr, [f"lr = {lr:g} (none)"]
    factor = ratio if rule is Rule.linear else f"sqrt({ratio})"
    return scaled, [f"lr = {lr:g} x {factor} = {scaled:g} ({rule.value})"]


def _decay(rule: DecayRule, optimizer: dict[str, Any], k: Fraction, ratio: str) -> tuple[float, list[str]]:
    """The factor of every weight decay, and a line for each that it changes."""
    if rule is DecayRule.none:
        return 1.0, []
    named = {"weight_decay": optimizer.get("weight_decay")}
    for index, group in enumerate(optimizer.get("groups", [])):
        named[f"groups[{index}].weight_decay"] = group["weight_decay"]
    given = {name: value for name, value in named.items() if value is not None}
    if not given:
        raise ConfigError("scaling.weight_decay", rule.value, "has no effect: the optimizer has no weight_decay")
    lines = [f"{name} = {value:g} x {ratio} = {value * float(k):g} (linear)" for name, value in given.items() if value]
    return float(k), lines


def _adam(optimizer: dict[str, Any], global_batch_size: int, base: int) -> tuple[dict[str, Any], list[str]]:
    """betas and eps after Malladi et al. 2022, and a line for each."""
    betas, eps = optimizer.get("betas"), optimizer.get("eps")
    exact = [exact_number(beta) for beta in betas] if isinstance(betas, list) else []
    if len(exact) != 2 or not all(beta is not None and 0 <= beta < 1 for beta in exact):
        problem = f"{ADAM}=true needs the two betas of Adam, from 0 to below 1"
        raise ConfigError("optimizer.betas", betas, problem, hint="optimizer.betas=[0.9,0.999] for an optimizer of it")
    if isinstance(eps, bool) or not isinstance(eps, int | float) or not 0 <= eps < float("inf"):
        raise ConfigError("optimizer.eps", eps, f"{ADAM}=true needs the eps of Adam, a number of at least 0")
    k, ratio = Fraction(global_batch_size, base), f"{global_batch_size} / {base}"
    lines, scaled = [], []
    for number, beta in enumerate(exact, 1):
        assert beta is not None
        new = 1 - k * (1 - beta)
        if new < 0:
            most = floor(base / (1 - beta))
            problem = f"beta{number} would be 1 - {ratio} x (1 - {float(beta):g}) = {float(new):g}, below 0"
            hint = f"a global batch of at most {most} samples, a larger {BASE}, or {ADAM}=false"
            raise ConfigError(ADAM, "true", problem, hint=hint)
        scaled.append(float(new))
        lines.append(f"beta{number} = 1 - {ratio} x (1 - {float(beta):g}) = {float(new):g} (sqrt)")
    new_eps = eps / sqrt(k)
    lines.append(f"eps = {eps:g} / sqrt({ratio}) = {new_eps:g} (sqrt)")
    return {"betas": scaled, "eps": new_eps}, lines


def rule_notes(scaling: ScalingConfig, optimizer: dict[str, Any]) -> list[str]:
    """Where the scaling rule was found for other optimizers."""
    target = str(optimizer.get("_target_", "")).rpartition(".")[2].lower()
    if scaling.rule is Rule.linear and any(name in target for name in _ADAM_FAMILY):
        return ["scaling.rule=linear was found for SGD; for the Adam family sqrt is derived in Malladi et al. 2022"]
    if scaling.rule is Rule.sqrt and any(name in target for name in _SGD_FAMILY):
        return ["scaling.rule=sqrt suits the Adam family; for SGD linear is the usual rule (Goyal et al. 2017)"]
    return []
