"""Batch norm where a window lies over micro-batches and ranks.

A training forward works from the statistics of its own micro-batch and never reads the running ones, so nothing that
`buffers` does to them changes how parameters are trained; it decides what validation and the saved model see.
"""

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def batch_norms(model: nn.Module) -> list[_BatchNorm]:
    """The batch norms of a model, of any dimension and SyncBatchNorm too."""
    return [module for module in model.modules() if isinstance(module, _BatchNorm)]
