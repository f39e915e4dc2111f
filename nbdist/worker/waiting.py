"""Whether the main thread waits in a collective, told from its stack: the collectives themselves pay nothing."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from nbdist.worker.frames import is_library, method_called

__all__ = ["Waiting"]

_SURE_AFTER_S = 0.2  # a backward pass that has slept this long waits for another rank
_WAITS = ("wait", "synchronize")  # methods in C++: of a Work, a CUDA event or stream
_NBDIST = str(Path(__file__).parents[1]).replace("\\", "/") + "/"
# Python functions of c10d that a cell calls by their own names.
_C10D = "torch/distributed/distributed_c10d.py"


class Waiting:
    """Looks at the main thread now and then."""

    def __init__(self) -> None:
        self._ident = threading.main_thread().ident or 0
        self._state = f"/proc/self/task/{os.getpid()}/stat"  # the main thread; Python's native_id is stale after a fork
        self._mark: object = None
        self._since_s = 0.0

    def look(self, issued: Callable[[], int]) -> tuple[str, float] | None:
        """What the main thread waits in, and since when (unix time); None if it waits in no collective.

        Parameters
        ----------
        issued
            Counts the collectives of the default group: as long as the count grows, nothing waits.
        """
        now_s = time.time()
        frame = sys._current_frames().get(self._ident)
        found = _operation(frame) if frame is not None else None
        if frame is None or found is None:
            self._mark = None
            return None
        operation, sure = found
        # In a backward pass the thread may also be computing: its time of CPU tells that it moves.
        work = None if sure else (time.clock_gettime_ns(time.pthread_getcpuclockid(self._ident)), self._runs())
        mark = (id(frame), frame.f_lasti, operation, issued(), work)
        if mark != self._mark:
            self._mark, self._since_s = mark, now_s
        if not sure and now_s - self._since_s < _SURE_AFTER_S:
            return None
        return operation, self._since_s

    def _runs(self) -> int:
        """0 while the thread sleeps; a number that is never the same while it wants to run."""
        with open(self._state) as stat:
            state = stat.read().rpartition(")")[2].split()[0]
        return 0 if state in "SD" else time.monotonic_ns()


def _operation(frame: FrameType) -> tuple[str, bool] | None:
    """The collective a stack is in, and whether that is certain (a backward pass may also be computing)."""
    names: list[str] = []
    part, backward, certain = "", False, False
    current: FrameType | None = frame
    innermost = True
    while current is not None:
        path = current.f_code.co_filename.replace("\\", "/")
        if path.startswith(_NBDIST):  # what times a call stands between it and its caller
            current = current.f_back
            continue
        if not is_library(path):
            if innermost:
                return ("wait", True) if method_called(current) in _WAITS else None
            break
        name = current.f_code.co_name
        if path.endswith(_C10D):
            certain = True
            if not name.startswith("_") and name not in ("wrapper", "making"):
                names.append(name)
        elif path.endswith("torch/distributed/_functional_collectives.py"):
            certain = True
            names.append(name)
        elif "torch/distributed/fsdp/" in path or "torch/distributed/_composable/" in path:
            part = part or "FSDP"
            certain = certain or "wait" in name or "unshard" in name
        elif path.endswith("torch/nn/parallel/distributed.py"):
            part = part or "DDP"
        elif path.endswith("torch/autograd/graph.py") and name == "_engine_run_backward":
            backward = True
        innermost = False
        current = current.f_back
    # Without a frame of Python a backward pass can only be waiting in the all-reduce of DDP's reducer, which is C++.
    phase = "backward" if backward else "forward"
    where = f"{part} {phase}" if part else ("DDP backward" if backward else "")
    if names:
        return (f"{names[-1]} ({where})" if where else names[-1]), True
    if where:
        return where, certain
    return None
