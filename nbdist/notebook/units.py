"""Numbers as people read them; what is not known is ``n/a``, never 0."""

from __future__ import annotations

import math
from collections.abc import Iterable

__all__ = ["GIB", "KIB", "MIB", "bytes_text", "duration_text", "number_text", "ranks_text", "seconds_text"]

KIB, MIB, GIB = 1024, 1024**2, 1024**3


def ranks_text(ranks: Iterable[int]) -> str:
    """``rank 3`` or ``ranks 0-2, 5``."""
    ordered = sorted(ranks)
    if len(ordered) == 1:
        return f"rank {ordered[0]}"
    spans: list[list[int]] = []
    for rank in ordered:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return "ranks " + ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def number_text(value: float | None) -> str:
    """Four significant digits."""
    return "n/a" if value is None else f"{value:.4g}"


def bytes_text(size: int | None) -> str:
    """KiB, MiB or GiB."""
    if size is None:
        return "n/a"
    if abs(size) < MIB:
        return f"{size / KIB:.1f} KiB"
    return f"{size / GIB:.2f} GiB" if abs(size) >= GIB else f"{size / MIB:.1f} MiB"


def seconds_text(seconds: float | None) -> str:
    """A short time: 3.2 ms, 1.25 s."""
    if seconds is None:
        return "n/a"
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    return f"{seconds:.3g} s"


def duration_text(seconds: float | None) -> str:
    """A long time: 42 s, 3 min 05 s, 2 h 07 min."""
    if seconds is None or not math.isfinite(seconds):
        return "n/a"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
