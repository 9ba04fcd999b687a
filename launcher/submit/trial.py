"""What a run in containers needs of this machine, tried before it starts: the engine, the image, one container."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from launcher import __version__
from launcher.config.choices import Pull
from launcher.config.docker import DockerConfig, Mount
from launcher.errors import ConfigError, LauncherError
from launcher.plan.plan import Plan
from launcher.run_dir import RunDir, writing
from launcher.submit.base import HOME
from launcher.submit.engine import EngineError, ask, check_answers

BUILD_FIRST = (
    "docker build --tag {image} --file docker/Dockerfile FOLDER in a checkout makes it, submit.docker.build too"
)
TRIED_WITHIN = 300.0
"""Seconds that a first container may take, on a busy machine too."""
TRY = """\
import json, os, sys, tempfile
said = {}
try:
    import launcher
    said["version"] = launcher.__version__
except ImportError as error:
    said["missing"] = str(error)
for name, folder in (("run", sys.argv[1]), ("home", os.environ["HOME"])):
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        said[name] = f"{folder}: {error.strerror}"
print(json.dumps(said))
"""
"""What the first container does: is the package there, and can the folders be written?"""


class Trial(Protocol):
    """Who knows how a container of the run is started."""

    def trial(self, run: RunDir, plan: Plan, *command: str) -> list[str]: ...


def check_here(backend: Trial, docker: DockerConfig, run: RunDir, plan: Plan, console: Console) -> None:
    """That this machine can run the containers.

    Raises:
        LauncherError: what is missing, and what to do.
    """
    check_answers()
    for index, name in enumerate(docker.env):
        if name not in os.environ:
            hint = f"export {name}=…"
            raise ConfigError(f"submit.docker.env[{index}]", name, "isn't set where the command is given", hint=hint)
    for index, one in enumerate(docker.mounts):
        mount = Mount.parse(one, f"submit.docker.mounts[{index}]", plan.cwd)
        if not Path(mount.source).exists():
            raise ConfigError(f"submit.docker.mounts[{index}]", one, f"{mount.source} isn't there on this machine")
    if docker.network is not None:
        _check_network(docker.network)
    _make_image(docker, run, plan.cwd, console)
    _try(backend, docker, run, plan)


def _check_network(name: str) -> None:
    try:
        ask("network", "inspect", name)
    except EngineError as error:
        hint = f"docker network create {name}; null: one of the run's own, or none"
        raise ConfigError("submit.docker.network", name, str(error), hint=hint) from error


def _make_image(docker: DockerConfig, run: RunDir, cwd: str, console: Console) -> None:
    """Builds or pulls the image where that was asked for or it isn't here. Raises ConfigError."""
    image, hint = docker.image, BUILD_FIRST.format(image=docker.image)
    if docker.build is not None:
        _build(docker, str(Path(cwd, docker.build)), run, console)
    elif docker.pull is Pull.always:
        try:
            ask("pull", "--quiet", image, seconds=None)
        except EngineError as error:
            raise ConfigError("submit.docker.image", image, f"can't be pulled: {error}", hint=hint) from error
    try:
        ask("image", "inspect", "--format", "{{.Id}}", image)
    except EngineError as missing:
        if docker.pull is Pull.never:
            raise ConfigError("submit.docker.image", image, "isn't here", hint=hint) from missing
        try:
            ask("pull", "--quiet", image, seconds=None)
        except EngineError as error:
            raise ConfigError(
                "submit.docker.image", image, f"isn't here, nor can it be pulled: {error}", hint=hint
            ) from error


def _build(docker: DockerConfig, folder: str, run: RunDir, console: Console) -> None:
    recipe, log = Path(folder, "docker", "Dockerfile"), run.logs / "build.log"
    if not recipe.is_file():
        problem = "must be a checkout of this package: docker/Dockerfile isn't there"
        raise ConfigError("submit.docker.build", folder, problem)
    command = ["docker", "build", f"--tag={docker.image}", f"--file={recipe}", *docker.build_options, folder]
    console.print(f"builds  {docker.image} of {folder}: see {log}", markup=False, highlight=False, soft_wrap=True)
    with writing(log), open(log, "wb") as output:
        code = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output).returncode
    if code != 0:
        tail = "\n  ".join(log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-5:])
        raise ConfigError("submit.docker.build", folder, f"the image can't be built; {log} ends with\n  {tail}")


def _try(backend: Trial, docker: DockerConfig, run: RunDir, plan: Plan) -> None:
    """That a container like those of the run starts and can write. Raises LauncherError."""
    try:
        printed = ask("run", "--rm", *backend.trial(run, plan, "-c", TRY, str(run.path)), seconds=TRIED_WITHIN)
        said: dict[str, Any] = json.loads(printed.splitlines()[-1])
    except (EngineError, ValueError, IndexError) as error:
        raise _refusal(str(error), docker) from error
    user = docker.user or "the caller"
    if "missing" in said:
        hint = BUILD_FIRST.format(image=docker.image)
        raise ConfigError(
            "submit.docker.image", docker.image, f"doesn't hold this package: {said['missing']}", hint=hint
        )
    if said["version"] != __version__:
        problem = f"holds launcher {said['version']}, and this is {__version__}"
        raise ConfigError("submit.docker.image", docker.image, problem, hint="build it anew")
    for name in ("run", "home"):
        if name in said:
            problem = f"{user} can't write {said[name]}, in the container"
            hint = "give the folder to that user; submit.docker.user=null: the ranks are who gives the command"
            if name == "home" and not said[name].startswith(HOME + ":"):
                hint = "HOME is set by a variable of yours: leave it out, or mount that folder with :rw"
            raise ConfigError("submit.docker.user", docker.user, problem, hint=hint)


def _refusal(said: str, docker: DockerConfig) -> LauncherError:
    """What Docker says of a container that doesn't start, with the key that it is about where that can be told."""
    if docker.gpus and ("device driver" in said or "nvidia" in said.lower() or "gpu" in said.lower()):
        hint = "install the NVIDIA container toolkit on this machine, or leave submit.docker.gpus out"
        return ConfigError("submit.docker.gpus", docker.gpus, f"Docker has no GPUs to give: {said}", hint=hint)
    if '"python"' in said:
        problem = f"has no `python`: {said}"
        return ConfigError("submit.docker.image", docker.image, problem, hint=BUILD_FIRST.format(image=docker.image))
    return LauncherError("Docker refuses a container of this run:\n  " + said.replace("\n", "\n  "))
