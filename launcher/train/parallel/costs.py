"""What the parts of a model cost, counted from their parameters: where a pipeline had best cut it."""

from collections.abc import Iterable

from torch import Tensor, nn


def part_costs(model: nn.Module) -> list[int]:
    """Multiply-adds a token of [what comes before the layers, each layer, what comes after]; [] without `layers`.

    Counted: the elements of a part's parameters of two or more dimensions, each once a part, on any device. That is
    what a linear layer costs. The rows of an embedding are looked up and cost nothing, unless another kind of module
    (a tied head) multiplies by them too. What lies outside the layers counts as what comes after. Attention's products
    of keys and queries grow with the length and are left out, a convolution's steps over its image too, and of a
    mixture all experts count.
    """
    layers = getattr(model, "layers", None)
    if not isinstance(layers, nn.ModuleList) or not len(layers):
        return []
    inside = {id(module) for layer in layers for module in layer.modules()}
    outside = [module for module in model.modules() if id(module) not in inside]
    return [0, *(_cost(layer.modules()) for layer in layers), _cost(outside)]


def _cost(modules: Iterable[nn.Module]) -> int:
    counted: dict[int, Tensor] = {}
    for module in modules:
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            continue
        counted |= {id(one): one for one in module.parameters(recurse=False) if one.ndim >= 2}
    return sum(one.numel() for one in counted.values())
