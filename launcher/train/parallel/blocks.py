"""The parts of a model that are sharded and recomputed as one block each."""

from collections.abc import Sequence

from torch import nn

from launcher.config.choices import StrategyName
from launcher.config.schema import StrategyConfig
from launcher.errors import ConfigError, nearest


def find_blocks(model: nn.Module, wrap: Sequence[str] | None) -> dict[str, nn.Module]:
    """The blocks of a model by name: its `layers`, or the outermost modules of the classes that `wrap` names.

    Empty where the model offers no `layers`, or `wrap` is empty: then the whole model is one block.

    Raises:
        ConfigError: no module has a class of that name.
    """
    if wrap is None:
        layers = getattr(model, "layers", None)
        if not isinstance(layers, nn.ModuleList):
            return {}
        # it may be registered under another name than the one it is offered by
        prefix = next((name for name, one in model.named_modules() if one is layers), "layers")
        return {f"{prefix}.{name}": one for name, one in layers.named_children()}
    named = {name: one for name, one in model.named_modules() if name}
    for wanted in wrap:
        if not any(wanted in _names(one) for one in named.values()):
            classes = sorted({type(one).__name__ for one in named.values()})
            hint = nearest(wanted, classes) or f"the model has {', '.join(classes)}"
            raise ConfigError("strategy.wrap", wanted, "no module of the model has this class", hint=hint)
    blocks: dict[str, nn.Module] = {}
    for name, module in named.items():  # a module comes before those inside it
        inside = any(name.startswith(f"{outer}.") for outer in blocks)
        if not inside and any(wanted in _names(module) for wanted in wrap):
            blocks[name] = module
    return blocks


def check_blocks(model: nn.Module, strategy: StrategyConfig) -> None:
    """That the strategy's blocks can be had. Raises ConfigError."""
    blocks = find_blocks(model, strategy.wrap)
    shared = shared_between_blocks(model, blocks)
    if strategy.name is StrategyName.fsdp and shared is not None:
        hint = "strategy.wrap=[] makes the model one block"
        raise ConfigError("strategy", "fsdp", f"blocks are sharded apart, and {shared}", hint=hint)


def _names(module: nn.Module) -> tuple[str, str]:
    kind = type(module)
    return kind.__name__, f"{kind.__module__}.{kind.__qualname__}"


def shared_between_blocks(model: nn.Module, blocks: dict[str, nn.Module]) -> str | None:
    """The first parameter that lies in more than one block, or in one and outside of it, in words; None: none does."""
    seen: dict[int, tuple[str, str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        block = next((one for one in blocks if name.startswith(f"{one}.")), "")
        first_name, first_block = seen.setdefault(id(parameter), (name, block))
        if first_block != block:
            return f"{name} is the same parameter as {first_name}"
    return None
