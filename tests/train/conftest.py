"""The ranks that the tests of this folder share, and the two ways to use them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from fleet import Fleet


@pytest.fixture(scope="session", autouse=True)
def fleet() -> Iterator[Fleet]:
    """Started before anything is watched for leaks; it lives as long as the session."""
    ranks = Fleet()
    ranks.start()
    yield ranks
    ranks.close()


@pytest.fixture
def ranks(fleet: Fleet) -> Callable[..., list[Any]]:
    """``ranks(n, case, *args)``: the values of all ranks; fails with the first rank's traceback."""

    def run(world_size: int, case: Callable[..., Any], *args: Any) -> list[Any]:
        told = fleet.run(world_size, case, *args)
        for rank, one in enumerate(told):
            if one.error:
                pytest.fail(f"rank {rank}: {one.error}", pytrace=False)
        return [one.value for one in told]

    return run


@pytest.fixture
def refusal(fleet: Fleet) -> Callable[..., str]:
    """``refusal(n, case, *args)``: the one line that every rank refuses with."""

    def run(world_size: int, case: Callable[..., Any], *args: Any) -> str:
        told = fleet.run(world_size, case, *args)
        assert [t.ename for t in told] == ["InputError"] * world_size, [t.error or t.value for t in told]
        lines = {t.evalue for t in told}
        assert len(lines) == 1, lines
        line = lines.pop()
        assert "\n" not in line
        return line

    return run


@pytest.fixture
def notices(fleet: Fleet) -> Callable[..., list[str]]:
    """``notices(n, case, *args)``: what each rank printed."""

    def run(world_size: int, case: Callable[..., Any], *args: Any) -> list[str]:
        told = fleet.run(world_size, case, *args)
        assert not any(t.error for t in told), [t.error for t in told]
        return [t.text for t in told]

    return run
