"""The pictures of memory: bars per rank, one step's course, and memory per GPU over the number of GPUs."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["COLOURS", "bars", "course", "lines"]

# After Okabe and Ito's colour-blind safe set, one colour per kind as on the dashboard.
COLOURS = {
    "parameters": "#1f83c7",
    "gradients": "#57b2e4",
    "optimizer_state": "#129e77",
    "buffers": "#8b929c",
    "activations": "#dd9c0a",
    "communication": "#7b6bc4",
    "temporaries": "#c3cad3",
}
_LINES = ("#1f83c7", "#d9601a", "#129e77", "#c9699e", "#dd9c0a", "#7b6bc4", "#8b929c")
_DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)))
_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "bytes"))


def _new(width: float, height: float) -> tuple[Figure, Any]:
    """A figure that shows itself in any notebook, without pyplot and its list of open figures."""
    from matplotlib.figure import Figure

    class Shown(Figure):
        def _repr_png_(self) -> bytes:
            buffer = io.BytesIO()
            self.savefig(buffer, format="png", dpi=90, bbox_inches="tight")
            return buffer.getvalue()

    figure = Shown(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _unit(largest: float) -> tuple[int, str]:
    return next((size, name) for size, name in _UNITS if largest >= size or size == 1)


def bars(columns: Mapping[str, Mapping[str, float]], title: str) -> Figure:
    """One stacked bar per column, in bytes by kind."""
    figure, axes = _new(1.6 + 0.9 * max(len(columns), 3), 3.2)
    size, unit = _unit(max((sum(c.values()) for c in columns.values()), default=0))
    bottom = np.zeros(len(columns))
    for kind, colour in COLOURS.items():
        heights = np.array([c.get(kind, 0) for c in columns.values()]) / size
        if heights.any():
            axes.bar(range(len(columns)), heights, bottom=bottom, color=colour, label=kind.replace("_", " "), width=0.7)
            bottom += heights
    for i, total in enumerate(bottom):
        axes.annotate(f"{total:.3g}", (i, total), ha="center", va="bottom", fontsize=9)
    axes.set_xticks(range(len(columns)), list(columns))
    axes.set_ylabel(unit)
    axes.set_title(title, loc="left", fontsize=10)
    handles, labels = axes.get_legend_handles_labels()
    # In the order of the stack, beside it.
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper", frameon=False, fontsize=9)
    return figure


def course(curve: Mapping[str, npt.NDArray[np.float64]], title: str, note: str) -> Figure:
    """Living bytes by kind over one step."""
    figure, axes = _new(7.0, 3.2)
    length = len(next(iter(curve.values())))
    total = np.asarray(sum(curve.values()))
    size, unit = _unit(float(total.max(initial=0)))
    kinds = [k for k in COLOURS if k in curve and curve[k].any()]
    axes.stackplot(
        np.arange(length) / max(length - 1, 1),
        *(curve[k] / size for k in kinds),
        colors=[COLOURS[k] for k in kinds],
        labels=[k.replace("_", " ") for k in kinds],
    )
    top = int(np.argmax(total))
    axes.annotate(note, (top / max(length - 1, 1), total[top] / size), ha="center", va="bottom", fontsize=9)
    axes.set(xlim=(0, 1), xticks=[0, 1], xticklabels=["step begins", "step ends"], ylabel=unit)
    axes.margins(y=0.12)
    axes.set_title(title, loc="left", fontsize=10)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper", frameon=False, fontsize=9)
    return figure


def lines(
    numbers: Sequence[int], curves: Mapping[str, Sequence[float]], limit: float, title: str, limit_name: str
) -> Figure:
    """Memory per GPU over the number of GPUs, one line per strategy, and the memory that there is."""
    figure, axes = _new(7.0, 3.8)
    size, unit = _unit(limit)
    for i, (name, values) in enumerate(curves.items()):
        style: Any = _DASHES[i % len(_DASHES)]
        axes.plot(
            numbers, np.array(values) / size, color=_LINES[i % len(_LINES)], ls=style, marker="o", ms=3.5, label=name
        )
    axes.axhline(limit / size, color="#444444", lw=1)
    axes.annotate(limit_name, (numbers[0], limit / size), ha="left", va="bottom", fontsize=9)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(list(numbers), [str(n) for n in numbers])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set(xlabel="number of GPUs", ylabel=f"{unit} per GPU")
    axes.grid(alpha=0.25)
    axes.set_title(title, loc="left", fontsize=10)
    figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    return figure
