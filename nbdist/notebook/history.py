"""What a run measured: every metric of every rank, and what the ranks read about themselves.

A store that knows nothing of drawing or of widgets. One thread writes (the kernel's I/O thread, as messages arrive),
any number of threads read at the same time without a lock: a writer only ever appends behind what a reader can see,
and publishes the new length afterwards.

Every point is kept up to `POINTS_PER_SERIES` (less when there are very many series, see `POINTS`). A series that grows
beyond is thinned to half: of each four neighbours the smallest and the largest stay, so peaks and gaps survive. How far
a series has been thinned is always told (`History.thinned`), never silent.
"""

from __future__ import annotations

import csv
import importlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from nbdist.errors import InputError
from nbdist.wire.messages import Metrics, Sample

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["History", "NonFinite", "Run", "compare"]

Floats = npt.NDArray[np.float64]

POINTS_PER_SERIES = 200_000
"""How many points of one metric of one rank are kept before they are thinned."""

POINTS = 4_000_000
"""How many points a run keeps in all (24 bytes each): with more series, each keeps fewer, but at least `MIN_POINTS`."""

MIN_POINTS = 2_000

READINGS_PER_RANK = 8_192
"""How many samples a rank keeps (an hour at two a second); beyond, every second one is dropped."""


def thin(steps: Floats, times: Floats, values: Floats, keep: int) -> tuple[Floats, Floats, Floats]:
    """About `keep` points that show the same curve: smallest and largest of each bucket, and the first and last point.

    A bucket with a NaN keeps it (as its smallest), so that a gap stays visible.
    """
    n = len(values)
    if n <= keep or keep < 4:
        return steps, times, values
    size = -(-2 * n // keep)
    whole = n // size * size
    buckets = values[:whole].reshape(-1, size)
    start = np.arange(0, whole, size)
    low = np.argmin(buckets, axis=1)
    high = np.argmax(buckets, axis=1)
    # all alike, or a NaN, which is both: the second point is the bucket's last
    high = np.where(low == high, np.where(low == size - 1, 0, size - 1), high)
    picked = np.concatenate([start + low, start + high, np.arange(whole, n), [0, n - 1]])
    picked = np.unique(picked)
    return steps[picked], times[picked], values[picked]


class _Series:
    """Points of one metric of one rank, in the order they arrived."""

    __slots__ = ("_columns", "every", "published")

    def __init__(self) -> None:
        self._columns = np.empty((3, 64))
        self.every = 1  # one kept point stands for about so many
        # What readers see, replaced as one: the kept points, how many at their end were never thinned, how many there
        # ever were.
        self.published: tuple[Floats, int, int] = (self._columns[:, :0], 0, 0)

    def append(self, points: Floats, limit: int) -> None:
        """Add `points`, shape (3, n): steps, unix times, values."""
        known, raw, total = self.published
        begin, n = known.shape[1], points.shape[1]
        if begin + n > limit:
            joined = np.concatenate([known, points], axis=1)
            self._columns = np.stack(thin(joined[0], joined[1], joined[2], limit // 2))
            self.every = max(2, round((total + n) / self._columns.shape[1]))
            self.published = (self._columns, 0, total + n)
            return
        columns = self._columns
        if begin + n > columns.shape[1]:
            columns = np.empty((3, max(begin + n, 2 * columns.shape[1])))
            columns[:, :begin] = known
            self._columns = columns
        columns[:, begin : begin + n] = points
        self.published = (columns[:, : begin + n], raw + n, total + n)

    def read(self) -> Floats:
        """Shape (3, n), read-only."""
        view = self.published[0].view()
        view.flags.writeable = False
        return view


class _Readings:
    """Numbers of one rank's samples over time: a row a sample, a column a name; NaN where a sample lacks it."""

    __slots__ = ("_columns", "_table", "published")

    def __init__(self) -> None:
        self._columns: dict[str, int] = {}
        self._table = np.full((64, 32), np.nan)
        self.published = self._table[:0]  # what readers see

    def append(self, step: float, time_s: float, values: Mapping[str, float]) -> None:
        columns = self._columns
        for name in values.keys() - columns.keys():
            columns[name] = 2 + len(columns)
        n = len(self.published)
        if n == READINGS_PER_RANK:  # an old reading is worth less than an old metric: every second one goes
            thinned = np.full_like(self._table, np.nan)
            n //= 2
            thinned[:n] = self._table[: 2 * n : 2]
            self._table = thinned
        if n == len(self._table) or 2 + len(columns) > self._table.shape[1]:
            rows = 2 * len(self._table) if n == len(self._table) else len(self._table)
            grown = np.full((rows, max(2 + len(columns), self._table.shape[1])), np.nan)
            grown[:n, : self._table.shape[1]] = self._table[:n]
            self._table = grown
        row = [math.nan] * (2 + len(columns))
        row[0], row[1] = step, time_s
        for name, value in values.items():
            row[columns[name]] = value
        self._table[n, : len(row)] = row
        self.published = self._table[: n + 1]

    def read(self, name: str) -> Floats:
        """Steps, times and values, shape (3, n)."""
        table, column = self.published, self._columns.get(name)
        if column is None or column >= table.shape[1]:
            return np.empty((3, 0))
        known = table[~np.isnan(table[:, column])]
        return np.stack([known[:, 0], known[:, 1], known[:, column]])


@dataclass(frozen=True, slots=True, kw_only=True)
class NonFinite:
    """Where a metric of a rank stopped being a number for the first time."""

    name: str
    rank: int
    step: float
    value: float
    count: int  # how many values were not finite so far


class History:
    """Metrics and samples of one run.

    Attributes
    ----------
    version
        Grows whenever something arrived; a reader compares it to know whether to look again.
    samples
        By rank, what the rank last said about itself (memory, step rate, progress, ...). None: not available.
    sampled_s
        By rank, unix time of that sample.
    lost
        By rank, how many messages of metrics never arrived (told by their sequence numbers).
    turned_back
        By metric and rank, the first step that was smaller than the one before it.
    """

    def __init__(self) -> None:
        self.version = 0
        self.samples: dict[int, dict[str, Any]] = {}
        self.sampled_s: dict[int, float] = {}
        self.lost: dict[int, int] = {}
        self.turned_back: dict[tuple[str, int], float] = {}
        self._metrics: dict[tuple[str, int], _Series] = {}
        self._readings: dict[int, _Readings] = {}
        self._non_finite: dict[tuple[str, int], NonFinite] = {}
        self._next_seq: dict[int, int] = {}

    # ---- writing: the kernel's I/O thread

    def add_metrics(self, rank: int, message: Metrics, buffers: Sequence[memoryview | bytes]) -> None:
        """Keep the points of one message.

        Parameters
        ----------
        rank
            Who sent it.
        message, buffers
            One float64 buffer per series: n steps, n unix times, n values.
        """
        expected = self._next_seq.get(rank)
        if expected is not None and message.seq > expected:
            self.lost[rank] = self.lost.get(rank, 0) + message.seq - expected
        self._next_seq[rank] = message.seq + 1
        for described, buffer in zip(message.series, buffers, strict=True):
            name, n = described["name"], described["n"]
            points = np.frombuffer(buffer, dtype=np.float64)
            if len(points) != 3 * n:
                raise InputError(f"metric {name!r}: expected 3 x {n} numbers, got {len(points)}")
            if n:
                self._add_points(str(name), rank, points.reshape(3, n))
        self.version += 1

    def _add_points(self, name: str, rank: int, points: Floats) -> None:
        key = (name, rank)
        series = self._metrics.get(key)
        if series is None:
            series = self._metrics[key] = _Series()
        steps, _, values = points
        if key not in self.turned_back:
            known_steps = series.published[0][0]
            if len(known_steps) and steps[0] < known_steps[-1]:
                self.turned_back[key] = float(steps[0])
            elif (back := steps[1:] < steps[:-1]).any():
                self.turned_back[key] = float(steps[1 + int(np.argmax(back))])
        finite = np.isfinite(values)
        if not finite.all():
            self._note_non_finite(key, steps, values, ~finite)
        series.append(points, self._limit)

    def _note_non_finite(self, key: tuple[str, int], steps: Floats, values: Floats, bad: npt.NDArray[np.bool_]) -> None:
        known = self._non_finite.get(key)
        at = int(np.argmax(bad))
        self._non_finite[key] = NonFinite(
            name=key[0],
            rank=key[1],
            step=known.step if known else float(steps[at]),
            value=known.value if known else float(values[at]),
            count=(known.count if known else 0) + int(bad.sum()),
        )

    def add_sample(self, rank: int, message: Sample) -> None:
        """Keep what a rank read about itself; unknown keys are kept too."""
        latest = {**self.samples.get(rank, {}), **message.values}
        step = latest.get("steps")
        at = float(step) if isinstance(step, int | float) else math.nan
        readings = self._readings.get(rank)
        if readings is None:
            readings = self._readings[rank] = _Readings()
        readings.append(at, message.time_s, dict(_numbers(message.values)))
        self.samples[rank] = latest
        self.sampled_s[rank] = message.time_s
        self.version += 1

    @property
    def _limit(self) -> int:
        return min(POINTS_PER_SERIES, max(MIN_POINTS, POINTS // max(1, len(self._metrics))))

    # ---- reading: any thread

    def names(self) -> list[str]:
        """Names of the metrics, loss first, then in the order they first arrived."""
        found = list(dict.fromkeys(name for name, _ in list(self._metrics)))
        return sorted(found, key=lambda name: (name != "loss", "loss" not in name.lower()))

    def ranks(self, name: str) -> list[int]:
        """Ranks that have logged this metric."""
        return sorted(rank for known, rank in list(self._metrics) if known == name)

    def series(self, name: str, rank: int) -> tuple[Floats, Floats, Floats]:
        """Steps, unix times and values of one metric of one rank, in the order they arrived (read-only).

        Raises
        ------
        InputError
            If this rank never logged this metric.
        """
        found = self._metrics.get((name, rank))
        if found is None:
            known = ", ".join(f"{n!r} of rank {r}" for n, r in list(self._metrics)[:8]) or "none yet"
            raise InputError(f"no metric {name!r} of rank {rank}; there is: {known}")
        steps, times, values = found.read()
        return steps, times, values

    def reading(self, name: str, rank: int) -> tuple[Floats, Floats, Floats]:
        """Like `series`, of a number in the samples, e.g. memory over time; empty if it never came."""
        found = self._readings.get(rank)
        steps, times, values = found.read(name) if found else np.empty((3, 0))
        return steps, times, values

    def total(self, name: str, rank: int) -> int:
        """How many points of this metric ever arrived from this rank."""
        found = self._metrics.get((name, rank))
        return found.published[2] if found else 0

    def since(self, name: str, rank: int, total: int) -> tuple[Floats | None, int]:
        """The points that came after the first `total`, shape (3, n), and how many there are in all by now.

        None instead of the points if they have been thinned meanwhile.
        """
        found = self._metrics.get((name, rank))
        if found is None:
            return np.empty((3, 0)), 0
        points, raw, now = found.published
        new = now - total
        return (points[:, points.shape[1] - new :] if new <= raw else None), now

    def whole(self, name: str, rank: int) -> tuple[Floats, int]:
        """All kept points, shape (3, n), and how many there were in all when these were read."""
        points, _, total = self._metrics[name, rank].published
        return points, total

    def thinned(self, name: str, rank: int) -> int:
        """1: every point is kept; k: the series was thinned, and one kept point stands for about k."""
        found = self._metrics.get((name, rank))
        return found.every if found else 1

    def last(self, name: str) -> dict[int, float]:
        """The newest value of a metric, by rank."""
        return {rank: float(self._metrics[name, rank].read()[2, -1]) for rank in self.ranks(name)}

    def non_finite(self) -> list[NonFinite]:
        """Where values were NaN or infinite, by metric and rank, the earliest step first."""
        return sorted(self._non_finite.copy().values(), key=lambda found: (found.step, found.rank))

    def rows(self) -> list[dict[str, Any]]:
        """Every kept point as a row: rank, metric, step, time_s (unix), value."""
        return list(self._rows())

    def _rows(self) -> Iterator[dict[str, Any]]:
        for name in self.names():
            for rank in self.ranks(name):
                for step, at, value in zip(*(column.tolist() for column in self.series(name, rank)), strict=True):
                    yield {
                        "rank": rank,
                        "metric": name,
                        "step": int(step) if step.is_integer() else step,
                        "time_s": at,
                        "value": value,
                    }

    def dataframe(self) -> Any:
        """`rows` as a pandas DataFrame (pandas has to be installed)."""
        try:
            pandas = importlib.import_module("pandas")
        except ImportError as error:
            raise InputError("dataframe() needs pandas: pip install pandas, or use rows()") from error
        return pandas.DataFrame(self.rows(), columns=["rank", "metric", "step", "time_s", "value"])

    def to_csv(self, path: str | Path) -> Path:
        """Write `rows` to a file and return its path."""
        target = Path(path)
        with target.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, ["rank", "metric", "step", "time_s", "value"])
            writer.writeheader()
            writer.writerows(self._rows())
        return target


def _numbers(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{key}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield prefix + str(key), float(value)


@dataclass(kw_only=True, repr=False)
class Run:
    """One executed training cell, with its history.

    Attributes
    ----------
    run_id, name
        Key, and what the user sees, e.g. ``run 3``.
    code
        Source of the cell.
    ranks
        Who ran it; `world_size` is the size of the whole cluster.
    device
        What the ranks compute on, e.g. ``cpu`` or ``cuda``.
    started_s, ended_s
        Unix times; None while it runs.
    status
        ``running``, ``ok``, ``error`` or ``interrupted``.
    states
        By rank, one word for a person: ``running``, ``ok``, ``failed``, ``died``, ...
    strategy
        How the model is spread over the ranks, e.g. ``DDP``; None: not known.
    """

    run_id: str
    name: str
    code: str
    ranks: list[int]
    world_size: int
    backend: str
    device: str
    started_s: float = field(default_factory=time.time)
    ended_s: float | None = None
    status: str = "running"
    history: History = field(default_factory=History)
    states: dict[int, str] = field(default_factory=dict)
    strategy: str | None = None

    def add_sample(self, rank: int, message: Sample) -> None:
        """Keep what a rank read about itself."""
        self.history.add_sample(rank, message)
        self.strategy = message.values.get("strategy") or self.strategy

    def __repr__(self) -> str:
        ranks = f"{len(self.ranks)} rank{'s' if len(self.ranks) != 1 else ''} on {self.device}, {self.backend}"
        metrics = ", ".join(self.history.names()) or "no metrics"
        return f"<{self.name}: {ranks}, {self.status} after {self.elapsed_s:.1f} s, {metrics}>"

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start, or that the run took."""
        return max(0.0, (self.ended_s or time.time()) - self.started_s)

    def rows(self) -> list[dict[str, Any]]:
        """Every kept point as a row: rank, metric, step, time_s (unix), value."""
        return self.history.rows()

    def dataframe(self) -> Any:
        """`rows` as a pandas DataFrame (pandas has to be installed)."""
        return self.history.dataframe()

    def to_csv(self, path: str | Path) -> Path:
        """Write `rows` to a file and return its path."""
        return self.history.to_csv(path)

    def figure(self) -> Figure:
        """Draw the run: curves per rank, memory, step time (matplotlib)."""
        from nbdist.notebook import figure

        return figure.draw(self)

    def to_tensorboard(self, folder: str | Path) -> Path:
        """Write the run for TensorBoard: one sub-folder a rank, so that the ranks are curves of one chart.

        Needs the package ``tensorboard``, and imports torch into this process.
        """
        try:
            writers = importlib.import_module("torch.utils.tensorboard")
        except ImportError as error:
            raise InputError("to_tensorboard() needs tensorboard: pip install tensorboard") from error
        target = Path(folder)
        for rank in self.ranks:
            with writers.SummaryWriter(log_dir=str(target / f"rank{rank}")) as writer:
                for name in self.history.names():
                    if rank not in self.history.ranks(name):
                        continue
                    for step, at, value in zip(*self.history.series(name, rank), strict=True):
                        writer.add_scalar(name, value, global_step=int(step), walltime=at)
        return target


def compare(first: Run, second: Run, *others: Run) -> Figure:
    """Draw runs over each other: loss over steps and over time, memory, step time (matplotlib)."""
    from nbdist.notebook import figure

    return figure.compare([first, second, *others])
