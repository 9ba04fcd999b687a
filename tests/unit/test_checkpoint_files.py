"""Checkpoints as files: which one is newest, what is damaged, what is removed, and what a file may not do."""

import os
import pickle
import resource
import shutil
from enum import Enum
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from launcher import checkpoints
from launcher.checkpoints import Checkpoint
from launcher.errors import LauncherError, StorageError
from launcher.run_dir import RunDir
from launcher.train.checkpoint import planner, store
from launcher.train.checkpoint.pieces import Piece, run_boxes, to_write
from launcher.train.checkpoint.store import Ranks


def save(run: RunDir, update: int, **tensors: torch.Tensor) -> Checkpoint:
    tensors = tensors or {"w": torch.full((5, 3), float(update))}
    pieces = [Piece(name, tuple(one.shape), one, (0,) * one.ndim) for name, one in tensors.items()]
    store.write(run, update, pieces, {"update": update}, Ranks())
    (newest, *_) = checkpoints.completed(run)
    return newest


def updates(run: RunDir) -> list[int]:
    return [one.update for one in checkpoints.completed(run)]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


def test_g02_newest_by_number_and_the_last_ones_are_kept(run: RunDir) -> None:
    for update in (900, 1000, 1100):
        save(run, update)
        checkpoints.prune(run, 2)
    assert updates(run) == [1100, 1000]
    save(run, 10**10)  # more digits than the name is padded to
    assert updates(run)[0] == 10**10
    checkpoints.prune(run, 1)
    assert updates(run) == [10**10]


def test_an_unfinished_save_is_no_checkpoint(run: RunDir) -> None:
    save(run, 3)
    half = run.checkpoints / ".update_0000000004.tmp"
    half.mkdir()
    (half / "__0_0.distcp").write_bytes(b"half")
    assert updates(run) == [3]
    save(run, 4)
    assert updates(run) == [4, 3]
    assert not half.exists()


def test_what_killed_saves_have_left_is_removed_when_ranks_start(run: RunDir) -> None:
    save(run, 3)
    for name in (".update_0000000004.tmp", ".update_0000000001.gone"):
        (run.checkpoints / name).mkdir()
    found = store.newest(run, Ranks(), lambda _: None)
    assert found is not None
    assert [one.name for one in run.checkpoints.iterdir()] == ["update_0000000003"]


def damage(kind: str, path: Path) -> None:
    data = bytearray(path.read_bytes())
    if kind == "truncated":
        path.write_bytes(data[:-7])
    elif kind == "a bit flipped":
        data[len(data) // 2] ^= 16
        path.write_bytes(data)
    elif kind == "removed":
        path.unlink()
    else:
        path.write_bytes(b"")


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "progress.json", "manifest.json"])
@pytest.mark.parametrize("kind", ["truncated", "a bit flipped", "removed", "emptied"])
def test_a_damaged_one_is_found_and_the_one_before_it_taken(run: RunDir, kind: str, name: str) -> None:
    save(run, 3)
    damage(kind, save(run, 4).path / name)
    if (kind, name) == ("a bit flipped", "manifest.json"):
        text = (run.checkpoints / "update_0000000004" / name).read_text(errors="replace")
        assert '"format": 1' in text
    said: list[str] = []
    found = store.newest(run, Ranks(), said.append)
    assert found is not None
    assert found.update == 3
    (line,) = said
    assert "update 4 is damaged" in line
    assert name in line
    assert updates(run) == [3]
    assert (run.checkpoints / "update_0000000004.damaged").is_dir()


def test_where_all_are_damaged_none_is_touched(run: RunDir) -> None:
    assert store.newest(run, Ranks(), lambda _: None) is None
    for update in (3, 4):
        damage("a bit flipped", save(run, update).path / "__0_0.distcp")
    with pytest.raises(LauncherError, match="none of the run's checkpoints can be used") as refused:
        store.newest(run, Ranks(), lambda _: None)
    assert str(refused.value).count("__0_0.distcp") == 2
    assert updates(run) == [4, 3]


def test_reading_gives_what_was_written(run: RunDir) -> None:
    tensors = {
        "matrix": torch.randn(7, 5),
        "half": torch.randn(3).bfloat16(),
        "whole": torch.arange(6).view(2, 3),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.zeros(0, 4),
        "truth": torch.tensor([True, False]),
    }
    one = save(run, 1, **tensors)
    saved = planner.Contents(one.path)
    for name, value in tensors.items():
        if not value.numel():
            continue
        read = torch.empty(saved.tensors[name][0], dtype=saved.tensors[name][1])
        saved.fill([Piece(name, tuple(read.shape), read, (0,) * read.ndim)])
        assert torch.equal(read, value)
        assert read.dtype == value.dtype


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch executed",)


def test_loading_executes_nothing(run: RunDir, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    one = save(run, 1)
    (one.path / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(LauncherError, match=r"posix\.system, which has no business there"):
        planner.Contents(one.path)
    # a name inside an allowed module that isn't its own
    (one.path / ".metadata").write_bytes(b"ctorch.distributed.checkpoint.metadata\nos\n.")
    with pytest.raises(LauncherError, match="no business"):
        planner.Contents(one.path)
    # a part of a class that isn't a choice
    (one.path / ".metadata").write_bytes(b"cbuiltins\ngetattr\n(ctorch\nSize\nVmro\ntR.")
    with pytest.raises(LauncherError, match="only choices are asked"):
        planner.Contents(one.path)
    assert not (tmp_path / "executed").exists()


def test_a_checkpoint_written_by_an_early_python_3_11_is_read(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as early:
        early.setattr(Enum, "__reduce_ex__", lambda self, _protocol: (getattr, (self.__class__, self._name_)))
        one = save(run, 1)
    assert b"getattr" in (one.path / ".metadata").read_bytes()
    assert planner.Contents(one.path).tensors["w"][0] == (5, 3)


def test_another_shape_and_a_missing_tensor_are_named(run: RunDir) -> None:
    one = save(run, 1)
    with pytest.raises(LauncherError, match=r"'w' has the shape \[5, 3\] there and \[3, 5\] here"):
        planner.Contents(one.path).fill([Piece("w", (3, 5), torch.zeros(3, 5), (0, 0))])
    with pytest.raises(LauncherError, match="has no 'v'"):
        planner.Contents(one.path).fill([Piece("v", (2,), torch.zeros(2), (0,))])


def test_a_save_that_fails_leaves_nothing_and_keeps_what_was(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    save(run, 1)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints, "flush", full)
    with pytest.raises(StorageError, match="can't be written: No space left on device"):
        save(run, 2)
    assert updates(run) == [1]
    assert sorted(one.name for one in run.checkpoints.iterdir()) == ["update_0000000001"]


def test_a_copy_under_another_number_is_none_of_that(run: RunDir) -> None:
    one = save(run, 6)
    copy = checkpoints.path_of(run, 99)
    shutil.copytree(one.path, copy)
    problem = Checkpoint(copy).problem(parts=0)
    assert problem is not None
    assert "the checkpoint of update 6, in a folder" in problem
    said: list[str] = []
    assert store.newest(run, Ranks(), said.append) == one
    assert len(said) == 1
    assert updates(run) == [6]  # so that a new one isn't taken for older, and removed


def test_a_rank_alone_that_cannot_write_says_so_too(run: RunDir) -> None:
    save(run, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, before[1]))
    try:
        with pytest.raises(StorageError, match="can't be written: File too large"):
            save(run, 2, w=torch.zeros(100_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [one.name for one in run.checkpoints.iterdir()] == ["update_0000000001"]


shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@given(shape=shapes, data=st.data())
def test_a_run_of_elements_as_boxes(shape: tuple[int, ...], data: st.DataObject) -> None:
    """Put together in their order the boxes hold exactly the elements of the run."""
    whole = torch.arange(prod(shape)).view(shape)
    start = data.draw(st.integers(0, whole.numel()))
    stop = data.draw(st.integers(start, whole.numel()))
    found = [
        whole[tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))].flatten()
        for offsets, sizes in run_boxes(shape, start, stop)
    ]
    assert len(found) <= max(1, 2 * len(shape) - 1)
    assert torch.equal(torch.cat(found) if found else torch.zeros(0, dtype=torch.int64), whole.flatten()[start:stop])


@given(sizes=st.lists(st.integers(0, 9), max_size=12), copies=st.integers(1, 4))
def test_copies_are_written_once_each_by_someone(sizes: list[int], copies: int) -> None:
    mine = [
        to_write([Piece(str(i), (n,), torch.zeros(n), (0,), copy=copy, copies=copies) for i, n in enumerate(sizes)])
        for copy in range(copies)
    ]
    names = sorted(piece.name for of_copy in mine for piece in of_copy)
    assert names == sorted(str(i) for i in range(len(sizes)))
    loads = [sum(piece.value.numel() for piece in of_copy) for of_copy in mine]
    assert max(loads) - min(loads) <= max(sizes, default=0)
