"""The static form of a run, drawn with matplotlib: what a saved notebook, GitHub and nbconvert show.

Everything is drawn on figures of its own, without pyplot, and every colour and size is given here: neither the user's
style nor their current figure is read or changed.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

from nbdist.notebook.history import Floats, Run, thin
from nbdist.notebook.palette import MANY_RANKS, MEMORY_COLOURS, PART_COLOURS, RANK_COLOURS
from nbdist.notebook.summary import (
    GIB,
    MIB,
    PARTS,
    RankRow,
    duration_text,
    findings,
    headline,
    number_text,
    rank_rows,
    seconds_text,
)

__all__ = ["RunFigure", "compare", "draw", "grid", "png"]

INK, SOFT, LINE, PAPER = "#20242b", "#6a727e", "#dfe3e8", "#ffffff"
POINTS_DRAWN = 1200  # of one curve; the figure has fewer pixels


class RunFigure(Figure):
    """A matplotlib figure that shows itself in a notebook, pyplot imported or not."""

    def _repr_png_(self) -> bytes:
        return png(self)


def png(figure: Figure) -> bytes:
    """The figure as PNG."""
    stream = io.BytesIO()
    figure.savefig(stream, format="png", facecolor=PAPER, pil_kwargs={"optimize": True})
    return stream.getvalue()


def grid(curves: Sequence[tuple[Floats, Floats]], cells: int = 400) -> tuple[Floats, Floats]:
    """Bring curves of different x onto one grid, to take means over ranks.

    Parameters
    ----------
    curves
        (x, value) of each rank.
    cells
        How many grid points at most.

    Returns
    -------
    x, values
        Shapes (cells,) and (ranks, cells). Within a cell a rank's values are averaged; between its points it is
        interpolated; before its first, after its last and across a NaN it is NaN.
    """
    finite = [(x[np.isfinite(v)], v[np.isfinite(v)]) for x, v in curves]
    spans = [x for x, _ in finite if len(x)]
    if not spans:
        return np.empty(0), np.empty((len(curves), 0))
    low, high = min(x.min() for x in spans), max(x.max() for x in spans)
    count = int(min(cells, max(1, *(len(np.unique(x)) for x in spans))))
    edges = np.linspace(low, high, count + 1)
    centres = np.linspace(low, high, count)
    out = np.full((len(curves), count), np.nan)
    for row, (x, values) in zip(out, finite, strict=True):
        if not len(x):
            continue
        where = np.clip(np.searchsorted(edges, x, side="right") - 1, 0, count - 1)
        hits = np.bincount(where, minlength=count)
        sums = np.bincount(where, weights=values, minlength=count)
        filled = hits > 0
        row[filled] = sums[filled] / hits[filled]
        inside = (centres >= x.min()) & (centres <= x.max()) & ~filled
        row[inside] = np.interp(centres[inside], centres[filled], row[filled])
    return centres, out


def draw(run: Run) -> RunFigure:
    """Curves per rank, memory and step time of one run."""
    rows = rank_rows(run)
    names = run.history.names()
    bars = _bar_panels(rows)
    side_metrics = names[1:4]
    height = 3.4 + (1.5 if side_metrics else 0.0)
    figure = RunFigure(
        figsize=(10, height), dpi=100, facecolor=PAPER, layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06)
    )
    FigureCanvasAgg(figure)
    columns = figure.add_gridspec(1, 2 if bars else 1, width_ratios=[2.1, 1] if bars else None)
    left = columns[0].subgridspec(2 if side_metrics else 1, 1, height_ratios=[2.2, 1] if side_metrics else None)
    main = figure.add_subplot(left[0])
    if names:
        _curves(main, run, names[0], legend=True)
    else:
        _bare(main, "no metrics were logged")
    if side_metrics:
        small = left[1].subgridspec(1, len(side_metrics))
        for i, name in enumerate(side_metrics):
            _curves(figure.add_subplot(small[i]), run, name, legend=False)
    if bars:
        right = columns[1].subgridspec(len(bars), 1)
        for i, panel in enumerate(bars):
            panel(figure.add_subplot(right[i]))
    state = {"ok": "finished", "running": "running"}.get(run.status, run.status)
    figure.suptitle(
        f"{headline(run)} · {state} after {duration_text(run.elapsed_s)}",
        x=0.012, ha="left", fontsize=11, fontweight="bold", color=INK,
    )  # fmt: skip
    notes = [found.text for found in findings(run, rows) if found.level in ("bad", "warn")][:2]
    if notes:
        figure.supxlabel("\n".join(_literal(note) for note in notes), x=0.012, ha="left", fontsize=8.5, color="#a8321b")
    return figure


def compare(runs: Sequence[Run]) -> RunFigure:
    """Draw runs over each other: the first metric over steps and over time, memory and step time per rank."""
    figure = RunFigure(
        figsize=(10, 5.6), dpi=100, facecolor=PAPER, layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06)
    )
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 2)
    shared = [name for name in runs[0].history.names() if all(name in run.history.names() for run in runs)]
    for axis, over in zip(axes[0], ("step", "time"), strict=True):
        if not shared:
            _bare(axis, "no metric that all runs have")
            continue
        _style(
            axis,
            f"{_literal(shared[0])}: mean over ranks, lightest to smallest and largest",
            f"{over}" if over == "step" else "seconds",
        )
        for i, run in enumerate(runs):
            colour, dash = rank_style(i)
            curves = [_curve(run, shared[0], rank, over) for rank in run.history.ranks(shared[0])]
            x, values = grid(curves)
            if not len(x):
                continue
            low, mean, high = spread(values)
            axis.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)
            axis.plot(x, mean, color=colour, linestyle=dash, linewidth=1.6, label=_label(run))
        _legend(axis)
    _grouped(axes[1][0], runs, "memory used per rank", _memory_used)
    _grouped(
        axes[1][1], runs, "step time per rank", lambda row: None if row.step_s is None else (row.step_s * 1e3, "ms")
    )
    return figure


# ---- parts


def rank_style(index: int) -> tuple[str, Any]:
    """Colour and dash of the n-th rank; after eight ranks the colours come again, dashed."""
    dash = ["-", (0, (4, 1.5)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5))][index // len(RANK_COLOURS) % 4]
    return RANK_COLOURS[index % len(RANK_COLOURS)], dash


def spread(values: Floats) -> tuple[Floats, Floats, Floats]:
    """Smallest, mean and largest over ranks, shape (cells,) each; NaN where no rank has a value."""
    known = np.isfinite(values)
    count = known.sum(axis=0)
    some = count > 0
    low = np.where(some, np.where(known, values, np.inf).min(axis=0), np.nan)
    high = np.where(some, np.where(known, values, -np.inf).max(axis=0), np.nan)
    mean = np.divide(np.where(known, values, 0.0).sum(axis=0), count, out=np.full(len(count), np.nan), where=some)
    return low, mean, high


def _literal(text: str) -> str:
    """Text that matplotlib shows as it is: a dollar would begin a formula."""
    return text.replace("$", r"\$")


def _label(run: Run) -> str:
    return _literal(run.name)


def _style(axis: Axes, title: str, xlabel: str = "") -> None:
    axis.set_facecolor(PAPER)
    axis.set_title(title, loc="left", fontsize=9.5, color=INK, fontweight="bold")
    axis.set_xlabel(xlabel, fontsize=8.5, color=SOFT)
    axis.tick_params(colors=SOFT, labelsize=8.5, length=0)
    axis.grid(True, color=LINE, linewidth=0.8, linestyle="-", alpha=1)
    axis.set_axisbelow(True)
    for side, spine in axis.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(LINE)


def _bare(axis: Axes, text: str) -> None:
    _style(axis, "")
    axis.grid(False)
    axis.set_xticks([])
    axis.set_yticks([])
    axis.text(0.5, 0.5, text, ha="center", va="center", color=SOFT, fontsize=9.5, transform=axis.transAxes)


def _legend(axis: Axes) -> None:
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=8.5, frameon=False, labelcolor=INK, ncols=2, handlelength=1.8)


def _curve(run: Run, name: str, rank: int, over: str = "step") -> tuple[Floats, Floats]:
    steps, times, values = run.history.series(name, rank)
    return (steps if over == "step" else times - run.started_s), values


def _broken(steps: Floats, values: Floats) -> tuple[Floats, Floats]:
    """Put a gap where steps go back, so that no line crosses the plot."""
    back = np.flatnonzero(np.diff(steps) < 0) + 1
    return np.insert(steps, back, np.nan), np.insert(values, back, np.nan)


def _curves(axis: Axes, run: Run, name: str, *, legend: bool) -> None:
    history = run.history
    ranks = history.ranks(name)
    who = f"rank {ranks[0]}" if len(ranks) == 1 else "per rank"
    every = max(history.thinned(name, rank) for rank in ranks)
    many = len(ranks) > MANY_RANKS
    if many:
        who = f"mean and spread of {len(ranks)} ranks" if legend else "mean"
    thinned = f" (thinned: 1 of {every} points)" if every > 1 else ""
    _style(axis, f"{_literal(name)}, {who}{thinned}", "step")
    drawn = []
    for rank in ranks:
        steps, values = _curve(run, name, rank)
        finite = np.where(np.isfinite(values), values, np.nan)
        drawn.append((steps, finite))
        if not many:
            few = thin(steps, steps, finite, POINTS_DRAWN)
            x, y = _broken(few[0], few[2])
            colour, dash = rank_style(run.ranks.index(rank) if rank in run.ranks else rank)
            marker = "o" if np.isfinite(y).sum() < 3 else ""
            axis.plot(
                x, y, color=colour, linestyle=dash, linewidth=1.3, marker=marker, markersize=4, label=f"rank {rank}"
            )
    if len(ranks) > 1:
        x, values = grid(drawn)
        if len(x):
            low, mean, high = spread(values)
            if many:
                axis.fill_between(x, low, high, color=RANK_COLOURS[0], alpha=0.22, linewidth=0, label="min to max")
            axis.plot(x, mean, color=INK, linewidth=1.1, linestyle=(0, (5, 2)), label=f"mean of {len(ranks)} ranks")
    for bad in history.non_finite():
        if bad.name == name:
            colour, _ = rank_style(run.ranks.index(bad.rank) if bad.rank in run.ranks else bad.rank)
            axis.plot(
                [bad.step], [1], marker="v", color=colour, markersize=7, clip_on=False, linestyle="",
                transform=axis.get_xaxis_transform(),
            )  # fmt: skip
    if legend:
        _legend(axis)


def _bar_panels(rows: Sequence[RankRow]) -> list[Callable[[Axes], None]]:
    panels: list[Callable[[Axes], None]] = []
    if any(row.memory.parts for row in rows):
        panels.append(lambda axis: _memory(axis, rows))
    if any(row.parts for row in rows):
        panels.append(lambda axis: _step_time(axis, rows))
    return panels


def _stack(axis: Axes, rows: Sequence[RankRow], parts: Sequence[tuple[str, str, list[float]]]) -> None:
    places = np.arange(len(rows))
    left = np.zeros(len(rows))
    for label, colour, sizes in parts:
        axis.barh(
            places,
            sizes,
            left=left,
            height=0.72 if len(rows) <= MANY_RANKS else 1.0,
            color=colour,
            label=_literal(label),
        )
        left += np.asarray(sizes)
    axis.set_ylim(len(rows) - 0.4, -0.6)
    shown = places if len(rows) <= 8 else places[:: math.ceil(len(rows) / 8)]
    axis.set_yticks(shown, [f"rank {rows[i].rank}" for i in shown])
    axis.grid(False, axis="y")
    axis.legend(
        fontsize=7.5, frameon=False, labelcolor=SOFT, ncols=2, handlelength=0.9, columnspacing=1,
        loc="upper left", bbox_to_anchor=(0, -0.14), borderaxespad=0,
    )  # fmt: skip


def _memory(axis: Axes, rows: Sequence[RankRow]) -> None:
    labels = list(dict.fromkeys(label for row in rows for label in row.memory.parts))
    largest = max((row.memory.limit or row.memory.used or 0) for row in rows)
    unit, text = (GIB, "GiB") if largest >= GIB else (MIB, "MiB")
    _style(axis, f"memory, {text}")
    parts = [
        (label, MEMORY_COLOURS.get(label, SOFT), [row.memory.parts.get(label, 0) / unit for row in rows])
        for label in labels
    ]
    _stack(axis, rows, parts)
    for place, row in enumerate(rows):
        if row.memory.limit:
            axis.plot([row.memory.limit / unit] * 2, [place - 0.42, place + 0.42], color=INK, linewidth=1.2)


def _step_time(axis: Axes, rows: Sequence[RankRow]) -> None:
    _style(axis, "step time, ms")
    parts = [
        (label, PART_COLOURS[key], [row.parts.get(key, 0.0) * 1e3 for row in rows])
        for key, label in PARTS.items()
        if any(row.parts.get(key) for row in rows)
    ]
    _stack(axis, rows, parts)


def _memory_used(row: RankRow) -> tuple[float, str] | None:
    used = row.memory.peak or row.memory.used
    return None if used is None else (used / MIB, "MiB")


def _grouped(axis: Axes, runs: Sequence[Run], title: str, read: Callable[[RankRow], tuple[float, str] | None]) -> None:
    width = 0.8 / len(runs)
    unit = ""
    for i, run in enumerate(runs):
        found = [(row.rank, value) for row in rank_rows(run) if (value := read(row)) is not None]
        if not found:
            continue
        unit = found[0][1][1]
        places = [rank + (i - (len(runs) - 1) / 2) * width for rank, _ in found]
        bars = axis.bar(
            places, [v for _, (v, _) in found], width=width * 0.92, color=rank_style(i)[0], label=_label(run)
        )
        if len(found) * len(runs) <= 8:
            axis.bar_label(bars, [number_text(v) for _, (v, _) in found], fontsize=8, color=SOFT, padding=1)
    if not unit:
        _bare(axis, f"no {title} was measured")
        return
    _style(axis, f"{title}, {unit}", "rank")
    axis.margins(y=0.15)
    axis.grid(False, axis="x")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    _legend(axis)


def caption(run: Run) -> str:
    """One line for people who do not see the picture."""
    last = []
    for name in run.history.names()[:2]:
        values = run.history.last(name)
        each = ", ".join(f"[{rank}] {number_text(value)}" for rank, value in list(values.items())[:8])
        last.append(f"{name} {each}" + (" ..." if len(values) > 8 else ""))
    times = [row.step_s for row in rank_rows(run) if row.step_s is not None]
    if times:
        last.append(f"{seconds_text(max(times))} a step")
    return " · ".join([headline(run), *last])
