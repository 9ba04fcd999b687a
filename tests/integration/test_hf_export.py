"""A model of transformers from a folder, trained by two ranks, and exported as a folder that the library reads."""

from pathlib import Path

import pytest
import torch
from hf_models import LARGE, save
from runs import launch
from safetensors import safe_open
from safetensors.torch import load_file

pytestmark = pytest.mark.slow


def test_a_folder_is_trained_and_exported_as_a_folder(tmp_path: Path) -> None:
    before = save({**LARGE, "tie_word_embeddings": True}, 5, tmp_path / "start", max_shard_size="20KB")
    (tmp_path / "start" / "tokenizer.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("".join(f"Line {i} of a text.\n\n" for i in range(40)))
    done = launch(
        tmp_path,
        "train",
        *("model=hf", "model.path=start", "data=text", "data.train.path=notes.txt", "strategy=fsdp"),
        *("batch.global_batch_size=4", "training.duration=2 updates", "training.validate_every=null"),
        *("cluster.device=cpu", "cluster.ranks_per_node=2"),
    )
    assert done.code == 0, done.out + done.err
    exported = launch(tmp_path, "export", "run", "--output", "out")
    assert (exported.code, exported.out.strip()) == (0, "out")
    names = {"config.json", "generation_config.json", "tokenizer.json", "model.safetensors"}
    assert {one.name for one in (tmp_path / "out").iterdir()} == names
    assert {one.name for one in done.run.iterdir()} >= {"pretrained", "model.safetensors"}
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        assert set(file.keys()) == before.state_dict().keys() - {"lm_head.weight"}
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert model.config.use_cache
    trained = load_file(done.run / "model.safetensors")
    assert trained.keys() == model.state_dict().keys()
    assert all(torch.equal(value, trained[name]) for name, value in model.state_dict().items())
    assert not any(torch.equal(value, trained[name]) for name, value in before.state_dict().items())
    before.load_state_dict(trained)
    ids = torch.randint(0, 300, (2, 9))
    assert torch.equal(model(input_ids=ids).logits, before.eval()(input_ids=ids).logits)

    again = launch(tmp_path, "export", "run", "--output", "out")
    assert again.code == 2
    assert "out: can't be written" in again.err
    assert launch(tmp_path, "export", "run", "--output", "model.safetensors").code == 0
    assert (tmp_path / "model.safetensors").read_bytes() == (done.run / "model.safetensors").read_bytes()
    assert not list(tmp_path.glob(".*.tmp"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["model.path=nowhere"], "nowhere: there is no such folder"),
        (["model.config={model_type: llama, vocab_size: 99}"], "task.vocab_size=257: the model has 99 tokens"),
    ],
)
def test_a_model_that_cannot_be_had_is_refused_before_any_rank_starts(
    tmp_path: Path, arguments: list[str], said: str
) -> None:
    done = launch(tmp_path, "plan", "model=hf", *arguments)
    assert done.code == 2
    assert said in done.err
    assert "Traceback" not in done.err
