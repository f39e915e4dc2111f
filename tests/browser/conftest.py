"""Servers, a browser and notebooks for the tests of this folder; all need Chromium and Playwright."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from browser.lab import Browser, Server, Sheet
    from playwright.sync_api import Playwright


@pytest.fixture(scope="module")
def playwright() -> Iterator[Playwright]:
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        if os.environ.get("NBDIST_REQUIRE_BROWSER") == "1":
            pytest.fail("NBDIST_REQUIRE_BROWSER=1, but playwright is not installed")
        pytest.skip("playwright is not installed")
    with sync_playwright() as running:
        yield running


@pytest.fixture(scope="module")
def browser(playwright: Playwright, chromium: str) -> Iterator[Browser]:
    from browser.lab import Browser

    opened = Browser(playwright, chromium)
    yield opened
    opened.close()
    assert not opened.asked_elsewhere


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    from browser.lab import Server

    started = Server()
    yield started
    started.close()


@pytest.fixture
def sheet(server: Server, browser: Browser, request: pytest.FixtureRequest) -> Iterator[Callable[..., Sheet]]:
    """Opens notebooks: ``sheet(cells)`` or ``sheet(path)``; closes them, and asserts that no script of ours failed."""
    from browser.lab import Sheet

    opened: list[Sheet] = []

    def open_sheet(cells: Sequence[str] | Path, *, on: Server | None = None) -> Sheet:
        opened.append(Sheet(on or server, browser, f"{request.node.name.partition('[')[0]}-{len(opened)}.ipynb", cells))
        return opened[-1]

    yield open_sheet
    for one in opened:
        one.close()
        assert not one.errors
