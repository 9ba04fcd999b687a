"""Causal language models of the transformers library, from a configuration or a local folder."""

import dataclasses
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from launcher.errors import ConfigError, nearest
from launcher.models.stored import StoredWeights

KEY = "model"
ATTENTION = ("sdpa", "eager", "flex_attention", "flash_attention_2", "flash_attention_3")
CONFIG, GENERATION = "config.json", "generation_config.json"
TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.model",
                   "*.tiktoken", "chat_template*")  # fmt: skip
"""What of a folder belongs to its tokenizer."""


def hf_causal_lm(
    *,
    path: str | None = None,
    config: Mapping[str, Any] | None = None,
    dtype: str = "float32",
    attention: str = "sdpa",
) -> nn.Module:
    """A causal language model of transformers: the library's own object, so that its state has the library's names.

    It is called with `input_ids` [rows, T] and gives an object with `logits` [rows, T, vocab_size]. Rows filled up at
    the right need no mask, since a causal model doesn't see what comes after. It keeps no keys and values of earlier
    calls. Beside what the library gives it, it has `layers`, `vocab_size` and `pretrained`, a `PretrainedFiles`.

    Args:
        path: a folder with config.json and safetensors weights, as `save_pretrained` writes it; its weights are read.
        config: instead of a folder `model_type` and the arguments of that type's configuration; weights are drawn.
        dtype: name of the parameters' type, whatever type they are stored in.
        attention: which implementation of attention; `sdpa` is torch's own.

    Raises:
        ConfigError: transformers isn't installed, or an argument can't work.
    """
    transformers = _transformers()
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
        raise ConfigError(f"{KEY}.dtype", dtype, "must name a floating type of torch, such as float32 or bfloat16")
    if attention not in ATTENTION:
        raise ConfigError(f"{KEY}.attention", attention, f"must be one of {', '.join(ATTENTION)}")
    if (path is None) == (config is None):
        problem = "give one of model.path, a local folder, and model.config, from which weights are drawn"
        raise ConfigError(f"{KEY}.path", path, problem, hint="model.config={model_type: llama, hidden_size: 192}")
    folder = None if path is None else _folder(path)
    settings = _read_config(transformers, folder) if folder else _make_config(transformers, dict(config or {}))
    if type(settings) not in transformers.AutoModelForCausalLM._model_mapping:
        raise ConfigError(f"{KEY}.{'path' if path else 'config.model_type'}", path or settings.model_type,
                          f"transformers has no causal language model of the type {settings.model_type}")  # fmt: skip
    model = _make(transformers, settings, folder, kind, attention)
    if folder is not None:
        StoredWeights.of(folder, f"{KEY}.path").load(model)
    return model


def find_layers(model: nn.Module) -> nn.ModuleList | None:
    """The list of layers: of the outermost lists of modules the one that holds most parameters; None: there is none."""
    lists = {name: one for name, one in model.named_modules() if isinstance(one, nn.ModuleList) and len(one)}
    outer = [one for name, one in lists.items() if not any(name.startswith(f"{other}.") for other in lists)]
    return max(outer, key=lambda one: sum(p.numel() for p in one.parameters()), default=None)


@dataclasses.dataclass(frozen=True)
class PretrainedFiles:
    """What `from_pretrained` reads beside the weights."""

    config: str
    """The text of config.json."""
    tied: Mapping[str, str]
    """Tensors that are stored under another one's name."""
    folder: Path | None
    """Where the model came from."""

    def write(self, target: Path) -> None:
        """Writes config.json into a folder, and copies there what else the model's own folder has, but its weights."""
        (target / CONFIG).write_text(self.config, encoding="utf-8")
        if self.folder is None:
            return
        found = {one for pattern in (GENERATION, *TOKENIZER_FILES) for one in self.folder.glob(pattern)}
        for one in sorted(found):
            if one.is_dir():
                shutil.copytree(one, target / one.name)
            else:
                shutil.copyfile(one, target / one.name)


def _transformers() -> Any:
    try:
        import transformers
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        problem = "transformers isn't installed"
        raise ConfigError(KEY, "hf", problem, hint="pip install 'launcher[hf]'") from error
    return transformers


def _folder(path: str) -> Path:
    folder = Path(path)
    if not (folder / CONFIG).is_file():
        problem = f"there is no {CONFIG} in it" if folder.is_dir() else "there is no such folder"
        raise ConfigError(f"{KEY}.path", path, problem, hint="a local folder, as save_pretrained writes it")
    return folder


def _read_config(transformers: Any, folder: Path) -> Any:
    try:
        return transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise ConfigError(f"{KEY}.path", folder, f"transformers refuses its {CONFIG}: {_said(error)}") from error


def _make_config(transformers: Any, arguments: dict[str, Any]) -> Any:
    known = transformers.CONFIG_MAPPING
    model_type = arguments.pop("model_type", None)
    if model_type not in known:
        hint = nearest(str(model_type), known) or "such as llama, qwen3 or gpt2"
        raise ConfigError(f"{KEY}.config.model_type", model_type, "transformers has no such type", hint=hint)
    kind = known[model_type]
    names = {one.name for one in dataclasses.fields(kind)} | set(kind.attribute_map)
    for name, value in arguments.items():
        if name not in names:  # transformers would keep it and never look at it
            hint = nearest(name, names) or f"it takes {', '.join(sorted(names))}"
            raise ConfigError(f"{KEY}.config.{name}", value, f"{kind.__name__} takes no such argument", hint=hint)
    try:
        return kind(**arguments)
    except Exception as error:
        raise ConfigError(f"{KEY}.config", arguments, f"{kind.__name__} refuses it: {_said(error)}") from error


def _make(transformers: Any, settings: Any, folder: Path | None, dtype: torch.dtype, attention: str) -> nn.Module:
    """The model with drawn weights, or without any where a folder has them."""
    from transformers.initialization import no_init_weights

    arguments = {"dtype": dtype, "attn_implementation": attention}
    try:
        if folder is None:
            model: Any = transformers.AutoModelForCausalLM.from_config(settings, **arguments)
        else:
            with no_init_weights():
                model = transformers.AutoModelForCausalLM.from_config(settings, **arguments)
            model.tie_weights()  # a part of what was left out
    except (ValueError, ImportError) as error:
        if "attention" not in str(error).lower() and "attn" not in str(error).lower():
            raise
        raise ConfigError(f"{KEY}.attention", attention, _said(error), hint="model.attention=eager") from error
    model.config.architectures = [type(model).__name__]
    tied = dict(model.all_tied_weights_keys)
    model.pretrained = PretrainedFiles(model.config.to_json_string(), tied, folder)
    model.config.use_cache = False  # keys and values are of use to generation alone
    model.vocab_size = model.config.get_text_config().vocab_size
    layers = find_layers(model)
    if layers is not None:
        object.__setattr__(model, "layers", layers)  # a second name for a module that is registered already
    return model  # type: ignore[no-any-return]


def _said(error: Exception) -> str:
    return " ".join(str(error).split())
