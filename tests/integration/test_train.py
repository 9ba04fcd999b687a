"""A run from the command to its folder: files, exit codes, first failures, many at once."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from runs import Done, argv, environment, launch, mean

pytestmark = pytest.mark.slow

HERE = str(Path(__file__).parent)
TWO_RANKS = ("cluster.ranks_per_node=2", "batch.micro_batch_size=1")


def test_the_folder_of_a_run_and_its_numbers(tmp_path: Path) -> None:
    validation = "data.validation={_target_: scalar.Targets, targets: [2,2,2]}"
    done = launch(tmp_path, "train", *mean([1, 3, 5, 7]), *TWO_RANKS, "batch.global_batch_size=4", validation)
    assert done.code == 0, done.out + done.err
    assert done.weights() == {"w": [4.0]}
    (line,) = done.metrics()
    assert line["loss"] == 10.5  # (1 + 9 + 25 + 49) / 2 / 4
    assert line["grad_norm"] == 4.0
    assert (line["samples"], line["weight"], line["micro_batches"], line["epoch"]) == (4, 4.0, 2, 1.0)
    (checked,) = done.metrics("validation")
    assert checked["loss"] == 2.0
    result = done.json("result.json")
    assert (result["update"], result["applied"], result["validation_loss"]) == (1, 1, 2.0)
    assert len(result["weights_sha256"]) == 2
    assert len(set(result["weights_sha256"])) == 1
    status = done.json("status.json")
    assert (status["state"], status["exit_code"], status["update"]) == ("finished", 0, 1)
    plan = done.json("plan.json")
    assert (plan["num_updates"], plan["samples_per_epoch"], plan["reductions_per_window"]) == (1, 4, 1)
    assert {path.name for path in done.run.iterdir()} == {
        ".hydra",
        "checkpoints",
        "config.yaml",
        "launcher.log",
        "logs",
        "loss.png",
        "metrics.jsonl",
        "model.safetensors",
        "plan.json",
        "result.json",
        "status.json",
        "usage.json",
    }
    assert {path.name for path in (done.run / "logs").iterdir()} == {"agent.log", "rank_0.log", "rank_1.log"}
    assert "finished" in done.out
    assert (done.run / "model.safetensors").stat().st_mode & 0o444 == 0o444
    _status_and_export(tmp_path, done)


def _status_and_export(folder: Path, done: Done) -> None:
    status = launch(folder, "status", "run")
    assert status.code == 0
    assert "finished" in status.out
    exported = launch(folder, "export", "run", "--output", "model.st")
    assert exported.code == 0
    assert (folder / "model.st").read_bytes() == (done.run / "model.safetensors").read_bytes()
    assert launch(folder, "export", "nowhere").code == 2
    # the weights are where another run may start from
    more = ["+model_weights=model.st", "optimizer.lr=0", "hydra.run.dir=again"]
    again = launch(folder, "train", *mean([1]), "cluster.ranks_per_node=1", *more)
    assert again.code == 0, again.out + again.err
    assert json.loads((folder / "again" / "metrics.jsonl").read_text())["loss"] == 4.5  # (4 - 1)^2 / 2
    used = launch(folder, "train", *mean([1]), "hydra.run.dir=again")
    assert used.code == 2
    assert "already holds a run" in used.err


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        ("raise", 3, "ValueError: this sample is broken"),
        ("kill", 3, "killed by SIGKILL"),
        ("exit0", 3, "sys.exit(0)"),
        ("exit7", 7, "sys.exit(7)"),
    ],
)
def test_d08_the_first_failing_rank_is_shown_once_and_the_others_end(
    tmp_path: Path, how: str, code: int, said: str
) -> None:
    overrides = mean(list(range(8)), *TWO_RANKS, "batch.global_batch_size=4")
    faulty = ["data.train._target_=faults.Faulty", "+data.train.at=6", f"+data.train.how={how}"]
    here = str(Path(__file__).parent)
    done = launch(tmp_path, "train", *overrides, *faulty, PYTHONPATH=here + ":" + environment()["PYTHONPATH"])
    assert done.code == code, done.out + done.err
    shown = done.out + done.err
    assert shown.count(said) == 1
    assert "starting again" not in shown
    assert ("no checkpoint yet (training.max_restarts=auto)" in shown) == (how == "kill")
    assert "rank 1" in shown
    assert "rank_1.log" in shown
    if how == "raise":
        assert "frames of the launcher and torch: see the log" in shown
        assert "faults.py" in shown
        assert "launcher/train/run.py" not in shown
        assert "launcher/train/run.py" in (done.run / "logs" / "rank_1.log").read_text(encoding="utf-8")
    status = done.json("status.json")
    assert (status["state"], status["exit_code"], status["error"]["rank"]) == ("failed", code, 1)
    assert [line["update"] for line in done.metrics()] == [1]  # what was done is there


def test_a_rank_ends_whatever_the_threads_of_its_group_do(tmp_path: Path) -> None:
    paths = HERE + os.pathsep + environment()["PYTHONPATH"]
    arguments = [*mean([1, 3, 5, 9]), *TWO_RANKS, "batch.global_batch_size=2", "model._target_=faults.Held"]
    done = launch(tmp_path, "train", *arguments, PYTHONPATH=paths)
    assert done.code == 0, done.out + done.err
    for rank in (0, 1):
        assert "farewell" in (done.run / "logs" / f"rank_{rank}.log").read_text()


def test_numbers_that_stay_bad_end_the_run_with_4(tmp_path: Path) -> None:
    overrides = mean("[1e39,1e39,1e39,1e39]", "batch.global_batch_size=1", "cluster.ranks_per_node=1")
    done = launch(tmp_path, "train", *overrides, "training.max_skipped_in_a_row=2")
    assert done.code == 4
    assert "2 updates in a row were not finite" in done.out
    assert [line["skipped"] for line in done.metrics()] == [1, 1]
    many = mean(str(["1e39"] * 40).replace("'", ""), "batch.global_batch_size=40", "cluster.ranks_per_node=1")
    stopped = launch(tmp_path, "train", *many, "training.on_nonfinite=stop", "hydra.run.dir=stop")
    assert stopped.code == 4
    assert "holds the samples [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, …] (40 in all)" in stopped.out
    assert "9, …] (40 in all)" in (tmp_path / "stop" / "logs" / "rank_0.log").read_text(encoding="utf-8")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_last_update_that_leaves_no_numbers_ends_the_run_with_4(tmp_path: Path, ranks: int) -> None:
    # 10 x 1e38 is above what fp32 holds; every loss, and the gradient's norm, was finite
    more = ["batch.global_batch_size=2", f"cluster.ranks_per_node={ranks}"]
    done = launch(tmp_path, "train", *mean("[10,10]", *more), "optimizer.groups=[{match: w, lr_scale: 1e38}]")
    assert done.code == 4, done.out + done.err
    assert "parameters that are not finite, and no model is written: w;" in done.out
    assert [line["skipped"] for line in done.metrics()] == [0]
    assert not (done.run / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["+data.train.targets=[]"], "data.train: the data set is empty"),
        (["data=text", "data.train.path=nowhere"], "nowhere"),
        (["+data.train.targets=[1]", "+data.train.target=1"], "did you mean 'targets'"),
        (["+data.train.targets=[1]", "strategy=single", "cluster.ranks_per_node=2"], "runs on one rank"),
        (["+data.train.targets=[1]", "hydra.run.dir=/proc/nowhere/run"], "can't be written"),
        (["+data.train.targets=[1]", "+model_weights=nothing.st"], "can't be read as a safetensors file"),
    ],
)
def test_refusals_come_before_any_rank_starts(tmp_path: Path, overrides: list[str], said: str) -> None:
    base = [one for one in mean(0) if not one.startswith("+data.train.targets")]
    if overrides[0] == "data=text":
        base = [one for one in base if not one.startswith("data")]
    done = launch(tmp_path, "train", *base, *overrides)
    assert done.code == 2, done.out + done.err
    assert said in done.err
    assert "Traceback" not in done.out + done.err
    assert list(tmp_path.rglob("config.yaml")) == []


def test_i02_eight_runs_started_at_once_have_folders_of_their_own(tmp_path: Path) -> None:
    starts = [
        subprocess.Popen(
            argv("train", *mean([n]), "cluster.ranks_per_node=1", "strategy=single", "run.name=many"),
            cwd=tmp_path,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for n in range(8)
    ]
    for start in starts:
        _out, err = start.communicate(timeout=200)
        assert start.returncode == 0, err
    runs = list((tmp_path / "runs" / "many").iterdir())
    assert len(runs) == 8
    weights = sorted(Done(0, "", "", run).weights()["w"][0] for run in runs)
    assert weights == [float(n) for n in range(8)]


def test_i03_i08_ranks_read_what_the_command_composed(tmp_path: Path) -> None:
    conf = tmp_path / "mine"
    (conf / "model").mkdir(parents=True)
    (conf / "model" / "wide.yaml").write_text("_target_: scalar.Scalar\nsize: 2\ndtype: float64\n")
    (conf / "my.yaml").write_text("defaults:\n  - config\n  - override model: wide\n  - _self_\nrun: {name: mine}\n")
    (tmp_path / "book.txt").write_text("first\nsecond\n")
    done = launch(
        tmp_path,
        "train",
        "--config-dir=mine",
        "--config-name=my",
        *[one for one in mean("[[[1,2]],[[3,6]]]") if one not in ("model=custom", "model._target_=scalar.Scalar")],
        "+note=${now:%f}",
        "~model.dtype",
        "cluster.ranks_per_node=2",
        "batch.global_batch_size=2",
    )
    assert done.code == 0, done.out + done.err
    assert done.weights() == {"w": [2.0, 4.0]}
    config = (done.run / "config.yaml").read_text()
    assert "${now" not in config
    assert "dtype" not in config
    assert "nothing reads this key" in done.out
    plan = launch(tmp_path, "plan", "data=text", "data.train.path=book.txt", "data.validation=null", "--json")
    assert plan.code == 0, plan.err
    assert json.loads(plan.out)["cwd"] == str(tmp_path)


def test_a_picture_that_cannot_be_drawn_fails_no_run(tmp_path: Path) -> None:
    (tmp_path / "matplotlib.py").write_text("raise RuntimeError('no fonts here')\n", encoding="utf-8")
    done = launch(tmp_path, "train", *mean([1, 3]), "cluster.ranks_per_node=1")
    assert done.code == 0, done.out + done.err
    assert f"picture {done.run / 'loss.png'}: RuntimeError: no fonts here" in done.out
    assert "Traceback" not in done.out + done.err
    assert done.json("status.json")["state"] == "finished"
    assert not (done.run / "loss.png").exists()
