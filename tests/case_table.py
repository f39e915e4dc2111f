"""Reads cases.md: which test plays which case, and what it asserts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["TABLE", "Row", "rows"]

TABLE = Path(__file__).resolve().parent / "cases.md"
_LINE = re.compile(r"^\|\s*(?P<case>[A-Z]{2}\d{2})\s*\|(?P<tests>[^|]*)\|(?P<asserts>.*)\|\s*$")


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    case: str
    tests: tuple[str, ...]
    asserts: str


def rows() -> list[Row]:
    """Every case of the table, in its order; tests as pytest names them, from the repository's root."""
    found = []
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        if match := _LINE.match(line):
            tests = tuple("tests/" + t for t in re.findall(r"`([^`]+)`", match["tests"]))
            found.append(Row(match["case"], tests, match["asserts"].strip()))
    return found
