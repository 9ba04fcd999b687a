"""What a command prints when its run has ended."""

import shlex
from pathlib import Path
from typing import Any

from rich.console import Console

from launcher.checkpoints import newest_whole
from launcher.errors import LauncherError
from launcher.observe.failure import for_screen
from launcher.observe.text import reached_text
from launcher.prepare import short
from launcher.run_dir import RunDir, State


def print_end(run: RunDir, code: int, console: Console) -> None:
    """Prints how the run in `run` has ended, where its files are and, if it isn't finished, how it goes on."""
    try:
        status = run.read_status()
    except LauncherError as unreadable:
        status = {"state": State.failed.value, "error": {"rank": None, "reason": str(unreadable)}}
    has_begun_elsewhere = status.get("job") or status["state"] == State.planned.value
    if has_begun_elsewhere and status.get("exit_code") is None:
        console.print(f"folder  {short(run.path)}", markup=False, highlight=False, soft_wrap=True)
        console.print(f"look    launcher status {shlex.quote(short(run.path))}", markup=False, highlight=False)
        return
    if code == 0:
        result = run.read_json(run.result)
        _print_result(result, console)
    elif status.get("error"):
        error = status["error"]
        who = "" if error.get("rank") is None else f"rank {error['rank']}: "
        console.print(f"[bold red]{status['state']}[/bold red] (exit {code})  {who}", end="")
        console.print(for_screen(error["reason"]), markup=False, highlight=False, soft_wrap=True)
        if error.get("log") and Path(error["log"]).exists():
            console.print(f"log     {short(Path(error['log']))}", markup=False, highlight=False)
    else:
        console.print(f"{status['state']} (exit {code})")
    for name in ("tracker", "picture"):
        if status.get(name):
            console.print(f"{name} {status[name]}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"folder  {short(run.path)}", markup=False, highlight=False, soft_wrap=True)
    if code != 0 and run.plan.is_file():
        console.print(f"go on   {how_to_go_on(run)}", markup=False, highlight=False, soft_wrap=True)


def how_to_go_on(run: RunDir) -> str:
    """The command that goes on with a run, and from where."""
    checkpoint, _ = newest_whole(run)
    start = "the beginning" if checkpoint is None else f"update {checkpoint.update}"
    return f"launcher resume {shlex.quote(short(run.path))}  (from {start})"


def _print_result(result: dict[str, Any], console: Console) -> None:
    def number(name: str) -> str:
        value = result[name]
        return f"{value:.4f}" if isinstance(value, float) else "-"

    console.print(
        f"[bold green]finished[/bold green]  {result['update']} updates ({result['applied']} applied) in "
        f"{result['seconds']:.0f} s"
    )
    console.print(f"train loss {number('train_loss')}  validation loss {number('validation_loss')}", highlight=False)
    if result.get("reached"):
        console.print(reached_text(result["reached"]), markup=False, highlight=False, soft_wrap=True)
    if result["baseline_loss"] is not None:
        console.print(f"loss of the best constant guess {number('baseline_loss')}", highlight=False)
