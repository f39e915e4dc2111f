"""A 256 MB tensor from the notebook to one rank and back, beside a plain copy in the notebook's kernel.

A tensor that arrives is a new one, so the copy it is held against is ``clone()``: into memory that is not in use yet.
The copy into memory that has been written before, several times faster, is shown too.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.products import Product, _must, started
from benchmarks.report import Row

__all__ = ["transfer"]

SIZE_BYTES = 256 * 2**20
NUM_TIMES = 5

_MAKE = f"""%%bench_here
import time, torch
big = torch.rand({SIZE_BYTES // 4})
used = torch.ones_like(big)
seconds = []
"""
_TIMED = f"""%%bench_here
seconds = []
for _ in range({NUM_TIMES + 1}):
    begun = time.perf_counter()
    {{code}}
    seconds.append(time.perf_counter() - begun)
"""


def transfer(product: Product, n: int, cache: Path) -> list[Row]:
    """Median rates of push, pull and copy, in GB/s; the first of each is a warm-up."""
    push, pull = product.push("big"), product.pull("big")
    if push is None or pull is None:
        return []
    kernel = started(product, n, cache)
    try:
        _must(kernel.run(_MAKE), product.name)
        rows = []
        copies = (("plain copy", "other = big.clone()"), ("copy into used memory", "used.copy_(big)"))
        for measure, code in (*copies, ("push 256 MB", push), ("pull 256 MB", pull)):
            _must(kernel.run(_TIMED.format(code=code), timeout_s=300), product.name)
            seconds = sorted(kernel.value("seconds")[1:])
            rate = SIZE_BYTES / 1e9 / seconds[len(seconds) // 2]
            rows.append(Row(measure=measure, product=product.name, n=n, value=rate, unit="GB/s"))
        if not kernel.value("bool((back == big).all())"):
            raise RuntimeError(f"{product.name}: what came back is not what was sent")
        return rows
    finally:
        kernel.close()
