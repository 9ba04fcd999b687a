"""Which models can be cut into stages, and how."""

from torch import nn

from launcher.plan.pipeline import CUT_TYPES
from launcher.train.parallel.hf_stages import Transformers
from launcher.train.parallel.stages import Family, InOrder


def missing_parts(model: nn.Module) -> list[str]:
    """What a pipeline needs of a model and this one doesn't have: of `layers`, `embed` and `head`, or for a model of
    transformers a known `type`."""
    layers = getattr(model, "layers", None)
    missing = [] if isinstance(layers, nn.ModuleList) and len(layers) else ["layers"]
    if not missing and hasattr(model, "pretrained"):
        return [] if _is_known(model) else ["type"]
    return missing + [name for name in ("embed", "head") if not callable(getattr(model, name, None))]


def family_of(model: nn.Module) -> Family:
    """How a model that lacks no part is taken apart."""
    return Transformers() if _is_known(model) else InOrder()


def _is_known(model: nn.Module) -> bool:
    """Whether it is a model of transformers, as `launcher.models.hf_causal_lm` makes it, of a type that is known."""
    return hasattr(model, "pretrained") and getattr(getattr(model, "config", None), "model_type", None) in CUT_TYPES
