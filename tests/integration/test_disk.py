"""A full disk, a run's folder that vanishes, and two runs that want the same folder: said plainly, and nothing torn."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from runs import Done, argv, environment, launch, mean
from safetensors.torch import load_file

pytestmark = pytest.mark.slow

RANKS = ("cluster.ranks_per_node=2", "batch.global_batch_size=2")
HERE = f"{Path(__file__).parent}:{environment()['PYTHONPATH']}"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of one megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def harmful(run: Path, how: str) -> list[str]:
    """A run of 2 ranks that harms its folder at the third of 60 updates."""
    base = [one for one in mean([1] * 120) if not one.startswith("data.train._target_")]
    return [
        *base,
        *RANKS,
        "data.train._target_=moments.Harmful",
        "+data.train.at=4",
        f"+data.train.how={how}",
        f"+data.train.run={run}",
        f"hydra.run.dir={run}",
    ]


def assert_said(done: Done, said: str) -> None:
    shown = done.out + done.err
    assert done.code == 3, shown
    assert shown.count(said) == 1, shown
    assert "can't be written" in shown
    assert "Traceback" not in shown


@pytest.mark.needs("mount")
def test_a_disk_that_fills_up_while_training_is_said(tmp_path: Path, disk: Path) -> None:
    run = disk / "run"
    done = launch(tmp_path, "train", *harmful(run, "fill"), PYTHONPATH=HERE)
    assert_said(done, "No space left on device")
    assert str(run / "metrics.jsonl") in done.out or str(run / "status.json") in done.out
    assert not (run / "model.safetensors").exists()
    assert [one.name for one in run.iterdir() if one.name.endswith(".tmp")] == []
    status = launch(tmp_path, "status", str(run))
    assert "failed" in status.out or "no sign of life" in status.out


@pytest.mark.needs("mount")
def test_a_model_that_does_not_fit_is_not_there_in_half(tmp_path: Path, disk: Path) -> None:
    run = disk / "run"
    heavy = ["model._target_=moments.Heavy", f"hydra.run.dir={run}"]
    done = launch(tmp_path, "train", *mean([1, 2]), *RANKS, *heavy, PYTHONPATH=HERE)
    assert_said(done, "No space left on device")
    assert str(run / "model.safetensors") in done.out
    assert not [one.name for one in run.iterdir() if "model.safetensors" in one.name]
    status = Done(done.code, "", "", run).json("status.json")
    assert (status["state"], status["exit_code"]) == ("failed", 3)


@pytest.mark.needs("mount")
@pytest.mark.parametrize("on_error", ["go_on", "stop"])
def test_a_checkpoint_that_does_not_fit_is_said_and_the_one_before_stays(
    tmp_path: Path, disk: Path, on_error: str
) -> None:
    """A disk of a megabyte holds one of 600 kB, and neither a second nor the model beside it."""
    run = disk / "run"
    heavy = ["model._target_=moments.Heavy", "+model.size=150000", f"hydra.run.dir={run}", "data.validation=null"]
    saves = ["checkpoint.every=2 updates", "checkpoint.keep_last=1", f"checkpoint.on_error={on_error}"]
    done = launch(tmp_path, "train", *mean([1, 2, 3, 4, 5, 6]), *RANKS, *heavy, *saves, PYTHONPATH=HERE)
    assert [one.name for one in (run / "checkpoints").iterdir()] == ["update_0000000002"]
    log = (run / "logs" / "rank_0.log").read_text()
    assert "no checkpoint could be saved" in log
    assert "No space left on device" in log
    assert_said(done, "No space left on device")
    assert ("model.safetensors" in done.out) == (on_error == "go_on"), done.out
    status = Done(done.code, "", "", run).json("status.json")
    assert status["checkpoint"]["update"] == 2
    if on_error == "go_on":
        assert status["update"] == 3
        assert "No space left on device" in status["checkpoint_problem"]


@pytest.mark.needs("mount")
def test_a_disk_that_is_full_beforehand_refuses_the_run(tmp_path: Path, disk: Path) -> None:
    (disk / "filler").write_bytes(bytes(2**20 - 4096))
    done = launch(tmp_path, "train", *mean([1, 2]), *RANKS, f"hydra.run.dir={disk / 'run'}")
    assert done.code == 2, done.out + done.err
    assert "No space left on device" in done.err
    assert "Traceback" not in done.err
    assert not (disk / "run" / "config.yaml").exists()


def test_a_folder_that_vanishes_is_said(tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = launch(tmp_path, "train", *harmful(run, "vanish"), PYTHONPATH=HERE)
    assert_said(done, "its folder has vanished")
    assert str(run) in done.out
    assert not (run / "config.yaml").exists()


def test_g04_of_two_starts_in_one_folder_one_runs_and_the_other_harms_nothing(tmp_path: Path) -> None:
    starts = [
        subprocess.Popen(
            argv("train", *mean([n]), "cluster.ranks_per_node=1", "hydra.run.dir=one", f"run.name=n{n}"),
            cwd=tmp_path,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for n in (1, 2)
    ]
    said = [start.communicate(timeout=200) for start in starts]
    codes = [start.returncode for start in starts]
    assert sorted(codes) == [0, 2], said
    winner = codes.index(0) + 1
    assert "already holds a run" in said[codes.index(2)][1]
    run = tmp_path / "one"
    assert load_file(run / "model.safetensors")["w"].tolist() == [float(winner)]
    assert f"name: n{winner}" in (run / "config.yaml").read_text()
    assert f"run.name=n{winner}" in (run / ".hydra" / "overrides.yaml").read_text()


def test_loader_workers_can_hand_tensors_over_below_a_long_temporary_folder(tmp_path: Path) -> None:
    long = tmp_path / ("t" * 100)
    long.mkdir()
    done = launch(tmp_path, "train", *mean([1, 3]), *RANKS, "data.workers=1", TMPDIR=str(long))
    assert done.code == 0, done.out + done.err
    assert done.weights() == {"w": [2.0]}
