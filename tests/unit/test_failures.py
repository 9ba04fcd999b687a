"""Which rank is named as the one that failed first, and whether ranks start again after it."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from launcher.train.failures import first_failure, read_words

ABORT, KILL, TERM = -signal.SIGABRT, -signal.SIGKILL, -signal.SIGTERM
TORN = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1"


def word(rank: int, message: str, *, kind: str = "RuntimeError", code: int = 3, time: float = 0.0) -> dict[str, Any]:
    """What a rank leaves of an error."""
    return {
        "rank": rank,
        "exit_code": code,
        "time": time,
        "type": kind,
        "message": message,
        "is_message": kind.endswith("LauncherError"),
    }


def broken(rank: int, time: float = 0.0) -> dict[str, Any]:
    return word(rank, "Traceback …\nValueError: broken", kind="ValueError", time=time)


@pytest.mark.parametrize(
    ("exits", "words", "rank", "how", "is_lost", "is_certain"),
    [
        # a killed rank leaves no word, and its neighbour's connection is torn
        ({0: 3, 1: KILL}, [word(0, TORN)], 1, "was killed by SIGKILL", True, True),
        ({1: TERM}, [], 1, "was killed by SIGTERM", True, True),
        # its own error comes before a torn connection, whoever was seen first
        ({0: 3}, [word(0, TORN, time=1), broken(1, time=2)], 1, "failed: ValueError: broken", False, True),
        ({0: 3}, [broken(1, time=2), broken(0, time=1)], 0, "failed: ValueError: broken", False, True),
        # torch ends a rank by an abort when another has left
        ({0: ABORT, 1: 3}, [broken(1)], 1, "failed: ValueError: broken", False, True),
        ({0: ABORT, 1: 3}, [word(1, TORN)], 0, "was killed by SIGABRT", True, True),
        # nobody but those whose connection was torn: another may still be on its way out
        ({0: 3}, [word(0, TORN)], 0, "lost its connection to another rank", True, False),
        # a user's own connection is no rank's
        ({0: 3}, [word(0, "Connection reset by peer", kind="ConnectionResetError")], 0, "failed: Conn", False, True),
        ({0: 3}, [word(0, "CUDA error: unspecified launch failure")], 0, "had an error of its device", True, True),
        ({0: 3}, [word(0, "x", kind="AcceleratorError")], 0, "had an error of its device", True, True),
        ({0: 3}, [word(0, "NCCL error: unhandled system error", kind="DistBackendError")], 0, "had an", True, True),
        ({0: 3}, [word(0, "CUDA out of memory", kind="OutOfMemoryError")], 0, "failed: CUDA out", False, True),
        ({0: 3}, [word(0, "the data asks for NCCL", kind="LauncherError")], 0, "failed: the data", False, True),
        ({1: 7}, [], 1, "ended with 7 and left no word", False, True),
    ],
)
def test_who_failed_first(
    exits: dict[int, int], words: list[dict[str, Any]], rank: int, how: str, is_lost: bool, is_certain: bool
) -> None:
    failure, certain = first_failure(exits, words)
    assert (failure.rank, failure.is_lost, certain) == (rank, is_lost, is_certain)
    assert failure.how.startswith(how)


def test_the_exit_code_is_the_ranks_own_unless_it_says_nothing() -> None:
    codes = [
        first_failure({0: code}, [word(0, "x", kind="ValueError", code=code)])[0].exit_code for code in (1, 2, 4, 7)
    ]
    assert codes == [3, 3, 4, 7]
    assert [first_failure({0: code}, [])[0].exit_code for code in (1, 7)] == [3, 7]


def test_what_may_be_behind_a_kill_is_said_of_that_alone() -> None:
    assert first_failure({0: KILL}, [], "no memory")[0].reason == "killed by SIGKILL (no memory)"
    assert first_failure({0: ABORT}, [], "no memory")[0].reason == "killed by SIGABRT"


def test_what_a_rank_of_an_earlier_attempt_says_too_late_is_not_heard(tmp_path: Path) -> None:
    for attempt in (1, 11, 2):
        (tmp_path / f"error_{attempt}_0.json").write_text(json.dumps({"attempt": attempt}))
    assert read_words(1, tmp_path, tmp_path / "none") == [{"attempt": 1}]
