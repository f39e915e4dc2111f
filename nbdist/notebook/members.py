"""The ranks of a cluster as processes: forked, asked, replaced when they died, regrouped, ended."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from nbdist.errors import NotRunningError, StartError, name_ranks
from nbdist.notebook import launch
from nbdist.notebook.cell import CellRun
from nbdist.notebook.iothread import IOThread
from nbdist.notebook.logs import new_log_folder
from nbdist.notebook.ranks import RankProcess, how_it_ended, start_rank
from nbdist.notebook.watch import describe
from nbdist.wire import messages as m
from nbdist.wire.channel import Listener, Packet, new_key

__all__ = ["Members"]

START_TIMEOUT_S = 120.0
RENEW_TIMEOUT_S = 70.0
STOP_TIMEOUT_S = 0.5
GONE_TIMEOUT_S = 5.0
_STACK_S = 1.0

Answer = TypeVar("Answer", bound=m.Message)


class Members:
    """All ranks of one cluster, and the thread that reads from them.

    Parameters
    ----------
    server
        Forks them.
    choice
        How many on what.
    env
        Variables for the ranks beside the notebook's own.
    on_packet, on_tick
        Called on the I/O thread, under the lock, for messages that are not about a rank's own life, and regularly.
    on_text, on_mark
        Called there for what a rank's pipes bring.
    """

    def __init__(
        self,
        server: launch.ForkServer,
        choice: launch.Choice,
        env: Mapping[str, str],
        *,
        on_packet: Callable[[RankProcess, Packet], None],
        on_tick: Callable[[], bool],
        on_text: Callable[[RankProcess, str, str], None],
        on_mark: Callable[[RankProcess, str, int], bool],
    ) -> None:
        self.choice = choice
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.ranks: list[RankProcess] = []
        self.logs = new_log_folder()
        self.ending = False
        self._server = server
        self._env = dict(env)
        self._on_packet, self._on_text, self._on_mark = on_packet, on_text, on_mark
        self._answers: dict[tuple[int, type[m.Message]], tuple[m.Message, list[memoryview]]] = {}
        self._generation = 0
        self._steps: dict[int, int] = {}  # of each rank at the last renewal
        self._even = True  # no rank has fallen behind since the start, or was replaced
        self._key = new_key()
        self._token = os.urandom(8).hex()
        self._folder = launch.runtime_folder()
        self._io: IOThread | None = None
        server.hold()
        try:
            io = IOThread(Listener(self._folder, self._key), self.changed, self._arrived, self._exited, on_tick)
            io.start()
            self._io = io
            self._start(range(choice.n))
        except BaseException:
            self.close()
            raise

    # ---- start and end

    def _spec(self, rank: int, replacing: bool) -> dict[str, Any]:
        env = launch.rank_environment(os.environ, rank, self.choice.n) | self._env
        if self.logs is not None and "NCCL_DEBUG_FILE" in self._env:
            env["NCCL_DEBUG_FILE"] = str(self.logs / self._env["NCCL_DEBUG_FILE"])
        return {
            "rank": rank,
            "world_size": self.choice.n,
            "num_gpus": self.choice.num_gpus,
            "backend": self.choice.backend,
            "device": self.choice.device,
            "folder": str(self._folder),
            "key": self._key.decode(),
            "token": self._token,
            "generation": self._generation,
            "replacing": replacing,
            "notebook_pid": os.getpid(),
            "env": env,
            "cwd": launch.notebook_folder(),
            "path": ["", *(p for p in sys.path if p)],
        }

    def _start(self, which: Iterable[int], replacing: bool = False) -> None:
        """Fork these ranks under the present generation and wait until they are ready.

        Raises
        ------
        StartError
            With what the ranks said.
        """
        which = list(which)
        for rank in which:
            log = self.logs / f"rank-{rank}.log" if self.logs else None
            process = start_rank(self._server, self._spec(rank, replacing), log, self._on_text, self._on_mark)
            with self.changed:
                if rank < len(self.ranks):
                    old, self.ranks[rank] = self.ranks[rank], process
                    _retire(old)
                else:
                    self.ranks.append(process)
                if self._io is not None:
                    self._io.ranks = list(self.ranks)
        self.wake()
        new = [self.ranks[r] for r in which]
        with self.changed:
            self.changed.wait_for(
                lambda: all(p.ready for p in new) or any(p.failure or not p.alive for p in new), START_TIMEOUT_S
            )
            if all(p.ready for p in new):
                return
            self.changed.wait_for(lambda: all(p.failure or p.ready or not p.alive for p in new), 0.5)
        raise StartError(_why_not_started(new))

    def restart(self) -> None:
        """End all ranks and fork fresh ones."""
        if outdated := self.outdated():
            raise StartError(f"the fork server must be replaced ({outdated}): stop and start the cluster")
        self.ending = True
        self._server.kill([p.pid for p in self.ranks])
        with self.changed:
            self.changed.wait_for(lambda: not any(p.alive for p in self.ranks), GONE_TIMEOUT_S)
        self.ending = False
        self._steps, self._even = {}, True
        self._generation += 1
        self._start(range(self.choice.n))

    def leave(self, at_once: bool) -> None:
        """Ask all ranks to leave, and wait a moment for those that are idle."""
        self.ending = True
        self.send([p.rank for p in self.ranks if p.alive], m.ShutdownRequest())
        with self.changed:
            self.changed.wait_for(lambda: not any(p.alive for p in self.ranks), 0.0 if at_once else STOP_TIMEOUT_S)

    def close(self) -> None:
        """End what is left of the ranks and of everything below them, the thread, and the cluster's folder."""
        self.ending = True
        if self.ranks:
            self._server.kill([p.pid for p in self.ranks])
            with self.changed:
                self.changed.wait_for(lambda: not any(p.alive for p in self.ranks), GONE_TIMEOUT_S)
        if self._io is not None:
            self._io.stop()
        for process in self.ranks:
            _retire(process)
        shutil.rmtree(self._folder, ignore_errors=True)
        self._server.release()

    def outdated(self) -> str | None:
        """Why no rank can be forked any more, or None."""
        return self._server.outdated()

    @property
    def server_pid(self) -> int:
        """Process id of the fork server."""
        return self._server.process.pid

    def kill(self, rank: int) -> None:
        """End one rank and everything below it (any thread)."""
        self._server.kill([self.ranks[rank].pid])

    def where(self, cell: CellRun | None, *, full: bool) -> list[str]:
        """What every rank is doing, one line for ranks that do the same; with `full` whole stacks too."""
        alive = [p.rank for p in self.ranks if p.alive]
        self.send(alive, m.WhereRequest(full=full))
        where = {r: reply for r, (reply, _) in self.collect(alive, m.WhereReply, 1.0, strict=False).items()}
        if cell is None or cell.done:
            all_alive = len(alive) == len(self.ranks)
            return [f"{len(alive)} ranks, idle" if all_alive else f"{len(alive)} of {len(self.ranks)} ranks, idle"]
        lines = describe(where, cell)
        if full:
            for rank in set(alive) - where.keys():
                lines += [f"rank {rank}:", *(f"  {line}" for line in self._stack_in_c(rank))]
            for rank, reply in where.items():
                lines += [f"rank {rank}:", *(f"  {line}" for line in reply.stack)]
        return lines

    def _stack_in_c(self, rank: int) -> list[str]:
        """Python stack of a rank that does not answer, written by a signal handler which needs no GIL."""
        path = self.ranks[rank].stacks
        before = path.stat().st_size if path.exists() else 0
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.ranks[rank].pid, signal.SIGUSR1)
        deadline = time.monotonic() + _STACK_S
        text = ""
        while time.monotonic() < deadline and not text.endswith("\n"):
            with open(path) as file:
                file.seek(before)
                text = file.read()
            time.sleep(0.02)
        frames = [line.strip() for line in text.splitlines()[1:]]
        inside = [
            line for line in frames if "/IPython/" not in line and "nbdist" not in line and "<string>" not in line
        ]
        return inside or ["its stack cannot be read"]

    # ---- what they have in common

    def heal(self) -> list[str]:
        """Replace ranks that died, put all ranks into a new process group, attach modules again.

        Returns
        -------
        list of str
            What to tell the user, one line each; nothing if there was nothing to do.
        """
        dead = [p for p in self.ranks if not p.alive]
        alive = [p for p in self.ranks if p.alive]
        groups = {p.group for p in alive}
        if not dead and len(groups) == 1 and "none" not in groups:
            return []
        if dead and (outdated := self.outdated()):
            raise StartError(f"the fork server cannot replace ranks ({outdated}): use %distributed restart")
        self._generation += 1
        self.send([p.rank for p in alive], m.RenewRequest(generation=self._generation))
        said = []
        if dead:
            self._even = False
            self._start([p.rank for p in dead], replacing=True)
            for process in dead:
                self._steps.pop(process.rank, None)
                self.ranks[process.rank].replaced = True
                how = how_it_ended(process.exit_status)
                said.append(f"rank {process.rank} {how} and was started anew: its variables are gone")
        replies = self.collect([p.rank for p in alive], m.RenewReply, RENEW_TIMEOUT_S)
        return said + self._renewed({rank: reply for rank, (reply, _) in replies.items()})

    def _renewed(self, replies: Mapping[int, m.RenewReply]) -> list[str]:
        attached: dict[str, None] = {}
        lost: dict[str, None] = {}
        for rank, reply in replies.items():
            if reply.status != "ok":
                raise StartError(f"rank {rank} could not join a new process group: {reply.evalue}")
            self.ranks[rank].group = f"{self._generation}.0"
            attached.update(dict.fromkeys(reply.attached))
            lost.update(dict.fromkeys(reply.lost))
        # Counted from the last renewal on, for a rank that was started anew begins at 0.
        steps = {rank: reply.steps - self._steps.get(rank, 0) for rank, reply in replies.items()}
        self._steps = {rank: reply.steps for rank, reply in replies.items()}
        apart = len(set(steps.values())) > 1
        known, self._even = self._even, self._even and not apart
        if not (attached or lost or apart):
            return []
        text = "process group renewed"
        if attached:
            text += f", {', '.join(attached)} attached again"
        if apart:
            text += _compare(steps)
        elif known and (count := max(self._steps.values())):
            text += f"; all ranks stand after step {count}"
        return [text, *lost]

    # ---- messages

    def send(self, to: int | Sequence[int], message: m.Message, buffers: Sequence[bytes | memoryview] = ()) -> None:
        """Queue a message for a rank, or for several (any thread)."""
        if self._io is not None:
            ranks = [to] if isinstance(to, int) else to
            self._io.send([self.ranks[rank].identity for rank in ranks], message, buffers)

    def wake(self) -> None:
        """Let the I/O thread look at once (any thread)."""
        if self._io is not None:
            self._io.wake()

    def collect(
        self, ranks: Sequence[int], kind: type[Answer], timeout_s: float | None, *, strict: bool = True
    ) -> dict[int, tuple[Answer, list[memoryview]]]:
        """Wait for an answer of each rank.

        Parameters
        ----------
        timeout_s
            None: as long as the rank lives.
        strict
            Raise when one has died or is late; otherwise take what has come in time.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        found: dict[int, tuple[Answer, list[memoryview]]] = {}
        with self.changed:
            while True:
                for rank in ranks:
                    if (rank, kind) in self._answers:
                        found[rank] = self._answers.pop((rank, kind))  # type: ignore[assignment]
                missing = [r for r in ranks if r not in found]
                gone = [r for r in missing if not self.ranks[r].alive]
                late = deadline is not None and time.monotonic() > deadline
                if not missing or (not strict and (late or len(gone) == len(missing))):
                    return {rank: found[rank] for rank in ranks if rank in found}
                if gone or late:
                    raise NotRunningError(
                        f"rank {name_ranks(gone or missing)} {'has ended' if gone else 'did not answer'}"
                    )
                self.changed.wait(0.1)

    # ---- on the I/O thread, under the lock

    def _arrived(self, packet: Packet) -> None:
        process = next((p for p in self.ranks if p.identity == packet.sender), None)
        if process is None:
            return
        message = packet.message
        if isinstance(message, m.Ready):
            process.state, process.ready, process.group = "idle", message, f"{message.generation}.0"
        elif isinstance(message, m.StartFailed):
            process.failure = message
        elif isinstance(message, m.RenewReply | m.PushReply | m.PullReply | m.WhereReply):
            self._answers[process.rank, type(message)] = (message, packet.buffers)
        self._on_packet(process, packet)

    def _exited(self, process: RankProcess, status: int | None) -> None:
        process.state, process.exit_status, process.died_s = "dead", status, time.monotonic()
        process.group = "none"


def _retire(process: RankProcess) -> None:
    process.output.close()
    process.log.close()
    process.close_exits()


def _why_not_started(new: Sequence[RankProcess]) -> str:
    said = [p for p in new if p.failure]
    if said and said[0].failure:
        failure = said[0].failure
        text = failure.evalue if failure.ename == "StartError" else f"{failure.ename}: {failure.evalue}"
        who = f"rank{'s' if len(said) > 1 else ''} {name_ranks(p.rank for p in said)}"
        return f"{who} could not start: {text}"
    if dead := [p for p in new if not p.alive]:
        tail = " | ".join(dead[0].output.tail(3))
        return f"rank {dead[0].rank} {how_it_ended(dead[0].exit_status)} while starting: {tail}"
    return f"the workers did not start within {START_TIMEOUT_S:.0f} s"


def _compare(steps: Mapping[int, int]) -> str:
    """Who stands how far from the others, and what to do."""
    by_count: dict[int, list[int]] = {}
    for rank, count in steps.items():
        by_count.setdefault(count, []).append(rank)
    furthest = max(by_count)
    behind = ", ".join(
        f"rank {name_ranks(ranks)} is {furthest - count} behind"
        for count, ranks in sorted(by_count.items())
        if count < furthest
    )
    return (
        f"; the ranks do NOT stand at the same optimizer step ({behind}): build the model and the optimizer again,"
        " or load a checkpoint"
    )
