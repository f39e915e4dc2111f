"""One cell that runs on ranks: who still runs it, what they have said, and how it ended."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from nbdist.errors import RankFailure
from nbdist.notebook.history import Run
from nbdist.notebook.merge import Shown, Text, Voice
from nbdist.notebook.ranks import RankProcess, how_it_ended
from nbdist.wire import messages as m

__all__ = ["CellRun"]

_PIPE_REST_S = 0.3  # how long a dead rank's pipes are read on: a grandchild may hold them open

_OOM_HINT = (
    "the usual sender is the system's out-of-memory killer (host memory, not GPU memory): use smaller batches, "
    "fewer loader workers or fewer ranks"
)


def _last_lines(process: RankProcess) -> list[str]:
    return [f"its last lines: {line}" if i == 0 else line for i, line in enumerate(process.output.tail())]


class CellRun:
    """State of one executing cell. Methods are called under the cluster's lock.

    Parameters
    ----------
    run
        Its record: code, ranks, history.
    whole
        Says where the whole text of a flood can be read.
    background
        Nobody waits for it in the main thread.
    """

    def __init__(self, run: Run, whole: Callable[[], str], background: bool) -> None:
        self.run = run
        self.background = background
        self.voice = Voice(run.ranks, whole)
        self.events: deque[Text | Shown] = deque()
        self.replies: dict[int, m.ExecuteReply] = {}
        self.died: dict[int, RankFailure] = {}
        self.ended: set[int] = set()
        self.done = False
        self.began_s = time.monotonic()
        self.moved_s = self.began_s  # when anything was last heard of it
        self.interrupted = False
        self.broken_off: set[int] = set()  # ranks told to give up their group
        self.killed: dict[int, str] = {}  # ranks that were killed by nbdist, and why
        self.notes: list[str] = []  # what to say after the report

    @property
    def pending(self) -> list[int]:
        """Ranks that still run it."""
        return [r for r in self.run.ranks if r not in self.replies and r not in self.died]

    def say(self, rank: int, stream: str, text: str) -> None:
        """Text of a rank."""
        self.moved_s = time.monotonic()
        self.voice.say(rank, stream, text)

    def note(self, text: str) -> None:
        """Show a line of nbdist's own, at once."""
        self.events.append(Text("stdout", f"{text}\n"))

    def display(self, rank: int, message: m.DisplayData | m.ClearOutput) -> None:
        """A display whose place in the text has been reached."""
        self.moved_s = time.monotonic()
        if isinstance(message, m.ClearOutput):
            self.voice.clear(rank)
            return
        self.voice.show(rank, Shown(message.data, message.metadata, message.display_id, message.update, message.result))

    def replied(self, rank: int, reply: m.ExecuteReply) -> None:
        """The rank has ended the cell."""
        self.moved_s = time.monotonic()
        self.replies[rank] = reply
        self.run.states[rank] = "ok" if reply.status == "ok" else "stopped" if self.stopped(reply) else "failed"

    def stopped(self, reply: m.ExecuteReply) -> bool:
        """Whether a rank ended because the user asked, be it that the collective it waited in was broken off."""
        return reply.status == "interrupted" or (self.interrupted and reply.status == "error" and reply.secondary)

    def tick(self, ranks: Sequence[RankProcess], now: float) -> bool:
        """Move text on and see whether the cell has ended; True if it should be called again soon."""
        for process in ranks:
            rank = process.rank
            if rank in self.ended or rank not in self.run.ranks:
                continue
            if process.died_s is not None:
                if process.output.ended or now - process.died_s > _PIPE_REST_S:
                    self._died(process)
            elif rank in self.replies and process.end_mark >= self.replies[rank].mark:
                self.voice.end(rank)
                self.ended.add(rank)
        finished = self.ended.issuperset(self.run.ranks)
        self.events.extend(self.voice.take(flush=finished))
        if finished and not self.done:
            self.done = True
            self.run.ended_s = time.time()
            self.run.status = self._status()
        return not self.done and (self.voice.waiting or len(self.ended) + len(self.pending) < len(self.run.ranks))

    def _died(self, process: RankProcess) -> None:
        rank = process.rank
        self.voice.end(rank)
        self.ended.add(rank)
        if rank in self.replies:  # it ended after the cell; the cluster tells
            return
        self.run.states[rank] = "died"
        how = how_it_ended(process.exit_status)
        hint = _OOM_HINT if "SIGKILL" in how else None
        if rank in self.killed:
            how, hint = f"was killed: {self.killed[rank]}", None
        self.died[rank] = RankFailure(
            rank=rank,
            ename="",
            evalue=how,
            traceback=[*self._crash(process), *_last_lines(process)],
            time_s=time.time() - (time.monotonic() - (process.died_s or time.monotonic())),
            secondary=rank in self.killed,
            hint=hint,
        )

    @staticmethod
    def _crash(process: RankProcess) -> list[str]:
        """The line of a cell in which it crashed, if that is known."""
        if not (found := process.crashed_at()):
            return []
        cell, line, name = found
        inside = "" if name == "<module>" else f", in {name}"
        return [f"it was at Cell In[{cell}], line {line}{inside}"]

    def _status(self) -> str:
        if self.interrupted and all(f.secondary for f in self.failures()):
            return "interrupted"
        return "error" if self.failures() else "ok"

    def failures(self) -> list[RankFailure]:
        """What went wrong, one entry for each rank that did not end well; interrupts that were asked for are none."""
        failures = list(self.died.values())
        for rank, reply in self.replies.items():
            if reply.status == "ok" or (reply.status == "interrupted" and self.interrupted):
                continue
            failures.append(
                RankFailure(
                    rank=rank,
                    ename=reply.ename,
                    evalue=reply.evalue,
                    traceback=tuple(reply.traceback),
                    time_s=reply.ended_s,
                    secondary=reply.secondary,
                    hint=reply.hint,
                )
            )
        return failures
