"""Docker by its command line: what it says, what a run needs of it, and what runs have left there."""

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from launcher.config.docker import LABEL
from launcher.errors import ConfigError, LauncherError
from launcher.lock import is_held
from launcher.observe.status import SILENT_AFTER
from launcher.run_dir import RunDir

ANSWER_WITHIN = 60.0
"""Seconds that an answer of the engine is waited for."""


class EngineError(LauncherError):
    """Docker's own words where it couldn't do what it was asked for."""


def ask(*arguments: str, seconds: float | None = ANSWER_WITHIN) -> str:
    """What ``docker ARGUMENTS`` prints. Raises EngineError, also where there is no such command."""
    try:
        done = subprocess.run(
            ["docker", *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds
        )
    except FileNotFoundError:
        raise ConfigError(
            "submit", "docker", "this machine has no docker command", hint="submit=local runs here"
        ) from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EngineError(f"docker {arguments[0]}: {error}") from error
    if done.returncode != 0:
        raise EngineError(_words(done.stderr) or f"docker {arguments[0]} ended with {done.returncode}")
    return done.stdout.strip()


def _words(said: str) -> str:
    """What docker says of an error, without its hint at its help."""
    lines = [
        line for line in said.strip().splitlines() if line.strip() and not line.startswith(("See 'docker", "Run 'd"))
    ]
    return "\n".join(line.removeprefix("docker: ") for line in lines)


def answers() -> bool:
    """Whether the engine does."""
    try:
        check_answers()
    except LauncherError:
        return False
    return True


def check_answers() -> None:
    """That there is an engine that this user may use. Raises ConfigError."""
    try:
        ask("version", "--format", "{{.Server.Version}}")
    except EngineError as error:
        said = str(error)
        if "permission denied" in said.lower():
            hint = "become a member of the socket's group (usually docker), or run a rootless engine of your own"
        else:
            hint = "start it (systemctl start docker), or name another one with DOCKER_HOST; submit=local needs none"
        raise ConfigError("submit", "docker", f"the engine doesn't answer: {said}", hint=hint) from error


def state_of(container: str) -> dict[str, Any] | None:
    """What the engine knows of a container's state (Running, ExitCode, OOMKilled, …); None: nothing."""
    try:
        said: dict[str, Any] = json.loads(ask("container", "inspect", "--format", "{{json .State}}", container))
    except (LauncherError, ValueError):
        return None
    return said


def refuse_running(run: RunDir, status: dict[str, Any]) -> None:
    """That no container of a run lives on. `status`: what the run's says.

    Raises:
        LauncherError: one does; or, where the engine doesn't answer, it may.
    """
    names: list[str] = status.get("containers") or []
    if not names:
        return
    if answers():
        left = " ".join(one for one in names if (state_of(one) or {}).get("Running"))
        if left:
            problem = "which stops when its launcher has ended; to wait for it"
            raise LauncherError(f"{run.path}: still running in {left}, {problem}: docker wait {left}")
        return
    age = time.time() - float(status.get("heartbeat") or 0)
    if age < SILENT_AFTER:
        problem = "its containers may live on, and the Docker engine doesn't answer"
        hint = f"start it, or wait: after {SILENT_AFTER:.0f} s without a sign of life (now {age:.0f} s) the run goes on"
        raise LauncherError(f"{run.path}: {problem}\n  {hint}")


def remove(run: RunDir) -> None:
    """Removes what the engine has of a run: its containers, whether or not they run, and its network.

    Raises:
        LauncherError: it can't; the engine's words.
    """
    of_run = f"label={LABEL}={run.path}"
    containers = ask("ps", "--all", "--quiet", "--filter", of_run).split()
    if containers:
        ask("rm", "--force", "--volumes", *containers)
    networks = ask("network", "ls", "--quiet", "--filter", of_run).split()
    if networks:
        ask("network", "rm", *networks)


def remove_orphans() -> None:
    """Removes what is left of runs that nobody looks after any more, since their launcher was killed.

    Containers that still run are on their way out: they stop when their launcher does.

    Raises:
        LauncherError: the engine's words.
    """
    listed = f'{{{{.Label "{LABEL}"}}}}'
    containers = ask("ps", "--all", "--filter", f"label={LABEL}", "--format", listed + "\t{{.State}}").splitlines()
    busy = {line.partition("\t")[0] for line in containers if line.endswith(("\trunning", "\tpaused", "\trestarting"))}
    networks = ask("network", "ls", "--filter", f"label={LABEL}", "--format", listed).splitlines()
    for path in {line.partition("\t")[0] for line in [*containers, *networks]} - busy:
        run = RunDir(Path(path))
        if not is_held(run):
            with suppress(EngineError):  # another launcher that starts now removes it too
                remove(run)


@contextmanager
def cleared(run: RunDir) -> Iterator[list[str]]:
    """While inside, the engine has of a run what is started there. At the end nothing is left.

    Yields a list that says, from the end on, what couldn't be removed.
    """
    remove_orphans()
    remove(run)
    problems: list[str] = []
    try:
        yield problems
    finally:
        try:
            remove(run)
        except LauncherError as error:
            problems.append(f"what Docker has of this run stays until the next start: {error}")
