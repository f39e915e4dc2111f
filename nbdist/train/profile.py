"""Where the time and the memory go: ``profile()``, ``span()`` and ``memory_snapshot()``."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._autograd import DeviceType
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity, record_function, schedule
from torch.profiler import profile as torch_profile

from nbdist.errors import InputError
from nbdist.train.tables import html_table, text_table

__all__ = ["Profile", "memory_snapshot", "profile", "span"]

# The profiler's library tells every start and stop on stderr below 6; it reads this when it is first used.
os.environ.setdefault("KINETO_LOG_LEVEL", "6")

_COMMUNICATION = ("nccl", "gloo:")
_ROWS = 12
_WARMUP = 1

Interval = tuple[float, float]


@dataclass(slots=True, kw_only=True)
class Profile:
    """What was recorded on this rank; empty until the ``with`` block has ended, and on ranks that do not record.

    Attributes
    ----------
    steps
        Optimizer steps recorded.
    trace
        File for https://ui.perfetto.dev, or None.
    seconds
        Length of the recording.
    communication_s, exposed_s
        Time in which collectives ran, and the part of it in which nothing was computed meanwhile.
    rows
        Operation, its own time in ms on the device (on the CPU without one), number of calls; the longest first.
    problem
        Why there is nothing, or no trace file.
    """

    rank: int
    steps: int = 0
    trace: Path | None = None
    seconds: float = 0.0
    communication_s: float = 0.0
    exposed_s: float = 0.0
    rows: list[tuple[str, str, str]] = field(default_factory=list)
    problem: str = ""

    @property
    def sentence(self) -> str:
        """How much communication was not hidden behind computation."""
        if not self.steps:
            return f"rank {self.rank}: nothing recorded" + (f": {self.problem}" if self.problem else "")
        if not self.communication_s:
            return f"rank {self.rank}: {self.steps} steps in {self.seconds:.3g} s, no collective among them"
        share, of_step = self.exposed_s / self.communication_s, self.exposed_s / self.seconds
        return (
            f"rank {self.rank}: {self.steps} steps in {self.seconds:.3g} s; collectives ran for "
            f"{self.communication_s:.3g} s, {share:.0%} of that not hidden behind computation, which is {of_step:.0%} "
            "of the time"
        )

    def __str__(self) -> str:
        if not self.rows:
            return self.sentence
        return "\n".join([self.sentence, text_table(("operation", "ms", "calls"), self.rows), *self._where()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return html_table(self.sentence, ("operation", "ms", "calls"), self.rows, self._where())

    def _where(self) -> list[str]:
        if self.trace:
            return [f"trace for ui.perfetto.dev: {self.trace}"]
        return [self.problem] if self.problem else []


@contextmanager
def profile(
    steps: int = 3,
    *,
    wait: int = 2,
    ranks: Sequence[int] | None = (0,),
    folder: str | os.PathLike[str] | None = "profile",
) -> Iterator[Profile]:
    """Record a few optimizer steps with ``torch.profiler``, on chosen ranks.

    ::

        with nbdist.profile(steps=3) as found:
            for x, y in batches:
                ...
                optimizer.step()
        found

    Parameters
    ----------
    steps
        Optimizer steps to record.
    wait
        Steps to let pass before, besides one for warming up: the first ones are not typical.
    ranks
        Ranks that record; the others run as ever. None: all.
    folder
        Where each rank's trace file goes, ``rank0.json.gz``; None writes none.

    Yields
    ------
    Profile
        Filled in when the block ends.
    """
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else int(os.environ.get("RANK", 0))
    if steps < 1 or wait < 0:
        raise InputError("profile(): steps expects 1 or more, and wait 0 or more")
    found = Profile(rank=rank)
    if ranks is not None and rank not in ranks:
        yield found
        return
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    path = None if folder is None else Path(folder).absolute() / f"rank{rank}.json.gz"

    def ready(recording: Any) -> None:
        _fill(found, recording.events(), recording.key_averages())
        if path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                recording.export_chrome_trace(str(path))
            except OSError as error:  # in the middle of the user's loop, which must not end for it
                found.problem = f"no trace file: {error}"
            else:
                found.trace = path

    plan = schedule(wait=wait, warmup=_WARMUP, active=steps, repeat=1)
    count = 0
    with torch_profile(activities=activities, schedule=plan, on_trace_ready=ready) as recording:

        def stepped(*_: Any) -> None:
            nonlocal count
            count += 1
            recording.step()

        hook = register_optimizer_step_post_hook(stepped)
        try:
            yield found
        finally:
            hook.remove()
    found.steps = min(max(count - wait - _WARMUP, 0), steps)
    if not found.steps:
        found.problem = f"{count} optimizer steps were done, the first {wait + _WARMUP} are never recorded"


def _fill(found: Profile, events: Iterable[Any], averages: Iterable[Any]) -> None:
    listed = list(events)
    on_device = any(e.device_type != DeviceType.CPU for e in listed)
    kept = [e for e in listed if (e.device_type != DeviceType.CPU) == on_device]
    communication = [_range(e) for e in kept if e.name.startswith(_COMMUNICATION)]
    # On a GPU every other kernel computes; on the CPU an operation does, and autograd's nodes around it may be waiting.
    computing = [
        _range(e) for e in kept if not e.name.startswith(_COMMUNICATION) and (on_device or e.name.startswith("aten::"))
    ]
    spans = [_range(e) for e in listed]
    found.seconds = (max((b for _, b in spans), default=0.0) - min((a for a, _ in spans), default=0.0)) / 1e6
    found.communication_s = _length(_union(communication)) / 1e6
    found.exposed_s = _length(_without(_union(communication), _union(computing))) / 1e6
    key = "self_device_time_total" if on_device else "self_cpu_time_total"
    longest = sorted(averages, key=lambda e: -getattr(e, key))[:_ROWS]
    found.rows = [(e.key[:60], f"{getattr(e, key) / 1e3:.2f}", str(e.count)) for e in longest if getattr(e, key)]


def _range(event: Any) -> Interval:
    return float(event.time_range.start), float(event.time_range.end)


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _without(intervals: Sequence[Interval], covered: Sequence[Interval]) -> list[Interval]:
    """Parts of disjoint intervals that no covered one overlaps; both in order."""
    left: list[Interval] = []
    first = 0
    for start, end in intervals:
        while first < len(covered) and covered[first][1] <= start:
            first += 1
        at, i = start, first
        while i < len(covered) and covered[i][0] < end:
            if covered[i][0] > at:
                left.append((at, covered[i][0]))
            at, i = max(at, covered[i][1]), i + 1
        if at < end:
            left.append((at, end))
    return left


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


@contextmanager
def span(name: str) -> Iterator[None]:
    """Give a piece of code a name, in traces of :func:`profile` and, on a GPU, for Nsight (an NVTX range)."""
    with record_function(name), torch.cuda.nvtx.range(name) if torch.cuda.is_available() else nullcontext():
        yield


@contextmanager
def memory_snapshot(path: str | os.PathLike[str], *, max_entries: int = 100_000) -> Iterator[None]:
    """Record every allocation on this rank's GPU, with its line of code, and write them for https://pytorch.org/memory_viz.

    It is written where the block fails too: running out of memory is what one looks for.

    Parameters
    ----------
    path
        File to write; one per rank, e.g. ``f"snapshot{rank}.pickle"``.
    max_entries
        Allocations and frees to remember.

    Raises
    ------
    InputError
        Without a CUDA device.
    """
    if not torch.cuda.is_available():
        raise InputError(
            "memory_snapshot() needs a CUDA device; nbdist.account() counts a model's bytes on the CPU too"
        )
    torch.cuda.memory._record_memory_history(max_entries=max_entries)
    try:
        yield
    finally:
        torch.cuda.memory._dump_snapshot(os.fspath(path))  # type: ignore[no-untyped-call]
        torch.cuda.memory._record_memory_history(enabled=None)
