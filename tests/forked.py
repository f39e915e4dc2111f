"""Real ranks without a notebook: forked children with a `Group` and `Steps`, and a pipe to the test each."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing.connection
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # what the first optimizer and DDP load lazily: once here instead of in every child

from nbdist.worker import step_parts
from nbdist.worker.group import Group
from nbdist.worker.steps import Steps

RANKS_S = 40.0  # a whole run of forked ranks


class Recorder:
    """Stands where the rank's Telemetry stands: keeps what is recorded."""

    def __init__(self) -> None:
        self.points: list[tuple[dict[str, Any], int | None]] = []
        self.sources: dict[str, Callable[[], Any]] = {}

    def record(self, values: Any, step: int | None, now_s: float) -> None:
        self.points.append((dict(values), step))

    def add_source(self, name: str, fn: Callable[[], Any]) -> None:
        self.sources[name] = fn

    def values(self, name: str) -> list[Any]:
        return [v[name] for v, _ in self.points if name in v]


@dataclass
class Rank:
    """What a test's body gets in each rank."""

    rank: int
    world_size: int
    group: Group
    steps: Steps
    telemetry: Recorder
    link: Any
    notices: list[str] = field(default_factory=list)
    namespace: dict[str, Any] = field(default_factory=dict)
    told: list[Any] = field(default_factory=list)
    _heard: threading.Condition = field(default_factory=threading.Condition)

    def listen(self) -> None:
        """The rank's I/O thread."""
        try:
            self._listen()
        except BaseException:
            self.link.send(("failed", f"rank {self.rank}, I/O thread\n{traceback.format_exc()}"))

    def _listen(self) -> None:
        """Do what the test sends."""
        while True:
            try:
                what, *args = self.link.recv()
            except (EOFError, OSError):
                return
            if what == "stop":
                self.steps.request_stop("run", *args)
            elif what == "give_up":
                self.group.give_up(*args)
            elif what == "waiting":
                self.link.send(("waiting", self.group.waiting()))
            else:
                with self._heard:
                    self.told.append((what, *args))
                    self._heard.notify_all()

    def wait_for(self, what: str) -> Any:
        """Wait until the test has sent this."""
        with self._heard:
            assert self._heard.wait_for(lambda: any(t[0] == what for t in self.told), RANKS_S)
            return next(t for t in self.told if t[0] == what)[1:]

    def cell(self, code: str, watch: list[str] | None = None) -> BaseException | None:
        """Run code as a cell does, in the namespace; return what it raised."""
        self.group.begin_cell(range(self.world_size), self.namespace)
        self.steps.begin("run", watch)
        self.namespace.setdefault("__name__", "__main__")
        try:
            exec(compile(code, "<cell>", "exec"), self.namespace)
        except BaseException as error:
            return error.with_traceback(None)
        finally:
            self.steps.end()
        return None


def _child(
    rank: int, world_size: int, folder: Path, link: Any, body: Callable[[Rank], Any], join: bool, cuda: bool
) -> None:
    gc.freeze()  # what other tests have left must not be collected here: its threads are not in this process
    faulthandler.enable()
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), str(world_size)
    if cuda:
        torch.cuda.set_device(rank)
    notices: list[str] = []
    telemetry = Recorder()
    group = Group(
        rank=rank,
        world_size=world_size,
        backend="nccl" if cuda else "gloo",
        folder=folder,
        device=torch.device("cuda", rank) if cuda else torch.device("cpu"),
        notice=notices.append,
    )
    steps = Steps(telemetry, notice=notices.append)  # type: ignore[arg-type]
    steps.halted = lambda count: link.send(("halted", count))
    me = Rank(rank, world_size, group, steps, telemetry, link, notices)
    group.patch()
    steps.install()
    step_parts._install()  # what times the parts of a step stands in the stack
    if join:
        group.join(0)
    threading.Thread(target=me.listen, daemon=True).start()
    link.send(("result", body(me)))


def run_ranks(
    world_size: int,
    body: Callable[[Rank], Any],
    drive: Callable[[Sequence[Any]], Any] | None = None,
    *,
    join: bool = True,
    cuda: bool = False,
) -> list[Any]:
    """Run a function in forked ranks and return what it returned in each.

    Parameters
    ----------
    body
        Runs in each rank.
    drive
        Runs here meanwhile, with a connection to each rank.
    cuda
        Use NCCL and a GPU per rank; this process must not have touched CUDA.
    """
    folder = Path(tempfile.mkdtemp(prefix="nbt-"))
    links, pids = [], []
    gc.collect()
    try:
        for rank in range(world_size):
            ours, theirs = multiprocessing.connection.Pipe()
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    ours.close()
                    for link in links:
                        link.close()
                    _child(rank, world_size, folder, theirs, body, join, cuda)
                    code = 0
                except BaseException:
                    theirs.send(("failed", f"rank {rank}\n{traceback.format_exc()}"))
                finally:
                    sys.stdout.flush()
                    os._exit(code)
            theirs.close()
            links.append(ours)
            pids.append(pid)
        if drive is not None:
            drive(links)
        return _collect(links)
    finally:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            os.waitpid(pid, 0)
        for link in links:
            link.close()
        shutil.rmtree(folder, ignore_errors=True)


def _collect(links: Sequence[Any]) -> list[Any]:
    deadline = time.monotonic() + RANKS_S
    results: dict[int, Any] = {}
    failures = []
    open_links = dict(enumerate(links))
    while open_links:
        ready = multiprocessing.connection.wait(list(open_links.values()), max(0.0, deadline - time.monotonic()))
        if not ready:
            failures.append(f"ranks {sorted(open_links)} did not end within {RANKS_S:.0f} s")
            break
        for rank, link in list(open_links.items()):
            if link not in ready:
                continue
            try:
                what, value = link.recv()
            except (EOFError, OSError):
                failures.append(f"rank {rank} died")
                del open_links[rank]
                continue
            if what == "result":
                results[rank] = value
                del open_links[rank]
            elif what == "failed":
                failures.append(value)
                del open_links[rank]
    assert not failures, "\n".join(failures)
    return [results[r] for r in range(len(links))]


def agree(links: Sequence[Any]) -> int:
    """What the notebook does for an agreed stop: ask all, take the highest boundary, tell all."""
    for link in links:
        link.send(("stop", None))
    reported = []
    for link in links:
        assert link.poll(RANKS_S), "no boundary was reported"
        what, count = link.recv()
        assert what == "halted", (what, count)
        reported.append(count)
    for link in links:
        link.send(("stop", max(reported)))
    return max(reported)


def expect(link: Any, what: str) -> Any:
    """Wait for a message of a rank."""
    assert link.poll(RANKS_S), f"no {what}"
    kind, value = link.recv()
    assert kind == what, (kind, value)
    return value
