"""`launcher plan -m`, and what a sweep is refused for: all before its first run starts."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.plan.facts import Facts
from launcher.sweep import members
from launcher.sweep.show import headline

pytestmark = pytest.mark.thorough

CPU = ("cluster.device=cpu", "cluster.ranks_per_node=2", "optimizer=sgd")


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[Any]]:
    """The configurations of each time that the model and the data were asked; they say nothing."""
    calls: list[list[Any]] = []

    def ask_all(texts: Sequence[str], _: Sequence[str]) -> list[Facts]:
        calls.append([yaml.safe_load(text) for text in texts])
        return [Facts() for _ in texts]

    monkeypatch.setattr(members, "ask_all", ask_all)
    return calls


def planned(command: Any, *argv: str) -> list[Any]:
    said = command("plan", "-m", "--json", *CPU, *argv)
    assert said.code == 0, said.err
    listed: list[Any] = json.loads(said.out)["members"]
    return listed


def test_a_row_for_each_run_and_nothing_written(command, asked):
    said = command("plan", "-m", *CPU, "optimizer.lr=0.1,0.2", "batch.global_batch_size=32,64,128")
    assert said.code == 0, said.err
    assert "Sweep of 6 runs" in said.out
    rows = [line.split() for line in said.out.splitlines() if "optimizer.lr=" in line]
    assert [row[0] for row in rows] == [str(num) for num in range(6)]
    assert os.listdir() == []
    assert [len(texts) for texts in asked] == [6]  # asked together


def test_a_long_number_is_short_in_the_table_alone(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    argv = ("optimizer.lr=1", "optimizer.lr=0.00031622776601683794,0.1")
    said = command("plan", "-m", *CPU, *argv)
    rows = [line.split() for line in said.out.splitlines() if "optimizer.lr=" in line]
    assert rows[0][:2] == ["0", "optimizer.lr=0.00031623"]
    assert planned(command, *argv)[0]["overrides"] == ["optimizer.lr=0.00031622776601683794"]


def test_each_run_has_the_plan_it_would_have_alone(command):
    swept = planned(command, "batch.global_batch_size=32,128", "scaling.rule=linear", "scaling.base_batch_size=64")
    assert [one["overrides"] for one in swept] == [["batch.global_batch_size=32"], ["batch.global_batch_size=128"]]
    assert len({one["dir"] for one in swept}) == 2
    for one in swept:
        same = ("scaling.rule=linear", "scaling.base_batch_size=64", *one["overrides"])
        alone = json.loads(command("plan", "--json", *CPU, *same).out)
        assert one["plan"] | {"launch": None} == alone | {"launch": None}
        assert one["plan"]["launch"]["argv"][0][-1] == one["dir"]


def test_i05_a_comma_in_quotes_and_a_list_are_one_value(command, asked):
    argv = ('run.name="a,b"', "optimizer.lr=0.1,0.2", "+data.train.targets=[1,2]")
    said = command("plan", "-m", *CPU, *argv)
    assert "Sweep of 2 runs" in said.out
    configs = asked[0]
    assert [config["run"]["name"] for config in configs] == ["a,b", "a,b"]
    assert [config["optimizer"]["lr"] for config in configs] == [0.1, 0.2]
    assert [config["data"]["train"]["targets"] for config in configs] == [[1, 2], [1, 2]]


def test_i05_a_comma_without_a_sweep_is_refused(command):
    said = command("plan", "optimizer.lr=0.1,0.2")
    assert said.code == 2
    assert "--multirun" in said.err


def test_i08_each_run_keeps_the_whole_composition(command, asked, tmp_path):
    Path("mine").mkdir()
    Path("mine/my.yaml").write_text(
        "defaults: [config, {override strategy: single}, _self_]\n"
        "hydra: {mode: MULTIRUN, sweeper: {params: {optimizer.lr: '0.1,0.2'}}}\n"
        "run: {seed: '${hydra:job.num}', name: 'at ${hydra:runtime.output_dir}'}\n"
    )
    hydra = ("--config-dir=mine", "--config-name=my", "hydra.sweep.dir=out")
    said = command("plan", *hydra, "~model.dropout", "+model.note='${now:%f}'", "cluster.device=cpu")
    assert said.code == 0, said.err
    first, second = asked[0]
    assert (first["run"]["seed"], second["run"]["seed"]) == (0, 1)
    assert second["run"]["name"] == f"at {tmp_path / 'out' / '1'}"
    assert [one["strategy"]["name"] for one in (first, second)] == ["single", "single"]
    assert "dropout" not in first["model"]
    assert first["model"]["note"] == second["model"]["note"] != "${now:%f}"


def test_a_prepared_sweep_of_rules_batches_and_seeds(command, asked):
    found = planned(command, "sweep=linear_scaling")
    assert [(one["plan"]["scaling_rule"], one["plan"]["global_batch_size"], one["plan"]["seed"]) for one in found] == [
        (rule, batch, seed) for rule in ("linear", "none") for batch in (64, 128, 256, 512) for seed in (0, 1, 2)
    ]
    assert [one["plan"]["lr"] / one["plan"]["base_lr"] for one in found[::3]] == [1, 2, 4, 8, 1, 1, 1, 1]
    assert {one["training"]["duration"] for one in asked[0]} == {"6400 samples"}


def test_a_recipe_keeps_its_keys_in_a_prepared_sweep(command, asked):
    found = planned(command, "experiment=digits_large_batch", "sweep=linear_scaling", "scaling.rule=linear")
    assert [one["plan"]["lr"] for one in found[::3]] == pytest.approx([0.2, 0.4, 0.8, 1.6])  # 0.1 for 32 images
    assert {one["training"]["duration"] for one in asked[0]} == {"9 epochs"}


def test_what_is_given_takes_the_place_of_what_is_prepared(command, asked):
    overrides = ("sweep=learning_rate", "optimizer.lr=0.1,0.2", "run.seed=7", "training.duration='640 samples'")
    found = planned(command, *overrides)
    assert [one["overrides"] for one in found] == [["optimizer.lr=0.1"], ["optimizer.lr=0.2"]]
    assert {one["plan"]["seed"] for one in found} == {7}
    assert {one["training"]["duration"] for one in asked[0]} == {"640 samples"}


def test_a_prepared_sweep_is_one_without_the_flag(command):
    said = command("plan", *CPU, "sweep=learning_rate")
    assert "Sweep of 10 runs" in said.out


def test_all_runs_stay_in_one_folder_whatever_is_swept(command):
    swept = planned(command, "run.name=one,two", "hydra.sweep.subdir=${run.name}-${hydra.job.num}")
    folders = [Path(one["dir"]) for one in swept]
    assert [folder.name for folder in folders] == ["one-0", "two-1"]
    assert len({folder.parent for folder in folders}) == 1


def test_a_sweep_in_portions_is_planned_whole(command, asked):
    said = command("plan", "-m", *CPU, "optimizer.lr=0.1,0.2,0.3", "hydra.sweeper.max_batch_size=2")
    assert "Sweep of 3 runs" in said.out
    assert [len(texts) for texts in asked] == [3]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["hydra/launcher=basic"], "hydra/launcher=basic: only launcher_submit"),
        (["hydra/launcher=nothing"], "allowed: basic, launcher_submit"),
        (["hydra/sweeper=nothing"], "hydra/sweeper=nothing: there is no such choice"),
        (["hydra.job.chdir=true"], "hydra.job.chdir=true"),
        (["optimizer.lr=0.1,-1"], "run 1 (optimizer.lr=-1): optimizer.lr=-1: must be a finite number"),
        (["strategy=ddp,single"], "run 1 (strategy=single): strategy=single: runs on one rank"),
        (["data=text,nothing"], "run 1 (data=nothing): data=nothing: there is no such choice"),
        (["run.nam=a,b"], "run 0 (run.nam=a): run.nam=a: unknown key"),
        (["optimizer.lr=interval(0,1)"], "does not support sweep type"),
        (["hydra.sweep.subdir=same", "optimizer.lr=1,2"], "is the folder of run 0 too"),
        (["hydra.sweeper.max_batch_size=0"], "hydra.sweeper.max_batch_size=0: must be at least 1"),
        (["run.name=${oc.env:NOT_SET}"], "NOT_SET"),
    ],
)
@pytest.mark.parametrize("name", [pytest.param("train", marks=pytest.mark.slow), "plan"])
def test_a_sweep_that_cannot_work_is_refused_whole(command, monkeypatch, name, overrides, said):
    monkeypatch.delenv("NOT_SET", raising=False)
    answer = command(name, "-m", *CPU, *overrides)
    assert answer.code == 2, answer.out
    assert said in answer.err
    assert "Traceback" not in answer.err
    assert os.listdir() == []


def test_every_run_that_cannot_work_is_named(command):
    """What the first look at each finds, and what the plan does."""
    said = command("plan", "-m", *CPU, "batch.global_batch_size=8,abc", "optimizer.lr=0.1,-1")
    assert "3 of 4 runs of the sweep can't work" in said.err
    assert "run 2 (batch.global_batch_size=abc optimizer.lr=0.1): batch.global_batch_size='abc'" in said.err


def test_what_is_wrong_with_all_alike_is_said_once(command):
    answer = command("train", "-m", *CPU, "optimizer.lr=0.1,0.2", "training.duration=0 updates")
    assert answer.code == 2
    assert answer.err.count("training.duration=0 updates") == 1


def test_a_folder_that_holds_a_sweep_or_a_run_is_refused(command):
    Path("old").mkdir()
    Path("old/sweep.json").write_text("{}")
    answer = command("train", "-m", *CPU, "optimizer.lr=1,2", "hydra.sweep.dir=old")
    assert answer.code == 2
    assert "already holds a sweep" in answer.err
    assert os.listdir("old") == ["sweep.json"]
    Path("runs/1").mkdir(parents=True)
    Path("runs/1/config.yaml").write_text("")
    answer = command("train", "-m", *CPU, "optimizer.lr=1,2", "hydra.sweep.dir=runs")
    assert answer.code == 2
    assert "run 1 (optimizer.lr=2)" in answer.err
    assert "already holds a run" in answer.err
    assert os.listdir("runs") == ["1"]


@pytest.mark.parametrize(
    ("reason", "line"),
    [
        ("data.train: empty\n  hint", "data.train: empty"),
        (
            'rank 1: Traceback (most recent call last):\n  File "a", line 1\n    f()\nValueError: no\nmore',
            "rank 1: ValueError: no",
        ),
        ("killed by SIGKILL", "killed by SIGKILL"),
        ("", ""),
    ],
)
def test_the_line_that_names_a_failure(reason, line):
    assert headline(reason) == line


def test_a_sweep_on_slurm_is_one_array_or_none(command) -> None:
    assert command("plan", "-m", "submit=slurm", "cluster.device=cpu", "run.seed=1,2").code == 0
    mixed = command("plan", "-m", "submit=slurm,local", "cluster.device=cpu")
    assert (mixed.code, "all runs of a sweep start in one place" in mixed.err) == (2, True)
    named = command("plan", "-m", "submit=slurm", "cluster.device=cpu", "run.name=a,b")
    assert named.code == 0, named.err


@pytest.mark.parametrize(
    ("swept", "said"),
    [
        ("submit.slurm.mem=1G,2G", "submit.slurm.mem=2G: "),
        ("submit.slurm.container_image=a.sqsh,b.sqsh", "submit.slurm.container_image=b.sqsh: "),
        ("submit.slurm.agent=torchrun,none", "submit.slurm.agent=none: "),
        ("submit.slurm.requeue=1,5", "submit.slurm.requeue=5: "),
        ("submit.slurm.array_parallelism=1,5", "submit.slurm.array_parallelism=5: "),
        ("submit.slurm.env=['A=1'],['A=2']", "export A=2 instead of export A=1"),
        ("submit.slurm.setup=[a],[b]", "submit.slurm.setup=['b']: "),
        ("cluster.ranks_per_node=1,2", "cluster.ranks_per_node=2: "),
        ("checkpoint.stop_within=10,20", "checkpoint.stop_within=20: "),
    ],
)
def test_runs_of_an_array_have_one_script(command, monkeypatch, swept, said) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    answer = command("plan", "-m", "submit=slurm", "cluster.device=cpu", "submit.slurm.cpus_per_task=8", swept)
    assert answer.code == 2
    assert said in answer.err
    assert "would have another batch script than run 0" in answer.err
