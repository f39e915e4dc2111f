"""Training throughput: one script under torchrun and in a cell, in turns, with telemetry and dashboard on.

A ratio near 1 drowns in the machine's noise, so runs alternate, the order within a pair changes from pair to pair, and
the geometric mean of the ratios is given with its 95 % confidence interval. The target is missed when the interval's
upper end misses it.
"""

from __future__ import annotations

import json
import math
import os
import re
import statistics
import subprocess
from pathlib import Path

from benchmarks import environments
from benchmarks.kernel import Kernel
from benchmarks.products import PRODUCTS, started
from benchmarks.report import Row

__all__ = ["throughput"]

SCRIPT = Path(__file__).resolve().parent / "train_script.py"
# Two-sided 95 % quantiles of Student's t by degrees of freedom; beyond 30 the normal one is close enough.
_T95 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 7: 2.36, 9: 2.26, 14: 2.14, 19: 2.09, 24: 2.06, 29: 2.05}


def _rate(text: str) -> float:
    found = re.search(r"RATE (\{.*?\})", text)
    if not found:
        raise RuntimeError(f"no rate was printed: {text[-800:]}")
    return float(json.loads(found[1])["steps_per_s"])


def _torchrun(n: int, seconds: float, cache: Path) -> float:
    python = environments.python_of("nbdist", cache)
    words = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n), SCRIPT]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "BENCH_SECONDS": str(seconds)}
    done = subprocess.run([*map(str, words)], env=env, capture_output=True, text=True, timeout=120)
    return _rate(done.stdout + done.stderr)  # not judged by its status: torch may abort after the last line


def _cell(kernel: Kernel, source: str) -> float:
    ran = kernel.run("%%distributed\n" + source, timeout_s=120)
    if ran.status != "ok":
        raise RuntimeError(f"the cell failed: {ran.text[-800:]}")
    return _rate(ran.text)


def throughput(n: int, cache: Path, pairs: int, seconds: float = 4.0) -> list[Row]:
    """Ratio of the cell's steps per second to torchrun's, over so many alternating pairs."""
    source = SCRIPT.read_text(encoding="utf-8").replace("from __future__ import annotations\n", "")
    source = re.sub(r'float\(os\.environ\.get\("BENCH_SECONDS", "4"\)\)', str(seconds), source)
    kernel = started(PRODUCTS["nbdist"], n, cache)
    try:
        _cell(kernel, source)  # a warm-up each
        _torchrun(n, seconds, cache)
        logs, cells, scripts = [], [], []
        for pair in range(pairs):
            if pair % 2:
                script, cell = _torchrun(n, seconds, cache), _cell(kernel, source)
            else:
                cell, script = _cell(kernel, source), _torchrun(n, seconds, cache)
            cells.append(cell)
            scripts.append(script)
            logs.append(math.log(cell / script))
    finally:
        kernel.close()
    mean = statistics.fmean(logs)
    degrees = len(logs) - 1
    if degrees:
        quantile = _T95[max(k for k in _T95 if k <= degrees)]
        half = quantile * statistics.stdev(logs) / math.sqrt(len(logs))
    else:
        half = math.inf
    low, high = math.exp(mean - half), math.exp(mean + half)
    note = (
        f"95 % interval {low:.3f} to {high:.3f} over {pairs} pairs; "
        f"cell {statistics.median(cells):.1f}, torchrun {statistics.median(scripts):.1f} steps/s"
    )
    return [
        Row(
            measure="training throughput",
            product="nbdist",
            n=n,
            value=math.exp(mean),
            unit="x torchrun",
            note=note,
            upper=high,
        )
    ]
