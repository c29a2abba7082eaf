"""Curves of metrics: block characters for a terminal, and PNG files."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

Curve = Sequence[tuple[float, float]]  # (step, value), in order of step

_BLOCKS = " ▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """Format values as one line of block characters, from the smallest to the largest finite value; gaps are blanks.

    More values than `width` are averaged in equal groups.
    """
    columns = _columns([(float(i), v) for i, v in enumerate(values)], width)
    finite = [value for value in columns if value is not None]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    blocks = []
    for value in columns:
        if value is None:
            blocks.append(_BLOCKS[0])
            continue
        # The smallest value still gets the lowest block, so that it differs from a gap.
        blocks.append(_BLOCKS[1 + round(_scale(value, low, high) * 7)])
    return "".join(blocks)


def text_curve(
    curve: Curve,
    title: str = "",
    *,
    width: int = 60,
    height: int = 8,
    low: float | None = None,
    high: float | None = None,
) -> str:
    """Plot one curve for a terminal. `low` and `high` fix the ends of the vertical axis."""
    if width < 2 or height < 2:
        raise ValueError(
            f"a plot needs a width and a height of at least 2, got {width} and {height}"
        )
    columns = _columns(curve, width)
    finite = [value for value in columns if value is not None]
    if not finite:
        return f"{title}: no finite values yet".strip(": ")
    low = min(finite) if low is None else low
    high = max(finite) if high is None else high
    if low == high:
        low, high = low - 0.5, high + 0.5
    # Height of each column in eighths of a line.
    eighths = []
    for value in columns:
        eighths.append(
            0 if value is None else max(1, round(_scale(value, low, high) * height * 8))
        )
    labels = {0: f"{high:.4g}", height - 1: f"{low:.4g}"}
    margin = max(len(label) for label in labels.values())
    lines = [title] if title else []
    for row in range(height):
        floor = (height - 1 - row) * 8
        cells = "".join(_BLOCKS[min(8, max(0, filled - floor))] for filled in eighths)
        lines.append(f"{labels.get(row, ''):>{margin}} ┤{cells}".rstrip())
    first = f"{curve[0][0]:g}"
    last = f"{curve[-1][0]:g}"
    gap = max(1, len(columns) - len(first) - len(last))
    lines.append(" " * margin + " └" + "─" * len(columns))
    lines.append(" " * (margin + 2) + first + " " * gap + last)
    return "\n".join(lines)


def plot_curves(
    curves: Mapping[str, Curve],
    path: str | os.PathLike[str],
    title: str = "",
    *,
    x_label: str = "step",
    columns: int = 2,
) -> Path:
    """Draw each named curve in its own panel and write a PNG. No display is needed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if not curves:
        raise ValueError("there is no curve to draw")
    columns = min(columns, len(curves))
    rows = math.ceil(len(curves) / columns)
    figure = Figure(figsize=(5.5 * columns, 3.2 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, columns, squeeze=False).flat
    for (name, curve), axes in zip(curves.items(), panels, strict=False):
        points = [(x, y) for x, y in curve if math.isfinite(y)]
        axes.plot(
            [x for x, _ in points],
            [y for _, y in points],
            marker="o",
            markersize=3,
            linewidth=1.5,
        )
        axes.set_title(name, fontsize=10)
        axes.set_xlabel(x_label, fontsize=9)
        axes.grid(True, alpha=0.3)
    for axes in list(panels):
        axes.set_axis_off()
    if title:
        figure.suptitle(title)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    figure.savefig(part, format="png", dpi=110)
    os.replace(part, path)
    return path


def _scale(value: float, low: float, high: float) -> float:
    """Map `value` from low..high to 0..1, clipped; 0.5 if both are equal."""
    if high == low:
        return 0.5
    return min(1.0, max(0.0, (value - low) / (high - low)))


def _columns(curve: Curve, width: int) -> list[float | None]:
    """Average at most `width` equal groups of points; None for a group without finite values."""
    count = len(curve)
    used = min(width, count)
    columns: list[float | None] = []
    for column in range(used):
        stretch = curve[column * count // used : (column + 1) * count // used]
        finite = [value for _, value in stretch if math.isfinite(value)]
        columns.append(sum(finite) / len(finite) if finite else None)
    return columns
