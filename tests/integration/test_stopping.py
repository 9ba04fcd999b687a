"""A run that is told to stop, whoever is told: all ranks end after the same window, and it can go on from there."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from paced import paced
from runs import Done
from watched import INT, STARTED_WITHIN, TERM, Running, watched, within

pytestmark = pytest.mark.slow

USR1 = signal.SIGUSR1
LONG = 400  # samples; nobody waits for the last


def checkpoints(done: Done) -> list[int]:
    """The updates of the checkpoints that are there."""
    return sorted(int(one.name.removeprefix("update_")) for one in (done.run / "checkpoints").glob("update_*"))


def assert_stopped(done: Done) -> int:
    """That it stopped well, with a checkpoint after the last update of its metrics, which is returned."""
    assert done.code == 75, done.out + done.err
    status = done.json("status.json")
    assert (status["state"], status["exit_code"], status["error"]) == ("stopped", 75, None)
    assert "Traceback" not in done.out + done.err
    assert not (done.run / "model.safetensors").exists()
    last: int = max((line["update"] for line in done.metrics()), default=0)
    assert checkpoints(done)[-1] == status["update"] == last
    return last


def to_launcher(running: Running) -> None:
    running.launcher.send_signal(INT)


def to_agent(running: Running) -> None:
    os.kill(running.agent, TERM)


def to_rank(running: Running) -> None:
    os.kill(running.rank(1), USR1)


def to_everybody(running: Running) -> None:
    """As a scheduler does."""
    for process in running.processes():
        os.kill(process, TERM)


@pytest.mark.parametrize("tell", [to_launcher, to_agent, to_rank, to_everybody])
def test_whoever_is_told_all_stop_after_the_same_window(tmp_path: Path, tell: Callable[[Running], Any]) -> None:
    more = ["data.workers=1"] if tell is to_everybody else []
    with watched(tmp_path, paced(LONG, *more)) as running:
        running.wait_for_update(2)
        tell(running)
        done = running.ended()
    assert 2 <= assert_stopped(done) < LONG // 2
    assert done.out.count("finishing the window and saving, at most 60 s; Ctrl-C again ends at once") == 1


def test_ranks_that_are_still_starting_stop_before_the_first_window(tmp_path: Path) -> None:
    with watched(tmp_path, paced(LONG, "training.duration=1 epochs")) as running:
        running.wait_for("joining")
        os.kill(running.rank(0), TERM)
        done = running.ended()
    assert assert_stopped(done) == 0


def test_a_run_stops_at_its_time_limit(tmp_path: Path) -> None:
    with watched(tmp_path, paced(LONG, "training.time_limit=1")) as running:  # before the ranks have begun
        done = running.ended(180)
    assert assert_stopped(done) == 0
    assert "stopping (training.time_limit)" in done.out


@pytest.mark.parametrize("twice", [False, True])
def test_a_window_that_takes_too_long_is_given_up(tmp_path: Path, twice: bool) -> None:
    """`twice`: at a second Ctrl-C, otherwise after checkpoint.stop_within."""
    seconds = 600 if twice else 2
    data = ["+data.train.at=9", "+data.train.how=hang", "checkpoint.every=2", "checkpoint.async_save=false"]
    with watched(tmp_path, paced(LONG, *data, f"checkpoint.stop_within={seconds}")) as running:
        running.wait_for_checkpoint(4)
        running.launcher.send_signal(INT)
        if twice:
            assert within(STARTED_WITHIN, lambda: running.state() == "stopping")
            running.launcher.send_signal(INT)
        done = running.ended()
    assert done.code == (130 if twice else 75), done.out + done.err
    status = done.json("status.json")
    assert (status["state"], status["exit_code"]) == ("stopped", done.code)
    assert checkpoints(done) == [2, 4]
    said = "took longer than checkpoint.stop_within=2 s; the run will go on from update 4"
    assert (said in done.out) is not twice


def test_a_rank_that_dies_of_the_signal_has_stopped_too(tmp_path: Path) -> None:
    data = ["+data.train.at=9", "+data.train.how=term", "checkpoint.every=2", "checkpoint.async_save=false"]
    with watched(tmp_path, paced(LONG, *data)) as running:
        done = running.ended(180)
    assert done.code == 75, done.out + done.err
    assert done.json("status.json")["state"] == "stopped"
    assert checkpoints(done) == [2, 4]
