"""Shells for the tests of the magics."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from console import Console


@pytest.fixture(scope="module")
def shared_console() -> Iterator[Console]:
    made = Console()
    yield made
    made.close()


@pytest.fixture
def bare() -> Iterator[Console]:
    """A shell of the test's own, without the extension."""
    made = Console()
    yield made
    made.close()
