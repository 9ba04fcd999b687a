"""What all axes of a report have in common."""

from typing import TYPE_CHECKING

from launcher.observe.plot import scale_losses

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def finish(axes: "Axes", x: str, y: str) -> None:
    """Labels, a grid, and a logarithmic axis for losses that need it."""
    scale_losses(axes)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def use_thousands(axes: "Axes", unit: float = 1) -> None:
    """Numbers along the axis as in 10,000, in a unit of so much."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    low, high = axes.get_xlim()
    ticks = MaxNLocator(6).tick_values(low / unit, high / unit)
    axes.set_xticks([float(tick) * unit for tick in ticks if low <= tick * unit <= high])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / unit:,.10g}"))


def name_lines(axes: "Axes") -> None:
    """A legend of what has a label, inside the axes."""
    if axes.get_legend_handles_labels()[1]:
        for text in axes.legend(fontsize=8, framealpha=0.8, edgecolor="none").get_texts():
            text.set_parse_math(False)
