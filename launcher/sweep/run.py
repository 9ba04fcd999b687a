"""A sweep from its command to its end, through Hydra's sweeper and its launcher plugin."""

import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from typing import Any, cast

from hydra._internal.callbacks import Callbacks
from hydra._internal.core_plugins import basic_sweeper  # its classes are made anew by each scan for plugins
from hydra._internal.hydra import Hydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus, configure_log, run_job
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, RunMode
from omegaconf import OmegaConf, open_dict
from rich.console import Console

from launcher.config.choices import Retry
from launcher.config.compose import Arguments, compose
from launcher.errors import ConfigError, Exit, LauncherError
from launcher.prepare import folder, short
from launcher.report.show import print_verdict
from launcher.report.write import HTML, write_report
from launcher.run_dir import State, to_json
from launcher.sweep.array import check_array, submit_array, submit_report, wait_for
from launcher.sweep.lanes import num_lanes, run_lanes, take_lanes
from launcher.sweep.members import FOLDER, Member, plan_members
from launcher.sweep.mistakes import Over, sweeper_mistakes
from launcher.sweep.record import RESUME, Record, SweepFolder
from launcher.sweep.show import headline, print_end, print_left, print_plans, print_start, print_summary
from launcher.sweep.signals import SignalsNoted
from launcher.sweep.start import make_ready, run_here

PLUGIN = "hydra_plugins.launcher_submit.SubmitLauncher"


class MemberFailed(LauncherError):
    """A member without a result, as a sweeper sees it."""


class Sweep:
    """The runs of one command. The sweeper calls `launch` through the plugin."""

    def __init__(self, hydra: Hydra, arguments: Arguments, *, only_plan: bool = False) -> None:
        self._hydra, self._only_plan = hydra, only_plan
        self._console = Console()
        self._signals = SignalsNoted()
        master = compose(hydra, _as_sweep(arguments), run_mode=RunMode.MULTIRUN)
        self._record: Record | None = None
        self._retry: Retry = master.sweep.retry
        if master.sweep.resume is not None:
            self._record = Record.read(master.sweep.resume)
            arguments = self._record.arguments(arguments)
            master = compose(hydra, _as_sweep(arguments), run_mode=RunMode.MULTIRUN)
            master.hydra.sweep.dir = str(self._record.folder)
        self._arguments, self._master = arguments, master
        self._choices: dict[str, str] = master.hydra.runtime.choices
        if master.hydra.launcher is None or master.hydra.launcher.get("_target_") != PLUGIN:
            given = self._choices.get("hydra/launcher")
            hint = "where the ranks start is said by submit"
            raise ConfigError("hydra/launcher", given, "only launcher_submit starts runs here", hint=hint)
        self._folder = folder(master, FOLDER[0])
        self._files = SweepFolder(self._folder)
        if self._record is None and self._files.file.exists():
            problem = "this folder already holds a sweep; give it another, or leave it out"
            raise ConfigError(FOLDER[0], self._folder, problem)
        if only_plan and OmegaConf.select(master, "hydra.sweeper.storage"):
            with open_dict(master.hydra.sweeper):
                master.hydra.sweeper.storage = None  # a plan leaves no trial in a study
        self._fixed = self._fixed_keys()
        self._keep_going = bool(OmegaConf.select(master, "hydra.sweeper.max_failure_rate"))
        self._context = HydraContext(config_loader=hydra.config_loader, callbacks=Callbacks(master))
        self._reports_later = False
        self.members: list[Member] = []

    def _fixed_keys(self) -> set[str]:
        parsed = OverridesParser.create().parse_overrides(list(self._master.hydra.overrides.task))
        swept = {one.get_key_element() for one in parsed if one.is_sweep_override()}
        return {one.get_key_element() for one in parsed} - swept

    def _plan_batch(self, batch: Sequence[Sequence[str]]) -> list[Member]:
        def is_fixed(override: str) -> bool:
            return override.partition("=")[0] in self._fixed

        made = plan_members(
            self._hydra,
            self._arguments,
            self._master,
            batch,
            len(self.members),
            is_fixed,
            keep_going=self._keep_going,
            place=None if self._record is None else self._record.place,
        )
        check_array(made)
        take_lanes(made)
        if self._record is not None:
            self._record.check(made)
            for member in made:
                member.is_left = self._record.is_left(member, self._retry)
        self.members += made
        return made

    def _sweeper(self) -> Sweeper:
        """The sweeper of the configuration. Where it says all its runs beforehand, they are planned."""
        name = self._choices.get("hydra/sweeper")
        with sweeper_mistakes(name):
            sweeper = Plugins.instance().instantiate_sweeper(
                config=self._master, hydra_context=self._context, task_function=cast(Any, self)
            )
            if not isinstance(sweeper, basic_sweeper.BasicSweeper):
                if self._record is not None:
                    problem = f"hydra/sweeper={name} chooses its runs by results, and would choose others"
                    raise ConfigError(
                        RESUME, short(self._folder), problem, hint="launcher resume goes on with each run"
                    )
                return sweeper
            most = sweeper.max_batch_size
            if most is not None and most < 1:
                raise ConfigError("hydra.sweeper.max_batch_size", most, "must be at least 1, or null")
            parser = OverridesParser.create(config_loader=self._hydra.config_loader)
            # all runs at once: max_batch_size says in what portions they are asked for
            arguments = [*sweeper._parse_config(), *self._master.hydra.overrides.task]
            batches = sweeper.split_arguments(parser.parse_overrides(arguments), None)
        self._plan_batch([one for batch in batches for one in batch])
        # each was composed above
        sweeper.validate_batch_is_legal = lambda batch: None  # type: ignore[method-assign]
        return sweeper

    def plan(self, *, as_json: bool) -> int:
        """Prints the plan of the sweep, or of the first batch of a sweeper that asks in batches. Writes nothing."""
        with redirect_stdout(sys.stderr):  # sweepers log to stdout
            configure_log(self._master.hydra.hydra_logging, self._master.hydra.verbose)
            sweeper = self._sweeper()
            if not self.members:
                try:
                    with sweeper_mistakes(self._choices.get("hydra/sweeper")):
                        sweeper.sweep(list(self._master.hydra.overrides.task))
                except Over:
                    pass
        if as_json:
            plans = [one.prepared.plan_in(one.run).to_dict() if one.prepared else None for one in self.members]
            listed = [
                {"num": one.num, "overrides": one.overrides, "dir": str(one.where), "error": one.reason, "plan": plan}
                for one, plan in zip(self.members, plans, strict=True)
            ]
            sys.stdout.write(to_json({"members": listed}))
        else:
            whole = isinstance(sweeper, basic_sweeper.BasicSweeper)
            self._print_plans(self.members, whole=whole)
            if not whole:
                self._console.print("more runs follow, as the sweeper chooses them", highlight=False)
        return 0

    def train(self) -> int:
        """Runs the sweep to its end. Returns its exit code."""
        sweeper = self._sweeper()
        with self._files:
            return self._train(sweeper)

    def _train(self, sweeper: Sweeper) -> int:
        if self.members:
            self._print_plans(self.members, whole=True)
            self._open()
        callbacks, name = self._context.callbacks, self._arguments.config_name
        callbacks.on_multirun_start(config=self._master, config_name=name)
        gave_up: LauncherError | None = None
        with self._signals:
            try:
                with sweeper_mistakes(self._choices.get("hydra/sweeper")):
                    sweeper.sweep(list(self._master.hydra.overrides.task))
            except Over:
                pass
            except LauncherError as error:
                if not self._files.is_open:
                    raise
                gave_up = error
            except (KeyboardInterrupt, SystemExit):
                if self._signals.first is None or not self._files.is_open:
                    raise
            interrupted = self._signals.first
        self._cancel_the_rest()
        callbacks.on_multirun_end(config=self._master, config_name=name)
        print_summary(self.members, self._folder, self._console)
        if (
            interrupted is None and not self._reports_later
        ):  # else the end is wanted now, and `launcher report` writes it at any time
            self._report()
        if gave_up is not None and not isinstance(gave_up, MemberFailed):
            print(f"launcher train: {gave_up}", file=sys.stderr)
        return self._exit_code(interrupted, gave_up)

    def launch(self, batch: Sequence[Sequence[str]], first: int) -> Sequence[JobReturn]:
        """Runs the members of a batch one after another, for the sweeper, which numbers them from `first`."""
        is_planned = first < len(self.members)
        members = self.members[first : first + len(batch)] if is_planned else self._plan_batch(batch)
        if self._only_plan:
            raise Over
        if not is_planned:
            self._print_plans(members, whole=False)
            self._open()
        if any(member.is_queued for member in members):
            self._queue(members, can_wait=is_planned)
            return [self._returned(member, is_planned=is_planned) for member in members]
        together = num_lanes(members) > 1
        if together:
            self._run_together(members)
        returns = []
        for member in members:
            if self._signals.first is not None:
                raise Over
            if member.is_left and member.prepared is not None and not together:
                self._start(member)
            returns.append(self._returned(member, is_planned=is_planned))
        if self._signals.first is not None:
            raise Over
        return returns

    def _returned(self, member: Member, *, is_planned: bool) -> JobReturn:
        """What the sweeper is told of a member."""
        if member.has_failed or member.state is State.stopped:
            if is_planned:  # Hydra's basic sweeper ends at the first value that it can't read
                return JobReturn(overrides=member.overrides, status=JobStatus.COMPLETED, _return_value=None)
            why = headline(member.reason) if member.reason else member.state.value
            error = MemberFailed(f"{member.name} ended with {member.exit_code}: {why}")
            return JobReturn(overrides=member.overrides, status=JobStatus.FAILED, _return_value=error)
        return JobReturn(overrides=member.overrides, status=JobStatus.COMPLETED, _return_value=member.metric)

    def _queue(self, members: Sequence[Member], *, can_wait: bool) -> None:
        """Queues what is left of a batch as one array of Slurm, and follows it where submit.wait asks for that."""
        left = [member for member in members if member.is_left and member.prepared is not None]
        waits = any(member.drafted is not None and member.drafted.config.submit.wait for member in left)
        if not waits and not can_wait:
            problem = "a sweeper that chooses its runs by results needs them"
            raise ConfigError("submit.wait", "false", problem, hint="submit.wait=true")
        for member in left:
            self._in_hydra(member, partial(make_ready, member, self._arguments, self._console))
        if not left:
            return
        array = submit_array(left, self._folder, self._console)
        self._write()
        if waits:
            wait_for(array, self._console, lambda: self._signals.first is not None, self._write)
        else:
            submit_report(array, self._folder, self._console)
            self._reports_later = True

    def _run_together(self, members: Sequence[Member]) -> None:
        """Runs what is left of a batch in containers, several at a time."""
        left = [one for one in members if one.is_left and one.prepared is not None]
        for member in left:
            member.begin()
            self._in_hydra(member, partial(make_ready, member, self._arguments, self._console))
        run_lanes([one for one in left if one.reason is None], self._console, self._write)

    def _start(self, member: Member) -> None:
        """Runs one member to its end, and records what became of it."""
        print_start(member, self._console)
        member.begin()
        self._write()
        self._in_hydra(member, partial(run_here, member, self._arguments, self._console))
        print_end(member, self._console)
        self._write()

    def _in_hydra(self, member: Member, task: Callable[[], None]) -> None:
        """Does `task` in the folder of a member, as Hydra would. What goes wrong is the member's."""
        assert member.composed is not None
        try:
            done = run_job(
                hydra_context=self._context,
                task_function=lambda _: task(),
                config=member.composed,
                job_dir_key=FOLDER[0],
                job_subdir_key=FOLDER[1],
            )
        except OSError as error:
            refused = ConfigError(FOLDER[1], member.where, f"the folder can't be written: {error.strerror}")
            done = JobReturn(overrides=member.overrides, status=JobStatus.FAILED, _return_value=refused)
        finally:
            configure_log(self._master.hydra.hydra_logging, self._master.hydra.verbose)
        if done.status is JobStatus.FAILED:
            raised = done._return_value
            if not isinstance(raised, LauncherError):
                traceback.print_exception(raised)
                raised = LauncherError(f"{type(raised).__name__}: {raised}")
            member.refuse(raised)

    def _print_plans(self, members: Sequence[Member], *, whole: bool) -> None:
        """Prints what is left to run."""
        left = [one for one in members if one.is_left]
        if left:
            print_plans(left, self._folder, self._console, whole=whole)
        if self._record is not None:
            print_left(members, self._console)

    def _open(self) -> None:
        """Makes the sweep's folder, or takes it over, and records what is planned. Raises LauncherError."""
        if self._files.is_open:
            return
        if self._record is None:
            self._files.open(self._arguments)
        else:
            self._files.reopen(self._record)
        self._write()

    def _write(self) -> None:
        self._files.write(self.members)

    def _report(self) -> None:
        """Writes the report beside the runs, by which no sweep fails."""
        try:
            made = write_report(self._folder)
        except Exception as error:
            text = str(error) if isinstance(error, LauncherError) else f"{type(error).__name__}: {error}"
            print(f"launcher train: no report: {text}", file=sys.stderr)
        else:
            print_verdict(made, short(made.source.folder / HTML), self._console)

    def _cancel_the_rest(self) -> None:
        for member in self.members:
            if member.is_left and member.state in (State.planned, State.running):
                member.state = State.cancelled
        self._write()

    def _exit_code(self, interrupted: int | None, gave_up: LauncherError | None) -> int:
        stopped = any(member.exit_code == Exit.STOPPED for member in self.members)
        if interrupted is not None:
            return Exit.STOPPED if stopped else 128 + interrupted
        failed = [member.exit_code for member in self.members if member.has_failed]
        if failed and failed[0] is not None:
            return failed[0]
        if stopped:
            return Exit.STOPPED
        return Exit.FINISHED if gave_up is None else gave_up.exit_code


def _as_sweep(arguments: Arguments) -> Arguments:
    return replace(arguments, overrides=[*arguments.overrides, "hydra.mode=MULTIRUN"])
