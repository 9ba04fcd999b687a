"""Options of sbatch and srun that the launcher sets itself: given once more, they would contradict the plan."""

import re
from collections.abc import Mapping

from launcher.config.choices import SlurmAgent
from launcher.config.places import SlurmConfig
from launcher.errors import ConfigError

_CLUSTER = {
    "nodes": "cluster.nodes",
    "ntasks": "cluster.ranks_per_node",
    "ntasks-per-node": "cluster.ranks_per_node",
    "ntasks-per-gpu": "cluster.ranks_per_node",
    "no-kill": "cluster.min_nodes",
}
_GPUS = "submit.slurm.gpus_per_node"
_OF_SBATCH: dict[str, str] = {
    **_CLUSTER,
    **{
        name.replace("_", "-"): f"submit.slurm.{name}"
        for name in (
            *("partition", "account", "qos", "time", "cpus_per_task", "gpus_per_node", "gres", "mem", "constraint"),
            *("reservation", "exclude", "requeue"),
        )
    },
    **dict.fromkeys(("gpus", "gpus-per-task", "gpus-per-socket"), _GPUS),
    "no-requeue": "submit.slurm.requeue=0",
    "signal": "submit.slurm.signal_before",
    "array": "submit.slurm.array_parallelism, and -m for a sweep",
    "job-name": "run.name",
    "output": "hydra.run.dir: it lies in the run's folder",
    "open-mode": "nothing: what a job says is always appended",
}
"""The options of sbatch, and the key that says each."""
_OF_SRUN: dict[str, str] = {
    **_CLUSTER,
    "cpus-per-task": "submit.slurm.cpus_per_task",
    "export": "submit.slurm.env",
    "container-image": "submit.slurm.container_image",
    "container-mounts": "submit.slurm.container_mounts",
    "exclude": "submit.slurm.exclude",
    "time": "submit.slurm.time",
}
_WITHOUT_AGENT = {"kill-on-bad-exit": "submit.slurm.agent: with none, a rank that is lost ends the others"}
_SHORT = {
    "N": "nodes",
    "n": "ntasks",
    "k": "no-kill",
    "p": "partition",
    "A": "account",
    "q": "qos",
    "t": "time",
    "c": "cpus-per-task",
    "G": "gpus",
    "C": "constraint",
    "x": "exclude",
    "a": "array",
    "J": "job-name",
    "o": "output",
    "K": "kill-on-bad-exit",
}


def check_options(slurm: SlurmConfig) -> None:
    """Raises ConfigError for an option that is none, or that the launcher sets itself."""
    for index, one in enumerate(slurm.sbatch):
        if not one.startswith("-"):
            hint = """as in 'submit.slurm.sbatch=["--mail-type=END"]'"""
            raise ConfigError(f"submit.slurm.sbatch[{index}]", one, "must be an option, with its value", hint=hint)
    of_srun = _OF_SRUN | (_WITHOUT_AGENT if slurm.agent is SlurmAgent.none else {})
    for name, options, own in (("sbatch", slurm.sbatch, _OF_SBATCH), ("srun", slurm.srun, of_srun)):
        for index, one in enumerate(options):
            _check(f"submit.slurm.{name}[{index}]", one, own)


def _check(key: str, option: str, own: Mapping[str, str]) -> None:
    if long := re.match(r"--([\w-]+)", option):
        found = [name for name in own if name.startswith(long[1])]  # Slurm takes the beginning of a name for it
    else:
        short = re.match(r"-[HIOQsvWX]*(\w)", option)
        found = [_SHORT[short[1]]] if short and _SHORT.get(short[1]) in own else []
    if found:
        problem = f"the launcher sets --{min(found, key=len)} itself"
        raise ConfigError(key, option, problem, hint=f"what says it is {own[min(found, key=len)]}")
