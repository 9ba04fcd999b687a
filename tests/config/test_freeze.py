"""config.yaml: frozen once, read the same by every rank, and without a secret."""

import re
from pathlib import Path

import pytest
import yaml
from configs import composed_text

from launcher import prepare
from launcher.config.choices import SubmitKind
from launcher.config.compose import Arguments, compose, hydra_session, task_config
from launcher.config.freeze import freeze
from launcher.config.validate import parse
from launcher.errors import Exit
from launcher.submit.local import Local

pytestmark = pytest.mark.thorough

SECRET = "hush-4711"


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    monkeypatch.setenv("SECRET", SECRET)
    monkeypatch.setenv("NUMBER", "7")
    monkeypatch.delenv("NOT_SET", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        ("${oc.env:SECRET}", "${oc.env:SECRET}"),
        ("pre-${oc.env:SECRET}-post", "pre-${oc.env:SECRET}-post"),
        ("${mine.token}", "${oc.env:SECRET}"),
        ("${mine.token}-${run.seed}", "${oc.env:SECRET}-7"),
        ("${oc.env:NOT_SET,${oc.env:SECRET}}", "${oc.env:NOT_SET,${oc.env:SECRET}}"),
        ("${oc.select:mine.token}", "${oc.env:SECRET}"),
    ],
)
def test_a_secret_stays_a_reference(value, kept):
    text = composed_text("+mine.token=${oc.env:SECRET}", "run.seed=${oc.env:NUMBER}", f"+model.note='{value}'")
    assert SECRET not in text
    assert yaml.safe_load(text)["model"]["note"] == kept
    assert parse(text).model["note"] == re.sub(r"\$\{oc.env:(NOT_SET.*)?SECRET\}+", SECRET, kept)


def test_a_secret_stays_a_reference_where_a_whole_section_is_referred_to():
    text = composed_text("+mine={token:${oc.env:SECRET},list:[1,${oc.env:SECRET}]}", "+model.note=${mine}")
    assert SECRET not in text
    assert parse(text).model["note"] == {"token": SECRET, "list": [1, SECRET]}


def test_a_typed_key_is_resolved():
    text = composed_text("run.seed=${oc.env:NUMBER}", "schedule.decay.final=${oc.env:NOT_SET,0.5}")
    assert yaml.safe_load(text)["run"]["seed"] == 7
    assert yaml.safe_load(text)["schedule"]["decay"]["final"] == 0.5


def test_text_of_the_schema_stays_a_reference():
    text = composed_text("run.name=${oc.env:SECRET}")
    assert SECRET not in text
    assert parse(text).run.name == SECRET


OPEN = {
    "a resolver": ("${launcher.path_name:${oc.env:SECRET}}", SECRET),
    "a resolver of more": ("${launcher.path_name:'it\\'s x/${oc.env:SECRET}'}", f"it_s_x_{SECRET}"),
    "inside text": ("pre ${launcher.path_name:a/${oc.env:SECRET}} post", f"pre a_{SECRET} post"),
    "a resolver of a resolver": ("${launcher.path_name:${oc.decode:${oc.env:SECRET}}}", SECRET),
    "by way of another key": ("${launcher.path_name:${mine.token}}", SECRET),
    "a list": ("${oc.create:[1,a b,${oc.env:SECRET}]}", [1, "a b", SECRET]),
    "a dictionary": ("${oc.create:{a:${oc.env:SECRET},b:[x]}}", {"a": SECRET, "b": ["x"]}),
    "what the variable holds": ("${oc.create:${oc.env:YAML}}", {"a": SECRET}),
    "a list in a resolver": ("${launcher.path_name:${oc.create:[1,${oc.env:SECRET}]}}", f"1_{SECRET}"),
    "the name of a variable": ("${oc.env:${oc.env:NAME}}", SECRET),
    "a default": ("${oc.select:mine.none,x-${oc.env:SECRET}}", f"x-{SECRET}"),
    "a default with quotes": ("${oc.env:NOT_SET,'it\\'s ${oc.env:SECRET}'}", f"it's {SECRET}"),
    "the values of a section": ("${oc.dict.values:mine}", [SECRET]),
}


@pytest.mark.parametrize("what", OPEN)
@pytest.mark.parametrize("is_referred_to", [False, True])
def test_what_is_worked_out_from_a_variable_is_worked_out_on_the_rank(monkeypatch, tmp_path, what, is_referred_to):
    value, read = OPEN[what]
    monkeypatch.setenv("NAME", "SECRET")
    monkeypatch.setenv("YAML", f"a: {SECRET}")
    folder = tmp_path / "mine"
    folder.mkdir()
    note = {"note": "${held}" if is_referred_to else value, "more": "<${held}>" if isinstance(read, str) else ""}
    own = {"defaults": ["config", "_self_"], "mine": {"token": "${oc.env:SECRET}"}, "model": note, "held": value}
    (folder / "config2.yaml").write_text(yaml.safe_dump(own), encoding="utf-8")
    arguments = Arguments((), config_name="config2", config_dir=str(folder))
    with hydra_session(arguments) as hydra:
        text = freeze(task_config(compose(hydra, arguments)))
    assert SECRET not in text
    model = parse(text).model
    assert model["note"] == read
    assert model["more"] == (f"<{read}>" if isinstance(read, str) else "")


@pytest.mark.parametrize(
    "value",
    [
        "${now:${oc.env:FORMAT}}",
        "${hydra:${oc.env:FORMAT}}",
        "${oc.select:${oc.env:FORMAT}}",
        "${oc.dict.keys:${oc.env:FORMAT}}",
        "${run.${oc.env:FORMAT}}",
        "${mine.${oc.env:FORMAT}}",
        "<${oc.create:[${oc.env:FORMAT}]}>",
    ],
)
def test_a_variable_that_is_needed_at_once_is_refused(command, monkeypatch, value):
    monkeypatch.setenv("FORMAT", "run")
    said = command("plan", f"+model.note='{value}'", "+mine={run:{run:1}}")
    assert said.code == 2
    assert f"model.note={value}: " in said.err
    assert "Traceback" not in said.err
    assert "\ue000" not in said.err


def test_text_that_only_looks_like_a_reference_stays_text():
    text = composed_text("+model.note='a\\${run.name}'", "+model.more='${model.note}-${oc.env:SECRET}'")
    assert parse(text).model["note"] == "a${run.name}"
    assert parse(text).model["more"] == f"a${{run.name}}-{SECRET}"


def test_a_name_with_a_dot_is_one_name(tmp_path):
    (tmp_path / "mine.yaml").write_text("defaults: [config, _self_]\nmodel: {names: {a.b: '${oc.env:SECRET}'}}\n")
    arguments = Arguments((), config_name="mine", config_dir=str(tmp_path))
    with hydra_session(arguments) as hydra:
        assert parse(freeze(task_config(compose(hydra, arguments)))).model["names"] == {"a.b": SECRET}


@pytest.mark.parametrize(
    ("default", "read"), [("null", None), ("word", "word"), ("a b c", "a b c"), ('"x, y"', "x, y"), ("it's", "it's")]
)
def test_the_default_of_a_variable_survives(default, read):
    argument = default if default != "it's" else '"it\'s"'
    quoted = f"${{oc.env:NOT_SET,{argument}}}".replace("'", "\\'")
    assert parse(composed_text(f"+model.note='{quoted}'")).model["note"] == read


def test_a_decoded_variable_is_decoded_on_the_rank():
    text = composed_text("+model.width='${oc.decode:${oc.env:NUMBER}}'", "optimizer.lr='${oc.decode:${oc.env:NUMBER}}'")
    config = parse(text)
    assert config.model["width"] == 7
    assert config.optimizer["lr"] == 7


def test_what_is_random_or_of_the_moment_is_frozen():
    text = composed_text("+model.when=${now:%H%M%S%f}", "+model.stamp='${launcher.stamp:}'")
    assert "${" not in text
    assert parse(text).model == parse(text).model
    assert yaml.safe_load(text)["model"]["when"].isdecimal()


def test_reading_and_freezing_go_round():
    text = composed_text(
        "schedule/decay=step",
        "schedule.decay.at=[10,90%]",
        "batch.layout=arrival",
        "scaling.rule=sqrt",
        "scaling.base_batch_size=32",
        "training.max_grad_norm=null",
        "optimizer.groups=[{match:bias,lr_scale:2}]",
    )
    config = parse(text)
    assert parse(text) == config
    assert config.schedule.decay.at == [10, "90%"]
    assert config.batch.layout.name == "arrival"
    assert config.training.max_grad_norm is None
    assert config.optimizer["groups"] == [{"match": "bias", "lr_scale": 2.0, "weight_decay": None, "warmup_from": None}]


def test_relative_paths_become_absolute():
    text = composed_text(
        "data=text",
        "data.train.path=books",
        "model_weights=start.safetensors",
        "+model.root=/there",
        "+model.cache_dir=here",
        "+model.url_path='s3://bucket/key'",
        "+model.place=${data.train.path}",
    )
    config, here = parse(text), Path.cwd()
    assert config.data.train["path"] == str(here / "books")
    assert config.data.validation["path"] == str(here / "books")
    assert config.model_weights == str(here / "start.safetensors")
    assert config.model["root"] == "/there"
    assert config.model["cache_dir"] == str(here / "here")
    assert config.model["url_path"] == "s3://bucket/key"


def test_every_choice_and_change_of_the_command_is_in_the_file(tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "small.yaml").write_text("defaults: [config, _self_]\nrun: {name: small}\n", encoding="utf-8")
    overrides = ("optimizer=sgd", "+model.extra=1", "~optimizer.nesterov", "+model.when=${now:%f}")
    arguments = Arguments(overrides, config_name="small", config_dir=str(folder))
    with hydra_session(arguments) as hydra:
        config = parse(freeze(task_config(compose(hydra, arguments))))
    assert config.run.name == "small"
    assert config.optimizer["_target_"] == "torch.optim.SGD"
    assert "nesterov" not in config.optimizer
    assert config.model["extra"] == 1


def test_no_file_of_a_run_holds_a_secret(command, monkeypatch, tmp_path):
    class Nowhere(Local):
        def submit(self, run, plan, launch, console, *, live):
            return Exit.RANK_FAILED

    monkeypatch.setitem(prepare.BACKENDS, SubmitKind.local, Nowhere)
    said = command("train", "+model.note='pre-${oc.env:SECRET}'", "+model.seed=${run.seed}", "hydra.run.dir=run")
    assert said.code == Exit.RANK_FAILED
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    written = {str(path.relative_to(tmp_path)) for path in files}
    assert written >= {"run/config.yaml", "run/plan.json", "run/status.json", "run/.hydra/config.yaml"}
    assert not [path for path in files if SECRET in path.read_text(encoding="utf-8")]
    assert SECRET not in said.out + said.err
