"""The timetable of a pipeline as text and as a picture: a row for each rank, time from left to right."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.observe.plot import write_picture
from launcher.plan.timetable import DURATION, Placed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.patches import Patch

WIDTH = 80
MOST_BLOCKS = 6
"""The most blocks of rows one below the other."""
MOST_TIME = 200
"""What a picture shows at most, in forwards of one stage."""

KINDS = {
    "F": ("forward", "#1f77b4"),
    "B": ("backward", "#2ca02c"),
    "I": ("backward of the input", "#17a08a"),
    "W": ("backward of the weights", "#e08214"),
}
NARROWEST, WIDEST = 7.0, 26.0
"""The picture's width in inches."""
SMALLEST = 4
"""Numbers that would be smaller, in points, are left out."""

Table = Sequence[Sequence[Placed]]
"""For each pipeline rank what it does, and when."""
Colour = tuple[float, float, float]


def length(table: Table) -> int:
    """The time of the whole run, in forwards of one stage."""
    return max(row[-1].end for row in table)


def draw_text(table: Table, real: int) -> list[str]:
    """The table in lines of at most WIDTH characters, in blocks below each other, and what its letters mean.

    Args:
        real: micro-batches from this number on are copies that fill up.
    """
    per_rank = len({one.action.stage for one in table[0]})
    names = [f"rank {rank} " for rank in range(len(table))]
    margin = max(map(len, names))
    width = 1 + max(len(_word(one, per_rank)) for row in table for one in row)
    rows = ["".join(_slots(row, length(table), width, per_rank)) for row in table]
    slots = max(1, (WIDTH - margin) // width)
    shown = min(length(table), slots * MOST_BLOCKS)
    lines = []
    for start in range(0, shown, slots):
        lines += [""] if start else []
        end = min(start + slots, shown)
        times = "".join(f"{time:<{width}}" if time % 5 == 0 else " " * width for time in range(start, end))
        lines.append(f"{'time':<{margin}}{times}".rstrip())
        parts = [row[start * width : end * width] for row in rows]
        lines += [f"{name:<{margin}}{part}".rstrip() for name, part in zip(names, parts, strict=True)]
    if shown < length(table):
        lines += ["", f"… and {length(table) - shown} more of {length(table)}; the picture shows more"]
    return [*lines, "", *_legend(table, per_rank, real)]


def _word(one: Placed, per_rank: int) -> str:
    kind, stage, micro_batch = one.action
    return f"{stage if per_rank > 1 else ''}{kind}{micro_batch}"


def _slots(row: Sequence[Placed], total: int, width: int, per_rank: int) -> list[str]:
    """One text of `width` characters for each unit of time."""
    slots = [f"{'.':<{width}}"] * total
    for one in row:
        line = f"{_word(one, per_rank):-<{width * (one.end - one.start) - 1}} "
        for index in range(one.start, one.end):
            offset = (index - one.start) * width
            slots[index] = line[offset : offset + width]
    return slots


def _legend(table: Table, per_rank: int, real: int) -> list[str]:
    kinds = {one.action.kind for row in table for one in row}
    lines = [f"{kind}  {name}, {DURATION[kind]} of time" for kind, (name, _) in KINDS.items() if kind in kinds]
    lines.append(
        "number after it: the micro-batch; before it: the stage" if per_rank > 1 else "number: the micro-batch"
    )
    last = max(one.action.micro_batch for row in table for one in row)
    if last >= real:
        lines.append(f"micro-batches from {real} on are masked copies that fill up")
    return lines


def draw_picture(table: Table, out_path: Path, *, title: str, real: int) -> None:
    """Draws the table as a PNG, whole or not at all: kinds by colour, the stages of a rank by shade, copies hatched.

    Raises:
        StorageError: the file can't be written.
    """
    from matplotlib.figure import Figure

    shown = min(length(table), MOST_TIME)
    inches = min(max(NARROWEST, 1.6 + 0.28 * shown), WIDEST)
    figure = Figure(figsize=(inches, 1.9 + 0.42 * len(table)), dpi=130, layout="constrained")
    axes = figure.add_subplot()
    _draw_rows(axes, table, shown, real, size=_font_size(table, 72 * (inches - 1.6) / shown))
    if shown < length(table):
        title += f" (the first {shown} of {length(table)})"
    figure.suptitle(title, parse_math=False, fontsize=12)
    _label(axes, len(table), shown)
    handles = _handles(table, real)
    columns = max(1, min(len(handles), int(inches / 2.4)))
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
    content = io.BytesIO()
    figure.savefig(content, format="png")
    write_picture(out_path, content.getvalue())


def _draw_rows(axes: "Axes", table: Table, shown: int, real: int, *, size: float) -> None:
    for rank, row in enumerate(table):
        stages = sorted({one.action.stage for one in row})
        alike: dict[tuple[str, int, bool], list[Placed]] = {}
        for one in (one for one in row if one.start < shown):
            kind, stage, micro_batch = one.action
            alike.setdefault((kind, stages.index(stage), micro_batch >= real), []).append(one)
        for (kind, index, is_copy), cells in alike.items():
            white = _whiteness(index, len(stages))
            _draw_cells(axes, cells, rank, _mixed(KINDS[kind][1], white), is_copy=is_copy)
            color = "black" if is_copy or white > 0.5 else "white"
            for one in cells if size >= SMALLEST else ():
                _write_number(axes, one, rank, size=size, color=color, is_copy=is_copy)


def _draw_cells(axes: "Axes", cells: Sequence[Placed], rank: int, colour: Colour, *, is_copy: bool) -> None:
    axes.broken_barh(
        [(one.start, one.end - one.start) for one in cells],
        (rank - 0.42, 0.84),
        facecolor="white" if is_copy else colour,
        edgecolor=colour if is_copy else "white",
        hatch="////" if is_copy else None,
        linewidth=0.8,
    )


def _write_number(axes: "Axes", one: Placed, rank: int, *, size: float, color: str, is_copy: bool) -> None:
    middle, number = (one.start + one.end) / 2, str(one.action.micro_batch)
    text = axes.text(middle, rank, number, ha="center", va="center", fontsize=size, color=color, clip_on=True)
    text.set_in_layout(False)  # it lies inside the axes, and measuring each would take seconds
    if is_copy:
        text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.8})


def _font_size(table: Table, points: float) -> float:
    """The size at which the longest number fits into so many points."""
    last = max(one.action.micro_batch for row in table for one in row)
    return min(9.0, 1.4 * points / len(str(last)))


def _draw_cell(axes: "Axes", one: Placed, rank: int, white: float, *, is_copy: bool) -> None:
    from matplotlib.patches import Rectangle

    colour = _mixed(KINDS[one.action.kind][1], white)
    axes.add_patch(
        Rectangle(
            (one.start, rank - 0.42),
            one.end - one.start,
            0.84,
            facecolor="white" if is_copy else colour,
            edgecolor=colour if is_copy else "white",
            hatch="////" if is_copy else None,
            linewidth=0.8,
        )
    )


def _whiteness(index: int, stages: int) -> float:
    """How pale the stage of a rank is: the first is not at all."""
    return 0.62 * index / max(1, stages - 1)


def _mixed(colour: str, white: float) -> Colour:
    """A colour with a share of white in it."""
    from matplotlib.colors import to_rgb

    red, green, blue = (part + (1 - part) * white for part in to_rgb(colour))
    return red, green, blue


def _label(axes: "Axes", ranks: int, shown: int) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlim(0, shown)
    axes.set_ylim(ranks - 0.5, -0.5)
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=20))
    axes.set_xlabel("time, in forwards of one stage")
    axes.set_ylabel("pipeline rank")
    axes.set_facecolor("#f0f0f0")
    axes.spines[["top", "right"]].set_visible(False)


def _handles(table: Table, real: int) -> list["Patch"]:
    from matplotlib.patches import Patch

    kinds = {one.action.kind for row in table for one in row}
    per_rank = len({one.action.stage for one in table[0]})
    handles = [Patch(facecolor=colour, label=name) for kind, (name, colour) in KINDS.items() if kind in kinds]
    if per_rank > 1:
        shades = [_mixed("#404040", _whiteness(index, per_rank)) for index in range(per_rank)]
        handles += [
            Patch(facecolor=one, label=f"{_ordinal(index)} stage of the rank") for index, one in enumerate(shades)
        ]
    if any(one.action.micro_batch >= real for row in table for one in row):
        handles.append(Patch(facecolor="white", edgecolor="gray", hatch="////", label="copies that fill up"))
    handles.append(Patch(facecolor="#f0f0f0", edgecolor="lightgray", label="waiting"))
    return handles


def _ordinal(index: int) -> str:
    return ("first", "second", "third")[index] if index < 3 else f"{index + 1}th"
