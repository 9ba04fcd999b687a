"""The batch scripts of a run and of a sweep, as text: pure, so that a plan shows what would be queued."""

import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from launcher.config.choices import ContainerRuntime, Device, SlurmAgent
from launcher.config.compose import shipped
from launcher.config.schema import Config
from launcher.config.times import seconds
from launcher.errors import ConfigError
from launcher.plan.mesh import least_nodes
from launcher.plan.plan import Plan
from launcher.run_dir import RunDir
from launcher.submit.base import LEAD, Launch, node_argv, node_environment

SCRIPT = "job.sbatch"
IN_CONTAINER = "python3"
"""The interpreter of a container's image."""
_NO_NAME = re.compile(r"[^\w.+-]+")
_RUN = '"$run"'
"""The run's folder, in the shell."""


class Scripts:
    """The scripts of a configuration. `is_queued`: whether cores are still to be asked for."""

    def __init__(self, config: Config, *, is_queued: bool = True) -> None:
        self._is_queued = is_queued
        self._config, self._slurm = config, config.submit.slurm
        self._has_agent = self._slurm.agent is not SlurmAgent.none

    def of_run(self, run: RunDir, plan: Plan) -> Launch:
        """The job of one run."""
        options = [f"--output={run.logs}/slurm_%j.out", *self.options(plan)]
        text = self._script(options, plan, [f"run={shlex.quote(str(run.path))}"])
        argv = [[*self._start(plan), str(run.path)]] * plan.nodes
        return Launch(argv, self._environment(plan), script=str(run.path / SCRIPT), script_text=text)

    def of_array(self, folder: Path, runs: Sequence[RunDir], plan: Plan) -> str:
        """One array for `runs`, which ask for the same as `plan` does. Its output goes below `folder`."""
        most = self._slurm.array_parallelism
        array = f"--array=0-{len(runs) - 1}" + ("" if most is None else f"%{most}")
        options = [array, f"--output={folder}/logs/slurm_%A_%a.out", *self.options(plan)]
        what = [f"runs=({shlex.join(str(run.path) for run in runs)})", 'run="${runs[$SLURM_ARRAY_TASK_ID]}"']
        return self._script(options, plan, what)

    def of_report(self, folder: Path, plan: Plan) -> str:
        """A small job that writes the report of the sweep in `folder`."""
        named = ("partition", "account", "qos", "reservation")
        options = ["--job-name=report", f"--output={folder}/logs/report_%j.out", *self._given(named)]
        command = [sys.executable, "-m", "launcher", "report", str(folder)]
        return _text([*self._head(options, plan), f"exec {shlex.join(command)}"])

    def options(self, plan: Plan) -> Iterator[str]:
        """What the job asks for, but for its name and its output.

        Raises:
            ConfigError: its cores can't be shared out among its ranks.
        """
        slurm = self._slurm
        yield "--open-mode=append"
        yield f"--nodes={plan.nodes}"
        yield f"--ntasks-per-node={self._tasks(plan)}"
        yield from self._cores(plan)
        named = ("gpus_per_node", "gres", "mem", "partition", "account", "qos", "time")
        yield from self._given((*named, "constraint", "reservation", "exclude"))
        yield f"--signal=B:USR1@{self._lead()}"
        yield "--requeue" if slurm.requeue else "--no-requeue"
        yield from self._no_kill(plan)
        yield from slurm.sbatch

    def _script(self, options: list[str], plan: Plan, what: list[str]) -> str:
        name = _NO_NAME.sub("_", self._config.run.name) or "launcher"
        own = [
            *what,
            f"tasks_per_node={self._tasks(plan)}",
            f"srun_options=({shlex.join(self._srun_options(plan))})",
            *self._commands(plan),
            f"max_requeues={self._slurm.requeue}",
        ]
        return _text([*self._head([f"--job-name={name}", *options], plan), *own, "", body().rstrip("\n")])

    def _head(self, options: list[str], plan: Plan) -> Iterator[str]:
        """What a script asks for, and what surrounds its command."""
        yield "#!/usr/bin/env bash"
        yield from (f"#SBATCH {_quoted(option)}" for option in options)
        yield ""
        yield "# shellcheck disable=SC2016,SC2054 # words are quoted as they are meant"
        yield f"cd {shlex.quote(plan.cwd)} || exit"
        given = (one.partition("=")[::2] for one in self._slurm.env)
        for name, value in (*self._environment(plan).items(), *given):
            yield f"export {name}={shlex.quote(value)}"
        yield from self._slurm.setup

    def _commands(self, plan: Plan) -> Iterator[str]:
        """What each task runs, and without agents who looks after them all."""
        if self._has_agent:
            # the node's number is known inside the task
            numbered = ["bash", "-c", 'exec "$@" --node "$SLURM_NODEID"', "launcher"]
            yield "watch=()"
            yield f"command=({shlex.join([*numbered, *self._start(plan)])} {_RUN})"
        else:
            yield f"watch=({shlex.join([sys.executable, '-m', 'launcher.train.step'])} {_RUN})"
            yield f"command=({shlex.join(self._start(plan))} {_RUN})"

    def _start(self, plan: Plan) -> list[str]:
        """What starts an agent, or a rank where there are none, but for the run's folder."""
        python, *module = node_argv(Path())[:-1] if self._has_agent else [sys.executable, "-m", "launcher.train.task"]
        slurm = self._slurm
        if slurm.container_image is None:
            return [python, *module]
        if slurm.container_runtime is ContainerRuntime.pyxis:
            return [IN_CONTAINER, *module]
        gpus = ["--nv"] if plan.device == Device.cuda.value else []
        mounts = [word for one in slurm.container_mounts for word in ("--bind", one)]
        return ["apptainer", "exec", *gpus, *mounts, slurm.container_image, IN_CONTAINER, *module]

    def _environment(self, plan: Plan) -> dict[str, str]:
        return node_environment(plan, plan.ranks_per_node, cores=self._slurm.cpus_per_task)

    def _tasks(self, plan: Plan) -> int:
        """Tasks of a node: its agent, or its ranks where there is none."""
        return 1 if self._has_agent else plan.ranks_per_node

    def _cores(self, plan: Plan) -> Iterator[str]:
        """The option that says how many cores a task has. Raises ConfigError."""
        cores, tasks = self._slurm.cpus_per_task, self._tasks(plan)
        if cores is None:
            return
        if cores % tasks and self._is_queued:
            problem = f"the cores of a node can't be shared out evenly among its {tasks} ranks"
            hint = f"a multiple of {tasks}, or submit.slurm.agent=torchrun"
            raise ConfigError("submit.slurm.cpus_per_task", cores, problem, hint=hint)
        yield f"--cpus-per-task={max(1, cores // tasks)}"

    def _no_kill(self, plan: Plan) -> Iterator[str]:
        """The option that keeps a job whose node fails, where the run goes on with those that are left."""
        if least_nodes(self._config.cluster, self._config.submit) < plan.nodes:
            yield "--no-kill"

    def _given(self, names: Sequence[str]) -> Iterator[str]:
        """Slurm's options of these names, where the configuration has a value."""
        for name in names:
            value = getattr(self._slurm, name)
            if value is not None:
                yield f"--{name.replace('_', '-')}={value}"

    def _srun_options(self, plan: Plan) -> list[str]:
        slurm = self._slurm
        own = [*self._cores(plan), *self._no_kill(plan)]
        if not self._has_agent:
            own.append("--kill-on-bad-exit=1")
        if slurm.container_image is not None and slurm.container_runtime is ContainerRuntime.pyxis:
            own.append(f"--container-image={slurm.container_image}")
            if slurm.container_mounts:
                own.append(f"--container-mounts={','.join(slurm.container_mounts)}")
        return [*own, *slurm.srun]

    def _lead(self) -> int:
        """Seconds before the time limit at which the job is told to stop."""
        within = seconds(self._config.checkpoint.stop_within, "checkpoint.stop_within")
        before = self._slurm.signal_before
        return round(within + LEAD if before is None else seconds(before, "submit.slurm.signal_before"))


def _quoted(option: str) -> str:
    """An option of a #SBATCH line, which sbatch divides at spaces outside of quotes.

    Raises:
        ConfigError: it can't stand on one line.
    """
    if "\n" in option:
        raise ConfigError("submit.slurm.sbatch", option, "an option can't have a line break")
    if not re.search(r"[\s'\"\\#]", option):
        return option
    return '"' + option.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _text(lines: Sequence[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def body() -> str:
    """What every job does, as slurm/body.sh has it."""
    return (shipped("slurm") / "body.sh").read_text(encoding="utf-8")
