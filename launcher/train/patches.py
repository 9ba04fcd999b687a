"""What `model_patches` changes in a model: once, as it is built, before anything wraps it."""

from collections.abc import Callable
from dataclasses import replace
from typing import cast

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from launcher.config.choices import BatchNormPatch
from launcher.config.schema import ModelPatchesConfig
from launcher.errors import ConfigError
from launcher.train.batch_norm import GhostBatchNorm, batch_norms

KEY = "model_patches.batch_norm"
MOST_GROUPS = 32
"""Groups of a group norm, as in Wu and He 2018 (arXiv:1803.08494)."""
_REPLACED = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def patch_model(model: nn.Module, patches: ModelPatchesConfig) -> nn.Module:
    """The model with its batch norms replaced as asked for; parameters stay the same objects.

    Raises:
        ConfigError: there is none to replace, or one of another kind than torch's own.
    """
    kind = patches.batch_norm
    if kind is BatchNormPatch.keep:
        return model
    norms = batch_norms(model)
    if not norms:
        raise ConfigError(KEY, kind.value, "has no effect: the model has no batch norm", hint=f"{KEY}=keep")
    other = next((one for one in norms if type(one) not in _REPLACED), None)
    if other is not None:
        problem = f"the model has a {type(other).__name__}, and only torch's BatchNorm1d, 2d and 3d are replaced"
        raise ConfigError(KEY, kind.value, problem)
    if kind is BatchNormPatch.group_norm:
        return _replaced(model, _group_norm)
    if any(not one.track_running_stats for one in norms):
        raise ConfigError(KEY, kind.value, "a batch norm of the model keeps no running statistics to validate with")
    if kind is BatchNormPatch.sync:
        return _replaced(model, _sync)
    size = patches.ghost_size
    assert size is not None, "checked with the configuration"
    return _replaced(model, lambda norm: GhostBatchNorm.of(norm, size))


def in_evaluation(patches: ModelPatchesConfig) -> ModelPatchesConfig:
    """Those that matter for a model in evaluation: ghost and synchronised batch norm differ in training alone."""
    is_same = patches.batch_norm in (BatchNormPatch.ghost, BatchNormPatch.sync)
    return ModelPatchesConfig() if is_same else replace(patches, precise_batch_norm=None)


def _replaced(model: nn.Module, make: Callable[[_BatchNorm], nn.Module]) -> nn.Module:
    """The model with what `make` gives for each batch norm; one that has several names keeps them."""
    if isinstance(model, _BatchNorm):
        return make(model)
    made: dict[nn.Module, nn.Module] = {}
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if isinstance(child, _BatchNorm):
                if child not in made:
                    made[child] = make(child).train(child.training)
                parent._modules[name] = made[child]
    return model


def _sync(norm: _BatchNorm) -> nn.Module:
    return cast(nn.Module, nn.SyncBatchNorm.convert_sync_batchnorm(norm))  # type: ignore[no-untyped-call]


def _group_norm(norm: _BatchNorm) -> nn.Module:
    """A group norm of the same channels and affine parameters, with 32 groups or the largest divisor below."""
    channels = norm.num_features
    groups = max(count for count in range(1, MOST_GROUPS + 1) if channels % count == 0)
    made = nn.GroupNorm(groups, channels, eps=norm.eps, affine=False)
    made.affine = norm.affine
    made.weight, made.bias = norm.weight, norm.bias
    return made
