"""Stages of a causal language model of transformers: the library's own forward over fewer layers.

A decoder of the library embeds its ids or takes embeddings as they are, works out positions and masks, runs its layers
and norms what comes out. A stage that isn't the first gives it hidden states as embeddings, without what would change
them; one that isn't the last leaves out the norm.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from launcher.train.parallel.stages import Anatomy, Hidden, Span, Watch, cut


class Transformers:
    """Models of transformers, known by their type."""

    def anatomy(self, model: Any, inputs: Mapping[str, Any]) -> Anatomy:
        watch = Watch(model)
        before: set[str] = set()
        with watch.on() as seen:
            first, last = model.layers[0], model.layers[-1]
            hooks = [
                first.register_forward_pre_hook(lambda *_: before.update(seen)),
                last.register_forward_hook(lambda *_: seen.clear()),
            ]
            try:
                model(**inputs)
                after = set(seen)
            finally:
                for hook in hooks:
                    hook.remove()
        return watch.anatomy(before, after)

    def cut(self, plain: nn.Module, anatomy: Anatomy, span: Span) -> nn.Module:
        stage: Any = cut(plain, anatomy, span)
        for name in anatomy.before - anatomy.after if not span.is_first else ():
            self._replace(stage, plain, name)
        for name in anatomy.after if not span.is_last else ():
            if name.startswith(f"{stage.base_model_prefix}."):
                _put(stage, name, nn.Identity())
        kinds = getattr(stage.config, "layer_types", None)
        if kinds is not None:  # looked up by the number of a layer in its stage
            config = copy.deepcopy(stage.config)
            config.layer_types = kinds[span.first_layer : span.last_layer + 1]
            stage.config = stage.base_model.config = config
        return stage  # type: ignore[no-any-return]

    def _replace(self, stage: nn.Module, plain: nn.Module, name: str) -> None:
        """What comes before the layers, in a stage that isn't the first: nothing is added, dropped or normed again."""
        module = plain.get_submodule(name)
        if isinstance(module, nn.Embedding):
            _put(stage, name, _Nothing())
        elif isinstance(module, nn.Dropout) or any(True for _ in module.parameters()):
            _put(stage, name, nn.Identity())
        else:
            _put(stage, name, module)  # positions, which layers ask for in every stage

    def run(self, stage: Any, span: Span, inputs: Mapping[str, Any], hidden: Hidden) -> Any:
        given = dict(inputs)
        if not span.is_first:
            given = {"inputs_embeds": hidden, **{key: value for key, value in given.items() if key != "input_ids"}}
        if span.is_last:
            return _plain_class(stage).forward(stage, **given)
        return stage.base_model(**given).last_hidden_state


class _Nothing(nn.Module):
    """An embedding that adds nothing."""

    def forward(self, ids: Tensor) -> Tensor:
        return torch.zeros((), device=ids.device)


def _put(stage: nn.Module, name: str, module: nn.Module) -> None:
    holder, _, key = name.rpartition(".")
    stage.get_submodule(holder)._modules[key] = module


def _plain_class(stage: nn.Module) -> Any:
    """The library's class, below what a sharding has put above it."""
    return next(one for one in type(stage).__mro__ if one.__module__.startswith("transformers."))
