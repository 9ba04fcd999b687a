"""Optimizers for large batches, whose steps depend on the norms of whole tensors, of sharded ones too."""

from launcher.optim.lamb import LAMB
from launcher.optim.lars import LARS

__all__ = ["LAMB", "LARS"]
