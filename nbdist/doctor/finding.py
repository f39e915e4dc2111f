"""What a check says, and how findings and tables are drawn: as text, and as HTML."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

__all__ = [
    "VERDICTS", "Finding", "Verdict", "counted", "html_of", "html_table", "size_text", "text_of", "text_table", "worst",
]  # fmt: skip

Verdict = Literal["fail", "warn", "info", "skipped", "ok"]

VERDICTS: tuple[Verdict, ...] = ("fail", "warn", "info", "skipped", "ok")  # most serious first
_FOLDED = ("skipped", "ok")
_COLORS: dict[Verdict, str] = {"fail": "#da3633", "warn": "#d29922", "info": "#388bfd"}  # beside words, never alone


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one check.

    Attributes
    ----------
    name
        What was looked at, in a few words: ``shared memory``.
    verdict
        ``ok``, ``skipped`` (nothing to judge here), ``info``, ``warn`` (slow or fragile), ``fail`` (will not work).
    fact, matters, remedy
        What was found, what it matters for, what to do: one line each; the last two are empty where all is well.
    """

    name: str
    verdict: Verdict
    fact: str
    matters: str = ""
    remedy: str = ""


def worst(findings: Iterable[Finding]) -> Verdict:
    """Return the most serious verdict, ``ok`` when there is none."""
    return min((f.verdict for f in findings), key=VERDICTS.index, default="ok")


def text_of(findings: Sequence[Finding], *, folded: bool = True) -> str:
    """Draw findings as text, most serious first; ``folded``: all that is well in one line."""
    lines = []
    for verdict in VERDICTS:
        each = [f for f in findings if f.verdict == verdict]
        if folded and each and verdict in _FOLDED:
            names = [f.name if verdict == "ok" else f"{f.name} ({f.fact})" for f in each]
            lines.append(f"{verdict:7}  {', '.join(dict.fromkeys(names))}")
            continue
        for f in each:
            lines.append(f"{verdict if verdict in _FOLDED else verdict.upper():7}  {f.name}: {f.fact}")
            lines += [f"{'':9}{label}: {text}" for label, text in (("why", f.matters), ("do", f.remedy)) if text]
    return "\n".join(lines)


def html_of(findings: Sequence[Finding]) -> str:
    """Draw findings as HTML, in the order of `text_of`; readable on light and dark ground."""
    parts = []
    for verdict in VERDICTS:
        each = [f for f in findings if f.verdict == verdict]
        if each and verdict in _FOLDED:
            items = "".join(f"<li>{escape(f.name)}: {escape(f.fact)}</li>" for f in each)
            names = escape(", ".join(dict.fromkeys(f.name for f in each)))
            parts.append(f"<details><summary>{verdict}: {names}</summary><ul>{items}</ul></details>")
            continue
        for f in each:
            more = "".join(f"<div style='opacity:.8'>{escape(text)}</div>" for text in (f.matters, f.remedy) if text)
            parts.append(
                f"<div style='border-left:4px solid {_COLORS[verdict]};padding:2px 8px;margin:4px 0'>"
                f"<b>{verdict.upper()}</b> {escape(f.name)}: {escape(f.fact)}{more}</div>"
            )
    return "".join(parts)


def text_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Draw rows as lines, the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]


def html_table(rows: Sequence[Sequence[str]], colors: Mapping[str, str] | None = None) -> str:
    """Draw rows, of which the first is the head; ``colors``: grounds of cells, by their text."""

    def cell(text: str) -> str:
        color = (colors or {}).get(text)
        return f"<td style='background:{color}'>{escape(text)}</td>" if color else f"<td>{escape(text)}</td>"

    head = "".join(f"<th>{escape(text)}</th>" for text in rows[0])
    body = "".join(f"<tr><th>{escape(row[0])}</th>{''.join(map(cell, row[1:]))}</tr>" for row in rows[1:])
    return f"<table><tr>{head}</tr>{body}</table>"


def size_text(num_bytes: int) -> str:
    """``64 MiB``, ``4 GiB``, ``21.5 GiB``."""
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if num_bytes >= 1 << power:
            return f"{round(num_bytes / (1 << power), 1):g} {unit}"
    return f"{num_bytes} B"


def counted(number: int, noun: str) -> str:
    """``1 GPU``, ``4 GPUs``."""
    return f"{number} {noun}" + ("" if number == 1 else "es" if noun.endswith("s") else "s")
