"""Strategies from the command: a run under fsdp, a rank that fails where the others wait for it, and verify."""

from pathlib import Path
from typing import Any

import pytest
import torch
from faults import Layered
from runs import Done, environment, launch, mean
from safetensors.torch import load_file

pytestmark = pytest.mark.slow

TWO_RANKS = ("cluster.device=cpu", "cluster.ranks_per_node=2")


def layered(folder: Path, command: str, *more: str) -> Done:
    overrides = [
        *mean([float(i) for i in range(1, 8)], *TWO_RANKS),
        "model._target_=faults.Layered",
        "task._target_=faults.Square",
        "batch.global_batch_size=4",
        *more,
    ]
    path = f"{Path(__file__).parent}:{environment()['PYTHONPATH']}"
    return launch(folder, command, *overrides, timeout=120, PYTHONPATH=path)


def test_fsdp_from_the_command_to_the_model(tmp_path: Path) -> None:
    more = ["activation_checkpoint=full", "batch.micro_batch_size=1", "training.max_grad_norm=0.02"]
    done = layered(tmp_path, "train", "strategy=fsdp", *more)
    assert done.code == 0, done.out + done.err
    torch.manual_seed(0)
    model = Layered()
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    for window in ([1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0]):
        optimizer.zero_grad()
        model(torch.tensor(window)).square().mean(1).mean().backward()
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), 0.02) > 0.02
        optimizer.step()
    state = load_file(done.run / "model.safetensors")
    assert state.keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        assert torch.allclose(state[name], value, rtol=1e-6, atol=1e-7), name
    plan: dict[str, Any] = done.json("plan.json")
    assert (plan["mesh"], plan["reduce_each"]) == ({"dp_replicate": 1, "dp_shard": 2, "pp": 1}, "micro_batch")
    assert (plan["activation_checkpoint"], plan["reductions_per_window"]) == ("full", 2)
    assert len(set(done.json("result.json")["weights_sha256"])) == 1


@pytest.mark.parametrize("strategy", ["fsdp", "zero3"])
def test_a_rank_that_fails_where_the_others_wait_ends_them(tmp_path: Path, strategy: str) -> None:
    done = layered(tmp_path, "train", f"strategy={strategy}", "+model.fails=true", "batch.micro_batch_size=1")
    assert done.code == 3, done.out + done.err
    assert (done.out + done.err).count("ValueError: this layer is broken") == 1
    assert "rank 1" in done.out + done.err
    assert done.json("status.json")["error"]["rank"] == 1
    assert [line["update"] for line in done.metrics()] == [1]


def test_verify_is_green_and_leaves_nothing(tmp_path: Path) -> None:
    before = set(tmp_path.iterdir())
    done = layered(tmp_path, "verify")
    assert done.code == 0, done.out + done.err
    assert "all 19 rows agree with one process" in done.out  # one layout: the task knows no lengths
    for name in ("ddp", "fsdp", "zero1", "zero2", "zero3", "selective"):
        assert name in done.out
    assert "FAIL" not in done.out
    assert set(tmp_path.iterdir()) == before


def test_verify_ends_with_5_where_nothing_can_be_compared(tmp_path: Path) -> None:
    done = layered(tmp_path, "verify", "+model.coupled=true")
    assert done.code == 5, done.out + done.err
    assert "samples of a batch influence one another" in done.out
    refused = layered(tmp_path, "verify", "model.width=nothing")
    assert refused.code == 2
    assert "model.width" in refused.err
