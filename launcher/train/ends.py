"""What a run has come to, once its ranks have ended: its state, its exit code, and what went wrong."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.checkpoints import completed
from launcher.errors import Exit
from launcher.outcome import of_stop
from launcher.process import STOP_SIGNALS
from launcher.run_dir import RunDir, State
from launcher.train import stopping
from launcher.train.failures import Failure
from launcher.train.limits import Limits

Outcome = tuple[State, int, dict[str, Any] | None]
"""State, exit code and error of a run."""


@dataclass(frozen=True)
class End:
    """How ranks have ended."""

    is_failed: bool
    """Whether not all ended well, by themselves."""
    stop: str | None
    """Why they were told to stop, if they were."""
    failure: Failure | None
    """The first one."""
    is_overdue: bool = False
    """Whether they had to be killed because they were too slow to stop."""


def outcome(run: RunDir, folder: Path, end: End, allowed: Limits) -> Outcome:
    """What follows for the run. `folder`: where its ranks leave the mark that they have stopped."""
    if not end.is_failed:
        return _ended(run, folder, end, allowed)
    if end.stop is not None and (end.failure is None or end.failure.is_lost):
        return _broken_off(run, end, end.stop, allowed)
    assert end.failure is not None
    return State.failed, end.failure.exit_code, _error(run, end.failure, allowed)


def out_of_hours(run: RunDir, hours: float | None) -> Outcome:
    """The run may use its devices no longer."""
    state, code = of_stop(run, stopping.number_of(stopping.DEVICE_HOURS))
    reason = f"{stopping.DEVICE_HOURS}={hours:g} is used up; with more the run goes on"
    return state, code, {"rank": None, "reason": reason}


def _ended(run: RunDir, folder: Path, end: End, allowed: Limits) -> Outcome:
    """Every rank has ended well: finished or stopped."""
    if not stopping.has_mark(folder):
        return State.finished, int(Exit.FINISHED), None
    if end.stop == stopping.DEVICE_HOURS:
        return out_of_hours(run, allowed.device_hours)
    # a rank may have been asked that couldn't pass it on
    state, code = of_stop(run, stopping.number_of(end.stop or "SIGTERM"))
    error = None if state is State.stopped else {"rank": None, "reason": "no checkpoint could be saved: see its logs"}
    return state, code, error


def _broken_off(run: RunDir, end: End, stop: str, allowed: Limits) -> Outcome:
    """The ranks were ended, or one was lost, before they had stopped."""
    state, code = of_stop(run, stopping.number_of(stop))
    failure = end.failure
    if end.is_overdue and allowed.stop_within:
        what = f"finishing the window and saving took longer than checkpoint.stop_within={allowed.stop_within:g} s"
    elif failure is not None and failure.signal not in STOP_SIGNALS:
        what = f"rank {failure.rank} {failure.how} while the run was stopping"
    else:
        return state, code, None
    newest = completed(run)
    then = f"the run will go on from update {newest[0].update}" if newest else "there is no checkpoint to go on from"
    return state, code, {"rank": None, "reason": f"{what}; {then}"}


def _error(run: RunDir, failure: Failure, allowed: Limits) -> dict[str, Any]:
    reason = failure.reason
    if failure.is_lost and allowed.needs_checkpoint and not completed(run):
        reason += "\nit wasn't started again, for there is no checkpoint yet (training.max_restarts=auto)"
    elif failure.is_lost and allowed.max_restarts:
        reason += f"\ntraining.max_restarts={allowed.max_restarts} is used up"
    return {"rank": failure.rank, "reason": reason, "log": str(run.rank_log(failure.rank))}
