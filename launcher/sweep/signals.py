"""Which signal asked a sweep to end, whoever took it."""

import os
import signal
import sys
from typing import Any

from launcher.process import STOP_SIGNALS


class SignalsNoted:
    """While inside, remembers the first signal that asks to stop, also where a running member takes them.

    Between two members one raises KeyboardInterrupt or SystemExit as elsewhere.
    """

    def __enter__(self) -> "SignalsNoted":
        self._first: int | None = None
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        # Python writes each signal's number there before it calls the handler of the day
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._before: dict[int, Any] = {}
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is signal.SIG_DFL:
                self._before[number] = signal.signal(number, lambda taken, _frame: sys.exit(128 + taken))
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._read)
        os.close(self._write)

    @property
    def first(self) -> int | None:
        """The first signal that asked to end, or None."""
        if self._first is None:
            try:
                taken = os.read(self._read, 1024)
            except BlockingIOError:
                taken = b""
            self._first = next((number for number in taken if number in STOP_SIGNALS), None)
        return self._first
