"""What saves the checkpoints of a run."""

from collections.abc import Callable

import torch.distributed as dist

from launcher.config.choices import Offload
from launcher.config.schema import Config
from launcher.plan.plan import checkpoint_every_seconds
from launcher.plan.timing import Timing
from launcher.run_dir import RunDir
from launcher.train.checkpoint.saver import Saver, Schedule
from launcher.train.checkpoint.store import Ranks
from launcher.train.parallel.mesh import Place
from launcher.train.sharding.base import Sharding
from launcher.train.sharding.state import State, WholeState
from launcher.train.sharding.zero import Zero
from launcher.train.sharding.zero_state import ZeroState


def make_saver(
    config: Config, timing: Timing, run: RunDir, sharding: Sharding, place: Place, say: Callable[[str], None]
) -> Saver | None:
    """The saver of this run's checkpoints. Every rank calls it alike, for it makes a process group. None: states lie
    on a disk, where no checkpoint looks."""
    if config.strategy.offload is Offload.nvme:
        return None
    every = config.checkpoint
    schedule = Schedule(
        timing.checkpoint_every,
        checkpoint_every_seconds(config),
        every.keep_last,
        every.async_save,
        every.on_error,
    )
    return Saver(run, state_of(sharding, place), sharding, ranks_of(place), schedule, say)


def state_of(sharding: Sharding, place: Place) -> State:
    """The state of this rank's sharding."""
    return ZeroState(sharding, place) if isinstance(sharding, Zero) else WholeState(sharding, place)


def ranks_of(place: Place) -> Ranks:
    """All ranks of the run, with a group of their own for what is said beside training."""
    if place.world_size == 1:
        return Ranks()
    return Ranks(dist.get_rank(), place.world_size, dist.new_group(backend="gloo"))
