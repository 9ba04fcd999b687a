"""The pictures of a report: loss against samples and time, and the final loss against batch and learning rate."""

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from launcher.report.curves import draw_curves
from launcher.report.finals import draw_batches, draw_rates
from launcher.report.verdict import Verdict

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_DRAWN = 8
"""Families that are drawn, one below the other."""
COLUMNS = 2
FEWEST_RATES = 3
"""Learning rates at one batch from which on the loss is drawn against them."""


def draw(verdicts: Sequence[Verdict], title: str) -> bytes:
    """A PNG with pictures of each of the first families."""
    from matplotlib.figure import Figure

    shown = verdicts[:MOST_DRAWN]
    heights = [-(-_panels(one) // COLUMNS) * 4.2 + 0.8 for one in shown]
    figure = Figure(figsize=(11, sum(heights) + 0.4), dpi=110, layout="constrained")
    figure.suptitle(title, parse_math=False, fontsize=13)
    parts: Any = figure.subfigures(len(shown), 1, squeeze=False, height_ratios=heights)
    for part, verdict in zip(parts[:, 0], shown, strict=True):
        _draw_family(part, verdict)
    content = io.BytesIO()
    figure.savefig(content, format="png")
    return content.getvalue()


def _panels(verdict: Verdict) -> int:
    return 2 + _has_batches(verdict) + _has_rates(verdict)


def _has_batches(verdict: Verdict) -> bool:
    return len(verdict.family.batches) > 1


def _has_rates(verdict: Verdict) -> bool:
    """Whether enough learning rates were tried at one batch."""
    rates: dict[int | None, set[float]] = {}
    for one in verdict.family.configurations:
        rates.setdefault(one.batch, set()).update(run.lr for run in one.runs if run.lr is not None)
    return any(len(its) >= FEWEST_RATES for its in rates.values())


def _draw_family(figure: Any, verdict: Verdict) -> None:
    count = _panels(verdict)
    grid = figure.add_gridspec(-(-count // COLUMNS), COLUMNS)
    places = [grid[index // COLUMNS, index % COLUMNS] for index in range(count)]
    if count % COLUMNS:
        places[-1] = grid[-1, :]
    axes: list[Axes] = [figure.add_subplot(place) for place in places]
    if verdict.family.training:
        figure.suptitle(" ".join(verdict.family.training), parse_math=False, fontsize=11)
    named = draw_curves(axes[0], axes[1], verdict)
    rest = iter(axes[2:])
    if _has_batches(verdict):
        draw_batches(next(rest), verdict)
    if _has_rates(verdict):
        draw_rates(next(rest), verdict)
    if named:
        widest = max(len(str(one.get_label())) for one in named)
        legend = figure.legend(
            handles=named, loc="outside lower center", ncols=max(1, min(len(named), 130 // (widest + 7))), fontsize=9
        )
        for text in legend.get_texts():
            text.set_parse_math(False)
