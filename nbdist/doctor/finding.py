"""What a check says: a verdict, the fact, what it matters for, the remedy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

__all__ = ["VERDICTS", "Finding", "Verdict", "fail", "html_of", "info", "lines_of", "ok", "skipped", "warn", "worst"]

Verdict = Literal["ok", "skipped", "info", "warn", "fail"]

VERDICTS: tuple[Verdict, ...] = ("ok", "skipped", "info", "warn", "fail")  # mildest first


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The outcome of one check.

    Attributes
    ----------
    name
        What was looked at, in a few words: ``shared memory``.
    verdict
        ``ok``, ``skipped`` (nothing to judge here), ``info``, ``warn`` (slow or fragile), ``fail`` (will not work).
    fact
        What was found, in one line.
    matters
        What it matters for, in one line; empty for ``ok`` and ``skipped``.
    remedy
        What to do, in one line; empty where nothing needs doing.
    """

    name: str
    verdict: Verdict
    fact: str
    matters: str = ""
    remedy: str = ""


def ok(name: str, fact: str) -> Finding:
    """All is well."""
    return Finding(name=name, verdict="ok", fact=fact)


def skipped(name: str, fact: str) -> Finding:
    """There is nothing to judge."""
    return Finding(name=name, verdict="skipped", fact=fact)


def info(name: str, fact: str, matters: str = "", remedy: str = "") -> Finding:
    """Worth knowing."""
    return Finding(name=name, verdict="info", fact=fact, matters=matters, remedy=remedy)


def warn(name: str, fact: str, matters: str = "", remedy: str = "") -> Finding:
    """Slow or fragile."""
    return Finding(name=name, verdict="warn", fact=fact, matters=matters, remedy=remedy)


def fail(name: str, fact: str, matters: str = "", remedy: str = "") -> Finding:
    """Will not work."""
    return Finding(name=name, verdict="fail", fact=fact, matters=matters, remedy=remedy)


def worst(findings: Iterable[Finding]) -> Verdict:
    """Return the most serious verdict, ``ok`` when there is none."""
    return max((f.verdict for f in findings), key=VERDICTS.index, default="ok")


def lines_of(findings: Sequence[Finding], *, folded: bool = True) -> list[str]:
    """Draw findings as text, most serious first.

    Parameters
    ----------
    folded
        Put the names of all that is well into one line, instead of one line for each fact.
    """
    lines = []
    for verdict in reversed(VERDICTS):
        each = [f for f in findings if f.verdict == verdict]
        if verdict in ("ok", "skipped") and folded:
            names = [f.name if verdict == "ok" else f"{f.name} ({f.fact})" for f in each]
            lines += [f"{verdict:7}  {', '.join(dict.fromkeys(names))}"] if names else []
            continue
        for f in each:
            lines.append(f"{verdict if verdict in ('ok', 'skipped') else verdict.upper():7}  {f.name}: {f.fact}")
            lines += [f"{'':9}{label}: {text}" for label, text in (("why", f.matters), ("do", f.remedy)) if text]
    return lines


_MARKS: dict[Verdict, str] = {
    "fail": "218,54,51",
    "warn": "210,153,34",
    "info": "56,139,253",
}  # beside words, never alone


def html_of(findings: Sequence[Finding]) -> str:
    """Draw findings as HTML, in the order and with the folding of `lines_of`; readable on light and dark ground."""
    rows = []
    for verdict in reversed(VERDICTS[2:]):
        for f in findings:
            if f.verdict == verdict:
                more = "".join(
                    f"<div style='opacity:.8'>{escape(text)}</div>" for text in (f.matters, f.remedy) if text
                )
                rows.append(
                    f"<div style='border-left:4px solid rgb({_MARKS[verdict]});padding:2px 8px;margin:4px 0'>"
                    f"<b>{verdict.upper()}</b> {escape(f.name)}: {escape(f.fact)}{more}</div>"
                )
    for verdict in ("ok", "skipped"):
        each = [f for f in findings if f.verdict == verdict]
        if each:
            items = "".join(f"<li>{escape(f.name)}: {escape(f.fact)}</li>" for f in each)
            names = ", ".join(dict.fromkeys(escape(f.name) for f in each))
            rows.append(f"<details><summary>{verdict}: {names}</summary><ul>{items}</ul></details>")
    return "".join(rows)
