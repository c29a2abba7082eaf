"""Draw a plan: placement of the roles, traffic of a reshard, memory of a GPU, and the predicted step."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megaverl.planner.job import GB, PlannedJob
from megaverl.planner.memory import phases_of
from megaverl.planner.report import (
    Capacity,
    memory_over_time,
    nodes_text,
    num_nodes,
    parts_of,
)
from megaverl.planner.stages import MORE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_RANKS = 64  # larger jobs are drawn by nodes instead of ranks
NEW_LINE = "\n"
MOST_NAMED = 16  # larger matrices have no numbers in their cells
# Okabe and Ito's palette, which colour-blind readers can tell apart.
COLOURS = {
    "training": "#0072B2",
    "frozen": "#56B4E9",
    "engine weights": "#D55E00",
    "KV cache": "#E69F00",
    "activations": "#009E73",
    "buckets": "#CC79A7",
    "fields": "#F0E442",
}
STEP_COLOURS = (
    "#D55E00",
    "#CC79A7",
    "#56B4E9",
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#F0E442",
    "#999999",
    "#7A4A1E",
)
MOST_LANES, PALE = 24, "#d9d9d9"
GREYS = (0.85, 0.35)  # grey levels of the reserve's first and last part


def draw(capacity: Capacity, path: str | os.PathLike[str]) -> Path:
    """Write the picture as SVG or PNG, according to the suffix of `path`.

    The file is replaced atomically.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    job = capacity.job
    predicted = capacity.prediction is not None
    figure = Figure(figsize=(15, 17 if predicted else 10.5), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(
        f"{job.config.run.name}: {job.world:,} ranks on {nodes_text(job)}, actor {job.actor.grid}, "
        f"vLLM tp{job.rollout.tp} x {job.rollout.num_engines}",
        fontsize=14,
    )
    heights = (1.25, 1, 0.8, 0.5) if predicted else (1.25, 1)
    grid = figure.add_gridspec(
        len(heights), 2, width_ratios=(1, 1.15), height_ratios=heights
    )
    panels = [
        [figure.add_subplot(grid[row, column]) for column in range(2)]
        for row in range(2)
    ]
    if predicted:
        step = figure.add_subplot(grid[2, :])
        ranks = _step(step, capacity)
        _held(figure.add_subplot(grid[3, :], sharex=step), capacity, ranks)
    _placement(panels[0][0], capacity)
    _who_to_whom(figure, panels[0][1], capacity)
    _fill(panels[1][0], capacity)
    _bytes_by_rank(panels[1][1], capacity)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    figure.savefig(part, format=path.suffix.removeprefix("."), dpi=110)
    os.replace(part, path)
    return path


def _step(axes: Axes, capacity: Capacity) -> list[int]:
    """Draw the predicted step like the report of a run: one row for each role and pipeline stage.

    Bars show which operator runs when, and lines show when an engine sleeps or wakes.

    Returns:
        The ranks that have a row.
    """
    prediction = capacity.prediction
    assert prediction is not None
    rows: dict[tuple[str, int], list[tuple[str, float, float]]] = {}
    for phase in prediction.phases:
        lanes = phase.lanes or ((phase.name, phase.ranks[0], phase.begin, phase.end),)
        for label, rank, begin, end in lanes:
            rows.setdefault((phase.role, rank), []).append((label, begin, end))
    names = list(dict.fromkeys(label for bars in rows.values() for label, _, _ in bars))
    colours = {
        name: STEP_COLOURS[number % len(STEP_COLOURS)]
        for number, name in enumerate(names)
    } | {MORE: PALE}
    for number, bars in enumerate(list(rows.values())[:MOST_LANES]):
        for label, begin, end in bars:
            # An outline keeps phases visible that take almost no time.
            width = 1.5 if label in ("sleep", "wake") else 0
            paint: dict[str, Any] = {
                "color": colours[label],
                "edgecolor": colours[label],
                "linewidth": width,
            }
            axes.barh(number, end - begin, left=begin, height=0.75, **paint)
    several = len({rank for _, rank in rows}) > 1
    labels = [
        f"{role} · {rank}" if several else role
        for role, rank in list(rows)[:MOST_LANES]
    ]
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.set_title(
        f"a step, predicted: {prediction.step_seconds:.1f} s, "
        f"{prediction.tokens_per_second_per_gpu:,.0f} tokens/s/GPU, MFU {prediction.mfu:.1%} "
        "(a row for each role and the first rank of each of its stages)"
    )
    handles = [axes.barh(0, 0, color=colours[name]) for name in names]
    axes.legend(
        handles, names, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False
    )
    return sorted({rank for _, rank in list(rows)[:MOST_LANES]})


def _held(axes: Axes, capacity: Capacity, ranks: Sequence[int]) -> None:
    """Draw the memory of these ranks through the predicted step, at the peak of each operator."""
    assert capacity.prediction is not None
    for number, rank in enumerate(ranks):
        spans = memory_over_time(capacity.prediction, capacity.memory[rank])
        times = [at for begin, end, _, _ in spans for at in (begin, end)]
        held = [nbytes / GB for _, _, _, nbytes in spans for _ in range(2)]
        colour = STEP_COLOURS[number % len(STEP_COLOURS)]
        axes.plot(times, held, color=colour, label=f"rank {rank}", alpha=0.8)
    axes.axhline(capacity.job.machine.memory / GB, color="#b00000", linewidth=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("seconds")
    axes.set_ylabel("GB")
    axes.set_title("memory through the step, at the busiest moment of each operator")
    axes.legend(
        loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, ncols=2, fontsize=8
    )


def _placement(axes: Axes, capacity: Capacity) -> None:
    """Draw nodes as rows and their GPUs as columns, coloured by the actor's pipeline stage or by role."""
    job = capacity.job
    width, nodes, grid = job.machine.gpus_per_node, num_nodes(job), job.actor.grid
    axes.set_xticks(range(width))
    axes.set_xlabel("GPU of the node")
    axes.set_ylabel("node")
    if job.placement.is_colocated:
        kinds = [f"stage {stage}" for stage in range(grid.pp)]
        kind_of = [
            grid.coords(job.actor.place(rank) or 0).pp for rank in range(job.world)
        ]
        axes.set_title("placement: the actor's pipeline stage (colour) on every GPU")
    else:
        kinds = [group.name for group in job.placement.role_groups]
        kind_of = [
            kinds.index(job.placement.role_group_of(rank).name)
            for rank in range(job.world)
        ]
        axes.set_title("placement: the roles (colour) on every GPU")
    _cells(axes, kind_of, len(kinds), (nodes, width))
    if job.world <= MOST_RANKS:
        axes.set_yticks(range(nodes))
        for rank, kind in enumerate(kind_of):
            text = (" " if nodes > 2 else NEW_LINE).join(_inside(job, rank))
            y, x = divmod(rank, width)
            size = 10 if nodes <= 2 else 6.5
            axes.text(
                x,
                y,
                f"{rank}\n{text}",
                ha="center",
                va="center",
                fontsize=size,
                color=_ink(kind, len(kinds)),
            )
        _edges(axes, range(1, width), range(1, nodes), "white")
        return
    for kind, name in enumerate(kinds):
        held = [rank for rank, rank_kind in enumerate(kind_of) if rank_kind == kind]
        first, last = held[0] // width, held[-1] // width
        text = f"{name}: nodes {first}-{last}\n{len(held):,} ranks"
        middle = (first + last) / 2
        axes.text(
            (width - 1) / 2,
            middle,
            text,
            ha="center",
            va="center",
            fontsize=10,
            color=_ink(kind, len(kinds)),
        )


def _cells(
    axes: Axes, kind_of: Sequence[int], num_kinds: int, shape: tuple[int, int]
) -> None:
    """Fill the cells of all GPUs with the colour of their kind. GPUs that the job does not use stay blank."""
    from matplotlib import colormaps

    cells = np.full(shape[0] * shape[1], np.nan)
    cells[: len(kind_of)] = kind_of
    palette = colormaps["viridis"].resampled(num_kinds)
    options: dict[str, Any] = {
        "cmap": palette,
        "vmin": -0.5,
        "vmax": num_kinds - 0.5,
        "alpha": 0.75,
    }
    axes.imshow(cells.reshape(shape), aspect="auto", interpolation="nearest", **options)


def _inside(job: PlannedJob, rank: int) -> list[str]:
    """Return the words that describe a GPU in its cell."""
    words = []
    if (place := job.actor.place(rank)) is not None:
        at = job.actor.grid.coords(place)
        words += [f"tp{at.tp}", f"pp{at.pp}", f"dp{at.dp}"]
    if rank in job.rollout.ranks:
        engine, place = divmod(job.rollout.ranks.index(rank), job.rollout.tp)
        words.append(f"vLLM {engine}.{place}")
    if not job.placement.is_colocated:
        words += [
            role
            for role in job.placement.roles_of(rank)
            if role not in ("actor", "rollout", "reference")
        ]
    return words


def _ink(stage: int, pp: int) -> str:
    return "black" if stage >= pp / 2 else "white"


def _who_to_whom(figure: Any, axes: Axes, capacity: Capacity) -> None:
    """Draw the bytes of one reshard as a matrix of sending and receiving ranks, or nodes."""
    from matplotlib import colormaps

    job = capacity.job
    by_node = job.world > MOST_RANKS
    size = num_nodes(job) if by_node else job.world
    matrix = np.zeros((size, size))
    for rank in capacity.traffic.ranks:
        for peer, nbytes in rank.from_rank.items():
            source, dest = (
                job.machine.node_of(r) if by_node else r for r in (peer, rank.rank)
            )
            matrix[source, dest] += nbytes / GB
    unit = "node" if by_node else "rank"
    shown = np.ma.masked_equal(matrix, 0.0)
    palette = colormaps["magma_r"].with_extremes(bad="#f2f2f2")
    # The palette ends in black, so leave its last part unused to keep numbers readable.
    most = 1.15 * matrix.max() or 1.0
    image = axes.imshow(
        shown,
        cmap=palette,
        vmin=0.0,
        vmax=most,
        aspect="equal",
        interpolation="nearest",
    )
    figure.colorbar(image, ax=axes, label=f"GB from {unit} to {unit}", shrink=0.9)
    axes.set_xlabel(f"to {unit}")
    axes.set_ylabel(f"from {unit}")
    axes.set_title(
        f"who sends to whom in one reshard: {matrix.sum():,.0f} GB in all"
        + ("" if by_node else " (grey: 0)")
    )
    if size <= MOST_NAMED:
        axes.set_xticks(range(size))
        axes.set_yticks(range(size))
        for source, dest in zip(*np.nonzero(matrix), strict=True):
            value = matrix[source, dest]
            ink = "white" if value > 0.5 * matrix.max() else "black"
            axes.text(
                dest,
                source,
                f"{value:.2g}",
                ha="center",
                va="center",
                fontsize=8,
                color=ink,
            )
    if not by_node:
        node_edges = range(job.machine.gpus_per_node, size, job.machine.gpus_per_node)
        _edges(axes, node_edges, node_edges, "#888888")


def _edges(
    axes: Axes, columns: Iterable[int], rows: Iterable[int], colour: str
) -> None:
    """Draw lines before these columns and rows of cells."""
    for column in columns:
        axes.axvline(column - 0.5, color=colour, linewidth=0.8)
    for row in rows:
        axes.axhline(row - 0.5, color=colour, linewidth=0.8)


def _fill(axes: Axes, capacity: Capacity) -> None:
    """Draw the memory of the fullest rank in each phase against the memory of a GPU."""
    phases = phases_of(capacity.memory)
    fullest = {
        p: max(capacity.memory, key=lambda m: m.phases.get(p, 0.0)) for p in phases
    }
    labels = [f"{phase}\n(rank {fullest[phase].rank})" for phase in fullest]
    left = np.zeros(len(fullest))
    reserve = parts_of(capacity.memory).get("reserve", [])
    greys = dict(
        zip(
            reserve,
            (str(grey) for grey in np.linspace(*GREYS, len(reserve))),
            strict=True,
        )
    )
    for part, colour in (greys | COLOURS).items():
        held = (
            fullest[p].parts["reserve"] if part in greys else fullest[p].moments[p]
            for p in fullest
        )
        values = np.array([parts.get(part, 0.0) / GB for parts in held])
        if values.any():
            axes.barh(
                labels,
                values,
                left=left,
                color=colour,
                label=part,
                edgecolor="white",
                linewidth=0.5,
            )
            left += values
    limit = capacity.job.machine.memory / GB
    axes.axvline(limit, color="#b00000", linewidth=2)
    axes.text(
        limit,
        len(fullest) - 0.6,
        f"{limit:g} GB ",
        ha="right",
        va="bottom",
        color="#b00000",
        rotation=90,
    )
    paper = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
    for place, total in enumerate(left):
        ink = "#b00000" if total > limit else "black"
        axes.text(
            total + 0.01 * limit,
            place,
            f"{total:.1f}",
            va="center",
            fontsize=8,
            color=ink,
            bbox=paper,
        )
    axes.set_xlim(0, 1.12 * max(limit, *left))
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=8)
    axes.set_xlabel("GB on the fullest rank of each phase")
    axes.set_title("memory")
    axes.legend(
        fontsize=8,
        ncols=4,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.13),
        frameon=False,
    )


def _bytes_by_rank(axes: Axes, capacity: Capacity) -> None:
    """Draw the bytes that every rank sends and receives over each link, and those that it need not move."""
    ranks = capacity.traffic.ranks
    numbers = [rank.rank for rank in ranks]
    series = {
        "network received": ([r.received["network"] for r in ranks], "#D55E00", "-"),
        "network sent": ([r.sent["network"] for r in ranks], "#0072B2", "-"),
        "NVLink received": ([r.received["nvlink"] for r in ranks], "#E69F00", "--"),
        "NVLink sent": ([r.sent["nvlink"] for r in ranks], "#56B4E9", "--"),
        "copied in place": ([r.received["local"] for r in ranks], "#CC79A7", ":"),
        "aliased": ([r.received["alias"] for r in ranks], "#009E73", "-."),
    }
    marker = "o" if len(ranks) <= MOST_RANKS else None
    for name, (values, colour, line) in series.items():
        if any(values):
            gigabytes = [value / GB for value in values]
            # A wide, pale line stays visible under the line of an equal number of bytes
            # sent.
            wide = "received" in name
            width, alpha = (4.0, 0.5) if wide else (1.5, 1.0)
            axes.plot(
                numbers,
                gigabytes,
                line,
                color=colour,
                label=name,
                marker=marker,
                markersize=3,
                linewidth=width,
                alpha=alpha,
            )
    slowest, mean = capacity.traffic.seconds(capacity.job.machine)
    share = mean / slowest if slowest else 1.0
    axes.set_title(
        f"bytes of every rank: {slowest:.3f} s at the stated bandwidths, {share:.0%} of the wire limit"
    )
    axes.set_xlabel("rank")
    axes.set_ylabel("GB")
    axes.set_ylim(bottom=0)
    axes.margins(x=0.01)
    axes.grid(True, alpha=0.3)
    axes.legend(
        fontsize=8,
        ncols=4,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.13),
        frameon=False,
    )
