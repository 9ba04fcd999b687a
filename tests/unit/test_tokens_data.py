"""Token files: every token predicted once, documents kept apart, what is held out, and what is refused."""

import pickle
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf

from launcher.data import Tokens, tokens
from launcher.errors import DataError
from launcher.tasks import CausalLM


def write(file, ids, dtype="<u2"):
    np.array(ids, dtype=dtype).tofile(file)
    return str(file)


def contents(data):
    return [data[index].tolist() for index in range(len(data))]


def predicted(data, bos=None):
    """All labels of all samples, one after another."""
    task = CausalLM(vocab_size=100_000, bos=bos)
    batches = [task.collate([data[index]]) for index in range(len(data))]
    return [label for batch in batches for label in batch["labels"][0].tolist()]


@pytest.mark.parametrize("count", [2, 3, 4, 5, 6, 7, 8, 9])
def test_every_token_is_predicted_once(tmp_path, count):
    file = write(tmp_path / "a.bin", range(10, 10 + count))
    data = Tokens(file, length=3)
    assert predicted(data) == list(range(11, 10 + count))
    assert data.lengths.tolist() == [len(sample) for sample in contents(data)]
    assert max(data.lengths) <= 4
    assert min(data.lengths) >= 2
    apart = Tokens(file, length=3, overlap=False)
    assert predicted(apart, bos=0) == list(range(10, 10 + count))
    assert apart.lengths.tolist() == [len(sample) for sample in contents(apart)]


def test_samples_of_a_file_by_hand(tmp_path):
    data = Tokens(write(tmp_path / "a.bin", range(8)), length=3)
    assert contents(data) == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7]]
    assert data[0].dtype == np.uint16
    assert data[-1].tolist() == [6, 7]
    for index in (3, -4):
        with pytest.raises(IndexError):
            data[index]


def test_several_files_and_types(tmp_path):
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    write(folder / "b.bin", [1, 2, 3, 70_000], "<u4")
    write(folder / "sub" / "c.bin", [9], "<u4")  # nothing to predict from one token
    np.save(folder / "d.npy", np.array([5, 6], dtype=np.int64))
    write(folder / ".hidden.bin", [1, 2], "<u4")
    (folder / "notes.txt").write_text("no tokens")
    expected = [[1, 2, 3], [3, 70_000], [5, 6]]
    assert contents(Tokens(str(folder), length=2, dtype="uint32")) == expected
    listed = [str(folder / name) for name in ("d.npy", "b.bin")]
    assert contents(Tokens(listed, length=2, dtype="uint32")) == [expected[2], *expected[:2]]


def test_samples_stay_inside_documents(tmp_path, monkeypatch):
    monkeypatch.setattr(tokens, "SCANNED_AT_ONCE", 3)
    ids = [1, 2, 3, 4, 5, 0, 6, 0, 0, 7, 8, 9]
    file = write(tmp_path / "a.bin", ids)
    data = Tokens(file, length=4, boundaries=True, document_separator=0)
    assert contents(data) == [[1, 2, 3, 4, 5], [5, 0], [6, 0], [7, 8, 9]]
    assert data.lengths.tolist() == [5, 2, 2, 3]
    apart = Tokens(file, length=4, boundaries=True, document_separator=0, overlap=False)
    assert contents(apart) == [[1, 2, 3, 4], [5, 0], [6, 0], [0], [7, 8, 9]]
    whole = Tokens(file, length=50, boundaries=True, document_separator=99)
    assert contents(whole) == [ids]


def test_the_end_of_each_file_is_held_out(tmp_path):
    files = [write(tmp_path / f"{name}.bin", range(start, start + 41)) for name, start in (("a", 0), ("b", 100))]
    parts = {split: contents(Tokens(files, length=2, split=split)) for split in ("train", "validation", None)}
    assert len(parts["validation"]) == 4
    assert [sample[0] for sample in parts["validation"]] == [36, 38, 136, 138]
    assert sorted(parts["train"] + parts["validation"]) == sorted(parts[None])
    for split in ("train", "validation"):
        data = Tokens(files, length=2, split=split)
        assert data.lengths.tolist() == [len(sample) for sample in contents(data)]


def test_documents_are_held_out_whole(tmp_path):
    ids = [token for document in range(1, 21) for token in [document] * 4 + [0]]
    file = write(tmp_path / "a.bin", ids)
    arguments = {"length": 2, "boundaries": True, "document_separator": 0}
    train, validation = (contents(Tokens(file, split=split, **arguments)) for split in ("train", "validation"))
    assert sorted({sample[0] for sample in train}) == list(range(1, 19))
    assert sorted({sample[0] for sample in validation}) == [19, 20]


def test_at_least_one_unit_is_held_out_and_never_the_only_one():
    assert tokens._held_out([3, 3, 3], 0.1) == [0, 0, 1]
    assert tokens._held_out([1] * 20, 0.1) == [0] * 9 + [1] + [0] * 9 + [1]
    assert tokens._held_out([1], 0.9) == [0]
    assert tokens._held_out([0, 2], 0.99) == [0, 1]
    assert tokens._held_out([7, 5], 0.0) == [0, 0]
    assert tokens._held_out([0], 0.5) == [0]


def test_files_are_mapped_and_not_read(tmp_path):
    file = tmp_path / "large.bin"
    with file.open("wb") as opened:
        opened.truncate(1 << 40)  # a terabyte that is nowhere
    data = Tokens(str(file), length=1 << 20, split="train")
    assert data[len(data) - 1].sum() == 0
    copy = pickle.dumps(data)
    assert len(copy) < 10_000
    assert len(pickle.loads(copy)[5]) == (1 << 20) + 1


def test_what_cannot_be_token_files_is_named(tmp_path):
    def refuse(message, path, **arguments):
        with pytest.raises(DataError, match=message):
            Tokens(path, **{"length": 4, **arguments})

    file = write(tmp_path / "a.bin", [1, 2, 3])
    refuse("nowhere isn't there", str(tmp_path / "nowhere"))
    refuse("a.bin has 6 bytes, no multiple of the 4 of dtype=uint32", file, dtype="uint32")
    refuse("empty.bin is empty", write(tmp_path / "empty.bin", []))
    np.save(tmp_path / "floats.npy", np.zeros(3))
    refuse("floats.npy must hold one dimension of integers, not 1 of float64", str(tmp_path / "floats.npy"))
    (tmp_path / "broken.npy").write_bytes(b"nothing")
    refuse("broken.npy can't be read as token ids", str(tmp_path / "broken.npy"))
    (tmp_path / "folder").mkdir()
    refuse("folder has no file that ends with .bin or .npy", str(tmp_path / "folder"))
    refuse("names no file", [])
    refuse("one.bin holds nothing to predict .1 tokens", write(tmp_path / "one.bin", [1]))
    refuse("the validation part of .* holds nothing", file, split="validation")
    for arguments in ({"length": 0}, {"dtype": "int8"}, {"boundaries": True}, {"document_separator": 0}):
        refuse(next(iter(arguments)) + "=", file, **arguments)
    refuse("did you mean 'train'", file, split="trian")


def test_an_id_outside_the_vocabulary_names_file_and_position(tmp_path):
    data = Tokens(write(tmp_path / "a.bin", [1, 2, 3, 4, 50, 5]), length=2, vocab_size=10)
    assert data[0].tolist() == [1, 2, 3]
    with pytest.raises(DataError, match=r"a.bin: token 50 at position 4 .*0 to 9 .is it a file of uint16"):
        data[1]
    np.save(tmp_path / "b.npy", np.array([3, -1]))
    with pytest.raises(DataError, match=r"b.npy: token -1 at position 1 .* 0 to 9$"):
        Tokens(str(tmp_path / "b.npy"), length=2, vocab_size=10)[0]


def test_both_parts_of_the_configuration_follow_one_set_of_numbers():
    data = OmegaConf.load(Path(__file__).parents[2] / "conf/data/tokens.yaml")
    conf = OmegaConf.create({"data": data, "task": {"vocab_size": 7}})
    conf.data.train.update({"path": "folder", "length": 9, "boundaries": True, "document_separator": 3})
    train, validation = (OmegaConf.to_container(conf.data[part], resolve=True) for part in ("train", "validation"))
    assert (train.pop("split"), validation.pop("split")) == ("train", "validation")
    assert train == validation
