"""How many ranks there are and how they are arranged."""

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.config.choices import Device, StrategyName, SubmitKind
from launcher.config.docker import ALL, DockerConfig
from launcher.config.parallel import MeshConfig
from launcher.config.places import ClusterConfig, SubmitConfig
from launcher.errors import ConfigError
from launcher.plan.batch import parse_count


@dataclass(frozen=True)
class World:
    """The ranks of a run: where they are and what they compute on."""

    nodes: int
    ranks_per_node: int
    device: Device
    """cpu or cuda, no longer auto."""
    notes: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """world_size: ranks on all nodes."""
        return self.nodes * self.ranks_per_node

    def fields(self) -> dict[str, Any]:
        """The fields of the plan that follow from it."""
        places = {"nodes": self.nodes, "ranks_per_node": self.ranks_per_node}
        return {"world_size": self.size, **places, "device": self.device.value}


@dataclass(frozen=True)
class Mesh:
    """The degrees: world_size = dp_replicate x dp_shard x pp."""

    dp_replicate: int
    dp_shard: int
    pp: int = 1

    @property
    def data_parallel_degree(self) -> int:
        """Ranks that see different samples; pipeline stages share theirs and don't count."""
        return self.dp_replicate * self.dp_shard


def available_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def visible_gpus() -> int:
    """GPUs of this node without asking torch: what the NVIDIA driver lists, narrowed by CUDA_VISIBLE_DEVICES."""
    driver = Path("/proc/driver/nvidia/gpus")
    found = len(list(driver.iterdir())) if driver.is_dir() else 0
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return found
    return min(found, len([one for one in chosen.split(",") if one.strip() not in ("", "-1")]))


def gpu_names(count: int) -> list[str]:
    """What the first `count` GPUs of this machine are called: numbers, or what CUDA_VISIBLE_DEVICES has."""
    chosen = [one.strip() for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one.strip()]
    return chosen[:count] if len(chosen) >= count else [str(one) for one in range(count)]


def asked_nodes(cluster: ClusterConfig, submit: SubmitConfig) -> int:
    """The nodes that a run is asked to have, by either of the two keys for that.

    Raises:
        ConfigError: one is no number of nodes, or they say different numbers.
    """
    nodes = parse_count("cluster.nodes", cluster.nodes, allow_auto=True)
    of_job = parse_count("submit.slurm.nodes", submit.slurm.nodes, allow_null=True)
    if of_job is not None and nodes not in ("auto", of_job):
        problem = f"cluster.nodes={nodes} says another number of nodes"
        raise ConfigError("submit.slurm.nodes", of_job, problem, hint="give one of them, or both alike")
    return (of_job or 1) if nodes == "auto" else nodes


def least_nodes(cluster: ClusterConfig, submit: SubmitConfig) -> int:
    """The nodes without which a run doesn't go on. Raises ConfigError."""
    nodes = asked_nodes(cluster, submit)
    least = parse_count("cluster.min_nodes", cluster.min_nodes, allow_null=True)
    if least is not None and least > nodes:
        problem = f"is more than the {nodes} that the run has"
        raise ConfigError("cluster.min_nodes", least, problem, hint=f"at most {nodes}")
    return least or nodes


def gpus_of_container(docker: DockerConfig, nodes: int) -> int:
    """The GPUs of each container. Those of this machine are shared out among all that run at a time.

    Raises:
        ConfigError: there aren't so many.
    """
    if docker.gpus is None:
        return 0
    here, containers = visible_gpus(), nodes * docker.parallelism
    each: int = here // containers if docker.gpus == ALL else docker.gpus
    if (docker.gpus == ALL and not each) or (here and each * containers > here):
        problem = f"this machine has {here} GPUs, and {containers} containers run at a time"
        raise ConfigError("submit.docker.gpus", docker.gpus, problem, hint="fewer, or null: on CPU")
    return each


def _gpus_and_cores(
    submit: SubmitConfig, device: Device, asked: object, cuda_devices: int | None, nodes: int
) -> tuple[int, int | None]:
    """Those of a node: of this one, of a container, or of what Slurm is asked for, where cores may be left to it
    (None)."""
    if submit.kind is SubmitKind.docker:
        gpus = gpus_of_container(submit.docker, nodes)
        if device is Device.cuda and not gpus:
            raise ConfigError("cluster.device", "cuda", "no GPUs are asked for", hint="submit.docker.gpus=all")
        return gpus, math.ceil(submit.docker.cpus or available_cores())
    if submit.kind is not SubmitKind.slurm:
        return visible_gpus() if cuda_devices is None else cuda_devices, available_cores()
    slurm = submit.slurm
    gpus = slurm.gpus_per_node or 0
    if device is Device.cuda and not gpus:
        if slurm.gres is None:
            problem = "no GPUs are asked for"
            raise ConfigError("cluster.device", "cuda", problem, hint="submit.slurm.gpus_per_node=N")
        gpus = parse_count("cluster.ranks_per_node", asked)  # which Slurm's own word for GPUs doesn't say here
    return gpus, slurm.cpus_per_task


def solve_world(
    cluster: ClusterConfig, strategy: StrategyName, cuda_devices: int | None, submit: SubmitConfig
) -> World:
    """The ranks on nodes that are like this one, or as Slurm is asked for. `cuda_devices`: what torch sees here; None:
    torch was not asked.

    Raises:
        ConfigError: more CUDA ranks than GPUs, no GPU where one is asked for, `single` with several ranks.
    """
    least_nodes(cluster, submit)
    nodes = asked_nodes(cluster, submit)
    gpus, cores = _gpus_and_cores(submit, cluster.device, cluster.ranks_per_node, cuda_devices, nodes)
    device = cluster.device
    if device is Device.auto:
        device = Device.cuda if gpus else Device.cpu
    if device is Device.cuda and not gpus:
        problem = "there is no GPU here that torch can use"
        raise ConfigError("cluster.device", "cuda", problem, hint="cluster.device=cpu")
    asked = parse_count("cluster.ranks_per_node", cluster.ranks_per_node, allow_auto=True)
    automatic = 1 if strategy is StrategyName.single else gpus if device is Device.cuda else min(2, cores or 2)
    count = automatic if asked == "auto" else asked
    if strategy is StrategyName.single and count * nodes > 1:
        raise ConfigError("strategy", "single", f"runs on one rank, not on {count * nodes}", hint="strategy=ddp")
    notes = _unused_gpus(submit, device, count, gpus)
    if device is Device.cuda and count > gpus:
        raise ConfigError("cluster.ranks_per_node", count, f"there are {gpus} GPUs, and a rank needs one of its own")
    if device is Device.cpu and cores is not None and count > cores:
        notes.append(f"{count} ranks share {cores} cores: right, but slower than {cores} ranks")
    return World(nodes, count, device, tuple(notes))


def _unused_gpus(submit: SubmitConfig, device: Device, ranks: int, gpus: int) -> list[str]:
    """A note where a node is asked to have GPUs that its ranks don't use."""
    slurm = submit.slurm
    if submit.kind is SubmitKind.slurm and slurm.gres is not None and device is Device.cpu:
        is_gpus = slurm.gres.startswith(("gpu", "gres/gpu"))
        return [f"submit.slurm.gres={slurm.gres}: the ranks compute on CPU, and use no GPU"] if is_gpus else []
    key = {SubmitKind.slurm: "submit.slurm.gpus_per_node", SubmitKind.docker: "submit.docker.gpus"}.get(submit.kind)
    used = ranks if device is Device.cuda else 0
    if key is None or used >= gpus:
        return []
    return [f"{key}: the ranks of a node use {used} of its {gpus} GPUs"]


def solve_mesh(mesh: MeshConfig, world_size: int, strategy: StrategyName) -> Mesh:
    """The degrees for this world; -1 is the rest, and null what the strategy makes of it: one that shards does so over
    all ranks, another copies.

    Raises:
        ConfigError: degrees that don't multiply to world_size, or that the strategy can't have.
    """
    pp = _pipeline_degree(mesh, world_size, strategy)
    if strategy.zero_stage and mesh.dp_replicate not in (None, 1):
        problem = f"strategy={strategy.value} shards over all ranks: must be 1"
        raise ConfigError("mesh.dp_replicate", mesh.dp_replicate, problem, hint="strategy=fsdp has copies of shards")
    given = _without_null(mesh, strategy)
    for name, degree in given.items():
        if degree != -1 and degree < 1:
            raise ConfigError(f"mesh.{name}", degree, "must be at least 1, or -1 for the rest of the world")
    if not strategy.shards and given["dp_shard"] != 1:
        raise ConfigError("mesh.dp_shard", mesh.dp_shard, f"strategy={strategy.value} keeps whole copies: must be 1")
    unknown = [name for name, degree in given.items() if degree == -1]
    if len(unknown) == 2:
        raise ConfigError("mesh.dp_replicate", -1, "only one of mesh.dp_replicate and mesh.dp_shard may be -1")
    data_parallel = world_size // pp
    known = 1
    for degree in given.values():
        known *= degree if degree != -1 else 1
    if unknown:
        if data_parallel % known:
            name = next(name for name in given if name not in unknown)
            raise ConfigError(f"mesh.{name}", known, f"doesn't divide the {data_parallel} data-parallel ranks")
        given[unknown[0]] = data_parallel // known
    solved = Mesh(given["dp_replicate"], given["dp_shard"], pp)
    if solved.data_parallel_degree != data_parallel:
        product = f"dp_replicate {solved.dp_replicate} x dp_shard {solved.dp_shard} x pp {pp}"
        problem = f"{product} is not the world of {world_size} ranks"
        name = "dp_replicate" if mesh.dp_replicate is not None else "dp_shard"
        raise ConfigError(f"mesh.{name}", getattr(mesh, name), problem, hint=f"mesh.{name}=-1 takes the rest")
    return solved


def _without_null(mesh: MeshConfig, strategy: StrategyName) -> dict[str, int]:
    replicate, shard = mesh.dp_replicate, mesh.dp_shard
    if shard is None:
        shard = -1 if strategy.shards and replicate != -1 else 1
    if replicate is None:
        replicate = 1 if shard == -1 else -1
    return {"dp_replicate": replicate, "dp_shard": shard}


def _pipeline_degree(mesh: MeshConfig, world_size: int, strategy: StrategyName) -> int:
    pp = mesh.pp
    if pp < 1:
        raise ConfigError("mesh.pp", pp, "must be at least 1; 1: no pipeline")
    if pp > 1 and strategy is StrategyName.single:
        raise ConfigError("strategy", "single", f"runs on one rank, not on the {pp} of mesh.pp", hint="strategy=ddp")
    if pp > 1 and strategy.zero_stage > 1:
        problem = (
            f"strategy={strategy.value} can't run in stages: a stage runs its own backward, which DeepSpeed's engine "
            "doesn't allow, and DeepSpeed's own pipeline refuses ZeRO-2 and ZeRO-3 too"
        )
        raise ConfigError("mesh.pp", pp, problem, hint=f"strategy=fsdp mesh.pp={pp}")
    if world_size % pp:
        fitting = [str(one) for one in range(1, world_size + 1) if world_size % one == 0]
        hint = f"mesh.pp={' or '.join(fitting)}, or a multiple of {pp} ranks (cluster.ranks_per_node)"
        raise ConfigError("mesh.pp", pp, f"doesn't divide the world of {world_size} ranks", hint=hint)
    return pp
