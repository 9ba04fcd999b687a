"""What all tests share: services that some need, and ranks that numerics tests run on."""

import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from needs import Needs, Probe
from ranks import RankPool

# what a user of the examples has by standing in their folder; ranks inherit it
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))


def _mount() -> str | None:
    """Whether a small disk can be mounted here."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], capture_output=True, text=True)
            if done.returncode:
                return done.stderr.strip() or f"mount ended with {done.returncode}"
            subprocess.run(["umount", folder], check=True)
        except OSError as error:
            return str(error)
    return None


def _slurm() -> str | None:
    """Whether a Slurm answers whose jobs the tests may fill: that of tests/services/slurm-up."""
    try:
        done = subprocess.run(["scontrol", "show", "config"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode != 0:
        return (done.stderr.strip() or "scontrol doesn't answer").splitlines()[0]
    names = [line.split()[-1] for line in done.stdout.splitlines() if line.startswith("ClusterName")]
    return None if names == [TEST_CLUSTER] else f"the cluster here is {names}, and not one for tests"


def _docker() -> str | None:
    """Whether an engine answers that has the image of the tests, as tests/services/docker-up makes it."""
    try:
        for asked in (["version", "--format", "{{.Server.Version}}"], ["image", "inspect", "launcher:tests"]):
            done = subprocess.run(["docker", *asked], capture_output=True, text=True, timeout=20)
            if done.returncode != 0:
                return (done.stderr.strip() or f"docker {asked[0]} ended with {done.returncode}").splitlines()[0]
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None


TEST_CLUSTER = "launchertests"

SERVICES: dict[str, Probe] = {"docker": _docker, "mount": _mount, "slurm": _slurm}
"""Services that tests can need, by name: each a probe that says what is missing, or None."""


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # of a shell's background job: what it starts would too
        signal.signal(signal.SIGINT, signal.default_int_handler)
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
