"""One who waits for a job and presses Ctrl-C, and how far the runs of an array are."""

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

from launcher import slurm_job
from launcher.run_dir import RunDir, State
from launcher.submit.slurm import asks_to_cancel
from launcher.sweep.members import Member
from launcher.sweep.progress import following


@pytest.fixture
def cancelled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    jobs: list[str] = []
    monkeypatch.setattr(slurm_job, "cancel", jobs.append)
    return jobs


@pytest.mark.parametrize(("said", "is_cancelled"), [("c", True), (" Cancel ", True), ("l", False), ("", False)])
def test_in_a_terminal_one_is_asked(
    monkeypatch: pytest.MonkeyPatch, cancelled: list[str], said: str, is_cancelled: bool
) -> None:
    console = Console(file=io.StringIO(), force_terminal=True)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr(console, "input", lambda question: said)
    assert asks_to_cancel("41", console) is is_cancelled
    assert cancelled == (["41"] if is_cancelled else [])


def test_elsewhere_it_runs_on(cancelled: list[str]) -> None:
    shown = io.StringIO()
    assert not asks_to_cancel("41", Console(file=shown))
    assert cancelled == []
    assert shown.getvalue() == "job 41 runs on; cancel it with scancel 41\n"


def member(folder: Path, num: int) -> Member:
    run = RunDir(folder / str(num))
    run.create("a: 1", '{"num_updates": 8}')
    return Member(num, [f"run.seed={num}"], where=run.path)


@pytest.mark.parametrize("is_terminal", [False, True])
def test_how_far_each_run_is_is_shown(tmp_path: Path, is_terminal: bool) -> None:
    members, shown = [member(tmp_path, num) for num in (0, 1)], io.StringIO()
    with following(members, Console(file=shown, force_terminal=is_terminal, width=100)) as view:
        for one in members:
            one.run.write_status(state=State.submitted)
        view.look(members)
        for update in (1, 2, 3, 8):
            members[0].run.write_status(state=State.running, update=update)
            view.look(members)
        members[1].state = State.finished
        view.end(members[1])
        view.look(members[:1])
    text = shown.getvalue()
    if is_terminal:
        assert "8/8" in text
        assert "waits" in text
    else:
        assert text.splitlines() == ["run 0  update 1/8", "run 0  update 2/8", "run 0  update 8/8", "run 1  finished"]


def test_a_command_inside_a_job_hands_nothing_of_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "3", "SBATCH_PARTITION": "low", "SRUN_CPUS_PER_TASK": "2"}
    for name, value in {**given, "SLURM_CONF": "/etc/slurm.conf", "OWN": "kept"}.items():
        monkeypatch.setenv(name, value)
    left = slurm_job.environment()
    assert not given.keys() & left.keys()
    assert (left["SLURM_CONF"], left["OWN"]) == ("/etc/slurm.conf", "kept")
