"""Ranks in the job of Slurm that is around the command (slurm/train.sbatch): nothing is queued, and the command becomes
the script that a job of its own would have run."""

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from omegaconf import DictConfig
from rich.console import Console

from launcher import slurm_job
from launcher.config.choices import SubmitKind
from launcher.config.schema import Config
from launcher.config.times import LEAD, seconds
from launcher.errors import ConfigError, LauncherError
from launcher.lock import let_go
from launcher.plan.plan import Plan
from launcher.run_dir import RunDir, State, write_atomic
from launcher.submit.base import Launch
from launcher.submit.slurm import Slurm
from launcher.submit.slurm_script import SCRIPT, Scripts

_OF_SBATCH = (
    *("partition", "account", "qos", "time", "gres", "mem", "constraint", "reservation", "exclude", "cpus_per_task"),
    *("gpus_per_node", "sbatch", "array_parallelism"),
)
"""Keys of submit.slurm that are settled once a job is there."""
TOLD = 90.0
"""Seconds before its time limit at which slurm/train.sbatch asks for the job to be told to stop."""


class Here(Slurm):
    """The job around this process."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.scripts = Scripts(config, is_queued=False)

    def render(self, run: RunDir, plan: Plan) -> Launch:
        nodes = int(_variable(os.environ, "SLURM_JOB_NUM_NODES"))
        if plan.nodes != nodes:
            key = "submit.slurm.nodes" if self._config.submit.slurm.nodes is not None else "cluster.nodes"
            raise ConfigError(key, plan.nodes, f"this job has {nodes}", hint=f"sbatch --nodes={plan.nodes}")
        self._check_told()
        return super().render(run, plan)

    def _check_told(self) -> None:
        """That the job is told to stop early enough to save. Slurm doesn't say when: signal_before can.

        Raises:
            ConfigError: it isn't.
        """
        given = self._config.checkpoint.stop_within
        within = seconds(given, "checkpoint.stop_within")
        if self._config.submit.slurm.signal_before is None and within > TOLD:
            problem = f"slurm/train.sbatch has the job told {TOLD:g} s before its time limit: a save would be cut"
            before = round(within + LEAD)
            hint = f"sbatch --signal=B:USR1@{before}, and submit.slurm.signal_before={before} to say so"
            raise ConfigError("checkpoint.stop_within", given, problem, hint=hint)

    def submit(self, run: RunDir, plan: Plan, launch: Launch, console: Console, *, live: bool) -> int:
        assert launch.script_text is not None
        hand_over(run, launch.script_text)


def choose_job(config: Config) -> Slurm:
    """The job of a run: one of its own, or the one around this command."""
    return Slurm(config) if slurm_job.around() is None else Here(config)


def hand_over(run: RunDir, script: str) -> NoReturn:
    """Makes this process the batch script of the run, which from now on takes what Slurm sends."""
    write_atomic(run.path / SCRIPT, script)
    run.write_status(state=State.submitted, job={"id": slurm_job.around()}, pids={}, exit_code=None, error=None)
    let_go(run)
    sys.stdout.flush()
    sys.stderr.flush()
    left = {name: value for name, value in os.environ.items() if name != slurm_job.IN_JOB}
    os.execvpe("bash", ["bash", str(run.path / SCRIPT)], left)


def take_up(run: RunDir) -> None:
    """Goes on with a run that this job has begun before it was queued again; returns where it hasn't."""
    if slurm_job.starts_before() == 0:
        return
    said = run.read_status()
    is_begun = said["state"] == State.planned.value  # it was cut before it could say whose the run is
    if is_begun or (said.get("job") or {}).get("id") == slurm_job.around():
        hand_over(run, str(run.read_json(run.plan)["launch"]["script_text"]))


def job_overrides(given: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """What the job around the command says of nodes, ranks, GPUs and cores, for overrides that stand before `given`.

    Raises:
        LauncherError: there is no job, or `given` asks for what only sbatch can give.
    """
    keys = {key: value for key, _, value in (one.lstrip("+~").partition("=") for one in given)}
    for name in (f"submit.slurm.{one}" for one in _OF_SBATCH):
        if name in keys:
            hint = "give it to sbatch as an option"
            raise ConfigError(name, keys[name], "has no effect in a job that is there", hint=hint)
    nodes = int(_variable(environ, "SLURM_JOB_NUM_NODES"))
    cores = [
        int(one) for one in re.findall(r"(\d+)(?:\(x\d+\))?(?:,|$)", _variable(environ, "SLURM_JOB_CPUS_PER_NODE"))
    ]
    found = ["submit=slurm"] if "submit" not in keys else []
    found += [f"submit.slurm.nodes={nodes}", f"submit.slurm.cpus_per_task={min(cores)}"]
    gpus = environ.get("SLURM_GPUS_ON_NODE", "0")
    if gpus != "0":
        found.append(f"submit.slurm.gpus_per_node={gpus}")
    tasks = _tasks_per_node(environ, nodes)
    if tasks > 1 and "cluster.ranks_per_node" not in keys:
        found.append(f"cluster.ranks_per_node={tasks}")
    return found


def check_place(composed: DictConfig) -> None:
    """That a composed run can start in the job around the command, and finds its folder when that is queued again.

    Raises:
        ConfigError: it can't.
    """
    if composed.submit.kind is not SubmitKind.slurm:
        problem = f"the ranks start in the job around this command, for {slurm_job.IN_JOB} is set"
        raise ConfigError("submit", composed.submit.kind, problem, hint="submit=slurm, or leave it out")
    where, name = composed.hydra.run._get_node("dir")._value(), composed.run._get_node("name")._value()
    if "${now:" in f"{where} {name}":
        problem = "has the time in it: a job that is queued again would not find its folder"
        hint = "${launcher.stamp:} is the number of the job there"
        raise ConfigError("hydra.run.dir", f"{where} (run.name={name})", problem, hint=hint)


def _tasks_per_node(environ: Mapping[str, str], nodes: int) -> int:
    """The tasks that the job was asked to have on a node, 1 where nobody asked. Raises LauncherError."""
    if environ.get("SLURM_NTASKS_PER_NODE"):
        return int(environ["SLURM_NTASKS_PER_NODE"])
    tasks = int(environ.get("SLURM_NTASKS") or nodes)
    if tasks % nodes:
        options = shlex.join([f"--nodes={nodes}", "--ntasks-per-node=N"])
        raise LauncherError(f"the {tasks} tasks of this job aren't the same number on each of {nodes} nodes: {options}")
    return tasks // nodes


def _variable(environ: Mapping[str, str], name: str) -> str:
    """A variable of the job. Raises LauncherError."""
    value = environ.get(name)
    if not value:
        raise LauncherError(f"{slurm_job.IN_JOB} is set, and this is no job of Slurm: {name} is missing")
    return value
