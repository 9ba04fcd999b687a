"""The tracker: one run a job, no secret in it, and no run that waits for it or fails with it."""

from pathlib import Path

import pytest
from runs import Done, launch, mean

pytestmark = pytest.mark.slow

CLOSED = "http://127.0.0.1:9"
KEY = "0123456789abcdef0123456789abcdef01234567"
SECRET = "4711.08151623"

UPDATES = mean("[6,[0,0,0],1,2]", "batch.global_batch_size=1")
ONE_RANK, TWO_RANKS = "cluster.ranks_per_node=1", "cluster.ranks_per_node=2"


@pytest.fixture(scope="module")
def fonts(tmp_path_factory):
    """Where matplotlib keeps what it knows of fonts, which it would gather anew in every empty home."""
    return tmp_path_factory.mktemp("matplotlib")


@pytest.fixture(autouse=True)
def no_login(monkeypatch, tmp_path, fonts):
    """Nobody is logged in, and nothing of the user's own settings is seen."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "WANDB_PROJECT", "WANDB_RUN_ID", "WANDB_NAME"):
        monkeypatch.delenv(name, raising=False)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("MPLCONFIGDIR", str(fonts))
    monkeypatch.setenv("NETRC", str(home / "netrc"))


def recorded(done: Done) -> list[Path]:
    return sorted((done.run / "wandb").glob("offline-run-*"))


def is_complete(done: Done) -> bool:
    return [line["update"] for line in done.metrics()] == [1, 2, 3, 4]


def holds(folder: Path, text: str) -> list[str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [str(path) for path in files if text.encode() in path.read_bytes()]


def test_j02_two_ranks_record_one_run_with_its_configuration_and_plan(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")  # the key of the configuration alone decides
    done = launch(tmp_path, "train", *UPDATES, TWO_RANKS, "logging.wandb.mode=offline", "logging.wandb.tags=[one,two]")
    assert done.code == 0, done.err
    assert is_complete(done)
    assert "tracker" not in done.json("status.json")
    (only,) = recorded(done)
    identity = done.json("wandb.json")["id"]
    assert only.name.endswith(identity)
    (file,) = only.glob("*.wandb")
    for text in ("train/loss", "train/grad_norm", "global_batch_size", "num_updates", done.run.name, "two"):
        assert text.encode() in file.read_bytes()


@pytest.mark.parametrize("key", [None, KEY], ids=["no key", "a key"])
def test_j04_a_service_that_does_not_answer_stops_nothing(tmp_path, monkeypatch, key):
    monkeypatch.setenv("WANDB_BASE_URL", CLOSED)
    if key:
        monkeypatch.setenv("WANDB_API_KEY", key)
    done = launch(tmp_path, "train", *UPDATES, TWO_RANKS, "logging.wandb.mode=online", timeout=120)
    assert done.code == 0, done.err
    assert is_complete(done)
    status = done.json("status.json")
    assert status["state"] == "finished"
    # which of the two a busy machine decides
    assert any(said in status["tracker"] for said in ("recorded offline", "not done after"))
    assert f"tracker {status['tracker'][:20]}" in done.out
    assert (done.run / "logs" / "rank_0.log").read_text(encoding="utf-8").count("tracker: ") == 1
    assert "tracker: " not in (done.run / "logs" / "rank_1.log").read_text(encoding="utf-8")
    assert len(recorded(done)) == 1
    assert holds(done.run, KEY) == []


def test_a_broken_tracker_stops_nothing(tmp_path):
    (tmp_path / "wandb.py").write_text("raise RuntimeError('broken beyond repair')\n", encoding="utf-8")
    done = launch(tmp_path, "train", *UPDATES, ONE_RANK, "logging.wandb.mode=offline")
    assert done.code == 0, done.err
    assert is_complete(done)
    assert done.json("status.json")["tracker"] == "broken beyond repair"


def test_a_secret_reaches_the_ranks_and_no_file(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET", SECRET)
    probe = mean("[1,2]", "data.train.targets=['${oc.decode:${oc.env:SECRET}}']", ONE_RANK)
    done = launch(tmp_path, "train", *probe, "+mine='x-${oc.env:SECRET}'", "logging.wandb.mode=offline")
    assert done.code == 0, done.err
    assert done.weights()["w"] == pytest.approx([float(SECRET)])
    assert len(recorded(done)) == 1
    assert holds(done.run, SECRET) == []
    assert holds(done.run / "wandb", "oc.env:SECRET") != []


def test_words_of_the_tracker_hold_no_secret(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET", SECRET)
    words = ["logging.wandb.tags=['${oc.env:SECRET}',two]", "logging.wandb.group='g-${oc.env:SECRET}'"]
    hidden = ["run.name='${launcher.path_name:${oc.env:SECRET}}'", "+mine='${oc.create:[1,${oc.env:SECRET}]}'"]
    done = launch(tmp_path, "train", *UPDATES, ONE_RANK, "logging.wandb.mode=offline", *words, *hidden)
    assert done.code == 0, done.err
    assert len(recorded(done)) == 1
    assert holds(done.run / "wandb", SECRET) == []
    for word in ("g-${oc.env:SECRET}", "two"):
        assert holds(done.run / "wandb", word) != []
    told = " ".join(done.out.split())
    assert "logging.wandb.tags: ${oc.env:…} is recorded as this reference and not with its value" in told
    assert "logging.wandb.group: " in told


def test_where_the_tracker_sends_may_be_an_environment_variable(tmp_path, monkeypatch):
    monkeypatch.setenv("TEAM", "team-0815")
    address = ["logging.wandb.project='${oc.env:TEAM}'"]
    done = launch(tmp_path, "train", *UPDATES, ONE_RANK, "logging.wandb.mode=offline", *address)
    assert done.code == 0, done.err
    assert holds(done.run / "wandb", "team-0815") != []
    assert "${oc.env:TEAM}" in (done.run / "config.yaml").read_text(encoding="utf-8")
