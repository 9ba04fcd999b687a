"""The commands that start containers: their text, and what is refused before the first of them is given."""

import os
import re
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from configs import config_text
from rich.console import Console

from launcher import __version__
from launcher.config.validate import parse
from launcher.errors import ConfigError, LauncherError
from launcher.plan import mesh
from launcher.plan.facts import Facts
from launcher.plan.plan import Plan, make_plan
from launcher.run_dir import RunDir
from launcher.submit.docker import Docker, name_of, variables_in
from launcher.submit.trial import check_here

FULL = (
    "submit=docker",
    "run.name='Big run #1; $(id)'",
    "cluster.nodes=2",
    "cluster.ranks_per_node=2",
    "data.workers=2",
    "checkpoint.stop_within='90 seconds'",
    "submit.docker.image=mine:1",
    "submit.docker.pull=never",
    "submit.docker.gpus=2",
    "submit.docker.cpus=8",
    "submit.docker.memory=16g",
    "submit.docker.ulimits=['memlock=-1']",
    "submit.docker.mounts=['/data','/old,er:/new:rw','near']",
    "submit.docker.user='1:2'",
    "submit.docker.env=[WANDB_API_KEY]",
    "submit.docker.options=['--device=/dev/infiniband']",
)
NAME = "launcher-big-run-1-id-0436b62a"
COMMON = [
    "--label=launcher.run=/runs/one",
    "--pull=never",
    "--user=1:2",
    "--workdir=/home/me/my code",
    "--stop-timeout=120",
    "--read-only",
    "--tmpfs=/tmp:rw,exec,nosuid,nodev",
    "--cap-drop=ALL",
    "--security-opt=no-new-privileges",
    "--shm-size=1088m",
    "--cpus=8.0",
    "--memory=16g",
]
MOUNTS = [
    "--ulimit=memlock=-1",
    "--mount=type=bind,source=/data,target=/data,readonly",
    "--mount=type=bind,source=/home/me/my code,target=/home/me/my code,readonly",
    "--mount=type=bind,source=/home/me/my code/near,target=/home/me/my code/near,readonly",
    '--mount=type=bind,"source=/old,er",target=/new',
    "--mount=type=bind,source=/runs/one,target=/runs/one",
]
SURROUNDINGS = [
    "--env=HOME=/tmp",
    "--env=PYTHONPATH=",
    "--env=PYTHONIOENCODING=utf-8:backslashreplace",
    "--env=PYTHONUNBUFFERED=1",
    "--env=OMP_NUM_THREADS=4",
    "--env=PYTHONSAFEPATH=1",
    f"--env=LAUNCHER_RENDEZVOUS={NAME}-0:29500",
    "--env=LAUNCHER_LIFELINE",
    "--env=WANDB_API_KEY",
    "--device=/dev/infiniband",
]
RUN = RunDir(Path("/runs/one"))


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "PYTHONPATH", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(mesh, "visible_gpus", lambda: 0)


def rendered(*overrides: str, lane: int = 0) -> list[list[str]]:
    """The commands of a run on CPU unless GPUs are asked for."""
    config = parse(config_text("submit=docker", *overrides))
    plan = replace(make_plan(config, Facts()), cwd="/home/me/my code")
    commands = Docker(config).in_lane(lane).render(RUN, plan).docker
    assert commands is not None
    return commands


def option(command: list[str], name: str) -> list[str]:
    """The values of an option."""
    return [one.partition("=")[2] for one in command if one.startswith(f"--{name}=")]


def test_the_whole_commands() -> None:
    network, *nodes = rendered(*FULL)
    assert network == ["docker", "network", "create", "--internal", "--label=launcher.run=/runs/one", NAME]
    for node, command in enumerate(nodes):
        own = [f"--name={NAME}-{node}", f"--hostname={NAME}-{node}", "--init", "--interactive"]
        gpus = [f'--gpus="device={2 * node},{2 * node + 1}"']
        agent = ["--entrypoint=python", "mine:1", "-m", "launcher.train.agent", "/runs/one"]
        which = ["--node", "1"] if node else []
        expected = [*own, *COMMON, *gpus, *MOUNTS, f"--network={NAME}", *SURROUNDINGS, *agent, *which]
        assert command == ["docker", "run", *expected]
    assert re.fullmatch(r"[a-zA-Z0-9][a-zA-Z0-9_.-]{1,62}", f"{NAME}-0")  # a name that DNS takes too


def test_one_node_has_no_network_and_belongs_to_the_caller() -> None:
    """H12, H13."""
    (command,) = rendered("cluster.ranks_per_node=2", "cluster.device=cpu")
    assert option(command, "user") == [f"{os.getuid()}:{os.getgid()}"]
    assert option(command, "network") == ["none"]
    assert "HOME=/tmp" in option(command, "env")
    assert "--init" in command
    assert command[command.index("--entrypoint=python") + 2 :] == ["-m", "launcher.train.agent", "/runs/one"]
    assert int(*option(command, "stop-timeout")) == 60 + 30


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["data.workers=0"], ["--shm-size=64m"]),
        (["data.workers=2"], ["--shm-size=1088m"]),  # 64 MiB and 2 x 2 workers of 256 MiB
        (["data.workers=2", "submit.docker.shm_size=3g"], ["--shm-size=3g"]),
        (["data.workers=2", "submit.docker.ipc=host"], ["--ipc=host"]),
    ],
)
def test_shared_memory_for_the_loader_workers(overrides: list[str], expected: list[str]) -> None:
    """H11."""
    (command,) = rendered("cluster.ranks_per_node=2", "cluster.device=cpu", *overrides)
    assert [one for one in command if one.startswith(("--shm-size", "--ipc"))] == expected


def test_runs_that_run_at_a_time_share_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh, "visible_gpus", lambda: 8)
    two = ("submit.docker.gpus=all", "submit.docker.parallelism=2", "cluster.nodes=2")
    given = [option(command, "gpus") for lane in (0, 1) for command in rendered(*two, lane=lane)[1:]]
    assert given == [['"device=0,1"'], ['"device=2,3"'], ['"device=4,5"'], ['"device=6,7"']]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,6")
    monkeypatch.setattr(mesh, "visible_gpus", lambda: 2)
    assert option(rendered("submit.docker.gpus=2")[0], "gpus") == ['"device=5,6"']
    plan = make_plan(parse(config_text("submit=docker", "submit.docker.gpus=2")), Facts())
    assert (plan.device, plan.world_size) == ("cuda", 2)
    with pytest.raises(ConfigError, match=r"2 GPUs, and 4 containers"):
        rendered("submit.docker.gpus=1", "submit.docker.parallelism=4")


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["submit.docker.gpus=many"], "submit.docker.gpus"),
        (["submit.docker.gpus=all"], "submit.docker.gpus"),
        (["cluster.device=cuda"], "cluster.device"),
        (["submit.docker.memory=much"], "submit.docker.memory"),
        (["submit.docker.cpus=0"], "submit.docker.cpus"),
        (["submit.docker.shm_size=100m", "data.workers=2"], "submit.docker.shm_size"),
        (["submit.docker.shm_size=1g", "submit.docker.ipc=host"], "submit.docker.ipc"),
        (["submit.docker.mounts=['/a:b']"], "submit.docker.mounts[0]"),
        (["submit.docker.mounts=['/a:/b:/c']"], "submit.docker.mounts[0]"),
        (["submit.docker.user=me"], "submit.docker.user"),
        (["submit.docker.env=['KEY=secret']"], "submit.docker.env[0]"),
        (["submit.docker.ulimits=[memlock]"], "submit.docker.ulimits[0]"),
        (["submit.docker.stop_timeout=10"], "submit.docker.stop_timeout"),
        (["submit.docker.parallelism=0"], "submit.docker.parallelism"),
        (["submit.docker.build_options=['--quiet']"], "submit.docker.build_options"),
        (["submit.docker.image='--rm'"], "submit.docker.image"),
        (["submit.docker.network=bridge", "cluster.nodes=2"], "submit.docker.network"),
        (["logging.wandb.mode=online"], "logging.wandb.mode"),
        (["logging.wandb.mode=online", "submit.docker.network=none"], "logging.wandb.mode"),
        (["submit.docker.network='container:foo'"], "submit.docker.network"),
        (["submit.docker.network=''"], "submit.docker.network"),
        (["submit.docker.build=' '"], "submit.docker.build"),
        (["submit.docker.env=[PYTHONPATH]"], "submit.docker.env"),
        (["submit.docker.env=[GLOO_SOCKET_IFNAME]"], "submit.docker.env"),
        (["submit.docker.options=['-ePYTHONSAFEPATH=']"], "submit.docker.env"),
        (["submit.docker.mounts=[/tmp]"], "submit"),
        (["submit.docker.mounts=['/data:/tmp/']"], "submit"),
        (["submit.docker.options=[mine]"], "submit.docker.options[0]"),
        (["submit.docker.options=['--device=/dev/a',mine]"], "submit.docker.options[1]"),
    ],
)
def test_what_containers_cannot_be(overrides: list[str], key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        rendered("cluster.ranks_per_node=2", *overrides)
    assert refused.value.key == key


@pytest.mark.parametrize(
    ("words", "option", "says"),
    [
        ("'--name=foo'", "--name", "run.name"),
        ("'--label=launcher.run=/x'", "--label", "launcher's own"),
        ("'--network',host", "--network", "submit.docker.network"),
        ("'-u','0:0'", "--user", "submit.docker.user"),
        ("'--workdir=/x'", "--workdir", "launcher's own"),
        ("'--entrypoint=sh'", "--entrypoint", "submit.docker.image"),
        ("'--rm'", "--rm", "launcher's own"),
        ("'-it'", "--interactive", "launcher's own"),
        ("'--device=/dev/a','-d'", "--detach", "launcher's own"),
        ("'--gpus=all'", "--gpus", "submit.docker.gpus"),
        ("'--env-file=x'", "--env-file", "submit.docker.env"),
    ],
)
def test_options_that_something_else_says(words: str, option: str, says: str) -> None:
    with pytest.raises(ConfigError, match=rf"submit\.docker\.options={option}: .*{says}"):
        rendered("cluster.device=cpu", f"submit.docker.options=[{words}]")


def test_the_user_s_variables_are_the_containers() -> None:
    options = "submit.docker.options=['--env=OMP_NUM_THREADS=8','-e','PYTHONUNBUFFERED=0','--label=team=x']"
    (command,) = rendered("cluster.device=cpu", "submit.docker.env=[HOME]", options)
    given = [one for one in command if "HOME" in one or "OMP_NUM" in one or "UNBUFFERED" in one]
    assert given == ["--env=HOME", "--env=OMP_NUM_THREADS=8", "PYTHONUNBUFFERED=0"]
    assert "--label=team=x" in command


def test_the_package_is_the_image_s_in_a_checkout_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout, code = tmp_path / "checkout", tmp_path / "code"
    (checkout / "launcher").mkdir(parents=True)
    (checkout / "launcher" / "__init__.py").touch()
    code.mkdir()
    monkeypatch.setenv("PYTHONPATH", f"{checkout}:{code}")
    config = parse(config_text("submit=docker", "cluster.device=cpu"))
    plan = replace(make_plan(config, Facts()), cwd=str(checkout), pythonpath=[str(checkout)])
    commands = Docker(config).render(RUN, plan).docker
    assert commands is not None
    for command in (commands[0], Docker(config).trial(RUN, plan, "-c", "")):
        given = option(command, "env")
        assert [one for one in given if one.startswith("PYTHON") and "PATH" in one] == [
            f"PYTHONPATH={code}",
            "PYTHONSAFEPATH=1",
        ]
        assert f"--mount=type=bind,source={checkout},target={checkout},readonly" in command


def test_nothing_else_lies_where_home_is_mounted() -> None:
    (command,) = rendered("cluster.device=cpu", "submit.docker.mounts=['/scratch:/tmp/:rw']")
    assert "--mount=type=bind,source=/scratch,target=/tmp" in command
    assert not option(command, "tmpfs")


def test_without_a_network_there_is_one_interface() -> None:
    (command,) = rendered("cluster.device=cpu", "submit.docker.network=none")
    assert "GLOO_SOCKET_IFNAME=lo" in option(command, "env")


def test_variables_that_the_configuration_refers_to_are_passed_by_name() -> None:
    text = "a: ${oc.env:FIRST}\nb: x${oc.env:SECOND,none} ${oc.decode:${oc.env:FIRST}}\n"
    assert variables_in(text) == ["FIRST", "SECOND"]
    config = parse(config_text("submit=docker", "cluster.device=cpu", "submit.docker.env=[OWN]"))
    docker = Docker(config).with_variables(["FIRST", "OWN"])
    commands = docker.render(RUN, replace(make_plan(config, Facts()), cwd="/home")).docker
    assert commands is not None
    assert [one for one in option(commands[0], "env") if "=" not in one] == ["LAUNCHER_LIFELINE", "OWN", "FIRST"]


def test_a_run_has_names_of_its_own() -> None:
    assert name_of("a", RunDir(Path("/one"))) != name_of("a", RunDir(Path("/two")))
    assert name_of("Ü!", RunDir(Path("/one"))).startswith("launcher-run-")
    assert len(name_of("x" * 200, RUN)) <= 60


DOCKER = """#!/bin/sh
case "$1 $2" in
  "version "*) {version} ;;
  "image inspect") {image} ;;
  "pull "*) echo "Error: no such image" >&2; exit 1 ;;
  "run --rm") {run} ;;
esac
"""
WELL = f"""echo '{{"version": "{__version__}"}}'"""
DENIED = "echo 'permission denied while trying to connect to the Docker daemon socket' >&2; exit 1"


def check(folder: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str, **says: str) -> None:
    """The checks before a run, with a stand-in for the docker command that `says` something."""
    command = folder / "docker"
    command.write_text(DOCKER.format(**{"version": "echo 26", "image": ":", "run": WELL, **says}))
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    config = parse(config_text("submit=docker", "cluster.device=auto", *overrides))
    plan: Plan = replace(make_plan(config, Facts()), cwd=str(folder))
    check_here(Docker(config), config.submit.docker, RunDir(folder), plan, Console(quiet=True))


def test_a_machine_that_has_all_is_not_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("overrides", "says", "key", "words"),
    [
        ([], {"version": "echo 'Cannot connect to the Docker daemon' >&2; exit 1"}, "submit", "start it"),
        ([], {"version": DENIED}, "submit", "group"),
        ([], {"image": "exit 1"}, "submit.docker.image", "docker build --tag launcher"),
        (["submit.docker.pull=never"], {"image": "exit 1"}, "submit.docker.image", "isn't here"),
        ([], {"run": """echo '{"missing": "No module named launcher"}'"""}, "submit.docker.image", "hold this package"),
        ([], {"run": """echo '{"version": "0.0"}'"""}, "submit.docker.image", "build it anew"),
        ([], {"run": "echo 'exec: \"python\": not found' >&2; exit 127"}, "submit.docker.image", "no `python`"),
        (
            ["submit.docker.gpus=1"],
            {"run": "echo 'could not select device driver' >&2; exit 125"},
            "submit.docker.gpus",
            "NVIDIA container toolkit",
        ),
        (["submit.docker.mounts=[/not/there]"], {}, "submit.docker.mounts[0]", "isn't there"),
        (["submit.docker.env=[NOT_SET_HERE]"], {}, "submit.docker.env[0]", "isn't set"),
        (["submit.docker.build=."], {}, "submit.docker.build", "must be a checkout"),
    ],
)
def test_what_is_missing_is_refused_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], says: dict[str, str], key: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=words) as refused:
        check(tmp_path, monkeypatch, *overrides, **says)
    assert refused.value.key == key


def test_docker_s_own_words_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LauncherError, match="Docker refuses a container of this run:\n  no space left"):
        check(tmp_path, monkeypatch, run="echo 'docker: no space left' >&2; exit 125")


def test_a_machine_without_docker_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse(config_text("submit=docker", "cluster.device=cpu"))
    monkeypatch.setenv("PATH", str(tmp_path))
    plan = replace(make_plan(config, Facts()), cwd=str(tmp_path))
    with pytest.raises(ConfigError, match="no docker command"):
        check_here(Docker(config), config.submit.docker, RunDir(tmp_path), plan, Console(quiet=True))


@pytest.mark.parametrize(
    ("submit", "key"),
    [("local", "submit.docker.image"), ("slurm", "submit.docker.image"), ("docker", "submit.slurm.qos")],
)
def test_keys_of_another_place_are_refused(submit: str, key: str) -> None:
    with pytest.raises(ConfigError, match=f"has no effect: submit is {submit}") as error:
        config_text(f"submit={submit}", f"{key}=mine")
    assert error.value.key == key
