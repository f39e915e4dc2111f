"""The kernel's one thread that reads from ranks: their messages, their pipes, and the notices of their end.

It never prints: ipykernel files text that a thread prints under whichever cell runs then. It calls back under one lock
and the main thread, which waits on the same condition, shows what has come.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

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
        Called for each verified message, and with process id and wait status of each rank that ended (status None
        where it is not known, since the fork server itself is gone).
    on_tick
        Called after each round; True if it wants to be called again soon.
    """

    def __init__(
        self,
        listener: Listener,
        changed: threading.Condition,
        on_packet: Callable[[Packet], None],
        on_exit: Callable[[int, int | None], None],
        on_tick: Callable[[], bool],
    ) -> None:
        super().__init__(name="nbdist-io", daemon=True)
        self._listener = listener
        self._changed = changed
        self._on_packet, self._on_exit, self._on_tick = on_packet, on_exit, on_tick
        self._waker = Waker()
        self._outbox: deque[tuple[bytes, Message, Sequence[bytes | memoryview]]] = deque()
        self._stop_requested = False
        self._pidfds: dict[int, int] = {}  # descriptor to process id, once nobody sends exit notices any more
        self.exits: socket.socket | None = None
        self.ranks: list[RankProcess] = []

    def send(self, to: bytes, message: Message, buffers: Sequence[bytes | memoryview] = ()) -> None:
        """Queue a message (any thread)."""
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
            ranks, exits = list(self.ranks), self.exits
            wanted = {fd for r in ranks if not r.output.ended for fd in r.output.fds()}
            wanted |= self._pidfds.keys()
            if exits is not None:
                wanted.add(exits.fileno())
            for fd in polled - wanted:
                poller.remove(fd)
            for fd in wanted - polled:
                poller.add(fd)
            polled = wanted
            ready = poller.wait(BUSY_S if soon else IDLE_S)
            self._waker.clear()
            self._send_all()
            with self._changed:
                soon = self._round(ranks, exits, ready)
                self._changed.notify_all()
        self._listener.close()
        self._waker.close()
        for fd in self._pidfds:
            os.close(fd)

    def _send_all(self) -> None:
        while self._outbox:
            try:
                self._listener.send(*self._outbox.popleft())
            except WireError:
                _log.exception("nbdist could not send a message")

    def _round(self, ranks: Sequence[RankProcess], exits: socket.socket | None, ready: set[int]) -> bool:
        try:
            for packet in self._listener.receive():
                self._on_packet(packet)
            held = False
            for rank in ranks:
                rank.output.read()
                held |= rank.output.held()
            if exits is not None:
                self._read_exits(exits)
            for fd in ready & self._pidfds.keys():
                os.close(fd)
                self._on_exit(self._pidfds.pop(fd), None)
            return self._on_tick() or held
        except Exception:
            # A fault of nbdist's own: the thread must go on reading, or every rank would block on a full pipe.
            _log.exception("nbdist's reader failed")
            return False

    def _read_exits(self, exits: socket.socket) -> None:
        while True:
            try:
                data = exits.recv(65536)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self.exits = None
                self._watch_processes()
                return
            notice: dict[str, Any] = json.loads(data)
            self._on_exit(notice["pid"], notice["status"])

    def _watch_processes(self) -> None:
        """The fork server is gone: from now on see for oneself when a rank ends, though not how."""
        for rank in self.ranks:
            try:
                self._pidfds[os.pidfd_open(rank.pid)] = rank.pid
            except ProcessLookupError:
                self._on_exit(rank.pid, None)
