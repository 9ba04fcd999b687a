"""Accumulation in the warmup, in a dozen lines."""

from math import ceil

import numpy as np


def ultralytics(samples: int, epochs: int, batch: int, nominal: int, warmup: int) -> list[int]:
    """Windows, in batches, as its trainer accumulates them (engine/trainer.py), but that an epoch ends its last one."""
    per_epoch = ceil(samples / batch)
    nw, last, accumulate, found = warmup * per_epoch, -1, 1, []
    for epoch in range(epochs):
        for i in range(per_epoch):
            ni = i + per_epoch * epoch
            if ni <= nw:
                accumulate = max(1, int(np.interp(ni, [0, nw], [1, nominal / batch]).round()))
            if ni - last >= accumulate or i == per_epoch - 1:
                found.append(ni - last)
                last = ni
    return found
