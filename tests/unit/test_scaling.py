"""How the optimizer's values follow the batch, against values worked out by hand."""

from typing import Any

import pytest
from configs import config_text

from launcher.config.choices import DecayRule, Device, Rule
from launcher.config.schema import ScalingConfig
from launcher.config.validate import parse
from launcher.errors import ConfigError
from launcher.plan.facts import Facts
from launcher.plan.mesh import World
from launcher.plan.plan import Plan, make_plan
from launcher.plan.scaling import Scaled, rule_notes, scale


def scaled(
    rule: Rule,
    global_batch_size: int,
    base: int | None = 256,
    *,
    decay: DecayRule = DecayRule.none,
    adam: bool = False,
    **optimizer: Any,
) -> Scaled:
    return scale(ScalingConfig(rule, base, adam, decay), {"lr": 0.1, **optimizer}, global_batch_size)


def test_without_a_rule_nothing_changes() -> None:
    assert scaled(Rule.none, 1024, None, weight_decay=1e-4) == Scaled(
        0.1, 1e-4, 1.0, {}, ("lr = 0.1 (scaling.rule=none)",)
    )
    (line,) = scaled(Rule.none, 1024).lines
    assert "scaling.base_batch_size has no effect" in line


@pytest.mark.parametrize("k", [1, 2, 4, 8, 16, 32])
def test_linear_rule_of_goyal(k: int) -> None:
    # Goyal et al. 2017: 0.1 for 256 images, 0.1 k for 256 k, and the weight decay stays
    result = scaled(Rule.linear, 256 * k, weight_decay=1e-4)
    assert (result.lr, result.weight_decay) == (pytest.approx(0.1 * k, rel=1e-15), 1e-4)
    assert result.lines == (f"lr = 0.1 x {256 * k} / 256 = {0.1 * k:g} (linear)",)


def test_square_root_rule() -> None:
    result = scaled(Rule.sqrt, 1024)
    assert (result.lr, result.weight_decay, result.arguments) == (pytest.approx(0.2), None, {})
    assert result.lines == ("lr = 0.1 x sqrt(1024 / 256) = 0.2 (sqrt)",)


def test_linear_weight_decay() -> None:
    result = scaled(Rule.linear, 64, decay=DecayRule.linear, weight_decay=1e-4)
    assert (result.lr, result.weight_decay) == (pytest.approx(0.025), pytest.approx(2.5e-5))
    assert result.lines[1:] == ("weight_decay = 0.0001 x 64 / 256 = 2.5e-05 (linear)",)
    alone = scaled(Rule.none, 512, decay=DecayRule.linear, weight_decay=1e-4)
    assert (alone.lr, alone.weight_decay) == (0.1, pytest.approx(2e-4))
    assert alone.lines == ("lr = 0.1 (none)", "weight_decay = 0.0001 x 512 / 256 = 0.0002 (linear)")
    groups = [{"weight_decay": 0.5}, {"weight_decay": 0.0}, {"weight_decay": None}]
    grouped = scaled(Rule.none, 512, decay=DecayRule.linear, groups=groups)
    assert (grouped.weight_decay, grouped.decay_factor) == (None, 2.0)
    assert grouped.lines[1:] == ("groups[0].weight_decay = 0.5 x 512 / 256 = 1 (linear)",)


@pytest.mark.parametrize(
    # k = 4, 1/4 and 10, where beta1 reaches 0: 1 - k (1 - beta) and eps / sqrt(k), in decimals
    ("batch", "betas", "eps"),
    [(1024, [0.6, 0.8], 5e-9), (64, [0.975, 0.9875], 2e-8), (2560, [0.0, 0.5], 1e-8 / 10**0.5)],
)
def test_betas_and_eps_of_adam(batch: int, betas: list[float], eps: float) -> None:
    result = scaled(Rule.sqrt, batch, adam=True, betas=[0.9, 0.95], eps=1e-8)
    assert result.arguments["betas"] == betas
    assert result.arguments["eps"] == pytest.approx(eps, rel=1e-15)
    assert result.lr == pytest.approx(0.1 * (batch / 256) ** 0.5)


def test_every_scaled_value_has_its_line() -> None:
    assert scaled(Rule.sqrt, 1024, adam=True, betas=[0.9, 0.95], eps=1e-8).lines == (
        "lr = 0.1 x sqrt(1024 / 256) = 0.2 (sqrt)",
        "beta1 = 1 - 1024 / 256 x (1 - 0.9) = 0.6 (sqrt)",
        "beta2 = 1 - 1024 / 256 x (1 - 0.95) = 0.8 (sqrt)",
        "eps = 1e-08 / sqrt(1024 / 256) = 5e-09 (sqrt)",
    )


def test_a_beta_below_zero_is_refused_with_the_largest_batch_that_works() -> None:
    with pytest.raises(ConfigError, match=r"(?s)beta1 would be .* below 0.*at most 2560 samples") as error:
        scaled(Rule.sqrt, 2561, adam=True, betas=[0.9, 0.95], eps=1e-8)
    assert error.value.key == "scaling.adam_betas_and_eps"
    assert scaled(Rule.sqrt, 2560, adam=True, betas=[0.9, 0.95], eps=1e-8).arguments["betas"][0] == 0


ADAM = {"betas": [0.9, 0.999], "eps": 1e-8}


@pytest.mark.parametrize(
    ("rule", "batch", "base", "more", "key"),
    [
        (Rule.linear, 64, None, {}, "scaling.base_batch_size"),
        (Rule.sqrt, 64, None, {}, "scaling.base_batch_size"),
        (Rule.none, 64, None, {"decay": DecayRule.linear, "weight_decay": 0.0}, "scaling.base_batch_size"),
        (Rule.linear, 64, 0, {}, "scaling.base_batch_size"),
        (Rule.none, 64, -4, {}, "scaling.base_batch_size"),
        (Rule.linear, 64, 32, {"decay": DecayRule.linear}, "scaling.weight_decay"),
        (Rule.none, 64, None, {"lr": -0.1}, "optimizer.lr"),
        (Rule.none, 64, None, {"lr": float("nan")}, "optimizer.lr"),
        (Rule.linear, 64, 32, {"adam": True, **ADAM}, "scaling.adam_betas_and_eps"),
        (Rule.none, 64, 32, {"adam": True, **ADAM}, "scaling.adam_betas_and_eps"),
        (Rule.sqrt, 64, 32, {"adam": True, "eps": 1e-8}, "optimizer.betas"),
        (Rule.sqrt, 64, 32, {"adam": True, "eps": 1e-8, "betas": [0.9]}, "optimizer.betas"),
        (Rule.sqrt, 64, 32, {"adam": True, "eps": 1e-8, "betas": [0.9, 1.0]}, "optimizer.betas"),
        (Rule.sqrt, 64, 32, {"adam": True, "eps": 1e-8, "betas": [0.9, "x"]}, "optimizer.betas"),
        (Rule.sqrt, 64, 32, {"adam": True, "betas": [0.9, 0.95]}, "optimizer.eps"),
    ],
)
def test_scaling_that_cannot_work(rule: Rule, batch: int, base: int | None, more: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as error:
        scaled(rule, batch, base, **more)
    assert error.value.key == key


@pytest.mark.parametrize(
    ("rule", "target", "says"),
    [
        (Rule.linear, "torch.optim.AdamW", "sqrt is derived"),
        (Rule.linear, "launcher.optim.LAMB", "sqrt is derived"),
        (Rule.linear, "torch.optim.RMSprop", "sqrt is derived"),
        (Rule.sqrt, "torch.optim.SGD", "linear is the usual rule"),
        (Rule.sqrt, "launcher.optim.LARS", "linear is the usual rule"),
        (Rule.linear, "torch.optim.SGD", None),
        (Rule.sqrt, "torch.optim.Adam", None),
        (Rule.none, "torch.optim.AdamW", None),
        (Rule.linear, "mine.Own", None),
    ],
)
def test_a_rule_of_other_optimizers_is_said(rule: Rule, target: str, says: str | None) -> None:
    notes = rule_notes(ScalingConfig(rule, 32), {"_target_": target})
    assert len(notes) == (says is not None)
    assert says is None or says in notes[0]


def planned(*overrides: str, ranks: int = 1) -> Plan:
    facts = Facts(samples=4096, num_layers=4, part_costs=[1] * 6)
    return make_plan(parse(config_text(*overrides)), facts, world=World(1, ranks, Device.cpu))


LINEAR = ("optimizer=sgd", "optimizer.lr=0.1", "scaling.rule=linear", "scaling.base_batch_size=32")


@pytest.mark.parametrize(
    # 4 samples a micro-batch, 8 of them a rank: 32 a data-parallel rank, and stages of a pipeline share theirs
    ("ranks", "mesh", "batch", "lr"),
    [(1, (), 32, 0.1), (2, (), 64, 0.2), (4, (), 128, 0.4), (4, ("mesh.pp=2",), 64, 0.2), (2, ("mesh.pp=2",), 32, 0.1)],
)
def test_ranks_of_a_pipeline_do_not_count(ranks: int, mesh: tuple[str, ...], batch: int, lr: float) -> None:
    follows = ("batch.global_batch_size=null", "batch.micro_batch_size=4", "batch.gradient_accumulation_steps=8")
    plan = planned(*LINEAR, *follows, *mesh, ranks=ranks)
    assert (plan.global_batch_size, plan.lr) == (batch, pytest.approx(lr))


def test_the_rate_follows_the_samples_and_not_their_division() -> None:
    rates = {
        planned(*LINEAR, "batch.global_batch_size=96", f"batch.micro_batch_size={micro}", ranks=ranks).lr
        for micro in (1, 4, 5)
        for ranks in (1, 2, 3)
    }
    assert [*rates] == [pytest.approx(0.3)]


def test_the_plan_records_what_was_scaled() -> None:
    adam = ("optimizer=adamw", "optimizer.lr=0.01", "scaling.rule=sqrt", "scaling.base_batch_size=32")
    plan = planned(*adam, "scaling.adam_betas_and_eps=true", "batch.global_batch_size=64")
    assert plan.scaled_arguments == {"betas": [0.8, 0.9], "eps": pytest.approx(1e-8 / 2**0.5)}
    assert [line.partition(" ")[0] for line in plan.arithmetic[-4:]] == ["lr", "beta1", "beta2", "eps"]
    assert planned(*adam).scaled_arguments == {}


def test_a_plan_that_is_made_again_is_scaled_once() -> None:
    overrides = (*LINEAR, "optimizer.weight_decay=0.01", "scaling.weight_decay=linear", "batch.global_batch_size=64")
    config = parse(config_text(*overrides))
    first, again = (make_plan(config, Facts(samples=4096), world=World(1, ranks, Device.cpu)) for ranks in (1, 2))
    assert (first.lr, first.weight_decay) == (again.lr, again.weight_decay) == (0.2, 0.02)
    assert first.lr_table == again.lr_table
