"""Commands given in an empty folder, in this process."""

import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from launcher import prepare
from launcher.cli import main
from launcher.plan.facts import Facts


class Said(NamedTuple):
    """What a command ended with and said."""

    code: int
    out: str
    err: str


Command = Callable[..., Said]


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], no_facts: None
) -> Iterator[Command]:
    """Runs a command in an empty folder. Neither the model nor the data is asked, as where torch is absent."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = list(logging.getLogger().handlers)

    def run(*argv: str) -> Said:
        try:
            code = main(argv)
        except SystemExit as stop:
            code = int(stop.code or 0)
        said = capsys.readouterr()
        return Said(code, said.out, said.err)

    yield run
    # Hydra sets up logging to this test's output and folder, which the next one doesn't have
    for handler in set(logging.getLogger().handlers) - set(before):
        logging.getLogger().removeHandler(handler)
        handler.close()


@pytest.fixture
def no_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "ask", lambda *_: Facts())
