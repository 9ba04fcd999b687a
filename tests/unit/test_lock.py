"""The lock of a run's folder, between real processes."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from launcher.errors import LauncherError
from launcher.lock import Locked, Owner, holding, is_held, path_of
from launcher.run_dir import RunDir, State

HOLD = """
import sys
from pathlib import Path
from launcher.errors import LauncherError
from launcher.lock import holding
from launcher.run_dir import RunDir

run, gate = RunDir(Path(sys.argv[1])), Path(sys.argv[2])
print("ready", flush=True)
while not gate.exists():
    pass
try:
    with holding(run):
        print("held", flush=True)
        sys.stdin.readline()
except LauncherError as error:
    print("refused", str(error).replace("\\n", " "), flush=True)
"""


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    (tmp_path / "run").mkdir()
    return RunDir(tmp_path / "run")


class Holder:
    """A process that takes the lock once the gate opens, and holds it until it is told to let go."""

    def __init__(self, run: RunDir, gate: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(run.path), str(gate)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.said() == "ready"

    def said(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        if self.process.poll() is None and self.process.stdin is not None:
            self.process.communicate("\n", timeout=30)


@pytest.fixture
def start(run: RunDir, tmp_path: Path) -> Iterator[Callable[[], Holder]]:
    started: list[Holder] = []

    def begin() -> Holder:
        started.append(Holder(run, tmp_path / "gate"))
        return started[-1]

    yield begin
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
        one.process.communicate()


def written(run: RunDir, **changes: Any) -> Owner:
    """A lock of a process that isn't this one."""
    owner = replace(Owner.this_process(), **changes)
    path_of(run).write_text(json.dumps(asdict(owner)))
    return owner


def files(run: RunDir) -> list[str]:
    return sorted(os.listdir(run.path))


def test_a_run_is_held_by_one_process_at_a_time(run: RunDir, start: Callable[[], Holder], tmp_path: Path) -> None:
    first = start()
    (tmp_path / "gate").touch()
    assert first.said() == "held"
    with pytest.raises(Locked) as refused, holding(run):
        pass
    said = str(refused.value)
    for part in (str(run.path), f"process {first.process.pid} on ", f"kill {first.process.pid}", time.strftime("%Y-")):
        assert part in said
    with pytest.raises(Locked), holding(run, force=True):  # it lives: nothing takes it away
        pass
    first.end()
    with holding(run):
        assert files(run) == ["lock.json"]
        assert json.loads(path_of(run).read_text())["pid"] == os.getpid()
        with holding(run):  # its own
            pass
        assert files(run) == ["lock.json"]
    assert files(run) == []


def test_the_lock_of_a_killed_process_is_taken_over(run: RunDir, start: Callable[[], Holder], tmp_path: Path) -> None:
    first = start()
    (tmp_path / "gate").touch()
    assert first.said() == "held"
    os.kill(first.process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, first.process.pid, os.WEXITED | os.WNOWAIT)  # a zombie from here on
    with holding(run):
        assert json.loads(path_of(run).read_text())["pid"] == os.getpid()
    assert files(run) == []


@pytest.mark.parametrize("changes", [{"pid": 2**22 + 1}, {"started": 1}, {"boot": "before"}])
def test_what_is_left_behind_is_taken_over(run: RunDir, changes: dict[str, Any]) -> None:
    written(run, **{"pid": os.getppid(), "namespace": "another", **changes} if "boot" in changes else changes)
    with holding(run):
        assert json.loads(path_of(run).read_text())["pid"] == os.getpid()
    assert files(run) == []


RACE = """
import sys
import time
from pathlib import Path
from launcher.errors import LauncherError
from launcher.lock import holding
from launcher.run_dir import RunDir

for folder in map(Path, sys.argv[1:]):
    print("ready", flush=True)
    sys.stdin.readline()
    while not (folder / "gate").exists():
        time.sleep(0)
    try:
        with holding(RunDir(folder / "run")):
            print("held", flush=True)
            sys.stdin.readline()
    except LauncherError as error:
        print("refused", flush=True)
        sys.stdin.readline()
"""


@pytest.mark.parametrize("several", [2, 4])
def test_of_several_that_find_a_lock_left_behind_one_takes_it(tmp_path: Path, several: int) -> None:
    rounds = [tmp_path / str(number) for number in range(25)]
    runs = [RunDir(folder / "run") for folder in rounds]
    for run in runs:
        run.path.mkdir(parents=True)
        written(run, pid=2**22 + 1)
    takers = [
        subprocess.Popen(
            [sys.executable, "-c", RACE, *map(str, rounds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        for _ in range(several)
    ]
    try:
        for folder, run in zip(rounds, runs, strict=True):
            assert _all_say(takers) == ["ready"] * several
            _tell(takers)
            (folder / "gate").touch()
            said = _all_say(takers)
            assert sorted(said) == ["held"] + ["refused"] * (several - 1)
            assert json.loads(path_of(run).read_text())["pid"] == takers[said.index("held")].pid
            _tell(takers)
        for one in takers:
            one.communicate(timeout=30)
        assert [files(run) for run in runs] == [[]] * len(runs)
    finally:
        for one in takers:
            one.kill()
            one.communicate()


def _all_say(takers: "list[subprocess.Popen[str]]") -> list[str]:
    return [one.stdout.readline().strip() for one in takers if one.stdout is not None]


def _tell(takers: "list[subprocess.Popen[str]]") -> None:
    for one in takers:
        assert one.stdin is not None
        one.stdin.write("\n")


def test_a_taker_that_was_killed_in_the_middle_bars_nobody(run: RunDir) -> None:
    stale = written(run, pid=2**22 + 1)
    from launcher import lock

    digest = lock._digest(path_of(run))
    path_of(run).with_name(f".lock.json.{digest}").write_text(json.dumps(asdict(replace(stale, pid=2**22 + 2))))
    with holding(run):
        assert json.loads(path_of(run).read_text())["pid"] == os.getpid()
    assert files(run) == []


def test_a_lock_of_another_host_is_refused_and_only_force_takes_it(run: RunDir) -> None:
    owner = written(run, host="far-away", pid=17, user="ada", since=time.time() - 3600)
    run.write_status(state=State.running)
    status = json.loads(run.status.read_text())
    run.status.write_text(json.dumps(status | {"heartbeat": time.time() - 75}))
    with pytest.raises(Locked) as refused, holding(run):
        pass
    said = str(refused.value)
    for part in ("process 17 on far-away (user ada) since ", "last sign of life was 7", f"resume {run.path} --force"):
        assert part in said
    assert json.loads(path_of(run).read_text()) == asdict(owner)
    with holding(run, force=True):
        assert json.loads(path_of(run).read_text())["pid"] == os.getpid()
    assert files(run) == ["status.json"]


def test_only_ones_own_lock_is_let_go(run: RunDir) -> None:
    with holding(run):
        other = written(run, host="far-away")
    assert json.loads(path_of(run).read_text()) == asdict(other)


def test_a_child_holds_it_for_its_parent_and_gives_it_back(
    run: RunDir, start: Callable[[], Holder], tmp_path: Path
) -> None:
    with holding(run):
        mine = path_of(run).read_text()
        child = start()
        (tmp_path / "gate").touch()
        assert child.said() == "held"
        held = json.loads(path_of(run).read_text())
        assert (held["pid"], held["handed_by"]) == (child.process.pid, os.getpid())
        child.end()
        assert path_of(run).read_text() == mine
    assert files(run) == []


def test_a_child_that_was_killed_leaves_nothing_behind(
    run: RunDir, start: Callable[[], Holder], tmp_path: Path
) -> None:
    with holding(run):
        child = start()
        (tmp_path / "gate").touch()
        assert child.said() == "held"
        child.process.kill()
        child.process.wait()
    assert files(run) == []


def test_an_unreadable_lock_is_said(run: RunDir) -> None:
    path_of(run).write_text("{")
    with pytest.raises(Locked, match=r"can't be read.*--force"), holding(run):
        pass
    with holding(run, force=True):
        pass
    assert files(run) == []


def test_a_folder_that_cannot_be_written_is_said(run: RunDir) -> None:
    path_of(run).parent.rmdir()
    with (
        pytest.raises(LauncherError, match=r"lock\.json: the run's folder can't be locked: No such file"),
        holding(run),
    ):
        pass


def test_a_file_system_without_hard_links(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    with holding(run):
        assert files(run) == ["lock.json"]
    written(run, host="far-away")
    with pytest.raises(Locked), holding(run):
        pass


def test_a_lock_that_cannot_be_read_is_held(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_held(run)
    assert not is_held(RunDir(run.path / "gone"))
    with holding(run):
        assert is_held(run)
    path_of(run).write_text("{")
    assert is_held(run)
    path_of(run).unlink()

    def denied(*_: Any, **__: Any) -> Any:
        raise PermissionError

    for name in ("read_text", "lstat"):  # another user's folder, also where the tests are root's
        monkeypatch.setattr(Path, name, denied)
    assert is_held(run)
