"""torch's elastic agent with the launcher's rules: which failure ends a run and which starts its ranks again, when a
run that is told to stop is over, and what a hang is."""

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs
from torch.distributed.elastic.multiprocessing.api import SubprocessContext

from launcher.checkpoints import completed
from launcher.config.schema import Config
from launcher.config.times import seconds
from launcher.errors import Exit, LauncherError
from launcher.outcome import ATTEMPT
from launcher.process import STOP_SIGNALS
from launcher.run_dir import RunDir, State
from launcher.train import hangs, heart, stopping
from launcher.train.failures import Failure, Memory, clear_words, first_failure, read_words

KILL_SECONDS = 10
"""What a killed rank is given to be gone: one that waits in the kernel may not go at all."""
CAUSE_WITHIN = 2.0
"""Seconds that are waited for the rank that tore the connections, where only the torn ones have ended."""
LOOK_EVERY = 0.05
SAY_EVERY = 1.0
"""Seconds between two looks at hearts, and at whether the status still says that the run is stopping."""


@dataclass(frozen=True)
class Limits:
    """What the configuration allows, in seconds; None: without end."""

    stop_within: float
    time_limit: float | None
    hang_after: float | None
    max_restarts: int
    needs_checkpoint: bool = False
    """Whether ranks start again only where there is a checkpoint to start from."""


AUTO_RESTARTS = 3
"""What training.max_restarts=auto allows once there is a checkpoint."""


def limits(config: Config) -> Limits:
    """Those of a training."""
    training, stop_within = config.training, config.checkpoint.stop_within
    limit, after, restarts = training.time_limit, training.hang_after, training.max_restarts
    return Limits(
        seconds(stop_within, "checkpoint.stop_within"),
        None if limit is None else seconds(limit, "training.time_limit"),
        None if after is None else seconds(after, "training.hang_after"),
        AUTO_RESTARTS if restarts == "auto" else int(restarts),
        needs_checkpoint=restarts == "auto",
    )


class Supervisor(LocalElasticAgent):
    """One node's ranks, from their start to their end. Afterwards says how it came to that.

    Args:
        folder: the node's temporary folder.
        started: when the node was started, by `time.monotonic`.
    """

    def __init__(
        self, spec: WorkerSpec, logs_specs: LogsSpecs, run: RunDir, folder: Path, limits: Limits, started: float
    ) -> None:
        super().__init__(spec, logs_specs, shutdown_timeout=KILL_SECONDS)
        self._run, self._folder, self._limits, self._began = run, folder, limits, started
        self._memory = Memory()
        self._attempt = 0
        self._looked = self._said = 0.0
        self._restarts = 0
        self.stop: str | None = None
        """Why the run was told to stop, once that was seen."""
        self._deadline = 0.0
        self.is_overdue = False
        """Whether the ranks had to be killed because they were too slow to stop."""
        self.failure: Failure | None = None
        """The last one."""

    # what torch's agent calls

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        for worker in worker_group.workers:
            clear_words(worker.global_rank, self._run.logs, self._folder)
            heart.clear(self._folder, worker.global_rank)
        self._count_start(worker_group)
        with stopping.held_back():  # until a rank can take them
            started: dict[int, Any] = super()._start_workers(worker_group)
        return started

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._shutdown()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGKILL, timeout: int = KILL_SECONDS) -> None:
        """Kills the ranks and what they have started: to them SIGTERM is a wish, which takes a window."""
        super()._shutdown(signal.SIGKILL, KILL_SECONDS)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        exits = self._exits()
        self._look_for_stop()
        if any(exits.values()):
            failure = self._cause()
            self._shutdown()
            return self._decide(failure)
        if len(exits) == len(worker_group.workers):
            finished: RunResult = super()._monitor_workers(worker_group)
            return finished
        if self.stop is not None and time.monotonic() > self._deadline:
            self.is_overdue = True
            self._shutdown()
            return self._end()
        hang = self._look_for_hang(exits)
        if hang is not None:
            return self._decide(hang)
        return RunResult(state=WorkerState.HEALTHY)

    # what ranks have become

    def _processes(self) -> dict[int, Any]:
        """The process of each rank."""
        assert isinstance(self._pcontext, SubprocessContext)
        handlers = self._pcontext.subprocess_handlers
        return {worker.global_rank: handlers[worker.local_rank].proc for worker in self._worker_group.workers}

    def _exits(self) -> dict[int, int]:
        """The exit codes of the ranks that have ended."""
        codes = {rank: process.poll() for rank, process in self._processes().items()}
        return {rank: code for rank, code in codes.items() if code is not None}

    def _cause(self) -> Failure:
        """The rank that failed first. Waits for it for a moment, where others have only lost their connection to it."""
        end = time.monotonic() + CAUSE_WITHIN
        failed: dict[int, int] = {}
        hint = self._memory.hint()
        while True:
            exits = self._exits()
            failed |= {rank: code for rank, code in exits.items() if code and rank not in failed}
            failure, is_certain = first_failure(failed, read_words(self._run.logs, self._folder), hint)
            if is_certain or len(exits) == len(self._worker_group.workers) or time.monotonic() > end:
                return failure
            time.sleep(LOOK_EVERY)

    def _decide(self, failure: Failure) -> RunResult:
        """Whether the ranks, which have ended, start again."""
        if failure.signal in STOP_SIGNALS:  # it couldn't take it, as a rank does that is told to stop
            stopping.ask(self._folder, signal.Signals(failure.signal).name)
        self._look_for_stop()
        may = not self._limits.needs_checkpoint or bool(completed(self._run))
        goes_on = failure.is_lost and self.stop is None and self._remaining_restarts > 0 and may
        self._restarts += goes_on
        self.failure = failure
        self._record(failure, goes_on=goes_on)
        return RunResult(state=WorkerState.FAILED) if goes_on else self._end()

    def _end(self) -> RunResult:
        self._remaining_restarts = 0
        return RunResult(state=WorkerState.FAILED)

    def _look_for_hang(self, exits: dict[int, int]) -> Failure | None:
        """The ranks that hang, if any: their stacks are in the logs then, and all ranks have been killed."""
        now, after = time.monotonic(), self._limits.hang_after
        if after is None or now - self._looked < min(SAY_EVERY, after / 4):
            return None
        self._looked = now
        alive = {rank: process.pid for rank, process in self._processes().items() if rank not in exits}
        hang = hangs.find(self._folder, list(alive), after)
        if hang is None:
            return None
        logs = {one: self._run.rank_log(one) for one in alive}
        who = "rank " + ", ".join(map(str, hang.ranks))
        hangs.write_stacks(logs, alive, f"{who} {hang.how}: the Python stacks of this process follow")
        hangs.dump_recorders(self._folder)
        self._shutdown()
        rank, *others = hang.ranks
        too = f" (so did rank {', '.join(map(str, others))})" if others else ""
        reason = f"{hang.how} at update {hang.update}{too}; stacks in {logs[rank].parent.name}/{logs[rank].name}"
        return Failure(rank, Exit.RANK_FAILED, reason, hang.how, is_lost=True)

    # what the run's files say

    def _count_start(self, worker_group: WorkerGroup) -> None:
        """Gives this start of the ranks its number, over all starts of the run. Raises StorageError."""
        with suppress(LauncherError):
            self._attempt = int(self._run.read_status().get("attempts_started") or 0)
        os.environ[ATTEMPT] = str(self._attempt)
        if worker_group.group_rank == 0:
            state = State.stopping if self.stop else State.running if self._restarts else State.submitted
            stop = {} if self.stop else {"stop": None}
            self._run.write_status(state=state, attempt=self._attempt, attempts_started=self._attempt + 1, **stop)

    def _look_for_stop(self) -> None:
        now, is_new = time.monotonic(), self.stop is None
        if is_new:
            limit = self._limits.time_limit
            if limit is not None and now - self._began > limit:
                stopping.ask(self._folder, stopping.TIME_LIMIT)
            self.stop = stopping.asked(self._folder)
            if self.stop is None:
                return
            self._deadline = now + self._limits.stop_within
        if now - self._said < SAY_EVERY and not is_new:
            return
        self._said = now
        with suppress(LauncherError):
            # the first rank, which writes there too, may not have known yet
            if is_new or self._run.read_status()["state"] != State.stopping.value:
                within = self._limits.stop_within
                said = {"why": self.stop, "within": within} if within else None
                self._run.write_status(state=State.stopping, stop=said)

    def _record(self, failure: Failure, *, goes_on: bool) -> None:
        said = heart.pulse(self._folder, failure.rank)
        newest = completed(self._run)
        entry = {
            "attempt": self._attempt,
            "rank": failure.rank,
            "reason": failure.reason,
            "how": failure.how,
            "update": None if said is None else said.update,
            "time": time.time(),
            "goes_on": goes_on,
            "from_update": newest[0].update if newest else None,
            "restart": self._restarts,
            "max_restarts": self._limits.max_restarts,
        }
        with suppress(LauncherError):
            before = self._run.read_status()
            failures = [*(before.get("failures") or []), entry]
            self._run.write_status(state=State(before["state"]), failures=failures)
