"""What every place where ranks start has in common: rendering is pure, submitting acts."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rich.console import Console

from launcher.plan.facts import rank_environment
from launcher.plan.plan import Plan
from launcher.run_dir import RunDir

HOME = "/tmp"
"""The home of ranks in a container."""


@dataclass(frozen=True)
class Launch:
    """What starts the ranks, for plan.json and for people to read."""

    argv: list[list[str]]
    """The command of each node; of a job without agents that of each of its ranks."""
    environment: dict[str, str]
    """What is set beside the environment that the command is given in."""
    script: str | None = None
    """Where the batch script lies, if there is one."""
    script_text: str | None = None
    """The script itself."""
    docker: list[list[str]] | None = None


class Backend(Protocol):
    """A place where ranks start."""

    def render(self, run: RunDir, plan: Plan) -> Launch:
        """The commands, without doing anything."""
        ...

    def submit(self, run: RunDir, plan: Plan, launch: Launch, console: Console, *, live: bool) -> int:
        """Starts the ranks and, where the user waits, follows them to their end. Returns the exit code."""
        ...


def node_argv(run_dir: Path, node: int = 0) -> list[str]:
    """The command that runs one node's ranks."""
    which = ["--node", str(node)] if node else []
    return [sys.executable, "-m", "launcher.train.agent", str(run_dir), *which]


def node_environment(plan: Plan, ranks: int, cores: int | None) -> dict[str, str]:
    """What a node's ranks need in their environment: this package importable, and the `cores` of a machine shared out
    among its `ranks`; None: nobody knows how many there will be."""
    environment = {name: rank_environment(plan.pythonpath)[name] for name in ("PYTHONPATH", "PYTHONIOENCODING")}
    environment["PYTHONUNBUFFERED"] = "1"
    if "OMP_NUM_THREADS" not in os.environ:
        environment["OMP_NUM_THREADS"] = str(max(1, (cores or ranks) // ranks))
    return environment
