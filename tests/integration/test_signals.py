"""H10: what a run leaves when it, or a part of it, is told to end or killed. Nothing may stay but the run's folder."""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from runs import Done, argv, environment, launch, mean

pytestmark = pytest.mark.slow

TOKEN = "LEFTOVERS_TOKEN"
STARTED_WITHIN = 90.0
GONE_WITHIN = 15.0

INT, TERM, KILL = signal.SIGINT, signal.SIGTERM, signal.SIGKILL


def within(seconds: float, holds: Callable[[], Any]) -> bool:
    """Whether `holds` comes true in that time."""
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def variables(process: int) -> list[str]:
    """The environment that a process was started with, as NAME=VALUE."""
    return Path(f"/proc/{process}/environ").read_bytes().decode().split("\0")


def parent(process: int) -> int:
    """Who has started a process."""
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


@dataclass
class Running:
    """A command of a run with 2 ranks of 2 loader workers each, and all that carries its token."""

    launcher: "subprocess.Popen[str]"
    token: str
    folder: Path
    temporary: Path

    @property
    def run(self) -> Path:
        return self.folder / "run"

    def processes(self) -> dict[int, str]:
        """The command lines of the living processes that carry the token, by id."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if self.token.encode() in (entry / "environ").read_bytes():
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:  # it has ended, or isn't ours
                continue
        return found

    def ids(self, part: str) -> list[int]:
        """The processes whose command line names `part`: a rank comes before its loader workers."""
        return sorted(number for number, line in self.processes().items() if part in line)

    def loader_workers(self, rank: int) -> list[int]:
        """Those of `rank`, the oldest first."""
        found = self.ids("launcher.train.worker")
        agents = self.ids("launcher.train.agent")
        workers = [number for number in found if parent(number) not in agents]
        return [number for number in workers if f"RANK={rank}" in variables(number)]

    def ports(self) -> set[int]:
        """Where the ranks meet."""
        found = set()
        for number in self.ids("launcher.train.worker"):
            found |= {int(one.partition("=")[2]) for one in variables(number) if one.startswith("MASTER_PORT=")}
        return found

    def wait_for(self, moment: str) -> None:
        """Until the run has come to `moment`."""
        came = {
            "early": lambda: bool(self.processes()),
            "submitted": lambda: (self.run / "status.json").exists() and bool(self.ids("launcher.train.agent")),
            "joining": lambda: len(self.ids("launcher.train.worker")) >= 2,
        }.get(moment, (self.folder / "marks" / moment).exists)
        assert within(STARTED_WITHIN, lambda: came() or self.launcher.poll() is not None), self.processes()
        assert self.launcher.poll() is None, self.launcher.communicate()

    def ended(self) -> Done:
        """The command, once it has ended."""
        out, err = self.launcher.communicate(timeout=GONE_WITHIN)
        return Done(self.launcher.returncode, out, err, self.run)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Running]]:
    """Starts a run that stays at a moment. At the end nothing of it may be left but its folder."""
    started: list[Running] = []
    shared = orphaned_memory()
    temporary = Path(tempfile.mkdtemp(prefix="signals-"))

    def begin(stays_at: str) -> Running:
        (tmp_path / "marks").mkdir()
        folders = f"{Path(__file__).parent}:{environment()['PYTHONPATH']}"
        token = uuid.uuid4().hex
        marks = {"MOMENTS_MARKS": str(tmp_path / "marks"), "MOMENTS_STOP": stays_at}
        launcher = subprocess.Popen(
            argv("train", *overrides(), f"hydra.run.dir={tmp_path / 'run'}"),
            cwd=tmp_path,
            env=environment(PYTHONPATH=folders, TMPDIR=str(temporary), **{TOKEN: token}, **marks),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(Running(launcher, token, tmp_path, temporary))
        return started[-1]

    yield begin
    (running,) = started
    gone = within(GONE_WITHIN, lambda: not running.processes())
    left = running.processes()
    for number in left:
        os.kill(number, KILL)
    running.launcher.communicate()
    assert gone, left
    assert [one.name for one in temporary.iterdir() if not one.name.startswith("torchinductor_")] == []  # a cache
    shutil.rmtree(temporary)
    assert orphaned_memory() <= shared
    assert not (running.run / "model.safetensors").exists()


def orphaned_memory() -> set[str]:
    """Shared memory of torch (``torch_PID_…``) whose process has ended; that of others on the machine is theirs."""
    named = {name: name.split("_") for name in os.listdir("/dev/shm")}
    return {
        name
        for name, parts in named.items()
        if parts[0] == "torch" and parts[1:2] and not Path("/proc", parts[1]).exists()
    }


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
        ("save", INT),
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
    assert done.code == 128 + number, done.out + done.err
    assert "Traceback" not in done.out + done.err
    if moment == "plan":  # before there is a run
        assert not running.run.exists()
        return
    status = done.json("status.json")
    assert (status["state"], status["exit_code"]) == ("cancelled", 128 + number)
    assert within(GONE_WITHIN, lambda: not running.processes())
    assert_free(ports)


@pytest.mark.parametrize("moment", ["plan", "submitted", "build", "train", "save"])
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
    assert "cancelled" in said.out or "no sign of life" in said.out, said


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
