"""A run with loader workers: how it ends when one of them does, and that nothing of them stays behind."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from runs import Done, environment, launch, mean
from watched import GONE_WITHIN, orphaned_memory, within

pytestmark = pytest.mark.slow

RANKS = ("cluster.ranks_per_node=2", "data.workers=2", "batch.layout=arrival")  # by length, a rank itself reads


@pytest.fixture
def train(tmp_path: Path) -> Iterator[Callable[..., Done]]:
    """Trains on 2 ranks of 2 loader workers; the folder of temporary files must be empty afterwards."""
    temporary, folder = tmp_path / "temporary", tmp_path / "folder"
    temporary.mkdir()
    folder.mkdir()
    shared = set(os.listdir("/dev/shm"))

    def run(*overrides: str) -> Done:
        base = mean(list(range(8)), "batch.global_batch_size=4", *RANKS)
        importable = f"{Path(__file__).parent}:{environment()['PYTHONPATH']}"
        return launch(folder, "train", *base, *overrides, PYTHONPATH=importable, TMPDIR=str(temporary))

    yield run
    assert [one.name for one in temporary.iterdir() if not one.name.startswith("torchinductor_")] == []  # a cache
    # that of another run on this machine has a process that lives, or is on its way out
    assert within(GONE_WITHIN, lambda: orphaned_memory() <= shared), orphaned_memory()


def test_a_run_with_workers_leaves_nothing_behind(train: Callable[..., Done]) -> None:
    done = train("data.validation={_target_: scalar.Targets, targets: [1,2,3]}", "training.validate_every=1")
    assert done.code == 0, done.out + done.err
    assert done.weights() == {"w": [5.5]}  # the mean of the last window


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raise", "ValueError: this sample is broken"),
        ("kill", "was killed by signal: Killed"),
        ("exit0", "ended with exit code 0"),
        ("exit7", "ended with exit code 7"),
    ],
)
def test_a_worker_that_ends_early_ends_its_run(train: Callable[..., Done], how: str, said: str) -> None:
    done = train("data.train._target_=faults.Faulty", "+data.train.at=6", f"+data.train.how={how}")
    assert done.code == 3, done.out + done.err
    shown = done.out + done.err
    assert shown.count(said) == 1, shown
    assert "rank 1" in shown
    assert "Traceback" not in shown or how == "raise"


@pytest.mark.parametrize("how", ["kill", "exit0"])
def test_so_does_one_of_a_validation(train: Callable[..., Done], how: str) -> None:
    done = train(f"data.validation={{_target_: faults.Faulty, targets: [1,2,3,4], at: 3, how: {how}}}")
    assert done.code == 3, done.out + done.err
    assert "a loader worker" in done.out + done.err
