"""What every random draw is seeded by, so that none depends on the layout or on history (promise 7 of INTERFACE)."""

import random

import numpy as np
import torch

# The first word of each seed keeps the streams of different uses apart.
_ORDER, _SAMPLE, _MICRO_BATCH = 1, 2, 3


def epoch_order(seed: int, epoch: int, samples: int, *, shuffle: bool) -> np.ndarray:
    """The order of the samples in an epoch (from 0): int64 [samples], from (seed, epoch) alone."""
    if not shuffle:
        return np.arange(samples)
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([_ORDER, seed, epoch]))).permutation(samples)


def seed_sample(seed: int, epoch: int, index: int) -> None:
    """Seeds Python's, NumPy's and torch's CPU generators for the reading of one sample."""
    words = np.random.SeedSequence([_SAMPLE, seed, epoch, index]).generate_state(4)
    random.seed(int(words[0]))
    np.random.seed(int(words[1]))
    torch.default_generator.manual_seed(int(words[2]) << 32 | int(words[3]))


def seed_micro_batch(seed: int, update: int, rank: int, step: int, *, stage: int = 0) -> None:
    """Seeds Python's, NumPy's and torch's generators (CPU and CUDA) for one forward: dropout and what else is drawn."""
    words = np.random.SeedSequence([_MICRO_BATCH, seed, update, rank, step, *[stage] * (stage > 0)]).generate_state(2)
    word = int(words[0]) << 32 | int(words[1])
    random.seed(word)
    np.random.seed(int(words[0]))
    torch.default_generator.manual_seed(word)
    # not torch.manual_seed: it formats a stack trace for every kind of device that has not started yet, each time
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(word)


def seed_model(seed: int) -> None:
    """Seeds the generators for the initial weights, which depend on the run's seed alone."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
