"""wandb, in a process of its own that reads the run's files: it can neither slow the training down nor stop it.

Rank 0 starts the process and tells it when the run is finished. Everything it sends stands in metrics.jsonl, plan.json
and config.yaml, where ``${oc.env:…}`` is still a reference, so no secret goes with it. Where to send it, project and
entity, is resolved.
"""

import os
import secrets
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from launcher.config.choices import WandbMode
from launcher.config.schema import WandbConfig
from launcher.config.validate import load
from launcher.observe.records import Record, Tail
from launcher.process import STOP_SIGNALS
from launcher.run_dir import RunDir, State, to_json, write_atomic

if TYPE_CHECKING:
    import wandb

INIT_SECONDS = 4.0
"""How long the service has to answer before the run is recorded offline instead."""
FINISH_SECONDS = 8
"""How long a finished run waits for its tracker, at most."""
LOOK_EVERY = 0.5
"""Seconds between two looks at the metrics."""

_FINISHED = b"finished"
_NOT_VALUES = ("kind", "update", "attempt", "metrics")


@contextmanager
def tracking(run: RunDir | None, config: WandbConfig, attempt: int) -> Iterator[None]:
    """While inside, the metrics of the run go to wandb. `run`: None on every rank but the first.

    A body that raises isn't kept waiting: the process sees its pipe close and ends by itself.
    """
    if run is None or config.mode is WandbMode.disabled:
        yield
        return
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "launcher.observe.tracker", str(run.path), str(attempt)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        print(f"tracker: can't be started: {error}", flush=True)
        yield
        return
    yield
    problem = _finish(process) or _read(run).get("problem")
    if problem:
        run.write_status(state=State.running, tracker=problem)


def _finish(process: "subprocess.Popen[bytes]") -> str | None:
    """Lets the process end, and ends it where that takes too long. Returns what went wrong."""
    assert process.stdin is not None
    try:
        process.stdin.write(_FINISHED)
        process.stdin.close()
    except OSError:  # it has ended already, and says why in its file
        pass
    try:
        process.wait(FINISH_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        problem = f"not done after {FINISH_SECONDS} s: `wandb sync` sends what is recorded in the run's folder wandb/"
        print(f"tracker: {problem}", flush=True)
        return problem
    return None


def _read(run: RunDir) -> dict[str, Any]:
    return run.read_json(run.wandb) if run.wandb.is_file() else {}


class _Follower:
    """What the process does: opens the tracker's run, hands on every metric, closes it."""

    def __init__(self, run: RunDir, attempt: int, control: int) -> None:
        self._run = run
        self._attempt = attempt
        self._control = control
        self._said = _read(run)
        """The contents of wandb.json: the id, for a later attempt to go on with, and what went wrong."""

    def follow(self) -> None:
        """To the end of the run. Raises nothing."""
        try:
            self._follow()
        except Exception as error:
            self._say(_first_line(error))

    def _follow(self) -> None:
        tracked, metrics, finished = self._open(), Tail(self._run.metrics), None
        while finished is None:
            finished = self._wait()
            for record in metrics.read():
                if record.get("attempt", 0) == self._attempt:
                    tracked.log(values(record), step=record["update"])
        signal.alarm(FINISH_SECONDS)  # where nobody is left to wait for this process
        tracked.finish(exit_code=0 if finished else 1)

    def _wait(self) -> bool | None:
        """Whether the run was finished or broken off; None while it runs."""
        if not select.select([self._control], [], [], LOOK_EVERY)[0]:
            return None
        return os.read(self._control, len(_FINISHED)) == _FINISHED

    def _open(self) -> "wandb.Run":
        # what fails here is said in this run's log, and asks no third service on the way
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        config = load(self._run.config)
        resumes = "id" in self._said
        self._said = {"id": self._said.get("id") or os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4)}
        self._write()
        given, sent = config.logging.wandb, attached(self._run)
        words = sent["logging"]["wandb"]  # where a reference to an environment variable is still one
        common: dict[str, Any] = {
            "dir": str(self._run.path),
            "id": self._said["id"],
            "name": os.environ.get("WANDB_NAME") or f"{sent['run']['name']} {self._run.path.name}",
            "project": given.project,
            "entity": given.entity,
            "group": words["group"],
            "tags": words["tags"] or None,
            "config": sent,
            # a repository's address and unsaved changes may hold secrets
            "settings": wandb.Settings(init_timeout=INIT_SECONDS, silent=True, console="off", disable_git=True),
        }
        if given.mode is WandbMode.online:
            try:
                return wandb.init(mode="online", resume="allow" if resumes else None, **common)
            except Exception as error:
                self._say(f"{_first_line(error)}; recorded offline, `wandb sync` sends it later")
                wandb.teardown()  # its service still holds the id
        return wandb.init(mode="offline", **common)

    def _say(self, problem: str) -> None:
        print(f"tracker: {problem}", flush=True)
        self._said["problem"] = problem
        self._write()

    def _write(self) -> None:
        write_atomic(self._run.wandb, to_json(self._said))


def attached(run: RunDir) -> dict[str, Any]:
    """The configuration as it stands in config.yaml, with the plan beside its sections."""
    frozen: Any = OmegaConf.to_container(OmegaConf.create(run.config.read_text(encoding="utf-8")), resolve=False)
    return {**frozen, "plan": run.read_json(run.plan)}


def values(record: Record) -> dict[str, Any]:
    """The numbers of a line of metrics.jsonl under the names they are tracked by: ``train/loss``."""
    metrics: Mapping[str, Any] = record.get("metrics") or {}
    numbers = {name: value for name, value in record.items() if name not in _NOT_VALUES} | dict(metrics)
    return {f"{record['kind']}/{name}": value for name, value in numbers.items() if value is not None}


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def main(run_dir: str, attempt: str) -> None:
    """Follows a run until standard input says that it is over. Asks nothing: what reads input finds none."""
    for number in STOP_SIGNALS:  # a scheduler sends them to every process, and the end of the run is told by its rank
        signal.signal(number, signal.SIG_IGN)
    control = os.dup(0)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    _Follower(RunDir(Path(run_dir)), int(attempt), control).follow()


if __name__ == "__main__":
    main(*sys.argv[1:])
