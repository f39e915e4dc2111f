"""What a rank reports while a cell runs: metrics (`log`), progress (`track`) and samples of its own state.

The hot path appends to a deque and nothing else. The rank's I/O thread calls `Telemetry.pump`, which turns what is
ready into numbers, packs it in columns and hands messages to the channel. Nothing here takes part in a collective.

`log` and `track` can be imported anywhere: this module imports torch only once a `Telemetry` is made, in a rank.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from time import monotonic, perf_counter, time
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from nbdist.errors import InputError, NotRunningError
from nbdist.wire.messages import Message, Metrics, Notice, Sample

if TYPE_CHECKING:
    import torch

    from nbdist.worker.metric_values import Pending

__all__ = ["Telemetry", "current", "log", "track"]

T = TypeVar("T")
Send = Callable[[Message, Sequence["memoryview | bytes"]], None]
Point = tuple[str, float, float, "float | Pending"]  # name, step, unix time, value

_MOST_WAITING = 200_000  # points in the queue (about 40 MB); beyond, only each name's last one is kept
_SAMPLE_S = 0.5  # at most how often a sample is sent
_QUIET_S = 0.25  # how soon pump wants to be called again while no cell runs
_READY_S = 2.0  # how long the end of a cell waits for numbers that are still on their way from the GPU

current: Telemetry | None = None
"""The rank's telemetry; None outside of a rank. Set by worker/main."""

_forked = False  # this process was forked from a rank: a DataLoader worker


class Progress:
    """How far one `track` loop is.

    Attributes
    ----------
    done, total
        Items; ``total`` is None if the length is unknown.
    active
        False once the loop has ended.
    """

    __slots__ = ("_since_s", "active", "done", "name", "total")

    def __init__(self, name: str, total: int | None) -> None:
        self.name = name
        self.total = total
        self.done = 0
        self.active = True
        self._since_s: float | None = None  # monotonic, when the first item was done: it pays for what is set up once

    def turn(self) -> None:
        """Count one more item."""
        self.done += 1
        if self._since_s is None:
            self._since_s = monotonic()

    def row(self) -> dict[str, Any]:
        """JSON values for a sample: name, done, total, left_s (None: not known), active."""
        left_s = None
        if self.active and self.total is not None and self._since_s is not None and self.done > 1:
            left_s = (self.total - self.done) * (monotonic() - self._since_s) / (self.done - 1)
        return {"name": self.name, "done": self.done, "total": self.total, "left_s": left_s, "active": self.active}


class Telemetry:
    """Collects what this rank reports.

    Parameters
    ----------
    send
        Takes a message and its buffers; only called inside `pump`.
    rank
        Global rank.
    device
        The rank's device.
    """

    def __init__(self, send: Send, *, rank: int, device: torch.device) -> None:
        from nbdist.worker import metric_values
        from nbdist.worker.memory_use import MemoryUse
        from nbdist.worker.step_parts import StepParts

        self.rank = rank
        self.memory = MemoryUse(device)
        self.parts = StepParts(device, stepped=self.memory.saw_optimizer, called=self.memory.saw_module)
        self._send = send
        self._number = metric_values.number
        self._pending = metric_values.Pending
        self._sources: dict[str, Callable[[], Mapping[str, Any]]] = {}
        self._broken: set[str] = set()  # sources that raised
        self._queue: deque[Point] = deque()
        self._late: dict[str, Point] = {}  # the last point of each name that found the queue full
        self._outbox: deque[tuple[Message, list[memoryview | bytes]]] = deque()
        self._lock = threading.Lock()  # between pump and end; never taken on the hot path
        self._run_id: str | None = None
        self._reset(0.1)
        os.register_at_fork(after_in_child=_leave_fork)

    def _reset(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._next: dict[str, float] = {}  # the step of a name's next point that brings none
        self._points: dict[str, list[tuple[float, float, float]]] = {}
        self._refused: set[str] = set()
        self._logged: set[str] = set()  # names the user has logged
        self._progress: dict[str, Progress] = {}
        self._seq = 0
        self._merged = 0  # points that gave way to a later one of their name
        self._lost = 0  # points whose number never came from the GPU
        self._began_s = self._sent_s = self._sampled_s = monotonic()
        self._wait_s = interval_s
        self._spoke = False  # the run has reported anything

    # ---- the rank's main thread

    def begin(self, run_id: str, *, interval_s: float) -> None:
        """Report what follows as part of this run, at most every ``interval_s`` seconds."""
        with self._lock:
            self._queue.clear()  # of threads that logged after their cell had ended
            self._late.clear()
            self._reset(interval_s)
            self._run_id = run_id
            self.memory.begin()
            self.parts.begin()

    def record(self, values: Mapping[str, object], step: float | None, now_s: float, *, logged: bool = False) -> None:
        """Queue one point for each name.

        Parameters
        ----------
        values
            Numbers by name. Numbers on the CPU are read at once (the caller may change a tensor in place afterwards);
            those on a GPU are copied on its current stream and read when the copy is done.
        step
            Position on the curve's x axis; None: one more than the last point of that name.
        now_s
            Unix time.
        logged
            The user's own `log`: from its first point on, a name takes no others (found by looking into the loop).
        """
        queue = self._queue
        following = self._next
        if logged:
            if not values.keys() <= self._logged:
                self._claim(values.keys() - self._logged)
        elif not self._logged.isdisjoint(values):
            values = {name: value for name, value in values.items() if name not in self._logged}
        for name, value in values.items():
            if type(value) is not float:
                try:
                    value = self._number(value)
                except Exception as error:  # whatever a value's own conversion raises must not end the training loop
                    self._refuse(name, error)
                    continue
            at = following.get(name, 0) if step is None else step
            following[name] = at + 1
            if len(queue) < _MOST_WAITING:
                queue.append((name, at, now_s, value))
            else:
                self._merged += 1
                self._late[name] = (name, at, now_s, value)

    def _claim(self, names: Set[str]) -> None:
        """Forget points of these names that were found, not logged, as far as they have not been sent."""
        self._logged |= names
        if not self._next.keys().isdisjoint(names):
            with self._lock:
                kept = [point for point in self._queue if point[0] not in names]
                self._queue.clear()
                self._queue.extend(kept)
                for name in names:
                    self._points.pop(name, None)
                    self._next.pop(name, None)

    def _refuse(self, name: str, error: Exception) -> None:
        if name not in self._refused:
            self._refused.add(name)
            self._notice(f"log({name}=...) skipped: {error}")

    def _notice(self, text: str) -> None:
        self._outbox.append((Notice(text=text, run_id=self._run_id), []))

    def progress(self, name: str | None, total: int | None) -> Progress:
        """A new progress, shown until the run ends; one of the same name gives way to it."""
        if name is None:
            active = sum(p.active for p in self._progress.values())
            name = "progress" if not active else f"progress {active + 1}"
        progress = self._progress[name] = Progress(name, total)
        return progress

    def end(self) -> None:
        """End the run: turn everything queued into numbers; `pump` sends it."""
        with self._lock:
            if self._run_id is None:
                return
            self.parts.end()
            deadline_s = monotonic() + _READY_S
            self._collect(deadline_s)
            self._pack()
            if self._spoke or monotonic() - self._began_s > _SAMPLE_S:
                self._outbox.append((self._sample(), []))
            if self._merged:
                self._notice(f"log(): {self._merged:,} points merged into later ones, as they came faster than sent")
            if self._lost:
                self._notice(f"log(): {self._lost:,} points lost, the GPU did not deliver them")
            self._run_id = None

    # ---- the rank's I/O thread

    def add_source(self, name: str, fn: Callable[[], Mapping[str, Any]]) -> None:
        """Merge what ``fn`` returns (JSON values) into each sample; it is called on the I/O thread."""
        self._sources[name] = fn

    def pump(self, final: bool = False) -> float:
        """Send what is due.

        Parameters
        ----------
        final
            Send points before they are due. (After `end` everything goes in any case.)

        Returns
        -------
        float
            Seconds until it wants to be called again.
        """
        started_s = perf_counter()
        with self._lock:
            if self._run_id is not None:
                now_s = monotonic()
                self._collect(None)
                if final or now_s - self._sent_s >= self._interval_s:
                    self._pack()
                    self._sent_s = now_s
                if now_s - self._sampled_s >= _SAMPLE_S:
                    self._outbox.append((self._sample(), []))
                    self._sampled_s = now_s
        while self._outbox:
            self._send(*self._outbox.popleft())
        if self._run_id is None:
            return _QUIET_S
        # a tenth of one core at most, however many points come in: the loop's thread needs the interpreter too
        return min(max(self._interval_s, 10 * (perf_counter() - started_s)), 1.0)

    def _collect(self, deadline_s: float | None) -> None:
        """Move ready points from the queue to their series; wait until the deadline for those that are not."""
        queue = self._queue
        for _ in range(len(queue)):  # what is appended meanwhile can wait for the next time
            name, step, now_s, value = queue[0]
            number = value if isinstance(value, float) else self._read(value, deadline_s)
            if number is None and deadline_s is None:
                return
            queue.popleft()
            if number is None:
                self._lost += 1
            else:
                self._add(name, step, now_s, number)
        for name in list(self._late):
            name, step, now_s, value = self._late.pop(name)
            number = self._read(value, deadline_s if deadline_s is not None else monotonic() + _READY_S)
            if number is None:
                self._lost += 1
            else:
                self._add(name, step, now_s, number)
                self._points[name].sort(key=lambda point: point[1])

    def _read(self, value: float | Pending, deadline_s: float | None) -> float | None:
        return value.read(deadline_s) if isinstance(value, self._pending) else float(value)

    def _add(self, name: str, step: float, now_s: float, value: float) -> None:
        series = self._points.get(name)
        if series is None:
            series = self._points[name] = []
        series.append((step, now_s, value))

    def _pack(self) -> None:
        if not self._points:
            return
        points, self._points = self._points, {}
        series: list[dict[str, Any]] = []
        buffers: list[memoryview | bytes] = []
        for name, rows in points.items():
            series.append({"name": name, "n": len(rows)})
            columns = np.ascontiguousarray(np.asarray(rows, dtype=np.float64).T)
            buffers.append(columns.data.cast("B"))
        assert self._run_id is not None
        self._outbox.append((Metrics(run_id=self._run_id, seq=self._seq, series=series), buffers))
        self._seq += 1
        self._spoke = True

    def _sample(self) -> Sample:
        self._spoke = True
        return Sample(run_id=self._run_id, time_s=time(), values=self.sample())

    def sample(self) -> dict[str, Any]:
        """One reading of this rank's state: JSON values, None where not available.

        Memory and GPU are described in `MemoryUse.read`, the parts of a step in `StepParts.read`; ``progress`` is a
        list of rows of `Progress`, the outermost running loop first (without a `track`: of the DataLoader in use);
        ``merged_points`` counts points that gave way to later ones; further names come from the sources.
        """
        values: dict[str, Any] = {}
        for name, source in (*self._sources.items(), ("memory", self.memory.read), ("step parts", self.parts.read)):
            if name in self._broken:
                continue
            try:
                found = source()
            except Exception as error:  # a broken source must not cost the others
                self._broken.add(name)
                self._notice(f"{name}: no longer measured ({type(error).__name__}: {error})")
            else:
                values.update((k, v) for k, v in found.items() if v is not None or k not in values)
        rows = sorted((p.row() for p in list(self._progress.values())), key=lambda row: not row["active"])
        loader = values.pop("loader", None)
        values["progress"] = rows if rows or loader is None else [loader]
        values["merged_points"] = self._merged
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


def _leave_fork() -> None:
    """In a process forked from a rank: its copy of the queue is sent by nobody."""
    global current, _forked
    if current is not None:
        current, _forked = None, True


def log(*values: object, step: float | None = None, **metrics: object) -> None:
    """Show numbers as curves below the cell, one curve for each name and rank.

    Parameters
    ----------
    step
        Position on the x axis; None: one more than the last of that name.
    **metrics
        Numbers by name: int, bool, float, numpy scalars, `Decimal`, tensors of one element on any device. Others are
        skipped with one notice. Names that are no Python names: ``log(**{"train/loss": loss})``.

    Raises
    ------
    NotRunningError
        In a notebook's own kernel. In a script, e.g. under torchrun, it does nothing.
    """
    if values:
        raise InputError(f"log() takes metrics by name, as in log(loss=loss), not log({type(values[0]).__name__})")
    telemetry = current
    if telemetry is None:
        _log_outside()
        return
    if step is not None and type(step) is not int:
        step = _step(telemetry, step)
    telemetry.record(metrics, step, time(), logged=True)


def _step(telemetry: Telemetry, step: object) -> float | None:
    try:
        number = telemetry._number(step)
        if isinstance(number, float):
            return number
        reason = "a number on a GPU is not known yet"
    except Exception as error:  # as for a metric's value: the training loop goes on
        reason = str(error)
    if "step=" not in telemetry._refused:
        telemetry._refused.add("step=")
        telemetry._notice(f"log(step=...): counted by nbdist instead: {reason}")
    return None


def _log_outside() -> None:
    if _forked:
        warnings.warn("log() records nothing in a process forked from a rank (a DataLoader worker)", stacklevel=3)
        return
    shell = sys.modules.get("IPython")
    if shell is not None and shell.get_ipython() is not None:
        raise NotRunningError("log() works inside %%distributed cells, not in the notebook's own kernel")


class _Track(Generic[T]):
    def __init__(self, iterable: Iterable[T], total: int | None, name: str | None) -> None:
        self._iterable = iterable
        self._total = total
        self._name = name

    def __len__(self) -> int:
        return len(self._iterable)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[T]:
        telemetry = current
        if telemetry is None:
            yield from self._iterable
            return
        progress = telemetry.progress(self._name, self._total)
        try:
            for item in self._iterable:
                yield item
                progress.turn()
        finally:
            progress.active = False


def track(iterable: Iterable[T], *, total: int | None = None, name: str | None = None) -> Iterable[T]:
    """Pass an iterable through and show how far each rank is, and the time left.

    Parameters
    ----------
    iterable
        What to loop over, e.g. a DataLoader.
    total
        Number of items; None: the iterable's length, if it has one.
    name
        What the progress is called; None: ``progress``.

    Returns
    -------
    Iterable
        The same items. Outside of a rank nothing else happens.
    """
    if total is not None and (not isinstance(total, int) or isinstance(total, bool) or total < 0):
        raise InputError(f"track(total=...) takes a number of items from 0, not {total!r}")
    if name is not None and not isinstance(name, str):
        raise InputError(f"track(name=...) takes a string, not {type(name).__name__}")
    try:
        iter_of = type(iterable).__iter__
    except AttributeError:
        iter_of = None
    if iter_of is None and not hasattr(type(iterable), "__getitem__"):
        raise InputError(f"track() takes an iterable, not {type(iterable).__name__}")
    if total is None:
        try:
            total = len(iterable)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            total = None
    return _Track(iterable, total, name)
