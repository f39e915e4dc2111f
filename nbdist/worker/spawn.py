"""Lets child processes that a cell starts by spawn or forkserver know the cell's own classes and functions.

Such a child imports `__main__` from a file, and cells have none. So what belongs to `__main__` is sent by value
(cloudpickle) with the rest of what multiprocessing pickles for the child; the child runs no cell and no rank again.
"""

from __future__ import annotations

import multiprocessing.reduction as reduction
from collections import ChainMap
from typing import IO, Any

import cloudpickle

__all__ = ["install"]


class _ByValue(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, file: IO[bytes], protocol: int | None = None) -> None:
        registered: dict[type, Any] = reduction.ForkingPickler._extra_reducers  # type: ignore[attr-defined]
        # Before `__init__`, which reads it: the class's own table hides the C pickler's attribute afterwards.
        self.dispatch_table = ChainMap(registered, cloudpickle.Pickler.dispatch_table)
        super().__init__(file, protocol)


def _dump(obj: object, file: Any, protocol: int | None = None) -> None:
    _ByValue(file, protocol).dump(obj)


def install() -> None:
    """Use it for every child this process spawns from now on."""
    reduction.dump = _dump
