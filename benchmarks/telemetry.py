"""What telemetry costs: one log() call, and the throughput of a step of some 5 ms with telemetry off and on.

Prints microseconds a call, and over alternating pairs the ratio of throughputs with its 95 % confidence interval, by
the clock and by this process's CPU time (which a busy machine disturbs less).
"""

from __future__ import annotations

import argparse
import math
import statistics
import threading
from time import perf_counter, process_time

import torch
from torch import nn

from nbdist.worker import telemetry

CALLS = 20_000


class Rank:
    """A telemetry whose pump runs on a thread, as in a rank."""

    def __init__(self) -> None:
        self.telemetry = telemetry.Telemetry(lambda message, buffers: None, rank=0, device=torch.device("cpu"))
        telemetry.current = self.telemetry
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._io, daemon=True)
        self._thread.start()

    def _io(self) -> None:
        wait_s = 0.0
        while not self._done.wait(wait_s):
            wait_s = self.telemetry.pump()

    def close(self) -> None:
        self._done.set()
        self._thread.join()


def cost_of_log(rank: Rank) -> None:
    scalar = torch.tensor(1.5)
    loss = (torch.randn(4, requires_grad=True) * 2).sum()
    calls = {
        "log(loss=float)": lambda: telemetry.log(loss=1.5),
        "log(loss=float, lr=float)": lambda: telemetry.log(loss=1.5, lr=0.1),
        "log(loss=tensor)": lambda: telemetry.log(loss=scalar),
        "log(loss=tensor with graph)": lambda: telemetry.log(loss=loss),
        "log(odd=str), refused": lambda: telemetry.log(odd="x"),
    }
    print(f"{'call':32s}  us a call (best of 5, pump running)")
    for name, call in calls.items():
        best = math.inf
        for _ in range(5):
            rank.telemetry.begin("cost", interval_s=0.1)
            began_s = perf_counter()
            for _ in range(CALLS):
                call()
            best = min(best, perf_counter() - began_s)
            rank.telemetry.end()
        print(f"{name:32s}  {best / CALLS * 1e6:5.2f}")


def throughput(rank: Rank, pairs: int, seconds: float) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(*(layer for _ in range(12) for layer in (nn.Linear(256, 256), nn.ReLU())))
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.randn(64, 256)

    def train() -> tuple[float, float]:
        """Steps a second, by the clock and by CPU time."""
        steps = 0
        began_s, cpu_s = perf_counter(), process_time()
        while (elapsed_s := perf_counter() - began_s) < seconds:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            telemetry.log(loss=loss)
            steps += 1
        return steps / elapsed_s, steps / (process_time() - cpu_s)

    def on() -> tuple[float, float]:
        rank.telemetry.begin("on", interval_s=0.1)
        telemetry.current = rank.telemetry
        rates = train()
        rank.telemetry.end()
        return rates

    def off() -> tuple[float, float]:
        telemetry.current = None
        return train()

    on()
    results = []
    for number in range(pairs):
        first, second = (on, off) if number % 2 else (off, on)
        rates = {first: first(), second: second()}
        results.append((rates[on], rates[off]))
    step_ms = 1e3 / statistics.median(without[0] for _, without in results)
    print(f"\nstep without telemetry {step_ms:.2f} ms, {pairs} alternating pairs of {seconds:g} s")
    for index, name in enumerate(("by the clock", "by CPU time")):
        ratios = [math.log(with_it[index] / without[index]) for with_it, without in results]
        mean, half = statistics.mean(ratios), 1.96 * statistics.stdev(ratios) / math.sqrt(pairs)
        print(
            f"throughput with / without, {name:13s} {math.exp(mean):.4f} "
            f"[{math.exp(mean - half):.4f}, {math.exp(mean + half):.4f}]   to reach: 0.99"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=1.5)
    args = parser.parse_args()
    rank = Rank()
    try:
        cost_of_log(rank)
        throughput(rank, args.pairs, args.seconds)
    finally:
        rank.close()


if __name__ == "__main__":
    main()
