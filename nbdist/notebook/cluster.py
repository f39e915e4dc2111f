"""The cluster: workers that are started, run cells, are interrupted, restarted and stopped."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from nbdist.errors import InputError, NotRunningError, StartError, name_ranks
from nbdist.notebook import launch, variables
from nbdist.notebook.cell import CellRun
from nbdist.notebook.dashboard import Dashboard
from nbdist.notebook.history import Run
from nbdist.notebook.members import Members
from nbdist.notebook.ranks import RankProcess
from nbdist.notebook.running import Foreground, RunHandle
from nbdist.notebook.variables import RankView
from nbdist.notebook.watch import Watch
from nbdist.wire import messages as m
from nbdist.wire.channel import Packet

__all__ = ["Cluster", "start"]

WAITING_S = 9.0
MAX_RUNS = 50
_LATE_CHUNKS = 1000


class Cluster:
    """Workers of one notebook; use `nbdist.start`.

    Attributes
    ----------
    choice
        How many ranks on what, and why.
    runs
        Records of the last cells that reported metrics, oldest first.
    """

    def __init__(self, server: launch.ForkServer, choice: launch.Choice, *, options: Mapping[str, Any]) -> None:
        self.choice = choice
        self.world_size = choice.n
        self.runs: list[Run] = []
        self._nccl_debug = "NCCL_DEBUG_FILE" in options.get("env", {})
        self.waiting_s: float = options.get("waiting_s", WAITING_S)
        self.names: Callable[[], Iterable[str]] = tuple
        self._cell: CellRun | None = None
        self._watch: Watch | None = None
        self._front: Foreground | None = None
        self._again: list[Dashboard] = []  # dashboards of the running cell that were opened a second time
        self._notices: list[str] = []
        self._count = 0
        self._closed = False
        self._owner_pid = os.getpid()
        self.members = Members(
            server,
            choice,
            options.get("env", {}),
            on_packet=self._arrived,
            on_tick=self._tick,
            on_text=self._text,
            on_mark=self._mark,
        )
        self.changed = self.members.changed
        self.shown = threading.Condition(self.members.lock)  # the same lock: the running cell has something to show
        atexit.register(self.stop)

    # ---- start and stop

    @property
    def alive(self) -> bool:
        """Not stopped."""
        return not self._closed

    def stop(self) -> None:
        """End all workers at once, whatever they do; nothing of the cluster stays. Again: does nothing."""
        if self._closed or os.getpid() != self._owner_pid:
            return
        self._closed = True
        self.members.leave(at_once=self._cell is not None and not self._cell.done)
        self.members.close()
        atexit.unregister(self.stop)

    shutdown = stop

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, etype: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"<Cluster: {self.choice}{', stopped' if self._closed else ''}>"

    # ---- cells

    def run(
        self,
        code: str,
        *,
        ranks: Iterable[int] | None = None,
        background: bool = False,
        timeout_s: float | None = None,
        watch: Sequence[str] | None = None,
        dashboard: bool = True,
        cell: int | None = None,
        name: str | None = None,
        autoreload: str | None = None,
        profile_steps: int | None = None,
        profile_ranks: Iterable[int] | None = None,
    ) -> RunHandle:
        """Run code on the workers and show what they say; return when all have finished it.

        Parameters
        ----------
        code
            A cell, with IPython's syntax.
        ranks
            On which ranks; all of them by default.
        background
            Return at once; the handle tells the rest.
        timeout_s
            Interrupt the cell after so many seconds.
        watch
            Names of the loop's variables to record at each optimizer step; by default ``loss``.
        dashboard
            Show metrics live.
        cell
            Number shown in tracebacks, ``Cell In[k]``.
        name
            Of the run, in the dashboard and in `runs`.
        autoreload
            Mode of the notebook's own ``%autoreload``.
        profile_steps
            Record so many optimizer steps with ``torch.profiler`` and show a table; the trace is written to a file.
        profile_ranks
            On which ranks; on the first by default.

        Returns
        -------
        RunHandle
            With the run's history, and what each rank made of it.

        Raises
        ------
        CellError
            If it failed on any rank.
        KeyboardInterrupt
            If it was interrupted; the workers are usable.
        """
        self._must_live()
        chosen = self._chosen(ranks)
        self._wait_turn()
        self._prepare(chosen)
        self._count += 1
        run_id = uuid.uuid4().hex
        record = Run(
            run_id=run_id,
            name=name or f"run {self._count}",
            code=code,
            ranks=chosen,
            world_size=self.world_size,
            backend=self.choice.backend,
            device=self.choice.device,
            states=dict.fromkeys(chosen, "running"),
        )
        state = CellRun(record, self._whole_text, background)
        front = Foreground(self, state, dashboard=dashboard)
        handle = RunHandle(self, state, front)
        front.open()
        request = m.ExecuteRequest(
            run_id=run_id,
            code=code,
            cell=cell or self._count,
            ranks=chosen,
            watch=list(watch) if watch is not None else None,
            autoreload=autoreload,
            profile_steps=profile_steps,
            profile_ranks=self._chosen(profile_ranks) if profile_ranks is not None else chosen[:1],
        )
        with self.changed:
            self._cell, self._front = state, front
            self._watch = Watch(state, self.members.ranks, self.members.send, self.members.kill, self.waiting_s)
            if timeout_s is not None:
                self._watch.interrupt_at(time.monotonic() + timeout_s)
            for rank in chosen:
                process = self.members.ranks[rank]
                process.state = "busy"
                process.output.forget_tail()
                for stream, text in process.late:
                    state.say(rank, stream, text)
                process.late.clear()
        for notice in self._take_notices():
            state.note(notice)
        self.members.send(chosen, request)
        if not background:
            front.wait()
            self._finish(state, front)
        return handle

    def _finish(self, state: CellRun, front: Foreground) -> None:
        """In the main thread, after a foreground cell: heal what can be healed at once, and raise what went wrong."""
        everybody = len(state.run.ranks) == self.world_size and all(p.alive for p in self.members.ranks)
        if everybody and (state.interrupted or state.failures()):
            with contextlib.suppress(StartError, NotRunningError):  # tried again, and told, before the next cell
                for line in self.members.heal():
                    front.print(line)
        front.close()
        front.raise_failures()

    def _wait_turn(self) -> None:
        """Wait until a background run has ended: a late collective would pair with one of the next cell."""
        with self.changed:
            if self._cell is None or self._cell.done:
                return
            other = self._cell
        print(f"waiting for {other.run.name}, which runs in the background (its handle's .interrupt() stops it)")
        with self.changed:
            while not other.done:
                self.changed.wait(0.1)

    def _prepare(self, chosen: Sequence[int]) -> None:
        """Before a cell: every rank it needs is alive and stands in one group with the others."""
        dead = [p.rank for p in self.members.ranks if not p.alive]
        if len(chosen) == self.world_size:
            for line in self.members.heal():
                print(line)
        elif lost := [r for r in chosen if r in dead]:
            alive = name_ranks(r for r in range(self.world_size) if r not in dead)
            raise InputError(
                f"rank {name_ranks(lost)} has ended: a cell on all ranks replaces it"
                + (f"; -r {alive} reaches the others" if alive else "")
            )

    def interrupt(self) -> None:
        """Stop the running cell: a training loop after the same step on all ranks, other code at once. Any thread."""
        with self.changed:
            if self._watch is not None and self._cell is not None and not self._cell.done:
                self._watch.interrupt()
        self.members.wake()

    def can_restart(self) -> bool:
        """Whether the fork server is as it was, so that ranks can be forked under the present environment."""
        return self.members.outdated() is None

    def restart(self) -> None:
        """End all workers and start fresh ones: every variable is gone, the fork server stays warm."""
        self._must_live()
        self.members.restart()

    def show(self, run: Run) -> None:
        """Show a run's dashboard once more, under the present cell; live if it still runs."""
        dashboard = Dashboard(run)
        dashboard.open()
        if run.ended_s is None:
            self._again.append(dashboard)

    def where(self, *, full: bool = False) -> list[str]:
        """What every rank is doing, one line for ranks that do the same."""
        self._must_live()
        return self.members.where(self._cell, full=full)

    # ---- variables

    def push(
        self, values: Mapping[str, object] | None = None, /, *, ranks: Iterable[int] | None = None, **named: object
    ) -> None:
        """Set variables in the ranks' namespaces.

        Parameters
        ----------
        values, **named
            By name; tensors and arrays travel as raw memory, other objects are pickled.
        ranks
            Where; on all by default.

        Raises
        ------
        InputError
            If a value cannot be pickled, or a rank cannot unpickle it.
        """
        self._must_live()
        chosen = self._chosen(ranks)
        self._wait_turn()
        variables.push(self.members, {**(values or {}), **named}, chosen)

    def pull(self, name: str, *, ranks: Iterable[int] | None = None) -> dict[int, Any]:
        """Fetch a variable, or the value of an expression, from ranks; a dict by rank.

        Raises
        ------
        InputError
            If a rank has no such variable, or it cannot be pickled.
        """
        self._must_live()
        chosen = self._chosen(ranks)
        self._wait_turn()
        return variables.pull(self.members, name, chosen)

    def __getitem__(self, rank: int) -> RankView:
        return RankView(self, self._chosen([rank])[0])

    def output(self, rank: int) -> str:
        """The whole text of one rank since the cluster was started (as far as its file goes back)."""
        return self.members.ranks[self._chosen([rank])[0]].log.text_from(0)

    def nccl_logs(self) -> Path | None:
        """The folder with the ranks' NCCL logs, if they were asked for at start."""
        return self.members.logs if self._nccl_debug else None

    def output_path(self, rank: int) -> Path | None:
        """The file that holds it."""
        return self.members.ranks[self._chosen([rank])[0]].log.path

    # ---- parts

    def notebook_names(self) -> set[str]:
        """Names of the notebook's own kernel, for the hint to push them."""
        return set(self.names())

    def lost_ranks(self) -> str:
        """Ranks whose variables were lost since the last cell on all of them began, in short."""
        return name_ranks(p.rank for p in self.members.ranks if p.replaced)

    def _must_live(self) -> None:
        if self._closed:
            raise NotRunningError("the cluster was stopped: start another with %distributed start, or nbdist.start()")

    def _chosen(self, ranks: Iterable[int] | None) -> list[int]:
        chosen = list(range(self.world_size)) if ranks is None else sorted(set(ranks))
        if not chosen or chosen[0] < 0 or chosen[-1] >= self.world_size:
            raise InputError(
                f"ranks are numbers from 0 to {self.world_size - 1}, not {', '.join(map(str, chosen)) or 'none'}"
            )
        return chosen

    def _whole_text(self) -> str:
        logs = self.members.logs
        return f"the whole text: %distributed output RANK, or {logs}" if logs else "the whole text was not kept"

    def _take_notices(self) -> list[str]:
        notices, self._notices = self._notices, []
        return list(dict.fromkeys(notices))

    # ---- on the I/O thread, under the lock

    def _text(self, process: RankProcess, stream: str, text: str) -> None:
        cell = self._cell
        if cell is None or cell.done or process.rank not in cell.run.ranks or process.rank in cell.ended:
            # Written between cells, e.g. by a thread: it comes with the next one.
            if process.state != "starting" and not self.members.ending and len(process.late) < _LATE_CHUNKS:
                process.late.append((stream, text))
            return
        cell.say(process.rank, stream, text)

    def _mark(self, process: RankProcess, kind: str, number: int) -> bool:
        if kind == "e":
            process.end_mark = number
        elif kind == "d":
            message = process.displays.pop(number, None)
            if message is None:
                return not process.alive
            if self._cell is not None and message.run_id == self._cell.run.run_id:
                self._cell.display(process.rank, message)
        return True

    def _arrived(self, process: RankProcess, packet: Packet) -> None:
        message, cell, watch = packet.message, self._cell, self._watch
        if isinstance(message, m.WhereReply) and watch is not None:
            watch.answered(process.rank, message)
        if isinstance(message, m.ExecuteReply):
            # A rank that is told to give up its group may have answered just before.
            told = cell is not None and message.run_id == cell.run.run_id and process.rank in cell.broken_off
            process.state, process.group, process.steps = "idle", "none" if told else message.group, message.steps
        if isinstance(message, m.DisplayData | m.ClearOutput):
            process.displays[message.mark] = message
            process.output.advance()
            return
        mine = cell is not None and getattr(message, "run_id", None) == cell.run.run_id
        if isinstance(message, m.Notice) and (not mine or (cell is not None and cell.done)):
            self._notices.append(message.text)
        if cell is None or not mine:
            return
        if isinstance(message, m.Notice):
            cell.voice.say(process.rank, "stdout", f"{message.text}\n")
        elif isinstance(message, m.Metrics):
            cell.moved_s = time.monotonic()
            cell.run.history.add_metrics(process.rank, message, packet.buffers)
        elif isinstance(message, m.Sample):
            cell.run.add_sample(process.rank, message)
        elif isinstance(message, m.ExecuteReply):
            cell.replied(process.rank, message)
        elif isinstance(message, m.StepHalted) and watch is not None:
            watch.halted(process.rank, message)

    def _tick(self) -> bool:
        cell, now = self._cell, time.monotonic()
        over = cell is None or cell.done
        if cell is None or over:
            return False
        soon = cell.tick(self.members.ranks, now)
        if self._watch is not None:
            soon |= self._watch.tick(now)
        if cell.run not in self.runs and cell.run.history.names():
            self.runs = [*self.runs, cell.run][-MAX_RUNS:]
        if self._front is not None and cell.background:
            self._front.background_tick()
        for dashboard in self._again:
            if cell.done:
                dashboard.finish()
            else:
                dashboard.push()
        if cell.done:
            self._again = []
        if cell.done or cell.events:
            self.shown.notify_all()
        return soon


_server: launch.ForkServer | None = None
_server_lock = threading.Lock()


def warm() -> None:
    """Start the fork server, so that the first cell finds it warm."""
    with _server_lock:
        if _server is None or _server.outdated():
            _replace_server()


def _replace_server() -> launch.ForkServer:
    global _server
    if _server is not None:
        _server.retire()
    else:
        atexit.register(cool)
    _server = launch.ForkServer()
    return _server


def cool() -> None:
    """End the fork server."""
    global _server
    with _server_lock:
        if _server is not None:
            _server.close()
            _server = None


def start(
    n: int | None = None, *, backend: str | None = None, say: Callable[[str], None] = print, **options: Any
) -> Cluster:
    """Start workers: one per visible GPU, or without a GPU two on the CPU.

    Parameters
    ----------
    n
        How many.
    backend
        "nccl" or "gloo"; chosen by itself otherwise.
    say
        Called with the line that tells what was chosen and why.
    **options
        ``check_collectives``: mismatched collectives raise instead of hanging or aborting (slow).
        ``nccl_debug``: keep each rank's NCCL log for the doctor.
        ``waiting_s``: after how long ranks that wait are told of, 9 by default; 0 never.

    Raises
    ------
    InputError
        For a number or backend that cannot be had, with the way out.
    StartError
        If the workers do not come up.
    """
    with _server_lock:
        replaced = _server.outdated() if _server is not None else None
        server = _replace_server() if _server is None or replaced else _server
    if n is not None and n < 1:
        raise InputError(f"the number of ranks must be at least 1, not {n}")
    choice = launch.choose(n, backend, server.count_devices())
    env: dict[str, str] = {}
    if options.pop("check_collectives", False):
        env["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    if options.pop("nccl_debug", False):
        env |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": "nccl.%h.%p.log"}  # members put the folder before it
    say(f"{choice}" + (f"; the fork server was started anew: {replaced}" if replaced else ""))
    for path in launch.shadowing_files():
        say(f"the file {path} hides the library of its name in this folder: rename it (the workers use the library)")
    return Cluster(server, choice, options={**options, "env": env})
