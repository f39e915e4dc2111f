"""How long tests wait, and the one way they wait.

No test asserts that something is fast: a deadline only says when to give up, so each is several times what the step
takes on a small, busy machine. Tests wait for a condition, never for a guessed time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

__all__ = ["BREAK_S", "CELL_S", "GONE_S", "POLL_S", "START_S", "Late", "wait_until"]

START_S = 60.0
"""A kernel, a fork server, or the ranks of a cluster come up (torch is imported once)."""

CELL_S = 60.0
"""A cell whose work takes at most a few seconds comes back."""

BREAK_S = 30.0
"""A blocked, dead or interrupted rank is dealt with and the cell comes back."""

GONE_S = 10.0
"""Processes, threads, sockets and files are gone after what owned them has ended."""

POLL_S = 0.02
"""Between two looks at a condition."""

T = TypeVar("T")


class Late(AssertionError):
    """A condition did not come true before its deadline."""


def wait_until(condition: Callable[[], T], timeout_s: float = CELL_S, what: str = "the condition") -> T:
    """Return the first true value of ``condition()``; raise `Late` when there was none in time."""
    end = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() >= end:
            raise Late(f"{what}: not within {timeout_s:g} s")
        time.sleep(POLL_S)
