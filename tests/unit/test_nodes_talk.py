"""What nodes tell each other, and what the first makes of it; where they meet."""

import pytest
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

from launcher.errors import Exit, LauncherError
from launcher.train import nodes
from launcher.train.failures import Failure
from launcher.train.meeting import Meeting
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
