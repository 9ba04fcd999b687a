"""The runs of a sweep in containers, several at a time: each lane has a share of the machine, and runs one by one."""

import sys
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Lock

from rich.console import Console

from launcher.errors import ConfigError, LauncherError
from launcher.run_dir import State
from launcher.submit.docker import Docker
from launcher.submit.nodes import SignalsPassedOn
from launcher.sweep.members import Member
from launcher.sweep.show import print_end


def take_lanes(members: Sequence[Member]) -> None:
    """Gives each member that runs in containers its lane, by its number.

    Raises:
        ConfigError: they don't agree in how many there are.
    """
    planned = [one for one in members if one.prepared is not None]
    counts = {_docker(one).parallelism for one in planned if _is_docker(one)}
    lanes = max(counts, default=1)
    if lanes > 1 and (len(counts) > 1 or not all(map(_is_docker, planned))):
        problem = "all runs of a sweep have to be in containers, and to say the same"
        raise ConfigError("submit.docker.parallelism", lanes, problem)
    for member in filter(_is_docker, planned):
        if not _docker(member).starts:
            problem = "a sweep starts its runs itself"
            raise ConfigError("submit.docker.start", False, problem, hint="give a command for each run")
        assert member.prepared is not None
        member.prepared = replace(member.prepared, backend=_docker(member).in_lane(member.num % lanes))


def num_lanes(members: Sequence[Member]) -> int:
    """How many of them run at a time."""
    return max((_docker(one).parallelism for one in members if _is_docker(one)), default=1)


def run_lanes(members: Sequence[Member], console: Console, changed: Callable[[], None]) -> None:
    """Runs members whose folders are there, and says how each ends, as it does.

    Args:
        changed: called when one begins, and when it has ended.
    """
    lanes: dict[int, list[Member]] = {}
    for member in members:
        lanes.setdefault(_docker(member).lane, []).append(member)
    one_at_a_time = Lock()

    def work(lane: Sequence[Member]) -> None:
        for member in lane:
            if signals.first is not None:
                return
            with one_at_a_time:
                member.begin()
                console.print(f"[bold]run {member.num}[/bold]  starts", highlight=False)
                changed()
            _run(member, signals)
            with one_at_a_time:
                console.print(f"[bold]run {member.num}[/bold]  ", end="", highlight=False)
                print_end(member, console)
                changed()

    with SignalsPassedOn() as signals, ThreadPoolExecutor(max(1, len(lanes))) as pool:
        for done in [pool.submit(work, lane) for lane in lanes.values()]:
            done.result()
    for member in members:
        if member.exit_code is None:  # told to stop before it had begun
            member.run.write_status(state=State.planned)


def _run(member: Member, signals: SignalsPassedOn) -> None:
    """One member to its end. What goes wrong is the member's."""
    assert member.prepared is not None
    run, plan, backend = member.run, member.prepared.plan, _docker(member)
    try:
        code = backend.run(run, plan, backend.render(run, plan), Console(quiet=True), signals, live=False)
        member.take_end()
        member.exit_code = code
    except LauncherError as error:
        member.refuse(error)
    except Exception as error:
        traceback.print_exception(error, file=sys.stderr)
        member.refuse(LauncherError(f"{type(error).__name__}: {error}"))


def _is_docker(member: Member) -> bool:
    return member.prepared is not None and isinstance(member.prepared.backend, Docker)


def _docker(member: Member) -> Docker:
    assert member.prepared is not None
    backend = member.prepared.backend
    assert isinstance(backend, Docker)
    return backend
