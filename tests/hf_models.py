"""Tiny models of transformers, and folders of them."""

from pathlib import Path
from typing import Any

import torch

# transformers 5 replaces torch.linspace while it loads, and torch remembers for good which functions take the device of
# a context when it meets the first such context: here, and not there
with torch.device("meta"):
    torch.empty(0)

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 14, "eos_token_id": 0}
LLAMA = {"model_type": "llama", "intermediate_size": 24, "num_key_value_heads": 1, "bos_token_id": 13, **SIZES}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama tied": {**LLAMA, "tie_word_embeddings": True},
    "qwen3": {**LLAMA, "model_type": "qwen3", "head_dim": 8, "tie_word_embeddings": True},
    "gpt2": {"model_type": "gpt2", "n_positions": 32, "bos_token_id": 13, **NO_DROPOUT, **SIZES},
}
LARGE = {**LLAMA, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 300}
"""One whose tensors are large enough to be deferred."""


def plain_model(config: dict[str, Any], seed: int, dtype: torch.dtype = torch.float32) -> Any:
    """The model as one would make it without the launcher."""
    from transformers import AutoConfig, AutoModelForCausalLM  # seconds, which tests without it don't pay

    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=dtype)


def save(config: dict[str, Any], seed: int, folder: Path, **how: Any) -> Any:
    """Writes a model's folder, as anyone else would have, and gives the model."""
    model = plain_model(config, seed)
    model.save_pretrained(folder, **how)
    return model


def override(config: dict[str, Any]) -> str:
    """A configuration on the command line."""
    pairs = ",".join(f"{name}:{str(value).lower()}" for name, value in config.items())
    return f"model.config={{{pairs}}}"
