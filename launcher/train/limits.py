"""What the configuration allows those who look after a run's ranks."""

from dataclasses import dataclass

from launcher.config.choices import SlurmAgent
from launcher.config.schema import Config
from launcher.config.times import seconds
from launcher.plan.mesh import least_nodes

AUTO_RESTARTS = 3
"""What training.max_restarts=auto allows once there is a checkpoint."""


@dataclass(frozen=True)
class Limits:
    """Times in seconds; None: without end."""

    stop_within: float
    time_limit: float | None
    hang_after: float | None
    max_restarts: int
    needs_checkpoint: bool = False
    """Whether ranks start again only where there is a checkpoint to start from."""
    min_nodes: int = 1
    """Nodes without which they don't."""
    device_hours: float | None = None
    """Hours times ranks that the run may use in all."""


def limits(config: Config) -> Limits:
    """Those of a training. Without an agent no ranks start again."""
    training, stop_within = config.training, config.checkpoint.stop_within
    limit, after, restarts = training.time_limit, training.hang_after, training.max_restarts
    is_auto, has_agent = restarts == "auto", config.submit.slurm.agent is not SlurmAgent.none
    return Limits(
        seconds(stop_within, "checkpoint.stop_within"),
        None if limit is None else seconds(limit, "training.time_limit"),
        None if after is None else seconds(after, "training.hang_after"),
        (AUTO_RESTARTS if is_auto else int(restarts)) if has_agent else 0,
        needs_checkpoint=is_auto and has_agent,
        min_nodes=least_nodes(config.cluster, config.submit),
        device_hours=config.targets.device_hours,
    )
