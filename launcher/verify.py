"""The command verify: this model under every way of spreading it, against one process."""

import json
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from launcher.commands import parse_arguments, prepare_one
from launcher.config.compose import hydra_session
from launcher.config.validate import parse
from launcher.errors import ConfigError, Exit, LauncherError
from launcher.plan.plan import Plan
from launcher.prepare import Prepared
from launcher.run_dir import RunDir, to_json
from launcher.submit.local import Local

POLL = 0.3
"""Seconds between two looks at the rows that are done."""
_HEAD = f"{'strategy':<32} {'recompute':<9} {'layout':<8} {'moves':>6} {'loss':>6} {'norm':>6}"


def verify(argv: Sequence[str]) -> int:
    """Runs a few updates under every strategy on this machine and prints a row for each. Returns the exit code."""
    options, arguments = parse_arguments("verify", argv)
    with hydra_session(arguments) as hydra:
        prepared = prepare_one(hydra, options, arguments)
    if prepared is None:
        asks = "--multirun" if options.multirun else "what asks for it (sweep=…, sweep.resume or hydra.mode=MULTIRUN)"
        raise LauncherError(f"a sweep can't be verified: leave out {asks}, and verify one configuration")
    if not isinstance(prepared.backend, Local):
        kind = parse(prepared.text).submit.kind
        raise ConfigError("submit", kind, "verify runs on this machine, by itself", hint="submit=local")
    half = prepared.plan.facts.get("half_parameters")
    if half:
        problem = f"its parameters are {', '.join(half)}, whose rounding hides what verify looks for"
        raise ConfigError("model", "half precision", problem, hint="verify it with fp32 parameters")
    console = Console()
    with tempfile.TemporaryDirectory(prefix="launcher-verify-") as folder:
        run = RunDir(Path(folder) / "run")
        code = _run(run, prepared, console)
        if code != 0:
            return _failed(run, code, console)
        rows = _rows(run)
    wrong = [row for row in rows if row["passed"] is False]
    left_out = sum(row["passed"] is None for row in rows)
    console.print(_verdict(len(rows) - left_out, len(wrong), left_out), highlight=False)
    return int(Exit.DIFFERENCE if wrong else Exit.FINISHED)


def _run(run: RunDir, prepared: Prepared, console: Console) -> int:
    plan = prepared.plan_in(run)
    run.create(prepared.text, to_json(plan.to_dict()))
    launch = prepared.backend.render(run, plan)
    launch = replace(launch, argv=[[*argv, "--task", "verify"] for argv in launch.argv])
    console.print(_introduction(plan), highlight=False, markup=False)
    console.print(_HEAD, highlight=False, markup=False)
    done = threading.Event()
    printer = threading.Thread(target=_print_rows, args=(run, console, done))
    printer.start()
    try:
        return prepared.backend.submit(run, plan, launch, console, live=False)
    finally:
        done.set()
        printer.join()


def _introduction(plan: Plan) -> str:
    return (
        f"A few updates of SGD on {plan.world_size} ranks ({plan.device}, fp32) against one process: the largest "
        "relative difference in how parameters move, in the logged loss and in the norm of the gradient. Dropout and "
        "batch statistics are off."
    )


def _print_rows(run: RunDir, console: Console, done: threading.Event) -> None:
    printed = 0
    while True:
        ended = done.wait(POLL)  # asked before the look, so that the last rows are seen
        for row in _rows(run)[printed:]:
            console.print(_line(row), highlight=False, soft_wrap=True)
            printed += 1
        if ended:
            return


def _rows(run: RunDir) -> list[dict[str, Any]]:
    try:
        rows: list[dict[str, Any]] = json.loads(run.verification.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    return rows


def _line(row: dict[str, Any]) -> str:
    overrides = row["overrides"].items()
    settings = " ".join(str(value) if name == "schedule" else f"{name}={value}" for name, value in overrides)
    numbers = " ".join(f"{_number(row[name]):>6}" for name in ("parameters", "loss", "grad_norm"))
    verdict = {True: "[green]pass[/green]", False: "[bold red]FAIL[/bold red]", None: "left out"}[row["passed"]]
    if row["passed"] is False and row["tolerance"] is not None:
        verdict += f" (tolerance {row['tolerance']:.0e})"
    reason = f"  {escape(row['reason'])}" if row["reason"] else ""
    name = f"{row['strategy']} {settings}"
    return f"{name:<32} {row['recompute']:<9} {row['layout']:<8} {numbers}  {verdict}{reason}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.0e}" if value else "0"


def _verdict(run: int, wrong: int, left_out: int) -> str:
    beside = f", {left_out} left out" if left_out else ""
    if wrong:
        return f"[bold red]{wrong} of {run} rows differ from one process[/bold red]{beside}"
    return f"[bold green]all {run} rows agree with one process[/bold green]{beside}"


def _failed(run: RunDir, code: int, console: Console) -> int:
    try:
        error = run.read_status().get("error") or {}
    except LauncherError as unreadable:
        error = {"reason": str(unreadable)}
    who = "" if error.get("rank") is None else f"rank {error['rank']}: "
    console.print(f"[bold red]failed[/bold red] (exit {code})  {who}", end="")
    console.print(error.get("reason", ""), markup=False, highlight=False, soft_wrap=True)
    return code
