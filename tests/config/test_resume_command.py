"""`launcher resume` and checkpoint.resume=auto up to the start of the ranks, which never comes here."""

import json
import os
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
import yaml
from fabricated import checkpoint

from launcher import lock, prepare
from launcher.config.difference import WHERE_AND_HOW
from launcher.config.messages import schema_keys
from launcher.config.schema import SECTIONS
from launcher.plan.facts import Facts
from launcher.run_dir import RunDir, State
from launcher.submit.local import Local

pytestmark = pytest.mark.thorough

TWO_RANKS = ("cluster.device=cpu", "cluster.ranks_per_node=2")


@pytest.fixture(autouse=True)
def submitted(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What was submitted: its files as the ranks would find them. Each such run is stopped at once."""
    seen: list[dict[str, Any]] = []

    def submit(self: Local, run: RunDir, plan: Any, launch: Any, console: Any, *, live: bool) -> int:
        seen.append(
            {
                "run": run,
                "config": yaml.safe_load(run.config.read_text()),
                "plan": json.loads(run.plan.read_text()),
                "status": json.loads(run.status.read_text()),
                "lock": json.loads(lock.path_of(run).read_text()) if lock.path_of(run).exists() else None,
            }
        )
        run.write_status(state=State.stopped, exit_code=75)
        return 75

    monkeypatch.setattr(Local, "submit", submit)
    return seen


@pytest.fixture
def facts(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the model and the data say; to be changed by a test."""
    said: dict[str, Any] = {"samples": 1000, "validation_samples": 10, "parameters": 5, "trainable_parameters": 5}
    monkeypatch.setattr(prepare, "ask", lambda *_: Facts(**said))
    return said


def metrics(run: Path, last: int, attempt: int = 0) -> None:
    with open(run / "metrics.jsonl", "a") as file:
        for update in range(1, last + 1):
            file.write(json.dumps({"kind": "train", "update": update, "attempt": attempt, "loss": 1.0}) + "\n")


def trained(command: Any, *overrides: str) -> Path:
    """The folder of a run that was stopped."""
    assert command("train", *TWO_RANKS, "hydra.run.dir=run", *overrides).code == 75
    return Path("run").resolve()


def contents(run: Path) -> dict[str, str]:
    return {str(one.relative_to(run)): one.read_text() for one in sorted(run.rglob("*")) if one.is_file()}


def test_it_goes_on_from_the_newest_checkpoint_in_its_own_folder(command, submitted):
    run = trained(command)
    metrics(run, 57)
    checkpoint(run, 20)
    checkpoint(run, 40)
    RunDir(run).write_status(state=State.failed, exit_code=3, error={"rank": 1, "reason": "x"}, update=55, tracker="t")
    before = (run / "config.yaml").read_text()
    said = command("resume", "run")
    assert said.code == 75
    assert "from the checkpoint of update 40 of 100; 17 updates after it repeated" in said.out
    assert "go on   launcher resume run  (from update 40)" in said.out
    first, second = submitted
    assert second["run"].path == run
    assert (run / "config.yaml").read_text() == before
    assert second["plan"] == first["plan"]
    status = second["status"]
    assert (status["state"], status["exit_code"], status["error"]) == ("submitted", None, None)
    assert (status["update"], status["attempt"], status["pids"], status["tracker"]) == (40, 1, {}, None)
    assert (status["host"], second["lock"]["pid"]) == (socket.gethostname(), os.getpid())
    assert not (run / "lock.json").exists()


def test_without_a_checkpoint_it_starts_from_the_beginning(command, submitted):
    run = trained(command)
    said = command("resume", "run")
    assert "from the beginning, for there is no checkpoint yet" in said.out
    assert "repeated" not in said.out
    metrics(run, 1)
    assert "from the beginning, for there is no checkpoint yet; 1 update repeated" in command("resume", "run").out
    assert [one["status"]["update"] for one in submitted] == [0, 0, 0]


def test_where_and_how_it_runs_may_change(command, submitted):
    trained(command, "strategy.wrap=[Block]")
    overrides = (
        "strategy=fsdp",
        "activation_checkpoint=full",
        "cluster.ranks_per_node=3",
        "batch.micro_batch_size=4",
        "submit=local",
        "data.workers=2",
        "checkpoint.keep_last=7",
        "training.time_limit='1:00:00'",
        "run.name='second, one'",
        "logging.progress=false",
        "++strategy.reduce_each=window",
    )
    said = command("resume", "run", *overrides)
    assert said.code == 75, said.err
    config, plan = submitted[-1]["config"], submitted[-1]["plan"]
    assert (plan["world_size"], plan["strategy"], plan["micro_batch_size"]) == (3, "fsdp", 4)
    assert config["strategy"]["name"] == "fsdp"
    assert config["strategy"]["wrap"] is None  # a choice takes the whole section
    assert config["strategy"]["reduce_each"] == "window"
    assert config["run"]["name"] == "second, one"
    assert config["training"]["time_limit"] == "1:00:00"
    assert plan["global_batch_size"] == 64
    assert command("resume", "run").code == 75  # and they stay
    assert submitted[-1]["config"] == config


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["optimizer.lr=0.5"], ["optimizer.lr: 0.003 -> 0.5"]),
        (
            ["run.seed=3", "training.duration='50 updates'"],
            ["run.seed: 0 -> 3", "training.duration: 100 updates -> 50"],
        ),
        (["batch.global_batch_size=32"], ["batch.global_batch_size: 64 -> 32"]),
        (
            ["batch.global_batch_size=null", "batch.micro_batch_size=4", "batch.gradient_accumulation_steps=2"],
            ["batch.global_batch_size: 64 -> "],
        ),
        (["schedule/decay=linear"], ["schedule.decay.name: cosine -> linear"]),
        (["precision=bf16"], ["precision.name: fp32 -> bf16"]),
        (["+model.extra=1"], ["model.extra: (not there) -> 1"]),
        (["~optimizer.eps"], ["optimizer.eps: 1e-08 -> (not there)"]),
        (["optimizer.betas=[0.9,0.99]"], ["optimizer.betas: [0.9, 0.95] -> [0.9, 0.99]"]),
        (["data=text", "data.train.path=x"], ["data.train._target_: launcher.data.PythonStdlib -> launcher.data.Text"]),
        (["training.max_grad_norm=null"], ["training.max_grad_norm: 1.0 -> null"]),
    ],
)
def test_what_would_change_the_result_is_refused_and_forced(command, submitted, overrides, said):
    run = trained(command)
    checkpoint(run, 40)
    before = contents(run)
    refused = command("resume", "run", *overrides, "cluster.ranks_per_node=1")
    assert refused.code == 2
    for part in ("which would change its result", "--force", *said):
        assert part in refused.err
    assert "cluster" not in refused.err
    assert contents(run) == before
    assert len(submitted) == 1
    forced = command("resume", "run", "--force", *overrides)
    assert forced.code == 75
    for part in said:
        assert part in " ".join(forced.out.split())
    assert any(said[0] in note for note in submitted[-1]["plan"]["notes"])


def test_values_that_are_the_same_are_no_difference(command, submitted):
    trained(command, "training.duration='100 updates'")
    same = ("batch.global_batch_size=64", "optimizer.lr=3e-3", "optimizer.betas=[0.9,0.95]", "training.max_grad_norm=1")
    assert command("resume", "run", *same).code == 75


def test_a_batch_that_follows_from_the_ranks_may_not_change_with_them(command, submitted):
    sizes = ("batch.global_batch_size=null", "batch.micro_batch_size=4", "batch.gradient_accumulation_steps=2")
    trained(command, *sizes)
    refused = command("resume", "run", "cluster.ranks_per_node=4")
    assert refused.code == 2
    assert "batch.global_batch_size: 16 -> 32 (batch.global_batch_size=16 keeps it)" in refused.err
    again = ("batch.global_batch_size=16", "batch.gradient_accumulation_steps=auto", "cluster.ranks_per_node=4")
    assert command("resume", "run", *again).code == 75
    assert submitted[-1]["plan"]["global_batch_size"] == 16


def test_data_and_a_model_that_have_changed_are_refused(command, submitted, facts):
    run = trained(command)
    facts["samples"] = 900
    facts["parameters"] = 6
    before = contents(run)
    refused = command("resume", "run")
    assert refused.code == 2
    assert "data.train (samples): 1000 -> 900" in refused.err
    assert "model or task (parameters): 5 -> 6" in refused.err
    assert contents(run) == before
    assert command("resume", "run", "--force").code == 75
    assert submitted[-1]["plan"]["facts"]["samples"] == 900


def test_what_cannot_be_asked_here_is_kept(command, submitted, facts):
    trained(command)
    facts.clear()
    assert command("resume", "run", "cluster.ranks_per_node=1").code == 75
    assert submitted[-1]["plan"]["facts"]["samples"] == 1000


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["batch.micro_batch_sise=4"], "did you mean 'batch.micro_batch_size'"),
        (["strategy=fsdq"], "did you mean 'fsdp'"),
        (["strategy=fsdp,ddp"], "one value of each key"),
        (["mesh.pp=1,2"], "one value of each key"),
        (["hydra.run.dir=x"], "leave it out"),
        (["hydra/sweeper=basic"], "leave it out"),
        (["~strategy"], "can't be chosen anew"),
        (["strategy@mesh=ddp"], "can't be chosen anew"),
        (["mesh.pp=x"], "allowed: a whole number"),
        (["mesh.pp=0"], "must be at least 1"),
        (["cluster.ranks_per_node='a b"], "not an override of the form key=value"),
        (["lr=0.1"], "a key of your own, whose value was settled"),
        (["batch.gradient_accumulation_steps=9"], "no micro-batch makes 9 steps"),
        (["--config-dir", "nowhere"], "no such folder"),
    ],
)
def test_overrides_that_cannot_be_are_refused_in_one_message(command, submitted, overrides, said):
    run = trained(command, "+lr=0.2", "optimizer.lr=${lr}")
    before = contents(run)
    refused = command("resume", "run", *overrides)
    assert refused.code == 2, refused
    assert said in refused.err
    assert "Traceback" not in refused.err
    assert contents(run) == before


def test_choices_of_ones_own(command, submitted, tmp_path):
    trained(command)
    (tmp_path / "mine" / "strategy").mkdir(parents=True)
    (tmp_path / "mine" / "strategy" / "wide.yaml").write_text("name: fsdp\nwrap: [Block]\n")
    said = command("resume", "run", "--config-dir", "mine", "strategy=wide", "strategy.reduce_each=window")
    assert said.code == 75, said.err
    strategy = submitted[-1]["config"]["strategy"]
    assert (strategy["name"], strategy["wrap"], strategy["reduce_each"]) == ("fsdp", ["Block"], "window")
    assert submitted[-1]["plan"]["pythonpath"] == [str(tmp_path), str(tmp_path / "mine")]


def test_it_works_in_the_folder_where_it_was_started(command, submitted, tmp_path, monkeypatch):
    run = trained(command, "+model.path=weights")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert command("resume", "../run", "cluster.ranks_per_node=1").code == 75
    plan = submitted[-1]["plan"]
    assert (plan["cwd"], plan["pythonpath"]) == (str(tmp_path), [str(tmp_path)])
    assert submitted[-1]["config"]["model"]["path"] == str(tmp_path / "weights")
    gone = json.loads((run / "plan.json").read_text()) | {"cwd": "/no/such/folder"}
    (run / "plan.json").write_text(json.dumps(gone))
    said = command("resume", str(run))
    assert "the folder /no/such/folder, where the run was started, is gone" in said.out
    assert submitted[-1]["plan"]["cwd"] == str(tmp_path / "elsewhere")


def test_a_secret_stays_a_reference(command, submitted, monkeypatch):
    monkeypatch.setenv("TOKEN", "hush")
    run = trained(command, "+model.token=${oc.env:TOKEN}", "+model.price='\\${5}'")
    said = command("resume", "run", "cluster.ranks_per_node=1", "+logging.wandb.tags=['${oc.env:TOKEN}']")
    assert said.code == 75, said.err
    refused = command("resume", "run", "+model.token2=${oc.env:TOKEN}", "model.token=x")
    assert refused.code == 2
    assert "model.token: ${oc.env:TOKEN} -> x" in refused.err
    assert not [name for name, text in contents(run).items() if "hush" in text]
    assert "hush" not in said.out + refused.err
    assert submitted[-1]["config"]["model"]["price"] == submitted[0]["config"]["model"]["price"]


def test_from_an_earlier_checkpoint(command, submitted):
    run = trained(command)
    for update in (20, 40, 60):
        checkpoint(run, update)
    metrics(run, 70)
    refused = command("resume", "run", "--from", "30")
    assert refused.code == 2
    assert "--from 30: there is no checkpoint of that update; there are: 20, 40, 60" in refused.err
    assert command("resume", "run", "--from", "20", "optimizer.lr=1").code == 2
    state = run / "checkpoints" / "update_0000000040" / "state"
    state.write_text("abd")  # as long as before
    assert "its contents have changed" in command("resume", "run", "--from", "40").err
    state.write_text("abc")
    assert len(os.listdir(run / "checkpoints")) == 3
    said = command("resume", "run", "--from=20")
    assert f"puts aside the checkpoints of later updates, in {Path('run', 'checkpoints')}: 40, 60" in said.out
    assert "from the checkpoint of update 20 of 100; 50 updates after it repeated" in said.out
    aside = [f"update_00000000{update}.before_attempt_1" for update in (40, 60)]
    assert sorted(os.listdir(run / "checkpoints")) == ["update_0000000020", *aside]
    assert submitted[-1]["status"]["update"] == 20


def test_a_checkpoint_that_is_cut_off_is_passed_over(command, submitted):
    run = trained(command)
    checkpoint(run, 20)
    checkpoint(run, 40, size=4)
    said = command("resume", "run")
    assert "3 bytes instead of 4" in said.out
    assert "from the checkpoint of update 20" in said.out
    refused = command("resume", "run", "--from", "40")
    assert (refused.code, "3 bytes instead of 4" in refused.err) == (2, True)
    (run / "checkpoints" / "update_0000000020" / "state").unlink()
    refused = command("resume", "run")
    assert refused.code == 2
    assert "none of its checkpoints can be used" in refused.err


def test_a_finished_run_has_nothing_left(command, submitted):
    run = trained(command)
    checkpoint(run, 100)
    checkpoint(run, 60)
    RunDir(run).write_status(state=State.finished, exit_code=0, update=100)
    before = contents(run)
    for argv in (["resume", "run"], ["resume", "run", "--force"], ["train", *TWO_RANKS, *AUTO]):
        said = command(*argv)
        assert (said.code, "nothing is left to do in run" in said.out) == (0, True)
    assert command("resume", "run", "training.duration='200 updates'").code == 2
    assert contents(run) == before
    assert len(submitted) == 1
    longer = command("resume", "run", "training.duration='200 updates'", "--force")
    assert "from the checkpoint of update 100 of 200" in longer.out
    assert submitted[-1]["plan"]["num_updates"] == 200


@pytest.mark.parametrize("left", ["checkpoints/update_0000000020", "metrics.jsonl"])
def test_a_new_run_takes_nothing_that_an_earlier_one_has_left(command, submitted, left):
    run = trained(command)
    checkpoint(run, 20) if "update" in left else metrics(run, 20)
    for one in (run / "config.yaml", run / "plan.json", run / "status.json"):
        one.unlink()
    before = contents(run)
    for more in ((), ("checkpoint.resume=auto",)):
        refused = command("train", *TWO_RANKS, "hydra.run.dir=run", "optimizer.lr=1", *more)
        assert refused.code == 2
        assert f"an earlier run has left {left} here" in refused.err
    assert (contents(run), len(submitted)) == (before, 1)


def test_logs_that_were_removed_and_a_status_of_nonsense_are_no_hindrance(command, submitted):
    run = trained(command)
    checkpoint(run, 20)
    (run / "status.json").write_text('{"state": 5, "update": "y", "attempts_started": "x"}')
    shutil.rmtree(run / "logs")
    said = command("resume", "run")
    assert said.code == 75, said.err
    assert "from the checkpoint of update 20" in said.out
    assert (run / "logs").is_dir()


AUTO = ("hydra.run.dir=run", "checkpoint.resume=auto")


def test_train_goes_on_where_it_is_told_to(command, submitted):
    run = trained(command)
    checkpoint(run, 40)
    refused = command("train", *TWO_RANKS, "hydra.run.dir=run")
    assert refused.code == 2
    for part in ("already holds a run", "launcher resume run goes on with that run", "checkpoint.resume=auto"):
        assert part in refused.err
    before = contents(run)
    refused = command("train", *TWO_RANKS, *AUTO, "optimizer=sgd", "optimizer.lr=1")
    assert refused.code == 2
    assert "optimizer._target_: torch.optim.AdamW -> torch.optim.SGD" in refused.err
    assert contents(run) == before
    said = command("train", *AUTO, "cluster.device=cpu", "cluster.ranks_per_node=3", "strategy=fsdp")
    assert said.code == 75, said.err
    assert "from the checkpoint of update 40 of 100" in said.out
    assert (submitted[-1]["plan"]["world_size"], submitted[-1]["status"]["state"]) == (3, "submitted")
    assert submitted[-1]["lock"]["pid"] == os.getpid()
    assert "strategy=fsdp" in (run / ".hydra" / "overrides.yaml").read_text()


def test_train_starts_where_there_is_none(command, submitted):
    assert command("train", *TWO_RANKS, *AUTO).code == 75
    assert len(submitted) == 1


def test_a_run_that_another_launcher_has_is_refused(command, submitted):
    run = trained(command)
    other = lock.Owner.this_process()
    (run / "lock.json").write_text(json.dumps(lock.asdict(other) | {"pid": 1, "started": 0}))
    before = contents(run)
    for argv in (["resume", "run"], ["resume", "run", "--force"], ["train", *TWO_RANKS, *AUTO]):
        refused = command(*argv)
        assert (refused.code, "another launcher is running here" in refused.err) == (2, True)
    assert contents(run) == before
    (run / "lock.json").write_text(json.dumps(lock.asdict(other) | {"host": "far-away"}))
    assert command("resume", "run").code == 2
    assert command("resume", "run", "--force").code == 75
    assert not (run / "lock.json").exists()


@pytest.mark.parametrize("name", ["nowhere", "."])
def test_a_folder_without_a_run_is_refused(command, submitted, name):
    refused = command("resume", name)
    assert (refused.code, f"{name}: no run here" in refused.err) == (2, True)


def test_a_configuration_that_cannot_be_read_is_said(command, submitted):
    run = trained(command)
    text = (run / "config.yaml").read_text()
    for broken in (text + "}", text.replace("data:", "data:\n  wrokers: 3"), "a: b"):
        (run / "config.yaml").write_text(broken)
        refused = command("resume", "run")
        assert refused.code == 2, refused
        assert "config.yaml can't be read" in refused.err
    assert len(submitted) == 1


def test_a_configuration_that_was_edited_by_hand_is_refused(command, submitted):
    assert command("train", "hydra.run.dir=run", *TWO_RANKS).code == 75
    before = Path("run/config.yaml").read_text()
    Path("run/config.yaml").write_text(before.replace("seed: 0", "seed: 1"))
    refused = command("resume", "run")
    assert (refused.code, "config.yaml: was edited since" in refused.err) == (2, True)
    assert command("resume", "run", "--force").code == 75
    assert submitted[-1]["config"]["run"]["seed"] == 1
    assert command("resume", "run").code == 75  # it is the run's from now on


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"facts": 3}'])
def test_a_plan_that_cannot_be_read_is_said(command, submitted, text):
    run = trained(command)
    (run / "plan.json").write_text(text)
    refused = command("resume", "run")
    assert (refused.code, "plan.json: can't be read" in refused.err) == (2, True)


def test_files_that_cannot_be_written_refuse_it(command, submitted, monkeypatch):
    run = trained(command)
    checkpoint(run, 20)
    checkpoint(run, 40)
    before = contents(run)
    real = os.fsync
    written: list[int] = []

    def full(descriptor: int) -> None:
        written.append(descriptor)
        if len(written) == 2:  # config.yaml fits, and plan.json doesn't
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    refused = command("resume", "run", "--from", "20", "cluster.ranks_per_node=1")
    assert refused.code == 2
    assert "plan.json: can't be written: No space left on device" in refused.err
    assert contents(run) == before


def test_keys_that_may_change_are_keys():
    known = {*SECTIONS, *schema_keys()}
    assert set(WHERE_AND_HOW) <= known


def test_help(command):
    said = command("resume", "--help")
    assert said.code == 0
    assert "launcher resume RUN_DIR [--force] [--from N]" in said.out
    assert command("resume").code == 2
    assert "resume RUN_DIR" in command("--help").out
