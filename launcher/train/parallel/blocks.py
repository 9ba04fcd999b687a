"""The parts of a model that are sharded and recomputed as one block each."""

from collections.abc import Sequence

from torch import nn

from launcher.config.choices import StrategyName
from launcher.config.parallel import StrategyConfig
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
    """That the strategy's blocks can be had, and that it can spread the model's parameters. Raises ConfigError."""
    blocks = find_blocks(model, strategy.wrap)
    for name, block in blocks.items():
        if type(block).forward is nn.Module.forward:
            problem = f"'{name}' has no forward of its own"
            raise ConfigError("strategy.wrap", type(block).__name__, problem, hint="name the class of what lies inside")
    if not strategy.name.shards:
        return
    _check_shapes(model, strategy.name.value)
    if strategy.name not in (StrategyName.fsdp, StrategyName.zero3):
        return
    _check_references(model, strategy.name.value)
    shared = shared_between_blocks(model, blocks)
    if strategy.name is StrategyName.fsdp and shared is not None:
        hint = "strategy.wrap=[] makes the model one block"
        raise ConfigError("strategy", "fsdp", f"blocks are sharded apart, and {shared}", hint=hint)


def _check_shapes(model: nn.Module, strategy: str) -> None:
    for name, parameter in model.named_parameters():
        if parameter.ndim == 0 or parameter.numel() == 0:
            what = "a single number without a dimension" if parameter.ndim == 0 else "empty"
            problem = f"can't divide the parameter '{name}', which is {what}"
            raise ConfigError("strategy", strategy, problem, hint="give it the shape [1] or more, or strategy=ddp")
        if strategy == "fsdp" and (parameter._backward_hooks or parameter._post_accumulate_grad_hooks):
            problem = f"puts parts in the place of parameters, and the gradient hook of '{name}' would be lost"
            raise ConfigError("strategy", strategy, problem, hint="strategy=ddp")


def _check_references(model: nn.Module, strategy: str) -> None:
    """That no module holds a parameter in an attribute that isn't one: it would keep the whole, stale tensor."""
    names = {id(one): name for name, one in model.named_parameters()}
    for prefix, module in model.named_modules():
        if isinstance(module, nn.RNNBase):  # keeps its own list up to date
            continue
        for key, value in vars(module).items():
            if key in ("_parameters", "_modules", "_buffers"):
                continue
            values = (
                value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
            )
            held = next((one for one in values if isinstance(one, nn.Parameter) and id(one) in names), None)
            if held is not None:
                where = f"{prefix}.{key}".lstrip(".")
                problem = f"puts parts in the place of parameters, and '{where}' would still hold '{names[id(held)]}'"
                hint = "look the parameter up where it is registered, or strategy=ddp"
                raise ConfigError("strategy", strategy, problem, hint=hint)


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
