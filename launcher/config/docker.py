"""The schema of containers, and what can't be right in it."""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.config.choices import Pull
from launcher.config.times import time_to_save
from launcher.errors import ConfigError

_SIZE = re.compile(r"([0-9]+)([bkmg]?)", re.IGNORECASE)
_UNITS = {"": 1, "b": 1, "k": 2**10, "m": 2**20, "g": 2**30}
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_FLAGS = "ditPq"
"""Short options of `docker run` that have no value."""
_SAME = {
    "h": "hostname",
    "u": "user",
    "w": "workdir",
    "m": "memory",
    "d": "detach",
    "i": "interactive",
    "t": "tty",
    "a": "attach",
    "l": "label",
    "e": "env",
    "net": "network",
}
"""Other names of options."""
_SAID_BY = {
    "name": "run.name",
    "hostname": "run.name",
    "restart": "training.max_restarts",
    "env-file": "submit.docker.env",
    "entrypoint": "submit.docker.image",
    "ulimit": "submit.docker.ulimits",
    "shm-size": "submit.docker.shm_size",
    "stop-timeout": "submit.docker.stop_timeout",
    "read-only": "submit.docker.read_only",
    **{name: f"submit.docker.{name}" for name in ("pull", "gpus", "cpus", "memory", "ipc", "network", "user")},
}
"""Options of `docker run` that a key says."""
_OWN = {"workdir", "rm", "detach", "interactive", "tty", "attach", "init", "sig-proxy", "stop-signal", "cidfile"}
"""Those that the launcher has to say itself."""
ALL = "all"
"""Every GPU of the machine, as a value of submit.docker.gpus."""
LABEL = "launcher.run"
"""Of every container and network: the folder of the run that it belongs to."""


@dataclass
class DockerConfig:
    image: str = "launcher"
    """The image that the ranks run in. It has to hold this package: docker/Dockerfile makes one."""
    build: str | None = None
    """A checkout of this package that the image is built of before the run; null: it is there, or is pulled."""
    build_options: list[str] = field(default_factory=list)
    """Further options of `docker build`, as in `'submit.docker.build_options=["--build-arg=TORCH=cpu"]'`."""
    pull: Pull = Pull.missing
    """When the image is pulled: missing (where it isn't here), always, never."""
    gpus: Any = None
    """GPUs of a container: a number; all: those of this machine, divided among the containers that run at a time;
    null: none."""
    cpus: float | None = None
    """Cores of a container; null, here and below: the option isn't given, and Docker's default holds."""
    memory: str | None = None
    """Memory of a container, as in `16g`. Ranks that ask for more are killed."""
    shm_size: str | None = None
    """Shared memory of a container, in which loader workers hand over what they have read, as in `2g`; null: 64 MiB
    and 256 MiB more for each worker."""
    ipc: str | None = None
    """Docker's --ipc, as in `host`: the machine's shared memory, instead of shm_size."""
    ulimits: list[str] = field(default_factory=list)
    """Limits, as in `'submit.docker.ulimits=["memlock=-1", "stack=67108864"]'`."""
    network: str | None = None
    """The network that containers are in; null: none with one node, with several one of the run's own that leads
    nowhere else. `bridge` leads outside; several nodes need a network of yours in which names are found."""
    mounts: list[str] = field(default_factory=list)
    """Folders and files of this machine that containers see, as in
    `submit.docker.mounts=[/data,/scratch:rw,/mnt/a:/data/b]`: read-only unless `:rw` follows. The run's folder is there
    writable, the current folder and --config-dir are read-only."""
    user: str | None = None
    """Who the ranks are, as UID:GID; null: who gives the command, whose the run's files are then."""
    env: list[str] = field(default_factory=list)
    """Names of environment variables that containers get with the value that they have where the command is given, as
    in `submit.docker.env=[WANDB_API_KEY]`. Values are written nowhere."""
    read_only: bool = True
    """Whether a container can write nothing but the run's folder, what `:rw` mounts, and /tmp, which is its home and
    lies in memory."""
    stop_timeout: Any = None
    """How long `docker stop` waits for a run to save before it kills it, as a time of at least checkpoint.stop_within;
    null: that and 30 seconds."""
    parallelism: int = 1
    """How many runs of a sweep run at a time. The machine's GPUs are divided among them, and its cores in the
    number of threads that each rank starts (OMP_NUM_THREADS)."""
    start: bool = True
    """false: the run's folder is made and the commands are printed, for compose or another hand to start."""
    options: list[str] = field(default_factory=list)
    """Further options of `docker run`, a word each, as in `'submit.docker.options=["--device=/dev/infiniband"]'`; none
    that another key says."""


def bytes_of(value: str, key: str) -> int:
    """The bytes of a size as Docker reads it, such as `512m`. Raises ConfigError."""
    form = _SIZE.fullmatch(value.strip())
    if form is None or not int(form[1]):
        raise ConfigError(key, value, "is no size", hint="a size is a whole number and b, k, m or g, as in 512m or 2g")
    return int(form[1]) * _UNITS[form[2].lower()]


@dataclass(frozen=True)
class Mount:
    """A folder or a file of this machine in a container."""

    source: str
    target: str
    is_writable: bool = False

    @classmethod
    def parse(cls, text: str, key: str, cwd: str = "/") -> "Mount":
        """Of ``SOURCE[:TARGET][:rw|:ro]``; a relative source lies in the folder `cwd`. Raises ConfigError."""
        *parts, last = text.split(":")
        mode = last if parts and last in ("rw", "ro") else "ro"
        if not (parts and last in ("rw", "ro")):
            parts.append(last)
        source = os.path.normpath(Path(cwd, Path(parts[0]).expanduser())) if parts[0] else ""
        target = os.path.normpath(parts[1]) if len(parts) == 2 else source
        if len(parts) > 2 or not source or not target.startswith("/"):
            hint = "/data, /data:rw, /mnt/a:/data or /mnt/a:/data:rw"
            raise ConfigError(key, text, "must be SOURCE, or SOURCE:TARGET with an absolute TARGET", hint=hint)
        return cls(source, target, mode == "rw")


def stop_timeout(docker: DockerConfig, stop_within: object) -> float:
    """Seconds that `docker stop` waits. `stop_within`: checkpoint.stop_within. Raises ConfigError."""
    return time_to_save(docker.stop_timeout, "submit.docker.stop_timeout", stop_within)


def check_docker(docker: DockerConfig, stop_within: object) -> None:
    """That the section can be right. `stop_within`: checkpoint.stop_within.

    Raises:
        ConfigError: which key can't, and what would.
    """
    _check_resources(docker)
    _check_network(docker)
    _check_options(docker.options)
    for index, one in enumerate(docker.mounts):
        Mount.parse(one, f"submit.docker.mounts[{index}]")
    for index, one in enumerate(docker.env):
        if not _NAME.fullmatch(one):
            hint = "export it where the command is given: a value on a command line can be read by all"
            raise ConfigError(f"submit.docker.env[{index}]", one, "must be the name of a variable", hint=hint)
    for index, one in enumerate(docker.ulimits):
        if not re.fullmatch(r"\w+=-?\d+(:-?\d+)?", one):
            raise ConfigError(f"submit.docker.ulimits[{index}]", one, "must be NAME=SOFT or NAME=SOFT:HARD")
    if docker.user is not None and not re.fullmatch(r"\d+(:\d+)?", docker.user):
        raise ConfigError("submit.docker.user", docker.user, "must be UID or UID:GID, in numbers")
    if docker.build is None and docker.build_options:
        problem = "has no effect: submit.docker.build is null"
        raise ConfigError("submit.docker.build_options", docker.build_options, problem, hint="submit.docker.build=.")
    stop_timeout(docker, stop_within)
    if docker.image.startswith("-"):
        raise ConfigError("submit.docker.image", docker.image, "must name an image")


def words_of(options: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The names of options of `docker run`, long where there is a long one, with their values: ``--env=A=1``,
    ``--env A=1`` and ``-e A=1`` as ``("env", "A=1")``."""
    for word, after in zip(options, [*options, "-"][1:], strict=True):
        following = "" if after.startswith("-") else after
        if word.startswith("--"):
            name, sign, value = word[2:].partition("=")
            yield _SAME.get(name, name), value if sign else following
        elif word.startswith("-"):
            flags = word[1:]
            while flags and flags[0] in _FLAGS:
                yield _SAME.get(flags[0], flags[0]), ""
                flags = flags[1:]
            if flags:
                yield _SAME.get(flags[0], flags[0]), flags[1:].removeprefix("=") or following


def _check_options(options: Sequence[str]) -> None:
    key = "submit.docker.options"
    for index, word in enumerate(options):
        before = options[index - 1] if index else ""
        if not word.startswith("-") and (not before.startswith("-") or "=" in before):
            raise ConfigError(f"{key}[{index}]", word, "is no option: docker would take it for the image")
        if word in ("-", "--"):
            raise ConfigError(f"{key}[{index}]", word, "is no option")
    for name, value in words_of(options):
        option = f"--{name}"
        if name in _SAID_BY:
            raise ConfigError(key, option, f"is said by {_SAID_BY[name]}", hint="leave it out here")
        if name in _OWN or (name == "label" and value.partition("=")[0] == LABEL):
            raise ConfigError(key, option, "is the launcher's own to say of a run's containers", hint="leave it out")


def _check_network(docker: DockerConfig) -> None:
    if docker.network is not None and docker.network.startswith("container:"):
        problem = "containers of a run have names of their own, which Docker refuses in another's network"
        hint = "a network that both are in: docker network create NAME"
        raise ConfigError("submit.docker.network", docker.network, problem, hint=hint)


def _check_resources(docker: DockerConfig) -> None:
    gpus = docker.gpus
    is_count = isinstance(gpus, int) and not isinstance(gpus, bool) and gpus >= 0
    if gpus is not None and gpus != ALL and not is_count:
        raise ConfigError("submit.docker.gpus", gpus, "must be a whole number of at least 0, all, or null")
    if docker.cpus is not None and not 0 < docker.cpus < float("inf"):
        raise ConfigError("submit.docker.cpus", docker.cpus, "must be a number above 0, or null")
    if docker.parallelism < 1:
        raise ConfigError("submit.docker.parallelism", docker.parallelism, "must be at least 1")
    for name in ("memory", "shm_size"):
        value = getattr(docker, name)
        if value is not None:
            bytes_of(value, f"submit.docker.{name}")
    if docker.ipc is not None and docker.shm_size is not None:
        raise ConfigError("submit.docker.ipc", docker.ipc, "stands beside shm_size: give one of them")
