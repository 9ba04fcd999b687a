"""Ranks that Slurm starts itself: who they are, and who failed by what srun says."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from configs import config_text
from fabricated import checkpoint

from launcher.config.choices import Device
from launcher.config.validate import parse
from launcher.errors import LauncherError
from launcher.plan.facts import Facts
from launcher.plan.mesh import World
from launcher.plan.plan import make_plan
from launcher.run_dir import RunDir, State
from launcher.train import alone, heart
from launcher.train.step import Said
from launcher.train.task import rank_variables

TASK = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_NODES": "2",
    "LAUNCHER_RENDEZVOUS": "gpu03:20041",
    "LAUNCHER_STEP": "/runs/one/step",
    "LAUNCHER_ATTEMPT": "0",
}


def test_h02_h03_a_task_is_a_rank() -> None:
    assert rank_variables(TASK) == {
        "RANK": "5",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "8",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "gpu03",
        "MASTER_PORT": "20041",
    }


@pytest.mark.parametrize("name", TASK)
def test_no_task_is_ever_a_world_of_its_own(name: str) -> None:
    with pytest.raises(LauncherError, match=f"{name} is missing"):
        rank_variables({key: value for key, value in TASK.items() if key != name})


def test_outside_of_a_job_it_ends_with_one_message(tmp_path: Path) -> None:
    without = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "LAUNCHER_"))}
    argv = [sys.executable, "-m", "launcher.train.task", str(tmp_path)]
    done = subprocess.run(argv, env=without, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("launcher.train.task: this is no task of a run's job: SLURM_PROCID, ")
    assert "Traceback" not in done.stderr


def test_who_failed_is_read_from_what_srun_says() -> None:
    said = Said()
    for line in (
        "srun: error: node2: task 3: Killed",
        "srun: launch/slurm: _step_signal: Terminating StepId=41.0",
        "slurmstepd: error: *** STEP 41.0 ON node1 CANCELLED AT 2026-11-30T09:00:00 ***",
        "srun: error: node1: tasks 0-1: Killed",
        "srun: error: node2: task 2: Exited with exit code 3",
    ):
        said.take(line)
    assert said.exits == {3: -9, 2: 3}


@pytest.mark.parametrize(
    ("words", "exits"),
    [
        ("tasks 0,2-3: Exited with exit code 7", {0: 7, 2: 7, 3: 7}),
        ("task 1: Segmentation fault (core dumped)", {1: -11}),
        ("task 1: Out Of Memory", {1: -9}),
        ("task 0: User defined signal 1", {0: -10}),
        ("Unable to create step", {}),
    ],
)
def test_the_ends_of_tasks(words: str, exits: dict[int, int]) -> None:
    said = Said()
    said.take(f"srun: error: node1: {words}")
    assert said.exits == exits


def test_a_rank_without_an_agent_finds_that_it_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heart, "_memory", None)
    run = RunDir(tmp_path)
    run.logs.mkdir()
    heart.start_alone()
    heart.beat(3, waits=True)  # for others, who may hang
    watcher = threading.Thread(target=alone._watch, args=(run, 1, 0.2))
    hung: list[BaseException | None] = []
    monkeypatch.setattr(threading, "excepthook", lambda failed: hung.append(failed.exc_value))
    watcher.start()
    watcher.join(1.0)
    assert watcher.is_alive()
    heart.beat()
    watcher.join(20.0)
    assert [str(one) for one in hung] == ["hung: nothing for 0 s at update 3; stacks in logs/rank_1.log"]


STAND_IN = """
import os, sys, time
from pathlib import Path
from launcher.run_dir import RunDir, State
folder = Path(os.environ["LAUNCHER_STEP"])
RunDir(folder.parent).write_status(state=State.running)
while not (folder / "stop").is_symlink():
    time.sleep(0.05)
(folder / "stopped").touch()
"""


def job(folder: Path, *overrides: str) -> RunDir:
    """A run that has been queued and has a checkpoint."""
    text = config_text("submit=slurm", "submit.slurm.agent=none", *overrides)
    plan = make_plan(parse(text), Facts(samples=9), world=World(1, 2, Device.cpu))
    run = RunDir(folder)
    run.config.write_text(text)
    run.plan.write_text(json.dumps(plan.to_dict()))
    run.logs.mkdir()
    checkpoint(folder, 3)
    run.write_status(state=State.submitted)
    return run


def look_after(run: RunDir, srun: str) -> "subprocess.CompletedProcess[str]":
    """The step around a program of Python that stands for srun and its tasks."""
    argv = [sys.executable, "-m", "launcher.train.step", str(run.path), sys.executable, "-c", srun]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=60)


KILLED = r'print("srun: error: node2: task 1: Killed\nsrun: Terminating StepId=1.0", file=sys.stderr, flush=True)'
TOLD = 'stopping.ask(Path(os.environ["LAUNCHER_STEP"]), "SIGTERM")'  # as a rank does that srun sends this signal


SEEN = 'while RunDir(Path(os.environ["LAUNCHER_STEP"]).parent).read_status()["state"] != "stopping": time.sleep(0.05)'


def srun_that_ends_badly(first: str, between: str, then: str) -> str:
    """A program in whose tasks one thing happens and then another; the last task to end blames a lost connection."""
    return f"""
import os, sys, time
from pathlib import Path
from launcher.run_dir import RunDir
from launcher.train import stopping
{first}
{between}
{then}
time.sleep(0.4)
print("srun: error: node1: task 0: Exited with exit code 3", file=sys.stderr)
sys.exit(137)
"""


@pytest.mark.slow
@pytest.mark.parametrize("between", ["", "time.sleep(0.5)"])
def test_what_srun_ends_after_a_lost_task_was_not_told_to_stop(tmp_path: Path, between: str) -> None:
    run = job(tmp_path)
    done = look_after(run, srun_that_ends_badly(KILLED, between, TOLD))
    status = run.read_status()
    assert (done.returncode, status["state"], status["stop"]) == (3, "failed", None), done.stderr
    assert (status["error"]["rank"], status["error"]["reason"].partition("\n")[0]) == (1, "killed by SIGKILL")


@pytest.mark.slow
def test_a_task_that_is_lost_while_all_stop_leaves_a_run_that_goes_on(tmp_path: Path) -> None:
    run = job(tmp_path)
    done = look_after(run, srun_that_ends_badly(TOLD, SEEN, KILLED))
    status = run.read_status()
    assert (done.returncode, status["state"], status["stop"]["why"]) == (75, "stopped", "SIGTERM"), done.stderr
    assert "rank 1 was killed by SIGKILL while the run was stopping" in status["error"]["reason"]


@pytest.mark.slow
def test_tasks_stop_when_their_device_hours_are_used_up(tmp_path: Path) -> None:
    run = job(tmp_path, "targets.device_hours=1e-6")
    done = [look_after(run, STAND_IN) for _ in range(2)]
    assert [one.returncode for one in done] == [75, 75], done[0].stderr
    status = run.read_status()
    assert (status["state"], status["attempts_started"]) == ("stopped", 1)  # the second one started none
    assert status["error"]["reason"] == "targets.device_hours=1e-06 is used up; with more the run goes on"
    assert run.device_seconds() > 0.0036
