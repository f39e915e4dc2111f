"""What is sent to the widget: new points as packed columns, and now and then a whole curve again.

The browser cannot ask for anything while a cell runs (the kernel's main thread is busy), so the stream heals by itself:
beside the new points, each message repeats a few curves in short form (keyframes, as in video). A page that was opened
late, or missed a message, is complete again after one round.

A message is JSON without any NaN, and two buffers: `CHUNK` records, and 32-bit floats. Each record is followed in the
floats by its values, then its steps less `step0` if `STEPS` is set (else they are ``step0 + i * stride``), then its
times if `TIMES` is set (else they lie evenly from ``t0`` to ``t1``). Times count from the start of the run.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from nbdist.notebook.history import POINTS_PER_SERIES, Floats, Run, thin
from nbdist.notebook.palette import MANY_RANKS
from nbdist.notebook.summary import Finding, RankRow, findings, memory_note, progress, rank_rows

__all__ = ["CHUNK", "KEYFRAME", "STEPS", "TIMES", "Feed", "state"]

CHUNK = np.dtype(
    [
        ("name", "<u2"),  # index into the message's names
        ("rank", "<u2"),  # index into the message's ranks
        ("flags", "<u4"),
        ("n", "<u4"),  # points in this chunk
        ("before", "<u4"),  # points of this curve sent before it
        ("total", "<u4"),  # points of this curve after it; more than before + n: the chunk is thinned
        ("every", "<u4"),  # the store itself is thinned: one point stands for so many
        ("step0", "<f8"),
        ("stride", "<f4"),
        ("t0", "<f4"),
        ("t1", "<f4"),
        ("spare", "<f4"),
    ]
)
KEYFRAME, STEPS, TIMES = 1, 2, 4

BYTES_PER_S = 200_000  # of curves, in the long run
BURST = 500_000  # bytes in one message: two seconds in which nothing could be sent thin nothing
KEYFRAME_POINTS = 512
KEYFRAME_BYTES_PER_S = 20_000
FULL_BYTES = 4_000_000  # what a page that opens late gets of the whole run
STATE_S = 0.5  # at most how often the state of the ranks is sent; half as often with many ranks
LARGEST = float(np.finfo(np.float32).max)

Singles = npt.NDArray[np.float32]


class Feed:
    """What one widget has been sent of a run, and what comes next.

    Parameters
    ----------
    run
        The run to follow.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self.restart()

    def restart(self) -> None:
        """Forget what was sent: a page has been opened again."""
        self.seq = 0
        self._sent: dict[tuple[str, int], int] = {}
        self._repeated: dict[tuple[str, int], int] = {}  # total of the curve in its last keyframe
        self._version = -1
        self._said: Any = None
        self._said_s = -math.inf
        self._at_s: float | None = None
        self._tokens = float(BURST)
        self._repeat_tokens = 0.0
        self.behind = True  # there is more to send than fitted into the last message

    def message(self, now_s: float, *, at_once: bool = False) -> tuple[dict[str, Any], list[bytes]] | None:
        """What to send next, or None if nothing has changed.

        Parameters
        ----------
        now_s
            Monotonic time; sets how much may be sent.
        at_once
            Send the state of the ranks now, due or not.
        """
        run = self._run
        passed = 0.0 if self._at_s is None else now_s - self._at_s
        self._at_s = now_s
        self._tokens = min(BURST, self._tokens + passed * BYTES_PER_S)
        self._repeat_tokens = min(BURST / 4, self._repeat_tokens + passed * KEYFRAME_BYTES_PER_S)
        fresh = run.history.version != self._version or self.behind
        self._version = run.history.version
        chunks: list[tuple[Any, list[Singles]]] = []
        names = run.history.names()
        if fresh:
            self._deltas(names, chunks)
        self._keyframes(names, chunks)
        wait_s = STATE_S if len(run.ranks) <= MANY_RANKS else 2 * STATE_S
        due = at_once or now_s - self._said_s >= wait_s
        said = state(run) if due else None
        if said is not None:
            self._said_s = now_s
            if said == self._said:
                said = None
            else:
                self._said = said
        if not chunks and said is None:
            return None
        content, _ = self.empty()
        content["state"] = said
        if not chunks:
            return content, []
        head = np.array([record for record, _ in chunks], dtype=CHUNK)
        return content, [head.tobytes(), np.concatenate([part for _, parts in chunks for part in parts]).tobytes()]

    def empty(self) -> tuple[dict[str, Any], list[bytes]]:
        """A message that carries nothing new of the run."""
        self.seq += 1
        names = self._run.history.names()
        return {"type": "delta", "seq": self.seq, "names": names, "ranks": self._run.ranks, "state": None}, []

    def _keys(self, names: list[str]) -> list[tuple[str, int, int, int]]:
        places = {rank: i for i, rank in enumerate(self._run.ranks)}
        return [
            (name, rank, i, places[rank])
            for i, name in enumerate(names)
            for rank in self._run.history.ranks(name)
            if rank in places
        ]

    def _deltas(self, names: list[str], chunks: list[tuple[Any, list[Singles]]]) -> None:
        history = self._run.history
        due: list[tuple[str, int, int, int, int, Floats | None]] = []
        keys = self._keys(names)
        for name, rank, i, place in keys:
            sent = self._sent.get((name, rank), 0)
            points, total = history.since(name, rank, sent)
            if total > sent:
                due.append((name, rank, i, place, total, points))
        self.behind = False
        if not due:
            return
        first_time = min(KEYFRAME_POINTS * 32, max(KEYFRAME_POINTS, FULL_BYTES // 12 // len(keys)))
        # evenly spaced points take 4 bytes each, thinned ones 12
        waiting = sum(points.shape[1] for *_, points in due if points is not None)
        fits = 4 * waiting + CHUNK.itemsize * len(due) <= self._tokens
        room = POINTS_PER_SERIES if fits else max(8, int(self._tokens / len(due) / 12))
        for name, rank, i, place, total, points in due:
            key = (name, rank)
            sent = self._sent.get(key, 0)
            if points is None or (sent == 0 and points.shape[1] > room):
                if self._tokens <= 0:
                    self.behind = True
                    continue
                whole, total = history.whole(name, rank)
                self._add(chunks, self._pack(key, i, place, whole, first_time, 0, total, KEYFRAME))
                self._repeated[key] = total
            else:
                self._add(chunks, self._pack(key, i, place, points, room, sent, total, 0))
            self._sent[key] = total

    def _keyframes(self, names: list[str], chunks: list[tuple[Any, list[Singles]]]) -> None:
        """Repeat the curves that have waited longest, as far as there is room."""
        if self._repeat_tokens <= 0:
            return
        keys = {(name, rank): (i, place) for name, rank, i, place in self._keys(names)}
        waiting = [key for key in [*self._repeated, *keys] if key in keys]
        for key in dict.fromkeys(waiting):
            total = self._sent.get(key, 0)
            if not total or self._repeated.get(key) == total:
                continue
            i, place = keys[key]
            whole, now = self._run.history.whole(*key)
            if now != total:
                continue  # more has come in meanwhile: the page would lose the detail between
            chunk = self._pack(key, i, place, whole, KEYFRAME_POINTS, 0, total, KEYFRAME)
            chunks.append(chunk)
            self._repeat_tokens -= _size(chunk)
            self._repeated.pop(key, None)
            self._repeated[key] = total
            if self._repeat_tokens <= 0:
                return

    def _add(self, chunks: list[tuple[Any, list[Singles]]], chunk: tuple[Any, list[Singles]]) -> None:
        chunks.append(chunk)
        self._tokens -= _size(chunk)

    def _pack(
        self, key: tuple[str, int], i: int, place: int, points: Floats, keep: int, before: int, total: int, flags: int
    ) -> tuple[Any, list[Singles]]:
        n = points.shape[1]
        steps, times, values = thin(points[0], points[1], points[2], keep)
        shorter = len(values) < n
        every = self._run.history.thinned(*key)
        if flags & KEYFRAME:
            every = max(every, round(total / max(1, len(values))))
        times = times - self._run.started_s
        step0 = float(steps[0])
        strides = np.diff(steps)
        stride = float(strides[0]) if len(strides) else 1.0
        parts = [_singles(values)]
        if shorter or (len(strides) and not (strides == stride).all()):
            flags |= STEPS
            parts.append(_singles(steps - step0))
        if flags & KEYFRAME or shorter:
            flags |= TIMES
            parts.append(_singles(times))
        record = (i, place, flags, len(values), before, total, every, step0, stride, times[0], times[-1], 0.0)
        return record, parts


def _size(chunk: tuple[Any, list[Singles]]) -> int:
    return CHUNK.itemsize + sum(part.nbytes for part in chunk[1])


def _singles(numbers: Floats) -> Singles:
    """As 32-bit floats; a finite number stays finite."""
    with np.errstate(over="ignore"):
        singles = numbers.astype("<f4")
    if not np.isfinite(singles).all():
        singles = np.where(np.isfinite(numbers), np.clip(numbers, -LARGEST, LARGEST), numbers).astype("<f4")
    return singles


# ---- the state of the ranks, as JSON


def _clean(value: float | None) -> float | str | None:
    """A number that JSON can carry: NaN and infinities become words."""
    if value is None or math.isfinite(value):
        return value
    return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")


def _short(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.4g}")


def state(run: Run) -> dict[str, Any]:
    """All that the widget shows beside the curves: JSON values, columns by rank."""
    rows = rank_rows(run)
    said: list[Finding] = findings(run, rows)
    going = progress(run)
    return {
        "status": run.status,
        "elapsed_s": round(run.elapsed_s, 1) if run.ended_s is not None else None,
        "progress": None
        if going is None
        else {
            "name": going.name,
            "done": going.done,
            "total": going.total,
            "left_s": None if going.left_s is None else round(going.left_s),
        },
        "findings": [[found.level, found.text] for found in said],
        "bad": [[bad.name, bad.rank, bad.step, str(_clean(bad.value)), bad.count] for bad in run.history.non_finite()],
        "memory_note": memory_note(run),
        "columns": _columns(rows),
    }


def _columns(rows: list[RankRow]) -> dict[str, Any]:
    labels = list(dict.fromkeys(label for row in rows for label in row.memory.parts))
    keys = list(dict.fromkeys(key for row in rows for key in row.parts))
    names = list(dict.fromkeys(name for row in rows for name in row.last))
    return {
        "state": [row.state for row in rows],
        "step": [row.step for row in rows],
        "step_s": [_short(row.step_s) for row in rows],
        "steps_per_s": [_short(row.steps_per_s) for row in rows],
        "samples_per_s": [_short(row.samples_per_s) for row in rows],
        "last": {name: [_clean(row.last.get(name)) for row in rows] for name in names},
        "memory": {label: [row.memory.parts.get(label) for row in rows] for label in labels},
        "used": [row.memory.used for row in rows],
        "limit": [row.memory.limit for row in rows],
        "peak": [row.memory.peak for row in rows],
        "parts": {key: [_short(row.parts.get(key)) for row in rows] for key in keys},
        "load": [_short(row.load_percent) for row in rows],
        "power": [_short(row.power_w) for row in rows],
        "temperature": [_short(row.temperature_c) for row in rows],
    }
