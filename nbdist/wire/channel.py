"""The sockets between the notebook and its ranks: signed messages over unix sockets in a private folder.

The notebook binds one ROUTER, each rank dials it with a DEALER. A message is Jupyter's: a JSON header, parent header,
metadata and content under an HMAC (`jupyter_client.session.Session`), then raw binary buffers. Whatever does not carry
a right signature, has no known kind or does not fit its fields is dropped and counted; nothing is ever unpickled here.

A channel belongs to one thread. Other threads wake it through a `Waker`.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import zmq
from jupyter_client.session import Session

from nbdist.errors import WireError
from nbdist.wire import messages
from nbdist.wire.messages import Message

__all__ = ["MAX_JSON_BYTES", "Dialer", "Listener", "Packet", "Poller", "Waker", "new_key"]

MAX_JSON_BYTES = 64 * 2**20
_MAX_FRAMES = 1024
_MAX_SOCKET_PATH = 100  # bytes; the kernel's limit is 108 with the terminating zero

Buffer = bytes | memoryview


class Packet(NamedTuple):
    """A received message: who sent it (empty on the rank's side), what it says, and its buffers."""

    sender: bytes
    message: Message
    buffers: list[memoryview]


def new_key() -> bytes:
    """A fresh random signing key."""
    return os.urandom(32).hex().encode()


def _as_json(value: object) -> bytes:
    """JSON, whatever a cell put into the message: lone surrogates become question marks, unknown objects their text."""
    return json.dumps(value, default=_plain, ensure_ascii=False, skipkeys=True).encode("utf-8", "replace")


def _plain(value: Any) -> Any:
    if hasattr(value, "isoformat"):
        return value.isoformat()
    if hasattr(value, "tolist"):  # a number or array of numpy
        return value.tolist()
    return str(value)


class _Channel:
    """What both ends share: signing, parsing, counting what was dropped."""

    def __init__(self, kind: int, key: bytes, known: dict[str, type[Message]]) -> None:
        if not key:
            raise WireError("a channel needs a signing key")
        self._session = Session(key=key, pack=_as_json)
        self._context = zmq.Context()
        self._socket = socket = self._context.socket(kind)
        self._known = known
        self.dropped = 0
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)

    def _send(self, message: Message, buffers: Sequence[Buffer], to: Sequence[bytes] = ()) -> None:
        content = {name: getattr(message, name) for name in type(message).__dataclass_fields__ if name != "kind"}
        whole = self._session.msg(messages.kind_of(message), content)
        whole["header"]["date"] = time.time()  # the text of a date would cost its reader more than all the rest
        try:
            frames: list[bytes | memoryview] = list(self._session.serialize(whole))
        except (TypeError, ValueError, RecursionError) as error:
            raise WireError(f"{messages.kind_of(message)} cannot be written as JSON: {error}") from None
        if (size := sum(map(len, frames))) > MAX_JSON_BYTES:
            raise WireError(f"{messages.kind_of(message)} has {size:,} bytes, more than the {MAX_JSON_BYTES:,} allowed")
        frames += buffers  # copied by zmq, which needs no thread for that: large values go another way
        if not to:
            self._socket.send_multipart(frames)
        for ident in to:
            self._socket.send_multipart([ident, *frames])

    def receive(self) -> list[Packet]:
        """All messages that have arrived, without waiting; what cannot be trusted or read is counted in `dropped`."""
        packets: list[Packet] = []
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return packets
            try:
                packets.append(self._read(frames))
            except Exception:  # bytes from a socket can break any layer below; none may end the reader
                self.dropped += 1

    def _read(self, frames: list[zmq.Frame]) -> Packet:
        if len(frames) > _MAX_FRAMES:
            raise WireError("too many frames")
        idents, rest = self._session.feed_identities(frames, copy=False)
        if sum(len(f) for f in rest[:5]) > MAX_JSON_BYTES:
            raise WireError("message too large")
        msg = self._session.deserialize(rest, content=True, copy=False)
        message = messages.parse(msg["header"]["msg_type"], msg["content"], self._known)
        sender = bytes(idents[0]) if idents else b""
        return Packet(sender, message, [memoryview(b) for b in msg["buffers"]])

    def close(self) -> None:
        """Close the socket at once; what was not sent is lost."""
        self._socket.close(linger=0)
        self._context.term()


class Listener(_Channel):
    """The notebook's end: one ROUTER bound to ``folder/wire``.

    Raises
    ------
    WireError
        If the folder's path is too long for a unix socket.
    """

    def __init__(self, folder: Path, key: bytes) -> None:
        path = folder / "wire"
        if len(os.fsencode(path)) > _MAX_SOCKET_PATH:
            raise WireError(f"the path of a unix socket may have {_MAX_SOCKET_PATH} bytes, {path} is longer")
        super().__init__(zmq.ROUTER, key, messages.FROM_RANK)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.bind(f"ipc://{path}")

    def send(self, to: Sequence[bytes], message: Message, buffers: Sequence[Buffer] = ()) -> None:
        """Send to the ranks that dialled under these identities; silently nothing to one that is gone."""
        if to:
            self._send(message, buffers, to)


class Dialer(_Channel):
    """A rank's end: one DEALER connected to ``folder/wire``."""

    def __init__(self, folder: Path, key: bytes, identity: bytes) -> None:
        super().__init__(zmq.DEALER, key, messages.TO_RANK)
        self._socket.setsockopt(zmq.IDENTITY, identity)
        self._socket.connect(f"ipc://{folder / 'wire'}")

    def send(self, message: Message, buffers: Sequence[Buffer] = ()) -> None:
        """Send to the notebook."""
        self._send(message, buffers)

    def drain(self, timeout_s: float) -> None:
        """Close after what was sent has left, waiting at most `timeout_s`."""
        self._socket.close(linger=int(timeout_s * 1000))
        self._context.term()


class Waker:
    """Lets another thread wake the one that polls (an eventfd)."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a number that was closed meanwhile may be somebody else's
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def wake(self) -> None:
        """Make the fd readable; safe from any thread and from signal handlers."""
        with self._lock:
            if self.fd >= 0:
                os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        """Make the fd unreadable again."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return

    def close(self) -> None:
        """Free the fd."""
        with self._lock:
            fd, self.fd = self.fd, -1
            os.close(fd)


class Poller:
    """Waits for a channel and any number of file descriptors."""

    def __init__(self) -> None:
        self._poller = zmq.Poller()

    def add(self, source: _Channel | int) -> None:
        """Wait for this channel or descriptor from now on."""
        self._poller.register(source if isinstance(source, int) else source._socket, zmq.POLLIN)

    def remove(self, source: _Channel | int) -> None:
        """Do not wait for it any more."""
        self._poller.unregister(source if isinstance(source, int) else source._socket)

    def wait(self, timeout_s: float) -> set[int]:
        """The descriptors that can be read (or have ended) within `timeout_s`; channels are asked by `receive`."""
        ready = self._poller.poll(max(0, int(timeout_s * 1000 + 0.999)))
        return {source for source, _ in ready if isinstance(source, int)}
