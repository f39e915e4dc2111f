"""Tracebacks of cells: the cell's own lines with their surroundings, a library's frames in two lines each.

IPython's renderer parses every file that a frame comes from, which took seconds for torch's larger ones, on every rank
at the same time, between an interrupt and the next cell.
"""

from __future__ import annotations

import linecache
import os
import traceback
from collections import Counter
from collections.abc import Mapping
from types import TracebackType

__all__ = ["from_cell", "render"]

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_AROUND = 2  # lines of a cell shown before and after the one that failed
_MAX_LINES, _MAX_LINE = 400, 10_000  # of a traceback; characters of a line
_FIRST, _LAST = 3, 6  # frames of libraries shown of a longer row
_SAME = 3  # times a line is shown that calls itself, directly or by others
_GREEN, _CYAN, _RED, _END = "\x1b[32m", "\x1b[36m", "\x1b[31m", "\x1b[0m"

_BETWEEN = {
    "cause": "The above exception was the direct cause of the following exception:",
    "context": "During handling of the above exception, another exception occurred:",
}


def from_cell(tb: TracebackType | None, cells: Mapping[str, int]) -> list[traceback.FrameSummary]:
    """The frames from the cell's first line on, without nbdist's own; all of them if no cell takes part."""
    frames = [(step.tb_frame.f_code, step.tb_lineno) for step in _steps(tb)]
    first = next((i for i, (code, _) in enumerate(frames) if code.co_filename in cells), 0)
    return [
        traceback.FrameSummary(code.co_filename, lineno, code.co_name, lookup_line=False)
        for code, lineno in frames[first:]
        if not code.co_filename.startswith(_PACKAGE)
    ]


def _steps(tb: TracebackType | None) -> list[TracebackType]:
    steps = []
    while tb is not None:
        steps.append(tb)
        tb = tb.tb_next
    return steps


def render(error: BaseException, cells: Mapping[str, int]) -> list[str]:
    """Lines of an error and of those it came from, innermost frame and the error's own text last.

    Parameters
    ----------
    error
        With its traceback.
    cells
        Number of each cell by the file name its code has.
    """
    lines: list[str] = []
    chain: list[tuple[BaseException, str]] = [(error, "")]
    seen = {id(error)}
    while True:
        last = chain[-1][0]
        up, how = (last.__cause__, "cause") if last.__cause__ else (last.__context__, "context")
        if up is None or id(up) in seen or (how == "context" and last.__suppress_context__):
            break
        seen.add(id(up))
        chain.append((up, how))
    for i, (one, _) in reversed(list(enumerate(chain))):
        lines += [*_frames(from_cell(one.__traceback__, cells), cells), *_text(one)]
        if i:
            lines += ["", _BETWEEN[chain[i][1]], ""]
    if len(lines) > _MAX_LINES:
        half = _MAX_LINES // 2
        lines[half:-half] = [f"... {len(lines) - 2 * half:,} lines of the traceback omitted ..."]
    return [line if len(line) <= _MAX_LINE else f"{line[:_MAX_LINE]} ...{_END}" for line in lines]


def _text(error: BaseException) -> list[str]:
    try:
        if isinstance(error, BaseExceptionGroup):
            text = traceback.format_exception(type(error), error, None)
        else:
            text = traceback.format_exception_only(type(error), error)
    except Exception:  # a user's __str__ may raise anything
        text = [f"{type(error).__name__}: <its __str__ failed>"]
    head, *rest = "".join(text).rstrip("\n").split("\n")
    return [f"{_RED}{head}{_END}", *rest]


def _frames(frames: list[traceback.FrameSummary], cells: Mapping[str, int]) -> list[str]:
    lines: list[str] = []
    row: list[list[str]] = []
    times: Counter[tuple[str, int | None, str]] = Counter()
    omitted = 0

    def put_row() -> None:
        kept = row
        if len(row) > _FIRST + _LAST + 1:
            kept = [*row[:_FIRST], [f"... {len(row) - _FIRST - _LAST} more frames of libraries ..."], *row[-_LAST:]]
        for one in kept:
            lines.extend(one)
        if row:
            lines.append("")
        row.clear()

    def put_omitted() -> None:
        nonlocal omitted
        if omitted:
            put_row()
            lines.extend([f"... {omitted:,} more frames at these lines ...", ""])
        omitted = 0

    for frame in frames:
        times[frame.filename, frame.lineno, frame.name] += 1
        if times[frame.filename, frame.lineno, frame.name] > _SAME:
            omitted += 1
            continue
        put_omitted()
        if frame.filename in cells:
            put_row()
            lines += [*_cell_frame(frame, cells[frame.filename]), ""]
        else:
            source = linecache.getline(frame.filename, frame.lineno or 0).strip()
            row.append([f"{_CYAN}File {frame.filename}:{frame.lineno}{_END}, in {frame.name}", f"    {source}"])
    put_omitted()
    put_row()
    return lines


def _cell_frame(frame: traceback.FrameSummary, number: int) -> list[str]:
    here = frame.lineno or 1
    source = linecache.getlines(frame.filename)
    first, last = max(1, here - _AROUND), min(len(source), here + _AROUND)
    inside = "" if frame.name == "<module>" else f", in {frame.name}"
    lines = [f"{_CYAN}Cell In[{number}], line {here}{_END}{inside}"]
    for lineno in range(first, last + 1):
        text = source[lineno - 1].rstrip("\n")
        mark = f"{_GREEN}---->{lineno:>4}{_END} " if lineno == here else f"     {lineno:>4} "
        lines.append(f"{mark}{text}")
    return lines
