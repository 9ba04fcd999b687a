"""Runs started as a user starts them: the command in a process of its own, in a folder of its own."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

PLAIN = (
    "data.shuffle=false",
    "schedule/decay=constant",
    "schedule.warmup=0",
    "scaling.rule=none",
    "training.max_grad_norm=null",
    "optimizer=sgd",
    "optimizer.lr=1",
    "cluster.device=cpu",
)


def mean(targets: Any, *more: str) -> list[str]:
    """Overrides of the mean probe of examples/scalar.py."""
    return [
        *PLAIN,
        "model=custom",
        "model._target_=scalar.Scalar",
        "task=custom",
        "task._target_=scalar.SquaredError",
        "data=custom",
        "data.train._target_=scalar.Targets",
        f"+data.train.targets={targets}",
        "training.duration=1 epochs",
        *more,
    ]


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    code: int
    out: str
    err: str
    run: Path

    def json(self, name: str) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads((self.run / name).read_text())
        return loaded

    def metrics(self, kind: str = "train") -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in (self.run / "metrics.jsonl").read_text().splitlines()]
        return [line for line in lines if line["kind"] == kind]

    def weights(self) -> dict[str, list[float]]:
        return {name: value.flatten().tolist() for name, value in load_file(self.run / "model.safetensors").items()}


def environment(**more: str) -> dict[str, str]:
    """This environment with the examples importable."""
    folders = [str(EXAMPLES), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(folders), "OMP_NUM_THREADS": "1", **more}


def argv(command: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "launcher", command, *arguments]


def launch(folder: Path, command: str, *arguments: str, timeout: float = 200, **env: str) -> Done:
    """Runs a command in `folder`, with the run's folder at folder/run where it trains."""
    run = folder / "run"
    extra = [f"hydra.run.dir={run}"] if command == "train" and not any("hydra.run.dir" in a for a in arguments) else []
    done = subprocess.run(
        argv(command, *arguments, *extra),
        cwd=folder,
        env=environment(**env),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    return Done(done.returncode, done.stdout, done.stderr, run)
