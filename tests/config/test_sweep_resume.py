"""`launcher train -m sweep.resume=…` up to the start of the ranks, which never comes here."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from fabricated import checkpoint

from launcher import lock, prepare
from launcher.plan.facts import Facts
from launcher.run_dir import RunDir, State
from launcher.submit.local import Local
from launcher.sweep import members

pytestmark = pytest.mark.thorough

CPU = ("cluster.device=cpu", "cluster.ranks_per_node=2", "logging.progress=false")
SWEEP = ("batch.global_batch_size=32,64", "run.seed=0,1")


@pytest.fixture(autouse=True)
def facts(monkeypatch: pytest.MonkeyPatch) -> None:
    said = Facts(samples=1000, parameters=5, trainable_parameters=5)

    def ask_all(texts: Sequence[str], _: Sequence[str]) -> list[Facts]:
        return [said for _ in texts]

    monkeypatch.setattr(members, "ask_all", ask_all)
    monkeypatch.setattr(prepare, "ask", lambda *_: said)


@pytest.fixture(autouse=True)
def ends(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """How the ranks of each member end, by its number; those that aren't there finish. Beside that what was started."""
    codes: dict[int, int] = {}
    states = {0: State.finished, 3: State.failed, 75: State.stopped}

    def submit(self: Local, run: RunDir, plan: Any, launch: Any, console: Any, *, live: bool) -> int:
        num = int(run.path.name) if run.path.name.isdecimal() else 0
        STARTED.append((num, json.loads(run.status.read_text())["update"]))
        code = codes.get(num, 0)
        if code == 0:
            result = {"update": 9, "applied": 9, "train_loss": 1.5, "validation_loss": None, "baseline_loss": None}
            run.result.write_text(json.dumps(result | {"seconds": 1.0}))
        error = {"rank": 0, "reason": "lost", "log": None} if code == 3 else None
        run.write_status(state=states[code], exit_code=code, error=error)
        return code

    monkeypatch.setattr(Local, "submit", submit)
    STARTED.clear()
    return codes


STARTED: list[tuple[int, int]] = []
"""Number and first update of each member whose ranks were started."""


def record(folder: str = "sweep") -> dict[str, Any]:
    content: dict[str, Any] = json.loads(Path(folder, "sweep.json").read_text())
    return content


def states(folder: str = "sweep") -> list[str]:
    return [one["state"] for one in record(folder)["members"]]


def swept(command: Any, *overrides: str) -> Any:
    return command("train", "-m", *CPU, *SWEEP, "hydra.sweep.dir=sweep", *overrides)


def forget(*nums: int) -> None:
    """As if the sweep had ended before these members started."""
    content = record()
    for num in nums:
        content["members"][num] |= {"state": "cancelled", "exit_code": None, "metric": None}
        for file in sorted(Path("sweep", str(num)).rglob("*"), reverse=True):
            file.rmdir() if file.is_dir() else file.unlink()
        Path("sweep", str(num)).rmdir()
    Path("sweep/sweep.json").write_text(json.dumps(content))


def test_what_is_finished_stays_what_has_a_checkpoint_goes_on_and_the_rest_starts(command, ends):
    ends |= {1: 75, 2: 3}
    assert swept(command).code == 3
    assert states() == ["finished", "stopped", "failed", "finished"]
    checkpoint(Path("sweep/1"), 40)
    forget(3)
    configs = {num: Path(f"sweep/{num}/config.yaml").read_text() for num in (1, 2)}
    STARTED.clear()
    ends.clear()
    said = command("train", "-m", "sweep.resume=sweep")
    assert said.code == 0, said.err
    assert STARTED == [(1, 40), (2, 0), (3, 0)]
    assert "resume 1 of 4 runs finished; left to run: runs 1, 2, 3" in said.out
    assert states() == ["finished"] * 4
    assert [one["metric"] for one in record()["members"]] == [1.5] * 4
    assert [one["error"] for one in record()["members"]] == [None] * 4
    assert {num: Path(f"sweep/{num}/config.yaml").read_text() for num in configs} == configs
    new = yaml.safe_load(Path("sweep/3/config.yaml").read_text())
    assert (new["batch"]["global_batch_size"], new["run"]["seed"]) == (64, 1)
    assert new["sweep"] == {"resume": None, "retry": "unfinished"}
    assert not lock.path_of(RunDir(Path("sweep"))).exists()
    assert Path("sweep/report.html").is_file()


def test_nothing_is_left(command):
    assert swept(command).code == 0
    STARTED.clear()
    said = command("train", "sweep.resume=sweep")  # a sweep goes on as one, -m or not
    assert said.code == 0, said.err
    assert STARTED == []
    assert "resume 4 of 4 runs finished; left to run: nothing" in said.out


def test_only_the_failed_ones_again(command, ends):
    ends |= {0: 75, 2: 3}
    assert swept(command).code == 3
    forget(3)
    STARTED.clear()
    ends.clear()
    said = command("train", "-m", "sweep.resume=sweep", "sweep.retry=failed")
    assert said.code == 75, said.err
    assert [num for num, _ in STARTED] == [2]
    assert states() == ["stopped", "finished", "finished", "cancelled"]


def test_a_run_that_went_on_by_itself_is_not_run_again(command, ends):
    ends |= {1: 75}
    assert swept(command).code == 75
    ends.clear()
    assert command("resume", "sweep/1").code == 0
    STARTED.clear()
    assert command("train", "-m", "sweep.resume=sweep").code == 0
    assert STARTED == []
    assert states() == ["finished"] * 4


def test_the_whole_command_may_be_given_again_and_where_it_runs_may_change(command):
    assert swept(command).code == 0
    forget(3)
    STARTED.clear()
    said = command("train", "-m", *SWEEP[::-1], "sweep.resume=sweep", "cluster.ranks_per_node=1", "cluster.device=cpu")
    assert said.code == 0, said.err
    assert STARTED == [(3, 0)]
    plan = json.loads(Path("sweep/3/plan.json").read_text())
    assert (plan["world_size"], plan["global_batch_size"]) == (1, 64)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["run.seed=0,1,2"], "run.seed: 0,1 -> 0,1,2"),
        (["optimizer.lr=0.1,0.2"], "optimizer.lr: (not there) -> 0.1,0.2"),
        (["batch.global_batch_size=32"], "batch.global_batch_size: 32,64 -> 32"),
        (["optimizer.lr=0.5"], "optimizer.lr: 0.003 -> 0.5"),
        (["sweep=learning_rate"], "sweep: (not there) -> learning_rate"),
        (["hydra.sweep.subdir=x"], "hydra.sweep.subdir: (not there) -> x"),
        (["optimizer.lr=0.5", "training.duration='7 updates'"], "training.duration: 100 updates -> 7 updates"),
        (["hydra/sweeper=nothing"], "hydra/sweeper=nothing: there is no such choice"),
        (["--config-name=other"], "there is no other.yaml"),
    ],
)
def test_another_command_is_refused_with_the_keys_that_differ(command, overrides, said):
    assert swept(command).code == 0
    forget(3)
    before = Path("sweep/sweep.json").read_text()
    STARTED.clear()
    answer = command("train", "-m", "sweep.resume=sweep", *overrides)
    assert answer.code == 2
    assert said in answer.err
    assert answer.err.count("optimizer.lr:") <= 1  # said once, not for each run
    assert (STARTED, Path("sweep/sweep.json").read_text()) == ([], before)


def test_a_batch_that_follows_from_the_ranks_is_compared_as_solved(command):
    solved = ("batch.global_batch_size=null", "batch.micro_batch_size=4", "batch.gradient_accumulation_steps=2")
    assert command("train", "-m", *CPU, *solved, "run.seed=0,1", "hydra.sweep.dir=sweep").code == 0
    content = record()
    content["members"][1]["state"] = "cancelled"
    Path("sweep/1/status.json").unlink()
    Path("sweep/sweep.json").write_text(json.dumps(content))
    answer = command("train", "-m", "sweep.resume=sweep", "cluster.ranks_per_node=3")
    assert answer.code == 2
    assert "batch.global_batch_size: 16 -> 24" in answer.err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("-m", "sweep.resume=nothing"), "sweep.resume=nothing: no sweep here"),
        (("-m", "sweep.resume=old"), "doesn't say how the sweep was started"),
        (("-m", "sweep.retry=failed", "run.seed=0,1"), "sweep.retry=failed: is said of a sweep that goes on"),
        (("sweep.retry=failed",), "sweep.retry=failed: is said of a sweep that goes on"),
        (("-m", "sweep.resume=old", "sweep.retry=all"), "allowed: one of unfinished, failed"),
    ],
)
def test_what_can_not_go_on(command, argv, said):
    Path("old").mkdir()
    Path("old/sweep.json").write_text('{"members": []}')
    answer = command("train", *argv)
    assert answer.code == 2
    assert said in answer.err
    assert sorted(os.listdir()) == ["old"]


def test_one_run_has_no_sweep_to_go_on_with(command):
    assert command("train", *CPU, "hydra.run.dir=run").code == 0
    answer = command("resume", "run", "sweep.resume=sweep")
    assert answer.code == 2
    assert "sweep.resume=sweep: goes on with a sweep, and this is one run" in answer.err


def test_a_sweep_that_another_process_runs_is_left_alone(command):
    assert swept(command).code == 0
    other = vars(lock.Owner.this_process()) | {"pid": 1, "started": lock._started(1)}
    lock.path_of(RunDir(Path("sweep"))).write_text(json.dumps(other))
    answer = command("train", "-m", "sweep.resume=sweep")
    assert answer.code == 2
    assert "another launcher is running here: process 1 on" in answer.err


def test_a_sweep_goes_on_where_it_was_moved_to(command, ends):
    ends |= {1: 75}
    assert swept(command).code == 75
    Path("sweep").rename("moved")
    STARTED.clear()
    ends.clear()
    said = command("train", "-m", "sweep.resume=moved")
    assert said.code == 0, said.err
    assert [num for num, _ in STARTED] == [1]
    assert states("moved") == ["finished"] * 4
    assert not Path("sweep").exists()


def test_a_sweep_started_elsewhere_says_where(command, monkeypatch):
    assert swept(command).code == 0
    started = os.getcwd()
    Path("other").mkdir()
    monkeypatch.chdir("other")
    answer = command("train", "-m", "sweep.resume=../sweep")
    assert answer.code == 2
    assert f"the sweep was started in {started}: give the command there" in answer.err


def test_a_sweep_of_a_scheduler_goes_on_here(command, ends):
    ends |= {1: 75}
    assert swept(command).code == 75
    record = Path("sweep", "sweep.json")
    said = json.loads(record.read_text())
    said["command"]["overrides"] += ["submit=slurm", "submit.slurm.partition=low"]
    record.write_text(json.dumps(said))
    ends.clear()
    STARTED.clear()
    answer = command("train", "-m", "sweep.resume=sweep", "submit=local")
    assert answer.code == 0, answer.err
    assert [num for num, _ in STARTED] == [1]


def test_a_prepared_sweep_goes_on_too(command, ends):
    ends |= {2: 75}
    fewer = ("batch.global_batch_size=32,64", "run.seed=0,1")
    assert command("train", *CPU, "sweep=linear_scaling", *fewer, "hydra.sweep.dir=sweep").code == 75
    ends.clear()
    STARTED.clear()
    said = command("train", "sweep.resume=sweep")
    assert said.code == 0, said.err
    assert [num for num, _ in STARTED] == [2]


def test_the_plan_of_what_is_left(command, ends):
    ends |= {1: 75}
    assert swept(command).code == 75
    before = Path("sweep/sweep.json").read_text()
    said = command("plan", "-m", "sweep.resume=sweep")
    assert said.code == 0, said.err
    assert "left to run: run 1" in said.out
    assert Path("sweep/sweep.json").read_text() == before
