"""Runs on a real Slurm, that of tests/services/slurm-up: queued, stopped, queued again, failed, lost."""

import fcntl
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from paced import expected, hurries, paced, waits
from runs import Done, argv, environment, launch
from watched import assert_finished, parent, within

pytestmark = [pytest.mark.slow, pytest.mark.needs("slurm")]

HERE = f"{Path(__file__).parent}:{environment()['PYTHONPATH']}"
ROOT = Path(__file__).parents[2]
ENDS_WITHIN = 150.0
LIVES = ("PENDING", "RUNNING", "COMPLETING", "REQUEUED")
SAMPLES, LONG = 24, 200
"""Of a run that is to end soon, and of one that is stopped before."""
STEP_BY_STEP = ("cluster.nodes=1", "cluster.ranks_per_node=1", "batch.layout=arrival")


def slurm(*argv: str) -> str:
    return subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60).stdout.strip()


def state(job: str) -> str:
    """Slurm's word, whatever has become of the job; of an array that of a member that hasn't ended, if there is one."""
    found = re.findall(r"JobState=(\S+)", slurm("scontrol", "show", "job", job))
    return next((one for one in found if one in LIVES), found[0])


class Queue:
    """What a test has queued."""

    def __init__(self) -> None:
        self.jobs: list[str] = []

    def train(self, folder: Path, *overrides: str, **env: str) -> Done:
        done = launch(folder, "train", "submit=slurm", "submit.slurm.time=5", *overrides, PYTHONPATH=HERE, **env)
        return self.took(done)

    def took(self, done: Done) -> Done:
        self.jobs += re.findall(r"submitted  job (\d+)", done.out)
        return done

    def ended(self, seconds: float = ENDS_WITHIN) -> str:
        """How the newest job has ended."""
        job = self.jobs[-1]
        assert within(seconds, lambda: state(job) not in LIVES), state(job)
        return state(job)

    def log(self, folder: Path) -> str:
        return (folder / "run" / "logs" / f"slurm_{self.jobs[-1]}.out").read_text()


class Shown:
    """What a command shows in a terminal."""

    def __init__(self, terminal: int) -> None:
        self._terminal, self._text = terminal, ""

    def until(self, pattern: str) -> str:
        """Reads on until that is shown. Returns its group."""
        while (found := re.search(pattern, self._text)) is None:
            ready, _, _ = select.select([self._terminal], [], [], ENDS_WITHIN)
            assert ready, self._text
            self._text += os.read(self._terminal, 65536).decode(errors="replace")
        self._text = self._text[found.end() :]
        return found[1]


@pytest.fixture
def queue(request: pytest.FixtureRequest) -> Iterator[Queue]:
    """Tests share the nodes with others that run beside them, but for those that kill nodes."""
    made = Queue()
    with open(Path(os.environ["SLURM_CONF"]).parent / "tests.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if "repaired" in request.fixturenames else fcntl.LOCK_SH)
        yield made
        for job in made.jobs:
            subprocess.run(["scancel", "--signal=KILL", job], capture_output=True)
            subprocess.run(["scancel", job], capture_output=True)
            assert within(60, lambda job=job: state(job) not in LIVES)


def updates(folder: Path) -> list[int]:
    """Those in the metrics by now."""
    try:
        text = (folder / "run" / "metrics.jsonl").read_text()
    except FileNotFoundError:
        return []
    return [json.loads(line)["update"] for line in text[: text.rfind("\n") + 1].splitlines()]


def reaches(folder: Path, update: int) -> bool:
    return within(ENDS_WITHIN, lambda: update in updates(folder))


NOTE = 'it\'s "so" $HOME `id`, a\\b; # ü 日本 $(id) %j\n and a second line'
"""What a shell, sbatch or Hydra may take for its own."""


def noted(folder: Path) -> list[str]:
    """Overrides that hand the note to each rank, which leaves it in `folder`."""
    text = NOTE.replace("'", "\\'")
    return ["data.train._target_=paced.Noted", f"+data.train.note='{text}'", f"+data.train.folder={folder}"]


def without_target(overrides: list[str]) -> list[str]:
    return [one for one in overrides if not one.startswith("data.train._target_")]


def assert_noted(folder: Path, ranks: int) -> None:
    for rank in range(ranks):
        assert (folder / f"note_{rank}").read_bytes().decode() == NOTE


def test_h02_h03_h07_j02_two_nodes_of_two_ranks_each(tmp_path: Path, queue: Queue) -> None:
    """With an agent a node and with a task a rank; awkward values arrive as they are, and each run is tracked once."""
    tracked = "logging.wandb.mode=offline"
    two = ("cluster.nodes=2", "cluster.ranks_per_node=2", "submit.wait=true", "run.name='big run #1; $(id)'")
    data = ("batch.global_batch_size=4", "optimizer.lr=1", f"training.duration={SAMPLES // 4} updates")
    done = queue.train(tmp_path, *without_target(paced(SAMPLES, *two, *data)), *noted(tmp_path), tracked)
    assert done.code == 0, done.out + done.err
    assert_noted(tmp_path, 4)
    assert f"update {SAMPLES // 4}/{SAMPLES // 4}" in done.out
    assert done.weights()["w"] == [pytest.approx(SAMPLES - 2.5)]  # the mean of the last four
    assert re.search(r"job \d+, start 1 on (node\d) (?!\1)node\d", queue.log(tmp_path))
    assert queue.ended() == "COMPLETED"
    planned = done.json("plan.json")["launch"]
    assert Path(planned["script"]).read_text() == planned["script_text"]
    # the same by Slurm's own tasks, without agents
    (tmp_path / "tasks").mkdir()
    tasks = ("submit.slurm.nodes=2", "submit.slurm.agent=none", *two[1:])
    alone = queue.train(tmp_path / "tasks", *paced(SAMPLES, *tasks, *data), tracked)
    assert alone.code == 0, alone.out + alone.err
    assert alone.weights() == done.weights()
    assert queue.ended() == "COMPLETED"
    assert [alone.json("status.json")[name] for name in ("state", "exit_code")] == ["finished", 0]
    assert not (alone.run / "step").exists()
    offline = [[one.name for one in run.glob("wandb/offline-run-*")] for run in (done.run, alone.run)]
    assert [len(one) for one in offline] == [1, 1]
    assert offline[0] != offline[1]


def test_what_cannot_be_is_refused_in_slurms_words(tmp_path: Path, queue: Queue) -> None:
    done = queue.train(tmp_path, *paced(SAMPLES, *STEP_BY_STEP, "submit.slurm.partition=nowhere"))
    assert done.code == 2
    assert "Slurm refuses the job" in done.err
    assert "invalid partition" in done.err
    assert queue.jobs == []


def test_a_task_that_fails_or_is_killed_ends_the_job_and_is_named(tmp_path: Path, queue: Queue) -> None:
    two = ("submit.slurm.nodes=2", "cluster.ranks_per_node=1", "submit.slurm.agent=none", "+data.train.at=5")
    for how in ("fail", "kill"):
        (tmp_path / how).mkdir()
        assert queue.train(tmp_path / how, *paced(SAMPLES, *two, f"+data.train.how={how}")).code == 0
    for how, job in zip(("fail", "kill"), queue.jobs, strict=True):
        assert within(ENDS_WITHIN, lambda job=job: state(job) not in LIVES)
        assert "ExitCode=3:0" in slurm("scontrol", "show", "job", job)
        status = Done(0, "", "", tmp_path / how / "run").json("status.json")
        assert (status["state"], status["exit_code"], status["error"]["rank"]) == ("failed", 3, 1), status
        assert {"fail": "RuntimeError: told to fail", "kill": "killed by SIGKILL"}[how] in status["error"]["reason"]


def test_h04_told_to_stop_they_go_on_and_end_with_the_same_bits(tmp_path: Path, queue: Queue) -> None:
    """One by its time limit; another, of a task a rank, by its ranks, and then by its batch script."""
    momentum = ("optimizer.momentum=0.9", "optimizer.lr=0.1", "data.shuffle=true")
    run = [*paced(SAMPLES, *STEP_BY_STEP), *momentum, "checkpoint.every=null"]
    whole, cut, told = (tmp_path / name for name in ("whole", "cut", "told"))
    for folder in (whole, cut, told):
        folder.mkdir()
    # Slurm looks at limits twice a minute: told to stop 50 s before the end of a minute is after 10 to 40 s, and the
    # 77 s of this run are more than two such times
    limit = ("submit.slurm.time=1", "submit.slurm.signal_before=50", "checkpoint.stop_within=15")
    hurry = tmp_path / "hurry"
    assert queue.train(cut, *run, *limit, *hurries(3.2, hurry)).code == 0
    two = ("submit.slurm.nodes=2", "cluster.ranks_per_node=1", "submit.slurm.agent=none", "checkpoint.every=null")
    assert queue.train(told, *paced(SAMPLES, *two, *hurries(2, hurry))).code == 0
    logs = [folder / "run" / "logs" / f"slurm_{job}.out" for folder, job in zip((cut, told), queue.jobs, strict=True)]
    assert reaches(told, 2)
    slurm("scancel", "--signal=USR1", queue.jobs[1])
    done = launch(whole, "train", *run, "+data.train.seconds=0", PYTHONPATH=HERE)
    assert done.code == 0, done.out + done.err
    assert within(ENDS_WITHIN, lambda: "start 2 on" in logs[1].read_text()), logs[1].read_text()
    seen = max(updates(told))
    assert reaches(told, seen + 1)
    slurm("scancel", "--batch", "--signal=USR1", queue.jobs[1])
    assert within(ENDS_WITHIN, lambda: "start 3 on" in logs[0].read_text()), logs[0].read_text()
    slurm("scontrol", "update", f"JobId={queue.jobs[0]}", "TimeLimit=10")  # it has been cut often enough
    hurry.touch()
    for job, log in zip(queue.jobs, logs, strict=True):
        assert within(ENDS_WITHIN, lambda job=job: state(job) == "COMPLETED"), state(job)  # REQUEUED for a moment
        assert log.read_text().count("was stopped, and is queued again") >= 2, log.read_text()
    assert_finished(told, SAMPLES)
    found = Done(0, "", "", cut / "run")
    assert found.weights() == done.weights()
    assert updates(cut) == updates(told) == list(range(1, SAMPLES // 2 + 1))  # none was lost or repeated


def test_h04_preempted_it_goes_on(tmp_path: Path, queue: Queue) -> None:
    low = ("submit.slurm.partition=low", "submit.slurm.cpus_per_task=8", "submit.slurm.sbatch=['--nodelist=node3']")
    assert queue.train(tmp_path, *paced(LONG, *STEP_BY_STEP, *low, *hurries(0.4, tmp_path / "hurry"))).code == 0
    assert reaches(tmp_path, 3)
    slurm("srun", "--partition=high", "--cpus-per-task=8", "--nodelist=node3", "true")
    (tmp_path / "hurry").touch()
    assert queue.ended() == "COMPLETED"
    assert "start 2 on node3" in queue.log(tmp_path)
    assert_finished(tmp_path, LONG)


def test_cancelled_it_stays_so_and_goes_on_when_asked(tmp_path: Path, queue: Queue) -> None:
    terminal, end = pty.openpty()
    pace = hurries(0.5, tmp_path / "hurry")
    run = [*paced(LONG, *STEP_BY_STEP, *pace), f"hydra.run.dir={tmp_path / 'run'}"]
    command = argv("train", "submit=slurm", "submit.slurm.time=5", "submit.wait=true", *run)
    waiting = subprocess.Popen(
        command, cwd=tmp_path, env=environment(PYTHONPATH=HERE, TERM="xterm"), stdin=end, stdout=end, stderr=end
    )
    os.close(end)
    shown = Shown(terminal)
    job = shown.until(r"submitted.*job (\d+)")
    queue.jobs.append(job)
    assert reaches(tmp_path, 2)
    said = launch(tmp_path, "status", "run")
    assert f"job {job} is RUNNING" in said.out
    refused = launch(tmp_path, "resume", "run", PYTHONPATH=HERE)
    assert (refused.code, f"job {job} of this run is RUNNING" in refused.err) == (2, True)
    waiting.send_signal(signal.SIGINT)
    shown.until(r"(leave it running, or cancel it)")
    os.write(terminal, b"c\n")
    shown.until(r"(cancelled job)")
    assert queue.ended() == "CANCELLED"
    shown.until(r"(launcher resume)")
    assert waiting.wait(30) == 75
    os.close(terminal)
    said = launch(tmp_path, "status", "run")
    assert "stopped" in said.out
    assert "launcher resume run" in said.out
    (tmp_path / "hurry").touch()
    resumed = queue.took(launch(tmp_path, "resume", "run", "submit.wait=true", PYTHONPATH=HERE))
    assert resumed.code == 0, resumed.out + resumed.err
    assert len(queue.jobs) == 2
    assert_finished(tmp_path, LONG)


def test_two_jobs_on_one_node_do_not_meet(tmp_path: Path, queue: Queue) -> None:
    """One of them as apptainer would run it. And what is queued from inside of a job inherits nothing of it."""
    around = {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "7", "SBATCH_PARTITION": "nowhere", "SLURM_CPUS_PER_TASK": "9"}
    folders = [tmp_path / name for name in ("one", "other")]
    apptainer = tmp_path / "bin" / "apptainer"  # does what it is asked for, without a container
    apptainer.parent.mkdir()
    apptainer.write_text(f'#!/bin/sh\necho "$@" >"{tmp_path}/asked"\nshift 4\nexec "$@"\n')
    apptainer.chmod(0o755)
    around["PATH"] = f"{apptainer.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    image = ("submit.slurm.container_runtime=apptainer", "submit.slurm.container_image=a.sif")
    for folder, more in zip(folders, ((), (*image, "submit.slurm.container_mounts=['/tmp:/tmp']")), strict=True):
        folder.mkdir()
        here = ("submit.slurm.sbatch=['--nodelist=node2']", "cluster.ranks_per_node=2", *more)
        done = queue.train(folder, *paced(SAMPLES, "cluster.nodes=1", *here), **around)
        assert done.code == 0, done.out + done.err
    for folder in folders:
        status = folder / "run" / "status.json"
        assert within(ENDS_WITHIN, lambda status=status: json.loads(status.read_text())["state"] == "finished")
        assert_finished(folder, SAMPLES)
    asked = (tmp_path / "asked").read_text()
    assert asked == f"exec --bind /tmp:/tmp a.sif python3 -m launcher.train.agent {tmp_path}/other/run --node 0\n"


def test_a_node_that_dies_is_replaced_or_done_without(
    tmp_path: Path, queue: Queue, repaired: Callable[[str, str], None]
) -> None:
    go, saves = tmp_path / "go", ("checkpoint.every=2", "checkpoint.async_save=false")
    two = (
        "submit.slurm.nodes=2",
        "cluster.min_nodes=1",
        "cluster.wait_for_nodes=2 seconds",
        "cluster.ranks_per_node=1",
    )
    fewer, other = tmp_path / "fewer", tmp_path / "other"
    apart = ["submit.slurm.sbatch=['--nodelist=node[2-3]']"], ["submit.slurm.exclude='node[2-3]'"]
    for folder, run in ((fewer, [*two, *apart[0], "batch.layout=arrival"]), (other, [*STEP_BY_STEP, *apart[1]])):
        folder.mkdir()
        assert queue.train(folder, *paced(SAMPLES, *run, *saves, *waits(13, go))).code == 0
    logs = [
        folder / "run" / "logs" / f"slurm_{job}.out" for folder, job in zip((fewer, other), queue.jobs, strict=True)
    ]
    for folder in (fewer, other):
        assert reaches(folder, 4)
    ((_, lost),) = re.findall(r"start 1 on (node\d) (node\d)", logs[0].read_text())
    (alone,) = re.findall(r"start 1 on (node\d)", logs[1].read_text())
    repaired(lost, queue.jobs[0])
    repaired(alone, queue.jobs[1])
    go.touch()
    for job in queue.jobs:
        assert within(200, lambda job=job: state(job) == "COMPLETED"), state(job)
    # inside the job, on the node that is left
    assert "start 2 on" not in logs[0].read_text()
    found = Done(0, "", "", fewer / "run")
    assert (found.json("plan.json")["nodes"], found.json("status.json")["state"]) == (1, "finished")
    # queued again by Slurm, on another node
    assert f"start 2 on {alone}" not in logs[1].read_text()
    assert "start 2 on node" in logs[1].read_text()
    for folder in (fewer, other):
        assert_finished(folder, SAMPLES)


@pytest.fixture
def repaired() -> Iterator[Callable[[str, str], None]]:
    """Kills a node with all that runs there, and at the end brings it up again."""
    killed: list[str] = []
    conf = Path(os.environ["SLURM_CONF"])

    def kill(node: str, job: str) -> None:
        killed.append(node)
        processes = [entry for entry in Path("/proc").glob("[0-9]*") if entry.name != str(os.getpid())]
        # what would tell the controller goes first; the nodes share one machine
        ranks = [one for one in processes if f"SLURMD_NODENAME={node}".encode() in _text(one / "environ").split(b"\0")]
        parents = {str(parent(int(one.name))) for one in ranks}
        steps = [
            one
            for one in processes
            if one.name in parents and f"slurmstepd: [{job}.".encode() in _text(one / "cmdline")
        ]
        slurmd = (conf.parent / f"slurmd.{node}.pid").read_text()
        for number in [slurmd, *(one.name for one in [*steps, *ranks])]:
            with suppress(ProcessLookupError):
                os.kill(int(number), signal.SIGKILL)

    yield kill
    for node in killed:
        start = 'hostname "$1" && exec slurmd -N "$1" -f "$2"'
        subprocess.run(["unshare", "--uts", "sh", "-c", start, "sh", node, str(conf)], check=True, capture_output=True)
    for node in killed:
        assert within(60, lambda node=node: "down" not in slurm("sinfo", "-h", "-n", node, "-p", "main", "-o", "%T"))


def _text(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_h07_the_script_can_be_queued_by_hand(tmp_path: Path, queue: Queue) -> None:
    done = queue.train(tmp_path, *paced(SAMPLES, *STEP_BY_STEP, "submit.slurm.sbatch=['--hold']"))
    (held,) = queue.jobs
    slurm("scancel", held)
    text = (done.run / "job.sbatch").read_text()
    subprocess.run(["bash", "-n", str(done.run / "job.sbatch")], check=True)
    lines = text.splitlines()
    last = max(number for number, line in enumerate(lines) if line.startswith("#SBATCH "))
    assert not [line for line in lines[1:last] if line and not line.startswith("#SBATCH ")]
    (done.run / "job.sbatch").write_text(text.replace("#SBATCH --hold\n", ""))
    queue.jobs.append(slurm("sbatch", "--parsable", str(done.run / "job.sbatch")))
    assert queue.ended() == "COMPLETED"
    assert_finished(tmp_path, SAMPLES)


def test_h04_h07_a_run_that_starts_from_sbatch(tmp_path: Path, queue: Queue) -> None:
    """Nodes and ranks are the job's; stopped, it goes on in the same folder."""
    data = [one for one in without_target(paced(SAMPLES)) if not one.startswith("cluster.ranks_per_node")]
    script, options = str(ROOT / "slurm" / "train.sbatch"), ["--nodes=2", "--ntasks-per-node=2", "--time=5"]
    overrides = [
        *data,
        *noted(tmp_path),
        *hurries(2, tmp_path / "hurry"),
        "run.name=from sbatch",
        "checkpoint.every=null",
    ]
    env = environment(PYTHONPATH=HERE, PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    said = subprocess.run(
        ["sbatch", "--parsable", *options, script, *overrides], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert said.returncode == 0, said.stderr
    job = said.stdout.strip()
    queue.jobs.append(job)
    run = tmp_path / "runs" / "from_sbatch" / f"job_{job}"
    log = tmp_path / f"slurm_{job}.out"
    assert within(ENDS_WITHIN, lambda: (run / "metrics.jsonl").exists() or state(job) not in LIVES), log.read_text()
    assert (run / "metrics.jsonl").exists(), log.read_text()
    slurm("scancel", "--batch", "--signal=USR1", job)
    assert within(ENDS_WITHIN, lambda: "start 2 on" in log.read_text()), log.read_text()
    (tmp_path / "hurry").touch()
    assert queue.ended() == "COMPLETED", log.read_text()
    assert re.search(rf"job {job}, start 2 on (node\d) (?!\1)node\d", log.read_text()), log.read_text()
    assert [one.name for one in run.parent.iterdir()] == [run.name]
    followed = re.findall(r"each update is a line of (\S+)", log.read_text())
    assert followed == [f"{run}/logs/rank_0.log"] * 2  # once a start
    assert "update 1/" in Path(followed[0]).read_text()
    assert_noted(tmp_path, 4)
    found = Done(0, "", "", run)
    assert [found.json("plan.json")[name] for name in ("nodes", "ranks_per_node")] == [2, 2]
    assert found.json("status.json")["job"]["id"] == job
    assert found.weights()["w"] == [pytest.approx(expected(SAMPLES), rel=1e-6)]
    assert [line["update"] for line in found.metrics()] == list(range(1, SAMPLES // 2 + 1))


def sweep(queue: Queue, folder: Path, *overrides: str, **env: str) -> Done:
    made = ("submit=slurm", "submit.slurm.time=5", f"hydra.sweep.dir={folder / 'sweep'}", "hydra.run.dir=none")
    done = launch(folder, "train", "-m", *made, *overrides, timeout=250, PYTHONPATH=HERE, **env)
    return queue.took(Done(done.code, done.out, done.err, folder / "sweep"))


def member(done: Done, num: int) -> Done:
    return Done(0, "", "", done.run / str(num))


def test_h05_a_sweep_is_one_array_whose_members_fail_alone(tmp_path: Path, queue: Queue) -> None:
    """Each run has a folder and a log of its own, and goes on there."""
    few = ("submit.slurm.array_parallelism=2", "submit.wait=true")
    run = [*paced(SAMPLES, *STEP_BY_STEP), "+data.train.seconds=0.02", "++data.train.how=fail"]
    done = sweep(queue, tmp_path, *run, *few, "+data.train.at=-1,-2,5,-3")
    assert done.code == 3, done.out + done.err
    assert re.search(r"run 0  update \d+/12", done.out)
    assert re.search(r"run 2  failed", done.out)
    members = done.json("sweep.json")["members"]
    assert [one["state"] for one in members] == ["finished", "finished", "failed", "finished"]
    assert "told to fail" in members[2]["error"]
    array = queue.jobs[-1]
    assert "ExitCode=3:0" in slurm("scontrol", "show", "job", f"{array}_2")
    assert "#SBATCH --array=0-3%2\n" in (done.run / "array.sbatch").read_text()
    for num in (0, 1, 3):
        one = member(done, num)
        assert one.weights()["w"] == [pytest.approx(expected(SAMPLES), rel=1e-6)]
        assert one.json("status.json")["job"]["id"] == f"{array}_{num}"
        assert (done.run / "logs" / f"slurm_{array}_{num}.out").is_file()
    assert (done.run / "report.html").is_file()
    # the failed one alone, which doesn't fail again
    resumed = (f"sweep.resume={done.run}", "sweep.retry=failed", "hydra.run.dir=none")
    again = launch(tmp_path, "train", "-m", *resumed, PYTHONPATH=HERE, TOLD_TO_FAIL="no")
    queue.took(again)
    assert again.code == 0, again.out + again.err
    assert "#SBATCH --array=0-0%2\n" in (done.run / "array.sbatch").read_text()
    assert [one["state"] for one in done.json("sweep.json")["members"]] == ["finished"] * 4


def test_who_does_not_wait_gets_the_report_from_a_job(tmp_path: Path, queue: Queue) -> None:
    run, shown = [*paced(SAMPLES, *STEP_BY_STEP), "+data.train.seconds=0.1", "run.seed=1,2"], "PYTHONPROFILEIMPORTTIME"
    done = sweep(queue, tmp_path, *run, **{shown: "1"})
    assert done.code == 0, done.out + done.err
    imported = set(re.findall(r"\| +([\w.]+)$", done.err, re.MULTILINE))
    assert "omegaconf" in imported
    assert "torch" not in imported
    assert not (done.run / "report.html").exists()
    (report,) = re.findall(r"by job (\d+) once all have ended", done.out)
    queue.jobs.append(report)
    assert queue.ended() == "COMPLETED"
    assert "One global batch size was" in (done.run / "report.md").read_text()
    said = launch(tmp_path, "status", "sweep")
    assert said.out.count("finished") == 2
