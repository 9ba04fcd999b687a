"""Runs with targets: one that reaches its loss ends there, one whose device-hours are used up stops and goes on."""

import json
from pathlib import Path

import pytest
from paced import expected
from runs import launch, mean

pytestmark = pytest.mark.slow

RANKS = ("cluster.ranks_per_node=2", "batch.global_batch_size=4", "optimizer.lr=0.5")


def test_a_run_ends_finished_where_it_reaches_its_loss(tmp_path: Path) -> None:
    """Each update halves the way to 4, from 0: losses 8/4, 8/16, 8/64 and 8/256, of which the last is below a tenth."""
    reach = ["+data.validation={_target_: scalar.Targets, targets: [4, 4]}", "training.validate_every=1"]
    reach += ["targets.validation_loss=0.1", "targets.stop_when_reached=true", "targets.samples_per_s=1"]
    done = launch(tmp_path, "train", *mean([4] * 80, *RANKS, *reach))
    assert done.code == 0, done.out + done.err
    assert done.weights() == {"w": [3.75]}
    said = "reached its target at update 4: validation loss 0.03125 (target: validation loss at most 0.1)"
    assert said in " ".join(done.out.split())
    result, status = done.json("result.json"), done.json("status.json")
    assert (result["update"], result["validation_loss"], result["reached"]["update"]) == (4, 0.03125, 4)
    assert (status["state"], status["update"], status["reached"]["update"]) == ("finished", 4, 4)
    assert [line["update"] for line in done.metrics()] == [1, 2, 3, 4]
    assert ["reached" in line["text"] for line in done.metrics("note")] == [True]
    assert sorted((done.run / "checkpoints").glob("update_*"))[-1].name == "update_0000000004"
    assert "validation loss at most 0.1, which ends the run" in " ".join(done.out.split())
    shown = launch(tmp_path, "status", "run", COLUMNS="100")
    assert said in " ".join(shown.out.split())
    again = launch(tmp_path, "resume", "run")
    assert (again.code, "nothing is left to do" in again.out) == (0, True)


def test_a_run_stops_when_its_device_hours_are_used_up_and_goes_on_with_more(tmp_path: Path) -> None:
    windows = [*RANKS[:1], "batch.global_batch_size=2", "optimizer.lr=0.5"]
    spent = "targets.device_hours=0.0001"  # before its ranks have begun
    done = launch(tmp_path, "train", *mean(list(range(8)), *windows, spent))
    assert done.code == 75, done.out + done.err
    status = done.json("status.json")
    assert (status["state"], status["stop"]["why"]) == ("stopped", "targets.device_hours")
    assert status["error"]["reason"] == "targets.device_hours=0.0001 is used up; with more the run goes on"
    assert (done.run / "checkpoints" / "update_0000000000").is_dir()
    used = done.json("usage.json")["device_seconds"]
    assert used > 0.36
    refused = launch(tmp_path, "resume", "run")
    assert refused.code == 2
    assert "targets.device_hours=0.0001: is used up: the run has had" in refused.err
    went_on = launch(tmp_path, "resume", "run", "targets.device_hours=100")
    assert went_on.code == 0, went_on.out + went_on.err
    assert went_on.weights() == {"w": [expected(8)]}
    assert json.loads((done.run / "usage.json").read_text())["device_seconds"] > used
