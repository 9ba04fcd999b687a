"""H10: what a run leaves when it, or a part of it, is told to end or killed. Nothing may stay but the run's folder."""

import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from runs import launch, mean
from watched import GONE_WITHIN, INT, KILL, TERM, Running, watched, within

pytestmark = pytest.mark.slow


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Running]]:
    """Starts a run that stays at a moment. At the end nothing of it may be left but its folder."""
    with ExitStack() as stack:

        def begin(stays_at: str) -> Running:
            (tmp_path / "marks").mkdir()
            marks = {"MOMENTS_MARKS": str(tmp_path / "marks"), "MOMENTS_STOP": stays_at}
            return stack.enter_context(watched(tmp_path, overrides(), **marks))

        yield begin
    assert not (tmp_path / "run" / "model.safetensors").exists()


def overrides() -> list[str]:
    """A run of 8 updates whose moments are those of `moments`."""
    base = [one for one in mean(list(range(16))) if "_target_" not in one or "task" in one]
    return [
        *base,
        "model._target_=moments.Model",
        "data.train._target_=moments.Data",
        "+data.train.at=8",
        "+data.train.moment=train",
        "data.validation={_target_: moments.Data, targets: [1,2,3,4], at: 3, moment: validate}",
        "data.workers=2",
        "cluster.ranks_per_node=2",
        "batch.global_batch_size=2",
        "checkpoint.stop_within=1",  # it stays where it is
        "training.max_restarts=0",
    ]


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("early", TERM),
        ("plan", INT),
        ("submitted", INT),
        ("submitted", TERM),
        ("joining", TERM),
        ("build", INT),
        ("train", INT),
        ("train", TERM),
        ("validate", TERM),
        ("final", INT),
    ],
)
def test_h10_a_signal_to_the_launcher_ends_all(start: Callable[[str], Running], moment: str, number: int) -> None:
    running = start(moment)
    running.wait_for(moment)
    ports = running.ports()
    running.launcher.send_signal(number)
    done = running.ended()
    if moment == "early":  # Python itself may not have been ready for it
        assert done.code in (128 + number, -number)
        return
    # the last checkpoint is there before the trained model is written
    state, code = ("stopped", 75) if moment == "final" else ("cancelled", 128 + number)
    assert done.code == code, done.out + done.err
    assert "Traceback" not in done.out + done.err
    if moment == "plan":  # before there is a run
        assert not running.run.exists()
        return
    status = done.json("status.json")
    assert (status["state"], status["exit_code"]) == (state, code)
    assert within(GONE_WITHIN, lambda: not running.processes())
    assert_free(ports)


@pytest.mark.parametrize("moment", ["plan", "submitted", "build", "train", "final"])
def test_h10_a_killed_launcher_takes_all_with_it(start: Callable[[str], Running], moment: str) -> None:
    running = start(moment)
    running.wait_for(moment)
    ports = running.ports()
    running.launcher.kill()
    running.ended()
    assert within(GONE_WITHIN, lambda: not running.processes()), running.processes()
    assert_free(ports)
    if moment == "plan":
        assert not running.run.exists()
        return
    said = launch(running.folder, "status", "run")
    expected = ["stopped"] if moment == "final" else ["cancelled", "no sign of life"]
    assert any(one in said.out for one in expected), said


def test_ctrl_c_in_a_terminal_reaches_the_whole_group(start: Callable[[str], Running]) -> None:
    running = start("train")
    running.wait_for("train")
    os.killpg(running.launcher.pid, INT)
    done = running.ended()
    assert done.code == 130
    assert "Traceback" not in done.out + done.err
    assert done.json("status.json")["state"] == "cancelled"


def test_a_second_ctrl_c_ends_at_once(start: Callable[[str], Running]) -> None:
    running = start("train")
    running.wait_for("train")
    (agent,) = running.ids("launcher.train.agent")
    os.kill(agent, signal.SIGSTOP)  # it doesn't answer the first one
    running.launcher.send_signal(INT)
    running.launcher.send_signal(TERM)
    done = running.ended()
    assert done.code == 130
    assert done.json("status.json")["state"] == "cancelled"


def test_a_killed_agent_takes_its_ranks_with_it_and_is_named(start: Callable[[str], Running]) -> None:
    running = start("train")
    running.wait_for("train")
    (agent,) = running.ids("launcher.train.agent")
    os.kill(agent, KILL)
    done = running.ended()
    assert done.code == 137
    assert "the agent ended with 137" in done.out
    status = done.json("status.json")
    assert (status["state"], status["exit_code"]) == ("failed", 137)


def test_both_killed_leave_a_status_that_shows_it(start: Callable[[str], Running]) -> None:
    running = start("train")
    running.wait_for("train")
    (agent,) = running.ids("launcher.train.agent")
    running.launcher.send_signal(signal.SIGSTOP)  # it can't tidy up behind its agent
    os.kill(agent, KILL)
    running.launcher.kill()
    running.ended()
    assert within(GONE_WITHIN, lambda: not running.processes()), running.processes()
    assert "no sign of life" in launch(running.folder, "status", "run").out
    assert [one for one in running.temporary.glob("launcher-*") if one.is_dir()]  # nobody was there to remove it
    again = launch(running.folder, "train", *mean([1]), "hydra.run.dir=again", TMPDIR=str(running.temporary))
    assert again.code == 0, again.out + again.err


def test_a_killed_rank_ends_the_run(start: Callable[[str], Running]) -> None:
    running = start("train")
    running.wait_for("train")
    os.kill(running.ids("launcher.train.worker")[0], KILL)
    done = running.ended()
    assert done.code == 3
    assert "SIGKILL" in done.out
    assert done.json("status.json")["state"] == "failed"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_loader_worker_ends_the_run(start: Callable[[str], Running], rank: int) -> None:
    running = start("train")  # a loader worker of rank 0 never ends: rank 0 waits for it, and rank 1 for rank 0
    running.wait_for("train")
    os.kill(running.loader_workers(rank)[-1], KILL)
    done = running.ended()
    assert done.code == 3
    assert "killed by signal: Killed" in done.out
    assert f"rank {rank}" in done.out
    assert done.json("status.json")["state"] == "failed"


def assert_free(ports: set[int]) -> None:
    """That something else can listen there."""
    for port in ports:
        with socket.socket() as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(("localhost", port))
            one.listen()
