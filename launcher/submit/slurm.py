"""Slurm: a batch script in the run's folder, which is queued. The run outlives the command that gave it. The runs of a
sweep are one array, whose script lies in the sweep's folder."""

import re
import signal
import subprocess
import sys
from pathlib import Path

from rich.console import Console

from launcher import slurm_job
from launcher.config.schema import Config
from launcher.errors import ConfigError, Exit, LauncherError
from launcher.lock import let_go
from launcher.observe.progress import follow
from launcher.plan.plan import Plan
from launcher.run_dir import RunDir, State, write_atomic
from launcher.submit.base import Launch
from launcher.submit.slurm_script import SCRIPT, Scripts

ASK_EVERY = 2.0
_SUBMITTED = re.compile(r"^(\d+)(?:;|$)")


class Slurm:
    """A job of one run."""

    def __init__(self, config: Config) -> None:
        self._config, self.scripts = config, Scripts(config)

    def render(self, run: RunDir, plan: Plan) -> Launch:
        return self.scripts.of_run(run, plan)

    def submit(self, run: RunDir, plan: Plan, launch: Launch, console: Console, *, live: bool) -> int:
        """Queues the job, and follows it where submit.wait asks for that.

        Raises:
            LauncherError: Slurm refuses it, in its own words, or isn't there.
        """
        assert launch.script_text is not None
        run.write_status(state=State.submitted, job=None, pids={}, exit_code=None, error=None)
        let_go(run)
        job = queue(run.path / SCRIPT, launch.script_text)
        say_job(run, job)
        print_job(job, "", console)
        if not self._config.submit.wait:
            return int(Exit.FINISHED)
        return self._wait(run, job, console, live=live)

    def _wait(self, run: RunDir, job: str, console: Console, *, live: bool) -> int:
        while True:
            try:
                follow(run.path, lambda: not has_ended(job), live=live, console=console, every=ASK_EVERY)
            except KeyboardInterrupt:
                if not asks_to_cancel(job, console):
                    return 128 + signal.SIGINT
            else:
                return settle_status(run, job)


def print_job(job: str, what: str, console: Console) -> None:
    """Says which job was queued, and how it ends. `what`: more of it."""
    console.print(f"[bold green]submitted[/bold green]  job {job}{what}", highlight=False)
    console.print(f"cancel  scancel {job}", highlight=False)


def asks_to_cancel(job: str, console: Console) -> bool:
    """Whether one who has pressed Ctrl-C wants the job to be cancelled, which it is then. Without a terminal nobody can
    be asked, and it runs on."""
    if console.is_terminal and sys.stdin.isatty():
        try:
            said = console.input(f"\njob {job}: leave it running, or cancel it? [L/c] ")
        except (KeyboardInterrupt, EOFError):
            said = ""
        if said.strip().lower() in ("c", "cancel"):
            slurm_job.cancel(job)
            console.print(f"cancelled job {job}: what runs saves and ends", highlight=False)
            return True
    console.print(f"job {job} runs on; cancel it with scancel {job}", highlight=False)
    return False


def queue(path: Path, script: str, *options: str) -> str:
    """Writes a batch script and queues it. Returns the job's number.

    Raises:
        LauncherError: Slurm refuses it, in its own words, or isn't there.
    """
    write_atomic(path, script)
    sbatch("--test-only", *options, str(path))
    said = sbatch("--parsable", *options, str(path))
    found = _SUBMITTED.match(said)
    if found is None:
        raise LauncherError(f"sbatch gave no job: {said!r}")
    return found[1]


def say_job(run: RunDir, job: str) -> None:
    """Records the job of a run, which may have begun a moment ago."""
    run.write_status(state=State(run.read_status()["state"]), job={"id": job})


def settle_status(run: RunDir, job: str) -> int:
    """The exit code of a run whose job has ended, whose status says so from now on."""
    said = run.read_status()
    if said.get("exit_code") is not None:
        return int(said["exit_code"])
    known = slurm_job.look_up(job)
    state = "is unknown to Slurm" if known is None else f"ended as {known.state}"
    code = known.exit_code if known is not None and known.exit_code else int(Exit.RANK_FAILED)
    error = {"rank": None, "reason": f"job {job} {state} before the run could say how it ended"}
    run.write_status(state=State.failed, exit_code=code, error=error)
    return code


def has_ended(job: str) -> bool:
    """Whether Slurm says so, or doesn't know the job any more."""
    known = slurm_job.look_up(job)
    return known is None or known.has_ended


def sbatch(*arguments: str) -> str:
    """What sbatch says on its output. Raises LauncherError with Slurm's own words."""
    try:
        done = subprocess.run(
            ["sbatch", *arguments],
            env=slurm_job.environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
    except FileNotFoundError:
        raise ConfigError("submit", "slurm", "this machine has no sbatch", hint="submit=local runs here") from None
    if done.returncode != 0:
        words = done.stderr.strip() or done.stdout.strip() or f"it ended with {done.returncode}"
        raise LauncherError(f"Slurm refuses the job:\n  {words}")
    return done.stdout.strip()
