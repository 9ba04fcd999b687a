"""The entry of a rank that Slurm starts itself: ``srun python -m launcher.train.task RUN_DIR``, one task a rank."""

import os
import sys
from collections.abc import Mapping

from launcher.errors import LauncherError
from launcher.outcome import ATTEMPT, RENDEZVOUS, STEP
from launcher.train.worker import run_and_leave

NEEDED = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_STEP_NUM_NODES", RENDEZVOUS, STEP, ATTEMPT)
"""Variables of the task, and of the batch script around it."""


def rank_variables(given: Mapping[str, str]) -> dict[str, str]:
    """torch's variables of the rank that this task of Slurm is.

    Raises:
        LauncherError: it is none: a rank never takes this machine for all there is.
    """
    missing = [name for name in NEEDED if not given.get(name)]
    if missing:
        raise LauncherError(
            f"this is no task of a run's job: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing\n"
            "  the batch script in the run's folder starts the ranks: sbatch RUN/job.sbatch"
        )
    host, _, port = given[RENDEZVOUS].rpartition(":")
    world = int(given["SLURM_NTASKS"])
    return {
        "RANK": given["SLURM_PROCID"],
        "LOCAL_RANK": given["SLURM_LOCALID"],
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world // int(given["SLURM_STEP_NUM_NODES"])),
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
    }


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m launcher.train.task RUN_DIR")
    try:
        os.environ.update(rank_variables(os.environ))
    except LauncherError as error:
        print(f"launcher.train.task: {error}", file=sys.stderr)
        sys.exit(int(error.exit_code))
    run_and_leave(sys.argv[1])
