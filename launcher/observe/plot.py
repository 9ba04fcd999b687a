"""The loss of a run as a picture."""

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.errors import StorageError
from launcher.observe.records import read_metrics
from launcher.run_dir import writing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SMOOTHED = 25
"""The smoothed line is a mean over about this part of the updates."""
LOG_FROM = 30
"""The loss has a logarithmic axis from this ratio of its largest to its smallest value on."""


def draw_loss(
    metrics_path: Path, out_path: Path, *, baseline: float | None, title: str, unit: str = "weighted mean"
) -> None:
    """Draws training and validation loss over the updates as a PNG, whole or not at all.

    Args:
        baseline: the loss of the best constant guess, drawn as a line; None: no line.
        unit: what the loss is measured in, such as ``nats per token``.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    train, validation = read_metrics(metrics_path)
    _draw_train(axes, *_points(train))
    updates, losses = _points(validation)
    if updates:
        label = f"validation, last {losses[-1]:.4g}"
        axes.plot(updates, losses, "o-", color="tab:orange", markersize=5, linewidth=1.2, label=label, zorder=4)
    if baseline is not None:
        label = f"unigram or majority guess {baseline:.4g}"
        axes.axhline(baseline, color="tab:gray", linestyle="--", linewidth=1.2, label=label)
    _label(axes, title, unit)
    content = io.BytesIO()
    figure.savefig(content, format="png")
    write_picture(out_path, content.getvalue())


def try_to_draw(metrics_path: Path, out_path: Path, **how: Any) -> str | None:
    """`draw_loss`, which no run may fail by. Returns what went wrong, or None."""
    try:
        draw_loss(metrics_path, out_path, **how)
    except Exception as error:
        text = str(error).strip().splitlines()
        said = (
            text[0] if isinstance(error, StorageError) else f"{out_path}: {type(error).__name__}: {''.join(text[:1])}"
        )
        print(f"picture: {said}", flush=True)
        return said
    return None


def _points(records: list[dict[str, Any]]) -> tuple[list[int], list[float]]:
    """Updates and losses of those records whose loss was finite."""
    finite = [one for one in records if isinstance(one.get("loss"), int | float)]
    return [int(one["update"]) for one in finite], [float(one["loss"]) for one in finite]


def _draw_train(axes: "Axes", updates: list[int], losses: list[float]) -> None:
    if not updates:
        return
    width = smoothing_width(len(losses))
    if width == 1:
        axes.plot(updates, losses, color="tab:blue", linewidth=1.5, marker=".", label="training")
        return
    axes.plot(updates, losses, color="tab:blue", linewidth=0.7, alpha=0.4, label="training, each update")
    label = f"training, mean of {width} updates"
    axes.plot(updates, smoothed(losses), color="tab:blue", linewidth=1.8, label=label, zorder=3)


def smoothing_width(count: int) -> int:
    """The number of values that each of `count` is smoothed over, an odd one."""
    return max(1, round(count / SMOOTHED)) | 1


def smoothed(values: Sequence[float]) -> list[float]:
    """The mean of `smoothing_width` values around each; at both ends of as many as there are on both sides."""
    width = smoothing_width(len(values))
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    means = []
    for index in range(len(values)):
        reach = min(width // 2, index, len(values) - 1 - index)
        low, high = index - reach, index + reach + 1
        means.append((sums[high] - sums[low]) / (high - low))
    return means


def needs_log(values: Sequence[float]) -> bool:
    """Whether losses are so far apart that only a logarithmic axis shows them all."""
    return bool(values) and min(values) > 0 and max(values) / min(values) > LOG_FROM


def scale_losses(axes: "Axes") -> None:
    """A logarithmic axis for losses that need it, with plain numbers along it."""
    import numpy as np
    from matplotlib.ticker import FuncFormatter, LogLocator

    drawn = [value for line in axes.get_lines() for value in np.asarray(line.get_ydata(), dtype=float).tolist()]
    if not needs_log([value for value in drawn if np.isfinite(value)]):
        return
    axes.set_yscale("log")
    axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    plain = FuncFormatter(lambda value, _: f"{value:.10g}")
    axes.yaxis.set_major_formatter(plain)
    axes.yaxis.set_minor_formatter(plain)


def _label(axes: "Axes", title: str, unit: str) -> None:
    from matplotlib.ticker import MaxNLocator

    scale_losses(axes)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("update")
    axes.set_ylabel(f"loss ({unit})", parse_math=False)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    # a run's name may hold a dollar sign
    axes.figure.suptitle(title, parse_math=False, fontsize=12)
    if axes.get_lines():
        # above the axes, where no curve can run through it
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False, fontsize=9)


def write_picture(path: Path, content: bytes) -> None:
    """Writes a file whole or not at all. Raises StorageError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with writing(path):
        try:
            temporary.write_bytes(content)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
