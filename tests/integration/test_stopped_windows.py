"""What is counted over a stop in the middle of a window, and a stop whose save takes long."""

import os
import time
from pathlib import Path
from typing import Any

import pytest
from runs import PLAIN, launch
from scalar import Indices
from watched import TERM, watched

pytestmark = pytest.mark.slow

SAMPLES = 120
PACE = "SECONDS_A_SAMPLE"
"""The environment variable with what reading takes, where it isn't a tenth of a second."""


class SlowIndices(Indices):
    """Takes its time for each sample."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(float(os.environ.get(PACE, "0.1")))
        return super().__getitem__(index)


def count(*more: str) -> list[str]:
    """A run that counts how often each sample was seen: in windows of 4 a rate of 4 adds 1 for a visit."""
    return [
        *PLAIN[:-2],
        "optimizer.lr=4",
        "model=custom",
        "model._target_=scalar.Counter",
        f"+model.num_samples={SAMPLES}",
        "task=custom",
        "task._target_=scalar.Visits",
        "data=custom",
        "data.train._target_=test_stopped_windows.SlowIndices",
        f"+data.train.num_samples={SAMPLES}",
        "cluster.device=cpu",
        "cluster.ranks_per_node=1",
        "batch.global_batch_size=4",
        "training.duration=2 epochs",
        *more,
    ]


def test_f01_f03_f04_every_sample_counts_once_over_a_stop_inside_a_window_and_another_split(tmp_path: Path) -> None:
    with watched(tmp_path, count("batch.micro_batch_size=1", "batch.gradient_accumulation_steps=4")) as running:
        running.wait_for_update(4)
        time.sleep(0.15)  # in the middle of a window of 4 samples of 0.1 s
        running.launcher.send_signal(TERM)
        done = running.ended(60)
    assert done.code == 75, done.out + done.err
    stopped = done.json("status.json")["update"]
    assert 4 <= stopped < SAMPLES // 4
    split = ("batch.micro_batch_size=4", "batch.gradient_accumulation_steps=1", "data.workers=1")
    here = f"{Path(__file__).parent}:{Path(__file__).parents[2] / 'examples'}"
    done = launch(tmp_path, "resume", "run", *split, PYTHONPATH=here, **{PACE: "0"})
    assert done.code == 0, done.out + done.err
    assert done.json("plan.json")["num_updates"] == SAMPLES // 4 * 2
    assert [line["update"] for line in done.metrics()] == list(range(1, SAMPLES // 4 * 2 + 1))
    assert done.weights()["w"] == [2.0] * SAMPLES  # of two epochs


class OnSlowDisk(SlowIndices):
    """Each file of a checkpoint takes 6 s to reach the disk: together more than 30 s."""

    def __init__(self, num_samples: int) -> None:
        super().__init__(num_samples)
        real = os.fsync

        def fsync(descriptor: int) -> None:
            if "checkpoints" in os.readlink(f"/proc/self/fd/{descriptor}"):
                time.sleep(6)
            real(descriptor)

        os.fsync = fsync


def test_h09_a_save_that_takes_longer_than_other_launchers_wait(tmp_path: Path) -> None:
    slow = ("checkpoint.every=null", "checkpoint.stop_within=100 seconds")
    with watched(tmp_path, count(*slow, "data.train._target_=test_stopped_windows.OnSlowDisk")) as running:
        running.wait_for_update(2)
        told = time.monotonic()
        running.launcher.send_signal(TERM)
        done = running.ended(110)
    assert done.code == 75, done.out + done.err
    assert time.monotonic() - told > 30
    assert done.json("status.json")["error"] is None
    (saved,) = (done.run / "checkpoints").glob("update_*")
    assert int(saved.name.removeprefix("update_")) == done.json("status.json")["update"]
