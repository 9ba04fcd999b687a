"""What a strategy on DeepSpeed takes, before a rank starts: exit 2 by name, or a plan that says what happens."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from configs import config_text

from launcher.config.choices import Device
from launcher.config.validate import parse
from launcher.errors import ConfigError, LauncherError
from launcher.plan.facts import Facts, ask_all
from launcher.plan.mesh import World
from launcher.plan.plan import Plan, make_plan
from launcher.plan.zero import EXPERT_KEYS, EXPERT_ZERO_KEYS, deepspeed_keys

pytestmark = pytest.mark.thorough

BATCH = ("batch.global_batch_size=32", "batch.micro_batch_size=2", "batch.gradient_accumulation_steps=4")
"""On four ranks."""


def plan(strategy: str, *more: str, ranks: int = 4, device: Device = Device.cpu) -> Plan:
    config = parse(config_text(*BATCH[: 1 + 2 * (ranks == 4)], f"strategy={strategy}", *more))
    return make_plan(config, Facts(samples=320), world=World(1, ranks, device))


def block(**keys: Any) -> str:
    return f"+strategy.deepspeed={json.dumps(keys)}".replace('"', "")


DEEPSPEED = "strategy.deepspeed."
REFUSED = {
    "fp16 on CPU": ("zero2", ["precision=fp16"], "precision", "strategy=fsdp precision=fp16"),
    "Muon": ("zero1", ["optimizer._target_=torch.optim.Muon"], "optimizer._target_", "strategy=fsdp"),
    "Adafactor": ("zero3", ["optimizer._target_=torch.optim.Adafactor"], "optimizer._target_", "strategy=fsdp"),
    "LBFGS, sworn to": (
        "zero1",
        ["optimizer._target_=torch.optim.lbfgs.LBFGS", "+optimizer.elementwise=true"],
        "optimizer._target_",
        "strategy=fsdp",
    ),
    "Adagrad": ("zero2", ["optimizer._target_=torch.optim.Adagrad"], "optimizer._target_", "strategy=fsdp"),
    "one's own": ("zero1", ["optimizer._target_=my.Own"], "optimizer.elementwise", "+optimizer.elementwise=true"),
    "one's own, whole": (
        "zero1",
        ["optimizer._target_=my.Own", "+optimizer.elementwise=false"],
        "optimizer.elementwise",
        "strategy=fsdp",
    ),
    "no truth": ("zero1", ["+optimizer.elementwise=often"], "optimizer.elementwise", "true, false or null"),
    "parameters of stage 2 away": ("zero2", ["strategy.offload=cpu"], "strategy.offload", "strategy.offload=optimizer"),
    "nvme of stage 1": ("zero1", ["strategy.offload=nvme"], "strategy.offload", "strategy.offload=optimizer"),
    "nvme without a folder": ("zero3", ["strategy.offload=nvme"], "strategy.nvme_path", "must be the folder"),
    "a folder without nvme": ("zero3", ["strategy.nvme_path=/tmp"], "strategy.nvme_path", "strategy.offload=nvme"),
    "each micro-batch of stage 1": ("zero1", ["strategy.reduce_each=micro_batch"], "strategy.reduce_each", "zero2"),
    "resharding": ("zero3", ["strategy.reshard_after_forward=true"], "strategy.reshard_after_forward", "fsdp"),
    "C09": ("zero2", [block(gradient_accumulation_steps=1)], f"{DEEPSPEED}gradient_accumulation_steps", "plan has 4"),
    "batch": ("zero1", [block(train_batch_size=64)], f"{DEEPSPEED}train_batch_size", "the plan has 32"),
    "clip": ("zero1", [block(gradient_clipping=0.1)], f"{DEEPSPEED}gradient_clipping", "training.max_grad_norm"),
    "precision": ("zero1", [block(bf16={"enabled": True})], f"{DEEPSPEED}bf16", "follows from precision"),
    "optimizer": ("zero1", [block(optimizer={"type": "Adam"})], f"{DEEPSPEED}optimizer", "optimizer=…"),
    "scheduler": ("zero1", [block(scheduler={"type": "WarmupLR"})], f"{DEEPSPEED}scheduler", "schedule/decay"),
    "stage": ("zero1", [block(zero_optimization={"stage": 2})], f"{DEEPSPEED}zero_optimization.stage", "plan has 1"),
    "offload": (
        "zero1",
        [block(zero_optimization={"offload_optimizer": {"device": "cpu"}})],
        f"{DEEPSPEED}zero_optimization.offload_optimizer",
        "strategy.offload=",
    ),
    "a typo": (
        "zero3",
        [block(zero_optimization={"stage3_prefetch_bucket_sise": 1})],
        f"{DEEPSPEED}zero_optimization.stage3_prefetch_bucket_sise",
        "did you mean 'stage3_prefetch_bucket_size'",
    ),
    "a typo above": ("zero3", [block(wall_clock_brakdown=True)], f"{DEEPSPEED}wall_clock_brakdown", "did you mean"),
    "what changes the update": ("zero3", [block(compression_training={})], f"{DEEPSPEED}compression_training", "keys"),
    "no section": ("zero3", [block(zero_optimization=3)], f"{DEEPSPEED}zero_optimization", "section"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_deepspeed_cannot_do_or_the_plan_settles_is_refused_by_name(name: str) -> None:
    strategy, more, key, hint = REFUSED[name]
    with pytest.raises(ConfigError) as refused:
        plan(strategy, *more)
    assert refused.value.key == key
    assert hint in str(refused.value)


def test_nvme_needs_libaio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.plan.zero.find_library", lambda name: None)
    with pytest.raises(ConfigError, match="libaio"):
        plan("zero3", "strategy.offload=nvme", "strategy.nvme_path=/tmp")
    plan("zero3", "strategy.offload=nvme", "strategy.nvme_path=/tmp", "submit=slurm")  # another machine's


def test_one_rank_has_nothing_to_divide() -> None:
    made = plan("zero3", block(wall_clock_breakdown=True), ranks=1)
    assert any("strategy.deepspeed does nothing" in note for note in made.notes)
    assert made.reductions_per_window == 0


def test_keys_that_say_what_the_plan_says_are_taken() -> None:
    same = block(
        train_batch_size=32,
        train_micro_batch_size_per_gpu=2,
        gradient_accumulation_steps=4,
        gradient_clipping=1.0,
        fp16={"enabled": False},
        zero_optimization={"stage": 2, "overlap_comm": True},
    )
    assert plan("zero2", same).reductions_per_window == 4
    assert plan("zero2", same, "strategy.reduce_each=window").reductions_per_window == 1
    assert plan("zero1").reductions_per_window == 1


def test_deepspeeds_configuration_follows_from_the_plan() -> None:
    keys = block(wall_clock_breakdown=True, train_batch_size=32, zero_optimization={"reduce_bucket_size": 7})
    config = parse(config_text(*BATCH, "strategy=zero3", "strategy.offload=cpu", keys))
    made = make_plan(config, Facts(), world=World(1, 4, Device.cuda))
    assert deepspeed_keys(config, made.to_dict(), 1000, pin_memory=True) == {
        "steps_per_print": None,
        "wall_clock_breakdown": True,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": 7,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "offload_param": {"device": "cpu", "pin_memory": True},
        },
    }


def test_fp16_is_planned_on_cuda() -> None:
    assert plan("zero3", "precision=fp16", device=Device.cuda).precision == "fp16"


@pytest.mark.slow
def test_the_model_and_the_values_are_asked_in_the_probe() -> None:
    keys = block(zero_optimization={"reduce_bucket_size": -1})
    texts = [
        config_text("strategy=zero1", "+model.dtype=float64", "cluster.device=cpu"),
        config_text("strategy=zero1", keys, "cluster.device=cpu"),
        config_text("strategy=zero1", block(zero_optimization={"overlap_comm": True}), "cluster.device=cpu"),
    ]
    of_model, of_value, taken = ask_all(texts, [])
    assert isinstance(of_model, LauncherError)
    assert "float64" in str(of_model)
    assert "strategy=fsdp" in str(of_model)
    assert isinstance(of_value, LauncherError)
    assert "strategy.deepspeed.zero_optimization.reduce_bucket_size=-1" in str(of_value)
    assert isinstance(taken, Facts), taken


@pytest.mark.slow
def test_the_keys_of_deepspeed_are_known() -> None:
    code = (
        "import json, sys\n"
        "from launcher.train.sharding.zero_engine import load_deepspeed\n"
        "load_deepspeed('cpu')\n"
        "from deepspeed.runtime.zero.config import DeepSpeedZeroConfig as Zero\n"
        "from deepspeed.runtime import constants, config\n"
        "names = [n for key, field in Zero.model_fields.items() for n in (key, field.alias) if n]\n"
        "print(json.dumps(names))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ}, timeout=100)
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout)) >= EXPERT_ZERO_KEYS
    assert "zero_optimization" in EXPERT_KEYS
