"""Going on with a run: as if nothing had happened on the same layout, to rounding on another one."""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from runs import Done, argv, environment, launch, mean
from watched import within

from launcher.observe.records import read_metrics
from launcher.train.randomness import epoch_order

pytestmark = pytest.mark.slow

STARTED_WITHIN = 120.0
HERE = f"{Path(__file__).parent}:{environment()['PYTHONPATH']}"
EXACT = ("update", "applied", "epoch", "samples", "loss", "lr", "grad_norm", "skipped")


def overrides() -> list[str]:
    """A run of 2 epochs of 6 updates, shuffled, with momentum and a schedule; it may stay at a moment of the fifth."""
    fifth = epoch_order(0, 0, 16, shuffle=True)[12:15].tolist()
    at = max(fifth)  # the plan asks the first sample
    plain = [one for one in mean(list(range(1, 17))) if one.partition("=")[0] not in CHANGED]
    return [
        *plain,
        "model=custom",
        "model._target_=scalar.Scalar",
        "data.train._target_=moments.Data",
        f"+data.train.at={at}",
        "+data.train.moment=train",
        "data.validation={_target_: scalar.Targets, targets: [1,2,3]}",
        "optimizer=adamw",
        "optimizer.lr=0.2",  # 0.1 for a quarter of the samples, and a restart doesn't scale it again
        "scaling.rule=sqrt",
        "scaling.base_batch_size=12",
        "scaling.adam_betas_and_eps=true",
        "schedule.warmup='3 updates'",
        "training.duration='12 updates'",
        "training.validate_every='5 updates'",
        "cluster.ranks_per_node=2",
        "batch.global_batch_size=3",
        "checkpoint.every='1 updates'",
        "checkpoint.keep_last=3",
        "checkpoint.async_save=false",
    ]


CHANGED = (
    "data.shuffle",
    "scaling.rule",
    "optimizer",
    "optimizer.lr",
    "schedule/decay",
    "schedule.warmup",
    "training.duration",
)


def variables(folder: Path, stays_at: str = "") -> dict[str, str]:
    (folder / "marks").mkdir(exist_ok=True)
    return {"PYTHONPATH": HERE, "MOMENTS_MARKS": str(folder / "marks"), "MOMENTS_STOP": stays_at}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """The run that nothing happened to."""
    folder = tmp_path_factory.mktemp("whole")
    done = launch(folder, "train", *overrides(), **variables(folder))
    assert done.code == 0, done.out + done.err
    return done


@dataclass(frozen=True)
class Interrupted:
    """The same run, whose agent was killed in the middle."""

    done: Done
    refused: list[Done]
    """What others were told who wanted its folder while it ran."""
    lock: dict[str, Any]
    folder: Path


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Interrupted:
    folder = tmp_path_factory.mktemp("interrupted")
    run = folder / "run"
    with started(folder, *overrides(), stays_at="train") as process:
        lock = json.loads((run / "lock.json").read_text())
        before = (run / "status.json").read_text()
        again = (*overrides(), f"hydra.run.dir={run}", "checkpoint.resume=auto")
        refused = [
            launch(folder, "resume", "run", **variables(folder)),
            launch(folder, "resume", "run", "--force", **variables(folder)),
            launch(folder, "train", *again, **variables(folder)),
        ]
        assert json.loads((run / "status.json").read_text())["pids"] == json.loads(before)["pids"]
        os.kill(lock["pid"], signal.SIGKILL)
        out, err = process.communicate(timeout=60)
    return Interrupted(Done(process.returncode, out, err, run), refused, lock, folder)


@contextmanager
def started(folder: Path, *arguments: str, stays_at: str = "") -> "Iterator[subprocess.Popen[str]]":
    """A run that has come to its moment."""
    process = subprocess.Popen(
        argv("train", *arguments, f"hydra.run.dir={folder / 'run'}"),
        cwd=folder,
        env=environment(**variables(folder, stays_at)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        reached = folder / "marks" / "train"
        assert within(STARTED_WITHIN, lambda: reached.exists() or process.poll() is not None)
        assert process.poll() is None, process.communicate()
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def left(interrupted: Interrupted, tmp_path: Path) -> Path:
    """A copy of what it has left."""
    shutil.copytree(interrupted.done.run, tmp_path / "run")
    return tmp_path


def checkpoints(run: Path) -> list[int]:
    return sorted(int(one.name.removeprefix("update_")) for one in (run / "checkpoints").glob("update_??????????"))


def records(run: Path) -> list[dict[str, Any]]:
    return [{name: one[name] for name in EXACT} for one in read_metrics(run / "metrics.jsonl")[0]]


def assert_same_bits(run: Path, whole: Done) -> None:
    assert Done(0, "", "", run).weights() == whole.weights()
    assert records(run) == records(whole.run)
    validated = [
        [(one["update"], one["loss"]) for one in read_metrics(each / "metrics.jsonl")[1]] for each in (run, whole.run)
    ]
    assert validated[0] == validated[1]
    results = [json.loads((each / "result.json").read_text()) for each in (run, whole.run)]
    for name in ("update", "applied", "train_loss", "validation_loss", "weights_sha256"):
        assert results[0][name] == results[1][name]


def test_a_run_that_lives_keeps_its_folder(interrupted: Interrupted) -> None:
    for refused in interrupted.refused:
        assert refused.code == 2, refused
        assert f"another launcher is running here: process {interrupted.lock['pid']} on" in refused.err
        assert "Traceback" not in refused.err


def test_what_is_left_says_how_to_go_on(interrupted: Interrupted) -> None:
    run = interrupted.done.run
    assert interrupted.done.code == 137
    assert checkpoints(run) == [2, 3, 4]
    assert "go on   launcher resume run  (from update 4)" in interrupted.done.out
    assert not (run / "lock.json").exists()
    said = launch(interrupted.folder, "status", "run", COLUMNS="80")
    assert "run: goes on from update 4/12: launcher resume run" in said.out
    assert max(map(len, said.out.splitlines()[:2])) <= 80


def test_it_goes_on_as_if_nothing_had_happened(left: Path, whole: Done) -> None:
    run = left / "run"
    config = (run / "config.yaml").read_text()
    done = launch(left, "resume", "run", **variables(left))
    assert done.code == 0, done.out + done.err
    assert "from the checkpoint of update 4 of 12" in done.out
    assert "update 5/12  " in done.out
    assert "update 4/12  " not in done.out
    assert_same_bits(run, whole)
    assert (run / "config.yaml").read_text() == config
    scaled = json.loads((run / "plan.json").read_text())
    assert (scaled["lr"], scaled["scaled_arguments"]["betas"]) == (0.1, [0.975, 0.9875]), "scaled once"
    attempts = {one["update"]: one["attempt"] for one in read_metrics(run / "metrics.jsonl")[0]}
    assert attempts == {update: int(update > 4) for update in range(1, 13)}
    status = json.loads((run / "status.json").read_text())
    assert (status["state"], status["attempt"], status["update"]) == ("finished", 1, 12)
    again = launch(left, "resume", "run", **variables(left))
    assert (again.code, "nothing is left to do" in again.out) == (0, True)


def test_from_an_earlier_checkpoint_under_another_strategy_on_more_ranks(left: Path, whole: Done) -> None:
    run = left / "run"
    where = ("strategy=fsdp", "cluster.ranks_per_node=3", "batch.micro_batch_size=1")
    done = launch(left, "resume", "run", "--from", "2", *where, **variables(left))
    assert done.code == 0, done.out + done.err
    assert "puts aside the checkpoints of later updates, in run/checkpoints: 3, 4" in done.out
    assert "from the checkpoint of update 2 of 12; 2 updates after it repeated" in done.out
    plan = json.loads((run / "plan.json").read_text())
    assert (plan["world_size"], plan["strategy"], plan["global_batch_size"]) == (3, "fsdp", 3)
    for mine, theirs in zip(records(run), records(whole.run), strict=True):
        assert mine == {name: pytest.approx(value, rel=1e-5) for name, value in theirs.items()}
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    trained = [one["update"] for one in lines if one["kind"] == "train" and one["attempt"] == 1]
    assert trained == list(range(3, 13))


def test_from_an_earlier_checkpoint_to_the_same_bits(left: Path, whole: Done) -> None:
    run = left / "run"
    refused = launch(left, "resume", "run", "--from", "1", **variables(left))
    assert (refused.code, "there are: 2, 3, 4" in refused.err) == (2, True)
    done = launch(left, "resume", "run", "--from", "2", **variables(left))
    assert done.code == 0, done.out + done.err
    assert_same_bits(run, whole)
    kept = sorted(one.name for one in (run / "checkpoints").glob("*.before_attempt_1"))
    assert kept == [f"update_000000000{update}.before_attempt_1" for update in (3, 4)]
    attempts = {one["update"]: one["attempt"] for one in read_metrics(run / "metrics.jsonl")[0]}
    assert attempts == {update: int(update > 2) for update in range(1, 13)}


def test_a_run_that_was_told_to_stop_goes_on_by_the_same_command(tmp_path: Path, whole: Done) -> None:
    run = tmp_path / "run"
    slow = (*overrides(), "+data.train.pause=0.3", "checkpoint.resume=auto")
    with started(tmp_path, *slow) as process:
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 75, out + err
    newest = checkpoints(run)[-1]
    assert 4 <= newest < 12
    assert f"go on   launcher resume run  (from update {newest})" in out
    refused = launch(tmp_path, "train", *slow, "optimizer.lr=0.3", **variables(tmp_path))
    assert (refused.code, "optimizer.lr: 0.2 -> 0.3" in refused.err) == (2, True)
    done = launch(tmp_path, "train", *slow, **variables(tmp_path))
    assert done.code == 0, done.out + done.err
    assert f"from the checkpoint of update {newest} of 12\n" in done.out  # nothing is repeated
    assert_same_bits(run, whole)
