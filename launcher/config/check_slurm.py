"""What can't be right in the keys of a job of Slurm, and which keys of other places have no effect."""

import re
from dataclasses import fields

from launcher.config.choices import ContainerRuntime, Device, SlurmAgent, SubmitKind
from launcher.config.docker import DockerConfig
from launcher.config.places import ClusterConfig, SlurmConfig
from launcher.config.schema import Config
from launcher.config.slurm_options import check_options
from launcher.config.times import limit, time_to_save
from launcher.errors import ConfigError

KEY = "submit.slurm"
LONGEST_LEAD = 65535
"""Seconds that sbatch's --signal takes at most."""
_NO_LIMIT = ("UNLIMITED", "INFINITE")


def check_submit(config: Config) -> None:
    """Raises ConfigError for the first key that can't be right, or has no effect."""
    slurm, kind = config.submit.slurm, config.submit.kind
    for other in (SubmitKind.slurm, SubmitKind.docker):
        if other is not kind:
            _check_unused(kind, other, getattr(config.submit, other.name))
    if kind is not SubmitKind.local:
        _check_empty(kind, getattr(config.submit, kind.name))
    if kind is not SubmitKind.slurm:
        return
    _check_signal(config)
    _check_gres(slurm, config.cluster)
    for key, least in (("requeue", 0), ("cpus_per_task", 1), ("gpus_per_node", 0), ("array_parallelism", 1)):
        value = getattr(slurm, key)
        if value is not None and value < least:
            raise ConfigError(f"{KEY}.{key}", value, f"must be at least {least}")
    for index, one in enumerate(slurm.env):
        if not re.match(r"[A-Za-z_]\w*=", one, re.ASCII):
            raise ConfigError(f"{KEY}.env[{index}]", one, "must be NAME=VALUE")
    check_options(slurm)
    _check_container(slurm)
    if slurm.agent is SlurmAgent.none:
        _check_without_agent(config)


def _check_unused(kind: SubmitKind, other: SubmitKind, section: SlurmConfig | DockerConfig) -> None:
    unused = type(section)()
    for one in fields(section):
        value = getattr(section, one.name)
        if value != getattr(unused, one.name):
            problem, hint = f"has no effect: submit is {kind.name}", f"submit={other.name}, or leave it out"
            raise ConfigError(f"submit.{other.name}.{one.name}", value, problem, hint=hint)


def _check_empty(kind: SubmitKind, section: SlurmConfig | DockerConfig) -> None:
    """That no text is empty, which Slurm and Docker would take for a value."""
    for one in fields(section):
        key, value = f"submit.{kind.name}.{one.name}", getattr(section, one.name)
        if isinstance(value, str) and not value.strip():
            raise ConfigError(key, f"'{value}'", "is empty", hint="leave it out for the default")
        for index, item in enumerate(value if isinstance(value, list) and one.name != "setup" else ()):
            if not item.strip():
                raise ConfigError(f"{key}[{index}]", f"'{item}'", "is empty", hint="leave it out")


def lead(config: Config) -> float:
    """Seconds before the time limit at which a job is told to stop. Raises ConfigError."""
    return time_to_save(config.submit.slurm.signal_before, f"{KEY}.signal_before", config.checkpoint.stop_within)


def _check_signal(config: Config) -> None:
    """That a job is told to stop after it starts, and early enough to save."""
    slurm, told = config.submit.slurm, lead(config)
    if told > LONGEST_LEAD:
        problem = f"sbatch takes at most {LONGEST_LEAD} s before the limit (its --signal)"
        if slurm.signal_before is None:
            problem = f"and 30 s are what a job is told before its limit, and {problem}"
            raise ConfigError("checkpoint.stop_within", config.checkpoint.stop_within, problem)
        raise ConfigError(f"{KEY}.signal_before", slurm.signal_before, problem)
    allowed = None if slurm.time is None else limit(slurm.time)
    if slurm.time is not None and allowed is None and slurm.time.strip().upper() not in _NO_LIMIT:
        hint = "minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes or UNLIMITED"
        raise ConfigError(f"{KEY}.time", slurm.time, "is no time that sbatch reads", hint=hint)
    if allowed is not None and told >= allowed:
        given = "checkpoint.stop_within and 30 s" if slurm.signal_before is None else f"{KEY}.signal_before"
        problem = f"the job would be told to stop at its start: {told:g} s ({given}) before this limit"
        raise ConfigError(f"{KEY}.time", slurm.time, problem, hint="a longer time, or tell it later")


def _check_gres(slurm: SlurmConfig, cluster: ClusterConfig) -> None:
    """That it is said what ranks compute on, where that stands in Slurm's own words alone."""
    if slurm.gres is None:
        return
    if slurm.gpus_per_node is not None:
        raise ConfigError(f"{KEY}.gres", slurm.gres, "stands beside gpus_per_node: give one of them")
    problem = f"must be given with {KEY}.gres, which doesn't say here how many GPUs a node has"
    if cluster.device is Device.auto:
        hint = "cluster.device=cuda cluster.ranks_per_node=N; cluster.device=cpu where these are no GPUs"
        raise ConfigError("cluster.device", cluster.device, problem, hint=hint)
    if cluster.device is Device.cuda and cluster.ranks_per_node == "auto":
        raise ConfigError("cluster.ranks_per_node", "auto", problem, hint="cluster.ranks_per_node=N")


def _check_container(slurm: SlurmConfig) -> None:
    if slurm.container_image is not None:
        return
    given: list[tuple[str, object]] = [("container_mounts", slurm.container_mounts)] if slurm.container_mounts else []
    if slurm.container_runtime is not ContainerRuntime.pyxis:
        given.append(("container_runtime", slurm.container_runtime))
    for name, value in given:
        hint = f"{KEY}.container_image=IMAGE"
        raise ConfigError(f"{KEY}.{name}", value, f"has no effect without {KEY}.container_image", hint=hint)


def _check_without_agent(config: Config) -> None:
    """What only an agent can do."""
    restarts, cluster = config.training.max_restarts, config.cluster
    asked = [
        ("training.max_restarts", restarts, restarts in ("auto", 0), "starts ranks again"),
        ("cluster.min_nodes", cluster.min_nodes, cluster.min_nodes is None, "goes on with fewer nodes"),
    ]
    for key, value, is_fine, what in asked:
        if not is_fine:
            problem = f"only an agent {what}, and {KEY}.agent is none"
            raise ConfigError(key, value, problem, hint=f"{KEY}.agent=torchrun, or leave {key} out")
