"""Tasks: rows of different lengths count exactly what they hold."""

import math

import numpy as np
import pytest
import torch

from launcher.errors import ConfigError, DataError
from launcher.tasks import CausalLM, Classification, HasLength, HasMetrics, HasTargetCounts, Task


def test_contract():
    for task in (CausalLM(), Classification(num_classes=3)):
        assert isinstance(task, Task)
        assert isinstance(task, HasTargetCounts)
    assert isinstance(CausalLM(), HasLength)
    assert not isinstance(CausalLM(), HasMetrics)
    assert isinstance(Classification(num_classes=3), HasMetrics)


def test_bos_comes_before_the_first_byte():
    task = CausalLM()
    batch = task.collate([b"abc", b"d"])
    assert batch["input_ids"].tolist() == [[256, 97, 98], [256, 0, 0]]
    assert batch["labels"].tolist() == [[97, 98, 99], [100, -100, -100]]
    assert task.weight(batch).tolist() == [3, 1]
    assert [task.length(sample) for sample in (b"abc", b"d")] == [3, 1]
    assert task.inputs(batch).keys() == {"input_ids"}


def test_without_bos_the_first_token_is_only_read():
    task = CausalLM(vocab_size=10, bos=None)
    batch = task.collate([[1, 2, 3], [4, 5]])
    assert batch["input_ids"].tolist() == [[1, 2], [4, 0]]
    assert batch["labels"].tolist() == [[2, 3], [5, -100]]
    assert task.length([1, 2, 3]) == 2
    with pytest.raises(DataError, match="sample 1 of the batch has length 1"):
        task.collate([[1, 2], [3]])


@pytest.mark.parametrize("bos", [None, 9])
def test_masked_labels_are_shifted_with_their_inputs(bos):
    task = CausalLM(vocab_size=10, bos=bos)
    batch = task.collate([{"input_ids": [1, 2, 3], "labels": [-100, -100, 3]}])
    labels = [-100, 3] if bos is None else [-100, -100, 3]
    assert batch["labels"].tolist() == [labels]
    assert batch["input_ids"].tolist() == [[1, 2] if bos is None else [9, 1, 2]]
    assert task.weight(batch).tolist() == [1]
    assert task.length({"input_ids": [1, 2, 3]}) == len(labels)


def test_every_label_masked_weighs_nothing():
    task = CausalLM(vocab_size=10, bos=None)
    batch = task.collate([{"input_ids": [1, 2], "labels": [-100, -100]}])
    assert task.weight(batch).tolist() == [0]
    assert task.loss(torch.randn(1, 1, 10), batch).tolist() == [0.0]


@pytest.mark.parametrize(
    "sample",
    [
        b"ab",
        bytearray(b"ab"),
        [97, 98],
        (97, 98),
        torch.tensor([97, 98]),
        *(np.array([97, 98], dtype=dtype) for dtype in ("uint8", "uint16", "uint32", "int32", "int64")),
    ],
)
def test_forms_of_a_sample(sample):
    batch = CausalLM().collate([sample])
    assert batch["input_ids"].tolist() == [[256, 97]]
    assert batch["labels"].tolist() == [[97, 98]]
    assert batch["labels"].dtype == torch.int64


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([b"a", b""], "sample 1 of the batch has length 0"),
        ([{"labels": [1]}], "has no input_ids"),
        ([{"input_ids": [1, 2], "labels": [1]}], "2 input_ids and 1 labels"),
        ([[1], [2, 10]], "token id 10 at position 1 .*0 to 9"),
        ([[1], [-100]], "token id -100 at position 0"),
        ([{"input_ids": [1, 2, 3], "labels": [1, 2, 77]}], "label 77 at position 2 .*0 to 9, and -100"),
        ([{"input_ids": [1, 2], "labels": [-1, 2]}], "label -1 at position 0"),
        ([[0.5, 1.0]], "integers, not 1-D of float64"),
        ([[[1, 2]]], "not 2-D"),
        ([[[1], [2, 3]]], "no sequence of token ids"),
        (["text"], "integers"),
    ],
)
def test_bad_samples_are_named(samples, message):
    with pytest.raises(DataError, match=message):
        CausalLM(vocab_size=10, bos=0).collate(samples)


@pytest.mark.parametrize("arguments", [{"bos": 257}, {"pad": -1}, {"ignore_index": 5}, {"vocab_size": 0}])
def test_arguments_that_cannot_work(arguments):
    with pytest.raises(ConfigError, match=f"task.{next(iter(arguments))}="):
        CausalLM(**arguments)


def test_loss_is_the_sum_of_a_row_by_hand():
    task = CausalLM(vocab_size=2, bos=0)
    batch = task.collate([[1, 1, 0], [1]])
    losses = task.loss(torch.zeros(2, 3, 2), batch)
    assert losses.tolist() == pytest.approx([3 * math.log(2), math.log(2)])


def test_a_padded_row_has_the_loss_it_has_alone():
    task = CausalLM()
    samples = [b"a long line of text", b"short", b"x"]
    logits = torch.randn(3, 19, 257, dtype=torch.float64)
    together = task.loss(logits, task.collate(samples))
    alone = [task.loss(logits[i : i + 1, : len(s)], task.collate([s])) for i, s in enumerate(samples)]
    assert together.dtype == torch.float64
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-12, atol=0)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 1e38])
def test_what_stands_in_the_padding_reaches_neither_loss_nor_gradient(value):
    task = CausalLM()
    batch = task.collate([b"abc", b"d"])
    clean = torch.randn(2, 3, 257, requires_grad=True)
    dirty = clean.detach().clone()
    dirty[1, 1:] = value
    dirty.requires_grad_()
    losses, expected = task.loss(dirty, batch), task.loss(clean, batch)
    torch.testing.assert_close(losses, expected, rtol=0, atol=0)
    losses.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(dirty.grad, clean.grad, rtol=0, atol=0)


def test_half_precision_logits_have_a_float32_loss():
    batch = CausalLM().collate([b"ab"])
    assert CausalLM().loss(torch.randn(1, 2, 257).bfloat16(), batch).dtype == torch.float32


def test_target_counts_add_up_over_batches():
    task = CausalLM(vocab_size=4, bos=0)
    whole = task.target_counts(task.collate([[1, 2, 2], [3]]))
    assert whole.tolist() == [0, 1, 2, 1]
    assert (task.target_counts(task.collate([[1, 2, 2]])) + task.target_counts(task.collate([[3]]))).equal(whole)


def test_classification():
    task = Classification(num_classes=3)
    batch = task.collate(
        [(np.array([1.0, 2.0]), 2), {"x": [3.0, 4.0], "y": np.int64(0)}, (torch.ones(2), torch.tensor(1))]
    )
    assert batch["x"].dtype == torch.float32
    assert batch["x"].tolist() == [[1, 2], [3, 4], [1, 1]]
    assert batch["y"].tolist() == [2, 0, 1]
    assert task.inputs(batch).keys() == {"x"}
    assert task.weight(batch).tolist() == [1, 1, 1]
    assert task.target_counts(batch).tolist() == [1, 1, 1]
    logits = torch.tensor([[0.0, 0.0, 0.0], [0.0, 5.0, 0.0], [0.0, 5.0, 0.0]], dtype=torch.float64)
    losses = task.loss(logits, batch)
    assert losses.dtype == torch.float64
    rest = math.log(math.exp(5) + 2)
    assert losses.tolist() == pytest.approx([math.log(3), rest, rest - 5])
    assert task.metrics(logits, batch)["accuracy"].tolist() == [0.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([([0.0], 0), ([0.0], 3)], "label 3 of sample 1 of the batch is out of range: 0 to 2"),
        ([([0.0], -1)], "label -1 of sample 0"),
        ([([0.0], 0.5)], "must be one integer, not 0.5"),
        ([([0.0], 0), ([0.0, 1.0], 0)], "different shapes"),
        ([{"x": [0.0]}], r"pair \(x, y\)"),
        ([3], "not int"),
    ],
)
def test_bad_classification_samples_are_named(samples, message):
    with pytest.raises(DataError, match=message):
        Classification(num_classes=3).collate(samples)
