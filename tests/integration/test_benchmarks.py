"""The benchmarks run, and print the figures that docs/benchmarks.md shows; how large they are is nothing for a test."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SMALLEST = ("--updates", "3", "--warmup", "1", "--global-batch-size", "4")
NUMBER = r"\d+(\.\d+)?"
QUARTILES = rf"{NUMBER} \[{NUMBER}, {NUMBER}\]"


def run(name: str, *arguments: str) -> str:
    """What a benchmark prints, each run of blanks as one."""
    command = [sys.executable, str(BENCHMARKS / name), *SMALLEST, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return re.sub(" +", " ", done.stdout)


def apart(said: str) -> float:
    """How far apart the two models are, as a share of their norm."""
    found = re.search(r"the models are (\S+) of their norm apart", said)
    assert found is not None, said
    return float(found[1])


def test_overhead_compares_the_loop_with_a_bare_one() -> None:
    said = run("overhead.py", "--sizes", "0.4M", "--micro-batch-size", "1", "--block", "1", "--max-bytes", "32")
    assert "0.4M: 428,800 parameters" in said
    for what in ("time of an update", "time on a core of an update"):
        lines = rf"{what}, median \[quartiles\] of 2\n launcher {QUARTILES} ms\n bare {QUARTILES} ms\n"
        assert re.search(rf"{lines} ratio {NUMBER} of the medians, {QUARTILES} window by window\n", said), said
    assert apart(said) < 1e-4  # the same updates: only what both do is compared


def test_pipeline_compares_two_stages_with_two_copies() -> None:
    command = [sys.executable, str(BENCHMARKS / "pipeline.py"), "--micro-batches", "2", "--updates", "3"]
    done = subprocess.run([*command, "--warmup", "1"], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    said = re.sub(" +", " ", done.stdout)
    assert re.search(rf"\n 2 two copies {QUARTILES} \n 2 1f1b {QUARTILES} {QUARTILES} 0.67\n", said), said


def test_padding_compares_the_two_layouts() -> None:
    said = run("padding.py", "data.train.max_bytes=64", "model.num_layers=1", "--micro-batch-sizes", "2")
    assert "micro_batch_size=2, 2 windows\n" in said
    padding = []
    for layout in ("arrival", "length"):
        found = re.search(rf" {layout} ({NUMBER}) {QUARTILES} {QUARTILES}\n", said)
        assert found is not None, said
        padding.append(float(found[1]))
    assert padding[0] >= padding[1] >= 1
    for what in ("time", "time on cores"):
        assert re.search(rf"arrival / length, {what}: {NUMBER} of the medians, {QUARTILES} window", said), said
    assert apart(said) < 1e-4
