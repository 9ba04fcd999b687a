"""The short version of benchmarks/chaos.py: faults at random, and the weights of an undisturbed run at the end."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CHAOS = Path(__file__).resolve().parents[2] / "benchmarks" / "chaos.py"


def test_random_faults_change_nothing(tmp_path: Path) -> None:
    arguments = ["--faults", "4", "--updates", "60", "--seed", "11", "--folder", str(tmp_path / "chaos")]
    done = subprocess.run([sys.executable, str(CHAOS), *arguments], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "seed 11" in done.stdout
    assert "faults, and the weights are those of the undisturbed run" in done.stdout
