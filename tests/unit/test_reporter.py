"""When what a rank says of its updates is written out."""

import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from launcher.plan.durations import Clock, Duration
from launcher.plan.windows import Stage, WindowTable
from launcher.run_dir import RunDir
from launcher.train import reporter
from launcher.train.parallel.mesh import Place
from launcher.train.sharding.base import StepResult
from launcher.train.window import Window


def test_metrics_are_written_out_by_the_samples_of_a_ramp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporter, "STATUS_EVERY", math.inf)
    table = WindowTable(64, 8, ramp=(Stage(Fraction(8), "updates", 2),))  # 8 windows of 2, then those of 8
    key = "training.log_every"
    every = Clock(table).every(Duration.parse("16 samples", key), key)
    place = Place(0, 1, torch.device("cpu"))
    writer = reporter.Reporter(RunDir(tmp_path), 100, place, log_every=every, attempt=0)
    written = []
    for update in range(1, 13):
        window = Window(update, 0.0, [], np.arange(0), weight=1.0, samples=table.size(update), tokens=None)
        writer.update(window, 1.0, 0.1, StepResult(1.0, applied=True), reporter.Progress(), 1.0)
        written.append(len((tmp_path / "metrics.jsonl").read_text().splitlines()))
    assert writer._metrics is not None
    writer._metrics.close()
    # every second window of 8, and the eighth of 2
    assert written == [0] * 7 + [8] * 2 + [10] * 2 + [12]
