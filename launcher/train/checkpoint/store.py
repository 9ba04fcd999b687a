"""One checkpoint on all ranks: written whole or not at all, and read by any layout."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from launcher import checkpoints
from launcher.checkpoints import PROGRESS, Checkpoint
from launcher.errors import LauncherError, StorageError
from launcher.run_dir import RunDir, to_json, write_atomic, writing
from launcher.train.checkpoint import planner
from launcher.train.checkpoint.pieces import Piece

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """Those that save and read together."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    """A gloo group of theirs alone, so that what they say there may run beside training."""

    def all(self, value: Any) -> list[Any]:
        """What every rank has given, in their order."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.group)
        return found

    def agreed(self, do: Callable[[], T]) -> list[T]:
        """What `do` gives on every rank.

        Raises:
            StorageError, LauncherError: on every rank, where it failed on one.
        """
        value: Any = None
        problem: str | None = None
        try:
            value = do()
        except (LauncherError, OSError) as error:
            problem = str(error)
        found = self.all((value, problem))
        said = next((one for _, one in found if one is not None), None)
        if said is not None:
            raise _Unwritten(said)
        return [one for one, _ in found]


class _Unwritten(StorageError):
    """A StorageError whose words another rank has found."""

    def __init__(self, said: str) -> None:
        LauncherError.__init__(self, said)


def write(run: RunDir, update: int, pieces: Sequence[Piece], progress: dict[str, Any], ranks: Ranks) -> int:
    """Writes the checkpoint of window `update`. Collective.

    Args:
        pieces: what this rank writes.
        progress: what is no tensor; that of rank 0 is written.

    Returns:
        Its bytes.

    Raises:
        StorageError: on every rank, where one couldn't write; nothing of it stays.
    """
    temporary = run.checkpoints / f".{checkpoints.path_of(run, update).name}.tmp"
    try:
        ranks.agreed(lambda: _begin(temporary, progress) if ranks.rank == 0 else None)
        try:
            planner.write(pieces, temporary, ranks.group, alone=ranks.size == 1)
        except CheckpointException as error:
            causes = [failure[0] for _rank, failure in sorted(error.failures.items())]
            refused = next((one for one in causes if isinstance(one, OSError)), None)
            if refused is None:
                raise
            raise _Unwritten(str(StorageError(temporary / ".", refused))) from error
        except OSError as error:  # of a rank alone, whom nobody tells what has happened
            raise StorageError(temporary / ".", error) from error
        files = {
            name: one for found in ranks.agreed(lambda: _files(temporary, ranks.rank)) for name, one in found.items()
        }
        ranks.agreed(lambda: checkpoints.complete(run, temporary, update, files) if ranks.rank == 0 else None)
    except StorageError:
        if ranks.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    return sum(int(one["size"]) for one in files.values())


def _begin(folder: Path, progress: dict[str, Any]) -> None:
    with writing(folder):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    write_atomic(folder / PROGRESS, to_json(progress))


def _files(folder: Path, rank: int) -> dict[str, dict[str, Any]]:
    """Size and checksum of what this rank has written."""
    paths = sorted(folder.glob(f"__{rank}_*"))
    if rank == 0:
        paths += [folder / ".metadata", folder / PROGRESS]
    with writing(folder):
        return {one.name: {"size": one.stat().st_size, "sha256": checkpoints.sha256(one)} for one in paths}


def newest(run: RunDir, ranks: Ranks, say: Callable[[str], None]) -> Checkpoint | None:
    """The newest checkpoint of a run that is whole, which ranks find out together; None: there is none.

    One that is damaged is told to `say`, and put aside under another name where there is one before it. What killed
    saves have left is removed.

    Raises:
        LauncherError: all that there are are damaged; they stay.
    """
    if ranks.rank == 0:
        checkpoints.clear_unfinished(run)
    (paths, *_) = ranks.all([one.path for one in checkpoints.completed(run)] if ranks.rank == 0 else None)
    damaged: dict[Checkpoint, str] = {}
    for one in map(Checkpoint, paths):
        problems = ranks.all(one.problem(part=ranks.rank, parts=ranks.size))
        problem = next((said for said in problems if said is not None), None)
        if problem is None:
            for each, why in damaged.items():
                say(f"the checkpoint of update {each.update} is damaged, and the one before it is taken: {why}")
                if ranks.rank == 0:
                    checkpoints.put_aside(each)
            return one
        damaged[one] = problem
    if damaged:
        text = "\n  ".join(damaged.values())
        hint = f"without {run.checkpoints} the run starts from the beginning"
        raise LauncherError(f"none of the run's checkpoints can be used\n  {text}\n  {hint}")
    return None
