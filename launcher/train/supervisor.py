"""torch's elastic agent with the launcher's rules: which failure ends a run and which starts its ranks again, on how
many nodes, when a run that is told to stop is over, and what a hang is."""

import os
import signal
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.api import SubprocessContext

from launcher.checkpoints import completed
from launcher.errors import Exit, LauncherError
from launcher.outcome import ATTEMPT
from launcher.process import STOP_SIGNALS
from launcher.run_dir import RunDir, State
from launcher.train import hangs, heart, stopping
from launcher.train.failures import Failure, Memory, clear_words, first_failure, read_words
from launcher.train.limits import Limits
from launcher.train.nodes import AGAIN, FINISHED, OVER, Report, Start, Verdict, choose, resize
from launcher.train.watch import StopWatch, count_start

KILL_SECONDS = 10
"""What a killed rank is given to be gone: one that waits in the kernel may not go at all."""
CAUSE_WITHIN = 2.0
"""Seconds that are waited for the rank that tore the connections, where only the torn ones have ended."""
LOOK_EVERY = 0.05
HASTE = 0.75
"""The part of training.hang_after after which ranks hang where those of another node did."""
HEARTS_EVERY = 1.0
"""Seconds between two looks at hearts."""


class Supervisor(LocalElasticAgent):
    """One node's ranks, from their start to their end. Afterwards says how it came to that.

    Args:
        node: which node this is; 0: the first, which decides for all and writes the run's status.
        folder: the node's temporary folder.
        started: when the node was started, by `time.monotonic`.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        logs_specs: LogsSpecs,
        run: RunDir,
        node: int,
        folder: Path,
        limits: Limits,
        started: float,
    ) -> None:
        super().__init__(spec, logs_specs, shutdown_timeout=KILL_SECONDS)
        self._run, self._folder, self._limits = run, folder, limits
        self.is_first = node == 0
        self._watch = StopWatch(run, folder, limits, started, says=self.is_first)
        self._memory = Memory()
        self._attempt = 0
        self._looked = 0.0
        self._restarts = 0
        self._start: Start
        self._report: Report | None = None
        """How this node's ranks have ended, once they have."""
        self.waits_for_nodes = False
        """Whether there are no ranks now that could be told to stop."""
        self.is_overdue = False
        """Whether the ranks had to be killed because they were too slow to stop."""
        self.failure: Failure | None = None
        """The last one."""

    @property
    def stop(self) -> str | None:
        """Why the run was told to stop, once that was seen, or was said by another node."""
        return self._watch.stop

    # what torch's agent calls

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self.waits_for_nodes = True
        asked = stopping.asked(self._folder)
        if asked is not None:
            raise SignalException("told to stop before the nodes met", stopping.number_of(asked))
        super()._rendezvous(worker_group)
        place, nodes = worker_group.group_rank, worker_group.group_world_size
        assert place is not None
        assert nodes is not None
        self._start = Start(worker_group.store, place, nodes, is_first=self.is_first)
        self._report = None

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        if self.is_first:
            resize(self._run, self._start.nodes)
            clear_words(self._run.logs)
            is_stopping = self.stop is not None
            self._attempt = count_start(self._run, restarts=self._restarts, is_stopping=is_stopping)
            self._start.begin(self._attempt)
        else:
            self._attempt = self._start.begun()
        os.environ[ATTEMPT] = str(self._attempt)
        clear_words(self._folder)
        heart.clear(self._folder)
        self.waits_for_nodes = False
        with stopping.held_back():  # until a rank can take them
            started: dict[int, Any] = super()._start_workers(worker_group)
        return started

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._shutdown()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGKILL, timeout: int = KILL_SECONDS) -> None:
        """Kills the ranks and what they have started: to them SIGTERM is a wish, which takes a window."""
        super()._shutdown(signal.SIGKILL, KILL_SECONDS)

    def _exit_barrier(self) -> None:
        """Nothing: all have heard that all have ended."""

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._start.beat()
        self._watch.look()
        if self._report is None:
            self._report = self._look()
        verdict = None
        if self._report is not None:
            verdict = self._judge() if self.is_first else self._start.verdict()
        return RunResult(state=WorkerState.HEALTHY) if verdict is None else self._obey(verdict)

    # how ranks end

    def _look(self) -> Report | None:
        """How this node's ranks have ended, which the others are told before any that is left is killed; None: they
        run."""
        exits = self._exits()
        report: Report | None
        if len(exits) == len(self._worker_group.workers) and not any(exits.values()):
            report = Report(is_done=True, stop=self.stop)
        elif any(exits.values()):
            report = self._of_failure(*self._cause())
        elif self._watch.is_over:
            report = Report(stop=self.stop, is_overdue=True)
        elif self._start.has_trouble():
            report = self._of_hang(exits, hastily=True) or Report(stop=self.stop)
        else:
            report = self._of_hang(exits) or self._of_lost_node()
        if report is not None:
            self._start.report(report)
            if not report.is_done:
                self._shutdown()
        return report

    def _of_failure(self, failure: Failure, is_certain: bool) -> Report:
        if failure.signal in STOP_SIGNALS:  # it couldn't take it, as a rank does that is told to stop
            stopping.ask(self._folder, signal.Signals(failure.signal).name)
            self._watch.look()
        said = heart.pulse(self._folder, failure.rank)
        return Report(failure, is_certain, None if said is None else said.update, stop=self.stop)

    def _of_lost_node(self) -> Report | None:
        """What the first node says of another that is gone without a trace; None: all live."""
        lost = self._start.lost() if self.is_first else []
        return self._loss(lost[0]) if lost else None

    def _loss(self, place: int) -> Report:
        said = heart.pulse(self._folder, self._worker_group.workers[0].global_rank)  # all are about as far
        report = self._start.loss(place, place * self._worker_group.spec.local_world_size)
        return replace(report, update=None if said is None else said.update)

    # what follows

    def _judge(self) -> Verdict | None:
        """What the first node decides; None: some node hasn't said yet how its ranks have ended."""
        said, lost = self._start.reports(), self._start.lost()
        if len(said.keys() | set(lost)) < self._start.nodes:
            return None
        reports = list(said.values())
        if all(one.is_done for one in reports) and len(said) == self._start.nodes:
            verdict = Verdict(FINISHED, choose(reports))
        else:
            verdict = self._after(choose([*reports, *(self._loss(one) for one in lost if one not in said)]), len(lost))
        self._start.decide(verdict)
        return verdict

    def _after(self, report: Report, lost: int) -> Verdict:
        """Whether the ranks, which have ended, start again."""
        # this node may have been told since it reported, while it waited for what others say
        report = replace(report, stop=report.stop or self.stop)
        failure, left = report.failure, self._start.nodes - lost
        if failure is None:
            return Verdict(OVER, report)
        if left < self._limits.min_nodes:
            few = f"{left} node{'s are' if left > 1 else ' is'} left, and cluster.min_nodes is {self._limits.min_nodes}"
            failure = replace(failure, reason=f"{failure.reason}\n{few}")
        may = not self._limits.needs_checkpoint or bool(completed(self._run))
        goes_on = failure.is_lost and report.stop is None and self._remaining_restarts > 0 and may
        goes_on = goes_on and left >= self._limits.min_nodes
        report = replace(report, failure=failure)
        self._record(report, failure, goes_on=goes_on)
        return Verdict(AGAIN if goes_on else OVER, report)

    def _obey(self, verdict: Verdict) -> RunResult:
        report = verdict.report
        self.failure, self.is_overdue = report.failure, report.is_overdue
        self._watch.stop = report.stop or self.stop
        if verdict.kind != AGAIN and self.is_first:
            self._start.stay()
        if verdict.kind == FINISHED:
            ended = {worker.global_rank: None for worker in self._worker_group.workers}
            return RunResult(state=WorkerState.SUCCEEDED, return_values=ended)
        # torch's agent starts ranks again for as long as it has restarts left, which is not for it to judge
        self._restarts += verdict.kind == AGAIN
        self._remaining_restarts = self._limits.max_restarts - self._restarts + 1 if verdict.kind == AGAIN else 0
        return RunResult(state=WorkerState.FAILED)

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

    def _cause(self) -> tuple[Failure, bool]:
        """The rank that failed first, and whether that is certain. Waits for it for a moment, where others have only
        lost their connection to it."""
        end = time.monotonic() + CAUSE_WITHIN
        failed: dict[int, int] = {}
        hint = self._memory.hint()
        while True:
            exits = self._exits()
            failed |= {rank: code for rank, code in exits.items() if code and rank not in failed}
            failure, is_certain = first_failure(failed, read_words(self._attempt, self._run.logs, self._folder), hint)
            if is_certain or len(exits) == len(self._worker_group.workers) or time.monotonic() > end:
                return failure, is_certain
            time.sleep(LOOK_EVERY)

    def _of_hang(self, exits: dict[int, int], *, hastily: bool = False) -> Report | None:
        """The ranks that hang, if any: the stacks of all are in the logs then.

        Args:
            hastily: another node has ended its ranks: those of this one need to hang almost as long only.
        """
        now, after = time.monotonic(), self._limits.hang_after
        if after is None or (now - self._looked < min(HEARTS_EVERY, after / 4) and not hastily):
            return None
        self._looked = now
        alive = {rank: process.pid for rank, process in self._processes().items() if rank not in exits}
        hang = hangs.find(self._folder, list(alive), after * HASTE if hastily else after)
        if hang is None:
            return None
        logs = {one: self._run.rank_log(one) for one in alive}
        who = "rank " + ", ".join(map(str, hang.ranks))
        hangs.write_stacks(logs, alive, f"{who} {hang.how}: the Python stacks of this process follow")
        hangs.dump_recorders(self._folder)
        rank, *others = hang.ranks
        too = f" (so did rank {', '.join(map(str, others))})" if others else ""
        reason = f"{hang.how} at update {hang.update}{too}; stacks in {logs[rank].parent.name}/{logs[rank].name}"
        failure = Failure(rank, Exit.RANK_FAILED, reason, hang.how, is_lost=True)
        return Report(failure, not hang.waits, hang.update, stop=self.stop)

    # what the run's files say

    def _record(self, report: Report, failure: Failure, *, goes_on: bool) -> None:
        newest = completed(self._run)
        entry = {
            "attempt": self._attempt,
            "rank": failure.rank,
            "reason": failure.reason,
            "how": failure.how,
            "update": report.update,
            "time": time.time(),
            "goes_on": goes_on,
            "from_update": newest[0].update if newest else None,
            "restart": self._restarts + goes_on,
            "max_restarts": self._limits.max_restarts,
        }
        with suppress(LauncherError):
            before = self._run.read_status()
            failures = [*(before.get("failures") or []), entry]
            self._run.write_status(state=State(before["state"]), failures=failures)
