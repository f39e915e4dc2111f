"""From measured rows to a table and to the ratios that nbdist must reach."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["TARGETS", "Row", "Target", "table", "verdicts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured value.

    Attributes
    ----------
    measure, product, n, value, unit
        What was measured, of which product, with how many ranks.
    note
        What else the reader should know.
    upper
        Upper end of a confidence interval, where there is one.
    """

    measure: str
    product: str
    n: int
    value: float
    unit: str
    note: str = ""
    upper: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What nbdist must reach in one measure.

    Attributes
    ----------
    times
        Bound as a multiple of the best of ``against``, or None.
    bound
        Bound as a plain value, or None.
    at_least
        Whether more is better.
    """

    measure: str
    ranks: tuple[int, ...]
    times: float | None = None
    against: tuple[str, ...] = ()
    bound: float | None = None
    at_least: bool = False


_NOTEBOOK = ("ipyparallel", "nbdistributed")
TARGETS = (
    Target(measure="warm start", ranks=(2, 4), times=0.4, against=("torchmonarch",)),
    Target(measure="warm start, first DDP step", ranks=(2, 4), bound=0.3),
    Target(measure="cold start", ranks=(4,), times=0.6, against=_NOTEBOOK),
    Target(measure="cold start", ranks=(8,), times=0.4, against=_NOTEBOOK),
    Target(measure="restart", ranks=(4,), bound=1.0),
    Target(measure="empty cell", ranks=(2, 4, 8), times=0.4, against=_NOTEBOOK),
    Target(measure="push 256 MB", ranks=(2,), bound=1.5, at_least=True),
    Target(measure="pull 256 MB", ranks=(2,), bound=1.5, at_least=True),
    Target(measure="stop in a training loop", ranks=(2,), bound=1.02),
    Target(measure="stop in other Python code", ranks=(2,), bound=1.0),
    Target(measure="stop in a collective", ranks=(2,), bound=3.0),
    Target(measure="stop twice in C code", ranks=(2,), bound=5.0),
    Target(measure="a rank raises, the other waits", ranks=(2,), bound=2.0),
    Target(measure="a rank dies, the other waits", ranks=(2,), bound=1.0),
    Target(measure="a rank waits: the notice", ranks=(2,), bound=10.0),
    Target(measure="kernel killed, nothing left", ranks=(2,), bound=2.0),
    Target(measure="training throughput", ranks=(1,), bound=0.99, at_least=True),
    Target(measure="training throughput", ranks=(2,), bound=0.98, at_least=True),
)
SHARE_OF_COPY = 0.5


def _medians(rows: Iterable[Row]) -> dict[tuple[str, int, str], list[Row]]:
    groups: dict[tuple[str, int, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.measure, row.n, row.product), []).append(row)
    return groups


def _value(rows: Sequence[Row]) -> float:
    return statistics.median(row.value for row in rows)


def table(rows: Sequence[Row], products: Sequence[str]) -> str:
    """Medians as a Markdown table, one line a measure and number of ranks."""
    groups = _medians(rows)
    lines = ["| measure | ranks | " + " | ".join(products) + " | unit |", "|---" * (len(products) + 3) + "|"]
    notes = []
    for measure, n in dict.fromkeys((row.measure, row.n) for row in rows):
        cells, unit = [], ""
        for product in products:
            found = groups.get((measure, n, product))
            if not found:
                cells.append("–")
                continue
            unit = found[0].unit
            values = sorted(row.value for row in found)
            spread = f" ({values[0]:.3g}–{values[-1]:.3g})" if len(values) > 1 else ""
            cells.append(f"{_value(found):.3g}{spread}")
            notes += [f"- {measure}, {n} ranks, {product}: {row.note}" for row in found if row.note]
        lines.append(f"| {measure} | {n} | " + " | ".join(cells) + f" | {unit} |")
    repetitions = max((len(found) for found in groups.values()), default=0)
    lines.append(f"\nMedians of up to {repetitions}; the range in brackets.")
    return "\n".join(lines + notes)


def verdicts(rows: Sequence[Row]) -> list[str]:
    """One line a target: what was reached, the bound, and whether it holds."""
    groups = _medians(rows)
    lines = []
    for target in TARGETS:
        for n in target.ranks:
            own = groups.get((target.measure, n, "nbdist"))
            if not own:
                continue
            value, bound, why = _value(own), target.bound, ""
            if target.times is not None:
                others = {
                    p: _value(groups[target.measure, n, p]) for p in target.against if (target.measure, n, p) in groups
                }
                if not others:
                    continue
                best = min(others, key=lambda p: others[p])
                bound = target.times * others[best]
                why = f" = {target.times:g} x {best}'s {others[best]:.3g}; ratio {value / others[best]:.2f}"
            if target.measure in ("push 256 MB", "pull 256 MB") and ("plain copy", n, "nbdist") in groups:
                copy = _value(groups["plain copy", n, "nbdist"])
                share = SHARE_OF_COPY * copy
                if bound is not None and share > bound:
                    bound, why = share, f" = {SHARE_OF_COPY:g} x a plain copy's {copy:.3g}"
            assert bound is not None
            judged = own[0].upper if own[0].upper is not None else value
            holds = judged >= bound if target.at_least else judged <= bound
            sign = ">=" if target.at_least else "<="
            worst = f", judged at {judged:.3g}" if judged != value else ""
            lines.append(
                f"{'reached' if holds else 'MISSED '}  {target.measure}, {n} ranks: {value:.3g} {own[0].unit}{worst}"
                f" (must be {sign} {bound:.3g}{why})"
            )
    return lines
