"""The recipes of conf/experiment against tables worked out by hand: rate and accumulation of every update of the first
two epochs, and where the rate falls."""

from itertools import pairwise
from math import cos, pi

import pytest
import torch
from accumulation import ultralytics
from configs import composed_text, config_text

from launcher.config.choices import Device, Layout
from launcher.config.compose import conf_dir
from launcher.config.schema import Config
from launcher.config.validate import parse
from launcher.errors import ConfigError
from launcher.plan.facts import Facts
from launcher.plan.mesh import World
from launcher.plan.plan import Plan, make_plan
from launcher.plan.schedule import LearningRate
from launcher.plan.timing import Timing, make_timing, windows_of
from launcher.train.optim import set_group_warmup, set_rates

IMAGENET = Facts(samples=1_281_167, knows_lengths=False, batch_norm_layers=53)
DIGITS = Facts(samples=1617, knows_lengths=False, batch_norm_layers=20)
ALPACA = Facts(samples=52_002, knows_lengths=True)


def timing(config: Config, plan: Plan, facts: Facts) -> Timing:
    return make_timing(config, facts, windows_of(config, facts, plan.batch), peak=plan.lr)


def recipe(name: str, facts: Facts, ranks: int, *overrides: str) -> tuple[Config, Plan, LearningRate]:
    config = parse(config_text(f"experiment={name}", *overrides))
    plan = make_plan(config, facts, world=World(1, ranks, Device.cpu))
    rate = timing(config, plan, facts).rate
    assert rate is not None
    return config, plan, rate


def steps(config: Config, plan: Plan, facts: Facts, updates: int) -> list[int]:
    """Micro-batches that every rank runs in each of the first `updates` windows."""
    windows = windows_of(config, facts, plan.batch)
    assert windows is not None
    ends = [windows.samples_after(update) for update in range(updates + 1)]
    return [plan.batch.num_micro_steps(end - start) for start, end in pairwise(ends)]


# Goyal et al. 2017: k = 1 to 32 for 256 to 8,192 images; windows of an epoch of 1,281,167 images, whole ones alone
@pytest.mark.parametrize(
    ("batch", "k", "epoch"),
    [(256, 1, 5004), (512, 2, 2502), (1024, 4, 1251), (2048, 8, 625), (4096, 16, 312), (8192, 32, 156)],
)
def test_imagenet_1h(batch: int, k: int, epoch: int) -> None:
    given = ("data.train.path=images", f"batch.global_batch_size={batch}")
    config, plan, rate = recipe("imagenet_1h", IMAGENET, 8, *given)
    assert (plan.updates_per_epoch, plan.num_updates, plan.warmup_updates) == (epoch, 90 * epoch, 5 * epoch)
    assert plan.lr == pytest.approx(0.1 * k, rel=1e-15)
    # from 0.1 to 0.1 k over five epochs, in equal steps
    by_hand = [0.1 + 0.1 * (k - 1) * (n + 1) / (5 * epoch) for n in range(2 * epoch)]
    assert [rate(n) for n in range(2 * epoch)] == pytest.approx(by_hand, rel=1e-12)
    # 8 ranks with micro-batches of 32 make 256: k of them a window, each full
    assert steps(config, plan, IMAGENET, 2 * epoch) == [k] * 2 * epoch
    assert (plan.micro_batch_size, plan.batch.samples_per_rank) == (32, 32 * k)
    for passed, share in ((5, 1), (30, 0.1), (60, 0.01), (80, 0.001)):
        assert rate(passed * epoch) == pytest.approx(0.1 * k * share, rel=1e-12)
        assert passed == 5 or rate(passed * epoch - 1) == pytest.approx(k * share, rel=1e-12)


def test_imagenet_1h_trains_as_published() -> None:
    config, plan, _ = recipe("imagenet_1h", IMAGENET, 256, "data.train.path=images")
    assert (plan.global_batch_size, plan.gradient_accumulation_steps) == (8192, 1)
    optimizer = config.optimizer
    assert (optimizer["_target_"], optimizer["momentum"], optimizer["nesterov"]) == ("torch.optim.SGD", 0.9, True)
    assert [(group["match"], group["weight_decay"]) for group in plan.param_groups] == [
        ("norms_and_biases", 0.0),
        (None, 1e-4),
    ]
    assert (config.model["depth"], config.model["norm"], config.model["zero_init_last_gamma"]) == (50, "batch", True)
    assert config.training.max_grad_norm is None


# windows of an epoch of 1,617 digits on 2 ranks with micro-batches of 16, the steps of its last one, and those of half
# an epoch: 809 digits
@pytest.mark.parametrize(
    ("batch", "k", "epoch", "last", "warmup"),
    [
        (32, 1, 51, 1, 26),
        (64, 2, 26, 1, 13),
        (128, 4, 13, 3, 7),
        (256, 8, 7, 3, 4),
        (512, 16, 4, 3, 2),
        (1024, 32, 2, 19, 1),
    ],
)
def test_digits_large_batch(batch: int, k: int, epoch: int, last: int, warmup: int) -> None:
    config, plan, rate = recipe("digits_large_batch", DIGITS, 2, f"batch.global_batch_size={batch}")
    assert (plan.updates_per_epoch, plan.num_updates, plan.warmup_updates) == (epoch, 9 * epoch, warmup)
    by_hand = [0.1 + 0.1 * (k - 1) * min((n + 1) / warmup, 1) for n in range(2 * epoch)]
    assert [rate(n) for n in range(2 * epoch)] == pytest.approx(by_hand, rel=1e-12)
    assert steps(config, plan, DIGITS, 2 * epoch) == ([k] * (epoch - 1) + [last]) * 2
    falls = [n for n in range(1, 9 * epoch) if rate(n) < 0.5 * rate(n - 1)]
    assert falls == [3 * epoch, 6 * epoch, 8 * epoch]
    assert rate(9 * epoch - 1) == pytest.approx(1e-4 * k, rel=1e-12)


def test_digits_large_batch_is_imagenet_1h_in_small() -> None:
    small, large = (recipe("digits_large_batch", DIGITS, 2)[0], recipe("imagenet_1h", IMAGENET, 2, *HERE)[0])
    assert small.optimizer == large.optimizer
    assert small.scaling.rule == large.scaling.rule
    assert small.model["zero_init_last_gamma"] is large.model["zero_init_last_gamma"] is True


HERE = ("data.train.path=images",)
FOLDERS = ("model.path=model", "data.train.path=tokens.bin", "task.vocab_size=32000")


def test_llm_finetune() -> None:
    config, plan, rate = recipe("llm_finetune", ALPACA, 2, *FOLDERS)
    # 52,002 samples by 128 are 407 windows, three epochs of them 1,221, of which 3% are 36.63
    assert (plan.updates_per_epoch, plan.num_updates, plan.warmup_updates) == (407, 1221, 37)
    by_hand = [2e-5 * (n + 1) / 37 for n in range(37)]
    by_hand += [1e-5 * (1 + cos(pi * (n - 37) / 1184)) for n in range(37, 2 * 407)]
    assert [rate(n) for n in range(2 * 407)] == pytest.approx(by_hand, rel=1e-9)
    assert (plan.micro_batch_tokens, plan.gradient_accumulation_steps, plan.layout) == (4096, None, "length")
    assert [group["weight_decay"] for group in plan.param_groups] == [0.0]
    assert (plan.strategy, plan.precision, plan.activation_checkpoint) == ("fsdp", "bf16", "full")
    assert config.task["bos"] is None
    assert config.batch.layout is Layout.auto


# batches of a size, as many as come nearest to 64 and at least one; the weight decay times their product over 64
@pytest.mark.parametrize(
    ("size", "accumulated", "decay"),
    [(8, 8, 5e-4), (16, 4, 5e-4), (24, 3, 5.625e-4), (40, 2, 6.25e-4), (48, 1, 3.75e-4), (64, 1, 5e-4), (128, 1, 1e-3)],
)
def test_yolo_nominal(size: int, accumulated: int, decay: float) -> None:
    config, plan, rate = recipe("yolo_nominal", DIGITS, 2, f"nominal.batch_size={size}")
    full = size * accumulated
    ends = [0]  # of windows, in digits: accumulated as there, but that an epoch ends its last one
    for windows in ultralytics(1617, 100, size, 64, warmup=3):
        ends.append(min(ends[-1] + windows * size, -(-(ends[-1] + 1) // 1617) * 1617))
    warmup, two_epochs = ends.index(3 * 1617), ends.index(2 * 1617)
    assert (plan.global_batch_size, plan.gradient_accumulation_steps) == (size * accumulated, accumulated)
    assert plan.micro_batch_size == size // 2
    assert (plan.num_updates, plan.warmup_updates) == (len(ends) - 1, warmup)
    assert plan.num_updates == warmup + 97 * -(-1617 // full)
    table = windows_of(config, DIGITS, plan.batch)
    assert table is not None
    assert [table.samples_after(n) for n in range(two_epochs + 1)] == ends[: two_epochs + 1]
    assert [group["weight_decay"] for group in plan.param_groups] == [0.0, 0.0, pytest.approx(decay)]
    risen = [end / (3 * 1617) for end in ends[1 : two_epochs + 1]]
    assert [rate(n) for n in range(two_epochs)] == pytest.approx([0.01 * one for one in risen])
    momentum = timing(config, plan, DIGITS).momentum
    assert momentum is not None
    assert [momentum(n) for n in range(two_epochs)] == pytest.approx([0.8 + 0.137 * one for one in risen], rel=1e-12)
    assert momentum(warmup - 1) == momentum(plan.num_updates) == 0.937
    biases, weights = ({"params": [torch.zeros(1)], "lr_scale": 1.0, **more} for more in ({"warmup_from": 0.1}, {}))
    optimizer = torch.optim.SGD([biases, weights])
    for n in range(two_epochs):  # from 0.1 down to 0.01
        set_group_warmup(optimizer, rate, n)
        set_rates(optimizer, rate(n))
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx(
            [0.1 - 0.09 * risen[n], 0.01 * risen[n]], rel=1e-12
        )
    assert [group.get("warmup_from") for group in plan.param_groups] == [0.1, None, None]
    assert rate(plan.num_updates) == pytest.approx(1e-4)
    assert (config.training.max_grad_norm, plan.lr) == (10.0, 0.01)


@pytest.mark.parametrize("size", ["0", "-4", "1.5", "x"])
def test_a_size_that_is_none_is_refused(size: str) -> None:
    with pytest.raises(ConfigError, match="must be a whole number of at least 1"):
        config_text("experiment=yolo_nominal", f"nominal.batch_size={size}")


@pytest.mark.parametrize(
    ("name", "key", "given"),
    [
        ("imagenet_1h", "data.train.path", ()),
        ("llm_finetune", "data.train.path", ()),
        ("llm_finetune", "task.vocab_size", ("data.train.path=tokens.bin",)),
    ],
)
def test_what_a_recipe_lacks_is_asked_for(name: str, key: str, given: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="must be given") as error:
        config_text(f"experiment={name}", *given)
    assert error.value.key == key


def test_values_of_the_command_win_over_those_of_a_recipe() -> None:
    text = composed_text("experiment=digits_large_batch", "optimizer.lr=0.05", "model=resnet50", "optimizer=lars")
    config = parse(text)
    assert (config.optimizer["lr"], config.model["depth"]) == (0.05, 50)
    assert config.optimizer["_target_"] == "launcher.optim.LARS"


def test_every_recipe_is_documented() -> None:
    text = (conf_dir().parent / "docs" / "recipes.md").read_text(encoding="utf-8")
    for path in (conf_dir() / "experiment").glob("*.yaml"):
        assert f"experiment={path.stem}" in text
