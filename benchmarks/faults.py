"""What happens when something goes wrong, with 2 ranks in a real kernel; the same probe for each product.

raise
    Rank 1 raises while rank 0 waits in a barrier.
killed
    Rank 1 is killed while rank 0 waits in a barrier.
interrupt loop, interrupt collective
    Stop is pressed while both ranks sleep in Python, or while rank 0 waits in a barrier that rank 1 never enters.
kernel killed
    The kernel is killed in the middle of a cell.

Reported: seconds from the fault until the cell came back, whether the rank's own error came first, whether a variable
set before still stands on the ranks that lived, and how many processes were left.
"""

from __future__ import annotations

import os
import re
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.kernel import Kernel, Ran
from benchmarks.products import Product, _must, started
from benchmarks.report import Row

__all__ = ["FAULTS", "fault"]

NUM_RANKS = 2
PATIENCE_S = 75.0
PRESS_AFTER_S = 1.5
LEFT_AFTER_S = 3.0

_BEGIN = """
import os, time, torch, torch.distributed as dist
open({folder!r} + f"/{{rank}}.pid", "w").write(str(os.getpid()))
"""
FAULTS = {
    "raise": 'time.sleep(1)\nif rank == 1:\n    raise ValueError("boom on one rank")\ndist.barrier()',
    "killed": "if rank == 1:\n    time.sleep(60)\ndist.barrier()",
    "interrupt loop": "for _ in range(900):\n    time.sleep(0.1)",
    "interrupt collective": "if rank == 1:\n    time.sleep(90)\nelse:\n    dist.barrier()",
    "kernel killed": "for _ in range(900):\n    time.sleep(0.1)",
}


def _ranks(folder: Path) -> list[int]:
    found = []
    for rank in range(NUM_RANKS):
        path = folder / f"{rank}.pid"
        if path.exists() and path.read_text():
            found.append(int(path.read_text()))
    return found


class _Started:
    """True once every rank has been in the cell for a while."""

    def __init__(self, folder: Path, wait_s: float) -> None:
        self.folder, self.wait_s, self.since = folder, wait_s, 0.0

    def __call__(self, ran: Ran) -> bool:
        if not self.since and len(_ranks(self.folder)) == NUM_RANKS:
            self.since = time.time()
        return bool(self.since) and time.time() - self.since >= self.wait_s


def fault(product: Product, kind: str, cache: Path) -> list[Row]:
    """One fault in a fresh session."""
    kernel = started(product, NUM_RANKS, cache)
    folder = Path(tempfile.mkdtemp(prefix="ranks-", dir=kernel.folder))
    try:
        _must(kernel.run(product.everywhere("kept = 41 + rank"), timeout_s=60), product.name)
        at: list[float] = []

        def act(what: Callable[[], object]) -> Callable[[], None]:
            def do() -> None:
                at.append(time.time())
                what()

            return do

        begun = _Started(folder, PRESS_AFTER_S)
        actions: dict[str, Callable[[], object]] = {
            "killed": lambda: os.kill(_ranks(folder)[1], signal.SIGKILL),
            "interrupt loop": kernel.interrupt,
            "interrupt collective": kernel.interrupt,
            "kernel killed": kernel.kill,
            "raise": lambda: None,
        }
        wait = begun if kind != "raise" else _Started(folder, 1.0)
        kernel.processes()
        body = _BEGIN.format(folder=str(folder)) + FAULTS[kind]
        timeout_s = 8.0 if kind == "kernel killed" else PATIENCE_S
        ran = kernel.run(product.everywhere(body), timeout_s=timeout_s, actions=[(wait, act(actions[kind]))])
        return _judge(kernel, product, kind, folder, ran, at)
    finally:
        kernel.close()
        for pid in _ranks(folder):  # those that hide from the kernel's process tree
            if pid in kernel.seen and kernel.seen[pid].is_running():
                os.kill(pid, signal.SIGKILL)


def _judge(kernel: Kernel, product: Product, kind: str, folder: Path, ran: Ran, at: list[float]) -> list[Row]:
    time.sleep(LEFT_AFTER_S)  # a stated time after the fault, the same for all, not a wait for readiness
    if kind == "kernel killed":
        left = sum(_alive(pid) for pid in kernel.seen)
        return [
            Row(
                measure="kernel killed, processes left after 3 s",
                product=product.name,
                n=NUM_RANKS,
                value=float(left),
                unit="",
            )
        ]
    back = ran.sent + ran.wall - at[0] if ran.wall is not None and at else float("nan")
    after = kernel.run(
        product.everywhere("print(f'KEPT{rank}:{kept}')"), timeout_s=20, actions=[(8.0, kernel.interrupt)]
    )
    kept = sorted(set(re.findall(r"KEPT(\d):4[12]", after.text)))
    note = "state kept on " + (f"rank {', '.join(kept)}" if kept else "no rank")
    if kind == "raise":
        shown = re.sub(r"\x1b\[[0-9;]*m", "", ran.text)
        first = re.search(r"boom on one rank|[Cc]onnection|[Tt]imed? ?out", shown)
        note += "; cause first" if first and first[0].startswith("boom") else "; cause not first"
    if ran.wall is None:
        note += f"; the cell had not come back after {PATIENCE_S:g} s"
    return [Row(measure=f"{kind}: back after", product=product.name, n=NUM_RANKS, value=back, unit="s", note=note)]


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
