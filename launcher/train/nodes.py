"""What the agents of a run's nodes tell each other: how their ranks have ended, and what follows from it.

They write into the store of the rendezvous, in the part that belongs to one start of the ranks. The first node decides
for all, and it alone writes the run's status.
"""

import json
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace

from torch.distributed import Store  # type: ignore[attr-defined]

from launcher.config.validate import load
from launcher.errors import Exit, LauncherError
from launcher.plan.plan import Plan, solve_again
from launcher.run_dir import RunDir, to_json, write_atomic
from launcher.train.failures import Failure

LOST_AFTER = 20.0
"""Seconds without a sign of life after which a node is lost: longer than an agent is ever busy with its ranks' end."""
BEAT_EVERY = 1.0
HEARD_WITHIN = 10.0
"""Seconds that the first node stays for the others to hear what it has decided."""
_LOOK_EVERY = 0.05

FINISHED, AGAIN, OVER = "finished", "again", "over"


class FirstNodeGone(LauncherError):
    """The first node, which holds the store, has ended or can't be reached."""


@dataclass(frozen=True)
class Report:
    """How the ranks of a node have come to their end in one start."""

    failure: Failure | None = None
    """The node's first one; None: they ended well, or were ended because of other nodes or of a stop."""
    is_certain: bool = False
    """Whether that isn't the trace of another node's failure."""
    update: int | None = None
    """The window that the failed rank was at."""
    is_done: bool = False
    """Whether all have ended well."""
    stop: str | None = None
    """Why the node was told to stop."""
    is_overdue: bool = False
    """Whether its ranks were too slow to stop."""


@dataclass(frozen=True)
class Verdict:
    """What the first node decides."""

    kind: str
    """finished: all ranks have ended well; again: they start once more; over: the run has ended."""
    report: Report
    """What led to it."""


def to_text(said: Report | Verdict) -> str:
    """What the store keeps."""
    return json.dumps(asdict(said))


def _report(fields: dict[str, object]) -> Report:
    failure = fields["failure"]
    return Report(**{**fields, "failure": Failure(**failure) if isinstance(failure, dict) else None})  # type: ignore[arg-type]


def choose(reports: Sequence[Report]) -> Report:
    """What has happened, of the reports in the order in which they came: a certain failure comes before one that may be
    its trace, and what any node knows of a stop is known."""
    failed = [one for one in reports if one.failure is not None]
    chosen = next((one for one in failed if one.is_certain), (failed or list(reports))[0])
    stop = next((one.stop for one in reports if one.stop is not None), None)
    return replace(chosen, stop=stop, is_overdue=any(one.is_overdue for one in reports))


@contextmanager
def _reachable() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch's DistError is one
        raise FirstNodeGone("the first node has ended, or can't be reached any more") from error


class Start:
    """One start of the ranks, as a node that takes part in it sees it. Every method may raise FirstNodeGone.

    Args:
        store: the part of the rendezvous's store that belongs to this start.
        place: this node's place among those that take part.
        nodes: how many take part.
        is_first: whether this is the first node, which decides.
    """

    def __init__(self, store: Store, place: int, nodes: int, *, is_first: bool) -> None:
        self._store, self.place, self.nodes, self.is_first = store, place, nodes, is_first
        self._beats: dict[int, tuple[bytes | None, float]] = {}
        self._beaten = self._looked = 0.0
        self._put(f"host/{place}", socket.gethostname())

    def _put(self, key: str, value: str) -> None:
        with _reachable():
            self._store.set(key, value)

    def _look_up(self, key: str) -> bytes | None:
        """What is there by now; None: nothing."""
        with _reachable():
            return bytes(self._store.get(key)) if self._store.check([key]) else None

    # its beginning

    def begin(self, attempt: int) -> None:
        """Says that the run's files are those of this start, whose number is `attempt`."""
        self._put("attempt", str(attempt))

    def begun(self) -> int:
        """Waits for `begin` of the first node. Returns the number of this start."""
        while (said := self._look_up("attempt")) is None:
            self.beat()
            time.sleep(_LOOK_EVERY)
        return int(said)

    # its course

    def beat(self) -> None:
        """Says that this node lives. Costs nothing where it said so a moment ago."""
        now = time.monotonic()
        if now - self._beaten > BEAT_EVERY:
            self._beaten = now
            self._put(f"beat/{self.place}", str(now))

    def report(self, report: Report) -> None:
        """Says how this node's ranks have ended, or are about to be."""
        with _reachable():
            turn = self._store.add("reports", 1)
            self._store.set(f"report/{self.place}", f"{turn} {to_text(report)}")
            if not report.is_done:
                self._store.set("trouble", "1")

    def has_trouble(self) -> bool:
        """Whether the ranks of some node have not ended well."""
        return self._look_up("trouble") is not None

    def reports(self) -> dict[int, Report]:
        """Those that are there by now, in the order in which they came, by the node's place."""
        found = []
        for place in range(self.nodes):
            said = self._look_up(f"report/{place}")
            if said is not None:
                turn, _, text = said.decode().partition(" ")
                found.append((int(turn), place, _report(json.loads(text))))
        return {place: report for _, place, report in sorted(found, key=lambda one: one[0])}

    def lost(self) -> list[int]:
        """The places of the nodes that have given no sign of life for too long. For the first node."""
        now = time.monotonic()
        if now - self._looked > BEAT_EVERY:
            self._looked = now
            for place in range(self.nodes):
                said, since = self._look_up(f"beat/{place}"), self._beats.get(place)
                if since is None or since[0] != said:
                    self._beats[place] = (said, now)
        return [place for place, (_, since) in self._beats.items() if now - since > LOST_AFTER and place != self.place]

    def loss(self, place: int, rank: int) -> Report:
        """What the loss of the node at that place is, whose first rank is `rank`."""
        host = self._look_up(f"host/{place}")
        how = f"was lost with its node{'' if host is None else f' on {host.decode()}'}"
        reason = f"{how}, which gave no sign of life for {LOST_AFTER:.0f} s"
        return Report(Failure(rank, Exit.RANK_FAILED, reason, how, is_lost=True), is_certain=True)

    # its end

    def decide(self, verdict: Verdict) -> None:
        """Says to all what follows. For the first node."""
        self._put("verdict", to_text(verdict))

    def verdict(self) -> Verdict | None:
        """What the first node has decided; None: nothing yet."""
        said = self._look_up("verdict")
        if said is None:
            return None
        self._put(f"heard/{self.place}", "1")
        fields = json.loads(said)
        return Verdict(fields["kind"], _report(fields["report"]))

    def stay(self) -> None:
        """Keeps the store for the others until they have heard the verdict. For the first node."""
        end = time.monotonic() + HEARD_WITHIN
        others = set(range(self.nodes)) - {self.place}
        while others - set(self.lost()) and time.monotonic() < end:
            others = {place for place in others if self._look_up(f"heard/{place}") is None}
            time.sleep(_LOOK_EVERY if others else 0)


def resize(run: RunDir, nodes: int) -> None:
    """Makes the plan of a run one for so many nodes: the update stays as it is.

    Raises:
        LauncherError: there is none, or it can't be written.
    """
    plan = Plan.from_json(run.plan.read_text(encoding="utf-8"))
    if plan.nodes != nodes:
        write_atomic(run.plan, to_json(solve_again(load(run.config), plan, nodes=nodes).to_dict()))
