"""The schema of where ranks run: the nodes, and how they are started."""

from dataclasses import dataclass
from typing import Any

from omegaconf import MISSING

from launcher.config.choices import Device, SubmitKind


@dataclass
class ClusterConfig:
    device: Device = Device.auto
    """What the ranks compute on; auto: CUDA where there is any."""
    ranks_per_node: Any = "auto"
    """Ranks on a node; auto: one per GPU, or min(2, cores) on CPU."""
    nodes: Any = 1
    """Nodes. submit=local starts them all on this machine, each with an agent of its own: to try how a run behaves."""
    min_nodes: Any = None
    """Where nodes are lost, the run goes on with as few as these, with the same update; null: it needs all of them."""
    wait_for_nodes: Any = "30 seconds"
    """How long a start waits for further nodes once there are cluster.min_nodes."""


@dataclass
class SubmitConfig:
    kind: SubmitKind = MISSING
    """Where the ranks start."""
