"""The critical batch as runs have measured it by their gradients' noise."""

import math
from collections.abc import Sequence

from launcher.observe.text import value_text
from launcher.report.group import Configuration
from launcher.report.noise import Sample

CRITICAL = (
    "The critical batch is the simple noise scale of McCandlish et al. (An Empirical Model of Large-Batch Training, "
    "2018): the variance of a sample's gradient over the square of the mean gradient. It is the last that a run could "
    "tell, which may lie before its end where little signal is left there. By their model a batch as large takes twice "
    "the updates of the largest and twice the samples of the smallest. It is a mean over seeds, ± the larger of its "
    "two standard errors: by the runs' own, and by how the seeds differ."
)


def critical_batch(one: Configuration) -> tuple[float, float] | None:
    """The mean over a configuration's runs, in samples, and its standard error. None: none has measured it."""
    found = [run.critical_batch for run in one.runs if run.critical_batch is not None]
    if not found:
        return None
    seeds = Sample(tuple(batch for batch, _ in found))
    own = math.sqrt(math.fsum(error**2 for _, error in found)) / len(found)
    return seeds.mean, max(own, seeds.standard_error or 0.0)


def of_critical_batches(configurations: Sequence[Configuration]) -> list[str]:
    """What was measured at each batch, in one line; []: nothing was."""
    said = []
    for one in configurations:
        found = critical_batch(one)
        if found is not None:
            setting = f" with {' '.join(one.tuning)}" if one.tuning else ""
            said.append(f"{value_text(*found)} at batch {one.batch}{setting}")
    return [f"Critical batch, by the noise of the gradients: {'; '.join(said)}."] if said else []
