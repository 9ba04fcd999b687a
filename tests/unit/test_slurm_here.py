"""A run in the job that is around the command: what the job says, and what it leaves no room for."""

import json
import os
from pathlib import Path

import pytest
from configs import config_text

from launcher.commands import plan, train
from launcher.config.compose import Arguments, compose, hydra_session, shipped
from launcher.config.validate import parse
from launcher.errors import ConfigError, LauncherError
from launcher.plan.facts import Facts
from launcher.plan.plan import make_plan
from launcher.run_dir import RunDir, State
from launcher.submit import slurm_here
from launcher.submit.slurm import Slurm
from launcher.submit.slurm_here import Here, check_place, choose_job, job_overrides, take_up

JOB = {"SLURM_JOB_ID": "41", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_CPUS_PER_NODE": "16(x1),8"}


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    for name in [one for one in os.environ if one.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    for name, value in {"LAUNCHER_IN_JOB": "1", **JOB}.items():
        monkeypatch.setenv(name, value)
    return JOB


@pytest.mark.parametrize(
    ("more", "given", "expected"),
    [
        ({}, [], ["submit=slurm"]),
        ({"SLURM_GPUS_ON_NODE": "4"}, [], ["submit=slurm", "submit.slurm.gpus_per_node=4"]),
        ({"SLURM_NTASKS": "8"}, ["submit=mine"], ["cluster.ranks_per_node=4"]),
        ({"SLURM_NTASKS_PER_NODE": "3"}, [], ["submit=slurm", "cluster.ranks_per_node=3"]),
        ({"SLURM_NTASKS_PER_NODE": "1"}, [], ["submit=slurm"]),
        ({"SLURM_NTASKS": "8"}, ["cluster.ranks_per_node=2"], ["submit=slurm"]),
    ],
)
def test_h03_nodes_ranks_and_cores_are_the_jobs(more: dict[str, str], given: list[str], expected: list[str]) -> None:
    always = ["submit.slurm.nodes=2", "submit.slurm.cpus_per_task=8"]
    found = job_overrides(given, {**JOB, **more})
    assert sorted(found) == sorted([*always, *expected])


def test_what_the_job_leaves_no_room_for(job: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(LauncherError, match="the 7 tasks of this job aren't the same number on each of 2 nodes"):
        job_overrides([], {**JOB, "SLURM_NTASKS": "7"})
    with pytest.raises(ConfigError, match=r"submit\.slurm\.time=4:00:00: has no effect in a job that is there"):
        job_overrides(["submit.slurm.time=4:00:00"], JOB)
    with pytest.raises(LauncherError, match="this is no job of Slurm: SLURM_JOB_NUM_NODES is missing"):
        job_overrides([], {})
    for command in (train, plan):
        with pytest.raises(LauncherError, match="a sweep queues an array of jobs"):
            command(["-m", "run.seed=1,2"])
    moving = ["hydra.run.dir=a_${now:%H}", "run.name=a_${now:%H}"]
    for override, key in (("submit=local", "submit"), *((one, "hydra.run.dir") for one in moving)):
        arguments = Arguments(["submit=slurm"] * (key != "submit") + [override])
        with hydra_session(arguments) as hydra, pytest.raises(ConfigError) as refused:
            check_place(compose(hydra, arguments))
        assert refused.value.key == key


def test_a_plan_in_a_job_is_that_of_a_run_there(job: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(["--json", "cluster.device=cpu"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert (made["nodes"], "--cpus-per-task=8" in made["launch"]["script_text"]) == (2, True)
    with pytest.raises(ConfigError, match="submit=local: the ranks start in the job around this command"):
        plan(["submit=local"])


def test_a_job_of_other_nodes_than_the_runs_is_refused(job: dict[str, str], tmp_path: Path) -> None:
    config = parse(config_text("submit=slurm", "cluster.nodes=3", "cluster.device=cpu"))
    backend = choose_job(config)
    assert isinstance(backend, Here)
    with pytest.raises(ConfigError, match=r"cluster\.nodes=3: this job has 2"):
        backend.render(RunDir(tmp_path), make_plan(config, Facts()))


def test_a_save_that_the_job_has_no_time_for_is_refused(job: dict[str, str], tmp_path: Path) -> None:
    shipped_script = (shipped("slurm") / "train.sbatch").read_text(encoding="utf-8")
    assert f"#SBATCH --signal=B:USR1@{slurm_here.TOLD:g}\n" in shipped_script

    def render(*overrides: str) -> None:
        config = parse(config_text("submit=slurm", "cluster.nodes=2", "cluster.device=cpu", *overrides))
        choose_job(config).render(RunDir(tmp_path), make_plan(config, Facts()))

    render("checkpoint.stop_within=90")
    with pytest.raises(ConfigError, match=r"checkpoint\.stop_within=120: .*told 90 s .*\s+sbatch --signal=B:USR1@150"):
        render("checkpoint.stop_within=120")
    assert job_overrides(["submit.slurm.signal_before=150"], JOB)
    render("checkpoint.stop_within=120", "submit.slurm.signal_before=150")


@pytest.mark.parametrize("value", [None, "", "0"])
def test_outside_of_a_job_one_is_queued(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    monkeypatch.delenv("LAUNCHER_IN_JOB", raising=False)
    if value is not None:
        monkeypatch.setenv("LAUNCHER_IN_JOB", value)
    assert type(choose_job(parse(config_text("submit=slurm")))) is Slurm


@pytest.mark.parametrize(
    ("starts", "owner", "goes_on"), [("0", "41", False), ("1", "41", True), ("1", "40", False), ("2", "41", True)]
)
def test_h04_a_folder_is_taken_up_by_the_job_that_made_it(
    job: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, starts: str, owner: str, goes_on: bool
) -> None:
    """By the same job when it is queued again, and never by another one of the same number."""
    handed: list[str] = []
    monkeypatch.setattr(slurm_here, "hand_over", lambda run, script: handed.append(script))
    monkeypatch.setenv("SLURM_RESTART_COUNT", starts)
    run = RunDir(tmp_path / "run")
    run.create("a: 1", '{"launch": {"script_text": "the script"}}')
    run.write_status(state=State.running, job={"id": owner})
    take_up(run)
    assert handed == (["the script"] if goes_on else [])
