"""The marker ``needs(service)``: a test that needs a service is left out where it doesn't answer, or fails.

A service is a name and a probe that returns None where it answers, and else what is missing. ``LAUNCHER_REQUIRE`` names
those, separated by commas, whose tests must run.
"""

import os
from collections import Counter
from collections.abc import Callable, Mapping

import pytest

Probe = Callable[[], str | None]


class Needs:
    """A pytest plugin over a set of services."""

    def __init__(self, services: Mapping[str, Probe], required: str | None = None) -> None:
        text = os.environ.get("LAUNCHER_REQUIRE", "") if required is None else required
        self._services = services
        self._required = {name.strip() for name in text.split(",") if name.strip()}
        self._missing: dict[str, str | None] = {}
        self._left_out: Counter[str] = Counter()

    def pytest_configure(self, config: pytest.Config) -> None:
        unknown = self._required - self._services.keys()
        if unknown:
            raise pytest.UsageError(f"LAUNCHER_REQUIRE: no such service: {', '.join(sorted(unknown))}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        for mark in item.iter_markers("needs"):
            for name in mark.args:
                self._check(name)

    def _check(self, name: str) -> None:
        if name not in self._services:
            pytest.fail(f"needs({name!r}): no such service; there are {sorted(self._services)}", pytrace=False)
        if name not in self._missing:
            self._missing[name] = self._services[name]()
        reason = self._missing[name]
        if reason is None:
            return
        if name in self._required:
            pytest.fail(f"needs {name}, which LAUNCHER_REQUIRE names: {reason}", pytrace=False)
        self._left_out[name] += 1
        pytest.skip(f"needs {name}: {reason}")

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for name, count in sorted(self._left_out.items()):
            tests = "1 test" if count == 1 else f"{count} tests"
            terminalreporter.write_line(f"left out {tests} that need {name}: {self._missing[name]}", yellow=True)
