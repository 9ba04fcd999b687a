"""A test that needs a service is left out or fails, and the last lines say so."""

import pytest

pytest_plugins = ["pytester"]

CONFTEST = """
from needs import Needs

def pytest_configure(config):
    config.addinivalue_line("markers", "needs(service): needs a service")
    plugin = Needs({{"there": lambda: None, "away": lambda: "it does not answer"}}, required={required!r})
    plugin.pytest_configure(config)
    config.pluginmanager.register(plugin, "needs-inner")
"""
TESTS = """
import pytest

@pytest.fixture
def made():
    raise AssertionError("made for a test that can't run")

@pytest.mark.needs("there")
def test_there(): pass

@pytest.mark.needs("away")
def test_away(made): pass

@pytest.mark.needs("away")
def test_away_too(): pass
"""


def run(pytester: pytest.Pytester, *, required: str, tests: str = TESTS) -> pytest.RunResult:
    pytester.makeconftest(CONFTEST.format(required=required))
    pytester.makepyfile(tests)
    return pytester.runpytest_inprocess("-p", "no:cacheprovider")


def test_left_out_and_said_where_the_service_is_missing(pytester: pytest.Pytester) -> None:
    result = run(pytester, required="there")
    result.assert_outcomes(passed=1, skipped=2)
    assert result.outlines[-2] == "left out 2 tests that need away: it does not answer"


def test_failing_where_the_service_is_required(pytester: pytest.Pytester) -> None:
    result = run(pytester, required=" there, away")
    result.assert_outcomes(passed=1, errors=2)
    result.stdout.fnmatch_lines(["*needs away, which LAUNCHER_REQUIRE names: it does not answer"])


def test_unknown_services_are_mistakes(pytester: pytest.Pytester) -> None:
    result = run(pytester, required="", tests="import pytest\n@pytest.mark.needs('slrum')\ndef test_it(): pass")
    result.assert_outcomes(errors=1)
    assert run(pytester, required="slrum").ret == pytest.ExitCode.USAGE_ERROR
