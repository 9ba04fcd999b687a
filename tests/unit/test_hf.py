"""Models of transformers: the library's own numbers and names, its layers found, folders read and refused."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from configs import config_text
from hf_models import CONFIGS, LARGE, LLAMA, override, plain_model, save
from safetensors.torch import load_file, save_file
from torch import nn

from launcher.config.validate import parse
from launcher.errors import ConfigError
from launcher.export import copy_untied
from launcher.models import hf_causal_lm
from launcher.models.hf import PretrainedFiles
from launcher.tasks import CausalLM
from launcher.train.deferred import defer
from launcher.train.parallel.blocks import find_blocks
from launcher.train.parts import Parts, build_model, build_task, defer_model, gather_facts, sketch_model

pytestmark = pytest.mark.slow

SEED = 3


def settings(*more: str) -> Any:
    return parse(config_text("model=hf", "task.vocab_size=14", "task.bos=13", f"run.seed={SEED}", *more))


def equal(mine: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return mine.keys() == other.keys() and all(torch.equal(mine[name], other[name]) for name in other)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", list(CONFIGS))
def test_names_numbers_and_logits_are_those_of_the_library(name: str, dtype: str) -> None:
    expected = plain_model(CONFIGS[name], SEED, getattr(torch, dtype)).eval()
    model = build_model(settings(override(CONFIGS[name]), f"model.dtype={dtype}")).eval()
    assert equal(model.state_dict(), expected.state_dict())
    assert dict(model.named_parameters()).keys() == dict(expected.named_parameters()).keys()
    ids = torch.randint(0, 14, (3, 9))
    output = model(input_ids=ids)
    assert torch.equal(output.logits, expected(input_ids=ids, use_cache=False).logits)
    assert set(output) == {"logits"}  # and no keys and values of earlier tokens


@pytest.mark.parametrize("name", list(CONFIGS))
def test_rows_that_are_filled_up_at_the_right_need_no_mask(name: str) -> None:
    expected = plain_model(CONFIGS[name], SEED, torch.float64).eval()
    model = build_model(settings(override(CONFIGS[name]), "model.dtype=float64")).eval()
    task = CausalLM(vocab_size=14, bos=13)
    samples = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11]]
    batch = task.collate(samples)
    losses = task.loss(model(**task.inputs(batch)), batch)
    lengths = torch.tensor([len(one) for one in samples])
    mask = (torch.arange(7) < lengths[:, None]).long()
    masked = expected(input_ids=batch["input_ids"], attention_mask=mask, use_cache=False)
    # the sum of some hundred terms in another order, 2^-53 each
    torch.testing.assert_close(losses, task.loss(masked, batch), rtol=1e-13, atol=0)
    for row, sample in enumerate(samples):
        alone = task.collate([sample])
        own = task.loss(expected(**task.inputs(alone), use_cache=False), alone)
        torch.testing.assert_close(losses[row : row + 1], own, rtol=1e-13, atol=0)


@pytest.mark.parametrize(("name", "prefix"), [("llama", "model.layers"), ("gpt2", "transformer.h")])
def test_layers_are_found_and_registered_once(name: str, prefix: str) -> None:
    model = build_model(settings(override(CONFIGS[name])))
    blocks = find_blocks(model, None)
    modules = dict(model.named_modules())
    assert list(blocks) == [f"{prefix}.0", f"{prefix}.1"]
    assert all(modules[one] is block for one, block in blocks.items())
    assert "layers" not in modules
    config = settings(override(CONFIGS[name]), "strategy=fsdp")
    facts = gather_facts(config, Parts(model, build_task(config), [[1]], None))
    assert facts.num_layers == 2


def test_experts_are_no_layers() -> None:
    config = {**LLAMA, "model_type": "mixtral", "num_local_experts": 5}
    assert len(hf_causal_lm(config=config).layers) == 2  # type: ignore[arg-type]


class Lists(nn.Module):
    """Two lists of modules, one of which holds a longer one."""

    def __init__(self) -> None:
        super().__init__()
        self.adapters = nn.ModuleList(nn.Linear(1, 1) for _ in range(9))
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"mixers": nn.ModuleList(nn.Linear(4, 4) for _ in range(7))}) for _ in range(3)
        )


def test_the_outermost_list_with_most_parameters_is_that_of_the_layers() -> None:
    from launcher.models.hf import find_layers

    model = Lists()
    assert find_layers(model) is model.blocks
    assert find_layers(nn.Linear(1, 1)) is None


@pytest.mark.parametrize("tied", ["false", "true"])
def test_a_model_from_a_configuration_can_be_deferred(tied: str) -> None:
    config = {**LARGE, "tie_word_embeddings": tied == "true"}
    chosen = settings(override(config))
    model, fill = defer_model(chosen)
    assert any(one.is_meta for one in model.parameters())
    fill(model)
    assert equal(model.state_dict(), plain_model(config, SEED).state_dict())
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is (tied == "true")  # type: ignore[union-attr]
    assert equal(dict(model.named_buffers()), dict(plain_model(config, SEED).named_buffers()))


@pytest.mark.parametrize("size", ["5GB", "20KB"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_of_a_folder(tmp_path: Path, size: str, tied: bool, dtype: str) -> None:
    stored = save({**LARGE, "tie_word_embeddings": tied}, 5, tmp_path, max_shard_size=size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (size == "20KB")
    expected = stored.to(getattr(torch, dtype)).state_dict()
    chosen = settings(f"model.path={tmp_path}", f"model.dtype={dtype}")
    whole = build_model(chosen)
    assert equal(whole.state_dict(), expected)
    assert {one.dtype for one in whole.parameters()} == {getattr(torch, dtype)}
    later, fill = defer_model(chosen)
    assert any(one.is_meta for one in later.parameters())
    fill(later)
    assert equal(later.state_dict(), expected)
    assert all(one.is_meta for one in sketch_model(chosen).parameters())
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=getattr(torch, dtype)).eval()
    ids = torch.randint(0, 300, (2, 7))
    for model in (whole, later):
        assert torch.equal(model.eval()(input_ids=ids).logits, reference(input_ids=ids, use_cache=False).logits)


def test_deferring_a_folder_reads_no_large_weights(tmp_path: Path) -> None:
    save(LARGE, 5, tmp_path)
    blueprint = defer(lambda: hf_causal_lm(path=str(tmp_path)))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError):
        blueprint.fill(blueprint.model)


def rename(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _misname(tensors: dict[str, Any]) -> None:
    tensors["model.final.weight"] = tensors.pop("model.norm.weight")


def _reshape(tensors: dict[str, Any]) -> None:
    tensors["model.norm.weight"] = torch.ones(15)


def _untie(tensors: dict[str, Any]) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1


def _tie(tensors: dict[str, Any]) -> None:
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")


@pytest.mark.parametrize("build", [build_model, sketch_model, lambda config: defer_model(config)[0]])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_misname, r"lacks model.norm.weight; holds beside them model.final.weight"),
        (_reshape, r"differs in shape model.norm.weight \[15\] for \[16\]"),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name(tmp_path: Path, change: Any, said: str, build: Any) -> None:
    save(CONFIGS["llama tied"], 5, tmp_path)
    rename(tmp_path, change)
    with pytest.raises(ConfigError, match=f"model.path=.*: {'.*'}{said}"):
        build(settings(f"model.path={tmp_path}"))


def test_tied_weights_may_have_either_name_and_one_value(tmp_path: Path) -> None:
    expected = save(CONFIGS["llama tied"], 5, tmp_path).state_dict()
    rename(tmp_path, _tie)
    assert equal(hf_causal_lm(path=str(tmp_path)).state_dict(), expected)
    save(CONFIGS["llama tied"], 5, tmp_path)
    rename(tmp_path, _untie)
    with pytest.raises(ConfigError, match=r"ties lm_head.weight to model.embed_tokens.weight, and their stored"):
        hf_causal_lm(path=str(tmp_path))


def test_weights_of_another_run(tmp_path: Path) -> None:
    expected = plain_model(LLAMA, 8).state_dict()
    save_file(expected, tmp_path / "weights.safetensors")
    model = build_model(settings(override(LLAMA), f"+model_weights={tmp_path}/weights.safetensors"))
    assert equal(model.state_dict(), expected)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "model.path=null: give one of model.path"),
        ({"path": "x", "config": LLAMA}, "model.path=x: give one of model.path"),
        ({"path": "nowhere"}, "model.path=nowhere: there is no such folder"),
        ({"path": "."}, "model.path=.: there is no config.json in it"),
        ({"config": {"hidden_size": 8}}, "model.config.model_type=null: transformers has no such type"),
        ({"config": {"model_type": "lama"}}, "model.config.model_type=lama: .*\n  did you mean 'llama'?"),
        ({"config": {"model_type": "vit"}}, "model.config.model_type=vit: transformers has no causal language model"),
        ({"config": {**LLAMA, "hiden_size": 8}}, "model.config.hiden_size=8: .*\n  did you mean 'hidden_size'?"),
        ({"config": {**LLAMA, "hidden_size": "wide"}}, "model.config=.*LlamaConfig refuses it: .*hidden_size"),
        ({"config": {**LLAMA, "hidden_size": 17}}, "model.config=.*LlamaConfig refuses it: .*not a multiple"),
        ({"config": LLAMA, "dtype": "int8"}, "model.dtype=int8: must name a floating type"),
        ({"config": LLAMA, "attention": "fast"}, "model.attention=fast: must be one of sdpa, eager"),
        ({"config": {**LLAMA, "model_type": "gemma2"}}, "model.attention=sdpa: .*\n  model.attention=eager"),
    ],
)
def test_what_cannot_work_is_refused(
    arguments: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=said):
        hf_causal_lm(**arguments)


@pytest.mark.parametrize("broken", [None, "config.json", "model.safetensors", "model.safetensors.index.json"])
def test_a_broken_folder_is_refused(tmp_path: Path, broken: str | None) -> None:
    save(LLAMA, 5, tmp_path)
    if broken is None:
        (tmp_path / "model.safetensors").unlink()
    else:
        (tmp_path / broken).write_text("{")
    with pytest.raises(ConfigError, match=f"model.path=.*{broken or 'holds no weights'}"):
        hf_causal_lm(path=str(tmp_path))


def test_the_library_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match="transformers isn't installed\n  pip install 'launcher\\[hf\\]'"):
        hf_causal_lm(config=LLAMA)


def test_a_task_with_more_tokens_than_the_model_is_refused() -> None:
    config = parse(config_text("model=hf", override(LLAMA)))
    model = build_model(config)
    with pytest.raises(ConfigError, match=r"task.vocab_size=257: the model has 14 tokens"):
        gather_facts(config, Parts(model, build_task(config), [[1]], None))


def test_paths_are_those_of_the_folder_where_the_command_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert settings("model.path=mine").model["path"] == str(tmp_path / "mine")


def test_what_belongs_beside_the_weights(tmp_path: Path) -> None:
    folder, target = tmp_path / "from", tmp_path / "to"
    save(LLAMA, 5, folder)
    kept = ("tokenizer.json", "tokenizer_config.json", "merges.txt", "spiece.model", "generation_config.json")
    for name in (*kept, "optimizer.bin"):
        (folder / name).write_text("{}")
    target.mkdir()
    files = hf_causal_lm(path=str(folder), dtype="bfloat16").pretrained
    assert isinstance(files, PretrainedFiles)
    files.write(target)
    assert {one.name for one in target.iterdir()} == {"config.json", *kept}
    written = json.loads((target / "config.json").read_text())
    assert (written["architectures"], written["dtype"], written["use_cache"]) == (
        ["LlamaForCausalLM"],
        "bfloat16",
        True,
    )


def test_tied_tensors_are_stored_once(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(3), "b": torch.ones(2, 2).bfloat16(), "c": torch.arange(3), "d": torch.zeros(0)}
    save_file(tensors, tmp_path / "from", metadata={"format": "pt", "c": "a", "missing": "a"})
    with (tmp_path / "from").open("rb") as source, (tmp_path / "to").open("wb") as copy:
        copy_untied(source, copy)
    assert equal(load_file(tmp_path / "to"), {name: tensors[name] for name in "abd"})
