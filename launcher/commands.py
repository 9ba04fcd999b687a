"""The commands that compose a configuration: train and plan."""

import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from hydra._internal.callbacks import Callbacks
from hydra._internal.hydra import Hydra
from hydra._internal.utils import get_args_parser
from hydra.core.utils import run_job
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig
from rich.console import Console

from launcher.config.compose import Arguments, compose, hydra_session, is_sweep, make_importable
from launcher.drawing import draw, take_flag, timetable
from launcher.errors import ConfigError, LauncherError
from launcher.observe.failure import for_screen
from launcher.plan.facts import ask
from launcher.plan.show import print_plan
from launcher.prepare import Prepared, draft, folder, settle, short
from launcher.run_dir import RunDir, State, to_json

RUN_DIR = "hydra.run.dir"

TRAIN_HELP = """\
launcher train [hydra flags] [overrides]

Composes, plans, starts the ranks and follows the run to its end; with -m a sweep.
`launcher train --hydra-help` lists Hydra's flags, docs/configuration.md explains every key.
"""
PLAN_HELP = """\
launcher plan [--json] [--draw[=PATH]] [hydra flags] [overrides]

Prints the plan of a run, with -m one row for each run of a sweep. No rank starts, and nothing is written but the
picture of --draw.

  --json   the plan as JSON, and nothing else on the output
  --draw   when each rank of the pipeline (mesh.pp) works on what, as text and as the picture pipeline.png or PATH
"""


def train(argv: Sequence[str]) -> int:
    """Composes, plans, starts the ranks and follows them. Returns the run's exit code."""
    options, arguments = parse_arguments("train", argv)
    with hydra_session(arguments) as hydra:
        if _shown_by_hydra(hydra, options, arguments, TRAIN_HELP):
            return 0
        composed = _composed(hydra, options, arguments)
        if composed is None:
            from launcher.sweep.run import Sweep

            return Sweep(hydra, arguments).train()
        return _run(hydra, composed, arguments, _prepare(composed, arguments))


def plan(argv: Sequence[str]) -> int:
    """Prints the plan of a run, or its JSON. Writes nothing but the picture that is asked for."""
    as_json = "--json" in argv
    picture, rest = take_flag([one for one in argv if one != "--json"])
    options, arguments = parse_arguments("plan", rest)
    with hydra_session(arguments) as hydra:
        if _shown_by_hydra(hydra, options, arguments, PLAN_HELP):
            return 0
        composed = _composed(hydra, options, arguments)
        if composed is None:
            from launcher.sweep.run import Sweep

            if picture is not None:
                raise LauncherError("--draw draws the pipeline of one run: give one value of each key")
            return Sweep(hydra, arguments, only_plan=True).plan(as_json=as_json)
        prepared = _prepare(composed, arguments)
        where = folder(composed, RUN_DIR)
        made = prepared.plan_in(RunDir(where))
    console = None if as_json else Console()
    table = None if picture is None else timetable(made)
    if console is not None:
        print_plan(made, short(where), console)
    if picture is not None and table is not None:
        draw(made, table, picture, console)
    if as_json:
        sys.stdout.write(to_json(made.to_dict()))
    return 0


def parse_arguments(command: str, argv: Sequence[str]) -> tuple[Namespace, Arguments]:
    """Hydra's flags and overrides on a command line. Raises LauncherError for one that isn't there."""
    parser = get_args_parser()
    parser.prog = f"launcher {command}"
    parser.allow_abbrev = False
    parser.error = _refuse_arguments  # type: ignore[method-assign]  # one message instead of the usage
    options = parser.parse_intermixed_args(list(argv))  # -m and others may stand between overrides
    if options.config_path is not None:
        raise LauncherError(
            "--config-path: the launcher's own conf/ is always there; add your folder with --config-dir"
        )
    if options.multirun and (options.cfg or options.info):
        raise LauncherError("--multirun shows no configuration: give one value of each key, and --cfg without it")
    # the parser takes flags it doesn't know for overrides
    for override in options.overrides:
        if override.startswith("-"):
            raise LauncherError(f"{override}: no such flag; see launcher {command} --hydra-help")
    return options, Arguments(options.overrides, options.config_name or "config", options.config_dir)


def _refuse_arguments(message: str) -> NoReturn:
    raise LauncherError(f"{message}; launcher train --hydra-help lists the flags")


def _shown_by_hydra(hydra: Hydra, options: Namespace, arguments: Arguments, about: str) -> bool:
    """Whether the user asked for one of Hydra's own outputs, which is then printed; its help after `about`."""
    parser, name = get_args_parser(), arguments.config_name
    overrides = list(arguments.overrides)
    if options.help or options.cfg or options.info:
        compose(hydra, arguments)  # a mistake is said as for any other command
    if options.help:
        print(about)
        hydra.app_help(config_name=name, args_parser=parser, args=options)
    elif options.hydra_help:
        hydra.hydra_help(config_name=name, args_parser=parser, args=options)
    elif options.cfg:
        hydra.show_cfg(name, overrides, options.cfg, options.package, resolve=options.resolve)
    elif options.info:
        hydra.show_info(options.info, config_name=name, overrides=overrides, run_mode=RunMode.RUN)
    elif options.shell_completion:
        try:
            hydra.shell_completion(config_name=name, overrides=overrides)
        except ValueError as error:
            raise LauncherError(f"--shell-completion: {error}") from error
    else:
        return False
    return True


def _composed(hydra: Hydra, options: Namespace, arguments: Arguments) -> DictConfig | None:
    """The configuration of the one run that is asked for; None: a sweep is."""
    if options.multirun:
        return None
    try:
        composed = compose(hydra, arguments)
    except LauncherError:  # it may be that it has several values of a key, and its own word that they are a sweep
        if is_sweep(hydra, arguments):
            return None
        raise
    return None if composed.hydra.mode is RunMode.MULTIRUN else composed


def prepare_one(hydra: Hydra, arguments: Arguments) -> Prepared:
    """The one run of a command that has no folder for it. Raises LauncherError."""
    return _prepare(compose(hydra, arguments), arguments)


def _prepare(composed: DictConfig, arguments: Arguments) -> Prepared:
    """The run, ready to start. Raises LauncherError; nothing is written yet."""
    drafted = draft(composed, RUN_DIR)
    pythonpath = make_importable(arguments)
    return settle(drafted, ask(drafted.text, pythonpath), pythonpath)


def _run(hydra: Hydra, composed: DictConfig, arguments: Arguments, prepared: Prepared) -> int:
    """Runs the job inside Hydra, as `hydra.main` would: its folder, its files, its callbacks."""
    where = folder(composed, RUN_DIR)
    if RunDir(where).config.exists():
        raise ConfigError("hydra.run.dir", where, "this folder already holds a run; give it another, or leave it out")
    run = RunDir(where)
    plan = prepared.plan_in(run)
    # before Hydra writes there: the folder may have become another's a moment ago
    try:
        run.create(prepared.text, to_json(plan.to_dict()))
    except LauncherError as error:
        raise LauncherError(f"{RUN_DIR}: {error}") from error
    console = Console()
    live = bool(composed.logging.progress)

    def job(_: DictConfig) -> int:
        print_plan(plan, short(where), console)
        launch = prepared.backend.render(run, plan)
        code = prepared.backend.submit(run, plan, launch, console, live=live)
        _print_end(run, code, console)
        return code

    callbacks = Callbacks(composed)
    callbacks.on_run_start(config=composed, config_name=arguments.config_name)
    try:
        done = run_job(
            hydra_context=HydraContext(config_loader=hydra.config_loader, callbacks=callbacks),
            task_function=job,
            config=composed,
            job_dir_key="hydra.run.dir",
            job_subdir_key=None,
            configure_logging=True,
        )
    except OSError as error:
        raise ConfigError("hydra.run.dir", where, f"the folder can't be written: {error.strerror}") from error
    callbacks.on_run_end(config=composed, config_name=arguments.config_name, job_return=done)
    return int(done.return_value)


def _print_end(run: RunDir, code: int, console: Console) -> None:
    try:
        status = run.read_status()
    except LauncherError as unreadable:
        status = {"state": State.failed.value, "error": {"rank": None, "reason": str(unreadable)}}
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


def _print_result(result: dict[str, object], console: Console) -> None:
    def number(name: str) -> str:
        value = result[name]
        return f"{value:.4f}" if isinstance(value, float) else "-"

    console.print(
        f"[bold green]finished[/bold green]  {result['update']} updates ({result['applied']} applied) in "
        f"{result['seconds']:.0f} s"
    )
    console.print(f"train loss {number('train_loss')}  validation loss {number('validation_loss')}", highlight=False)
    if result["baseline_loss"] is not None:
        console.print(f"loss of the best constant guess {number('baseline_loss')}", highlight=False)
