"""A node's temporary folder: there while it runs, and nobody's for long when it was killed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.outcome import SCRATCH, scratch, sweep

HOLDS = (
    "import os, sys\nfrom launcher.outcome import scratch\nwith scratch():\n    print('ready', flush=True)\n    input()"
)


def start(folder: Path) -> "subprocess.Popen[str]":
    """A node that stays in its folder until it is told to go on."""
    node = subprocess.Popen(
        [sys.executable, "-c", HOLDS],
        env={**os.environ, SCRATCH: str(folder)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert node.stdout is not None
    assert node.stdout.readline() == "ready\n"
    return node


def test_a_killed_nodes_folder_is_removed_and_a_living_ones_is_not(tmp_path: Path) -> None:
    living, killed = (start(tmp_path / f"launcher-{name}") for name in ("living", "killed"))
    (tmp_path / "launcher-mine").mkdir()  # of somebody who holds no lock
    (tmp_path / "launcher-killed" / "pymp-1").mkdir()
    killed.kill()
    killed.communicate()
    assert (tmp_path / "launcher-killed").exists()
    sweep(tmp_path)
    assert sorted(one.name for one in tmp_path.iterdir()) == [
        "launcher-living",
        "launcher-living.lock",
        "launcher-mine",
    ]
    living.communicate("\n")
    assert living.returncode == 0
    assert [one.name for one in tmp_path.iterdir()] == ["launcher-mine"]


def test_a_node_sweeps_before_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "launcher-old").mkdir()
    (tmp_path / "launcher-old.lock").touch()
    monkeypatch.setenv(SCRATCH, str(tmp_path / "launcher-new"))
    with scratch() as folder:
        assert folder.is_dir()
        assert not (tmp_path / "launcher-old").exists()
    assert list(tmp_path.iterdir()) == []
