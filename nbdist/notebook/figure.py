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
from matplotlib.collections import PolyCollection
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import Image

from nbdist.notebook.history import Floats, Run, thin
from nbdist.notebook.palette import BLUE, MANY_RANKS, MEMORY_COLOURS, PART_COLOURS, RANK_COLOURS, VERMILION
from nbdist.notebook.summary import PARTS, RankRow, findings, headline, rank_rows
from nbdist.notebook.units import GIB, KIB, MIB, duration_text, number_text

__all__ = ["RunFigure", "compare", "draw", "grid", "png"]

INK, SOFT, LINE, PAPER, RED = "#20242b", "#6a727e", "#dfe3e8", "#ffffff", "#a8321b"
POINTS_DRAWN = 1200  # of one curve; the figure has fewer pixels


class RunFigure(Figure):
    """A matplotlib figure that shows itself in a notebook, pyplot imported or not."""

    def _repr_png_(self) -> bytes:
        return png(self)


def png(figure: Figure) -> bytes:
    """The figure as PNG, drawn once and with 256 colours: a third of the time and of the bytes of `savefig`."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()  # type: ignore[no-untyped-call]
    pixels = np.asarray(canvas.buffer_rgba())  # type: ignore[no-untyped-call]
    image = Image.fromarray(pixels).convert("RGB")
    stream = io.BytesIO()
    image.quantize(256, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(stream, format="png")
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
    small = names[1:4]
    notes = [found.text for found in findings(run, rows) if found.level in ("bad", "warn")][:2]
    below = 0.1 + 0.2 * len(notes)  # inches
    height = 3.7 + (1.75 if small else 0.0) + below
    figure = RunFigure(figsize=(10, height), dpi=100, facecolor=PAPER)
    state = {"ok": "finished", "running": "running"}.get(run.status, run.status)
    title = f"{headline(run)} · {state} after {duration_text(run.elapsed_s)}"
    figure.text(0.012, 1 - 0.12 / height, _literal(title), va="top", fontsize=11, fontweight="bold", color=INK)
    for i, note in enumerate(notes):
        y = (below - 0.08 - 0.2 * i) / height
        figure.text(0.012, y, _literal(note), va="top", fontsize=8.5, color=RED)
    width = 6.2 if bars else 9.3
    main = _axes(figure, 0.55, below + (2.25 if small else 0.5), width, 2.5)
    if names and len(run.history.ranks(names[0])) > MANY_RANKS:
        main.remove()
        main = _axes(figure, 0.55, below + (3.45 if small else 1.7), width, 1.3)
        _curves(main, run, names[0], legend=True)
        main.set_xlabel("")
        main.margins(x=0)
        _heat(_axes(figure, 0.55, below + (2.25 if small else 0.5), width, 0.7), run, names[0])
    elif names:
        _curves(main, run, names[0], legend=True)
    else:
        _bare(main, "no metrics were logged")
    each = (width + 0.55) / max(1, len(small))
    for i, name in enumerate(small):
        _curves(_axes(figure, 0.55 + i * each, below + 0.5, each - 0.55, 0.95), run, name, legend=False)
    room = (height - 0.7 - below) / max(1, len(bars))
    for i, panel in enumerate(bars):
        top = height - 0.7 - i * room
        panel(_axes(figure, 7.45, top - room + 1.0, 2.4, room - 1.0))
    return figure


def _axes(figure: Figure, left: float, bottom: float, width: float, height: float) -> Axes:
    """Axes at a place given in inches: a layout engine would take longer than all the drawing."""
    whole_width, whole_height = figure.get_size_inches()
    box = (left / whole_width, bottom / whole_height, width / whole_width, height / whole_height)
    return figure.add_axes(box)


def compare(runs: Sequence[Run]) -> RunFigure:
    """Draw runs over each other: the first metric over steps and over time, memory and step time per rank."""
    figure = RunFigure(figsize=(10, 5.6), dpi=100, facecolor=PAPER)
    axes = [[_axes(figure, left, bottom, 4.2, 1.95) for left in (0.6, 5.55)] for bottom in (3.3, 0.5)]
    shared = [name for name in runs[0].history.names() if all(name in run.history.names() for run in runs)]
    for axis, over in zip(axes[0], ("step", "time"), strict=True):
        if not shared:
            _bare(axis, "no metric that all runs have")
            continue
        title = f"{_literal(shared[0])}, mean of all ranks (shade: smallest to largest)"
        _style(axis, title, "step" if over == "step" else "seconds")
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
    _grouped(axes[1][0], runs, "memory for the model, per rank", _for_the_model, _unit)
    _grouped(axes[1][1], runs, "step time, per rank", lambda row: row.step_s, lambda _: (1e-3, "ms"))
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


def _heat(axis: Axes, run: Run, name: str) -> None:
    """Each row a rank, each cell how far it lies from the mean of all ranks there."""
    ranks = run.history.ranks(name)
    x, values = grid([_curve(run, name, rank) for rank in ranks])
    if not len(x):
        _bare(axis, "no finite values")
        return
    away = values - spread(values)[1]
    far = 3 * float(np.sqrt(np.nanmean(away**2))) or 1e-12
    _style(
        axis,
        f"each rank against the mean of all: blue below, orange above, full colour {number_text(far)} away",
        "step",
    )
    axis.title.set_fontweight("normal")
    colours = LinearSegmentedColormap.from_list("below and above", [BLUE, PAPER, VERMILION])
    extent = (float(x[0]), float(max(x[-1], x[0] + 1)), len(ranks) - 0.5, -0.5)
    axis.imshow(away, aspect="auto", cmap=colours, vmin=-far, vmax=far, extent=extent, interpolation="nearest")
    axis.grid(False)
    shown = np.arange(0, len(ranks), math.ceil(len(ranks) / 4))
    axis.set_yticks(shown, [f"rank {ranks[i]}" for i in shown])


def _bar_panels(rows: Sequence[RankRow]) -> list[Callable[[Axes], None]]:
    panels: list[Callable[[Axes], None]] = []
    if any(row.memory.parts for row in rows):
        panels.append(lambda axis: _memory(axis, rows))
    if any(row.parts for row in rows):
        panels.append(lambda axis: _step_time(axis, rows))
    return panels


def _stack(axis: Axes, rows: Sequence[RankRow], parts: Sequence[tuple[str, str, list[float]]]) -> None:
    places = np.arange(len(rows))
    half = 0.36 if len(rows) <= MANY_RANKS else 0.5
    left = np.zeros(len(rows))
    for label, colour, sizes in parts:
        right = left + np.asarray(sizes)
        x = np.stack([left, left, right, right], axis=1)
        y = np.stack([places - half, places + half, places + half, places - half], axis=1)
        bars = np.stack([x, y], axis=2)
        axis.add_collection(PolyCollection(list(bars), facecolor=colour, edgecolor="none", label=_literal(label)))
        left = right
    axis.set_xlim(0, max(float(left.max()) * 1.04, 1e-9))
    axis.set_ylim(len(rows) - 0.4, -0.6)
    shown = places if len(rows) <= 8 else places[:: math.ceil(len(rows) / 8)]
    axis.set_yticks(shown, [f"rank {rows[i].rank}" for i in shown])
    axis.grid(False, axis="y")
    axis.legend(
        fontsize=7.5, frameon=False, labelcolor=SOFT, ncols=2, handlelength=0.9, columnspacing=1, labelspacing=0.3,
        loc="upper left", bbox_to_anchor=(-0.3, -24 / (axis.bbox.height or 1)), borderaxespad=0,
    )  # fmt: skip


def _memory(axis: Axes, rows: Sequence[RankRow]) -> None:
    labels = list(dict.fromkeys(label for row in rows for label in row.memory.parts))
    largest = max((row.memory.limit or sum(row.memory.parts.values())) for row in rows)
    unit, text = _unit(largest)
    what = "" if labels == ["process"] or any(row.memory.limit for row in rows) else " for the model"
    _style(axis, f"memory{what}, {text}")
    parts = [
        (label, MEMORY_COLOURS.get(label, SOFT), [row.memory.parts.get(label, 0) / unit for row in rows])
        for label in labels
    ]
    _stack(axis, rows, parts)
    if limits := [row.memory.limit for row in rows if row.memory.limit]:
        axis.set_xlim(0, max(limits) / unit * 1.03)
    for place, row in enumerate(rows):
        if row.memory.limit:
            axis.plot([row.memory.limit / unit] * 2, [place - 0.5, place + 0.5], color=INK, linewidth=1.2)


def _unit(size: float) -> tuple[float, str]:
    return (GIB, "GiB") if size >= GIB else (MIB, "MiB") if size >= MIB else (KIB, "KiB")


def _step_time(axis: Axes, rows: Sequence[RankRow]) -> None:
    _style(axis, "step time, ms")
    parts = [
        (label, PART_COLOURS[key], [row.parts.get(key, 0.0) * 1e3 for row in rows])
        for key, label in PARTS.items()
        if any(row.parts.get(key) for row in rows)
    ]
    _stack(axis, rows, parts)


def _for_the_model(row: RankRow) -> float | None:
    """On a GPU the most that tensors have taken; else parameters, gradients and optimizer state."""
    return row.memory.peak or (sum(row.memory.parts.values()) or None)


def _grouped(
    axis: Axes,
    runs: Sequence[Run],
    title: str,
    read: Callable[[RankRow], float | None],
    unit_of: Callable[[float], tuple[float, str]],
) -> None:
    """Bars of every run side by side, by rank."""
    found = [[(row.rank, value) for row in rank_rows(run) if (value := read(row)) is not None] for run in runs]
    largest = max((value for rows in found for _, value in rows), default=None)
    if largest is None:
        _bare(axis, f"no {title} was measured")
        return
    scale, unit = unit_of(largest)
    _style(axis, f"{title}, {unit}", "rank")
    width = 0.8 / len(runs)
    for i, (run, rows) in enumerate(zip(runs, found, strict=True)):
        places = [rank + (i - (len(runs) - 1) / 2) * width for rank, _ in rows]
        heights = [value / scale for _, value in rows]
        bars = axis.bar(places, heights, width=width * 0.92, color=rank_style(i)[0], label=_label(run))
        if sum(map(len, found)) <= 12:
            axis.bar_label(bars, [number_text(h) for h in heights], fontsize=8, color=SOFT, padding=1)
    axis.margins(y=0.12)
    axis.grid(False, axis="x")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.legend(
        fontsize=8.5, frameon=False, labelcolor=INK, ncols=4, handlelength=0.9, loc="lower right",
        bbox_to_anchor=(1, 0.99), borderaxespad=0,
    )  # fmt: skip
