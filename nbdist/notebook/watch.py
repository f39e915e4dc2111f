"""What must happen in time: the interrupt ladder, ranks that wait for a rank that failed, and ranks that wait too long.

Everything here is driven by the I/O thread's ticks and only ever looks at the clock, the ranks' answers and their
processes; a rank that is slow is never called dead.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence

from nbdist.errors import name_ranks
from nbdist.notebook.cell import CellRun
from nbdist.notebook.ranks import RankProcess
from nbdist.wire import messages as m

__all__ = ["Watch"]

FREE_PEERS_S = 0.25  # after a rank failed, until the ranks that wait for it are freed
SIGNAL_S = 0.7  # until a rank whose I/O thread does not act gets the signal directly
BREAK_S = 0.8  # until a rank's collective is broken off
STUCK_S = 0.3  # until it is asked whether all that are left wait for each other
KILL_S = 4.5  # until a rank that cannot be reached is killed
ANSWER_S = 0.4  # between two questions to a rank where it stands
SILENT_S = 2.5  # without an answer: it holds the GIL, and will not run Python again
AGAIN_S = 0.8  # after a second interrupt, until ranks that are left are killed

Send = Callable[[int, m.Message], None]


class Watch:
    """Follows one cell.

    Parameters
    ----------
    cell
        The cell.
    processes
        All ranks of the cluster, by rank.
    send
        Sends a message to a rank.
    kill
        Ends a rank's process and all below it.
    waiting_s
        After how long without a sign of life the user is told where every rank stands; 0: never.
    """

    def __init__(
        self,
        cell: CellRun,
        processes: Sequence[RankProcess],
        send: Send,
        kill: Callable[[int], None],
        waiting_s: float,
    ) -> None:
        self._cell = cell
        self._processes = processes
        self._send = send
        self._kill = kill
        self._waiting_s = waiting_s
        self._asked_s: float | None = None
        self._again_s: float | None = None
        self._grace_s = 0.0
        self._boundaries: dict[int, int] = {}
        self._agreed: int | None = None
        self._signalled: set[int] = set()
        self._where_asked: dict[int, float] = {}
        self._where: dict[int, m.WhereReply] = {}
        self._told_s = cell.began_s
        self._pause_s = waiting_s
        self._telling_s: float | None = None
        self._spoken_of: set[int] = set()
        self._timeout_s: float | None = None

    # ---- what happens

    def interrupt_at(self, at_s: float) -> None:
        """Interrupt when this time (monotonic) has come."""
        self._timeout_s = at_s

    def interrupt(self) -> None:
        """The user asks the cell to stop; asking again does not wait any more."""
        now = time.monotonic()
        self._cell.interrupted = True
        if self._asked_s is not None:
            self._again_s = self._again_s or now
            for rank in self._cell.pending:
                self._break(rank, "the cell was interrupted")
                self._signal(rank)
            return
        self._asked_s = now
        for rank in self._cell.pending:
            self._send(rank, m.InterruptRequest(run_id=self._cell.run.run_id))

    def halted(self, rank: int, message: m.StepHalted) -> None:
        """A rank names its next step boundary."""
        self._boundaries[rank] = message.steps
        self._grace_s = max(self._grace_s, message.grace_s)
        self._agree()

    def _agree(self) -> None:
        pending = self._cell.pending
        if self._asked_s is None or not pending or not self._boundaries.keys() >= set(pending):
            return
        highest = max(self._boundaries.values())
        if self._agreed != highest:
            self._agreed = highest
            for rank in pending:
                self._send(rank, m.InterruptRequest(run_id=self._cell.run.run_id, at_step=highest))

    def answered(self, rank: int, reply: m.WhereReply) -> None:
        """A rank says where it stands."""
        self._where[rank] = reply

    # ---- what time does

    def tick(self, now: float) -> bool:
        """Do what is due; True if it should be called again soon."""
        if self._cell.done or not self._cell.pending:
            return False
        if self._timeout_s is not None and now > self._timeout_s and self._asked_s is None:
            self._cell.note("the cell's time is over: interrupting it")
            self.interrupt()
        if self._asked_s is not None:
            self._climb(now)
            return True
        self._free_peers()
        return self._tell(now)

    def _free_peers(self) -> None:
        """A rank failed before it took part in what its peers wait for: it gives its group up, which frees them."""
        unix = time.time()
        for rank, reply in self._cell.replies.items():
            if reply.status == "ok" or rank in self._cell.broken_off or unix - reply.ended_s < FREE_PEERS_S:
                continue
            self._break(rank, f"rank {rank} stopped: {reply.ename}")

    def _break(self, rank: int, reason: str) -> None:
        if rank not in self._cell.broken_off:
            self._cell.broken_off.add(rank)
            self._processes[rank].group = "none"
            self._send(rank, m.BreakRequest(run_id=self._cell.run.run_id, reason=reason))

    def _signal(self, rank: int) -> None:
        process = self._processes[rank]
        if rank not in self._signalled and process.alive:
            self._signalled.add(rank)
            try:
                os.kill(process.pid, signal.SIGINT)
            except ProcessLookupError:
                return

    def _climb(self, now: float) -> None:
        self._agree()
        asked = now - (self._asked_s or now)
        if asked > STUCK_S and self._all_wait(now):
            for rank in self._cell.pending:
                self._break(rank, "the cell was interrupted")
        grace = self._grace_s if self._boundaries else 0.0
        for rank in self._cell.pending:
            named = rank in self._boundaries
            if asked > SIGNAL_S and not named and self._where_due(rank, now) in ("late", "silent"):
                self._signal(rank)
            if asked > grace + BREAK_S:
                self._break(rank, "the cell was interrupted")
            if self._again_s is not None:
                if now - self._again_s > AGAIN_S:
                    self._end(rank, "it was interrupted twice and did not stop")
            elif asked > grace + KILL_S:
                state = self._where_due(rank, now)
                if state == "silent":
                    self._end(rank, "it was interrupted and could not be reached")
                elif state == "unmoved":
                    self._end(rank, f"it was interrupted and did not leave {self._where[rank].line or 'a call'}")
                elif state == "moving" and rank not in self._spoken_of:
                    self._spoken_of.add(rank)
                    line = self._where[rank].line
                    self._cell.note(
                        f"rank {rank} is still at work after the interrupt ({line}); interrupt again to kill it"
                    )

    def _all_wait(self, now: float) -> bool:
        """Whether every rank that is left waits in a collective: none of them will come to a boundary."""
        pending = self._cell.pending
        states = [self._where_due(rank, now) for rank in pending]
        return not {"asked", "late", "silent"} & set(states) and all(
            rank in self._where and self._where[rank].state == "waiting" and self._where[rank].unmoved
            for rank in pending
        )

    def _where_due(self, rank: int, now: float) -> str:
        """Ask a rank where it stands: ``asked``, ``late``, ``silent`` (it holds the GIL), ``unmoved`` or ``moving``."""
        asked_s = self._where_asked.get(rank)
        reply = self._where.get(rank)
        if asked_s is None or (reply is not None and now - asked_s > ANSWER_S):
            self._where.pop(rank, None)
            self._where_asked[rank] = now
            self._send(rank, m.WhereRequest())
            return "asked"
        if reply is None:
            waited = now - asked_s
            return "silent" if waited > SILENT_S else "late" if waited > ANSWER_S else "asked"
        return "unmoved" if reply.unmoved else "moving"

    def _end(self, rank: int, why: str) -> None:
        if rank not in self._cell.killed:
            self._cell.killed[rank] = why
            self._kill(rank)

    def _tell(self, now: float) -> bool:
        """Say where every rank stands when some have finished, or nothing has moved, for long."""
        if not self._waiting_s:
            return False
        if self._telling_s is not None:
            if self._where.keys() >= set(self._cell.pending) or now - self._telling_s > 2 * ANSWER_S:
                self._say_where(now)
            return True
        if self._cell.moved_s > self._told_s:
            self._pause_s = self._waiting_s
        if now - max(self._cell.moved_s, self._told_s) < self._pause_s:
            return False
        self._telling_s = now
        self._where.clear()
        for rank in self._cell.pending:
            self._send(rank, m.WhereRequest())
        return True

    def _say_where(self, now: float) -> None:
        self._telling_s, self._told_s = None, now
        self._pause_s *= 3  # told again ever more rarely, while nothing moves
        if not any(self._where[r].state == "waiting" for r in self._where) and not self._cell.replies:
            return  # all of them compute: a long step is nothing to tell
        for line in describe(self._where, self._cell):
            self._cell.note(line)


def describe(where: dict[int, m.WhereReply], cell: CellRun) -> list[str]:
    """Where each rank of a cell stands, equal ones in one line."""
    now = time.time()
    lines: dict[str, list[int]] = {}
    for rank in cell.run.ranks:
        reply = where.get(rank)
        if rank in cell.died:
            text = f"ended: {cell.died[rank].evalue}"
        elif rank in cell.replies:
            text = "finished the cell" if cell.replies[rank].status == "ok" else "left the cell with an error"
        elif reply is None:
            text = "does not answer (it runs code that holds the GIL)"
        elif reply.state == "waiting":
            since = f" for {now - reply.since_s:.0f} s" if reply.since_s else ""
            text = f"waiting in {reply.operation}{since} at {reply.line}"
        else:
            text = f"running {reply.line}" if reply.line else "running, not in the cell's own lines"
        lines.setdefault(text, []).append(rank)
    said = []
    for text, ranks in lines.items():
        who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {name_ranks(ranks)}"
        said.append(f"{who}: {text}")
    return said
