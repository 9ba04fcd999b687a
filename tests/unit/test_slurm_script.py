"""The batch script of a job: its text, and what it does between stand-ins for Slurm's commands."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from configs import config_text

from launcher.config.choices import Device
from launcher.config.places import SlurmConfig
from launcher.config.slurm_options import check_options
from launcher.config.times import limit
from launcher.config.validate import parse
from launcher.errors import ConfigError
from launcher.lock import Owner
from launcher.plan.facts import Facts
from launcher.plan.plan import make_plan
from launcher.run_dir import RunDir
from launcher.submit.slurm import Slurm
from launcher.submit.slurm_script import Scripts, body

KEYS = (
    "submit=slurm",
    "run.name='big run #1; $(id)'",
    "cluster.nodes=2",
    "cluster.device=cuda",
    "submit.slurm.gpus_per_node=4",
    "submit.slurm.cpus_per_task=32",
    "submit.slurm.time='1-12'",
    "submit.slurm.mem='0'",
    "submit.slurm.setup=['module load cuda']",
    "submit.slurm.env=['NOTE=a \"b\" $HOME; ü']",
    "submit.slurm.container_image=/a.sqsh",
    "submit.slurm.container_mounts=['/data:/data','/runs:/runs']",
    "submit.slurm.sbatch=['--comment=two words']",
    "submit.slurm.srun=['--cpu-bind=cores']",
    "checkpoint.stop_within='90 seconds'",
)
HEAD = r"""#!/usr/bin/env bash
#SBATCH --job-name=big_run_1_id_
#SBATCH --output=/runs/one/logs/slurm_%j.out
#SBATCH --open-mode=append
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=32
#SBATCH --gpus-per-node=4
#SBATCH --mem=0
#SBATCH --time=1-12
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH "--comment=two words"

# shellcheck disable=SC2016,SC2054 # words are quoted as they are meant
cd '/home/me/my code' || exit
export PYTHONPATH=/home/me
export PYTHONIOENCODING=utf-8
export PYTHONUNBUFFERED=1
export OMP_NUM_THREADS=8
export NOTE='a "b" $HOME; ü'
module load cuda
run=/runs/one
tasks_per_node=1
srun_options=(--cpus-per-task=32 --container-image=/a.sqsh --container-mounts=/data:/data,/runs:/runs --cpu-bind=cores)
watch=()
command=(bash -c 'exec "$@" --node "$SLURM_NODEID"' launcher python3 -m launcher.train.agent "$run")
max_requeues=10

"""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setattr("launcher.submit.base.sys.executable", "/bin/python")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    given = {"PYTHONPATH": "/home/me", "PYTHONIOENCODING": "utf-8"}
    monkeypatch.setattr("launcher.submit.base.rank_environment", lambda folders: given)
    return RunDir(Path("/runs/one"))


def script(run: RunDir, *overrides: str) -> str:
    return rendered(run, *KEYS, *overrides)


def rendered(run: RunDir, *overrides: str) -> str:
    config = parse(config_text(*overrides))
    plan = replace(make_plan(config, Facts()), cwd="/home/me/my code")
    text = Slurm(config).render(run, plan).script_text
    assert text is not None
    return text


def test_the_whole_script(run: RunDir) -> None:
    assert script(run) == HEAD + body()


def test_apptainer_runs_the_agent_in_the_image(run: RunDir) -> None:
    text = script(run, "submit.slurm.container_runtime=apptainer", "submit.slurm.container_image='/my images/a.sif'")
    inside = "apptainer exec --nv --bind /data:/data --bind /runs:/runs '/my images/a.sif' python3"
    numbered = """bash -c 'exec "$@" --node "$SLURM_NODEID"' launcher"""
    assert f'command=({numbered} {inside} -m launcher.train.agent "$run")\n' in text
    assert "srun_options=(--cpus-per-task=32 --cpu-bind=cores)\n" in text
    on_cpus = rendered(
        run, "submit=slurm", "submit.slurm.container_runtime=apptainer", "submit.slurm.container_image=a"
    )
    assert "apptainer exec a python3" in on_cpus


def test_h03_without_agents_slurm_starts_a_task_for_each_rank(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many tasks as ranks, which share the cores that the node was asked for."""
    monkeypatch.setattr("launcher.submit.slurm_script.sys.executable", "/bin/python")
    text = script(
        run, "submit.slurm.agent=none", "submit.slurm.container_image=null", "submit.slurm.container_mounts=[]"
    )
    assert "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=4\n#SBATCH --cpus-per-task=8\n" in text
    assert "tasks_per_node=4\nsrun_options=(--cpus-per-task=8 --kill-on-bad-exit=1 --cpu-bind=cores)\n" in text
    assert 'watch=(/bin/python -m launcher.train.step "$run")\n' in text
    assert 'command=(/bin/python -m launcher.train.task "$run")\n' in text


def test_a_job_that_can_lose_nodes_is_kept(run: RunDir) -> None:
    text = script(run, "cluster.min_nodes=1")
    assert "#SBATCH --no-kill\n" in text
    assert "srun_options=(--cpus-per-task=32 --no-kill " in text
    assert "--no-kill" not in script(run, "cluster.min_nodes=2")


def test_h03_ranks_follow_from_the_gpus_that_are_asked_for() -> None:
    plan = make_plan(parse(config_text(*KEYS)), Facts())
    assert (plan.nodes, plan.ranks_per_node, plan.world_size, plan.device) == (2, 4, 8, Device.cuda.value)
    automatic = make_plan(parse(config_text("submit=slurm", "submit.slurm.gpus_per_node=2")), Facts())
    assert (automatic.device, automatic.world_size) == ("cuda", 2)
    without = make_plan(parse(config_text("submit=slurm", "submit.slurm.cpus_per_task=1")), Facts())
    assert (without.device, without.world_size) == ("cpu", 1)
    gres = ("submit=slurm", "submit.slurm.gres='gpu:a100:4'", "cluster.device=cuda")
    assert make_plan(parse(config_text(*gres, "cluster.ranks_per_node=4")), Facts()).world_size == 4


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["cluster.device=cuda", "submit.slurm.gpus_per_node=0"], "cluster.device"),
        (["cluster.device=cuda", "submit.slurm.gres='gpu:4'"], "cluster.ranks_per_node"),
        (["submit.slurm.gres='gpu:4'", "submit.slurm.gpus_per_node=4"], "submit.slurm.gres"),
        (["cluster.ranks_per_node=8", "submit.slurm.gpus_per_node=4"], "cluster.ranks_per_node"),
        (["submit.slurm.signal_before=soon"], "submit.slurm.signal_before"),
        (["submit.slurm.requeue=-1"], "submit.slurm.requeue"),
        (["submit.slurm.env=['2A=b']"], "submit.slurm.env[0]"),
        (["submit.slurm.container_runtime=apptainer"], "submit.slurm.container_runtime"),
        (["submit.slurm.container_mounts=['/a:/a']"], "submit.slurm.container_mounts"),
        (["submit.slurm.nodes=0"], "submit.slurm.nodes"),
        (["submit.slurm.agent=none", "training.max_restarts=2"], "training.max_restarts"),
        (["submit.slurm.agent=none", "cluster.nodes=2", "cluster.min_nodes=1"], "cluster.min_nodes"),
        (["submit.slurm.gres='gpu:4'"], "cluster.device"),
        (["submit.slurm.signal_before=10", "checkpoint.stop_within=60"], "submit.slurm.signal_before"),
        (["submit.slurm.time='1'"], "submit.slurm.time"),
        (["submit.slurm.time='0:10:00'", "submit.slurm.signal_before='15 minutes'"], "submit.slurm.time"),
        (["submit.slurm.time='0-1'", "checkpoint.stop_within='1 hours'"], "submit.slurm.time"),
        (["submit.slurm.time="], "submit.slurm.time"),
        (["submit.slurm.time='2 hours'"], "submit.slurm.time"),
        (["submit.slurm.signal_before='1 days'"], "submit.slurm.signal_before"),
        (["checkpoint.stop_within='1 days'"], "checkpoint.stop_within"),
        (["submit.slurm.partition=' '"], "submit.slurm.partition"),
        (["submit.slurm.srun=['']"], "submit.slurm.srun[0]"),
        (["submit=docker", "submit.docker.network="], "submit.docker.network"),
        (["submit.slurm.sbatch=['nodes=7']"], "submit.slurm.sbatch[0]"),
        (["submit.slurm.agent=none", "submit.slurm.srun=['--kill-on-bad-exit=0']"], "submit.slurm.srun[0]"),
        (["submit=local", "submit.slurm.nodes=2"], "submit.slurm.nodes"),
        (["submit=local", "submit.slurm.time='5'"], "submit.slurm.time"),
    ],
)
def test_what_a_job_cannot_be(overrides: list[str], key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make_plan(parse(config_text("submit=slurm", *overrides)), Facts())
    assert refused.value.key == key


@pytest.mark.parametrize(
    ("sbatch", "srun", "said"),
    [
        (["--comment=x", "--nodes=7"], [], r"sbatch\[1\]=--nodes=7: .*--nodes itself\s+what says it is cluster\.nodes"),
        (["--outp=/dev/null"], [], "sets --output itself"),
        (["-HN 7"], [], "sets --nodes itself"),
        (["-o/dev/null"], [], "sets --output itself"),
        (["--no-requeue"], [], r"submit\.slurm\.requeue=0"),
        (["--gpus=2"], [], r"submit\.slurm\.gpus_per_node"),
        ([], ["-n4"], r"cluster\.ranks_per_node"),
        ([], ["--export=NONE"], r"submit\.slurm\.env"),
    ],
)
def test_options_that_the_launcher_sets_are_refused(sbatch: list[str], srun: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_options(SlurmConfig(sbatch=sbatch, srun=srun))


def test_other_options_are_handed_on() -> None:
    sbatch = ["--mail-type=END", "--nodelist=node3", "--exclusive", "--hold", "-H", "-w node3", "--mem-per-cpu=2G"]
    check_options(SlurmConfig(sbatch=sbatch, srun=["--cpu-bind", "cores", "--kill-on-bad-exit=0", "-l"]))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 1800),
        ("1:30", 90),
        ("2:00:00", 7200),
        ("1-12", 129600),
        ("1-12:30", 131400),
        ("1-0:0:5", 86405),
        ("UNLIMITED", None),
    ],
)
def test_a_limit_is_what_slurm_takes_it_for(text: str, seconds: float | None) -> None:
    assert limit(text) == seconds


def test_gpus_that_no_rank_uses_are_noted() -> None:
    def notes(*overrides: str) -> list[str]:
        return make_plan(parse(config_text(*overrides)), Facts()).notes

    asked = ("submit=slurm", "submit.slurm.gpus_per_node=4")
    unused = "submit.slurm.gpus_per_node: the ranks of a node use {} of its 4 GPUs"
    assert unused.format(0) in notes(*asked, "cluster.device=cpu")
    assert unused.format(2) in notes(*asked, "cluster.ranks_per_node=2")
    assert not any("GPU" in one for one in notes(*asked))
    gres = ("submit=slurm", "cluster.device=cpu")
    assert any("use no GPU" in one for one in notes(*gres, "submit.slurm.gres='gpu:4'"))
    assert not any("GPU" in one for one in notes(*gres, "submit.slurm.gres='tmpfs:4'"))


def test_a_percent_sign_in_a_folder_is_no_symbol_of_slurms(run: RunDir) -> None:
    config = parse(config_text(*KEYS))
    scripts, plan, here = Scripts(config), make_plan(config, Facts()), Path("/a%j")
    one = scripts.of_run(RunDir(here), plan).script_text
    assert one is not None
    assert "#SBATCH --output=/a%%j/logs/slurm_%j.out\n" in one
    assert "run=/a%j\n" in one
    assert "#SBATCH --output=/a%%j/logs/slurm_%A_%a.out\n" in scripts.of_array(here, [run], plan)
    assert "#SBATCH --output=/a%%j/logs/report_%j.out\n" in scripts.of_report(here, plan)


SHELLCHECK = Path(sys.executable).parent / "shellcheck"


@pytest.mark.skipif(not SHELLCHECK.exists(), reason="shellcheck comes with the extra lint")
def test_h07_shellcheck_finds_nothing_in_any_script(run: RunDir, tmp_path: Path) -> None:
    plain = ("submit.slurm.container_image=null", "submit.slurm.container_mounts=[]")
    variants = ((), plain, (*plain, "submit.slurm.agent=none"), ("submit.slurm.container_runtime=apptainer",))
    texts = [script(run, *one) for one in variants]
    config = parse(config_text(*KEYS))
    plan = make_plan(config, Facts())
    runs = [run, RunDir(Path('/runs/it\'s "two"'))]
    texts += [Scripts(config).of_array(Path("/runs"), runs, plan), Scripts(config).of_report(Path("/runs"), plan)]
    paths = [tmp_path / f"{number}.sbatch" for number in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text)
        lines = text.splitlines()
        last = max(number for number, line in enumerate(lines) if line.startswith("#SBATCH "))
        assert all(line.startswith("#SBATCH ") for line in lines[1:last])
    done = subprocess.run([str(SHELLCHECK), *map(str, paths)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


def test_either_key_says_the_nodes_and_both_only_alike() -> None:
    def nodes(*overrides: str) -> int:
        return make_plan(parse(config_text("submit=slurm", *overrides)), Facts()).nodes

    assert [nodes(), nodes("cluster.nodes=2"), nodes("submit.slurm.nodes=3")] == [1, 2, 3]
    assert nodes("cluster.nodes=2", "submit.slurm.nodes=2") == 2
    with pytest.raises(ConfigError, match=r"submit\.slurm\.nodes=3: cluster\.nodes=1 says another number of nodes"):
        nodes("cluster.nodes=1", "submit.slurm.nodes=3")


def test_cores_that_ranks_cannot_share_are_refused(run: RunDir) -> None:
    alone = ("submit=slurm", "submit.slurm.agent=none", "cluster.device=cpu", "cluster.ranks_per_node=3")
    with pytest.raises(ConfigError, match="among its 3 ranks"):
        rendered(run, *alone, "submit.slurm.cpus_per_task=8")


SRUN = """#!/usr/bin/env bash
printf '%s\\0' "$@" > "$LOG/given"
while [[ $1 == --* ]]; do shift; done
for node in 0 1 2; do SLURM_NODEID=$node "$@" >> "$LOG/agents"; done
exit "$(cat "$LOG/code")"
"""
SCONTROL = """#!/usr/bin/env bash
case "$*" in
  "show hostnames gpu[03,07-08]") printf 'gpu03\\ngpu07\\ngpu08\\n' ;;
  "--oneliner show job 41") echo "JobId=41 JobState=$(cat "$LOG/state") Reason=None" ;;
  *) echo "$*" >> "$LOG/asked" ;;
esac
"""
AGENT = '#!/usr/bin/env bash\nprintf "%s " "$LAUNCHER_RENDEZVOUS" "$@"\nprintf "%s\\n" "$OWN"\n'
AWKWARD = 'it\'s "so" $HOME, ü;\nand a second line'


@pytest.fixture
def stand_ins(tmp_path: Path) -> Path:
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("agent", AGENT), ("sleep", "#!/bin/sh\nexit 0\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "state").write_text("RUNNING")
    return tmp_path


def execute(folder: Path, code: int, *, max_requeues: int = 2, restarts: int = 0) -> "subprocess.CompletedProcess[str]":
    """The body with the stand-ins around it, in a job of three nodes whose srun ends with `code`."""
    (folder / "code").write_text(str(code))
    quoted = "'" + AWKWARD.replace("'", "'\\''") + "'"
    numbered = """bash -c 'exec "$@" --node "$SLURM_NODEID"' launcher"""
    head = f"command=({numbered} agent {quoted})\nsrun_options=(--comment={quoted})\nmax_requeues={max_requeues}\n"
    head += "watch=()\ntasks_per_node=1\n"
    (folder / "job").write_text(head + body())
    job = {"SLURM_JOB_ID": "41", "SLURM_JOB_NODELIST": "gpu[03,07-08]", "SLURM_RESTART_COUNT": str(restarts)}
    job |= {"SLURM_JOB_NUM_NODES": "3", "SLURM_NTASKS": "6"}
    own = {"PATH": f"{folder}:{os.environ['PATH']}", "LOG": str(folder), "OWN": AWKWARD}
    return subprocess.run(
        ["bash", str(folder / "job")], env={**os.environ, **job, **own}, capture_output=True, text=True, timeout=30
    )


def test_h02_h07_all_nodes_meet_at_the_first_and_get_their_numbers(stand_ins: Path) -> None:
    assert execute(stand_ins, 0).returncode == 0
    agents = (stand_ins / "agents").read_text()
    assert agents == "".join(f"gpu03:20041 {AWKWARD} --node {node} {AWKWARD}\n" for node in range(3))
    given = (stand_ins / "given").read_bytes().decode().split("\0")
    assert given[:4] == ["--export=ALL", "--ntasks=3", "--ntasks-per-node=1", f"--comment={AWKWARD}"]
    assert not (stand_ins / "asked").exists()


@pytest.mark.parametrize(
    ("code", "restarts", "state", "is_queued_again", "said"),
    [
        (75, 0, "RUNNING", True, "was stopped, and is queued again"),
        (75, 1, "RUNNING", True, "was stopped, and is queued again"),
        (75, 2, "RUNNING", False, "has been queued again 2 times"),
        (75, 0, "CANCELLED", False, "was cancelled"),
        (0, 0, "RUNNING", False, ""),
        (3, 0, "RUNNING", False, ""),
        (143, 0, "RUNNING", False, ""),
    ],
)
def test_h04_which_jobs_are_queued_again(
    stand_ins: Path, code: int, restarts: int, state: str, is_queued_again: bool, said: str
) -> None:
    (stand_ins / "state").write_text(state)
    done = execute(stand_ins, code, restarts=restarts)
    assert done.returncode == code
    assert said in done.stdout
    log = stand_ins / "asked"
    assert (log.read_text() if log.exists() else "") == ("requeue 41\n" if is_queued_again else "")


def test_a_job_that_starts_again_takes_over_from_itself() -> None:
    holder = Owner("node1", "boot", "ns", 7, 1, "me", 0.0, job="41", job_start=1)
    me = Owner("node2", "other", "ns", 8, 2, "me", 1.0, job="41", job_start=2)
    assert holder.has_ended(me)
    assert not me.has_ended(holder)
    assert not holder.has_ended(replace(me, job="42"))
