"""Going on with a run: the command resume, and what `launcher train` does with checkpoint.resume=auto."""

import argparse
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from launcher.checkpoints import Checkpoint, completed, newest_whole, put_aside_after
from launcher.config.compose import Arguments, hydra_session
from launcher.config.difference import Difference, differences, listed
from launcher.config.override import override
from launcher.config.validate import parse
from launcher.ending import print_end
from launcher.errors import ConfigError, Exit, LauncherError, StorageError
from launcher.lock import holding
from launcher.observe.records import latest_updates, next_attempt
from launcher.plan.batch import GLOBAL, parse_count
from launcher.plan.facts import Facts, changed, token_targets
from launcher.plan.plan import Plan
from launcher.plan.show import print_plan
from launcher.plan.targets import spent
from launcher.prepare import Draft, Prepared, ask_here, config_digest, draft_of, settle, short
from launcher.run_dir import RunDir, State, to_json, write_together, writing
from launcher.slurm_job import around, look_up
from launcher.submit.engine import refuse_running

EPILOG = """\
The run goes on in its own folder, with its own configuration. Overrides may
change where and how it runs, as in cluster.ranks_per_node=4, strategy=fsdp,
mesh.pp=2 or batch.micro_batch_size=8: the update is the same. What would change
the result is refused with the list of such keys, unless --force takes it.
docs/checkpoints.md says which keys those are.
"""


@dataclass(frozen=True)
class Wish:
    """How a run is to go on."""

    force: bool = False
    """Also with a configuration that changes the result, and where a process of another machine has the run."""
    start: int | None = None
    """The update whose checkpoint it goes on from; None: the newest."""


def resume(argv: Sequence[str]) -> int:
    """Goes on with a run from its newest checkpoint and follows it to its end. Returns the run's exit code."""
    given = _arguments(argv)
    run = RunDir.existing(given.run_dir)
    if not run.config.is_file():
        raise LauncherError(f"{given.run_dir}: no run here: config.yaml is missing")
    refuse_job(run)
    arguments = Arguments(given.overrides, given.config_name or "config", given.config_dir)
    folders = [] if given.config_dir is None else [str(Path(given.config_dir).resolve())]
    wish, console = Wish(given.force, given.start), Console()
    with hydra_session(arguments) as hydra, holding(run, force=wish.force):
        text = run.config.read_text(encoding="utf-8")
        drafted = draft_of(override(hydra, arguments, text)) if given.overrides else Draft(parse(text), text, [])
        with going_on(run, drafted, folders, wish, console) as accepted:
            return int(Exit.FINISHED) if accepted is None else accepted.run_it(console)


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="launcher resume",
        usage="launcher resume RUN_DIR [--force] [--from N] [--config-dir FOLDER] [overrides]",
        description="Goes on with a run that was stopped, killed or failed, from its newest checkpoint.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="the folder of the run")
    parser.add_argument("overrides", nargs="*", help="as of launcher train, for keys of where and how")
    parser.add_argument(
        "--force",
        action="store_true",
        help="take changes of the result; take over a folder that a launcher of another machine has left",
    )
    parser.add_argument(
        "--from", dest="start", type=int, metavar="N", help="from the checkpoint of update N; later ones are put aside"
    )
    parser.add_argument("--config-dir", "-cd", metavar="FOLDER", help="a folder with choices of groups of your own")
    parser.add_argument("--config-name", "-cn", metavar="NAME", help="the configuration that choices are composed with")
    return parser.parse_intermixed_args(list(argv))


@dataclass(frozen=True)
class Accepted:
    """A run that is there and can go on. Nothing was changed yet."""

    run: RunDir
    prepared: Prepared
    plan: Plan
    checkpoint: Checkpoint | None
    """None: it starts from the beginning."""
    notes: list[str]
    """What to say of how it goes on."""
    puts_later_aside: bool

    def write(self, console: Console) -> None:
        """Says how the run goes on, and makes its files those of the run that does.

        Raises:
            LauncherError: they can't be written; the run is as it was.
        """
        print_plan(self.plan, short(self.run.path), console)
        for note in self.notes:
            console.print(f"[bold]resume[/bold] {escape(note)}", highlight=False, soft_wrap=True)
        texts = {self.run.plan: to_json(self.plan.to_dict())}
        if self.prepared.text != self.run.config.read_text(encoding="utf-8"):
            texts = {self.run.config: self.prepared.text} | texts
        update = 0
        applied: int | None = 0
        if self.checkpoint is not None:
            update, applied = self.checkpoint.update, self.checkpoint.applied()
        try:
            with writing(self.run.logs):
                self.run.logs.mkdir(exist_ok=True)  # nothing of a run needs those of before
            write_together(texts)
            attempt = _attempts(self.run)
            if self.puts_later_aside:
                put_aside_after(self.run, update, attempt)
            begins = {"attempt": attempt, "attempts_started": attempt, "update": update, "applied": applied}
            past = dict.fromkeys(("exit_code", "error", "stop", "tracker", "picture"))
            self.run.write_status(state=State.submitted, host=socket.gethostname(), pids={}, **begins, **past)
        except StorageError as error:
            raise LauncherError(str(error)) from error

    def run_it(self, console: Console) -> int:
        """Starts the ranks and follows them. Returns the run's exit code."""
        launch = self.prepared.backend.render(self.run, self.plan)
        live = bool(parse(self.prepared.text).logging.progress)
        code = self.prepared.backend.submit(self.run, self.plan, launch, console, live=live)
        print_end(self.run, code, console)
        return code


@contextmanager
def going_on(
    run: RunDir, drafted: Draft, folders: Sequence[str], wish: Wish, console: Console
) -> Iterator[Accepted | None]:
    """While inside, `run` is this process's, accepted and written to go on with the configuration `drafted`.

    None: it is finished, which was said. `folders`: for the ranks' PYTHONPATH, beside those that the run has.

    Raises:
        Locked: another launcher looks after it.
        LauncherError: it can't go on like this; nothing was changed.
    """
    with holding(run, force=wish.force):
        accepted = _accept(run, drafted, folders, wish)
        if accepted is None:
            more = "" if wish.start is None else f"; with --force it goes on from update {wish.start} all the same"
            console.print(f"[bold green]finished[/bold green]  nothing is left to do in {short(run.path)}{more}")
        else:
            accepted.write(console)
        yield accepted


def _accept(run: RunDir, drafted: Draft, folders: Sequence[str], wish: Wish) -> Accepted | None:
    before, planned = _planned(run)
    found = differences(run.config.read_text(encoding="utf-8"), drafted.text)
    asked = parse_count(GLOBAL, drafted.config.batch.global_batch_size, allow_null=True)
    if asked is not None and asked != before.global_batch_size:
        found.append(Difference(GLOBAL, before.global_batch_size, asked))
    _refuse(run, found, wish)
    _refuse_edited(run, before, wish)
    if _is_finished(run) and not (wish.force and (found or wish.start is not None)):
        return None
    _refuse_spent(run, drafted.config.targets.device_hours)
    checkpoint, notes = _start(run, wish)
    here = Path(before.cwd).is_dir()
    if not here:
        notes.append(f"the folder {before.cwd}, where the run was started, is gone: ranks work in the current one")
    pythonpath = list(dict.fromkeys([*before.pythonpath, *([] if here else [str(Path.cwd())]), *folders]))
    cwd = before.cwd if here else None
    facts = ask_here(drafted, pythonpath, cwd)
    if not found:
        facts = _known(drafted, planned, facts)
    prepared = settle(drafted, facts, pythonpath, cwd)
    found += _of_plan(before, prepared.plan, drafted, planned, facts, found)
    _refuse(run, found, wish)
    notes += [f"with a changed result, as --force takes it: {one}" for one in found]
    made = prepared.plan_in(run)
    notes.append(_begins(run, checkpoint, made.num_updates))
    made = replace(made, notes=[*made.notes, *(f"changed on resuming: {one}" for one in found)])
    return Accepted(run, prepared, made, checkpoint, notes, wish.start is not None)


def refuse_job(run: RunDir) -> None:
    """That no job of a scheduler and no container has the run. Raises LauncherError."""
    status = run.read_status() if run.status.exists() else {}
    refuse_running(run, status)
    name = (status.get("job") or {}).get("id")
    job = None if name is None else look_up(str(name))
    if job is not None and not job.has_ended and job.id != around():
        raise LauncherError(f"{short(run.path)}: job {job.id} of this run is {job.state}; scancel {job.id} ends it")


def _planned(run: RunDir) -> tuple[Plan, Facts]:
    """The plan of the run that is there, and the facts in it. Raises LauncherError."""
    try:
        plan = Plan.from_json(run.plan.read_text(encoding="utf-8"))
        return plan, Facts(**plan.facts)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise LauncherError(f"{run.plan}: can't be read: {error}") from error


def _refuse(run: RunDir, found: Sequence[Difference], wish: Wish) -> None:
    if found and not wish.force:
        keys = "a key differs" if len({one.key for one in found}) == 1 else "keys differ"
        raise LauncherError(
            f"{short(run.path)}: {keys} from the run that is there, which would change its result\n"
            f"{listed(found)}\n  leave it as it was, or take the change: launcher resume {short(run.path)} --force"
            " with the same overrides"
        )


def _refuse_edited(run: RunDir, before: Plan, wish: Wish) -> None:
    """That config.yaml is as the run was planned with: what was edited there would change its result unseen."""
    is_same = before.config_sha256 in ("", config_digest(run.config.read_text(encoding="utf-8")))
    if not is_same and not wish.force:
        raise LauncherError(
            f"{short(run.config)}: was edited since the run was planned, which may change its result\n  put it back "
            f"and give changes as overrides, or take it as it is: launcher resume {short(run.path)} --force"
        )


def _refuse_spent(run: RunDir, hours: float | None) -> None:
    """That the run has device-hours left. Raises ConfigError."""
    used = spent(run, hours)
    if used is not None:
        problem = f"is used up: the run has had {used:.4g} device-hours, over all of its attempts"
        hint = f"launcher resume {short(run.path)} targets.device_hours={2 * used:.2g} goes on with more"
        raise ConfigError("targets.device_hours", hours, problem, hint=hint)


def _is_finished(run: RunDir) -> bool:
    with suppress(LauncherError):
        return run.read_status().get("state") == State.finished.value
    return False


def _start(run: RunDir, wish: Wish) -> tuple[Checkpoint | None, list[str]]:
    """The checkpoint that the run goes on from, and what to say beside that. Raises LauncherError."""
    there = completed(run)
    if wish.start is None:
        checkpoint, problems = newest_whole(run)
        if there and checkpoint is None:
            text = "\n  ".join(problems)
            hint = f"without {short(run.checkpoints)} it starts from the beginning"
            raise LauncherError(f"{short(run.path)}: none of its checkpoints can be used\n  {text}\n  {hint}")
        return checkpoint, [f"passes over a checkpoint: {one}" for one in problems]
    checkpoint = next((one for one in there if one.update == wish.start), None)
    if checkpoint is None:
        updates = ", ".join(str(one.update) for one in reversed(there)) or "none"
        raise LauncherError(f"--from {wish.start}: there is no checkpoint of that update; there are: {updates}")
    problem = checkpoint.problem()  # its contents too: what else there is will be put aside
    if problem is not None:
        raise LauncherError(f"--from {wish.start}: {problem}")
    later = ", ".join(str(one.update) for one in reversed(there) if one.update > wish.start)
    aside = f"puts aside the checkpoints of later updates, in {short(run.checkpoints)}: {later}"
    return checkpoint, [aside] if later else []


def _begins(run: RunDir, checkpoint: Checkpoint | None, num_updates: int | None) -> str:
    """From where a run goes on, and how much of it is repeated."""
    update = 0 if checkpoint is None else checkpoint.update
    repeated = max(0, _reached(run) - update)
    again = f"; {repeated} {'update' if repeated == 1 else 'updates'} after it repeated" if repeated else ""
    if checkpoint is None:
        return f"from the beginning, for there is no checkpoint yet{again.replace(' after it', '')}"
    total = "" if num_updates is None else f" of {num_updates}"
    return f"from the checkpoint of update {update}{total}{again}"


def _attempts(run: RunDir) -> int:
    """How often the ranks of the run have started: the number of the attempt that begins."""
    written = next_attempt(run.metrics)
    with suppress(LauncherError, ValueError, TypeError):
        return max(written, int(run.read_status().get("attempts_started") or 0))
    return written


def _reached(run: RunDir) -> int:
    """The last update that the run came to, by its status and its metrics."""
    written = latest_updates(run.metrics)
    reached = int(written[-1]["update"]) if written else 0
    with suppress(LauncherError, ValueError, TypeError):
        reached = max(reached, int(run.read_status().get("update") or 0))
    return reached


def _known(drafted: Draft, planned: Facts, facts: Facts) -> Facts:
    """The facts of an unchanged model and unchanged data: those of the plan, where they couldn't be asked here."""
    has_all = {str(one) for one in token_targets(drafted.config)} <= planned.updates_at_tokens.keys()
    return replace(planned, cuda_devices=facts.cuda_devices) if facts.samples is None and has_all else facts


def _of_plan(
    before: Plan, made: Plan, drafted: Draft, planned: Facts, facts: Facts, found: Sequence[Difference]
) -> list[Difference]:
    """What differs between the plans of a run, and would change its result: the solved batch, the data, the model."""
    more = []
    if made.global_batch_size != before.global_batch_size and GLOBAL not in {one.key for one in found}:
        how = f" ({GLOBAL}={before.global_batch_size} keeps it)"
        more.append(Difference(GLOBAL, before.global_batch_size, f"{made.global_batch_size}{how}"))
    if found:  # of another configuration they differ anyway
        return more
    facts_differ = [
        one for one in changed(planned, facts) if one[0] != "updates_at_tokens" and one[2] not in (None, [], {})
    ]
    plain = [one for one in facts_differ if not isinstance(one[1], list | dict)]
    where = {"samples": "data.train (samples)", "validation_samples": "data.validation (samples)"}
    more += [Difference(where.get(name, f"model or task ({name})"), *values) for name, *values in plain or facts_differ]
    return more
