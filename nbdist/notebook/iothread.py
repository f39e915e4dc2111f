"""The kernel's one thread that reads from ranks: their messages, their pipes, and the notices of their end.

It never prints: ipykernel files text that a thread prints under whichever cell runs then. It calls back under one lock
and the main thread, which waits on the same condition, shows what has come.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence

from nbdist.errors import WireError
from nbdist.notebook.ranks import RankProcess
from nbdist.wire.channel import Listener, Packet, Poller, Waker
from nbdist.wire.messages import Message

__all__ = ["IOThread"]

_log = logging.getLogger(__name__)

IDLE_S = 0.5
BUSY_S = 0.02


class IOThread(threading.Thread):
    """Reads until it is stopped.

    Parameters
    ----------
    listener
        Where ranks dial; owned by this thread from now on.
    changed
        Its lock is held during every callback; notified after each round.
    on_packet, on_exit
        Called for each verified message, and with the wait status of each rank that ended (None where it is not
        known, since the fork server itself is gone).
    on_tick
        Called after each round; True if it wants to be called again soon.
    """

    def __init__(
        self,
        listener: Listener,
        changed: threading.Condition,
        on_packet: Callable[[Packet], None],
        on_exit: Callable[[RankProcess, int | None], None],
        on_tick: Callable[[], bool],
    ) -> None:
        super().__init__(name="nbdist-io", daemon=True)
        self._listener = listener
        self._changed = changed
        self._on_packet, self._on_exit, self._on_tick = on_packet, on_exit, on_tick
        self._waker = Waker()
        self._outbox: deque[tuple[Sequence[bytes], Message, Sequence[bytes | memoryview]]] = deque()
        self._stop_requested = False
        self.ranks: list[RankProcess] = []

    def send(self, to: Sequence[bytes], message: Message, buffers: Sequence[bytes | memoryview] = ()) -> None:
        """Queue a message for the ranks of these identities (any thread)."""
        self._outbox.append((to, message, buffers))
        self._waker.wake()

    def wake(self) -> None:
        """Look at once whether there is something to read: the ranks have changed (any thread)."""
        self._waker.wake()

    def stop(self) -> None:
        """End the thread, and close the listener with it."""
        self._stop_requested = True
        self._waker.wake()
        if threading.current_thread() is not self:
            self.join(5)

    def run(self) -> None:
        """Read until `stop`."""
        poller = Poller()
        poller.add(self._listener)
        poller.add(self._waker.fd)
        polled: set[int] = set()
        soon = False
        while not self._stop_requested:
            ranks = list(self.ranks)
            wanted = {fd for r in ranks if not r.output.ended for fd in r.output.fds()}
            wanted |= {r.exits for r in ranks if r.exits >= 0}
            for fd in polled - wanted:
                poller.remove(fd)
            for fd in wanted - polled:
                poller.add(fd)
            polled = wanted
            ready = poller.wait(BUSY_S if soon else IDLE_S)
            self._waker.clear()
            self._send_all()
            with self._changed:
                soon = self._round(ranks, ready)
                self._changed.notify_all()
        self._listener.close()
        self._waker.close()

    def _send_all(self) -> None:
        while self._outbox:
            try:
                self._listener.send(*self._outbox.popleft())
            except WireError:
                _log.exception("nbdist could not send a message")

    def _round(self, ranks: Sequence[RankProcess], ready: set[int]) -> bool:
        try:
            for packet in self._listener.receive():
                self._on_packet(packet)
            held = False
            for rank in ranks:
                rank.output.read(ready)
                held |= rank.output.held()
            for rank in ranks:
                if rank.exits in ready:
                    ended, status = rank.read_exit()
                    if ended:
                        self._on_exit(rank, status)
            return self._on_tick() or held
        except Exception:
            # A fault of nbdist's own: the thread must go on reading, or every rank would block on a full pipe.
            _log.exception("nbdist's reader failed")
            return False
