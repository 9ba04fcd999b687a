"""Ranks that hang: found, shown where they are, and started again or ended."""

import re
from pathlib import Path

import pytest
from paced import expected, paced
from watched import watched

pytestmark = pytest.mark.slow

SAMPLES = 16
AFTER = 10  # seconds; a busy machine lets nobody run for shorter


def test_a_rank_that_hangs_is_named_and_started_again(tmp_path: Path) -> None:
    data = ["+data.train.at=9", "+data.train.how=hang", f"+data.train.once={tmp_path / 'once'}"]
    saved = ["checkpoint.every=2", "checkpoint.async_save=false"]
    with watched(tmp_path, paced(SAMPLES, *saved, *data, f"training.hang_after={AFTER}")) as running:
        done = running.ended(240)
    assert done.code == 0, done.out + done.err
    assert done.weights()["w"] == [pytest.approx(expected(SAMPLES), rel=1e-6)]
    assert re.search(r"rank 1 hung: nothing for \d+ s at update 5: starting again from update 4", done.out), done.out
    (failure,) = done.json("status.json")["failures"]
    assert re.fullmatch(r"hung: nothing for \d+ s at update 5; stacks in logs/rank_1.log", failure["reason"])
    waits, hangs = ((done.run / "logs" / f"rank_{rank}.log").read_text() for rank in (0, 1))
    assert "paced.py" in hangs
    assert "_do" in hangs
    assert "all_reduce" in waits
    assert "_do" not in waits


def test_a_loader_worker_that_hangs_is_shown_and_ends_the_run(tmp_path: Path) -> None:
    data = ["+data.train.at=9", "+data.train.how=hang", "data.workers=1", "batch.layout=arrival"]
    limits = [f"training.hang_after={AFTER}", "training.max_restarts=0"]
    with watched(tmp_path, paced(SAMPLES, *data, *limits)) as running:
        done = running.ended(180)
    assert done.code == 3, done.out + done.err
    assert re.search(r"rank 1: hung: nothing for \d+ s at update", done.out), done.out
    assert done.json("status.json")["state"] == "failed"
    log = (done.run / "logs" / "rank_1.log").read_text()
    assert "paced.py" in log[log.index("loader worker (process") :]
