"""Ranks that hang: which, and where they are."""

import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from launcher.process import children
from launcher.train import heart

STACKS = signal.SIGUSR2
"""Lets a rank, or one of its loader workers, write the Python stacks of all its threads into its log. faulthandler does
it in the signal's own handler, in C: also where the process waits in a collective and runs no Python."""

WRITTEN_WITHIN = 3.0
"""Seconds that stacks are waited for: a process that the system doesn't let run writes none."""
ALL_WITHIN = 9.0
"""Seconds that all stacks of a node are waited for: an agent that is silent for long is taken for lost."""
_LOOK_EVERY = 0.05
_RECORDER_LOOKS_EVERY = 1.5


@dataclass(frozen=True)
class Hang:
    """Ranks whose hearts stopped first."""

    ranks: list[int]
    seconds: float
    update: int
    waits: bool = False
    """Whether they wait for others: ranks of another node may be those that hang."""

    @property
    def how(self) -> str:
        """In a few words."""
        return f"hung: nothing for {self.seconds:.0f} s"


def find(folder: Path, ranks: Sequence[int], after: float) -> Hang | None:
    """The ranks that have done nothing for `after` seconds; None: they live.

    A rank that waits for others is as alive as they are.
    """
    now = time.monotonic()
    pulses = {rank: said for rank in ranks if (said := heart.pulse(folder, rank)) is not None}
    silent = {rank: said for rank, said in pulses.items() if now - said.time > after}
    stuck = {rank: said for rank, said in silent.items() if not said.waits}
    if not stuck and (not silent or len(silent) < len(pulses)):
        return None
    suspects = stuck or silent
    update = min(said.update for said in suspects.values())
    first = [rank for rank, said in suspects.items() if said.update == update]
    return Hang(first, now - min(suspects[rank].time for rank in first), update, waits=not stuck)


def write_stacks(logs: Mapping[int, Path], processes: Mapping[int, int], why: str) -> None:
    """Lets every rank, then its loader workers, write their Python stacks into the rank's log, and waits for them.

    Args:
        logs: of each rank.
        processes: the id of each rank's process.
        why: a line above them.
    """
    end = time.monotonic() + ALL_WITHIN
    _ask({logs[rank]: process for rank, process in processes.items()}, why, end)
    workers = {logs[rank]: children(process) for rank, process in processes.items()}
    for turn in zip_longest(*workers.values()):  # two would write over each other
        asked = {log: worker for log, worker in zip(workers, turn, strict=True) if worker is not None}
        _ask(asked, "loader worker (process {process}):", end)


def _ask(processes: Mapping[Path, int], why: str, end: float) -> None:
    waiting: dict[Path, int] = {}
    for log, process in processes.items():
        if not _catches(process):
            continue
        with suppress(OSError):  # the disk is full, or the process has ended
            with open(log, "a", encoding="utf-8") as file:
                file.write(f"{why.format(process=process)}\n")
            waiting[log] = log.stat().st_size
            os.kill(process, STACKS)
    end, seen = min(end, time.monotonic() + WRITTEN_WITHIN), dict(waiting)
    while waiting and time.monotonic() < end:
        time.sleep(_LOOK_EVERY)
        for log, before in list(waiting.items()):
            with suppress(OSError):
                size = log.stat().st_size
                if before < size == seen[log]:
                    del waiting[log]
                seen[log] = size


def _catches(process: int) -> bool:
    """Whether the signal has a handler there; without one it would end the process."""
    try:
        lines = Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    masks = [line.split()[1] for line in lines if line.startswith("SigCgt:")]
    return bool(masks) and bool(int(masks[0], 16) >> (STACKS - 1) & 1)


def recorder_environment(folder: Path, logs: Path) -> dict[str, str]:
    """What lets NCCL's flight recorder dump when it is asked to (torch's ProcessGroupNCCL: DumpPipe).

    Each rank makes a named pipe and looks into it once a second; what it dumps, torch's `torchfrtrace` reads. Tried on
    no GPU yet.
    """
    return {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": str(folder / "nccl_"),
        "TORCH_FR_DUMP_TEMP_FILE": str(logs / "nccl_trace_rank_"),
    }


def dump_recorders(folder: Path) -> None:
    """Asks every rank's flight recorder for a dump, where there are any, and gives them the time to look."""
    pipes = list(folder.glob("nccl_*.pipe"))
    for pipe in pipes:
        with suppress(OSError):  # nobody reads it
            descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
            os.write(descriptor, b"1")
            os.close(descriptor)
    if pipes:
        time.sleep(_RECORDER_LOOKS_EVERY)
