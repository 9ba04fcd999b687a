"""Slurm: a batch script in the run's folder, which is queued. The run outlives the command that gave it. The runs of a
sweep are one array, whose script lies in the sweep's folder."""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from launcher import slurm_job
from launcher.config.compose import shipped
from launcher.config.schema import Config
from launcher.config.times import seconds
from launcher.errors import ConfigError, Exit, LauncherError
from launcher.lock import let_go
from launcher.observe.progress import follow
from launcher.plan.plan import Plan
from launcher.run_dir import RunDir, State, write_atomic
from launcher.submit.base import Launch, node_argv, node_environment

SCRIPT = "job.sbatch"
LEAD = 30.0
"""Seconds that a job is told to stop before its ranks have to have stopped (checkpoint.stop_within)."""
ASK_EVERY = 2.0
_NO_NAME = re.compile(r"[^\w.+-]+")
_SUBMITTED = re.compile(r"^(\d+)(?:;|$)")


class Slurm:
    """A job of one run."""

    def __init__(self, config: Config) -> None:
        self._config, self._slurm = config, config.submit.slurm

    def render(self, run: RunDir, plan: Plan) -> Launch:
        command, options = node_argv(run.path), [f"--output={run.logs}/slurm_%j.out", *self.options(plan)]
        text = self._script(options, plan, [f"command=({shlex.join(command)})"])
        argv, path = [command] * plan.nodes, str(run.path / SCRIPT)
        return Launch(argv, self._environment(plan), script=path, script_text=text)

    def render_array(self, folder: Path, runs: Sequence[RunDir], plan: Plan) -> str:
        """The script of one array for `runs`, which ask for the same as `plan` does. Its output goes below `folder`."""
        most = self._slurm.array_parallelism
        array = f"--array=0-{len(runs) - 1}" + ("" if most is None else f"%{most}")
        options = [array, f"--output={folder}/logs/slurm_%A_%a.out", *self.options(plan)]
        *agent, _ = node_argv(Path())
        what = [
            f"runs=({shlex.join(str(run.path) for run in runs)})",
            f'command=({shlex.join(agent)} "${{runs[$SLURM_ARRAY_TASK_ID]}}")',
        ]
        return self._script(options, plan, what)

    def render_report(self, folder: Path, plan: Plan) -> str:
        """The script of a small job that writes the report of the sweep in `folder`."""
        named = ("partition", "account", "qos", "reservation")
        options = ["--job-name=report", f"--output={folder}/logs/report_%j.out", *self._given(named)]
        command = [sys.executable, "-m", "launcher", "report", str(folder)]
        return _text([*self._head(options, plan), f"exec {shlex.join(command)}"])

    def _script(self, options: list[str], plan: Plan, what: list[str]) -> str:
        name = _NO_NAME.sub("_", self._config.run.name) or "launcher"
        own = [f"srun_options=({shlex.join(self._srun_options())})", f"max_requeues={self._slurm.requeue}"]
        return _text([*self._head([f"--job-name={name}", *options], plan), *what, *own, "", body().rstrip("\n")])

    def _head(self, options: list[str], plan: Plan) -> Iterator[str]:
        """What a script asks for, and what surrounds its command."""
        yield "#!/usr/bin/env bash"
        yield from (f"#SBATCH {_quoted(option)}" for option in options)
        yield ""
        yield f"cd {shlex.quote(plan.cwd)} || exit"
        given = (one.partition("=")[::2] for one in self._slurm.env)
        for name, value in (*self._environment(plan).items(), *given):
            yield f"export {name}={shlex.quote(value)}"
        yield from self._slurm.setup

    def _environment(self, plan: Plan) -> dict[str, str]:
        return node_environment(plan, plan.ranks_per_node, cores=self._slurm.cpus_per_task)

    def _given(self, names: Sequence[str]) -> Iterator[str]:
        """Slurm's options of these names, where the configuration has a value."""
        for name in names:
            value = getattr(self._slurm, name)
            if value is not None:
                yield f"--{name.replace('_', '-')}={value}"

    def options(self, plan: Plan) -> Iterator[str]:
        """What the job asks for, but for its name and its output."""
        slurm = self._slurm
        yield "--open-mode=append"
        yield f"--nodes={plan.nodes}"
        yield "--ntasks-per-node=1"
        named = ("cpus_per_task", "gpus_per_node", "gres", "mem", "partition", "account", "qos", "time")
        yield from self._given((*named, "constraint", "reservation", "exclude"))
        yield f"--signal=B:USR1@{self._lead()}"
        yield "--requeue" if slurm.requeue else "--no-requeue"
        yield from slurm.sbatch

    def _srun_options(self) -> list[str]:
        slurm = self._slurm
        own = [f"--cpus-per-task={slurm.cpus_per_task}"] if slurm.cpus_per_task is not None else []
        if slurm.container_image is not None:
            own.append(f"--container-image={slurm.container_image}")
        if slurm.container_mounts:
            own.append(f"--container-mounts={','.join(slurm.container_mounts)}")
        return [*own, *slurm.srun]

    def _lead(self) -> int:
        """Seconds before the time limit at which the job is told to stop."""
        within = seconds(self._config.checkpoint.stop_within, "checkpoint.stop_within")
        before = self._slurm.signal_before
        return round(within + LEAD if before is None else seconds(before, "submit.slurm.signal_before"))

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
        try:
            follow(run.path, lambda: not has_ended(job), live=live, console=console, every=ASK_EVERY)
        except KeyboardInterrupt:
            print_left(job, console)
            return 128 + 2
        return settle_status(run, job)


def print_job(job: str, what: str, console: Console) -> None:
    """Says which job was queued, and how it ends. `what`: more of it."""
    console.print(f"[bold green]submitted[/bold green]  job {job}{what}", highlight=False)
    console.print(f"cancel  scancel {job}", highlight=False)


def print_left(job: str, console: Console) -> None:
    """Says to one who doesn't wait for a job any more that it runs on."""
    console.print(f"job {job} runs on; cancel it with scancel {job}", highlight=False)


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


def _quoted(option: str) -> str:
    """An option of a #SBATCH line, which sbatch divides at spaces outside of quotes.

    Raises:
        ConfigError: it can't stand on one line.
    """
    if "\n" in option:
        raise ConfigError("submit.slurm.sbatch", option, "an option can't have a line break")
    if not re.search(r"[\s'\"\\#]", option):
        return option
    return '"' + option.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _text(lines: Sequence[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def body() -> str:
    """What every job does, as slurm/body.sh has it."""
    return (shipped("slurm") / "body.sh").read_text(encoding="utf-8")
