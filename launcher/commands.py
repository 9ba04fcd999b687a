"""The commands that compose a configuration: train and plan."""

import os
import shlex
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NoReturn

from hydra._internal.callbacks import Callbacks
from hydra._internal.hydra import Hydra
from hydra._internal.utils import get_args_parser
from hydra.core.utils import run_job
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig
from rich.console import Console

from launcher import slurm_job
from launcher.config.choices import Resume, SubmitKind
from launcher.config.compose import Arguments, compose, hydra_session, is_sweep, make_importable
from launcher.drawing import draw, take_flag, timetable
from launcher.ending import print_end
from launcher.errors import ConfigError, Exit, LauncherError
from launcher.plan.show import print_commands, print_plan
from launcher.prepare import Draft, Prepared, ask_here, draft, folder, settle, short
from launcher.run_dir import RunDir, to_json
from launcher.submit.slurm_here import check_place, job_overrides, take_up

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
    arguments = _in_job(arguments)
    with hydra_session(arguments) as hydra:
        if _shown_by_hydra(hydra, options, arguments, TRAIN_HELP):
            return 0
        composed = _composed(hydra, options, arguments)
        if composed is None:
            from launcher.sweep.run import Sweep

            if slurm_job.around() is not None:
                raise LauncherError("a sweep queues an array of jobs: give it outside of a job, with submit=slurm")
            return Sweep(hydra, arguments).train()
        if slurm_job.around() is not None:
            check_place(composed)
        drafted = _draft(composed)
        run = RunDir(folder(composed, RUN_DIR))
        if slurm_job.around() is not None and run.config.exists():
            take_up(run)
        pythonpath = make_importable(arguments)
        if run.config.exists():
            return _go_on(hydra, composed, arguments, run, drafted, pythonpath)
        prepared = settle(drafted, ask_here(drafted, pythonpath), pythonpath)
        return _run(hydra, composed, arguments, run, prepared)


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
        if made.launch.get("script_text"):
            console.print(made.launch["script_text"], markup=False, highlight=False, soft_wrap=True, end="")
        print_commands(made.launch.get("docker") or [], console)
    if picture is not None and table is not None:
        draw(made, table, picture, console)
    if as_json:
        sys.stdout.write(to_json(made.to_dict()))
    return 0


def _in_job(arguments: Arguments) -> Arguments:
    """The same with what the job of Slurm says in which the ranks start, if there is one. Raises LauncherError."""
    if slurm_job.around() is None:
        return arguments
    return replace(arguments, overrides=[*job_overrides(arguments.overrides, os.environ), *arguments.overrides])


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
    goes_on = composed.sweep.resume is not None
    return None if goes_on or composed.hydra.mode is RunMode.MULTIRUN else composed


def prepare_one(hydra: Hydra, arguments: Arguments) -> Prepared:
    """The one run of a command that has no folder for it. Raises LauncherError."""
    return _prepare(compose(hydra, arguments), arguments)


def _prepare(composed: DictConfig, arguments: Arguments) -> Prepared:
    """The run, ready to start. Raises LauncherError; nothing is written yet."""
    drafted = _draft(composed)
    pythonpath = make_importable(arguments)
    return settle(drafted, ask_here(drafted, pythonpath), pythonpath)


def _draft(composed: DictConfig) -> Draft:
    """The draft of a run by itself. Raises LauncherError."""
    drafted = draft(composed, RUN_DIR)
    submit = drafted.config.submit
    if submit.kind is SubmitKind.docker and submit.docker.parallelism > 1:
        problem = "is how many runs of a sweep share the machine, and this is one run"
        raise ConfigError("submit.docker.parallelism", submit.docker.parallelism, problem, hint="leave it out")
    return drafted


def _go_on(
    hydra: Hydra, composed: DictConfig, arguments: Arguments, run: RunDir, drafted: Draft, pythonpath: Sequence[str]
) -> int:
    """Goes on with the run that the folder holds already, where that was asked for."""
    if drafted.config.checkpoint.resume is Resume.never:
        problem = "this folder already holds a run; give it another, or leave it out"
        hint = f"launcher resume {shlex.quote(short(run.path))} goes on with that run, as does checkpoint.resume=auto"
        raise ConfigError(RUN_DIR, run.path, problem, hint=hint)
    from launcher.resume import Wish, going_on, refuse_job

    refuse_job(run)
    console = Console()
    with going_on(run, drafted, pythonpath, Wish(), console) as accepted:
        if accepted is None:
            return int(Exit.FINISHED)
        return _inside_hydra(hydra, composed, arguments, lambda: accepted.run_it(console))


def _run(hydra: Hydra, composed: DictConfig, arguments: Arguments, run: RunDir, prepared: Prepared) -> int:
    """Starts a new run and follows it. Returns its exit code."""
    plan = prepared.plan_in(run)
    # before Hydra writes there: the folder may have become another's a moment ago
    try:
        run.create(prepared.text, to_json(plan.to_dict()))
    except LauncherError as error:
        raise LauncherError(f"{RUN_DIR}: {error}") from error
    console = Console()
    live = bool(composed.logging.progress)

    def job() -> int:
        print_plan(plan, short(run.path), console)
        launch = prepared.backend.render(run, plan)
        code = prepared.backend.submit(run, plan, launch, console, live=live)
        print_end(run, code, console)
        return code

    return _inside_hydra(hydra, composed, arguments, job)


def _inside_hydra(hydra: Hydra, composed: DictConfig, arguments: Arguments, job: Callable[[], int]) -> int:
    """Runs the job inside Hydra, as `hydra.main` would: its folder, its files, its callbacks."""
    callbacks = Callbacks(composed)
    callbacks.on_run_start(config=composed, config_name=arguments.config_name)
    try:
        done = run_job(
            hydra_context=HydraContext(config_loader=hydra.config_loader, callbacks=callbacks),
            task_function=lambda _: job(),
            config=composed,
            job_dir_key=RUN_DIR,
            job_subdir_key=None,
            configure_logging=True,
        )
    except OSError as error:
        where = folder(composed, RUN_DIR)
        raise ConfigError(RUN_DIR, where, f"the folder can't be written: {error.strerror}") from error
    callbacks.on_run_end(config=composed, config_name=arguments.config_name, job_return=done)
    return int(done.return_value)
