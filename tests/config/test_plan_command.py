"""`launcher plan`, and Hydra's own flags."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TWO_RANKS = ("cluster.device=cpu", "cluster.ranks_per_node=2")


def test_json_is_all_that_stands_on_the_output(command):
    said = command("plan", "--json", *TWO_RANKS)
    assert said.code == 0
    assert not said.err
    plan = json.loads(said.out)
    assert plan["global_batch_size"] == 64
    assert plan["data_parallel_degree"] == plan["world_size"] == 2
    assert plan["launch"]["argv"][0][-3:-1] == ["-m", "launcher.train.agent"]


def test_the_table_shows_each_line_of_the_arithmetic(command):
    said = command("plan", "batch.global_batch_size=100", "batch.micro_batch_size=4", *TWO_RANKS)
    assert said.code == 0
    assert "samples a rank = ceil(100 / 2) = 50" in said.out
    assert "gradient_accumulation_steps = ceil(50 / 4) = 13" in said.out


@pytest.mark.parametrize(
    ("overrides", "rate"),
    [
        ([], "0.003, reached after 10 updates of warmup"),
        (["schedule.warmup_from=base_lr"], "0.003"),
        (
            ["schedule.warmup_from=base_lr", "scaling.rule=linear", "scaling.base_batch_size=32"],
            "0.006 (linear from 0.003), reached after 10 updates of warmup",
        ),
    ],
)
def test_the_rate_is_there_after_a_warmup_or_from_the_start(command, overrides, rate):
    given = ["optimizer.lr=0.003", "schedule.warmup=10", "batch.global_batch_size=64", "training.duration=100"]
    said = command("plan", *given, *overrides)
    row = said.out[said.out.index("learning rate") :].partition("weight decay")[0]
    assert " ".join(re.sub("│|learning rate", "", row).split()) == rate


def test_a_plan_writes_nothing(command):
    assert command("plan", *TWO_RANKS).code == 0
    assert os.listdir() == []


def test_scaling_moves_the_rate_and_leaves_the_weight_decay(command):
    scaled = ("batch.global_batch_size=128", "scaling.rule=linear", "scaling.base_batch_size=64")
    plan = json.loads(command("plan", "--json", "optimizer=sgd", "optimizer.lr=0.1", *scaled, *TWO_RANKS).out)
    assert (plan["base_lr"], plan["lr"]) == (0.1, 0.2)
    decayed = ("optimizer=sgd", "optimizer.lr=0.1", "optimizer.weight_decay=0.01", *scaled, *TWO_RANKS)
    plan = json.loads(command("plan", "--json", *decayed).out)
    assert plan["weight_decay"] == 0.01
    assert plan["param_groups"] == [
        {"match": None, "lr_scale": 1.0, "lr": 0.2, "weight_decay": 0.01, "parameters": None}
    ]
    plan = json.loads(command("plan", "--json", "scaling.weight_decay=linear", *decayed).out)
    assert plan["weight_decay"] == 0.02
    assert max(rate for _, rate in plan["lr_table"]) == 0.2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--help"], "== Configuration groups =="),
        (["--hydra-help"], "== Flags =="),
        (["--version"], "Hydra"),
        (["--cfg", "job"], "global_batch_size: 64"),
        (["--cfg", "job", "--package", "run"], "name: stdlib"),
        (["--cfg", "hydra"], "dir: runs/${launcher.path_name:${run.name}}"),
        (["--cfg", "all"], "hydra:"),
        (["--info"], "Installed Hydra Plugins"),
        (["--info", "defaults-tree"], "schedule/decay: cosine"),
    ],
)
def test_hydras_own_flags_answer_and_start_nothing(command, flags, text):
    said = command("train", *flags)
    assert said.code == 0
    assert text in said.out
    assert os.listdir() == []


@pytest.mark.thorough
def test_help_lists_what_a_user_can_choose(command):
    shown = command("plan", "--help").out
    assert "schedule/decay: constant, cosine, linear, step, wsd" in shown
    assert "_schema" not in shown
    assert "--json   the plan as JSON" in shown
    assert "follows the run to its end" in command("train", "--help").out
    assert "the folder of a run" in command("status", "--help").out
    assert "+model_weights=FILE" in command("export", "--help").out


def test_flags_may_stand_between_overrides(command):
    assert command("plan", "run.seed=1", "--cfg", "job", "run.name=x").code == 0


def test_a_secret_is_not_shown_with_the_configuration(command, monkeypatch):
    monkeypatch.setenv("SECRET", "hush-4711")
    said = command("train", "--cfg", "job", "+model.note=${oc.env:SECRET}")
    assert "note: ${oc.env:SECRET}" in said.out


def _process(code: str, *argv: str, cwd: Path) -> str:
    checkout = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", code, *argv],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": checkout},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stderr


MODULES = """
import sys
from launcher.cli import main
code = main(sys.argv[1:])
heavy = sorted({"torch", "wandb", "numpy", "deepspeed", "matplotlib"} & set(sys.modules))
print(code, heavy, file=sys.stderr)
"""


def test_help_imports_nothing_heavy(tmp_path):
    assert _process(MODULES.replace('"torch"', '"torch", "hydra", "rich"'), "--help", cwd=tmp_path) == "0 []\n"


@pytest.mark.slow
def test_a_plan_in_updates_imports_no_torch_in_its_own_process(tmp_path):
    said = _process(MODULES, "plan", "training.duration=3 updates", *TWO_RANKS, cwd=tmp_path)
    assert said == "0 []\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("override", "key", "instead"),
    [
        ("submit.slurm.env=['TOKEN=${oc.env:SECRET}']", "submit.slurm.env[0]", "export it where the command is given"),
        ("submit.slurm.account='${oc.env:SECRET}'", "submit.slurm.account", "write the value"),
        ("submit.docker.options=['--env=TOKEN=${oc.env:SECRET}']", "submit.docker.options[0]", "submit.docker.env="),
    ],
)
def test_no_secret_is_rendered(command, monkeypatch, override, key, instead):
    monkeypatch.setenv("SECRET", "s3cr3t")
    said = command("plan", "--json", "cluster.device=cpu", f"submit={key.split('.')[1]}", override)
    assert said.code == 2
    assert f"{key}=" in said.err
    assert instead in said.err
    assert "s3cr3t" not in said.out + said.err


@pytest.mark.parametrize("key", ["submit.slurm.array_parallelism", "submit.docker.parallelism"])
def test_one_run_has_none_beside_it(command, key):
    said = command("plan", "cluster.device=cpu", f"submit={key.split('.')[1]}", f"{key}=3")
    assert said.code == 2
    assert f"{key}=3: says how many runs of a sweep" in said.err
