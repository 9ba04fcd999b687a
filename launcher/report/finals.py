"""The final loss against the batch and against the learning rate."""

from typing import TYPE_CHECKING, Any

from launcher.observe.plot import needs_log
from launcher.report.axes import finish, name_lines
from launcher.report.noise import Sample
from launcher.report.verdict import Judgement, Series, Verdict

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARKERS = ("o", "s", "D", "^", "v", "P")
ROOM = 3.0
"""How far above the losses that hold the picture goes, in heights of those: one far above would flatten them all."""
DECADES = 2.0
"""The same where the axis is logarithmic, in powers of ten."""


def draw_batches(axes: "Axes", verdict: Verdict) -> None:
    """Final losses against the batch, the band of the reference, and up to where the noise explains a difference."""
    sample = verdict.sample
    top = None if sample is None else _top(verdict, sample)
    if sample is not None:
        _draw_band(axes, verdict, sample)
    for index, series in enumerate(verdict.series):
        _draw_series(axes, series, index, top)
    if sample is not None:
        _draw_limits(axes, verdict, sample.mean)
    batches = verdict.family.batches
    axes.set_xscale("log", base=2)
    axes.minorticks_off()
    axes.set_xticks(batches, [f"{one:,}" for one in batches])
    space = (batches[-1] / batches[0]) ** 0.08
    axes.set_xlim(batches[0] / space, batches[-1] * space)
    finish(axes, "global batch size (samples)", f"final {verdict.kind} loss")
    if top is not None:
        axes.set_ylim(top=top)
    name_lines(axes)


def _top(verdict: Verdict, sample: Sample) -> float | None:
    """Where the picture ends above; None: it shows everything."""
    good = (Judgement.reference, Judgement.holds)
    judged = [one for series in verdict.series for one in series.judged]
    values = [*sample.values]
    values += [value for one in judged if one.sample and one.judgement in good for value in one.sample.values]
    values += [sample.mean + one.comparison.margin for one in judged if one.comparison and one.comparison.margin]
    height = max(values) - min(values)
    means = [one.sample.mean for one in judged if one.sample]
    is_log = needs_log([min([*values, *means]), *means])
    top = max(values) * 10**DECADES if is_log else max(values) + ROOM * height
    return top if height > 0 and max(means, default=top) > top else None


def _draw_band(axes: "Axes", verdict: Verdict, sample: Sample) -> None:
    error = sample.standard_error
    name = f"batch {verdict.family.reference_batch}" + ("" if error is None else ", mean ± standard error")
    axes.axhline(sample.mean, color="tab:gray", linewidth=1, label=name)
    if error is not None:
        axes.axhspan(sample.mean - error, sample.mean + error, color="tab:gray", alpha=0.2, linewidth=0)


def _draw_series(axes: "Axes", series: Series, index: int, top: float | None) -> None:
    colour, marker = f"C{index}", MARKERS[index % len(MARKERS)]
    drawn = []
    for one in series.judged:
        sample, batch, diverged = one.sample, one.configuration.batch or 1, one.judgement is Judgement.diverged
        if diverged or (sample is not None and top is not None and sample.mean > top):
            said = "diverged" if diverged or sample is None else f"{sample.mean:.3g} ↑"
            place: Any = {"xy": (batch, 1.0), "xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
            axes.annotate(said, xytext=(0, -4 - 11 * index), color=colour, fontsize=8, ha="center", va="top", **place)
        elif sample is not None:
            drawn.append((batch, sample))
            axes.plot([batch] * sample.n, sample.values, ".", color=colour, alpha=0.35, markersize=4, zorder=2)
            if one.judgement is Judgement.higher:
                axes.plot([batch], [sample.mean], marker, color="white", markeredgecolor=colour, markersize=6, zorder=4)
    if drawn:
        xs, ys = [batch for batch, _ in drawn], [sample.mean for _, sample in drawn]
        errors = [sample.standard_error or 0.0 for _, sample in drawn]
        style: Any = {"color": colour, "marker": marker, "markersize": 6, "linewidth": 1.3, "capsize": 3, "zorder": 3}
        axes.errorbar(xs, ys, yerr=errors, label=" ".join(series.scaling) or "mean ± standard error", **style)


def _draw_limits(axes: "Axes", verdict: Verdict, base: float) -> None:
    """A mark for each batch up to which its loss would hold."""
    unmarked = (Judgement.reference, Judgement.smaller)
    judged = [one for series in verdict.series for one in series.judged if one.judgement not in unmarked]
    limits = [
        (one.configuration.batch or 1, base + one.comparison.margin)
        for one in judged
        if one.comparison is not None and one.comparison.margin is not None
    ]
    if limits:
        xs, ys = zip(*limits, strict=True)
        axes.plot(xs, ys, "_", color="black", markersize=14, label="holds up to here")


def draw_rates(axes: "Axes", verdict: Verdict) -> None:
    """Final losses against the learning rate, a line for each batch."""
    from matplotlib import colormaps

    batches = verdict.family.batches
    for index, batch in enumerate(batches):
        points = []
        for one in verdict.family.configurations:
            rate = next((run.lr for run in one.runs if run.lr), None)
            sample = one.sample(verdict.kind)
            if one.batch == batch and rate is not None and sample is not None and not one.diverged(verdict.kind):
                points.append((rate, sample.mean, sample.standard_error or 0.0))
        if points:
            xs, means, errors = zip(*sorted(points), strict=True)
            colour = colormaps["viridis"](0.9 * index / max(1, len(batches) - 1))
            axes.errorbar(xs, means, yerr=errors, color=colour, marker="o", capsize=3, label=f"batch {batch}")
    axes.set_xscale("log")
    rates = sorted({run.lr for one in verdict.family.configurations for run in one.runs if run.lr})
    if len(rates) <= 8:
        axes.set_xticks(rates, [f"{one:.3g}" for one in rates])
        axes.minorticks_off()
    finish(axes, "peak learning rate", f"final {verdict.kind} loss, mean ± standard error")
    name_lines(axes)
