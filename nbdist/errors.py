"""Every exception nbdist raises on purpose.

::

    NbdistError
    ├── InputError          a bad argument, flag, name or value; one line says what was expected (also a ValueError)
    ├── NotRunningError     there is no cluster, or this code does not run inside a distributed cell
    ├── StartError          the workers could not be started, with what they said
    ├── WireError           a message could not be sent, read or trusted
    ├── CellError           a cell failed on at least one rank; holds one RankFailure per failed rank
    └── CollectiveBroken    a collective was broken off because another rank failed or stopped (also a RuntimeError)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

__all__ = [
    "CellError",
    "CollectiveBroken",
    "InputError",
    "NbdistError",
    "NotRunningError",
    "RankFailure",
    "StartError",
    "WireError",
    "name_ranks",
]


def name_ranks(ranks: Iterable[int]) -> str:
    """Ranks in short: ``0,2-3``."""
    parts: list[tuple[int, int]] = []
    for rank in sorted(set(ranks)):
        if parts and rank == parts[-1][1] + 1:
            parts[-1] = (parts[-1][0], rank)
        else:
            parts.append((rank, rank))
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


class NbdistError(Exception):
    """Base of every error nbdist raises on purpose."""

    def _render_traceback_(self) -> list[str]:
        """Lines IPython shows for this error (its hook for exceptions that draw themselves): no frames of nbdist."""
        return [f"{type(self).__name__}: {self}"]


class InputError(NbdistError, ValueError):
    """A bad argument; the message is one line that says what was expected."""


class NotRunningError(NbdistError):
    """There is no cluster to ask, or the caller is not inside a distributed cell."""


class StartError(NbdistError):
    """The workers could not be started."""


class WireError(NbdistError):
    """A message could not be sent, read or trusted."""


class CollectiveBroken(NbdistError, RuntimeError):
    """A collective was broken off because another rank failed or was stopped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """What went wrong on one rank.

    Attributes
    ----------
    rank
        Global rank.
    ename, evalue
        Type name and text of the exception, or of the way the process ended.
    traceback
        Rendered lines, innermost last, without nbdist's own frames.
    time_s
        Unix time of the failure; the earliest one is the cause.
    secondary
        True if this failure only follows from another rank's.
    hint
        One line that names the remedy of a known mistake.
    """

    rank: int
    ename: str
    evalue: str
    traceback: Sequence[str] = field(default_factory=tuple)
    time_s: float = 0.0
    secondary: bool = False
    hint: str | None = None


class CellError(NbdistError):
    """A distributed cell failed on at least one rank.

    Parameters
    ----------
    failures
        One entry per failed rank, in any order.
    report
        Lines the notebook shows instead of a traceback of the kernel.
    results
        Values of the ranks that finished, by rank.
    """

    def __init__(self, failures: Sequence[RankFailure], report: Sequence[str]) -> None:
        self.failures = tuple(sorted(failures, key=lambda f: (f.secondary, f.time_s, f.rank)))
        self.report = tuple(report)
        first = self.failures[0]
        ranks = [f.rank for f in self.failures if (f.ename, f.evalue) == (first.ename, first.evalue)]
        where = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {name_ranks(ranks)}"
        text = first.evalue.splitlines()[0] if first.evalue else ""
        what = ": ".join(part for part in (first.ename, text) if part)
        super().__init__(f"{where}: {what}" if first.ename else f"{where} {what}")

    @property
    def cause(self) -> RankFailure:
        """The earliest failure that is not a consequence of another."""
        return self.failures[0]

    def _render_traceback_(self) -> list[str]:
        """Lines IPython shows for this error (its hook for exceptions that draw themselves)."""
        return list(self.report)
