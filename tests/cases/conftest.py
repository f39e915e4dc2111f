"""Kernels for the cases: one shared by a module's cases, or a fresh one for what a case does to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from player import Notebook


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    """One kernel with two ranks for all cases of a module; its folder is ``notebook.folder``."""
    made = Notebook(tmp_path_factory.mktemp("notebook folder"))
    try:
        made.start(2)
        yield made
    finally:
        made.shutdown()


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Callable[..., Notebook]]:
    """Make a kernel of one's own: ``fresh(env=..., folder=...)``; it is shut down after the test."""
    made: list[Notebook] = []

    def make(folder: Path | None = None, **kwargs: Any) -> Notebook:
        made.append(Notebook(folder or tmp_path, **kwargs))
        return made[-1]

    yield make
    for notebook in made:
        notebook.shutdown()
