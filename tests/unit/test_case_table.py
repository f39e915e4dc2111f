"""The table of cases names tests that exist, and leaves none out."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from case_table import TABLE, rows

TESTS = Path(__file__).resolve().parent.parent


def defined(file: Path) -> set[str]:
    """Names of the test functions in a file, and of those in its classes as Class::test."""
    names = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            names |= {f"{node.name}::{f.name}" for f in node.body if isinstance(f, ast.FunctionDef)}
    return names


@pytest.mark.parametrize("row", rows(), ids=lambda r: r.case)
def test_named_tests_exist(row):
    assert row.tests, f"{row.case}: no test named"
    assert row.asserts, f"{row.case}: nothing asserted"
    for name in row.tests:
        file, _, test = name.partition("::")
        path = TESTS.parent / file
        assert path.is_file(), f"{row.case}: {file} does not exist"
        assert test in defined(path), f"{row.case}: {file} has no {test}"


def test_each_case_stands_once():
    cases = [row.case for row in rows()]
    assert len(cases) == len(set(cases))
    lines = [
        line for line in TABLE.read_text(encoding="utf-8").splitlines() if re.match(r"\|\s*[A-Z]{2}\d\d\s*\|", line)
    ]
    assert len(lines) == len(cases)
