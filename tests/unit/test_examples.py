"""The examples, from the folder they are in."""

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from launcher.errors import DataError

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def scalar(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("scalar")


@pytest.fixture
def equivalence(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("equivalence")


def one_update(model, task, micro_batches, max_norm=None):
    """SGD with a rate of 1 by the rule of a window: sums of losses over all micro-batches, divided once."""
    batches = [task.collate(samples) for samples in micro_batches]
    weight = sum(int(task.weight(batch).sum()) for batch in batches)
    for batch in batches:
        (task.loss(model(**task.inputs(batch)), batch).sum() / weight).backward()
    if max_norm is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    return model.w.tolist()


@pytest.mark.parametrize("micro_batches", [[[6, [0, 0, 0]]], [[6], [[0, 0, 0]]], [[[0, 0, 0], [6]]]])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_mean_of_all_targets_whatever_the_split(scalar, micro_batches, dtype):
    model = scalar.Scalar(dtype=dtype)
    assert one_update(model, scalar.SquaredError(), micro_batches) == [1.5]


def test_vector_is_clipped_once_by_the_norm_of_the_window(scalar):
    data = scalar.Targets([[[10, 0]], [[-4, 8]]])
    w = one_update(scalar.Scalar(size=2), scalar.SquaredError(), [[data[0]], [data[1]]], max_norm=1.0)
    assert w == pytest.approx([0.6, 0.8], abs=1e-6)


def test_rows_are_filled_up_without_counting(scalar):
    task = scalar.SquaredError()
    batch = task.collate([6, [1, 2, 3]])
    assert batch["targets"].shape == (2, 3, 1)
    assert task.weight(batch).tolist() == [1, 3]
    assert task.loss(torch.zeros(2, 3, 1), batch).tolist() == [18.0, 7.0]
    assert [task.length(sample) for sample in (6, [1, 2, 3], [[1, 2]])] == [1, 3, 1]


def test_empty_sample_is_named(scalar):
    with pytest.raises(DataError, match="sample 1 of the batch has length 0"):
        scalar.SquaredError().collate([1, []])


def test_counter_gains_its_share_of_the_window_at_each_visit(scalar):
    data = scalar.Indices(6)
    model = scalar.Counter(len(data))
    task = scalar.Visits()
    assert one_update(model, task, [[data[0], data[1]], [data[2], data[3]]]) == [0.25, 0.25, 0.25, 0.25, 0, 0]
    model.zero_grad()
    assert one_update(model, task, [[data[4], data[5]]]) == [0.25, 0.25, 0.25, 0.25, 0.5, 0.5]
    assert list(data) == [0, 1, 2, 3, 4, 5]


def test_four_micro_batches_give_the_gradient_of_one_batch(equivalence):
    assert equivalence.main() <= 1e-6


def test_the_plan_of_128(equivalence):
    plan = equivalence.plan()
    assert (plan.micro_batch_size, plan.gradient_accumulation_steps, plan.data_parallel_degree) == (4, 8, 4)
    assert plan.global_batch_size == 128


def test_equivalence_runs_as_a_script():
    environment = {"PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1", "PATH": ""}
    run = subprocess.run(
        [sys.executable, str(EXAMPLES / "equivalence.py")], env=environment, capture_output=True, text=True, check=True
    )
    assert "4 samples x 8 steps x 4 devices = 128 samples an update" in run.stdout
