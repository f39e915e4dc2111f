"""How long each event of a session that goes wrong takes, nbdist alone: median and worst of several.

Timed from the event (Stop pressed, a rank's own mark in a file, a signal) to the moment the notebook shows the cell as
ended, in a real kernel with 2 ranks; after each the ranks must answer another cell with their variables.
"""

from __future__ import annotations

import os
import re
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.kernel import Kernel, Ran
from benchmarks.products import PRODUCTS, _must, started
from benchmarks.report import Row

__all__ = ["EVENTS", "KERNEL_KILLED", "times"]

NUM_RANKS = 2
SETTLE_S = 1.0  # a stated time that the cell has run before the event
PATIENCE_S = 40.0
KERNEL_KILLED = "kernel killed, nothing left"

SETUP = """
%%distributed
import ctypes, os, time
from torch.nn.parallel import DistributedDataParallel as DDP
kept = 41 + rank
model = DDP(torch.nn.Linear(16, 16))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
def ready(folder):
    open(os.path.join(folder, f"{rank}.at"), "w").write(f"{os.getpid()} {time.time()}")
"""
TRAIN = """
while True:
    optimizer.zero_grad(); model(torch.randn(8, 16)).square().mean().backward(); optimizer.step(); time.sleep(0.01)
"""
# Event: what the cell does, and what happens to it.
EVENTS: dict[str, tuple[str, str]] = {
    "stop in a training loop": (TRAIN, "interrupt"),
    "stop in other Python code": ("while True: time.sleep(0.01)", "interrupt"),
    "stop in a collective": ("if rank == 0: dist.barrier()\nwhile True: time.sleep(0.01)", "interrupt"),
    "stop twice in C code": ("ctypes.PyDLL(None).sleep(90) if rank == 1 else None", "interrupt twice"),
    "a rank raises, the other waits": (
        "if rank == 1: ready(folder); raise ValueError('on purpose')\ndist.barrier()",
        "",
    ),
    "a rank dies, the other waits": ("time.sleep(90) if rank == 1 else dist.barrier()", "kill"),
    "a rank waits: the notice": ("if rank == 0: dist.barrier()", "notice"),
}


def _marks(folder: Path) -> dict[int, tuple[int, float]]:
    found = {}
    for path in folder.glob("*.at"):
        words = path.read_text().split()
        if len(words) == 2:
            found[int(path.stem)] = int(words[0]), float(words[1])
    return found


def _once(kernel: Kernel, code: str, event: str) -> float:
    """Seconds from the event to the end of the cell (to the notice's text)."""
    folder = Path(tempfile.mkdtemp(prefix="times-", dir=kernel.folder))
    at: list[float] = []

    def settled(_: Ran) -> bool:
        marks = _marks(folder)
        return len(marks) == NUM_RANKS and time.time() - max(m[1] for m in marks.values()) > SETTLE_S

    def do(what: Callable[[], object]) -> Callable[[], None]:
        def act() -> None:
            at.append(time.time())
            what()

        return act

    def twice() -> None:
        kernel.interrupt()
        time.sleep(0.5)
        kernel.interrupt()

    actions: dict[str, Callable[[], object]] = {
        "interrupt": kernel.interrupt,
        "interrupt twice": twice,
        "kill": lambda: os.kill(_marks(folder)[1][0], signal.SIGKILL),
    }
    planned: list[tuple[float | Callable[[Ran], bool], Callable[[], object]]] = []
    if event in actions:
        planned = [(settled, do(actions[event]))]
    elif event == "notice":
        planned = [(lambda ran: "waiting in barrier" in ran.text, kernel.interrupt)]
    body = f"folder = {str(folder)!r}\n" + ("ready(folder)\n" if event else "") + code
    ran = kernel.run(f"%%distributed\n{body}", timeout_s=PATIENCE_S, actions=planned)
    if event == "notice":
        shown = ran.when("waiting in barrier")
        return float("nan") if shown is None else ran.sent + shown - max(m[1] for m in _marks(folder).values())
    if ran.wall is None:
        return float("nan")
    return ran.sent + ran.wall - (at[0] if at else _marks(folder)[1][1])


def _kernel_killed(cache: Path) -> float:
    """Seconds until no process of a killed kernel is left."""
    kernel = started(PRODUCTS["nbdist"], NUM_RANKS, cache)
    try:
        kernel.run(SETUP.strip(), timeout_s=60)
        kernel.processes()
        at = []

        def kill() -> None:
            at.append(time.time())
            kernel.kill()

        kernel.run(f"%%distributed\n{TRAIN}", timeout_s=SETTLE_S + 0.2, actions=[(SETTLE_S, kill)])
        while kernel.processes() and time.time() - at[0] < PATIENCE_S:
            time.sleep(0.01)
        return time.time() - at[0]
    finally:
        kernel.close()


def times(event: str, cache: Path, repetitions: int) -> list[Row]:
    """One event so many times; the worst is what is judged."""
    lost = 0
    if event == KERNEL_KILLED:
        values = [_kernel_killed(cache) for _ in range(repetitions)]
    else:
        code, what = EVENTS[event]
        values = []
        kernel = started(PRODUCTS["nbdist"], NUM_RANKS, cache)
        try:
            _must(kernel.run(SETUP.strip(), timeout_s=60), "nbdist")
            for _ in range(repetitions):
                values.append(_once(kernel, code, what))
                after = kernel.run("%%distributed\nprint(f'KEPT{rank}:{kept}')", timeout_s=30)
                survivors = {"0"} if what in ("kill", "interrupt twice") else {"0", "1"}
                lost += not survivors <= set(re.findall(r"KEPT(\d):4[12]", after.text))
                if what in ("kill", "interrupt twice"):
                    _must(kernel.run(SETUP.strip(), timeout_s=60), "nbdist")
        finally:
            kernel.close()
    note = f"worst {max(values):.3g} s" + (f"; variables lost {lost} times" if lost else "")
    return [
        Row(
            measure=event,
            product="nbdist",
            n=NUM_RANKS,
            value=statistics.median(values),
            unit="s",
            note=note,
            upper=max(values),
        )
    ]
