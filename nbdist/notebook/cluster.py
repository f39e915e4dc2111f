"""The cluster: workers that are started, run cells, are interrupted, restarted, and stopped, as the notebook sees them."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from nbdist.errors import InputError, NotRunningError, StartError, name_ranks
from nbdist.notebook import launch
from nbdist.notebook.cell import CellRun
from nbdist.notebook.history import Run
from nbdist.notebook.iothread import IOThread
from nbdist.notebook.logs import new_log_folder
from nbdist.notebook.ranks import RankProcess, how_it_ended, start_rank
from nbdist.notebook.running import Foreground, RunHandle
from nbdist.notebook.watch import Watch, describe
from nbdist.wire import messages as m
from nbdist.wire import values
from nbdist.wire.channel import Listener, Packet, new_key

__all__ = ["Cluster", "start"]

START_TIMEOUT_S = 120.0
RENEW_TIMEOUT_S = 70.0
STOP_TIMEOUT_S = 0.5
WAITING_S = 10.0
MAX_RUNS = 50


class RankView:
    """One rank's variables: ``cluster[0]["loss"]``."""

    def __init__(self, cluster: Cluster, rank: int) -> None:
        self._cluster, self._rank = cluster, rank

    def __getitem__(self, name: str) -> Any:
        return self._cluster.pull(name, ranks=[self._rank])[self._rank]

    def __setitem__(self, name: str, value: object) -> None:
        self._cluster.push({name: value}, ranks=[self._rank])


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
        self.waiting_s: float = options.get("waiting_s", WAITING_S)
        self._options = dict(options)
        self._server = server
        self._changed = threading.Condition()
        self._cell: CellRun | None = None
        self._watch: Watch | None = None
        self._front: Foreground | None = None
        self._answers: dict[tuple[int, type[m.Message]], tuple[m.Message, list[memoryview]]] = {}
        self._notices: list[str] = []
        self._generation = 0
        self._count = 0
        self._stopping = False
        self._closed = False
        self.names: Callable[[], Iterable[str]] = tuple
        self._broken: str | None = None  # why the process group must be renewed
        self._key = new_key()
        self._token = os.urandom(8).hex()
        self._folder = launch.runtime_folder()
        self._logs = new_log_folder()
        self._owner_pid = os.getpid()
        self._ranks: list[RankProcess] = []
        try:
            self._listener = Listener(self._folder, self._key)
            self._io = IOThread(self._listener, self._changed, self._arrived, self._exited, self._tick)
            self._io.exits = server.exits
            self._io.start()
            self._start_ranks(range(self.world_size))
        except BaseException:
            self._tear_down()
            raise
        atexit.register(self.stop)

    # ---- start and stop

    def _spec(self, rank: int) -> dict[str, Any]:
        env = launch.rank_environment(os.environ, rank, self.world_size)
        env.update(self._options.get("env", {}))
        return {
            "rank": rank,
            "world_size": self.world_size,
            "num_gpus": self.choice.num_gpus,
            "backend": self.choice.backend,
            "device": self.choice.device,
            "folder": str(self._folder),
            "key": self._key.decode(),
            "token": self._token,
            "generation": self._generation,
            "notebook_pid": os.getpid(),
            "env": env,
            "cwd": os.getcwd(),
            "path": ["", *(p for p in sys.path if p)],
        }

    def _start_ranks(self, which: Iterable[int]) -> None:
        """Fork these ranks under the present generation and wait until they are ready.

        Raises
        ------
        StartError
            With what the ranks said; none of them is left.
        """
        which = list(which)
        for rank in which:
            log = self._logs / f"rank-{rank}.log" if self._logs else None
            process = start_rank(self._server, self._spec(rank), log, self._text, self._mark)
            with self._changed:
                if rank < len(self._ranks):
                    self._retire(self._ranks[rank])
                    self._ranks[rank] = process
                else:
                    self._ranks.append(process)
                self._io.ranks = list(self._ranks)
        self._io.wake()
        new = [self._ranks[r] for r in which]
        deadline = time.monotonic() + START_TIMEOUT_S
        with self._changed:
            while not all(p.ready for p in new):
                failed = [p for p in new if p.failure or not p.alive]
                if failed or time.monotonic() > deadline:
                    break
                self._changed.wait(0.1)
        if not all(p.ready for p in new):
            self._fail_start(new)

    def _fail_start(self, new: Sequence[RankProcess]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: all(p.failure or p.ready or not p.alive for p in new), 0.5)
        said = [p for p in new if p.failure]
        dead = [p for p in new if not p.alive and not p.failure]
        if said and said[0].failure:
            failure = said[0].failure
            text = failure.evalue if failure.ename == "StartError" else f"{failure.ename}: {failure.evalue}"
            who = f"rank{'s' if len(said) > 1 else ''} {name_ranks(p.rank for p in said)}"
            raise StartError(f"{who} could not start: {text}")
        if dead:
            tail = " | ".join(dead[0].output.tail(3))
            raise StartError(f"rank {dead[0].rank} {how_it_ended(dead[0].exit_status)} while starting: {tail}")
        raise StartError(f"the workers did not start within {START_TIMEOUT_S:.0f} s")

    @staticmethod
    def _retire(process: RankProcess) -> None:
        process.output.close()
        process.log.close()

    @property
    def alive(self) -> bool:
        """Not stopped."""
        return not self._closed

    def stop(self) -> None:
        """End all workers, at once and whatever they do; nothing of the cluster stays. Calling it again does nothing."""
        if self._closed or os.getpid() != self._owner_pid:
            return
        self._stopping = True
        self._send_all(m.ShutdownRequest())
        with self._changed:
            busy = self._cell is not None
            self._changed.wait_for(lambda: not any(p.alive for p in self._ranks), 0.0 if busy else STOP_TIMEOUT_S)
        self._tear_down()
        atexit.unregister(self.stop)

    shutdown = stop

    def _tear_down(self) -> None:
        self._closed = self._stopping = True
        if self._ranks:
            self._server.kill([p.pid for p in self._ranks])
            with self._changed:
                self._changed.wait_for(lambda: not any(p.alive for p in self._ranks), 3)
        if hasattr(self, "_io"):
            self._io.stop()
        for process in self._ranks:
            self._retire(process)
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, etype: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
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
        )
        with self._changed:
            self._cell, self._front = state, front
            self._watch = Watch(state, self._ranks, self._send, self._kill_rank, self.waiting_s)
            if timeout_s is not None:
                self._watch.interrupt_at(time.monotonic() + timeout_s)
            for rank in chosen:
                process = self._ranks[rank]
                process.state = "busy"
                for stream, text in process.late:
                    state.say(rank, stream, text)
                process.late.clear()
        for notice in self._take_notices():
            state.note(notice)
        for rank in chosen:
            self._send(rank, request)
        if not background:
            front.wait()
            self._finish(state, front)
        return handle

    def _finish(self, state: CellRun, front: Foreground) -> None:
        """In the main thread, after a foreground cell: heal what can be healed, and raise what went wrong."""
        failures = state.failures()
        if failures or state.interrupted:
            with contextlib.suppress(StartError):
                for line in self._heal(state.run.ranks, replace=False):
                    front.print(line)
        front.close()
        front.raise_failures()

    def _wait_turn(self) -> None:
        """Wait until a background run has ended: a late collective would pair with one of the next cell."""
        with self._changed:
            if self._cell is None or self._cell.done:
                return
            other = self._cell
        print(f"waiting for {other.run.name}, which runs in the background (its handle's .interrupt() stops it)")
        with self._changed:
            while not other.done:
                self._changed.wait(0.1)

    def _prepare(self, chosen: Sequence[int]) -> None:
        """Before a cell: every rank it needs is alive and stands in one group with the others."""
        dead = [p.rank for p in self._ranks if not p.alive]
        if len(chosen) < self.world_size:
            if lost := [r for r in chosen if r in dead]:
                alive = [r for r in range(self.world_size) if r not in dead]
                raise InputError(
                    f"rank {name_ranks(lost)} has ended: run a cell on all ranks to replace it, or use -r {name_ranks(alive)}"
                )
            return
        for line in self._heal(chosen, replace=True):
            print(line)

    def _heal(self, chosen: Sequence[int], replace: bool) -> list[str]:
        """Fork ranks that died and renew the process group where it is needed; what to tell the user."""
        dead = [p for p in self._ranks if not p.alive]
        states = {p.group for p in self._ranks if p.alive}
        if (dead and not replace) or (not dead and len(states) == 1 and "none" not in states):
            return []
        if len(chosen) < self.world_size:
            return []
        said = []
        outdated = self._server.outdated()
        if dead and outdated:
            raise StartError(f"the fork server cannot replace ranks ({outdated}): use %distributed restart")
        self._generation += 1
        alive = [p for p in self._ranks if p.alive]
        for process in alive:
            self._io.send(process.identity, m.RenewRequest(generation=self._generation))
        if dead:
            self._start_ranks([p.rank for p in dead])
            for process in dead:
                self._ranks[process.rank].replaced = True
                said.append(
                    f"rank {process.rank} {how_it_ended(process.exit_status)} and was started anew: its variables are gone"
                )
        replies = self._collect([p.rank for p in alive], m.RenewReply, RENEW_TIMEOUT_S)
        attached: dict[str, None] = {}
        lost: dict[str, None] = {}
        steps: dict[int, int] = {}
        for rank, (reply, _) in replies.items():
            assert isinstance(reply, m.RenewReply)
            if reply.status != "ok":
                raise StartError(f"rank {rank} could not join a new process group: {reply.evalue}")
            self._ranks[rank].group = f"{self._generation}.0"
            attached.update(dict.fromkeys(reply.attached))
            lost.update(dict.fromkeys(reply.lost))
            steps[rank] = reply.steps
        text = "process group renewed"
        if attached:
            text += f", {', '.join(attached)} attached again"
        if attached or lost or len(set(steps.values())) > 1:
            said.append(text + self._compare_steps(steps))
        said += list(lost)
        self._broken = None
        return said

    @staticmethod
    def _compare_steps(steps: Mapping[int, int]) -> str:
        if len(set(steps.values())) > 1:
            by_count: dict[int, list[int]] = {}
            for rank, count in steps.items():
                by_count.setdefault(count, []).append(rank)
            where = ", ".join(f"rank {name_ranks(r)} after step {c}" for c, r in sorted(by_count.items()))
            return f"; the ranks do NOT stand at the same step ({where}): build the model and optimizer again, or load a checkpoint"
        count = next(iter(steps.values()), 0)
        return f"; all ranks stand after step {count}" if count else ""

    def interrupt(self) -> None:
        """Stop the running cell: a training loop after the same step on all ranks, other code at once. Any thread."""
        with self._changed:
            if self._watch is not None and self._cell is not None and not self._cell.done:
                self._watch.interrupt()
        self._io.wake()

    def can_restart(self) -> bool:
        """Is the fork server as it was, so that ranks can be forked from it under the present environment?"""
        return self._server.outdated() is None

    def show(self, run: Run) -> None:
        """Show a run's dashboard once more, under the present cell."""
        from nbdist.notebook.dashboard import Dashboard

        dashboard = Dashboard(run)
        dashboard.open()
        if run.ended_s is not None:
            dashboard.finish()
        else:
            self._extra_dashboards.append(dashboard)

    def restart(self) -> None:
        """End all workers and start fresh ones: every variable is gone, the fork server stays warm."""
        self._must_live()
        outdated = self._server.outdated()
        if outdated:
            raise StartError(f"the fork server must be replaced ({outdated}): stop and start the cluster")
        self._stopping = True
        pids = [p.pid for p in self._ranks]
        self._server.kill(pids)
        with self._changed:
            self._changed.wait_for(lambda: not any(p.alive for p in self._ranks), 5)
            if self._cell is not None and not self._cell.done:
                self._changed.wait_for(lambda: self._cell is None or self._cell.done, 2)
        self._stopping = False
        self._generation += 1
        self._broken = None
        self._start_ranks(range(self.world_size))

    def where(self, *, full: bool = False) -> list[str]:
        """What every rank is doing, one line for ranks that do the same."""
        self._must_live()
        alive = [p.rank for p in self._ranks if p.alive]
        for rank in alive:
            self._send(rank, m.WhereRequest(full=full))
        replies = self._collect(alive, m.WhereReply, 1.0, strict=False)
        where = {rank: reply for rank, (reply, _) in replies.items() if isinstance(reply, m.WhereReply)}
        cell = self._cell
        if cell is None or cell.done:
            return [f"{self.world_size} ranks, idle"]
        lines = describe(where, cell)
        if full:
            for rank, reply in where.items():
                lines += [f"rank {rank}:", *(f"  {line}" for line in reply.stack)]
        return lines

    # ---- variables

    def push(self, variables: Mapping[str, object] | None = None, /, *, ranks: Iterable[int] | None = None, **named: object) -> None:
        """Set variables in the ranks' namespaces.

        Parameters
        ----------
        variables, **named
            Values by name; tensors and arrays travel as raw memory, other objects are pickled.
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
        pairs = {**(variables or {}), **named}
        for name in pairs:
            if not name.isidentifier():
                raise InputError(f"{name!r} is no name a variable can have")
        try:
            data, buffers = values.dumps(list(pairs.values()))
        except Exception as error:  # pickling runs the values' own code
            raise InputError(f"{', '.join(pairs)} cannot be sent: {type(error).__name__}: {error}") from None
        memfd: str | None = None
        sizes = [b.nbytes for b in buffers]
        inline: list[bytes | memoryview] = [data, *buffers]
        if sum(sizes) >= values.MEMFD_BYTES:
            memfd, inline = values.to_memfd(buffers), [data]
        try:
            request = m.PushRequest(
                names=list(pairs), memfd=memfd, sizes=sizes if memfd else None, alone=len(chosen) == 1
            )
            for rank in chosen:
                self._send(rank, request, inline)
            for rank, (reply, _) in self._collect(chosen, m.PushReply, None).items():
                if isinstance(reply, m.PushReply) and reply.status != "ok":
                    raise InputError(f"rank {rank} could not take {', '.join(pairs)}: {reply.evalue}")
        finally:
            if memfd is not None:
                values.close_memfd(memfd)

    def pull(self, name: str, *, ranks: Iterable[int] | None = None) -> dict[int, Any]:
        """Fetch a variable, or the value of an expression, from ranks; a dict by rank.

        Raises
        ------
        InputError
            If a rank has no such variable, or it cannot be pickled.
        """
        self._must_live()
        chosen = self._chosen(ranks)
        try:
            compile(name, "<pull>", "eval")
        except SyntaxError:
            raise InputError(f"{name!r} is no variable or expression") from None
        self._wait_turn()
        for rank in chosen:
            self._send(rank, m.PullRequest(name=name))
        found: dict[int, Any] = {}
        problem: str | None = None
        for rank, (reply, buffers) in self._collect(chosen, m.PullReply, None).items():
            assert isinstance(reply, m.PullReply)
            if reply.status != "ok":
                text = f"there is no {name} on rank {rank}" if reply.ename == "NameError" else f"rank {rank} could not send {name}: {reply.ename}: {reply.evalue}"
                problem = problem or text
                continue
            data, parts = buffers[0], list(buffers[1:])
            if reply.memfd is not None:
                parts = values.map_memfd(reply.memfd, reply.sizes or [], alone=True)
                self._send(rank, m.PullDone(memfd=reply.memfd))
            try:
                found[rank] = values.loads(data, parts)
            except Exception as error:  # unpickling runs the classes' own code, which may not be here
                problem = problem or f"{name} of rank {rank} cannot be read here: {type(error).__name__}: {error}"
        if problem is not None:
            raise InputError(problem)
        return found

    def __getitem__(self, rank: int) -> RankView:
        return RankView(self, self._chosen([rank])[0])

    def output(self, rank: int) -> str:
        """The whole text of one rank since the cluster was started (as far as its file goes back)."""
        return self._ranks[self._chosen([rank])[0]].log.text_from(0)

    def output_path(self, rank: int) -> Path | None:
        """The file that holds it."""
        return self._ranks[self._chosen([rank])[0]].log.path

    # ---- parts

    def notebook_names(self) -> set[str]:
        """Names of the notebook's own kernel, for the hint to push them."""
        return set(self.names())

    def lost_ranks(self) -> str:
        """Ranks whose variables were lost since the last cell on all of them began, in short."""
        return name_ranks(p.rank for p in self._ranks if p.replaced)

    def _must_live(self) -> None:
        if self._closed:
            raise NotRunningError("the cluster was stopped: start another with %distributed start, or nbdist.start()")

    def _chosen(self, ranks: Iterable[int] | None) -> list[int]:
        chosen = list(range(self.world_size)) if ranks is None else sorted(set(ranks))
        if not chosen or chosen[0] < 0 or chosen[-1] >= self.world_size:
            raise InputError(f"ranks are numbers from 0 to {self.world_size - 1}, not {', '.join(map(str, chosen)) or 'none'}")
        return chosen

    def _whole_text(self) -> str:
        return f"the whole text: %distributed output RANK, or {self._logs}" if self._logs else "the whole text was not kept"

    def _take_notices(self) -> list[str]:
        notices, self._notices = self._notices, []
        return list(dict.fromkeys(notices))

    def _send(self, rank: int, message: m.Message, buffers: Sequence[bytes | memoryview] = ()) -> None:
        self._io.send(self._ranks[rank].identity, message, buffers)

    def _send_all(self, message: m.Message) -> None:
        for process in self._ranks:
            if process.alive:
                self._io.send(process.identity, message)

    def _kill_rank(self, rank: int) -> None:
        # From the I/O thread, under the lock: the fork server answers at once.
        self._server.kill([self._ranks[rank].pid])

    def _collect(
        self, ranks: Sequence[int], kind: type[m.Message], timeout_s: float | None, strict: bool = True
    ) -> dict[int, tuple[m.Message, list[memoryview]]]:
        """Wait for an answer of each rank; without `strict`, take what has come in time."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        wanted = {(rank, kind) for rank in ranks}
        with self._changed:
            while not wanted <= self._answers.keys():
                missing = [r for r, k in wanted if (r, k) not in self._answers]
                gone = [r for r in missing if not self._ranks[r].alive]
                late = deadline is not None and time.monotonic() > deadline
                if strict and (gone or late):
                    for key in wanted:
                        self._answers.pop(key, None)
                    which = gone or missing
                    raise NotRunningError(f"rank {name_ranks(which)} {'has ended' if gone else 'did not answer'}")
                if late:
                    break
                self._changed.wait(0.1)
            return {rank: self._answers.pop((rank, kind)) for rank, kind in wanted if (rank, kind) in self._answers}

    # ---- on the I/O thread, under the lock

    def _text(self, process: RankProcess, stream: str, text: str) -> None:
        cell = self._cell
        if cell is None or cell.done or process.rank not in cell.run.ranks or process.rank in cell.ended:
            if process.state != "starting" and not self._stopping and len(process.late) < 1000:
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

    def _arrived(self, packet: Packet) -> None:
        process = next((p for p in self._ranks if p.identity == packet.sender), None)
        if process is None:
            return
        message, cell = packet.message, self._cell
        mine = cell is not None and getattr(message, "run_id", None) == cell.run.run_id
        if isinstance(message, m.DisplayData | m.ClearOutput):
            process.displays[message.mark] = message
            process.output.advance()
        elif isinstance(message, m.Notice):
            if cell is not None and not cell.done and mine:
                cell.voice.say(process.rank, "stdout", f"{message.text}\n")
            else:
                self._notices.append(message.text)
        elif isinstance(message, m.Metrics):
            if cell is not None and mine:
                cell.moved_s = time.monotonic()
                cell.run.history.add_metrics(process.rank, message, packet.buffers)
        elif isinstance(message, m.Sample):
            if cell is not None and mine:
                cell.run.history.add_sample(process.rank, message)
        elif isinstance(message, m.ExecuteReply):
            process.state, process.group, process.steps = "idle", message.group, message.steps
            if message.status != "ok" and message.group == "none":
                self._broken = message.evalue
            if cell is not None and mine:
                cell.replied(process.rank, message)
        elif isinstance(message, m.Ready):
            process.state, process.ready, process.group = "idle", message, f"{message.generation}.0"
        elif isinstance(message, m.StartFailed):
            process.failure = message
        elif isinstance(message, m.StepHalted):
            if self._watch is not None and mine:
                self._watch.halted(process.rank, message)
        else:
            self._answers[process.rank, type(message)] = (message, packet.buffers)
            if isinstance(message, m.WhereReply) and self._watch is not None:
                self._watch.answered(process.rank, message)

    def _exited(self, pid: int | None, status: int | None) -> None:
        if pid is None:
            return  # the fork server itself: `outdated` says so when a rank must be forked
        for process in self._ranks:
            if process.pid == pid and process.alive:
                process.state, process.exit_status, process.died_s = "dead", status, time.monotonic()
                process.group = "none"
                self._broken = f"rank {process.rank} {how_it_ended(status)}"

    def _tick(self) -> bool:
        cell, now = self._cell, time.monotonic()
        if cell is None or cell.done:
            return False
        soon = cell.tick(self._ranks, now)
        if self._watch is not None:
            soon |= self._watch.tick(now)
        if cell.done and cell.run.history.version and cell.run not in self.runs:
            self.runs = [*self.runs, cell.run][-MAX_RUNS:]
        if self._front is not None and cell.background:
            self._front.background_tick()
        return soon


_server: launch.ForkServer | None = None
_server_lock = threading.Lock()


def warm() -> None:
    """Start the fork server, so that the first cell finds it warm."""
    global _server
    with _server_lock:
        if _server is None or _server.outdated():
            _server = launch.ForkServer()
            atexit.register(cool)


def cool() -> None:
    """End the fork server."""
    global _server
    with _server_lock:
        if _server is not None:
            _server.close()
            _server = None


def start(n: int | None = None, *, backend: str | None = None, say: Callable[[str], None] = print, **options: Any) -> Cluster:
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
        ``waiting_s``: after how long ranks that wait are told of, 10 by default; 0 never.

    Raises
    ------
    InputError
        For a number or backend that cannot be had, with the way out.
    StartError
        If the workers do not come up.
    """
    global _server
    with _server_lock:
        replaced = _server.outdated() if _server is not None else None
        if _server is None or replaced:
            if _server is not None:
                _server.close()
            else:
                atexit.register(cool)
            _server = launch.ForkServer()
        server = _server
    if n is not None and n < 1:
        raise InputError(f"the number of ranks must be at least 1, not {n}")
    choice = launch.choose(n, backend, server.count_devices())
    env: dict[str, str] = {}
    if options.pop("check_collectives", False):
        env["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    say(f"{choice}" + (f"; the fork server was started anew: {replaced}" if replaced else ""))
    for path in launch.shadowing_files():
        say(f"the file {path} hides the library of its name in this folder: rename it (the workers use the library)")
    return Cluster(server, choice, options={**options, "env": env})


