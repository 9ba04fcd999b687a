"""A user's mistake ends with 2 and one message: the key, what was given, what is allowed, the nearest spelling."""

import os
import re
from pathlib import Path

import pytest
from configs import config_text

from launcher.errors import LauncherError
from launcher.plan.facts import ask_all

TWO_RANKS = ("cluster.device=cpu", "cluster.ranks_per_node=2")

MISTAKES = {
    "unknown key": (
        ["batch.globl_batch_size=3"],
        ["batch.globl_batch_size=3", "did you mean 'batch.global_batch_size'"],
    ),
    "unknown key, nothing like it": (["logging.colour=red"], ["logging.colour=red", "has the keys progress"]),
    "unknown key of a nested choice": (["schedule.decay.finl=0"], ["did you mean 'schedule.decay.final'"]),
    "unknown key of the model": (["model.num_layrs=3"], ["did you mean 'model.num_layers'"]),
    "further argument": (["model.bias=true"], ["a further argument is added with +model.bias=true"]),
    "unknown root key": (["foo=3"], ["foo=3", "the configuration has the keys run, data"]),
    "added root key like a known one": (["+modle=3"], ["modle=3", "did you mean 'model'"]),
    "added section like a known one": (["+optimiser.lr=3"], ["optimiser", "did you mean 'optimizer'"]),
    "unknown group": (["schedul/decay=cosine"], ["schedul/decay=cosine", "did you mean 'schedule/decay'"]),
    "missing choice": (["data=txt"], ["data=txt", "no such choice", "custom", "python_stdlib", "did you mean 'text'"]),
    "missing choice of a nested group": (["schedule/decay=cosin"], ["constant, cosine", "did you mean 'cosine'"]),
    "missing choice of a strategy": (["strategy=single_gpu"], ["strategy=single_gpu", "ddp", "did you mean 'single'"]),
    "text for a number": (["training.max_grad_norm=big"], ["training.max_grad_norm=big", "allowed: a number or null"]),
    "text for a whole number": (["run.seed=x"], ["run.seed=x", "allowed: a whole number"]),
    "fraction for a whole number": (["run.seed=1.5"], ["run.seed=1.5", "allowed: a whole number"]),
    "null where something must be": (["run.name=null"], ["run.name=null", "allowed: text"]),
    "text for a truth": (["data.shuffle=maybe"], ["data.shuffle=maybe", "allowed: true or false"]),
    "misspelt option": (["training.on_nonfinite=skipp"], ["training.on_nonfinite=skipp", "one of skip, stop"]),
    "value of a section": (["batch=3"], ["batch=3", "must stay a section", "global_batch_size, micro_batch_size"]),
    "null of a section": (["batch=null"], ["batch=null", "must stay a section"]),
    "gas 0": (["batch.gradient_accumulation_steps=0"], ["batch.gradient_accumulation_steps=0", "at least 1 or auto"]),
    "gas -1": (["batch.gradient_accumulation_steps=-1"], ["batch.gradient_accumulation_steps=-1", "at least 1"]),
    "micro 0": (["batch.micro_batch_size=0"], ["batch.micro_batch_size=0", "at least 1 or auto"]),
    "half a sample": (["batch.global_batch_size=1.5"], ["batch.global_batch_size=1.5", "a whole number"]),
    "list": (["batch.micro_batch_size=[1,2]"], ["batch.micro_batch_size=[1, 2]", "a whole number"]),
    "misspelt auto": (["batch.micro_batch_size=atuo"], ["did you mean 'auto'"]),
    "no ranks": (
        ["cluster.device=cpu", "cluster.ranks_per_node=0"],
        ["cluster.ranks_per_node=0", "at least 1 or auto"],
    ),
    "contradiction": (
        ["batch.global_batch_size=64", "batch.micro_batch_size=4", "batch.gradient_accumulation_steps=3", *TWO_RANKS],
        [
            "batch.gradient_accumulation_steps=3",
            "batch.global_batch_size=64",
            "batch.micro_batch_size=4",
            "data_parallel_degree=2",
            "ceil(ceil(64 / 2) / 4) = 8",
            "batch.gradient_accumulation_steps=8, or batch.micro_batch_size=11, or batch.global_batch_size=24",
        ],
    ),
    "too little said": (["batch.global_batch_size=null"], ["batch.global_batch_size=null", "needs both as numbers"]),
    "unit": (["training.duration=5 epohcs"], ["training.duration=5 epohcs", "did you mean 'epochs'", "90 epochs"]),
    "no duration": (["training.duration=null"], ["training.duration=null", "a bare integer is updates"]),
    "percentage of itself": (["training.duration=10%"], ["training.duration=10%", "percentage of itself"]),
    "negative rate of a group": (
        ["optimizer.groups=[{match: w, lr_scale: -1}]"],
        ["optimizer.groups[0].lr_scale=-1.0", "a finite number of at least 0"],
    ),
    "no finite rate of a group": (
        ["optimizer.groups=[{match: w, lr_scale: inf}]"],
        ["optimizer.groups[0].lr_scale=inf"],
    ),
    "no number as a rate of a group": (
        ["optimizer.groups=[{match: w, lr_scale: nan}]"],
        ["optimizer.groups[0].lr_scale=nan"],
    ),
    "negative weight decay of a group": (
        ["optimizer.groups=[{match: w}, {match: b, weight_decay: -0.1}]"],
        ["optimizer.groups[1].weight_decay=-0.1", "a finite number of at least 0, or null"],
    ),
    "no finite weight decay of a group": (
        ["optimizer.groups=[{match: b, weight_decay: inf}]"],
        ["optimizer.groups[0].weight_decay=inf"],
    ),
    "no updates": (["training.duration=0"], ["training.duration=0", "at least one update"]),
    "negative warmup": (["schedule.warmup=-1"], ["schedule.warmup=-1", "is negative"]),
    "single on two ranks": (["strategy=single", *TWO_RANKS], ["strategy=single", "not on 2", "strategy=ddp"]),
    "mesh": (["mesh.dp_replicate=3", *TWO_RANKS], ["mesh.dp_replicate=3", "not the world of 2 ranks", "-1"]),
    "scaling without a base": (["scaling.rule=linear"], ["scaling.base_batch_size=null", "scaling.rule=linear needs"]),
    "rate": (["optimizer.lr=fast"], ["optimizer.lr=fast", "a finite number of at least 0"]),
    "key of a parameter group": (
        ["optimizer.groups=[{match:x,lrscale:3}]"],
        ["optimizer.groups[0]", "lrscale", "match, lr_scale, weight_decay"],
    ),
    "pattern": (["optimizer.groups=[{match:'('}]"], ["optimizer.groups[0].match=(", "not a regular expression"]),
    "seed": (["run.seed=18446744073709551616"], ["run.seed=18446744073709551616", "from 0 to 2^63 - 1"]),
    "seed below 0": (["run.seed=-1"], ["run.seed=-1", "from 0 to 2^63 - 1"]),
    "a save every no time": (["checkpoint.every=0.0 minutes"], ["checkpoint.every=0.0 minutes", "must be above 0"]),
    "a scale of no loss": (
        ["precision=bf16", "precision.initial_scale=4"],
        ["precision.initial_scale=4.0", "has no effect under precision=bf16", "precision=fp16"],
    ),
    "a scale that grows of no loss": (
        ["precision.scale_growth_interval=3"],
        ["precision.scale_growth_interval=3", "fp32"],
    ),
    "workers": (["data.workers=-1"], ["data.workers=-1", "at least 0"]),
    "norm": (["training.max_grad_norm=nan"], ["training.max_grad_norm=nan", "above 0"]),
    "rate of single precision": (["optimizer.lr=1e39"], ["optimizer.lr=1e+39", "the largest is 3.40282e+38"]),
    "rate after scaling": (
        ["optimizer.lr=1e38", "scaling.rule=linear", "scaling.base_batch_size=1"],
        ["optimizer.lr=1e+38", "scaling.rule=linear makes it 6.4e+39"],
    ),
    "rate of a group": (
        ["optimizer.lr=1e38", "optimizer.groups=[{match:x,lr_scale:10}]"],
        ["optimizer.groups[0].lr_scale=10.0", "infinite"],
    ),
    "decay": (["optimizer.weight_decay=abc"], ["optimizer.weight_decay=abc", "a finite number of at least 0"]),
    "no decay": (["optimizer.weight_decay=null"], ["optimizer.weight_decay=null", "~optimizer.weight_decay"]),
    "negative decay": (["optimizer.weight_decay=-1"], ["optimizer.weight_decay=-1", "at least 0"]),
    "not a number": (["optimizer=sgd", "optimizer.momentum=nan"], ["optimizer.momentum=nan", "nan is none"]),
    "not a number in a list": (["optimizer.betas=[nan,0.9]"], ["optimizer.betas=[nan, 0.9]", "nan is none"]),
    "no target": (["model=custom"], ["model._target_=???", "add model._target_="]),
    "no target of the data": (["data=custom"], ["data.train._target_=???", "add data.train._target_="]),
    "null data": (["data=custom", "data.train=null"], ["data.train._target_=null", "the dotted path of a class"]),
    "target without a module": (["model._target_=GPT"], ["model._target_=GPT", "mymodule.MyClass"]),
    "argument that must be given": (["data=text"], ["data.train.path=???", "add data.train.path="]),
    "deleted key": (["~training.duration"], ["~training.duration", "can be set, not deleted"]),
    "deleted section": (["~training"], ["training", "must stay a section", "duration, max_grad_norm"]),
    "argument that another follows": (
        ["model=resnet", "task=classification"],
        ["task.num_classes=???", "add task.num_classes="],
    ),
    "deleted group": (["~model"], ["model", "must be given", "model=custom"]),
    "deleted rate": (["~optimizer.lr"], ["optimizer.lr", "a finite number"]),
    "chdir": (["hydra.job.chdir=true"], ["hydra.job.chdir=true", "leave it out"]),
    "no equals sign": (["training.duration"], ["training.duration", "key=value"]),
    "two equals signs": (["training.duration==3"], ["training.duration==3", "key=value", "in quotes"]),
    "character of the grammar": (["+model.root=~/x"], ["+model.root=~/x", "in quotes", '"~/x"']),
    "list of texts": (
        ["submit.slurm.env=[A=1, 'B=2', C]"],
        ["key=value", "each text in it", """'submit.slurm.env=["A=1", "B=2", C]'"""],
    ),
    "quotes in a list": (['submit.slurm.setup=[echo "a, b"]'], ["""'submit.slurm.setup=["first", "second"]'"""]),
    "brackets in a list": (["submit.slurm.sbatch=[-w=n[1,2], -H]"], ["""'submit.slurm.sbatch=["first", "second"]'"""]),
    "list of sections": (["optimizer.groups=[{match: a=b}]"], ["""'optimizer.groups=["first", "second"]'"""]),
    "list that doesn't close": (["submit.slurm.env=[it's=1]"], ["""'submit.slurm.env=["first", "second"]'"""]),
    "section of texts": (["+model.names={a: b=c}"], ["""'+model.names={name: "text"}'"""]),
    "text that is no list": (["submit.slurm.env=A=1"], ["""'submit.slurm.env=["A=1"]'"""]),
    "list in quotes": (['submit.slurm.env="[A=1]"'], ["""allowed: a list, as in 'submit.slurm.env=["A=1"]'"""]),
    "word for a list": (["strategy.wrap=Block"], ["allowed: a list or null, as in 'strategy.wrap=[Block]'"]),
    "number for a list of a choice": (["schedule/decay=step", "schedule.decay.at=5"], ["allowed: a list, as in"]),
    "value that others are worked out from": (
        ["experiment=yolo_nominal", "nominal.batch_size=0"],
        ["train: nominal.batch_size=0: must be a whole number of at least 1\n"],
    ),
    "text that others are worked out from": (
        ["experiment=yolo_nominal", "nominal.of=abc"],
        ["train: nominal.of=abc: must be a whole number of at least 1\n"],
    ),
    "value in an expression": (
        ["batch.global_batch_size=${launcher.accumulate:64,0}"],
        ["train: batch.global_batch_size=${launcher.accumulate:64,0}: 0 must be a whole number of at least 1\n"],
    ),
    "choice as a key": (
        ["schedule.decay=cosine"],
        [
            "schedule.decay=cosine: ",
            "choice of the group schedule/decay",
            "schedule/decay=cosine",
            "allowed: constant, ",
        ],
    ),
    "choice as an added key": (
        ["+schedule.decay=cosin"],
        ["schedule.decay=cosin", "did you mean schedule/decay=cosine?"],
    ),
    "choice in a section": (["schedule={decay: cosine}"], ["schedule.decay=cosine: ", "schedule/decay=cosine"]),
    "name of a choice": (["schedule.decay.name=foo"], ["schedule.decay.name=foo: is said by", "schedule/decay=…"]),
    "name of another choice": (["schedule.decay.name=linear"], ["schedule.decay.name=linear: is said by"]),
    "null of a choice": (["schedule.decay=null"], ["schedule.decay=null: ", "schedule/decay=…"]),
    "section over groups": (["schedule=foo"], ["schedule=foo: ", "schedule/decay=…", "allowed: constant, cosine"]),
    "section over groups, by choice": (
        ["schedule=linear"],
        ["schedule=linear: ", "did you mean schedule/decay=linear?"],
    ),
    "added section over groups": (
        ["+schedule=step"],
        ["schedule=step: is no group", "did you mean schedule/decay=step?"],
    ),
    "null of a section over groups": (["schedule=null"], ["schedule=null: ", "schedule/decay=…"]),
    "deleted choice": (["~schedule/decay"], ["schedule.decay=???", "add schedule/decay=…"]),
    "added choice of a group that has one": (
        ["+experiment=yolo_nominal"],
        ["+experiment=yolo_nominal: ", "without the +: experiment=yolo_nominal"],
    ),
    "added choice of a group that has one by default": (["+model=gpt"], ["+model=gpt: ", "without the +: model=gpt"]),
    "misspelt time where durations go too": (
        ["checkpoint.every=10 minuts"],
        ["unknown unit 'minuts'", "did you mean 'minutes'?", "2000 updates", "or a time: `90 seconds`"],
    ),
    "misspelt duration where times go too": (["checkpoint.every=5 epohcs"], ["did you mean 'epochs'?", "or a time: "]),
    "negative time where durations go too": (["checkpoint.every=-5 minutes"], ["must be above 0", "90 seconds"]),
    "no time where durations go too": (["checkpoint.every=0 minutes"], ["must be above 0"]),
    "negative clock": (["checkpoint.every=-1:00:00"], ["must be above 0"]),
    "negative time": (["training.time_limit=-5 minutes"], ["must be above 0", "90 seconds"]),
    "further keys of an open section of the schema": (
        ["strategy=zero2", "strategy.deepspeed={gradient_clipping: 3}"],
        [
            "strategy.deepspeed.gradient_clipping=3: unknown key",
            "is added with +strategy.deepspeed.gradient_clipping=3",
        ],
    ),
    "further key of an open section of the schema": (
        ["strategy=zero2", "strategy.deepspeed.zero={a: {b: 1}}"],
        ["strategy.deepspeed.zero={a: {b: 1}}", "'+strategy.deepspeed.zero={a: {b: 1}}'"],
    ),
    "unknown section": (
        ["nominal.batch_size=24"],
        ["nominal.batch_size=24: unknown key", "the configuration has the keys run, data"],
    ),
    "unknown section of a sweep": (
        ["-m", "batch.global_batch_size=1,2", "optimizr.lr=1"],
        ["optimizr.lr=1: unknown key", "did you mean 'optimizer.lr'"],
    ),
    "comma without a sweep": (["run.seed=1,2"], ["run.seed=1,2", "--multirun"]),
    "reference that leads nowhere": (["run.seed=${nowhere}"], ["run.seed=${nowhere}", "'nowhere'"]),
    "environment that isn't set": (
        ["run.name=${oc.env:NOT_SET}"],
        ["run.name=${oc.env:NOT_SET}", "'NOT_SET' not found"],
    ),
    "config-dir": (["--config-dir", "nowhere"], ["--config-dir nowhere", "no such folder"]),
    "config-name": (["--config-name", "nothing"], ["--config-name nothing", "there is no nothing.yaml"]),
    "config-path": (["--config-path", "x"], ["--config-path", "--config-dir"]),
    "unknown flag": (["--verbose"], ["--verbose", "--hydra-help"]),
    "bad choice of a flag": (["--cfg", "jobs"], ["jobs", "'job', 'hydra', 'all'"]),
    "mistake beside --cfg": (["--cfg", "job", "run.sed=3"], ["did you mean 'run.seed'"]),
    "mistake beside --help": (["--help", "run.sed=3"], ["did you mean 'run.seed'"]),
    "mistake beside --info": (["--info", "defaults", "run.sed=3"], ["did you mean 'run.seed'"]),
}


@pytest.mark.parametrize(
    ("what", "name"),
    [
        *(pytest.param("train", name, marks=pytest.mark.thorough) for name in MISTAKES),
        ("plan", "unknown key"),
        ("plan", "contradiction"),
    ],
)
def test_a_mistake_is_refused_with_one_message(command, monkeypatch, what, name):
    monkeypatch.delenv("NOT_SET", raising=False)
    overrides, expected = MISTAKES[name]
    said = command(what, *overrides)
    assert said.code == 2
    assert said.err.startswith(f"launcher {what}: ")
    for text in expected:
        assert text in said.err
    assert "Traceback" not in said.err
    assert not said.out
    assert len(said.err.strip().splitlines()) <= 5
    assert os.listdir() == []


FILES = {
    "syntax": (b"_target_: x.Y\nb: [1, 2\nc: 3\n", "model/bad.yaml, line 3: not YAML"),
    "duplicate": (b"a: 1\na: 2\n", "model/bad.yaml, line 2: not YAML: while constructing a mapping: found duplicate"),
    "tab": (b"a:\n\tb: 1\n", "model/bad.yaml, line 2: not YAML"),
    "byte": (b"a: 1\nb: '\xff'\n", "model/bad.yaml, line 2: not UTF-8: the byte 0xff"),
    "far byte": (b"#" * 9999 + b"\n\n\xff\n", "model/bad.yaml, line 3: not UTF-8: the byte 0xff"),
    "character": (b"a: 1\n\nb: \x01\n", "model/bad.yaml, line 3: not YAML: special characters"),
    "defaults": (b"defaults: 3\n", "defaults must be a list"),
    "header": (b"# @package foo bar\na: 1\n", "Too many components"),
}


@pytest.mark.parametrize("what", FILES)
def test_a_broken_file_of_the_configuration_is_named(command, what):
    content, expected = FILES[what]
    Path("mine/model").mkdir(parents=True)
    Path("mine/model/bad.yaml").write_bytes(content)
    said = command("train", "--config-dir", "mine", "model=bad")
    assert said.code == 2
    assert said.err.startswith("launcher train: ")
    assert expected in said.err
    assert "Traceback" not in said.err
    assert len(said.err.splitlines()) == 1


@pytest.mark.parametrize("typed", ["'8'", '"8"', "8.0", "8e0"])
def test_a_number_counts_however_it_was_typed(command, typed):
    said = command("plan", f"batch.gradient_accumulation_steps={typed}", "batch.micro_batch_size=4", *TWO_RANKS)
    assert said.code == 0
    assert re.search(r"micro-batches of 4 x 8 steps", said.out)


@pytest.mark.parametrize("typed", ["8.5", "eight", "true", "inf", "nan", "[8]", "{a: 8}", "null"])
def test_what_is_no_number_is_refused_by_its_key(command, typed):
    said = command("plan", f"batch.gradient_accumulation_steps={typed}")
    assert said.code == 2
    assert "batch.gradient_accumulation_steps=" in said.err
    assert "must be a whole number of at least 1 or auto" in said.err


def test_a_key_of_ones_own_is_allowed_and_said_to_be_unread(command):
    assert "note mine: nothing reads this key" in command("plan", "+mine=3").out
    assert "nothing reads" not in command("plan", "+mine=3", "model.num_layers=${mine}").out


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["status"], "DIR"),
        (["status", "a", "b"], "unrecognized arguments: b"),
        (["status", "nowhere"], "nowhere: no such folder"),
        (["status", "."], "no run here"),
        (["export"], "RUN_DIR"),
        (["export", "nowhere"], "nowhere: no run here"),
        (["export", ".", "--outptu", "x"], "--outptu"),
        (["trian"], "did you mean 'train'"),
    ],
)
def test_wrong_arguments_of_a_command_are_refused(command, argv, text):
    said = command(*argv)
    assert said.code == 2
    assert text in said.err
    assert "Traceback" not in said.err


MODULES = {
    "exits.py": "import sys\nsys.exit(3)\n",
    "raises.py": "1 / 0\n",
    "mine.py": """
import os, signal, sys, torch
from launcher.tasks import CausalLM
class Exits(torch.nn.Module):
    def __init__(self): sys.exit("bye")
class Closure(torch.optim.SGD):
    def step(self, closure): return closure()
class Exiting:
    def __len__(self): sys.exit()
    def __getitem__(self, index): return index
class Killed:
    def __init__(self): os.kill(os.getpid(), signal.SIGKILL)
class Lengths:
    lengths = [1, -1]
    def __len__(self): return 2
    def __getitem__(self, index): return index
class Task(CausalLM):
    def __init__(self, value): self.value = value
    def length(self, sample): return self.value
""",
}


def own(optimizer: str) -> list[str]:
    return ["optimizer=custom", f"optimizer._target_={optimizer}", "optimizer.lr=1"]


REFUSED = [
    (["+model.num_layrs=3"], ["model.num_layrs=3", "GPT takes no such argument", "did you mean 'num_layers'"]),
    (["model._target_=nowhere.Thing"], ["model._target_=nowhere.Thing", "can't be imported", "importable"]),
    (["model._target_=launcher.models.GTP"], ["launcher.models.GTP", "did you mean 'GPT'"]),
    (["~model.num_layers"], ["model.num_layers", "GPT needs this argument"]),
    (["data=text", "data.train.path=not/there"], ["data.train: ", "not/there"]),
    (["+optimizer.momentm=1"], ["optimizer.momentm=1", "AdamW takes no such argument"]),
    (["optimizer=sgd", "optimizer.momentum=-1"], ["optimizer.momentum=-1", "SGD raised ValueError"]),
    (["optimizer=sgd", "optimizer.momentum=abc"], ["optimizer.momentum=abc", "SGD raised TypeError"]),
    (["optimizer.betas=3"], ["optimizer.betas=3", "AdamW raised TypeError"]),
    (["optimizer.betas=[0.9]"], ["optimizer.betas=[0.9]", "raised IndexError", "its default is [0.9, 0.999]"]),
    (["optimizer._target_=torch.optim.LBFGS"], ["optimizer._target_=torch.optim.LBFGS", "needs a closure"]),
    (
        ["optimizer._target_=torch.optim.SparseAdam"],
        ["optimizer.weight_decay=0.1: SparseAdam takes no such argument", "from no arguments: optimizer=custom"],
    ),
    (
        ["optimizer._target_=torch.optim.SparseAdam", "~optimizer.weight_decay"],
        ["optimizer.groups[0].weight_decay=0.0: ", "SparseAdam takes no weight_decay", "optimizer=custom"],
    ),
    (["optimizer=sgd", "optimizer.nesterov=true"], ["optimizer.momentum=0.0, optimizer.nesterov=true"]),
    ([*own("torch.optim.LBFGS")], ["optimizer._target_=torch.optim.LBFGS", "needs a closure"]),
    ([*own("mine.Closure")], ["optimizer._target_=mine.Closure", "needs a closure"]),
    (["model._target_=exits.Net"], ["model._target_=exits.Net", "called sys.exit(3)", "exits.py:2"]),
    (["model._target_=raises.Net"], ["model._target_=raises.Net", "ZeroDivisionError", "raises.py:1"]),
    (["model=custom", "model._target_=mine.Exits"], ["model: mine.Exits called sys.exit('bye')", "mine.py"]),
    (["data=custom", "data.train._target_=mine.Exiting"], ["called sys.exit(None)", "mine.py"]),
    (["data=custom", "data.train._target_=mine.Lengths"], ["data.train._target_", "whole numbers", "-1"]),
    *[
        (
            ["task=custom", "task._target_=mine.Task", f"+task.value={value}", "training.duration=9 tokens"],
            ["task.length must give a whole number of at least 0", said],
        )
        for value, said in (("-1", "not -1"), ("1.5", "not 1.5"), ("word", "not 'word'"), ("null", "not None"))
    ],
]
"""What the user gives, and what is said of it by the process that asks the model and the data."""


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """One process is asked for all of them, as for the runs of a sweep."""
    folder = tmp_path_factory.mktemp("mine")
    for name, text in MODULES.items():
        (folder / name).write_text(text, encoding="utf-8")
    return ask_all([config_text(*overrides) for overrides, _ in REFUSED], [str(folder)])


@pytest.mark.slow
class TestWhatOnlyTheModelOrTheDataKnows:
    @pytest.mark.parametrize("number", range(len(REFUSED)))
    def test_is_refused(self, answers, number):
        assert isinstance(answers[number], LauncherError)
        for text in REFUSED[number][1]:
            assert text in str(answers[number])

    @pytest.fixture
    def no_facts(self):
        """They are asked."""

    @pytest.mark.parametrize(
        ("overrides", "expected"),
        [
            (["model._target_=launcher.models.GTP"], ["launcher.models.GTP", "did you mean 'GPT'"]),
            (["model=custom", "model._target_=mine.Exits"], ["model: mine.Exits called sys.exit('bye')", "mine.py"]),
            (["data=custom", "data.train._target_=mine.Killed"], ["was ended by SIGKILL"]),
        ],
    )
    def test_is_refused_before_any_rank_starts(self, command, overrides, expected):
        for name, text in MODULES.items():
            Path(name).write_text(text, encoding="utf-8")
        said = command("train", *overrides)
        assert said.code == 2
        for text in expected:
            assert text in said.err
        assert "Traceback" not in said.err
        assert not [name for name in os.listdir() if name not in MODULES and name != "__pycache__"]
