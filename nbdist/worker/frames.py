"""Reading the caller's frames: which loop it is in, and its variables, without keeping any of them alive.

Up to Python 3.12 reading ``f_locals`` of a function's frame makes a dictionary of all its variables that stays with the
frame: the logits of a training step would live on until the function returns. So a frame's names are looked up in its
code first, and the dictionary is emptied again after a read.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

__all__ = ["MISSING", "Loop", "Loops", "is_library", "method_called", "read", "user_frames"]

MISSING = object()

_SNAPSHOTS = sys.version_info < (3, 13)
_CO_OPTIMIZED = 0x1
_TORCH = str(Path(torch.__file__).parent) + "/"
_NBDIST = str(Path(__file__).parents[1]) + "/"
# Between a training loop and optimizer.step() these add frames that are neither the user's nor a training loop.
_WRAPPERS = ("/accelerate/", "/lightning_fabric/", "/lightning/fabric/", "/lightning_utilities/")
_STANDARD = ("/contextlib.py", "/functools.py")
# What the body of a loop over optimizers calls, in contrast to a training loop, which calls a model.
_STEPPING = {
    "step",
    "zero_grad",
    "unscale_",
    "update",
    "clip_grad_norm_",
    "clip_grad_value_",
    "parameters",
    "utils",
    "nn",
}

Loop = tuple[int, int]  # first and last bytecode offset


@lru_cache(maxsize=4096)
def is_library(path: str) -> bool:
    """Whether a frame's file belongs to torch, to nbdist or to a library that wraps optimizers."""
    if path.startswith((_TORCH, _NBDIST)):
        return True
    if path.endswith(_STANDARD) and not path.startswith(("<", "/tmp")):
        return True
    return "site-packages" in path and any(part in path for part in _WRAPPERS)


def user_frames(frame: FrameType | None) -> Iterator[FrameType]:
    """The frames outside libraries, innermost first, up to the first one at cell or module level."""
    while frame is not None:
        if not is_library(frame.f_code.co_filename):
            yield frame
            if not frame.f_code.co_flags & _CO_OPTIMIZED:
                return
        frame = frame.f_back


class Loops:
    """The loops of the code objects met in one run, looked up by position.

    Kept by the code's identity, as hashing a code object hashes all its constants.
    """

    def __init__(self) -> None:
        self._loops: dict[int, tuple[CodeType, tuple[Loop, ...]]] = {}
        self._found: dict[tuple[int, int], Loop | None] = {}

    def clear(self) -> None:
        """Forget all code, which would otherwise live on."""
        self._loops.clear()
        self._found.clear()

    def of(self, code: CodeType) -> tuple[Loop, ...]:
        """All loops of a code object, the shortest first."""
        known = self._loops.get(id(code))
        if known is None:
            known = self._loops[id(code)] = (code, _find_loops(code))
        return known[1]

    def innermost(self, code: CodeType, offset: int) -> Loop | None:
        """The innermost loop a position is in."""
        return next((loop for loop in self.of(code) if loop[0] <= offset <= loop[1]), None)

    def training(self, code: CodeType, offset: int) -> Loop | None:
        """The innermost loop a position is in that does more than step optimizers.

        The turn of ``for o in optimizers: o.step()`` is the middle of a training step.
        """
        key = id(code), offset
        if key not in self._found:
            around = (loop for loop in self.of(code) if loop[0] <= offset <= loop[1])
            self._found[key] = next((loop for loop in around if not _only_steps(code, loop)), None)
        return self._found[key]


def _find_loops(code: CodeType) -> tuple[Loop, ...]:
    """Every span that a backward jump closes; spans that overlap are one loop (``while`` tests at both ends)."""
    spans: list[Loop] = []
    for instruction in dis.get_instructions(code):
        target = instruction.argval
        jumps_back = "JUMP_BACKWARD" in instruction.opname and "NO_INTERRUPT" not in instruction.opname  # of an await
        if jumps_back and isinstance(target, int) and target <= instruction.offset:
            spans.append((target, instruction.offset))
    merged: list[Loop] = []
    for first, last in sorted(spans):
        for i, (other_first, other_last) in enumerate(merged):
            if first == other_first or other_first < first <= other_last < last:
                merged[i] = other_first, max(last, other_last)
                break
        else:
            merged.append((first, last))
    return tuple(sorted(merged, key=lambda loop: loop[1] - loop[0]))


def _only_steps(code: CodeType, loop: Loop) -> bool:
    called, calls = set(), 0
    for instruction in dis.get_instructions(code):
        if not loop[0] <= instruction.offset <= loop[1]:
            continue
        if instruction.opname in ("LOAD_METHOD", "LOAD_ATTR"):
            called.add(instruction.argval)
        elif instruction.opname in ("CALL", "CALL_FUNCTION_EX", "CALL_KW"):
            calls += 1
    return "step" in called and called <= _STEPPING and calls <= len(called) + 1


def read(frame: FrameType, name: str) -> Any:
    """The value of a variable of a frame; `MISSING` if it has none of that name.

    A frame at cell or module level is read through its globals.
    """
    code = frame.f_code
    if not code.co_flags & _CO_OPTIMIZED:
        return frame.f_globals.get(name, MISSING)
    if name not in code.co_varnames and name not in code.co_cellvars and name not in code.co_freevars:
        return MISSING
    variables = frame.f_locals
    try:
        return variables.get(name, MISSING)
    finally:
        if _SNAPSHOTS:
            variables.clear()


def method_called(frame: FrameType) -> str | None:
    """The name of the method a frame is calling; None if it calls none."""
    name = called = None
    for instruction in dis.get_instructions(frame.f_code):
        if instruction.offset > frame.f_lasti:  # in a call of Python code it stands in the caches behind the CALL
            break
        called = None
        if instruction.opname in ("LOAD_METHOD", "LOAD_ATTR"):
            name = instruction.argval
        elif instruction.opname.startswith("CALL"):
            name, called = None, name
    return called
