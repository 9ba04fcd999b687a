"""The schema of where ranks run: the nodes, and how they are started."""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from launcher.config.choices import ContainerRuntime, Device, SlurmAgent, SubmitKind
from launcher.config.docker import DockerConfig


@dataclass
class ClusterConfig:
    device: Device = Device.auto
    """What the ranks compute on; auto: CUDA where there is any."""
    ranks_per_node: Any = "auto"
    """Ranks on a node; auto: one per GPU, or min(2, cores) on CPU."""
    nodes: Any = "auto"
    """Nodes; auto: submit.slurm.nodes where that is given, else 1. submit=local starts them all on this machine, each
    with an agent of its own: to try how a run behaves."""
    min_nodes: Any = None
    """Where nodes are lost, the run goes on with as few as these, with the same update; null: it needs all of them."""
    wait_for_nodes: Any = "30 seconds"
    """How long a start waits for further nodes once there are cluster.min_nodes."""


@dataclass
class SlurmConfig:
    nodes: Any = None
    """Nodes of the job: another name of cluster.nodes; of the two either is enough."""
    agent: SlurmAgent = SlurmAgent.torchrun
    """What starts a node's ranks: torchrun, torch's agent, in one task a node; none: Slurm itself, in one task a rank.
    Without an agent no rank starts again within the job."""
    partition: str | None = None
    """Where the job is queued; null, here and below: the option isn't given, and Slurm's default holds."""
    account: str | None = None
    """Who pays."""
    qos: str | None = None
    """Slurm's quality of service."""
    time: str | None = None
    """The time limit, as Slurm reads it: `30` minutes, `2:00:00`, `1-12`, or UNLIMITED."""
    cpus_per_task: int | None = None
    """Cores of a node, which its ranks and their loader workers share: Slurm has one task a node."""
    gpus_per_node: int | None = None
    """GPUs of a node; as many ranks start there unless cluster.ranks_per_node says otherwise."""
    gres: str | None = None
    """Another way to ask for GPUs, as in `gpu:a100:4`; then cluster.device and cluster.ranks_per_node are needed."""
    mem: str | None = None
    """Memory of a node, as in `64G`; `0`: all it has."""
    constraint: str | None = None
    """Features that the nodes must have, as in `a100&nvlink`."""
    reservation: str | None = None
    """The reservation that the job is part of."""
    exclude: str | None = None
    """Nodes that the job must not have, as in `node[03,07-08]`."""
    signal_before: Any = None
    """How long before the time limit the job is told to stop, as a time; null: checkpoint.stop_within + 30 seconds."""
    requeue: int = 10
    """How often a job that was stopped with a checkpoint (time limit, preemption) is queued again; 0: never, not by
    Slurm where a node fails either."""
    setup: list[str] = field(default_factory=list)
    """Lines of the batch script before the ranks start, as in `'submit.slurm.setup=["module load cuda"]'`."""
    env: list[str] = field(default_factory=list)
    """Environment variables of the ranks, as in `'submit.slurm.env=["NCCL_DEBUG=INFO"]'`. They stand in a file of the
    run: no place for secrets, which sbatch takes along from where the command is given."""
    container_image: str | None = None
    """Runs the agents, or the ranks where there are none, in this image, by the `python3` in it, which has to find this
    package."""
    container_runtime: ContainerRuntime = ContainerRuntime.pyxis
    """What runs it: pyxis, the plugin of srun; apptainer, the command of the nodes."""
    container_mounts: list[str] = field(default_factory=list)
    """Folders of the nodes that are seen in it, as in `submit.slurm.container_mounts=[/data:/data]`; the run's folder
    has to be among them."""
    array_parallelism: int | None = None
    """How many runs of a sweep run at a time; null: as many as Slurm finds room for."""
    sbatch: list[str] = field(default_factory=list)
    """Further options of sbatch, a line each, as in `'submit.slurm.sbatch=["--mail-type=END"]'`."""
    srun: list[str] = field(default_factory=list)
    """Further options of srun, as in `'submit.slurm.srun=["--cpu-bind=cores"]'`."""


@dataclass
class SubmitConfig:
    kind: SubmitKind = MISSING
    """Where the ranks start."""
    wait: bool = False
    """Under submit=slurm follow the job to its end. submit=local and submit=docker always do."""
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    """The job of submit=slurm: options of its own and Slurm's."""
    docker: DockerConfig = field(default_factory=DockerConfig)
    """The containers of submit=docker: one a node, on this machine."""
