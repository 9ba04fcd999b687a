"""A traceback on the screen: a user's own frames, and all of it in the log."""

from pathlib import Path

import launcher
from launcher.observe.failure import for_screen

OURS = f'  File "{Path(launcher.__file__).parent}/train/run.py", line 3, in run\n    fit()\n    ^^^\n'
TORCH = '  File "/x/lib/python3.11/site-packages/torch/nn/module.py", line 9, in call\n    forward()\n'
MINE = '  File "/home/me/mine.py", line 5, in forward\n    return 1 / 0\n'
START = "Traceback (most recent call last):\n"
END = "ZeroDivisionError: division by zero"


def test_the_frames_before_the_users_are_left_out() -> None:
    shown = for_screen(START + OURS + TORCH + MINE + TORCH + END)
    assert shown == START + "  … 2 frames of the launcher and torch: see the log\n" + MINE + TORCH + END


def test_each_traceback_of_a_chain_is_shortened() -> None:
    between = "\n\nDuring handling of the above exception, another exception occurred:\n\n"
    shown = for_screen(START + OURS + MINE + END + between + START + TORCH + MINE + END)
    assert shown.count("1 frames") == 2
    assert shown.count(MINE) == 2
    assert between in shown
    assert "run.py" not in shown


def test_what_has_no_frames_of_the_user_stays_whole() -> None:
    for reason in (START + OURS + TORCH + END, START + MINE + END, "killed by SIGKILL", "", "a\n  File b"):
        assert for_screen(reason) == reason.rstrip("\n")
