"""A rank without an agent: it looks after its own heart."""

import os
import threading
import time

from launcher.config.schema import Config
from launcher.errors import Exit, LauncherError
from launcher.run_dir import RunDir
from launcher.train import hangs, heart
from launcher.train.limits import limits

LOOK_EVERY = 1.0


class Hung(LauncherError):
    """This rank has done nothing for training.hang_after."""

    exit_code = Exit.RANK_FAILED


def watch_this_rank(run: RunDir, rank: int, config: Config) -> None:
    """Ends this process once it hangs, its stacks in its log, unless training.hang_after is null.

    A rank that waits for others isn't the one that hangs: where all wait, torch's own timeout ends them.
    """
    after = limits(config).hang_after
    if after is None:
        return
    heart.start_alone()
    threading.Thread(target=_watch, args=(run, rank, after), daemon=True).start()


def _watch(run: RunDir, rank: int, after: float) -> None:
    """Raises Hung, by which a rank ends at once: see `worker.end_with_threads`."""
    while True:
        time.sleep(min(LOOK_EVERY, after / 4))
        said = heart.own_pulse()
        if said is None or said.waits or time.monotonic() - said.time <= after:
            continue
        how = hangs.Hang([rank], time.monotonic() - said.time, said.update).how
        log = run.rank_log(rank)
        hangs.write_stacks({rank: log}, {rank: os.getpid()}, f"rank {rank} {how}: the Python stacks follow")
        raise Hung(f"{how} at update {said.update}; stacks in {log.parent.name}/{log.name}")
