"""Runs of two nodes, each with an agent of its own: a lost node, and what they tell each other."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from paced import expected, paced, waits
from watched import KILL, TERM, Running, watched, within

pytestmark = pytest.mark.slow

SAMPLES, LONG = 24, 400
"""Of a run that is to end, and of one that is stopped long before."""
LAST_OF_WINDOW_7 = 13
"""A sample that the rank of the second node reads, and the first one waits for."""
NODES = ("cluster.nodes=2", "cluster.ranks_per_node=1", "checkpoint.every=2", "checkpoint.async_save=false")


def second(running: Running) -> int:
    """The agent of the second node."""
    (agent,) = running.ids("--node 1")
    return agent


def rank_of(agent: int) -> int:
    """The process of the one rank of a node."""
    (rank,) = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
    return int(rank)


def failures(running: Running) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = running.status().get("failures") or []
    return found


def test_a_run_goes_on_with_the_node_that_is_left(tmp_path: Path) -> None:
    # steps that only fit two ranks: the windows stay, and steps are worked out again
    batch = ["batch.global_batch_size=null", "batch.micro_batch_size=1", "batch.gradient_accumulation_steps=1"]
    least = ["cluster.min_nodes=1", "cluster.wait_for_nodes=2 seconds", "batch.layout=arrival"]
    waiting = waits(LAST_OF_WINDOW_7, tmp_path / "go")
    with watched(tmp_path, paced(SAMPLES, *NODES, *batch, *least, *waiting)) as running:
        running.wait_for_update(5)
        before = json.loads((running.run / "plan.json").read_text())
        os.kill(second(running), KILL)
        (tmp_path / "go").touch()
        done = running.ended(180)
    assert done.code == 0, done.out + done.err
    assert done.weights()["w"] == [pytest.approx(expected(SAMPLES), rel=1e-6)]
    (failure,) = done.json("status.json")["failures"]
    assert (failure["goes_on"], failure["from_update"] % 2) == (True, 0)
    assert failure["update"] > failure["from_update"]
    assert failure["reason"].startswith("was lost with its node on ")
    plan = done.json("plan.json")
    solved = ("nodes", "world_size", "data_parallel_degree", "micro_batch_size", "gradient_accumulation_steps")
    assert [before[name] for name in solved] == [2, 2, 2, 1, 1]
    assert [plan[name] for name in solved] == [1, 1, 1, 1, 2]
    same = ("global_batch_size", "num_updates", "lr", "lr_table", "launch", "cwd")
    assert [plan[name] for name in same] == [before[name] for name in same]
    metrics = done.metrics()
    assert [line["samples"] for line in metrics] == [2] * len(metrics)
    assert [line["update"] for line in metrics if line["attempt"] == 1] == list(
        range(failure["from_update"] + 1, SAMPLES // 2 + 1)
    )


def test_a_lost_node_ends_a_run_that_needs_it(tmp_path: Path) -> None:
    with watched(tmp_path, paced(SAMPLES, *NODES, *waits(LAST_OF_WINDOW_7, tmp_path / "go"))) as running:
        running.wait_for_update(3)
        os.kill(second(running), KILL)
        done = running.ended(120)
    assert done.code == 3, done.out + done.err
    assert "was lost with its node on " in done.out
    assert "1 node is left, and cluster.min_nodes is 2" in done.out
    assert "launcher resume run" in done.out


def test_a_rank_lost_on_either_node_starts_all_again_and_is_named(tmp_path: Path) -> None:
    saves = "checkpoint.every=4"  # and so it repeats the fifth update before it waits again
    with watched(tmp_path, paced(SAMPLES, *NODES, saves, *waits(LAST_OF_WINDOW_7, tmp_path / "go"))) as running:
        running.wait_for_update(5)
        os.kill(rank_of(second(running)), KILL)
        assert within(60, lambda: len(failures(running)) == 1)
        assert within(60, lambda: any(one["attempt"] == 1 for one in running.records()))
        (first,) = set(running.ids("launcher.train.agent")) - {second(running)}
        os.kill(rank_of(first), KILL)
        (tmp_path / "go").touch()
        done = running.ended(180)
    assert done.code == 0, done.out + done.err
    assert done.weights()["w"] == [pytest.approx(expected(SAMPLES), rel=1e-6)]
    found = done.json("status.json")["failures"]
    assert [one["reason"].partition(" (")[0] for one in found] == ["killed by SIGKILL"] * 2
    assert sorted(one["rank"] for one in found) == [0, 1]
    assert [one["restart"] for one in found] == [1, 2]


def test_a_stop_that_one_node_hears_stops_all(tmp_path: Path) -> None:
    with watched(tmp_path, paced(LONG, *NODES)) as running:
        running.wait_for_update(3)
        os.kill(second(running), TERM)
        done = running.ended(60)
        assert done.code == 75, done.out + done.err
        assert done.json("status.json")["state"] == "stopped"
        saved = sorted(path.name for path in (done.run / "checkpoints").iterdir())
        assert done.metrics()[-1]["update"] in {int(name.rpartition("_")[2].rpartition("-")[2]) for name in saved}


def test_a_run_that_is_stopped_before_a_lost_node_is_missed_does_not_start_again(tmp_path: Path) -> None:
    waiting = waits(LAST_OF_WINDOW_7, tmp_path / "go")
    with watched(tmp_path, paced(SAMPLES, *NODES, "cluster.min_nodes=1", *waiting)) as running:
        running.wait_for_update(3)
        os.kill(second(running), KILL)
        assert within(60, lambda: not running.ids("launcher.train.worker"))  # its own ones have ended by now
        running.launcher.send_signal(TERM)
        done = running.ended(60)
    assert done.code == 75, done.out + done.err
    assert "starting again" not in done.out
    (failure,) = done.json("status.json")["failures"]
    assert failure["goes_on"] is False
    assert "was lost with its node on" in done.json("status.json")["error"]["reason"]


def test_a_rank_that_hangs_is_named_by_its_node(tmp_path: Path) -> None:
    hang = ["+data.train.at=9", "+data.train.how=hang", "training.hang_after=10 seconds", "training.max_restarts=0"]
    with watched(tmp_path, paced(SAMPLES, *NODES, *hang, "data.workers=0")) as running:
        done = running.ended(120)
    assert done.code == 3, done.out + done.err
    status = done.json("status.json")
    assert status["error"]["reason"].startswith("hung: nothing for ")
    rank = status["error"]["rank"]
    stuck = (done.run / "logs" / f"rank_{rank}.log").read_text()
    assert "paced.py" in stuck
    assert "paced.py" not in (done.run / "logs" / f"rank_{1 - rank}.log").read_text().partition("stacks of this")[2]


def test_a_lost_first_node_ends_the_run(tmp_path: Path) -> None:
    with watched(tmp_path, paced(LONG, *NODES, "cluster.min_nodes=1")) as running:
        running.wait_for_update(3)
        (first,) = set(running.ids("launcher.train.agent")) - {second(running)}
        os.kill(first, KILL)
        done = running.ended(60)
    assert done.code == 137, done.out + done.err
    assert "the agent ended with 137" in done.out
    assert "launcher resume run" in done.out


def test_a_wish_to_stop_ends_nodes_that_wait_for_others(tmp_path: Path) -> None:
    with watched(tmp_path, paced(SAMPLES, *NODES)) as running:
        assert within(60, lambda: bool(running.ids("--node 1")))
        lost = second(running)
        os.kill(lost, KILL)  # before it can meet the first
        (first,) = set(running.ids("launcher.train.agent")) - {lost}
        assert within(60, lambda: "libtorch_cpu" in Path(f"/proc/{first}/maps").read_text())
        time.sleep(3)  # it has met itself, and waits
        running.launcher.send_signal(TERM)
        done = running.ended(60)
    assert done.code == 143, done.out + done.err
    assert done.json("status.json")["state"] == "cancelled"
