"""A sweep from the command to its folder: each run as if it were alone, failures, signals, Optuna."""

import contextlib
import json
import os
import signal
import subprocess
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from runs import Done, argv, environment, launch, mean

pytestmark = pytest.mark.slow

TWO_RANKS = ("cluster.ranks_per_node=2", "batch.micro_batch_size=1", "batch.global_batch_size=2")
HERE = str(Path(__file__).parent)
RATES = {"1": 7.0, "0.5": 4.0, "0.25": 2.125}
"""What w is after two updates on [1, 3], [5, 9] at each rate: w <- w - lr (w - mean of the window)."""


def sweep(folder: Path, *arguments: str, name: str = "sweep", **env: str) -> Done:
    """Runs `launcher train -m` in `folder`, with the sweep's folder at folder/name."""
    done = launch(
        folder, "train", "-m", *arguments, f"hydra.sweep.dir={name}", "hydra.run.dir=none", timeout=200, **env
    )
    return Done(done.code, done.out, done.err, folder / name)


def members(done: Done) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = done.json("sweep.json")["members"]
    return listed


def member(done: Done, num: int) -> Done:
    return Done(0, "", "", done.run / str(num))


def processes_with(text: str) -> list[str]:
    """The command lines of processes that name `text`."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(file.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return [line for line in found if text in line]


def test_i01_i06_each_run_of_a_sweep_is_what_it_is_alone(tmp_path: Path) -> None:
    base = [*mean([1, 3, 5, 9]), *TWO_RANKS]
    base = [one for one in base if not one.startswith("optimizer.lr")]
    forward = sweep(tmp_path, *base, f"optimizer.lr={','.join(RATES)}", name="forward")
    assert forward.code == 0, forward.out + forward.err
    assert forward.out.index("Sweep of 3 runs") < forward.out.index("update 1/2")
    assert (forward.run / "multirun.yaml").is_file()
    hashes = {}
    for num, (rate, weight) in enumerate(RATES.items()):
        one = member(forward, num)
        assert one.weights() == {"w": [weight]}
        assert len(list(one.run.rglob("config.yaml"))) == 2  # the run's and Hydra's own
        assert yaml.safe_load((one.run / ".hydra" / "hydra.yaml").read_text())["hydra"]["job"]["num"] == num
        result = one.json("result.json")
        hashes[rate] = result["weights_sha256"]
        assert members(forward)[num] == {
            "num": num,
            "overrides": [f"optimizer.lr={rate}"],
            "dir": str(one.run),
            "state": "finished",
            "exit_code": 0,
            "error": None,
            "metric": result["train_loss"],
        }
    backward = sweep(tmp_path, *base, "optimizer.lr=0.25,1", name="backward")
    assert backward.code == 0, backward.out + backward.err
    for num, rate in enumerate(("0.25", "1")):
        assert member(backward, num).json("result.json")["weights_sha256"] == hashes[rate]
    alone = launch(tmp_path, "train", *base, "optimizer.lr=0.25")
    assert alone.json("result.json")["weights_sha256"] == hashes["0.25"]
    told = ("loss", "lr", "grad_norm", "samples", "weight", "micro_batches")
    swept = [[line[key] for key in told] for line in member(forward, 2).metrics()]
    assert swept == [[line[key] for key in told] for line in alone.metrics()]


def test_of_four_runs_two_fail_and_the_others_finish(tmp_path: Path) -> None:
    faulty = ["data.train._target_=faults.Faulty", "+data.train.how=raise", "+data.train.at=2,9,3,10"]
    paths = HERE + os.pathsep + environment()["PYTHONPATH"]
    done = sweep(tmp_path, *mean([1, 3, 5, 9]), *TWO_RANKS, *faulty, PYTHONPATH=paths)
    assert done.code == 3, done.out + done.err
    assert [one["state"] for one in members(done)] == ["failed", "finished", "failed", "finished"]
    assert [one["exit_code"] for one in members(done)] == [3, 0, 3, 0]
    summary = done.out[done.out.index("4 runs: 2 finished, 2 failed") - 600 :]
    for num, at in ((0, 2), (2, 3)):
        said = f"run {num} (+data.train.at={at}) failed (exit 3): rank {num // 2}: ValueError: this sample is broken"
        assert said in summary
        assert f"sweep/{num}/logs/rank_{num // 2}.log" in summary
        log = (done.run / str(num) / "logs" / f"rank_{num // 2}.log").read_text()
        assert "Traceback (most recent call last)" in log
    assert "Traceback" not in done.out + done.err
    assert f"report  {done.run.name}/report.html" in done.out
    told = (done.run / "report.md").read_text()
    assert "run 0 (+data.train.at=2): failed at update 1 of 2 (exit 3): ValueError: this sample is broken" in told
    assert "| 2 | 1 | 0 | 2 | 14.5 | 1 | 2 |" in told  # w = 2, so that 5 and 9 cost (9 + 49) / 2 / 2
    assert (done.run / "report.html").read_text().count("data:image/png;base64,") == 1
    assert member(done, 1).weights() == member(done, 3).weights() == {"w": [7.0]}


@pytest.mark.parametrize(("number", "every", "code"), [(signal.SIGINT, "null", 130), (signal.SIGTERM, "1 updates", 75)])
def test_a_signal_ends_the_running_run_and_cancels_the_rest(
    tmp_path: Path, number: signal.Signals, every: str, code: int
) -> None:
    """The run hangs, so it doesn't finish its window in its second: it has stopped where there is a checkpoint."""
    hanging = ["data.train._target_=faults.Faulty", "+data.train.how=hang", "+data.train.at=2", "run.seed=0,1,2"]
    saves = [f"checkpoint.every={every}", "checkpoint.async_save=false", "checkpoint.stop_within=1"]
    arguments = [*mean([1, 3, 5, 9]), *TWO_RANKS, *hanging, *saves, "hydra.sweep.dir=sweep"]
    start = subprocess.Popen(
        argv("train", "-m", *arguments),
        cwd=tmp_path,
        env=environment(PYTHONPATH=HERE + os.pathsep + environment()["PYTHONPATH"]),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    sign = tmp_path / "sweep" / "0" / ("metrics.jsonl" if every == "null" else "checkpoints/update_0000000001")
    deadline = time.monotonic() + 180
    while not (sign.exists() and sign.stat().st_size) and start.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    start.send_signal(number)
    out, _ = start.communicate(timeout=180)
    assert start.returncode == code, out
    record = json.loads((tmp_path / "sweep" / "sweep.json").read_text())["members"]
    state = "stopped" if code == 75 else "cancelled"
    assert [one["state"] for one in record] == [state, "cancelled", "cancelled"], out
    assert [one["exit_code"] for one in record] == [code, None, None]
    assert sorted(path.name for path in (tmp_path / "sweep").iterdir()) == ["0", "multirun.yaml", "sweep.json"]
    assert not processes_with(str(tmp_path)), "a process of the sweep is left"
    if code == 75:
        paths = HERE + os.pathsep + environment()["PYTHONPATH"]
        on = launch(
            tmp_path,
            "train",
            "-m",
            "sweep.resume=sweep",
            "hydra.run.dir=none",
            timeout=200,
            PYTHONPATH=paths,
            HEALED="1",
        )
        assert on.code == 0, on.out + on.err
        assert "resume 0 of 3 runs finished; left to run: runs 0, 1, 2" in on.out
        done = Done(on.code, on.out, on.err, tmp_path / "sweep")
        assert [one["state"] for one in members(done)] == ["finished"] * 3
        assert [member(done, num).weights() for num in range(3)] == [{"w": [7.0]}] * 3
        steps = [[(line["update"], line["attempt"]) for line in member(done, num).metrics()] for num in range(3)]
        assert steps == [[(1, 0), (2, 1)], [(1, 0), (2, 0)], [(1, 0), (2, 0)]]
        assert "- run 0" not in (done.run / "report.md").read_text()


def test_a_sweep_that_cannot_work_leaves_no_folder(tmp_path: Path) -> None:
    base = [one for one in mean([1]) if not one.startswith("+data.train.targets")]
    done = sweep(tmp_path, *base, "+data.train.targets=[1],[]")
    assert done.code == 2
    assert "run 1 (+data.train.targets=[]): data.train: the data set is empty" in done.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(find_spec("optuna") is None, reason="hydra-optuna-sweeper is not installed")
def test_optuna_asks_in_batches_and_is_told_the_loss(tmp_path: Path) -> None:
    optuna = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=3", "hydra.sweeper.n_jobs=1"]
    base = [one for one in mean([1, 3, 5, 9]) if not one.startswith("optimizer.lr")]
    validation = "data.validation={_target_: scalar.Targets, targets: [4,4]}"
    search = ["hydra.sweeper.sampler.seed=1", "optimizer.lr=interval(0.1,1)", validation]
    done = sweep(tmp_path, *base, *TWO_RANKS, *optuna, *search)
    assert done.code == 0, done.out + done.err
    record = members(done)
    assert [one["num"] for one in record] == [0, 1, 2]
    losses = [member(done, num).json("result.json")["validation_loss"] for num in range(3)]
    assert [one["metric"] for one in record] == losses
    found = yaml.safe_load((done.run / "optimization_results.yaml").read_text())
    assert found["best_value"] == min(losses)
    # a trial that can't work ends the search, unless failures are allowed for
    broken = [*base, *TWO_RANKS, *optuna, "optimizer.lr=choice(-1,-2)"]
    refused = sweep(tmp_path, *broken, name="refused")
    assert refused.code == 2
    assert "must be a finite number of at least 0" in refused.err
    assert not refused.run.exists()
