"""Runs that a test watches while they run: their processes, and what is left of them at the end."""

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from paced import expected
from runs import Done, argv, environment

TOKEN = "LEFTOVERS_TOKEN"
STARTED_WITHIN = 180.0
GONE_WITHIN = 30.0

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
    """A command of a run, and all that carries its token."""

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

    @property
    def agent(self) -> int:
        """The process of its agent."""
        (agent,) = self.ids("launcher.train.agent")
        return agent

    def rank(self, number: int) -> int:
        """The process of a rank."""
        children = Path(f"/proc/{self.agent}/task/{self.agent}/children").read_text().split()
        (found,) = [int(one) for one in children if f"RANK={number}" in variables(int(one))]
        return found

    def records(self, kind: str = "train") -> list[dict[str, Any]]:
        """What it has written into its metrics by now."""
        try:
            text = (self.run / "metrics.jsonl").read_text()
        except FileNotFoundError:
            return []
        found = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
        return [one for one in found if one["kind"] == kind]

    def status(self) -> dict[str, Any]:
        """What its status says."""
        loaded: dict[str, Any] = json.loads((self.run / "status.json").read_text())
        return loaded

    def state(self) -> str:
        """The state in it."""
        return str(self.status()["state"])

    def wait_for_update(self, update: int) -> None:
        """Until its metrics hold that."""
        self._wait(lambda: bool(self.records()) and self.records()[-1]["update"] >= update)

    def wait_for_checkpoint(self, update: int) -> None:
        """Until that of `update` is there, whole; its line in the metrics comes earlier."""
        self._wait((self.run / "checkpoints" / f"update_{update:010d}").exists)

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
        self._wait(came)

    def _wait(self, came: Callable[[], bool]) -> None:
        assert within(STARTED_WITHIN, lambda: came() or self.launcher.poll() is not None), self.processes()
        assert self.launcher.poll() is None, self.launcher.communicate()

    def ended(self, seconds: float = GONE_WITHIN) -> Done:
        """The command, once it has ended."""
        out, err = self.launcher.communicate(timeout=seconds)
        return Done(self.launcher.returncode, out, err, self.run)


@contextmanager
def watched(folder: Path, overrides: Sequence[str], **env: str) -> Iterator[Running]:
    """A run in folder/run. At the end nothing of it may be left but its folder."""
    shared, temporary, token = orphaned_memory(), Path(tempfile.mkdtemp(prefix="watched-")), uuid.uuid4().hex
    folders = f"{Path(__file__).parent}:{environment()['PYTHONPATH']}"
    launcher = subprocess.Popen(
        argv("train", *overrides, f"hydra.run.dir={folder / 'run'}"),
        cwd=folder,
        env=environment(PYTHONPATH=folders, TMPDIR=str(temporary), **{TOKEN: token}, **env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    running = Running(launcher, token, folder, temporary)
    gone = False
    try:
        yield running
        gone = within(GONE_WITHIN, lambda: not running.processes())
    finally:
        left = running.processes()
        for number in left:
            with suppress(ProcessLookupError):
                os.kill(number, KILL)
        launcher.communicate()
    assert gone, left
    assert [one.name for one in temporary.iterdir() if not one.name.startswith("torchinductor_")] == []  # a cache
    shutil.rmtree(temporary)
    assert within(GONE_WITHIN, lambda: orphaned_memory() <= shared), (
        "what a test beside this one leaves is on its way out"
    )


def assert_finished(folder: Path, samples: int) -> None:
    """That the run of `paced(samples)` in folder/run has come to its end, with every update and the right weight."""
    done = Done(0, "", "", folder / "run")
    assert done.json("status.json")["state"] == "finished"
    assert done.weights()["w"] == [pytest.approx(expected(samples), rel=1e-6)]
    assert sorted({line["update"] for line in done.metrics()}) == list(range(1, samples // 2 + 1))


def orphaned_memory() -> set[str]:
    """Shared memory of torch (``torch_PID_…``) whose process has ended; that of others on the machine is theirs."""
    named = {name: name.split("_") for name in os.listdir("/dev/shm")}
    return {
        name
        for name, parts in named.items()
        if parts[0] == "torch" and parts[1:2] and not Path("/proc", parts[1]).exists()
    }
