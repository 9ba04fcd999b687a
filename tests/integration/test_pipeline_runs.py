"""Pipelines from the command: a whole run, its plan and model, and a stage that fails where the others wait for it."""

from pathlib import Path

import pytest
import torch
from faults import Staged
from runs import Done, environment, launch, mean
from safetensors.torch import load_file

pytestmark = pytest.mark.slow


def staged(folder: Path, command: str, *more: str, ranks: int = 2) -> Done:
    overrides = [
        *mean([float(i) for i in range(1, 8)], "cluster.device=cpu", f"cluster.ranks_per_node={ranks}", "mesh.pp=2"),
        "model._target_=faults.Staged",
        "task._target_=faults.Square",
        "batch.global_batch_size=4",
        "batch.micro_batch_size=1",
        *more,
    ]
    path = f"{Path(__file__).parent}:{environment()['PYTHONPATH']}"
    return launch(folder, command, *overrides, timeout=120, PYTHONPATH=path)


def test_from_the_command_to_the_model(tmp_path: Path) -> None:
    held_out = "data.validation={_target_: scalar.Targets, targets: [2.0,3.0,4.0]}"
    done = staged(tmp_path, "train", "strategy=fsdp", "training.max_grad_norm=0.02", held_out, ranks=4)
    assert done.code == 0, done.out + done.err
    torch.manual_seed(0)
    model = Staged()
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    norms, losses = [], []
    for window in ([1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0]):
        optimizer.zero_grad()
        loss = model(torch.tensor(window)).square().mean(1).mean()
        loss.backward()
        losses.append(loss.item())
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.02)))
        assert norms[-1] > 0.02
        optimizer.step()
    state = load_file(done.run / "model.safetensors")
    assert list(state) == sorted(model.state_dict())
    for name, value in model.state_dict().items():
        assert torch.allclose(state[name], value, rtol=1e-6, atol=1e-7), name
    assert [line["grad_norm"] for line in done.metrics()] == pytest.approx(norms, rel=1e-6)
    assert [line["loss"] for line in done.metrics()] == pytest.approx(losses, rel=1e-6)
    checked = model(torch.tensor([2.0, 3.0, 4.0])).square().mean(1).mean()
    assert done.json("result.json")["validation_loss"] == pytest.approx(checked.item(), rel=1e-6)
    plan = done.json("plan.json")
    assert (plan["mesh"], plan["stages"]) == ({"dp_replicate": 1, "dp_shard": 2, "pp": 2}, [[0, 1], [2, 3]])
    hashes = done.json("result.json")["weights_sha256"]
    assert (len(hashes), len(set(hashes))) == (4, 1)


@pytest.mark.parametrize(
    ("how", "at", "code", "said"),
    [
        ("raise", 0, 3, "ValueError: this layer is broken"),
        ("raise", 3, 3, "ValueError: this layer is broken"),
        ("backward", 1, 3, "ValueError: this layer is broken"),
        ("kill", 0, 3, "killed by SIGKILL"),
        ("kill", 3, 3, "killed by SIGKILL"),
        ("exit7", 2, 7, "sys.exit(7)"),
    ],
)
def test_a_stage_that_fails_ends_all(tmp_path: Path, how: str, at: int, code: int, said: str) -> None:
    done = staged(tmp_path, "train", f"+model.how={how}", f"+model.at={at}")
    assert done.code == code, done.out + done.err
    assert (done.out + done.err).count(said) == 1
    assert done.json("status.json")["error"]["rank"] == at // 2
    assert not (done.run / "model.safetensors").exists()


def test_a_model_that_cannot_be_cut_and_samples_of_any_shape_are_refused(tmp_path: Path) -> None:
    done = staged(tmp_path, "plan", "model._target_=faults.Layered")
    assert done.code == 2
    assert "embed" in done.err
    assert "Traceback" not in done.err
    ragged = ["task._target_=scalar.SquaredError", "+data.train.targets=[1,[2,3],4,5]"]
    done = staged(tmp_path, "train", "model._target_=scalar.Scalar", *ragged)
    assert done.code == 2, done.out + done.err
