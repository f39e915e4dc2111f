"""Ranks that only pretend: threads that feed a `History` as the real ones would, for tests and the benchmark.

Values are made up, but everything from `History` to the page is the product's own.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nbdist.notebook.dashboard import Dashboard
from nbdist.notebook.history import History, Run
from nbdist.wire.messages import Metrics, Sample

MIB = 1024**2


def make_run(ranks: int = 2, *, name: str = "run 1", device: str = "cpu", backend: str = "gloo", **fields: Any) -> Run:
    given = {"ranks": list(range(ranks)), "world_size": ranks} | fields
    return Run(run_id=name, name=name, code="", backend=backend, device=device, **given)


def add(history: History, rank: int, seq: int = 0, **series: Sequence[tuple[float, float]]) -> None:
    """Add points, given as (step, value), as one message of a rank brings them; step 0 was logged at 1000 s."""
    buffers, described = [], []
    for name, points in series.items():
        steps, values = np.array(points, dtype=float).reshape(-1, 2).T
        buffers.append(np.stack([steps, 1000 + steps, values]).tobytes())
        described.append({"name": name, "n": len(steps)})
    history.add_metrics(rank, Metrics(run_id="", seq=seq, series=described), buffers)


def sample(history: History, rank: int, time_s: float = 0.0, **values: Any) -> None:
    """Add what a rank reads about itself."""
    history.add_sample(rank, Sample(run_id="", time_s=time_s, values=values))


@dataclass(kw_only=True)
class Ranks:
    """Simulated ranks.

    Parameters
    ----------
    run
        What they feed.
    metrics
        Value of each metric by name: a function of (rank, step).
    steps_per_s
        Of every rank.
    sample
        What a rank reads about itself: a function of (rank, step).
    message_s
        Between two messages of a rank.
    """

    run: Run
    metrics: Mapping[str, Callable[[int, int], float]]
    steps_per_s: float = 40.0
    sample: Callable[[int, int], dict[str, Any]] = lambda rank, step: {}
    message_s: float = 0.1
    total_steps: int | None = None
    sent: dict[tuple[str, int], list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._began = time.monotonic()
        self._step = 0
        self._seq = 0
        self._sampled = 0.0

    def advance(self) -> None:
        """Send what all ranks have measured since the last time (called about every `message_s`)."""
        now = time.monotonic() - self._began
        upto = int(now * self.steps_per_s)
        if self.total_steps is not None:
            upto = min(upto, self.total_steps)
        steps = range(self._step, upto)
        wall = time.time()
        history = self.run.history
        if steps:
            described = [{"name": name, "n": len(steps)} for name in self.metrics]
            times = np.linspace(wall - now + steps[0] / self.steps_per_s, wall, len(steps))
            for rank in self.run.ranks:
                buffers = []
                for value in self.metrics.values():
                    values = np.array([value(rank, step) for step in steps])
                    buffers.append(np.stack([np.asarray(steps, dtype=float), times, values]).tobytes())
                history.add_metrics(rank, Metrics(run_id="", seq=self._seq, series=described), buffers)
            self._seq += 1
            self._step = upto
        if now - self._sampled >= 0.5:
            self._sampled = now
            for rank in self.run.ranks:
                values = {"steps": upto, "steps_per_s": self.steps_per_s, **self.sample(rank, upto)}
                history.add_sample(rank, Sample(run_id="", time_s=wall, values=values))


def play(
    run: Run,
    seconds: float = 8.0,
    *,
    mode: str = "widget",
    status: str = "ok",
    hold: Callable[[], bool] = lambda: False,
    text: bool = False,
    on_tick: Callable[[Dashboard, float], None] | None = None,
    **ranks: Any,
) -> Dashboard:
    """Run simulated ranks for a while in a thread of their own, as the kernel's I/O thread, while the cell blocks.

    Parameters
    ----------
    hold
        Asked at the end: True keeps the cell busy, without new numbers.
    """
    senders = Ranks(run=run, **ranks)
    dashboard = Dashboard(run, mode=mode)
    ended = threading.Event()
    failed: list[BaseException] = []

    def feed() -> None:
        try:
            began = time.monotonic()
            while not ended.wait(min(0.05, senders.message_s)):
                now = time.monotonic() - began
                if now < seconds:
                    senders.advance()
                    if text:
                        for rank in run.ranks[:4]:
                            dashboard.set_text(
                                rank, f"epoch {int(now)}\nrank {rank}: step {int(now * senders.steps_per_s)}\n"
                            )
                if on_tick is not None:
                    on_tick(dashboard, now)
                dashboard.push()
        except BaseException as error:
            failed.append(error)

    dashboard.open()
    thread = threading.Thread(target=feed, name="simulated I/O")
    thread.start()
    end = time.monotonic() + seconds
    try:
        while time.monotonic() < end or hold():
            time.sleep(0.02)
        run.status = status
    except KeyboardInterrupt:
        run.status = "interrupted"
        print("interrupted")
    finally:
        ended.set()
        thread.join()
        run.ended_s = time.time()
        run.states.update({rank: run.status for rank in run.ranks if rank not in run.states})
        dashboard.finish()
    if failed:
        raise failed[0]
    return dashboard


# ---- made-up training


def loss(rank: int, step: int) -> float:
    noise = random.Random(step * 1009 + rank).gauss(0, 1)
    return (
        2.2 * math.exp(-step / 180)
        + 0.12
        + 0.03 * rank * math.exp(-step / 500)
        + noise * (0.02 + 0.1 * math.exp(-step / 120))
    )


def accuracy(rank: int, step: int) -> float:
    return 0.98 - 0.9 * math.exp(-step / 150) + random.Random(step * 31 + rank).gauss(0, 0.012)


def lr(rank: int, step: int) -> float:
    return 1e-3 * min(1, step / 60) * (0.5 + 0.5 * math.cos(min(1, step / 800) * math.pi))


def cpu_sample(rank: int, step: int, *, slow_rank: int | None = None, total: int = 400) -> dict[str, Any]:
    slow = 0.012 if rank == slow_rank else 0.0
    wait = 0.012 if slow_rank is not None and rank != slow_rank else 0.0
    return {
        "process_uss_bytes": int((310 + 4 * rank + 6 * math.sin(step / 50)) * MIB),
        "parameters_bytes": 46 * MIB, "gradients_bytes": 46 * MIB, "optimizer_bytes": 92 * MIB,
        "data_s": 0.0016 + slow, "forward_s": 0.0072, "backward_s": 0.0118, "wait_s": wait, "optimizer_s": 0.0031,
        "rest_s": 0.0013, "samples_per_s": 64 * 40.0,
        "progress": [{"name": "epoch", "done": step, "total": total, "left_s": max(0, total - step) / 40, "active": True}],
    }  # fmt: skip


def gpu_sample(rank: int, step: int, *, total: int = 2000) -> dict[str, Any]:
    gib = 1024**3
    return {
        "allocated_bytes": int((10 + 0.3 * math.sin(step / 9 + rank)) * gib), "reserved_bytes": 18 * gib,
        "device_used_bytes": int(21.5 * gib), "device_total_bytes": 80 * gib, "peak_bytes": int(16.5 * gib),
        "parameters_bytes": int(1.2 * gib), "gradients_bytes": int(1.2 * gib), "optimizer_bytes": int(2.4 * gib),
        "data_s": 0.004, "forward_s": 0.031, "backward_s": 0.058, "wait_s": 0.006 + 0.001 * (rank % 3),
        "optimizer_s": 0.009, "rest_s": 0.002, "gpu_load_percent": 96 - rank % 5, "gpu_power_w": 540 + 7 * (rank % 9),
        "gpu_temperature_c": 58 + rank % 7, "samples_per_s": 512.0,
        "progress": [{"name": "epoch", "done": step, "total": total, "left_s": max(0, total - step) / 40, "active": True}],
    }  # fmt: skip


METRICS = {"loss": loss, "accuracy": accuracy, "lr": lr}
