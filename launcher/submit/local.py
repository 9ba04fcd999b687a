"""Ranks on this machine, under one elastic agent a node."""

import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from rich.console import Console

from launcher.config.schema import Config
from launcher.errors import ConfigError
from launcher.lock import holding
from launcher.outcome import LISTENER, RENDEZVOUS, SCRATCH, choose_scratch, take_left
from launcher.plan.mesh import available_cores, least_nodes
from launcher.plan.plan import Plan
from launcher.process import PARENT
from launcher.run_dir import RunDir, writing
from launcher.submit.base import Launch, node_argv, node_environment
from launcher.submit.nodes import Node, SignalsPassedOn, log_of, run_nodes


class Local:
    """This machine, where a run of several nodes has all of them."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def render(self, run: RunDir, plan: Plan) -> Launch:
        if plan.nodes > 1 and plan.device == "cuda":
            problem = "submit=local starts them all on this machine, where their ranks would share its GPUs"
            raise ConfigError("cluster.nodes", plan.nodes, problem, hint="cluster.nodes=1")
        argv = [node_argv(run.path, node) for node in range(plan.nodes)]
        return Launch(argv, node_environment(plan, plan.world_size, available_cores()))

    def submit(self, run: RunDir, plan: Plan, launch: Launch, console: Console, *, live: bool) -> int:
        with holding(run), SignalsPassedOn() as signals:
            least = least_nodes(self._config.cluster, self._config.submit)
            return run_nodes(run, _starts(run, plan, launch), least, signals, console, live=live)


class Process(subprocess.Popen[bytes]):
    """The agent of a node as a process of this machine."""

    def how(self, code: int) -> str:
        return f"the agent ended with {128 - code if code < 0 else code}"


def _starts(run: RunDir, plan: Plan, launch: Launch) -> Iterator[AbstractContextManager[Node]]:
    """Each node, to be started; all have one place to meet."""
    environment = {**os.environ, **launch.environment, PARENT: str(os.getpid())}
    passed: tuple[int, ...] = ()
    if len(launch.argv) > 1:  # listens already, so that nobody takes the port in between
        listener = socket.create_server(("127.0.0.1", 0))
        environment[RENDEZVOUS] = f"localhost:{listener.getsockname()[1]}"
        passed = (listener.fileno(),)
    for number, argv in enumerate(launch.argv):
        own = {LISTENER: str(passed[0])} if passed else {}
        yield _node(run, log_of(run, number), argv, {**environment, **own}, plan.cwd, passed)
        if passed:
            listener.close()  # the first node's alone
            passed = ()


@contextmanager
def _node(
    run: RunDir, log: Path, argv: list[str], environment: dict[str, str], cwd: str, passed: tuple[int, ...]
) -> Iterator[Node]:
    """A node that has started. At the end it is ended, and what is left of it is taken over."""
    scratch = choose_scratch()
    with writing(log), open(log, "ab") as output:
        agent = Process(
            argv,
            env={**environment, SCRATCH: str(scratch)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=cwd,
            pass_fds=passed,
            # Ctrl-C in a terminal reaches the launcher alone, which passes it on once
            start_new_session=True,
        )
    try:
        yield Node(agent, log)
    finally:
        if agent.poll() is None:
            agent.kill()
            agent.wait()
        take_left(scratch, run)
