"""What a running cluster answers: the round trip of an empty cell, and how late a printed line is seen.

empty cell
    From sending the cell to having both its reply and idle, as the notebook sees it. Beside it a plain cell of the same
    text, which stays in the kernel: no product that runs below a Jupyter kernel can be faster.
streaming
    Every rank prints 20 lines, ten a second, each with its own time; measured to the message that shows it.
"""

from __future__ import annotations

import re
import statistics
import time
from pathlib import Path

from benchmarks.products import Product, started
from benchmarks.report import Row

__all__ = ["empty", "stream"]

NUM_CELLS = 60
NUM_WARM_UP = 8
NUM_LINES = 20

_LINES = f"""
import time as _time
for _i in range({NUM_LINES}):
    print(f"L{{rank}}-{{_i}}@{{_time.time():.6f}}!", flush=True)
    _time.sleep(0.1)
"""


def empty(product: Product, n: int, cache: Path) -> list[Row]:
    """Median round trips of one session."""
    kernel = started(product, n, cache)
    try:
        rows = []
        cells = {"empty cell": product.everywhere("pass")}
        if product.name == "nbdist":
            cells["empty cell, kernel alone"] = "pass"
        for measure, cell in cells.items():
            walls = [kernel.run(cell, timeout_s=60).wall for _ in range(NUM_WARM_UP + NUM_CELLS)][NUM_WARM_UP:]
            value = statistics.median(1e3 * wall for wall in walls if wall is not None)
            rows.append(Row(measure=measure, product=product.name, n=n, value=value, unit="ms"))
        return rows
    finally:
        kernel.close()


def stream(product: Product, n: int, cache: Path) -> list[Row]:
    """Median and worst delay of the lines of one cell, and how many were never shown."""
    kernel = started(product, n, cache)
    try:
        time.sleep(0.5)
        ran = kernel.run(product.everywhere(_LINES), timeout_s=60, linger_s=1.0)
        delays: dict[tuple[str, str], float] = {}
        for at, _, text in ran.shown:
            for rank, nth, printed in re.findall(r"L(\d+)-(\d+)@([\d.]+)!", text):
                delays.setdefault((rank, nth), ran.sent + at - float(printed))
        lost = n * NUM_LINES - len(delays)
        values = list(delays.values()) or [float("nan")]
        note = f"{lost} of {n * NUM_LINES} lines never shown" if lost else ""
        return [
            Row(
                measure="streaming delay",
                product=product.name,
                n=n,
                value=1e3 * statistics.median(values),
                unit="ms",
                note=note,
            ),
            Row(measure="streaming delay, worst", product=product.name, n=n, value=1e3 * max(values), unit="ms"),
        ]
    finally:
        kernel.close()
