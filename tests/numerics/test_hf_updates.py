"""Models of transformers under every strategy against plain lines on one process, and folders that are never whole."""

from pathlib import Path
from typing import Any

import plain
import pytest
import torch
from configs import PLAIN, config_text
from hf_models import CONFIGS, LARGE, LLAMA, override, plain_model, save
from test_fsdp import starts
from test_update import GLOBAL, TOLERANCE
from toys import Sequences, trained

from launcher.tasks import CausalLM

pytestmark = pytest.mark.slow

SEED, UPDATES, MAX_NORM, LR = 3, 3, 0.05, 0.5
STRATEGIES = {
    "ddp": (2, []),
    "fsdp": (3, ["strategy=fsdp"]),
    "fsdp each window": (2, ["strategy=fsdp", "strategy.reduce_each=window"]),
    "hsdp": (4, ["strategy=fsdp", "mesh.dp_replicate=2"]),
    "pipeline": (2, ["mesh.pp=2"]),
    "pipeline x fsdp": (4, ["mesh.pp=2", "strategy=fsdp"]),
    "zero1": (2, ["strategy=zero1"]),
    "zero3": (2, ["strategy=zero3", "+strategy.deepspeed.zero_optimization.stage3_param_persistence_threshold=0"]),
}


def text(model: str, *more: str) -> str:
    return config_text(
        *PLAIN,
        *("model=hf", model, f"run.seed={SEED}", "task.vocab_size=14", "task.bos=13"),
        *("data=custom", "data.train._target_=toys.Sequences"),
        *(f"batch.global_batch_size={GLOBAL}", "batch.micro_batch_size=2", f"training.duration={UPDATES} updates"),
        *more,
    )


CASES = [
    ("llama", "none"),
    ("llama", "full"),
    ("gpt2", "none"),
    ("gpt2", "full"),
    ("llama tied", "none"),
    ("qwen3", "full"),
]


@pytest.fixture(scope="module")
def expected() -> dict[str, tuple[Any, list[dict[str, float]]]]:
    """Every model after the plain updates, and what they said."""
    found = {}
    for name, config in CONFIGS.items():
        model = plain_model(config, SEED)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        model.config.use_cache = False
        lines = plain.train(model, CausalLM(vocab_size=14, bos=13), Sequences(), GLOBAL, UPDATES, optimizer, MAX_NORM)
        assert min(line["grad_norm"] for line in lines) > 2 * MAX_NORM  # the clip bites in every update
        found[name] = dict(model.state_dict()), lines
    return found


@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_parameters_after_three_updates(ranks: Any, expected: Any, strategy: str) -> None:
    degree, more = STRATEGIES[strategy]
    more = [*more, f"optimizer.lr={LR}", f"training.max_grad_norm={MAX_NORM}"]
    texts = [text(override(CONFIGS[name]), f"activation_checkpoint={kind}", *more) for name, kind in CASES]
    for of_rank in ranks.run(trained, texts, world_size=degree, timeout=120):
        for (name, _), run in zip(CASES, of_rank, strict=True):
            state, lines = expected[name]
            assert plain.largest_difference(run["state"], state) <= TOLERANCE["float32"], name
            for line, reference in zip(run["lines"], lines, strict=True):
                assert line["loss"] == pytest.approx(reference["loss"], rel=TOLERANCE["float32"])
                assert line["grad_norm"] == pytest.approx(reference["grad_norm"], rel=2 * TOLERANCE["float32"])


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_half_precision_and_selective_recomputation(ranks: Any, recompute: str) -> None:
    """What comes out of autocast is turned to fp32 inside the library's own output."""
    more = ["precision=bf16", f"activation_checkpoint={recompute}", f"optimizer.lr={LR}"]
    texts = [text(override(LLAMA), *more, *STRATEGIES[name][1]) for name in ("ddp", "fsdp")]
    for one, other in ranks.run(trained, texts, world_size=2):
        # bfloat16 has 8 bits
        assert plain.largest_difference(one["state"], other["state"]) <= 2**-8
        assert all(value.dtype == torch.float32 for value in one["state"].values())


@pytest.mark.parametrize("tied", [False, True])
def test_weights_of_a_folder_reach_a_model_that_is_never_whole(ranks: Any, tmp_path: Path, tied: bool) -> None:
    model = save({**LARGE, "tie_word_embeddings": tied}, 5, tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    for state, deferred in ranks.run(starts, text(f"model.path={tmp_path}", "strategy=fsdp"), world_size=2):
        assert deferred
        assert state.keys() == model.state_dict().keys()
        assert [name for name, value in model.state_dict().items() if not torch.equal(state[name], value)] == []


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_weights_of_a_folder_under_other_strategies(ranks: Any, tmp_path: Path, strategy: str) -> None:
    model = save(LARGE, 5, tmp_path)
    for state, _ in ranks.run(starts, text(f"model.path={tmp_path}", f"strategy={strategy}"), world_size=2):
        assert [name for name, value in model.state_dict().items() if not torch.equal(state[name], value)] == []


MIXED = {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 3, "max_window_layers": 2}


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zbv"])
def test_several_stages_of_four_layers_and_of_layers_of_two_kinds(ranks: Any, schedule: str) -> None:
    four = {"num_hidden_layers": 4}
    models = [{**CONFIGS["llama tied"], **four}, {**CONFIGS["gpt2"], **four}, {**LLAMA, **MIXED, **four}]
    more = [f"optimizer.lr={LR}", f"training.max_grad_norm={MAX_NORM}"]
    alone = [text(override(model), *more) for model in models]
    (expected,) = ranks.run(trained, alone, world_size=1, timeout=120)
    cut = [text(override(model), *more, "mesh.pp=2", f"pipeline.schedule={schedule}") for model in models]
    for of_rank in ranks.run(trained, cut, world_size=2, timeout=120):
        for run, reference in zip(of_rank, expected, strict=True):
            assert plain.largest_difference(run["state"], reference["state"]) <= TOLERANCE["float32"]
            for line, other in zip(run["lines"], reference["lines"], strict=True):
                assert line["loss"] == pytest.approx(other["loss"], rel=TOLERANCE["float32"])
