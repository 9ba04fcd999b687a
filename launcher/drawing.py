"""`launcher plan --draw`: the timetable of one full round of a pipeline."""

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from launcher.errors import ConfigError, LauncherError
from launcher.plan.facts import ask_torch, torch_is_installed
from launcher.plan.plan import Plan
from launcher.plan.timetable import Action, place
from launcher.timetable import Table, draw_picture, draw_text

FLAG = "--draw"
FILE = "pipeline.png"


def take_flag(argv: Sequence[str]) -> tuple[Path | None, list[str]]:
    """The picture that `--draw` or `--draw=PATH` asks for (None: none), and the other arguments.

    Raises:
        ConfigError: a path that no picture can be written to.
    """
    given = [one for one in argv if one == FLAG or one.startswith(f"{FLAG}=")]
    rest = [one for one in argv if one not in given]
    if not given:
        return None, rest
    _, equals, name = given[-1].partition("=")
    path = Path(name if equals else FILE)
    if path.suffix.lower() != ".png":
        raise ConfigError(FLAG, name, "must be the name of a PNG", hint=f"{FLAG}=folder/{FILE}, or {FLAG} alone")
    if not path.parent.is_dir():
        raise ConfigError(FLAG, name, f"there is no folder {path.parent}")
    return path, rest


def timetable(plan: Plan) -> Table:
    """When each pipeline rank works on what in the first round of a full window.

    Raises:
        LauncherError: there is no pipeline, or no torch.
    """
    if plan.pipeline is None:
        raise LauncherError(f"{FLAG}: there is no pipeline to draw (mesh.pp=1)\n  mesh.pp=2 or more")
    if not torch_is_installed():
        raise LauncherError(f"{FLAG}: the order of a schedule's actions is torch's, and torch isn't installed here")
    question = {
        "schedule": plan.pipeline["schedule"],
        "pp": plan.mesh["pp"],
        "stages_per_rank": plan.pipeline["stages_per_rank"],
        "micro_batches": plan.pipeline["filled_rounds"][0],
    }
    text = ask_torch("launcher.train.drawn_schedule", json.dumps(question), [], "torch for the schedule")
    return place([[Action(*one) for one in order] for order in json.loads(text)])


def draw(plan: Plan, table: Table, path: Path, console: Console | None) -> None:
    """Writes the picture of a timetable of this plan, and prints it as text on `console`.

    Raises:
        StorageError: the file can't be written.
    """
    assert plan.pipeline is not None
    pipeline, pp, schedule = plan.pipeline, plan.mesh["pp"], plan.pipeline["schedule"]
    real, runs = pipeline["rounds"][0], pipeline["filled_rounds"][0]
    micro_batches = f"{runs} micro-batch{'es' * (runs > 1)}"
    draw_picture(table, path, title=f"{schedule}: {micro_batches} on {pp} ranks", real=real)
    if console is None:
        return
    one_of = "" if len(pipeline["rounds"]) == 1 else f", one of {len(pipeline['rounds'])} rounds of a window"
    console.print(f"[bold]Timetable[/bold] of {schedule}, {micro_batches}{one_of}", highlight=False, soft_wrap=True)
    for line in [*draw_text(table, real), f"picture {path}"]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
