"""A process of its own that asks torch in which order the ranks of a pipeline work: ``python -m
launcher.train.drawn_schedule ANSWER`` reads ``{schedule, pp, stages_per_rank, micro_batches}`` as JSON from standard
input, and writes a list of each rank's actions, [kind, stage, micro-batch], to the open file that ANSWER numbers."""

import json
import os
import signal
import sys

from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from launcher.process import end_with_parent
from launcher.train.parallel.schedules import CLASSES

Order = list[tuple[str, int, int]]


def torch_orders(schedule: str, pp: int, stages_per_rank: int, micro_batches: int) -> list[Order]:
    """What each pipeline rank computes in one run, in order: the kind (F, B, I, W), the stage and the micro-batch.

    Raises:
        ValueError: torch's class can't run so many micro-batches.
    """
    ranks: list[Order] = []
    for actions in get_schedule_ops(CLASSES[schedule], pp, micro_batches, stages_per_rank):
        order: Order = []
        for one in actions:
            if one is not None and one.microbatch_index is not None:
                order.append((str(one.computation_type.value), one.stage_index, one.microbatch_index))
        ranks.append(_numbered_from_0(order) if schedule == "1f1b" else order)
    return ranks


def _numbered_from_0(order: Order) -> Order:
    """torch 2.13 writes the forwards of 1F1B's last rank down as 1 to n, and runs 0 to n - 1."""
    first = min(micro_batch for kind, _, micro_batch in order if kind == "F")
    return [(kind, stage, number - first if kind == "F" else number) for kind, stage, number in order]


if __name__ == "__main__":
    end_with_parent(signal.SIGKILL)
    said = torch_orders(**json.load(sys.stdin))
    with os.fdopen(int(sys.argv[1]), "w", encoding="utf-8") as file:
        json.dump(said, file)
