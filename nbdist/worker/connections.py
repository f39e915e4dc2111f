"""The TCP connections gloo keeps for a process group, found through ``/proc`` so that they can be shut down.

A rank blocked in a gloo collective waits in C++ on its sockets; shutting these down, from any thread, makes the
collective raise within milliseconds. Nothing in torch gives the sockets away, but each gloo group has one epoll
descriptor, which appears while the group is made and watches a pipe, one listening socket and a connection per peer.

Descriptor numbers are reused: a number remembered from a group's making may later be a user's database connection.
Hence each connection is remembered by descriptor, inode and peer, and all three are checked again, on a duplicate
of the descriptor that nobody can close meanwhile, right before ``shutdown()``. Connections that gloo made later
(lazily) are read from the same epoll descriptor, once that has been shown to be still the one that was remembered.

Seen with the gloo of torch 2.9 to 2.13 (TCP transport with epoll).
"""

from __future__ import annotations

import os
import re
import socket
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

__all__ = ["Connection", "Connections", "descriptors", "find_new"]

_TCP_INFO_ACKED = 120  # in Linux's struct tcp_info: bytes acknowledged, then bytes received
_TCP_INFO_BYTES = _TCP_INFO_ACKED + 16
_ENTRY = re.compile(r"tfd:\s*(?P<fd>\d+) .*\bino:\s*(?P<inode>[0-9a-f]+)")
_EPOLL = "anon_inode:[eventpoll]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """One TCP socket of this process."""

    fd: int
    inode: int
    local: Any
    peer: Any  # None: a listening socket


@dataclass(frozen=True, slots=True, kw_only=True)
class Connections:
    """The sockets of one gloo group.

    Attributes
    ----------
    epoll
        The descriptor through which gloo watches them.
    listener
        The socket on which gloo waits for its peers; it tells whether `epoll` is still gloo's.
    peers
        Connections that were open when the group had been made.
    """

    epoll: int
    listener: Connection
    peers: tuple[Connection, ...]

    def shut_down(self) -> int:
        """Shut down every connection that is still gloo's; return how many."""
        known = {(c.fd, c.inode): c for c in self.peers}
        if self._still_watching():
            known.update({(c.fd, c.inode): c for c in _tcp_sockets(_watched(self.epoll)) if c.peer is not None})
        return sum(_shut_down(c) for c in known.values())

    def traffic(self) -> int:
        """Bytes sent and received by now."""
        return sum(_traffic(c) for c in self.peers)

    def _still_watching(self) -> bool:
        watched = {(c.fd, c.inode) for c in _tcp_sockets(_watched(self.epoll)) if c.peer is None}
        return (self.listener.fd, self.listener.inode) in watched


def descriptors() -> dict[int, str]:
    """Open descriptors of this process and what each one is."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # closed since the listing, e.g. the listing's own
            continue
    return found


def find_new(before: Mapping[int, str], after: Mapping[int, str]) -> list[Connections]:
    """Find the gloo groups that were made between two readings of `descriptors`.

    Parameters
    ----------
    before, after
        Readings around the making of a group.
    """
    groups = []
    for fd, what in after.items():
        if what != _EPOLL or before.get(fd) == what:
            continue
        watched = _watched(fd)
        sockets = _tcp_sockets(w for w in watched if before.get(w[0]) != after.get(w[0], "closed"))
        listeners = [s for s in sockets if s.peer is None]
        # Anything else that opens an epoll descriptor in this moment (an event loop of the user's) looks different.
        if len(listeners) == 1 and any(after.get(w[0], "").startswith("pipe:") for w in watched):
            peers = tuple(s for s in sockets if s.peer is not None)
            groups.append(Connections(epoll=fd, listener=listeners[0], peers=peers))
    return groups


def _watched(epoll: int) -> list[tuple[int, int]]:
    """Descriptors and inodes that an epoll descriptor watches; none if it is no such thing (any more).

    A descriptor alone would not do: gloo may close it in this moment, and another thread of ours get the number.
    """
    try:
        if os.readlink(f"/proc/self/fd/{epoll}") != _EPOLL:
            return []
        with open(f"/proc/self/fdinfo/{epoll}") as lines:
            entries = [_ENTRY.match(line) for line in lines]
    except OSError:
        return []
    return [(int(e["fd"]), int(e["inode"], 16)) for e in entries if e is not None]


@contextmanager
def _borrowed(fd: int) -> Iterator[socket.socket | None]:
    """A socket object on a duplicate of a descriptor; None if it is no open socket."""
    try:
        copy = os.dup(fd)
    except OSError:
        yield None
        return
    try:
        opened = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        yield None
        return
    try:
        yield opened
    finally:
        opened.close()


def _describe(fd: int, opened: socket.socket) -> Connection | None:
    if opened.family not in (socket.AF_INET, socket.AF_INET6) or opened.type != socket.SOCK_STREAM:
        return None
    try:
        peer = opened.getpeername()
    except OSError:
        if not opened.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return None
        peer = None
    return Connection(fd=fd, inode=os.fstat(opened.fileno()).st_ino, local=opened.getsockname(), peer=peer)


def _tcp_sockets(watched: Iterable[tuple[int, int]]) -> list[Connection]:
    found = []
    for fd, inode in watched:
        with _borrowed(fd) as opened:
            connection = _describe(fd, opened) if opened is not None else None
        if connection is not None and connection.inode == inode:
            found.append(connection)
    return found


def _traffic(connection: Connection) -> int:
    with _borrowed(connection.fd) as opened:
        if opened is None or _describe(connection.fd, opened) != connection:
            return 0
        facts = opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        return sum(struct.unpack_from("=QQ", facts, _TCP_INFO_ACKED)) if len(facts) == _TCP_INFO_BYTES else 0


def _shut_down(connection: Connection) -> bool:
    with _borrowed(connection.fd) as opened:
        if opened is None or _describe(connection.fd, opened) != connection:
            return False
        try:
            opened.shutdown(socket.SHUT_RDWR)
        except OSError:  # the peer was faster
            return False
        return True
