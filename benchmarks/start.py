"""From nothing to the first all-reduce: cold, warm, and again after a restart.

cold
    The notebook's first cell (load or import the product) and the first training cell are sent at once into a fresh
    kernel; measured until the first all-reduce is done on the last rank.
warm
    The first cell has run (for the others it imports torch too) and 5 s have passed; measured from the cell that
    starts the ranks, which for nbdist is the training cell itself.
first step
    From that all-reduce to the first forward and backward of a DDP model.
restart
    From asking for fresh ranks to the first all-reduce on them; products without such a command start again, so their
    cold start stands for it.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from pathlib import Path

from benchmarks.kernel import Kernel
from benchmarks.products import Product, _must, open_kernel, started
from benchmarks.report import Row

__all__ = ["cold", "restart", "warm"]

WARM_S = 5.0

_FIRST = """
import json as _json, os as _os, time as _time
import torch, torch.distributed as dist
torch.set_num_threads(1)
if not dist.is_initialized():
    dist.init_process_group("gloo")
_x = torch.ones(1); dist.all_reduce(_x)
_t = [_time.time()]
_m = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(10, 10))
_m(torch.randn(4, 10)).sum().backward()
_t.append(_time.time())
_path = _os.path.join({folder!r}, str(dist.get_rank()))
with open(_path + ".new", "w") as _f: _json.dump(_t, _f)
_os.rename(_path + ".new", _path)
"""


def _last(folder: Path, n: int) -> tuple[float, float]:
    times = [json.loads((folder / str(rank)).read_text()) for rank in range(n)]
    return max(t[0] for t in times), max(t[1] for t in times)


def _first_cell(kernel: Kernel, product: Product, n: int, before: list[str]) -> tuple[float, float]:
    """Seconds from sending the first of the cells to the all-reduce, and from there to the DDP step."""
    marks = Path(tempfile.mkdtemp(prefix="marks-", dir=kernel.folder))
    begun = time.time()
    for cell in before:
        _must(kernel.run(cell, timeout_s=180), product.name)
    body = _FIRST.format(folder=str(marks))
    cell = f"%%distributed -n {n}\n{body}" if product.name == "nbdist" else product.everywhere(body)
    _must(kernel.run(cell, timeout_s=180), product.name)
    ready, step = _last(marks, n)
    shutil.rmtree(marks)
    return ready - begun, step - ready


def _rows(measure: str, product: Product, n: int, ready_s: float, step_s: float) -> list[Row]:
    return [
        Row(measure=measure, product=product.name, n=n, value=ready_s, unit="s"),
        Row(measure=f"{measure}, first DDP step", product=product.name, n=n, value=step_s, unit="s"),
    ]


def cold(product: Product, n: int, cache: Path) -> list[Row]:
    """One cold start."""
    kernel = open_kernel(product, n, cache)
    try:
        own = product.name == "nbdist"
        before = [product.warming] if own else product.start(n)
        return _rows("cold start", product, n, *_first_cell(kernel, product, n, before))[:1]
    finally:
        kernel.close()


def warm(product: Product, n: int, cache: Path) -> list[Row]:
    """One warm start."""
    if product.name == "jupyter-distributed":
        return _warm_kernel(product, n, cache)
    kernel = open_kernel(product, n, cache)
    try:
        _must(kernel.run(product.warming, timeout_s=120), product.name)
        time.sleep(WARM_S)
        before = [] if product.name == "nbdist" else product.start(n)
        return _rows("warm start", product, n, *_first_cell(kernel, product, n, before))
    finally:
        kernel.close()


def _warm_kernel(product: Product, n: int, cache: Path) -> list[Row]:
    """A product that is a kernel has no warm state of its own: choosing it starts the kernel."""
    begun = time.time()
    kernel = open_kernel(product, n, cache)
    try:
        opened_s = time.time() - begun
        ready_s, step_s = _first_cell(kernel, product, n, product.start(n))
        return _rows("warm start", product, n, opened_s + ready_s, step_s)
    finally:
        kernel.close()


def restart(product: Product, n: int, cache: Path) -> list[Row]:
    """One restart of running ranks."""
    cells = product.restart(n)
    if cells is None:
        return []
    kernel = started(product, n, cache)
    try:
        ready_s, _ = _first_cell(kernel, product, n, cells)
        return [Row(measure="restart", product=product.name, n=n, value=ready_s, unit="s")]
    finally:
        kernel.close()
