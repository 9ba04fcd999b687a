"""What the commands say of runs in containers, without an engine."""

import json
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.thorough

CPU = ("submit=docker", "cluster.device=cpu", "cluster.ranks_per_node=1")
Command = Callable[..., Any]


@pytest.fixture(autouse=True)
def no_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A docker command that must not be asked."""
    (tmp_path / "docker").write_text('#!/bin/sh\necho "$*" >> "$0.asked"\nexit 1\n')
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


def test_a_plan_prints_the_commands_and_asks_nobody(command: Command, tmp_path: Path) -> None:
    said = command("plan", *CPU, "cluster.nodes=2", "hydra.run.dir=run")
    assert said.code == 0, said.err
    lines = [shlex.split(line) for line in said.out.splitlines() if line.startswith("docker ")]
    as_json = command("plan", "--json", *CPU, "cluster.nodes=2", "hydra.run.dir=run")
    assert lines == json.loads(as_json.out)["launch"]["docker"]
    assert [line[1] for line in lines] == ["network", "run", "run"]
    assert not (tmp_path / "docker.asked").exists()
    assert not (tmp_path / "run").exists()


def test_a_folder_is_made_for_other_hands_to_start(command: Command, tmp_path: Path) -> None:
    said = command("train", *CPU, "submit.docker.start=false", "hydra.run.dir=run")
    assert said.code == 0, said.err
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "planned"
    planned = json.loads((tmp_path / "run" / "plan.json").read_text())["launch"]["docker"]
    assert [shlex.split(line) for line in said.out.splitlines() if line.startswith("docker ")] == planned
    assert not (tmp_path / "docker.asked").exists()


def test_a_sweep_says_once_how_many_run_at_a_time(command: Command) -> None:
    assert command("plan", "-m", *CPU, "run.seed=1,2", "submit.docker.parallelism=2").code == 0
    many = command("plan", "-m", *CPU, "submit.docker.parallelism=1,2")
    assert (many.code, "submit.docker.parallelism=2: all runs of a sweep" in many.err) == (2, True)
    mixed = command("plan", "-m", "cluster.device=cpu", "submit=docker,local", "submit.docker.parallelism=2")
    assert (mixed.code, "submit.docker.parallelism=2: has no effect: submit is local" in mixed.err) == (2, True)
    by_hand = command("plan", "-m", *CPU, "run.seed=1,2", "submit.docker.start=false")
    assert (by_hand.code, "submit.docker.start=false: a sweep starts its runs" in by_hand.err) == (2, True)


def test_a_run_without_an_engine_is_refused(command: Command, tmp_path: Path) -> None:
    said = command("train", *CPU, "hydra.run.dir=run")
    assert said.code == 2
    assert "submit=docker: the engine doesn't answer" in said.err
    assert (tmp_path / "docker.asked").read_text().startswith("version")


def test_verify_runs_here(command: Command) -> None:
    said = command("verify", *CPU)
    assert (said.code, "submit=docker: verify runs on this machine" in said.err) == (2, True)


def test_one_run_does_not_divide_the_machine(command: Command, tmp_path: Path) -> None:
    for name in ("train", "plan"):
        said = command(name, *CPU, "submit.docker.parallelism=2", "hydra.run.dir=run")
        assert (said.code, "submit.docker.parallelism=2: says how many runs of a sweep" in said.err) == (2, True)
    assert not (tmp_path / "run").exists()
