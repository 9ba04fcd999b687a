"""Weights in a folder: safetensors files, one or several with an index, read a tensor at a time."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from launcher.errors import ConfigError

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@torch.library.custom_op("launcher::stored_tensor", mutates_args=())
def stored_tensor(file: str, name: str, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of a safetensors file, as it is there; on the meta device its shape alone.

    It is an operator of torch, and no function, so that a constructor that reads its weights can be followed and the
    reading be done later, when the weights are asked for.
    """
    if device.type == "meta":
        return torch.empty(tuple(size), dtype=dtype, device=device)
    with safe_open(file, framework="pt") as opened:
        found: Tensor = opened.get_tensor(name)
    return found.to(device, dtype)


@dataclass(frozen=True)
class StoredWeights:
    """The tensors of a folder, by name."""

    folder: Path
    key: str
    """Where the folder stands in the configuration."""
    files: Mapping[str, Path]
    shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, folder: Path, key: str) -> "StoredWeights":
        """The folder's weights, of which only names and shapes are read.

        Raises:
            ConfigError: there are none, or a file is missing or can't be read.
        """
        if (folder / INDEX).is_file():
            try:
                names = sorted(set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
            except (ValueError, KeyError, AttributeError, TypeError) as error:
                raise ConfigError(key, folder, f"{INDEX} has no weight_map: {error}") from error
        elif (folder / WHOLE).is_file():
            names = [WHOLE]
        else:
            problem = f"holds no weights: neither {WHOLE} nor {INDEX} is there"
            raise ConfigError(key, folder, problem, hint="only safetensors files are read")
        files: dict[str, Path] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for name in names:
            try:
                with safe_open(folder / name, framework="pt") as opened:
                    for tensor in opened.keys():  # noqa: SIM118 — not a dict
                        files[tensor], shapes[tensor] = folder / name, tuple(opened.get_slice(tensor).get_shape())
            except (OSError, SafetensorError) as error:
                raise ConfigError(key, folder, f"{name} can't be read as a safetensors file: {error}") from error
        return cls(folder, key, files, shapes)

    @torch.no_grad()
    def load(self, model: nn.Module) -> None:
        """Gives every tensor of the model's state its stored numbers, in the type that it has in the model.

        Tensors that the model ties may be stored under any one of their names. On the meta device only names and shapes
        are compared.

        Raises:
            ConfigError: names or shapes differ, or tied tensors are stored with different numbers.
        """
        wanted: dict[int, list[str]] = {}
        state = model.state_dict(keep_vars=True)
        for name, tensor in state.items():
            wanted.setdefault(id(tensor), []).append(name)
        self._check({names[0]: state[names[0]] for names in wanted.values()}, list(wanted.values()))
        for names in wanted.values():
            stored, *again = [name for name in names if name in self.files]
            tensor = state[names[0]]
            if tensor.device.type == "meta":
                continue
            for other in again:
                self._check_equal(stored, other)
            read: Any = stored_tensor
            size = list(self.shapes[stored])
            tensor.copy_(read(str(self.files[stored]), stored, size, dtype=tensor.dtype, device=torch.device("cpu")))

    def _check(self, tensors: Mapping[str, Tensor], tied: Sequence[Sequence[str]]) -> None:
        known = {name for names in tied for name in names}
        lacking = [names[0] for names in tied if not any(name in self.files for name in names)]
        other = [
            f"{name} {list(self.shapes[name])} for {list(tensors[names[0]].shape)}"
            for names in tied
            for name in names
            if name in self.shapes and self.shapes[name] != tuple(tensors[names[0]].shape)
        ]
        problems = [
            ("lacks", sorted(lacking)),
            ("holds beside them", sorted(self.files.keys() - known)),
            ("differs in shape", other),
        ]
        said = "; ".join(f"{what} {', '.join(one[:5])}{' …' * (len(one) > 5)}" for what, one in problems if one)
        if said:
            raise ConfigError(self.key, self.folder, f"its weights don't fit the model of its config.json: {said}")

    def _check_equal(self, name: str, other: str) -> None:
        with _disable_current_modes():
            values = []
            for one in (name, other):
                with safe_open(self.files[one], framework="pt") as opened:
                    values.append(opened.get_tensor(one))
            if not torch.equal(*values):
                problem = f"its config.json ties {other} to {name}, and their stored weights differ"
                raise ConfigError(self.key, self.folder, problem, hint="tie_word_embeddings: false in its config.json")
