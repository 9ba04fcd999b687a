"""What a command prints on: a reader that leaves, a full disk or a terminal without letters never stops a run."""

import errno
import os
import sys
from collections.abc import Sequence
from typing import Any, TextIO

SIGPIPE_EXIT = 141
"""128 + SIGPIPE: how a tool ends whose reader has left."""
UNWRITTEN_EXIT = 1
"""How a tool ends whose output couldn't be written, as coreutils do."""


class Output:
    """Standard output or error that takes everything: what can't be written is left out, and `failed` says why.

    A character that the terminal lacks is printed as ``?``. Everything else is the stream's own.
    """

    def __init__(self, stream: TextIO, *, descriptor: int, says: bool) -> None:
        self._stream, self._descriptor, self._says = stream, descriptor, says
        self.failed: OSError | None = None
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Writes `text`, or leaves it out."""
        if self.failed is None:
            try:
                return self._stream.write(text)
            except OSError as error:
                self._fail(error)
        return len(text)

    def writelines(self, lines: Sequence[str]) -> None:
        """Writes `lines`, or leaves them out."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Hands what was written to the system."""
        if self.failed is None:
            try:
                self._stream.flush()
            except OSError as error:
                self._fail(error)

    def _fail(self, error: OSError) -> None:
        self.failed = error
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._descriptor)  # what is still buffered goes there, and no child meets the broken end
        os.close(nowhere)
        if self._says and not isinstance(error, BrokenPipeError):
            print(f"launcher: the output can't be written: {error.strerror}; nothing more is shown", file=sys.stderr)


def guard() -> Output:
    """Puts an `Output` in the place of sys.stdout and sys.stderr; returns that of stdout."""
    sys.stderr = Output(_open(sys.stderr, 2), descriptor=2, says=False)
    was_closed = sys.stdout is None
    output = Output(_open(sys.stdout, 1), descriptor=1, says=True)
    if was_closed:
        output.failed = OSError(errno.EBADF, os.strerror(errno.EBADF))
    sys.stdout = output
    return output


def _open(stream: TextIO | None, descriptor: int) -> TextIO:
    """`stream`, or where the command was given without one (``>&-``) a way to nowhere under its number."""
    if stream is not None:
        return stream
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    if nowhere != descriptor:
        os.close(nowhere)
    return open(descriptor, "w", encoding="utf-8", closefd=False)


def exit_code(code: int, output: Output, *, is_all: bool) -> int:
    """The exit code of a command that ended with `code`. `is_all`: what it prints is all that it does."""
    output.flush()
    if code or output.failed is None or not is_all:
        return code
    return SIGPIPE_EXIT if isinstance(output.failed, BrokenPipeError) else UNWRITTEN_EXIT


def use_utf8() -> None:
    """Starts this program again in Python's UTF-8 mode where the system's letters are ASCII alone: names of files and
    what ranks print would be limited to them."""
    if sys.getfilesystemencoding().lower().replace("-", "") == "utf8":
        return
    sys.stdout.flush()
    os.execve(
        sys.executable,
        [sys.executable, "-X", "utf8", *sys.orig_argv[1:]],
        {**os.environ, "PYTHONUTF8": "1"},
    )
