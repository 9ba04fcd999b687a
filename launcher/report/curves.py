"""The loss over a run, against samples and against time."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from launcher.report.axes import finish, use_thousands
from launcher.report.group import Configuration
from launcher.report.read import Curve
from launcher.report.verdict import Verdict, shown_curve

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

LINES = ("-", "--", ":", "-.")
MOST_NAMED = 24
"""Entries of a legend."""


def draw_curves(samples: "Axes", seconds: "Axes", verdict: Verdict) -> "list[Line2D]":
    """Draws each run thin and the mean of a configuration's seeds thick, and returns what a legend names."""
    looks = _looks(verdict)
    for one in verdict.family.configurations:
        curves = [curve for run in one.runs if (curve := shown_curve(run, verdict.kind)).losses]
        for curve in curves:
            _plot(samples, seconds, curve, linewidth=0.7, alpha=0.4, **looks[one])
        # without those that ended early, where there are others
        averaged = [curve for run in one.counted(verdict.kind) if (curve := shown_curve(run, verdict.kind)).losses]
        if curves:
            _plot(samples, seconds, mean_curve(averaged or curves), linewidth=1.8, **looks[one])
    unit, length = _unit(verdict)
    for axes, label in ((samples, "samples seen"), (seconds, f"training time ({unit})")):
        if verdict.target is not None:
            axes.axhline(verdict.target, **_TARGET)
        smooth = ", smoothed" if verdict.kind == "training" else ""
        finish(axes, label, f"{verdict.kind} loss{smooth}")
        use_thousands(axes, length if axes is seconds else 1)
    return _named(verdict, looks)


def _unit(verdict: Verdict) -> tuple[str, float]:
    """What long and short trainings are measured in, and how many seconds that is."""
    longest = max((run.seconds for one in verdict.family.configurations for run in one.runs), default=0)
    return next(
        (
            (name, length)
            for name, length, least in (("hours", 3600, 4), ("minutes", 60, 10))
            if longest > least * length
        ),
        ("seconds", 1),
    )


_TARGET: dict[str, Any] = {"color": "black", "linestyle": (0, (1, 2)), "linewidth": 1}


def _plot(samples: "Axes", seconds: "Axes", curve: Curve, **look: Any) -> None:
    marker = "." if len(curve.losses) == 1 else None
    samples.plot(curve.samples, curve.losses, marker=marker, **look)
    seconds.plot(curve.seconds, curve.losses, marker=marker, **look)


def _looks(verdict: Verdict) -> dict[Configuration, dict[str, Any]]:
    """A colour for each batch, dark for small ones, and a line for each way of training; with one batch a colour for
    each of those."""
    from matplotlib import colormaps

    family, shades = verdict.family, colormaps["viridis"]
    batches, ways = family.batches, list(dict.fromkeys(one.tuning for one in family.configurations))
    looks: dict[Configuration, dict[str, Any]] = {}
    for one in family.configurations:
        batch, way = batches.index(one.batch) if one.batch is not None else 0, ways.index(one.tuning)
        index, count, line = (batch, len(batches), way) if len(batches) > 1 else (way, len(ways), 0)
        looks[one] = {"color": shades(0.9 * index / max(1, count - 1)), "linestyle": LINES[line % len(LINES)]}
    return looks


def _named(verdict: Verdict, looks: dict[Configuration, dict[str, Any]]) -> "list[Line2D]":
    from matplotlib.lines import Line2D

    configurations, has_batches = verdict.family.configurations, len(verdict.family.batches) > 1
    ways = {one.tuning: looks[one] for one in configurations}
    batches = {one.batch: looks[one] for one in configurations if one.batch is not None}
    named = []
    for batch in sorted(batches) if has_batches else ():
        named.append(Line2D([], [], color=batches[batch]["color"], linewidth=1.8, label=f"batch {batch}"))
    for way, look in ways.items() if len(ways) > 1 else ():
        shown = look | ({"color": "black"} if has_batches else {})
        named.append(Line2D([], [], linewidth=1.8, label=" ".join(way) or "as configured", **shown))
    named = named[:MOST_NAMED]
    if verdict.target is not None:
        named.append(Line2D([], [], label=f"target {verdict.target:.5g}", **_TARGET))
    return named


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """The mean of curves over the updates that all of them have."""
    columns = [
        {update: rest for update, *rest in zip(one.updates, one.samples, one.seconds, one.losses, strict=True)}
        for one in curves
    ]
    common = sorted(set(columns[0]).intersection(*columns))
    if not common:
        return Curve()
    means = [[sum(its) / len(its) for its in zip(*(one[at] for one in columns), strict=True)] for at in common]
    samples, seconds, losses = zip(*means, strict=True)
    return Curve(tuple(common), samples, seconds, losses)
