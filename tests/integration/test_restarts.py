"""Ranks that are lost, and start again from the newest checkpoint."""

import os
from pathlib import Path

import pytest
from paced import expected, paced, waits
from watched import KILL, watched

pytestmark = pytest.mark.slow

SAMPLES = 24
SAVED = ("checkpoint.every=2", "checkpoint.async_save=false")


def test_a_run_outlives_a_killed_rank(tmp_path: Path) -> None:
    with watched(tmp_path, paced(SAMPLES, *SAVED, *waits(13, tmp_path / "go"))) as running:
        running.wait_for_update(5)
        os.kill(running.rank(1), KILL)
        (tmp_path / "go").touch()
        done = running.ended(180)
    assert done.code == 0, done.out + done.err
    assert done.weights()["w"] == [pytest.approx(expected(SAMPLES), rel=1e-6)]
    (failure,) = done.json("status.json")["failures"]
    assert (failure["attempt"], failure["rank"], failure["from_update"] % 2) == (0, 1, 0)
    assert failure["reason"].startswith("killed by SIGKILL")
    told = f"starting again from update {failure['from_update']} (restart 1 of 3)"
    assert done.out.count(f"rank 1 was killed by SIGKILL at update {failure['update']}: {told}") == 1
    first, second = ([line["update"] for line in done.metrics() if line["attempt"] == one] for one in (0, 1))
    assert first == list(range(1, len(first) + 1))
    assert second == list(range(failure["from_update"] + 1, SAMPLES // 2 + 1))
    assert done.json("status.json")["attempt"] == 1


def test_a_rank_that_is_killed_again_and_again_ends_the_run(tmp_path: Path) -> None:
    data = ["+data.train.at=9", "+data.train.how=kill", "training.max_restarts=1"]
    with watched(tmp_path, paced(SAMPLES, *SAVED, *data)) as running:
        done = running.ended(180)
    assert done.code == 3, done.out + done.err
    status = done.json("status.json")
    assert (status["state"], status["error"]["rank"], status["attempt"]) == ("failed", 1, 1)
    assert [(one["attempt"], one["rank"], one["goes_on"]) for one in status["failures"]] == [
        (0, 1, True),
        (1, 1, False),
    ]
    assert done.out.count("starting again from update 4 (restart 1 of 1)") == 1
    assert "training.max_restarts=1 is used up" in done.out
    assert [line["update"] for line in done.metrics()] == [1, 2, 3, 4]
    assert not (done.run / "model.safetensors").exists()
