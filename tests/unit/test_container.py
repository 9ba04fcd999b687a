"""A container as the launcher follows it, with stand-ins for the docker command; the health check of the image."""

import importlib.util
import json
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType

import pytest

from launcher.errors import LauncherError
from launcher.run_dir import RunDir, State
from launcher.submit.container import Container, container
from launcher.submit.engine import refuse_running, remove_orphans

HEALTH = Path(__file__).resolve().parents[2] / "docker" / "health.py"
COMMAND = ["docker", "run", "--name=one", "image"]

DOCKER = """#!/bin/sh
echo "$*" >> "$0.asked"
case "$1" in
  run) {run} ;;
  container) [ -f "$0.state" ] && cat "$0.state" ;;
  version) {version} ;;
esac
"""


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Puts a docker command first that does what it is told; its folder holds what it was asked."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def make(run: str, version: str = "echo 26") -> Path:
        (tmp_path / "docker").write_text(DOCKER.format(run=run, version=version))
        (tmp_path / "docker").chmod(0o755)
        return tmp_path

    return make


def ended(folder: Path, **state: object) -> None:
    """What the engine says of the container from now on."""
    known = {"Running": False, "StartedAt": "2026-01-01T00:00:00Z", "OOMKilled": False}
    (folder / "docker.state").write_text(json.dumps(known | state))


def asked(folder: Path) -> list[str]:
    log = folder / "docker.asked"
    return log.read_text().splitlines() if log.exists() else []


def within(seconds: float, holds: Callable[[], bool]) -> bool:
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.parametrize(
    ("run", "state", "version", "code", "how"),
    [
        ("exit 3", {"ExitCode": 3}, "echo 26", 3, "the container one ended with 3"),
        ("exit 137", {"ExitCode": 137}, "echo 26", 137, "the container one was killed"),
        ("exit 137", {"ExitCode": 137, "OOMKilled": True}, "echo 26", 137, "the container one ran out of memory"),
        ("exit 125", None, "exit 1", 125, "the Docker engine doesn't answer any more, and docker ended with 125"),
        ("exit 125", None, "echo 26", 125, "docker couldn't run the container one"),
        # the command was killed, and the container has ended by itself since
        ("kill -KILL $$", {"ExitCode": 75}, "echo 26", 75, "the container one ended with 75"),
    ],
)
def test_how_a_container_has_ended(
    docker: Callable[..., Path], run: str, state: dict[str, object] | None, version: str, code: int, how: str
) -> None:
    folder = docker(run, version)
    if state is not None:
        ended(folder, **state)
    with container(COMMAND, RunDir(folder), folder / "log") as node:
        assert node.agent.wait(20) == code
        assert node.agent.how(code).startswith(how)


def test_a_container_outlives_its_command(docker: Callable[..., Path]) -> None:
    folder = docker("kill -KILL $$")
    ended(folder, Running=True)
    with container(COMMAND, RunDir(folder), folder / "log") as node:
        looks = lambda: sum(one.startswith("container") for one in asked(folder))  # noqa: E731
        assert within(20, lambda: node.agent.poll() is None and looks() >= 2)
        ended(folder, ExitCode=75)
        assert node.agent.wait(20) == 75


def test_a_signal_that_was_lost_is_told_again(docker: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """H13."""
    monkeypatch.setattr("launcher.submit.container.AGAIN_EVERY", 0.1)
    folder = docker("trap '' TERM; echo ready; cat >/dev/null")
    run = RunDir(folder)
    run.write_status(state=State.running)
    with container(COMMAND, run, folder / "log") as node:
        assert within(20, lambda: "ready" in (folder / "log").read_text())
        node.agent.send_signal(15)
        told = "kill --signal=SIGTERM one"
        assert within(20, lambda: node.agent.poll() is None and told in asked(folder))
        run.write_status(state=State.stopping)
        node.agent.poll()
        count = asked(folder).count(told)
        end = time.monotonic() + 0.5
        assert within(2, lambda: node.agent.poll() is not None or time.monotonic() > end)
        assert asked(folder).count(told) == count
        ended(folder, ExitCode=0)
        assert isinstance(node.agent, Container)
        assert node.agent.stdin is not None
        node.agent.stdin.close()  # the end of the launcher is the end of its input
        assert node.agent.wait(20) == 0


def test_what_is_left_of_a_run_that_somebody_looks_after_stays(
    docker: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, orphan, busy, other = (tmp_path / name for name in ("held", "orphan", "busy", "removed-by-another"))
    lines = f"{held}\texited\\n{orphan}\texited\\n{busy}\trunning\\n{other}\texited\\n"
    (tmp_path / "docker").write_text(
        '#!/bin/sh\necho "$*" >> "$0.asked"\ncase "$*" in\n'
        f'  "ps --all --filter label=launcher.run --format"*) printf "{lines}" ;;\n'
        f'  "network ls --filter label=launcher.run --format"*) echo "{orphan}" ;;\n'
        f'  *"label=launcher.run={orphan}") echo "id_$1" ;;\n'
        f'  *"label=launcher.run={other}") echo gone ;;\n  "rm "*gone) exit 1 ;;\nesac\n'
    )
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr("launcher.submit.engine.is_held", lambda run: run.path == held)
    remove_orphans()
    removing = [one for one in asked(tmp_path) if one.startswith(("rm", "network rm"))]
    assert sorted(removing) == ["network rm id_network", "rm --force --volumes gone", "rm --force --volumes id_ps"]


def test_a_container_is_ended_by_its_name_and_not_by_its_command(docker: Callable[..., Path]) -> None:
    folder = docker("cat >/dev/null")
    with container(COMMAND, RunDir(folder), folder / "log") as node:
        node.agent.kill()
        assert "kill one" in asked(folder)
        ended(folder, ExitCode=137)
        assert isinstance(node.agent, Container)
        assert node.agent.stdin is not None
        node.agent.stdin.close()
        assert node.agent.wait(20) == 137


@pytest.mark.parametrize(
    ("version", "state", "heartbeat_age", "words"),
    [
        ("echo 26", {"Running": True}, 0, "still running in one, "),
        ("echo 26", {"Running": False}, 0, None),
        ("exit 1", {"Running": False}, 30, "may live on"),
        ("exit 1", {"Running": False}, 90, None),
    ],
)
def test_a_run_whose_containers_live_on_does_not_start_again(
    docker: Callable[..., Path], version: str, state: dict[str, object], heartbeat_age: float, words: str | None
) -> None:
    folder = docker(":", version)
    ended(folder, **state)
    status = {"containers": ["one"], "heartbeat": time.time() - heartbeat_age}
    with nullcontext() if words is None else pytest.raises(LauncherError, match=words):
        refuse_running(RunDir(folder), status)


@pytest.fixture
def health() -> ModuleType:
    spec = importlib.util.spec_from_file_location("health", HEALTH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("heartbeat_age", "code"), [(5, 0), (600, 1)])
def test_a_container_is_ill_where_its_run_gives_no_sign_of_life(
    health: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], heartbeat_age: float, code: int
) -> None:
    run = RunDir(tmp_path / "run")
    run.create("", "{}")
    run.write_status(state=State.running, heartbeat=time.time() - heartbeat_age)
    for number, words in (
        (1, ["tini", "--", "launcher"]),
        (7, ["python", "-m", "launcher.train.agent", str(run.path)]),
    ):
        (tmp_path / "proc" / str(number)).mkdir(parents=True)
        (tmp_path / "proc" / str(number) / "cmdline").write_text("\0".join(words) + "\0")
    assert health.main(tmp_path / "proc") == code
    assert ("no sign of life for 600 s" in capsys.readouterr().out) is bool(code)
    assert health.main(tmp_path / "nothing") == 0
