"""Output that can't be written, or not in these letters: a run goes on without its display."""

import os
import subprocess
from pathlib import Path

import pytest
from runs import argv, environment, mean

pytestmark = pytest.mark.slow

ONE = mean([1, 3, 5], "cluster.ranks_per_node=1", "batch.global_batch_size=1")
FULL = "No space left on device"


def gone() -> int:
    """The writing end of a pipe whose reader has left."""
    read, write = os.pipe()
    os.close(read)
    return write


def full() -> int:
    """A device that takes nothing."""
    return os.open("/dev/full", os.O_WRONLY)


def run(
    folder: Path, *arguments: str, stdout: int = subprocess.PIPE, stderr: int = subprocess.PIPE, **env: str
) -> "subprocess.CompletedProcess[str]":
    done = subprocess.run(
        argv(*arguments),
        cwd=folder,
        env=environment(**env),
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        text=True,
        encoding="utf-8",
        errors="replace",
        timeout=200,
    )
    for one in {stdout, stderr} - {subprocess.PIPE, subprocess.STDOUT, subprocess.DEVNULL}:
        os.close(one)
    return done


def is_finished(folder: Path) -> bool:
    return (folder / "model.safetensors").is_file() and '"finished"' in (folder / "status.json").read_text()


@pytest.mark.parametrize("stderr", [subprocess.PIPE, subprocess.STDOUT], ids=["alone", "with stderr"])
def test_a_run_outlives_the_reader_of_its_output(tmp_path: Path, stderr: int) -> None:
    done = run(tmp_path, "train", *ONE, "hydra.run.dir=run", stdout=gone(), stderr=stderr)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    assert is_finished(tmp_path / "run")


def test_a_run_goes_on_where_its_output_cannot_be_written(tmp_path: Path) -> None:
    done = run(tmp_path, "train", *ONE, "hydra.run.dir=run", stdout=full())
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == [f"launcher: the output can't be written: {FULL}; nothing more is shown"]
    assert is_finished(tmp_path / "run")


@pytest.mark.parametrize("opened", [gone, full])
def test_a_sweep_outlives_its_output(tmp_path: Path, opened) -> None:
    sweep = ("-m", "run.seed=0,1", "hydra.sweep.dir=sweep")
    done = run(tmp_path, "train", *ONE, *sweep, stdout=opened())
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("\n") == (opened is full)
    assert is_finished(tmp_path / "sweep" / "0")
    assert is_finished(tmp_path / "sweep" / "1")


@pytest.mark.parametrize("arguments", [["plan"], ["plan", "--json"], ["plan", "-m", "run.seed=0,1"], ["--help"]])
@pytest.mark.parametrize(("opened", "code"), [(gone, 141), (full, 1)])
def test_a_command_that_only_prints_ends_as_other_tools_do(tmp_path: Path, arguments, opened, code) -> None:
    more = ONE if arguments[0] == "plan" else []
    done = run(tmp_path, *arguments, *more, stdout=opened())
    assert done.returncode == code
    assert ("" if opened is gone else FULL) in done.stderr
    assert done.stderr.count("\n") == (opened is full)


def test_a_plan_without_any_output_does_not_pretend(tmp_path: Path) -> None:
    words = [f"'{one}'" for one in argv("plan", *ONE)]
    done = subprocess.run(["sh", "-c", f"{' '.join(words)} >&-"], cwd=tmp_path, env=environment(), timeout=200)
    assert done.returncode == 1


@pytest.mark.parametrize("env", [{"PYTHONIOENCODING": "ascii"}, {"PYTHONUTF8": "0"}], ids=["output", "everything"])
def test_letters_that_the_terminal_lacks_stop_nothing(tmp_path: Path, env: dict[str, str]) -> None:
    done = run(tmp_path, "train", *ONE, 'run.name="données 数"', LC_ALL="C", **env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    (named,) = (tmp_path / "runs").iterdir()
    assert named.name == "données_数"
    assert "runs/donn" in done.stdout
    assert is_finished(next(named.iterdir()))


def test_a_rank_says_its_error_in_any_letters(tmp_path: Path) -> None:
    broken = "class Data:\n    def __len__(self): return 2\n    def __getitem__(self, i): raise ValueError('é 数')\n"
    (tmp_path / "mine.py").write_text(broken, encoding="utf-8")
    own = [one for one in ONE if not one.startswith(("data.train", "+data.train"))]
    done = run(
        tmp_path, "train", *own, "data.train._target_=mine.Data", "hydra.run.dir=run", LC_ALL="C", PYTHONUTF8="0"
    )
    assert done.returncode == 3, done.stdout + done.stderr
    assert "é 数" in (tmp_path / "run" / "logs" / "rank_0.log").read_text(encoding="utf-8")
    assert "ValueError: " in done.stdout


def test_an_argument_that_is_no_text_is_refused(tmp_path: Path) -> None:
    done = subprocess.run(
        [*argv("plan"), b"run.name=a\xff"], cwd=tmp_path, env=environment(), capture_output=True, timeout=200
    )
    assert done.returncode == 2
    assert "run.name=a\N{REPLACEMENT CHARACTER}: not UTF-8" in done.stderr.decode()


@pytest.mark.parametrize("command", ["train", "plan", "status", "export"])
def test_a_current_folder_that_is_gone_is_said(tmp_path: Path, command: str) -> None:
    words = " ".join(argv(command, str(tmp_path)))
    script = f"mkdir gone && cd gone && rmdir ../gone && {words}"
    done = subprocess.run(
        ["sh", "-c", script], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 2
    assert done.stderr == f"launcher {command}: the current folder has been deleted: go to one that is there\n"
