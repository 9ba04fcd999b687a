"""Data sets of text: what is in them, what is held out, and what they refuse."""

import ast
import json
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf

from launcher.data import PythonStdlib, Text, python_stdlib
from launcher.data.text import select
from launcher.errors import DataError


def contents(samples):
    return [bytes(samples[index]) for index in range(len(samples))]


@pytest.fixture(scope="module")
def validation():
    return PythonStdlib(split="validation")


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A folder that stands for the standard library."""
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    return tmp_path


def test_the_standard_library_is_real_and_of_many_lengths(validation):
    assert len(validation) > 300
    assert validation.lengths.min() < 60
    assert validation.lengths.max() == 512
    assert len(np.unique(validation.lengths)) > 100
    assert [len(validation[index]) for index in range(len(validation))] == validation.lengths.tolist()
    assert validation[0].dtype == np.uint8
    assert all(text.startswith((b"def ", b"class ", b"async def ", b"@")) for text in contents(validation))


def test_the_standard_library_is_the_same_each_time(validation):
    assert contents(PythonStdlib(split="validation")) == contents(validation)


def test_no_file_is_in_both_parts():
    names = python_stdlib._source_files(Path(sysconfig.get_path("stdlib")))
    train, held_out = (set(select(names, split, 0.1)) for split in ("train", "validation"))
    assert not train & held_out
    assert train | held_out == set(range(len(names)))
    assert len(held_out) == round(len(names) * 0.1)
    assert not any(part in ("test", "tests", "site-packages") for name in names for part in name.split("/"))


def test_one_sample_a_function_method_or_class(library):
    source = (
        "import os\r\n"
        "é = 'no definition'\n"
        "@decorated(\n  1)\ndef first():\n    def inner():\n        pass\n    return 'é'\n"
        "class A:\n    x = 1\n    async def method(self): return 'ü'; y = 2\n"
        "    class B: pass\n"
        "if os:\n    def second(): return '''\nflush left'''\n"
        "try: pass\nexcept ValueError:\n    def third(): pass\n"
    )
    (library / "m.py").write_bytes(b"\xef\xbb\xbf" + source.encode())
    samples = [text.decode() for text in contents(PythonStdlib(split=None))]
    assert samples == [
        "@decorated(\n  1)\ndef first():\n    def inner():\n        pass\n    return 'é'",
        "class A:\n    x = 1\n    async def method(self): return 'ü'; y = 2\n    class B: pass",
        "async def method(self): return 'ü'; y = 2",
        "class B: pass",
        "def second(): return '''\nflush left'''",
        "def third(): pass",
    ]
    assert [node.name for node in ast.parse(samples[0]).body] == ["first"]
    assert max(PythonStdlib(split=None, max_bytes=20).lengths) == 20


def test_what_cannot_be_parsed_or_is_no_library_is_left_out(library):
    for name in ("a.py", "test/b.py", "pkg/tests/c.py", "site-packages/d.py", "pkg/e.py"):
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).write_text(f"def {Path(name).stem}(): pass")
    (library / "broken.py").write_text("def broken(:")
    (library / "latin.py").write_bytes(b"# coding: latin-1\ndef latin(): '\xe9'")
    (library / "warns.py").write_text("def warns(): return '\\d'")
    texts = contents(PythonStdlib(split=None))
    assert [text.split(b"(")[0] for text in texts] == [b"def a", b"def e", b"def warns"]


def test_a_python_without_sources(library):
    with pytest.raises(DataError, match=r"no Python source in .*came without"):
        PythonStdlib()


def test_a_file_is_cut_into_consecutive_pieces(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("é" * 5)
    data = Text(str(file), max_bytes=4)
    assert b"".join(contents(data)) == "ééééé".encode()
    assert data.lengths.tolist() == [4, 4, 2]
    with pytest.raises(IndexError):
        data[3]


def test_a_folder_in_the_order_of_its_paths(tmp_path):
    for name, text in {"b.txt": "bb", "a/z.md": "zz", "a/c.txt": "cc", "empty.txt": "", ".hidden/x.txt": "x"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert contents(Text(str(tmp_path))) == [b"cc", b"zz", b"bb"]
    assert contents(Text(str(tmp_path), pattern="*.txt")) == [b"cc", b"bb"]


def test_jsonl_has_one_sample_a_line(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"body": "one\\ntwo"}\n\n{"body": "a longer é", "other": 1}\n')
    assert contents(Text(str(file), field="body", max_bytes=8)) == [b"one\ntwo", b"a longer"]


@pytest.mark.parametrize("kind", ["folder", "file", "jsonl"])
def test_held_out_samples_are_apart_and_mostly_stay_when_others_come(tmp_path, kind):
    def parts(count):
        texts = [f"sample {index:03d}" for index in range(count)]
        if kind == "folder":
            path = tmp_path
            for text in texts:
                (path / f"{text}.txt").write_text(text)
        elif kind == "file":
            path = tmp_path / "a.txt"
            path.write_text("".join(texts))
        else:
            path = tmp_path / "a.jsonl"
            path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
        both = [contents(Text(str(path), split=split, max_bytes=10)) for split in ("train", "validation")]
        assert sorted(both[0] + both[1]) == [text.encode() for text in texts]
        return both

    train, validation = parts(40)
    assert (len(train), len(validation)) == (36, 4)
    assert validation != [f"sample {index:03d}".encode() for index in range(4)]
    assert validation != [f"sample {index:03d}".encode() for index in range(36, 40)]
    later = parts(44)[1]
    assert len(set(validation) & set(later)) >= 2


def test_at_least_one_is_held_out_and_never_the_only_one():
    assert [len(select(["a", "b", "c"], split, 0.1)) for split in ("train", "validation", None)] == [2, 1, 3]
    assert [len(select(["a"], split, 0.9)) for split in ("train", "validation", None)] == [1, 0, 1]
    assert len(select(["a", "b"], "train", 0.99)) == 1


def test_bad_text_is_named(tmp_path):
    def refuse(message, name="", **arguments):
        with pytest.raises(DataError, match=message):
            Text(str(tmp_path / name), **arguments)

    refuse("nowhere isn't there", "nowhere")
    refuse("matches pattern='\\*'")
    (tmp_path / "empty.txt").touch()
    refuse("empty.txt holds no text", "empty.txt")
    refuse("holds no text")
    refuse("no file in .* matches pattern='\\*.md'", pattern="*.md")
    refuse("must be a relative pattern", pattern="/etc/*")
    (tmp_path / "one.txt").write_text("only one piece")
    refuse("the validation part of .*one.txt holds no text", "one.txt", split="validation")
    (tmp_path / "picture.png").write_bytes(b"text\x89PNG")
    refuse("picture.png isn't UTF-8 text: byte 4", "picture.png")
    refuse("picture.png isn't UTF-8 text")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[1]", "line 2 must be an object with the key 'text', not list"),
        ('{"body": "x"}', "line 2 has no text under the key 'text'; its keys: body"),
        ('{"text": 3}', "line 2 has no text"),
        ('{"text": ""}', "line 2 has a text of length 0"),
        ("{", "line 2 isn't JSON"),
        ('{"text": "\\ud800"}', "line 2 holds a character"),
    ],
)
def test_bad_lines_are_named(tmp_path, line, message):
    file = tmp_path / "a.jsonl"
    file.write_text(f'{{"text": "fine"}}\n{line}\n')
    with pytest.raises(DataError, match=f"a.jsonl, {message}"):
        Text(str(file))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"split": "valdation"}, "did you mean 'validation'"),
        ({"holdout": 1.0}, "holdout=1.0"),
        ({"split": "validation", "holdout": 0.0}, "leaves nothing"),
        ({"max_bytes": 0}, "max_bytes=0"),
        ({"max_bytes": 1.5}, "max_bytes=1.5"),
    ],
)
@pytest.mark.parametrize("data", [PythonStdlib, lambda **arguments: Text("anywhere", **arguments)])
def test_arguments_that_cannot_work(data, arguments, message):
    with pytest.raises(DataError, match=message):
        data(**arguments)


@pytest.mark.parametrize("name", ["python_stdlib", "text"])
def test_both_parts_of_a_configuration_follow_one_set_of_numbers(name):
    conf = OmegaConf.create({"data": OmegaConf.load(Path(__file__).parents[2] / f"conf/data/{name}.yaml")})
    conf.data.train.max_bytes = 7
    if name == "text":
        conf.data.train.path = "folder"
    train, validation = (OmegaConf.to_container(conf.data[part], resolve=True) for part in ("train", "validation"))
    assert (train.pop("split"), validation.pop("split")) == ("train", "validation")
    assert train == validation
