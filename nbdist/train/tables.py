"""Bytes, small tables and their HTML, for what the helpers of memory show."""

from __future__ import annotations

import html
from collections.abc import Sequence

__all__ = ["gib", "html_table", "text_table"]


def gib(num_bytes: float) -> str:
    """Bytes in the unit that reads best."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.3g} {unit}" if num_bytes < 1000 * size else f"{num_bytes / size:,.0f} {unit}"
    return f"{num_bytes:.0f} B"


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they need to be; the first to the left, the others to the right."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = []
    for row in [header, *rows]:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def html_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str] = ()) -> str:
    """The same as HTML, with every text escaped."""
    head = "".join(
        f"<th style='text-align:{'left' if i == 0 else 'right'}'>{html.escape(h)}</th>" for i, h in enumerate(header)
    )
    body = "".join(
        "<tr>"
        + "".join(
            f"<td style='text-align:{'left' if i == 0 else 'right'}'>{html.escape(c)}</td>" for i, c in enumerate(row)
        )
        + "</tr>"
        for row in rows
    )
    foot = "".join(f"<div style='opacity:.7;font-size:90%'>{html.escape(note)}</div>" for note in notes)
    return f"<div>{html.escape(title)}</div><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{foot}"
