"""What can't be right in the keys of a job of Slurm, and which keys of other places have no effect."""

import re
from dataclasses import fields

from launcher.config.choices import ContainerRuntime, SlurmAgent, SubmitKind
from launcher.config.docker import DockerConfig
from launcher.config.places import ClusterConfig, SlurmConfig
from launcher.config.schema import Config
from launcher.config.times import seconds
from launcher.errors import ConfigError

KEY = "submit.slurm"


def check_submit(config: Config) -> None:
    """Raises ConfigError for the first key that can't be right, or has no effect."""
    slurm, kind = config.submit.slurm, config.submit.kind
    for other in (SubmitKind.slurm, SubmitKind.docker):
        if other is not kind:
            _check_unused(kind, other, getattr(config.submit, other.name))
    if kind is not SubmitKind.slurm:
        return
    if slurm.signal_before is not None:
        seconds(slurm.signal_before, f"{KEY}.signal_before")
    if slurm.gres is not None and slurm.gpus_per_node is not None:
        raise ConfigError(f"{KEY}.gres", slurm.gres, "stands beside gpus_per_node: give one of them")
    for key, least in (("requeue", 0), ("cpus_per_task", 1), ("gpus_per_node", 0), ("array_parallelism", 1)):
        value = getattr(slurm, key)
        if value is not None and value < least:
            raise ConfigError(f"{KEY}.{key}", value, f"must be at least {least}")
    for index, one in enumerate(slurm.env):
        if not re.match(r"[A-Za-z_]\w*=", one, re.ASCII):
            raise ConfigError(f"{KEY}.env[{index}]", one, "must be NAME=VALUE")
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
    restarts, cluster, plain = config.training.max_restarts, config.cluster, ClusterConfig()
    asked = [
        ("training.max_restarts", restarts, restarts in ("auto", 0), "starts ranks again"),
        ("cluster.min_nodes", cluster.min_nodes, cluster.min_nodes is None, "goes on with fewer nodes"),
        (
            "cluster.wait_for_nodes",
            cluster.wait_for_nodes,
            cluster.wait_for_nodes == plain.wait_for_nodes,
            "waits for further nodes",
        ),
    ]
    for key, value, is_fine, what in asked:
        if not is_fine:
            problem = f"only an agent {what}, and {KEY}.agent is none"
            raise ConfigError(key, value, problem, hint=f"{KEY}.agent=torchrun, or leave {key} out")
