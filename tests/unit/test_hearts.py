"""Which ranks hang, by what their hearts said last; how a wish to stop is left; what the agent's words become."""

import time
from pathlib import Path

import pytest

from launcher.observe.news import News
from launcher.run_dir import RunDir, State
from launcher.train import hangs, heart, stopping

AFTER = 10.0


def hearts(folder: Path, *said: tuple[float, int, bool]) -> list[int]:
    """Leaves hearts that last beat so many seconds ago, at that update, waiting or not. Returns the ranks."""
    for rank, (age, update, waits) in enumerate(said):
        (folder / f"heart_{rank}").write_bytes(heart._LAYOUT.pack(time.monotonic() - age, update, waits))
    return list(range(len(said)))


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ([(1, 5, False), (1, 5, True)], None),
        # the one that the others wait for, also where it beat after them
        ([(12, 5, True), (11, 5, False), (12, 5, True)], [1]),
        # a rank that waits is as alive as the one it waits for
        ([(50, 5, True), (9, 5, False)], None),
        # all wait: a collective that never ends
        ([(12, 5, True), (11, 5, True)], [0, 1]),
        ([(12, 5, False), (11, 6, False)], [0]),
    ],
)
def test_which_ranks_hang(tmp_path: Path, said: list[tuple[float, int, bool]], found: list[int] | None) -> None:
    hang = hangs.find(tmp_path, hearts(tmp_path, *said), AFTER)
    assert (None if hang is None else hang.ranks) == found


def test_the_clock_of_a_rank_runs_from_its_first_beat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heart, "_memory", None)
    monkeypatch.setattr(heart, "_update", 0)
    heart.beat(3)  # a process without a heart
    heart.start(tmp_path, 0)
    assert heart.pulse(tmp_path, 0) is None
    assert hangs.find(tmp_path, [0, 1], 0.0) is None
    heart.beat(4)
    heart.beat(waits=True)
    said = heart.pulse(tmp_path, 0)
    assert said is not None
    assert (said.update, said.waits) == (4, True)
    assert 0 <= time.monotonic() - said.time < 60
    heart.clear(tmp_path)
    assert heart.pulse(tmp_path, 0) is None


def test_the_first_wish_to_stop_stays(tmp_path: Path) -> None:
    assert stopping.asked(tmp_path) is None
    stopping.ask(tmp_path, "SIGUSR1")
    stopping.ask(tmp_path, stopping.TIME_LIMIT)
    assert stopping.asked(tmp_path) == "SIGUSR1"
    assert [stopping.number_of(one) for one in ("SIGUSR1", stopping.TIME_LIMIT)] == [10, 15]


def test_news_are_told_once_and_none_of_an_earlier_start(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    failure = {"rank": 1, "how": "was killed by SIGKILL", "goes_on": True, "restart": 1, "max_restarts": 3}
    early = {**failure, "update": None, "from_update": None}
    late = {**failure, "update": 12, "from_update": 10}
    run.write_status(state=State.running, failures=[early])
    news = News(run)
    assert news.read() == []
    run.write_status(state=State.running, failures=[early, late, early, {**late, "goes_on": False}])
    assert news.read() == [
        "rank 1 was killed by SIGKILL at update 12: starting again from update 10 (restart 1 of 3)",
        "rank 1 was killed by SIGKILL before its first update: starting again from the start (restart 1 of 3)",
    ]
    run.write_status(state=State.stopping, stop={"why": "SIGTERM", "within": 60.0})
    assert news.read() == [
        "stopping (SIGTERM): finishing the window and saving, at most 60 s; Ctrl-C again ends at once"
    ]
    assert news.read() == []
