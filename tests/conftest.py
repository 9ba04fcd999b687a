"""What all tests share: services that some need, and ranks that numerics tests run on."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from needs import Needs, Probe
from ranks import RankPool

# what a user of the examples has by standing in their folder; ranks inherit it
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

SERVICES: dict[str, Probe] = {}
"""Services that tests can need, by name: each a probe that says what is missing, or None."""


def pytest_configure(config: pytest.Config) -> None:
    needs = Needs(SERVICES)
    needs.pytest_configure(config)
    config.pluginmanager.register(needs, "needs")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "ranks" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Up to four ranks on gloo, kept between tests. A test that uses them is slow by that."""
    with RankPool(4) as pool:
        yield pool
