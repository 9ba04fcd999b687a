"""Docker: a container a node on this machine, in it the agent that a local run has. The command that is rendered is the
command that runs."""

import csv
import hashlib
import io
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console

from launcher.config.choices import WandbMode
from launcher.config.docker import LABEL, Mount, bytes_of, stop_timeout, words_of
from launcher.config.freeze import PATH_NAMES
from launcher.config.schema import Config
from launcher.errors import ConfigError, Exit, LauncherError
from launcher.lock import holding
from launcher.outcome import RENDEZVOUS
from launcher.plan.mesh import available_cores, gpu_names, gpus_of_container, least_nodes
from launcher.plan.plan import Plan
from launcher.plan.show import print_commands
from launcher.process import LIFELINE
from launcher.run_dir import RunDir, State
from launcher.submit.base import HOME, Launch, node_argv, node_environment
from launcher.submit.container import container, name_in
from launcher.submit.engine import ask, cleared
from launcher.submit.nodes import SignalsPassedOn, log_of, run_nodes
from launcher.submit.trial import check_here

PORT = 29500
"""Where the first container listens, in a network of the run's own."""
SHM, SHM_PER_WORKER, SHM_LEAST = 64 * 2**20, 256 * 2**20, 32 * 2**20
"""Bytes of shared memory: of a container, of a loader worker in it, and those that a worker can't do without."""
WITHOUT_NAMES = ("host", "none", "bridge", "default")
"""Docker's own networks, in which containers don't find each other by name."""
WITHOUT_NETWORK = (None, "none")
"""Networks of a single node in which there is no interface but lo."""
LOOPBACK = "GLOO_SOCKET_IFNAME"
"""The variable that names the interface by which gloo's ranks talk."""
SAFE_PATH = "PYTHONSAFEPATH"
"""The variable that keeps the current folder from Python's path: in a checkout the package would be the checkout's."""
OWN_VARIABLES = ("PYTHONPATH", SAFE_PATH, RENDEZVOUS, LIFELINE)
"""What containers can't have another value of."""
_NO_NAME = re.compile(r"[^a-z0-9]+")
_PACKAGE = Path(__file__).resolve().parents[2]
_PACKAGE_NAME = __name__.partition(".")[0]


class Docker:
    """Containers of one run."""

    def __init__(self, config: Config, variables: Sequence[str] = (), lane: int = 0) -> None:
        """`variables`: names of environment variables that the configuration refers to. `lane`: which of the runs of a
        sweep that run at a time this is, from 0; each has GPUs of its own."""
        self._config, self._docker, self.lane = config, config.submit.docker, lane
        self._variables = list(dict.fromkeys([*variables, *self._docker.env]))

    def with_variables(self, names: Sequence[str]) -> "Docker":
        """The same, with the values of further environment variables in the containers."""
        return Docker(self._config, [*self._variables, *names], self.lane)

    def in_lane(self, lane: int) -> "Docker":
        """The same, beside others that run at the same time."""
        return Docker(self._config, self._variables, lane)

    @property
    def parallelism(self) -> int:
        """How many runs of a sweep run at a time."""
        return self._docker.parallelism

    @property
    def starts(self) -> bool:
        """Whether the containers are started here, and not by another hand."""
        return self._docker.start

    def render(self, run: RunDir, plan: Plan) -> Launch:
        self._check(run, plan)
        name, environment = name_of(self._config.run.name, run), self.environment(plan)
        agents = [["python", *node_argv(run.path, node)[1:]] for node in range(plan.nodes)]
        commands = []
        network = self._docker.network or "none"
        if plan.nodes > 1 and self._docker.network is None:
            network = name
            commands.append(["docker", "network", "create", "--internal", f"--label={LABEL}={run.path}", network])
        for node, agent in enumerate(agents):
            own = [f"--name={name}-{node}", f"--hostname={name}-{node}", "--init", "--interactive"]
            meeting = {RENDEZVOUS: f"{name}-0:{PORT}"} if plan.nodes > 1 else {}
            given = [f"--network={network}", *_variables({**environment, **meeting}), f"--env={LIFELINE}"]
            options = [*own, *self.options(run, plan, node), *given, *self._of_the_user()]
            commands.append(["docker", "run", *options, *self._image(), *agent[1:]])
        return Launch(agents, environment, docker=commands)

    def options(self, run: RunDir, plan: Plan, node: int) -> Iterator[str]:
        """What `docker run` is told of the container of a node, but for its name, its network, its environment
        and the user's own words."""
        docker = self._docker
        yield f"--label={LABEL}={run.path}"
        yield f"--pull={docker.pull.value}"
        yield f"--user={docker.user or f'{os.getuid()}:{os.getgid()}'}"
        yield f"--workdir={plan.cwd}"
        yield f"--stop-timeout={round(stop_timeout(docker, self._config.checkpoint.stop_within))}"
        if docker.read_only:
            yield "--read-only"
        mounts = self._mounts(run, plan)
        if HOME not in [one.target for one in mounts]:
            yield f"--tmpfs={HOME}:rw,exec,nosuid,nodev"
        yield "--cap-drop=ALL"
        yield "--security-opt=no-new-privileges"
        yield f"--ipc={docker.ipc}" if docker.ipc is not None else f"--shm-size={self._shared_memory(plan)}"
        for option, value in (("cpus", docker.cpus), ("memory", docker.memory)):
            if value is not None:
                yield f"--{option}={value}"
        yield from self._gpus(plan, node)
        yield from (f"--ulimit={one}" for one in docker.ulimits)
        yield from map(_mount, mounts)

    def _of_the_user(self) -> Iterator[str]:
        """Variables by name, and further words: last, where Docker takes them before what was said earlier."""
        yield from (f"--env={one}" for one in self._variables)
        yield from self._docker.options

    def trial(self, run: RunDir, plan: Plan, *command: str) -> list[str]:
        """The options of a first container like those of the run, which tries whether they work."""
        network = self._docker.network or "none"
        given = [f"--network={network}", *_variables(self.environment(plan)), *self._of_the_user()]
        return [*self.options(run, plan, 0), *given, *self._image(), *command]

    def _image(self) -> list[str]:
        return ["--entrypoint=python", self._docker.image]

    def environment(self, plan: Plan) -> dict[str, str]:
        """What ranks need, beside what the image sets and what the user does."""
        cores = max(1, available_cores() // (plan.nodes * self.parallelism))
        limit = self._docker.cpus
        cores = cores if limit is None else max(1, int(limit))
        found = {"HOME": HOME, **node_environment(plan, plan.ranks_per_node, cores)}
        found.setdefault("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))
        if plan.nodes == 1 and self._docker.network in WITHOUT_NETWORK:
            found[LOOPBACK] = "lo"
        folders = [one for one in _folders(plan) if not _holds_package(one)]
        found |= {"PYTHONPATH": os.pathsep.join(folders), SAFE_PATH: "1"}
        return {name: value for name, value in found.items() if name not in self._named()}

    def _named(self) -> list[str]:
        """The names of variables that the user sets."""
        words = words_of(self._docker.options)
        return [*self._variables, *(value.partition("=")[0] for name, value in words if name == "env")]

    def _shared_memory(self, plan: Plan) -> str:
        workers = self._config.data.workers * plan.ranks_per_node
        return self._docker.shm_size or f"{(SHM + workers * SHM_PER_WORKER) // 2**20}m"

    def _gpus(self, plan: Plan, node: int) -> Iterator[str]:
        each = gpus_of_container(self._docker, plan.nodes)
        if each:
            first = (self.lane * plan.nodes + node) * each
            names = gpu_names(first + each)[first:]
            yield f'--gpus="device={",".join(names)}"'  # in quotes of its own: docker reads it as CSV

    def _mounts(self, run: RunDir, plan: Plan) -> list[Mount]:
        """What containers see of this machine, folders before what lies in them."""
        given = [Mount.parse(one, f"submit.docker.mounts[{i}]", plan.cwd) for i, one in enumerate(self._docker.mounts)]
        seen = {one: Mount(one, one) for one in (plan.cwd, *_folders(plan))}
        seen |= {one.target: one for one in given} | {str(run.path): Mount(str(run.path), str(run.path), True)}
        return [seen[target] for target in sorted(seen)]

    def _check(self, run: RunDir, plan: Plan) -> None:
        """That the containers of this plan can work. Raises ConfigError."""
        self._check_environment(plan)
        docker, workers = self._docker, self._config.data.workers * plan.ranks_per_node
        if docker.network in WITHOUT_NAMES and plan.nodes > 1:
            problem = "containers don't find each other by name there"
            raise ConfigError("submit.docker.network", docker.network, problem, hint="null: a network of the run's own")
        if self._config.logging.wandb.mode is WandbMode.online and docker.network in WITHOUT_NETWORK:
            problem = "the containers have no network that leads outside"
            raise ConfigError("logging.wandb.mode", "online", problem, hint="submit.docker.network=bridge")
        if docker.shm_size is not None and bytes_of(docker.shm_size, "submit.docker.shm_size") < workers * SHM_LEAST:
            least = workers * SHM_LEAST // 2**20
            problem = f"is too little for {workers} loader workers, which need {least}m at least"
            raise ConfigError("submit.docker.shm_size", docker.shm_size, problem, hint="null: enough for most")
        if plan.cwd == "/":
            problem = "the current folder is /, which can't be that of a container"
            raise ConfigError("submit", "docker", problem, hint="give the command in a folder of its own")
        if any(one.target == HOME and not one.is_writable for one in self._mounts(run, plan)):
            problem = f"the containers' home {HOME} can't be this machine's read-only, as a folder of code or of mounts"
            hint = f"give the command in a folder of its own, or submit.docker.mounts=[{HOME}:rw]"
            raise ConfigError("submit", "docker", problem, hint=hint)

    def _check_environment(self, plan: Plan) -> None:
        """That variables of the user's own can work. Raises ConfigError."""
        for name in self._named():
            if name in OWN_VARIABLES:
                problem = "is the launcher's own in a container"
                hint = "export PYTHONPATH where the command is given: its folders are seen" if "PATH" in name else ""
                raise ConfigError("submit.docker.env", name, problem, hint=hint)
            if name == LOOPBACK and plan.nodes == 1 and self._docker.network in WITHOUT_NETWORK:
                problem = "names an interface, and without a network there is none but lo"
                raise ConfigError("submit.docker.env", name, problem, hint="leave it out, or submit.docker.network")

    def _check_paths(self, run: RunDir, plan: Plan) -> None:
        """That files which the configuration names are seen in the containers. Raises ConfigError."""
        targets = [Path(one.target) for one in self._mounts(run, plan)]
        named: dict[str, Any] = {
            "model": self._config.model,
            "task": self._config.task,
            "data": vars(self._config.data),
        }
        for key, value in _paths({**named, "model_weights_file": self._config.model_weights}):
            if Path(value).exists() and not any(Path(value).is_relative_to(one) for one in targets):
                folder = value if Path(value).is_dir() else str(Path(value).parent)
                hint = f"submit.docker.mounts=[{folder}]"
                key = key.removesuffix("_file") if key == "model_weights_file" else key
                raise ConfigError(key, value, "lies in no folder that the containers see", hint=hint)

    def submit(self, run: RunDir, plan: Plan, launch: Launch, console: Console, *, live: bool) -> int:
        """Starts the containers and follows them to their end. Raises LauncherError before anything starts."""
        assert launch.docker is not None
        if not self.starts:
            print_commands(launch.docker, console)
            return int(Exit.FINISHED)
        with SignalsPassedOn() as signals:
            return self.run(run, plan, launch, console, signals, live=live)

    def run(
        self, run: RunDir, plan: Plan, launch: Launch, console: Console, signals: SignalsPassedOn, *, live: bool
    ) -> int:
        """The same, told by others to stop."""
        assert launch.docker is not None
        with holding(run):
            self._check_paths(run, plan)
            check_here(self, self._docker, run, plan, console)
            before, commands = launch.docker[: -plan.nodes], launch.docker[-plan.nodes :]
            names = [name_in(command) for command in commands]
            with cleared(run) as problems:
                for command in before:
                    ask(*command[1:])
                run.write_status(state=State.submitted, containers=names, exit_code=None, error=None)
                starts = [container(command, run, log_of(run, node)) for node, command in enumerate(commands)]
                code = run_nodes(
                    run, starts, least_nodes(self._config.cluster, self._config.submit), signals, console, live=live
                )
            for one in problems:
                console.print(one, markup=False, highlight=False, soft_wrap=True)
            if not problems:
                with suppress(LauncherError):
                    run.write_status(state=State(run.read_status()["state"]), containers=[])
        return code


def name_of(name: str, run: RunDir) -> str:
    """What the containers and the network of a run are called: alike at each start, and of no other run."""
    slug = _NO_NAME.sub("-", name.lower()).strip("-")[:30].strip("-") or "run"
    return f"launcher-{slug}-{hashlib.sha256(str(run.path).encode()).hexdigest()[:8]}"


def variables_in(text: str) -> list[str]:
    """The names of the environment variables that the text of a config.yaml refers to."""
    return list(dict.fromkeys(re.findall(r"\$\{oc\.env:\s*'?([A-Za-z_]\w*)", text)))


def _folders(plan: Plan) -> list[str]:
    """The folders of this machine that the ranks import from. The package itself is the image's."""
    inherited = [str(Path(plan.cwd, one)) for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one]
    folders = dict.fromkeys([*plan.pythonpath, *inherited])
    return [one for one in folders if Path(one).is_dir() and Path(one) != _PACKAGE]


def _holds_package(folder: str) -> bool:
    """Whether this package would be imported from there."""
    return Path(folder, _PACKAGE_NAME, "__init__.py").is_file()


def _variables(environment: dict[str, str]) -> list[str]:
    return [f"--env={name}={value}" for name, value in environment.items()]


def _mount(mount: Mount) -> str:
    """As `docker run` reads it: one line of CSV."""
    line = io.StringIO()
    mode = [] if mount.is_writable else ["readonly"]
    csv.writer(line, lineterminator="").writerow(
        ["type=bind", f"source={mount.source}", f"target={mount.target}", *mode]
    )
    return f"--mount={line.getvalue()}"


def _paths(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """The absolute paths in values whose keys name one, with those keys."""
    if isinstance(value, dict):
        for name, one in value.items():
            yield from _paths(one, f"{key}.{name}" if key else str(name))
    elif isinstance(value, str) and value.startswith("/") and PATH_NAMES.search(key.rpartition(".")[2]):
        yield key, value
