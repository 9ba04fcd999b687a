"""A run under DeepSpeed from the command to its folder."""

import math
from pathlib import Path

import pytest
from runs import launch, mean

pytestmark = pytest.mark.slow


def test_zero3_from_the_command_to_the_model(tmp_path: Path) -> None:
    # a clip that bites, a short last window, and a parameter that two ranks don't divide evenly
    targets = [[[6.0, 0.0, 8.0]], [[6.0, 0.0, 8.0]], [[6.0, 0.0, 8.0]]]
    more = ["strategy=zero3", "+model.size=3", "cluster.ranks_per_node=2", "batch.micro_batch_size=1"]
    more += ["batch.global_batch_size=2", "training.max_grad_norm=1", "batch.layout=arrival"]
    done = launch(tmp_path, "train", *mean(targets, *more))
    assert done.code == 0, done.out + done.err
    assert [line["grad_norm"] for line in done.metrics()] == pytest.approx([10.0, 9.0])
    assert done.weights()["w"] == pytest.approx([1.2, 0.0, 1.6], rel=1e-6)
    result, plan = done.json("result.json"), done.json("plan.json")
    assert len(set(result["weights_sha256"])) == 1
    assert math.isclose(result["train_loss"], 40.5, rel_tol=1e-6)  # half of 9 squared
    assert (plan["strategy"], plan["mesh"]["dp_shard"], plan["reductions_per_window"]) == ("zero3", 2, 1)
    log = (done.run / "logs" / "rank_1.log").read_text()
    assert log == "", "DeepSpeed keeps quiet"
    refused = launch(tmp_path, "plan", *mean(targets, *more, "precision=fp16"))
    assert refused.code == 2
    assert "precision=fp16: DeepSpeed has no fp16 on CPU" in refused.err
