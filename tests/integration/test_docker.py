"""Runs in containers of a real Docker engine, that of tests/services/docker-up: run, stopped, killed, lost, swept."""

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from paced import hurries, paced, waits
from runs import Done, environment, launch, mean
from watched import KILL, TERM, TOKEN, Running, assert_finished, watched, within

from launcher.config.docker import LABEL

pytestmark = [pytest.mark.slow, pytest.mark.needs("docker")]

IMAGE = "launcher:tests"
CHECKOUT = Path(__file__).resolve().parents[2]
HERE = f"{Path(__file__).parent}:{environment()['PYTHONPATH']}"
DOCKER = ("submit=docker", f"submit.docker.image={IMAGE}", "submit.docker.pull=never")
SAMPLES, LONG = 24, 200
"""Of a run that is to end, and of one that is stopped long before."""
SAVES = ("checkpoint.every=2", "checkpoint.async_save=false", "batch.layout=arrival")
LARGEST = 1.55e9
"""Bytes of the image: about 1.5 GB."""


def docker(*argv: str) -> str:
    done = subprocess.run(["docker", *argv], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def left(folder: Path) -> list[str]:
    """What the engine has of the runs below a folder, whoever started them."""
    shown = f'{{{{.Label "{LABEL}"}}}}'
    found = docker("ps", "--all", "--format", shown).splitlines()
    found += docker("network", "ls", "--format", shown).splitlines()
    return [one for one in found if one.startswith(str(folder))]


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path) -> Iterator[None]:
    """Nothing of a test may be left in the engine, and a test that fails leaves nothing to the next."""
    volumes = docker("volume", "ls", "--quiet")
    yield
    found = left(tmp_path)
    for path in set(found):
        for kind, one in (("rm", ["ps", "--all"]), ("network", ["network", "ls"])):
            names = docker(*one, "--quiet", "--filter", f"label={LABEL}={path}").split()
            if names:
                docker(*(["rm", "--force"] if kind == "rm" else ["network", "rm"]), *names)
    assert found == []
    assert docker("volume", "ls", "--quiet") == volumes


def train(folder: Path, *overrides: str, **env: str) -> Done:
    return launch(folder, "train", *DOCKER, *overrides, timeout=200, PYTHONPATH=HERE, **env)


def resume(folder: Path, *overrides: str) -> Done:
    return launch(folder, "resume", "run", *overrides, timeout=200, PYTHONPATH=HERE, **{TOKEN: "resumed"})


def sources(root: Path) -> str:
    """A digest of the package's source."""
    files = sorted(root.rglob("*.py"))
    return hashlib.sha256(b"".join(one.read_bytes() for one in files)).hexdigest()


def inside(*command: str) -> str:
    """What a command in the image prints."""
    return docker("run", "--rm", "--network=none", f"--entrypoint={command[0]}", IMAGE, *command[1:])


def test_the_image_is_this_checkout_small_and_of_the_pinned_packages() -> None:
    (about,) = json.loads(docker("image", "inspect", IMAGE))
    assert about["Size"] < LARGEST
    config = about["Config"]
    assert config["User"] == "launcher"
    assert config["Entrypoint"] == ["/usr/bin/tini", "--", "launcher"]
    assert config["Healthcheck"]["Test"][0] == "CMD"
    digest = "import hashlib, launcher, pathlib; root = pathlib.Path(launcher.__file__).parent; " + (
        "print(hashlib.sha256(b''.join(one.read_bytes() for one in sorted(root.rglob('*.py')))).hexdigest())"
    )
    assert inside("python", "-c", digest) == sources(CHECKOUT / "launcher"), "tests/services/docker-up builds it anew"
    pinned = dict(line.split("==") for line in (CHECKOUT / "constraints.txt").read_text().splitlines() if "==" in line)
    held = dict(line.split("==") for line in inside("cat", "/opt/launcher/packages.txt").splitlines())
    assert held["torch"].endswith("+cpu")
    normal = {re.sub("[-_.]+", "-", name).lower(): version for name, version in pinned.items()}
    differing = {
        name: version
        for name, version in held.items()
        if normal.get(re.sub("[-_.]+", "-", name).lower()) != version.removesuffix("+cpu")
    }
    assert differing == {}
    caches = "for one in /root/.cache/pip /var/cache/apt/archives/*.deb /var/lib/apt/lists/*_*; do ls -d $one; done"
    assert inside("sh", "-c", f"({caches}) 2>/dev/null; id -u") == "1000"
    assert docker("run", "--rm", "--network=none", "--read-only", IMAGE, "--version").startswith("launcher ")


def test_what_ranks_see_is_their_folder_and_little_else(tmp_path: Path) -> None:
    """H11, H12, and one container with two ranks: read-only root, no rights, no network, the caller's files."""
    data, code = tmp_path / "data", tmp_path / "code"
    data.mkdir()
    code.mkdir()
    folders = ["/", "/opt/launcher", "/home/launcher", "/tmp", str(data), str(code), str(tmp_path / "run")]
    base = [one for one in mean([1, 2, 3, 6]) if not one.startswith("data.train._target_")]
    prying = ["data.train._target_=prying.Prying", f"+data.train.report={tmp_path / 'run' / 'seen.json'}"]
    options = ["cluster.ranks_per_node=2", "batch.global_batch_size=4", "data.workers=1", "training.duration=2 epochs"]
    mounts = [f"submit.docker.mounts=[{data}]", f"+data.train.folders={json.dumps(folders).replace(' ', '')}"]
    done = launch(
        code,
        "train",
        *DOCKER,
        *[*base, *prying, *options, *mounts],
        f"hydra.run.dir={tmp_path / 'run'}",
        timeout=200,
        PYTHONPATH=HERE,
    )
    done = Done(done.code, done.out, done.err, tmp_path / "run")
    assert done.code == 0, done.out + done.err
    assert done.weights()["w"] == [pytest.approx(3.0)]
    assert "update 2/2" in done.out
    seen = done.json("seen.json")
    assert seen["written"] == {
        **dict.fromkeys(folders, "Read-only file system"),
        "/tmp": "written",
        str(tmp_path / "run"): "written",
    }
    assert seen["user"] == [os.getuid(), os.getgid()]
    assert (seen["home"], seen["network"], seen["first"]) == ("/tmp", ["lo"], "docker-init")
    assert (int(seen["capabilities"], 16), seen["no_new_privileges"]) == (0, "1")
    assert seen["shared_memory"] == (64 + 2 * 256) * 2**20
    owners = {one.stat().st_uid for one in done.run.rglob("*")}
    assert owners == {os.getuid()}
    planned = done.json("plan.json")["launch"]
    assert planned["argv"] == [["python", "-m", "launcher.train.agent", str(done.run)]]


def test_stopped_it_goes_on_outside(tmp_path: Path) -> None:
    """H13."""
    hurry = tmp_path / "run" / "hurry"
    with watched(tmp_path, [*DOCKER, *shown(LONG, *hurries(0.3, hurry)), *SAVES]) as running:
        running.wait_for_update(2)
        running.launcher.send_signal(TERM)
        done = running.ended(60)
    assert done.code == 75, done.out + done.err
    status = done.json("status.json")
    assert (status["state"], status["containers"]) == ("stopped", [])
    reached = done.metrics()[-1]["update"]
    assert left(tmp_path) == []
    hurry.touch()
    again = resume(tmp_path, "submit=local")
    assert again.code == 0, again.out + again.err
    assert f"from the checkpoint of update {reached}" in again.out
    assert_finished(tmp_path, LONG)


def shown(samples: int, *more: str) -> list[str]:
    """A run that may be watched from outside its containers."""
    return paced(samples, *more, f"submit.docker.env=[{TOKEN}]")


def containers(running: Running) -> list[str]:
    """The names of those that run."""
    return docker("ps", "--filter", f"label={LABEL}={running.run}", "--format", "{{.Names}}").split()


def test_a_killed_container_and_a_killed_launcher_leave_a_run_that_goes_on(tmp_path: Path) -> None:
    """H10: nothing lives on without the launcher, and what the engine keeps goes at the next start."""
    hurry = tmp_path / "run" / "hurry"
    with watched(tmp_path, [*DOCKER, *shown(LONG, *hurries(0.3, hurry)), *SAVES]) as running:
        running.wait_for_update(3)
        (name,) = containers(running)
        docker("kill", name)
        done = running.ended(60)
    assert done.code == 137, done.out + done.err
    assert f"the container {name} was killed" in done.out
    assert re.search(r"launcher resume run  \(from update \d+\)", done.out)
    assert left(tmp_path) == []
    again = subprocess.Popen(
        [sys.executable, "-m", "launcher", "resume", "run"],
        cwd=tmp_path,
        env=environment(PYTHONPATH=HERE, **{TOKEN: "killed"}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        resumed = Running(again, "killed", tmp_path, tmp_path)  # type: ignore[arg-type]
        assert within(100, lambda: resumed.records()[-1]["attempt"] == 1)
    finally:
        again.send_signal(KILL)
        again.wait()
    assert within(30, lambda: not containers(resumed))
    assert resumed.state() == "stopped"
    assert set(left(tmp_path)) == {str(tmp_path / "run")}
    hurry.touch()
    done = resume(tmp_path)
    assert done.code == 0, done.out + done.err
    assert_finished(tmp_path, LONG)


def test_two_containers_are_two_nodes_and_one_may_be_lost(tmp_path: Path) -> None:
    nodes = ("cluster.nodes=2", "cluster.ranks_per_node=1", "cluster.min_nodes=1", "cluster.wait_for_nodes=2 seconds")
    go = tmp_path / "run" / "go"
    with watched(tmp_path, [*DOCKER, *shown(SAMPLES, *waits(13, go)), *SAVES, *nodes]) as running:
        running.wait_for_update(3)
        first, second = sorted(containers(running))
        (network,) = docker(
            "network", "ls", "--filter", f"label={LABEL}={running.run}", "--format", "{{.Name}}"
        ).split()
        (about,) = json.loads(docker("network", "inspect", network))
        assert about["Internal"] is True
        assert {one["Name"] for one in about["Containers"].values()} == {first, second}
        docker("kill", second)
        go.touch()
        done = running.ended(180)
    assert done.code == 0, done.out + done.err
    (failure,) = done.json("status.json")["failures"]
    assert failure["reason"].startswith("was lost with its node on ")
    assert done.json("plan.json")["nodes"] == 1
    assert_finished(tmp_path, SAMPLES)


def test_too_little_memory_is_said(tmp_path: Path) -> None:
    done = train(tmp_path, *paced(SAMPLES), "submit.docker.memory=120m")
    assert done.code == 137, done.out + done.err
    assert "ran out of memory" in done.out
    assert "launcher resume run" in done.out


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["submit.docker.gpus=1", "cluster.device=cpu"], "submit.docker.gpus=1: Docker has no GPUs to give"),
        (["submit.docker.user='1234:1234'"], "submit.docker.user=1234:1234: 1234:1234 can't write"),
        (["submit.docker.image=launcher:not-there"], "submit.docker.image=launcher:not-there: isn't here"),
        (["submit.docker.network=not-there"], "submit.docker.network=not-there: "),
        (["submit.docker.options=['--no-such-option']"], "unknown flag: --no-such-option"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(tmp_path: Path, overrides: list[str], words: str) -> None:
    done = train(tmp_path, *paced(SAMPLES), *overrides)
    assert done.code == 2, done.out + done.err
    assert words in done.err
    assert not (done.run / "logs" / "agent.log").exists()
    assert left(tmp_path) == []


def test_a_file_that_containers_do_not_see_is_named(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "text.txt").write_text("some text\n" * 50)
    folder = tmp_path / "here"
    folder.mkdir()
    text = ("data=text", f"data.train.path={elsewhere / 'text.txt'}", "cluster.device=cpu")
    done = train(folder, *text)
    assert done.code == 2, done.out + done.err
    assert f"submit.docker.mounts=[{elsewhere}]" in done.err


def test_a_sweep_of_three_two_at_a_time(tmp_path: Path) -> None:
    one_rank = ("cluster.ranks_per_node=1", "strategy=single", "submit.docker.parallelism=2")
    values = ("-m", "batch.global_batch_size=2,3,4", f"hydra.sweep.dir={tmp_path / 'sweep'}")
    base = [one for one in mean(list(range(12))) if not one.startswith("batch.")]
    done = launch(tmp_path, "train", *DOCKER, *base, *one_rank, *values, timeout=250, PYTHONPATH=HERE)
    assert done.code == 0, done.out + done.err
    members: list[dict[str, Any]] = json.loads((tmp_path / "sweep" / "sweep.json").read_text())["members"]
    assert [one["state"] for one in members] == ["finished"] * 3
    weights = [Done(0, "", "", Path(one["dir"])).weights()["w"][0] for one in members]
    assert weights == [pytest.approx(mean_of_last) for mean_of_last in (10.5, 10.0, 9.5)]
    starts = [int(number) for number in re.findall(r"^run (\d)  starts", done.out, re.MULTILINE)]
    assert sorted(starts[:2]) == [0, 1]
    assert starts[2] == 2
    assert (tmp_path / "sweep" / "report.html").is_file()


def test_compose_runs_two_nodes(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    runs = tmp_path / "runs"
    runs.mkdir()
    words = " ".join(f"'{one}'" for one in mean([1, 2, 3, 6], "batch.global_batch_size=4", "cluster.ranks_per_node=1"))
    own = {"IMAGE": IMAGE, "RUNS": str(runs), "CODE": str(CHECKOUT / "examples"), "OVERRIDES": words}
    user = {"USER_ID": str(os.getuid()), "GROUP_ID": str(os.getgid()), "COMPOSE_PROJECT_NAME": f"t{os.getpid()}"}
    env = {**os.environ, **own, **user}

    def compose(*argv: str) -> str:
        command = ["docker", "compose", "--file", str(CHECKOUT / "docker" / "compose.yaml"), *argv]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout

    try:
        compose("up", "--detach")
        codes = docker("wait", *compose("ps", "--all", "--quiet").split()).split()
        assert codes == ["0", "0", "0"], compose("logs")
    finally:
        compose("down", "--volumes")
    done = Done(0, "", "", runs / "compose")
    assert done.json("status.json")["state"] == "finished"
    assert done.json("plan.json")["nodes"] == 2
    assert done.weights()["w"] == [pytest.approx(3.0)]
    assert {one.stat().st_uid for one in done.run.rglob("*")} == {os.getuid()}
