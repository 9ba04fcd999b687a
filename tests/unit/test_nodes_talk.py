"""What nodes tell each other, and what the first makes of it; where they meet."""

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import RendezvousClosedError

from launcher.errors import Exit, LauncherError
from launcher.submit import nodes as followed
from launcher.submit.nodes import Meets
from launcher.train import elastic, meeting, nodes
from launcher.train.failures import Failure
from launcher.train.meeting import Handler, Meeting
from launcher.train.nodes import AGAIN, Report, Start, Verdict, choose

TORN = Failure(0, Exit.RANK_FAILED, "Connection closed by peer", "lost its connection", is_lost=True)
KILLED = Failure(1, Exit.RANK_FAILED, "killed by SIGKILL", "was killed by SIGKILL", is_lost=True, signal=9)


@pytest.mark.parametrize(
    ("reports", "chosen"),
    [
        ([Report(TORN), Report(KILLED, is_certain=True, update=7)], Report(KILLED, is_certain=True, update=7)),
        ([Report(KILLED, is_certain=True), Report(TORN, is_certain=True)], Report(KILLED, is_certain=True)),
        ([Report(), Report(TORN)], Report(TORN)),
        ([Report(is_done=True), Report(is_done=True, stop="SIGTERM")], Report(is_done=True, stop="SIGTERM")),
        # another node was told to stop, and ended its ranks that were too slow
        ([Report(TORN), Report(stop="SIGUSR1", is_overdue=True)], Report(TORN, stop="SIGUSR1", is_overdue=True)),
    ],
)
def test_what_has_happened(reports: list[Report], chosen: Report) -> None:
    assert choose(reports) == chosen


def two(store: Store) -> tuple[Start, Start]:
    """The first node at the second place, and the other one."""
    return Start(store, 1, 2, is_first=True), Start(store, 0, 2, is_first=False)


def test_reports_come_in_their_order_and_the_verdict_reaches_all() -> None:
    first, other = two(HashStore())
    first.begin(4)
    assert other.begun() == 4
    assert not other.has_trouble()
    first.report(Report(is_done=True))
    assert not other.has_trouble()
    report = Report(KILLED, is_certain=True, update=3, stop="SIGTERM")
    other.report(report)
    assert first.has_trouble()
    assert list(first.reports().items()) == [(1, Report(is_done=True)), (0, report)]
    assert other.verdict() is None
    first.decide(Verdict(AGAIN, report))
    assert other.verdict() == Verdict(AGAIN, report)
    first.stay()  # the other has heard it


def test_a_node_without_a_sign_of_life_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(nodes.time, "monotonic", lambda: now)
    first, other = two(HashStore())
    for _ in range(30):
        now += 1.5
        other.beat()
        assert first.lost() == []
    for _ in range(12):
        now += 1.5
        assert first.lost() == []
    now += nodes.LOST_AFTER - 18
    assert first.lost() == []  # 20 s by now, and not more
    now += 1.5
    assert first.lost() == [0]
    failure = first.loss(0, rank=4).failure
    assert failure is not None
    assert (failure.rank, failure.is_lost) == (4, True)
    first.stay()  # nobody is left to hear anything


def test_where_nodes_meet() -> None:
    assert Meeting.parse(0, None) == Meeting(0, "localhost", 0)
    assert Meeting.parse(3, "node-1:29500") == Meeting(3, "node-1", 29500)
    assert Meeting.parse(3, "::1:29500") == Meeting(3, "::1", 29500)
    for endpoint in ("node-1", "node-1:", ":29500", "node-1:port"):
        with pytest.raises(LauncherError, match="HOST:PORT"):
            Meeting.parse(0, endpoint)
    with pytest.raises(LauncherError, match="--node 1: where it meets the others is missing"):
        Meeting.parse(1, None)


@pytest.fixture
def meet(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Handler]]:
    """Makes the first of up to two nodes, of which one is enough, and with each further call another one."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    monkeypatch.setattr(meeting, "JOIN_SECONDS", 5)
    made: list[Handler] = []

    def make() -> Handler:
        port = int(made[0].get_run_id().rpartition(":")[2]) if made else 0
        made.append(Meeting(len(made), "localhost", port).handler(1, 2, last_call=3))
        return made[-1]

    yield make
    made[0].shutdown()


@pytest.mark.slow
def test_a_node_that_comes_late_waits_until_the_others_meet_again(meet: Callable[[], Handler]) -> None:
    first = meet()
    assert first.next_rendezvous().world_size == 1
    late = meet()
    with ThreadPoolExecutor(1) as beside:
        waiting = beside.submit(late.next_rendezvous)
        with pytest.raises(TimeoutError):
            waiting.result(meeting.JOIN_SECONDS + 3)  # it looks once a second
        assert first.next_rendezvous().world_size == 2
        assert waiting.result(10).world_size == 2
    late.leave()


@pytest.mark.slow
def test_those_who_stay_meet_without_a_node_that_left(meet: Callable[[], Handler]) -> None:
    first, other = meet(), meet()
    with ThreadPoolExecutor(1) as beside:
        joined = beside.submit(other.next_rendezvous)
        assert first.next_rendezvous().world_size == joined.result(10).world_size == 2
    supervisor = SimpleNamespace(is_first=False, run=Mock(side_effect=OSError("no more processes")))
    with pytest.raises(OSError, match="no more processes"):
        elastic._run_ranks(supervisor, other)  # type: ignore[arg-type]
    assert not first.is_closed()


@pytest.mark.slow
def test_a_node_that_is_told_to_stop_while_all_meet_ends_it_for_all(meet: Callable[[], Handler]) -> None:
    first, other = meet(), meet()
    told = SignalException("told to stop", signal.SIGTERM)
    with pytest.raises(SignalException):
        elastic._run_ranks(SimpleNamespace(is_first=False, run=Mock(side_effect=told)), other)  # type: ignore[arg-type]
    with pytest.raises(RendezvousClosedError):
        first.next_rendezvous()


class Agent:
    """A process that has ended or not."""

    def __init__(self) -> None:
        self.code: int | None = None

    def poll(self) -> int | None:
        return self.code


def test_agents_that_can_not_meet_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(followed.time, "monotonic", lambda: now)
    agents = [Agent(), Agent(), Agent()]
    meets = Meets(agents, 2)  # type: ignore[arg-type]
    agents[1].code = -9
    assert meets.can()
    agents[2].code = 143
    assert meets.can()
    now += followed.TOO_FEW_FOR - 1
    assert meets.can()
    now += 2
    assert not meets.can()
    agents[0].code = 0  # it has ended by itself
    assert meets.can()
