"""A rank's stdout and stderr: plain pipes that the notebook reads, so that nothing a dying process wrote is lost.

Both pipes also carry *marks*, short escape sequences with a secret token and a running number, written into both at
once. The notebook strips them and uses them to keep order where two pipes and a socket cannot: between stdout and
stderr, between text and displays, and at the end of a cell. Programs started by a cell, C code and forked loader
workers write to the same pipes; only this process writes marks.
"""

from __future__ import annotations

import ctypes
import io
import os
import threading
import time
from collections.abc import Iterable
from typing import Any

__all__ = ["RankStream", "Streams"]

_libc = ctypes.CDLL(None)
_LINE_BUFFERED = 1
_STALE_S = 0.05


class _Raw(io.RawIOBase):
    """``sys.stdout.buffer``: bytes go out in order with the text."""

    def __init__(self, stream: RankStream) -> None:
        self._stream = stream

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._stream.write_bytes(bytes(view))
        return len(view)

    def flush(self) -> None:
        if not self._stream.closed:
            self._stream.flush()

    def fileno(self) -> int:
        return self._stream.fileno()


class RankStream(io.TextIOBase):
    """A text stream over one of the pipes; whole lines leave at once, each in one write.

    Text without an end of line is kept per thread, so that `print` from several threads gives whole lines; `flush`, a
    mark, or 50 ms let it go.
    """

    def __init__(self, streams: Streams, fd: int, name: str) -> None:
        self._streams = streams
        self._fd = fd
        self._partial: dict[int, tuple[str, float]] = {}
        self.name = name
        self.mode = "w"
        self.buffer = _Raw(self)

    encoding = "utf-8"
    errors = "backslashreplace"
    line_buffering = True

    def writable(self) -> bool:
        """Always."""
        return True

    def fileno(self) -> int:
        """1 or 2."""
        return self._fd

    def isatty(self) -> bool:
        """Never: nobody sits at a rank."""
        return False

    def reconfigure(self, **_: Any) -> None:
        """Accepted for code that expects a text wrapper; encoding and buffering stay."""

    def close(self) -> None:
        """Let the text go; the pipe stays open, as the rank needs it after a cell that closes its stdout."""
        self.flush()

    def write(self, text: str) -> int:
        """Write text; what ends in a line end leaves at once."""
        if type(text) is not str:
            if not isinstance(text, str):
                raise TypeError(f"write() argument must be str, not {type(text).__name__}")
            text = str(text)
        thread = threading.get_ident()
        end = text.rfind("\n") + 1
        with self._streams.lock:
            before, since = self._partial.pop(thread, ("", 0.0))
            if end:
                self._emit(before + text[:end])
                before, since = "", 0.0
            rest = before + text[end:]
            if rest:
                self._partial[thread] = (rest, since or time.monotonic())
        return len(text)

    def write_bytes(self, data: bytes) -> None:
        """Write bytes as they are, after the text this thread wrote before."""
        with self._streams.lock:
            before, _ = self._partial.pop(threading.get_ident(), ("", 0.0))
            if before:
                self._emit(before)
            self._streams.put(self, data)

    def flush(self) -> None:
        """Let this thread's unfinished line go."""
        with self._streams.lock:
            before, _ = self._partial.pop(threading.get_ident(), ("", 0.0))
            if before:
                self._emit(before)

    def flush_all(self, before_s: float | None = None) -> None:
        """Let go of unfinished lines of every thread, or only those begun before `before_s` (monotonic)."""
        with self._streams.lock:
            for thread, (text, since) in list(self._partial.items()):
                if before_s is None or since < before_s:
                    del self._partial[thread]
                    self._emit(text)

    def _emit(self, text: str) -> None:
        self._streams.put(self, text.encode("utf-8", "backslashreplace"))


class Streams:
    """Both streams of a rank and the marks that keep their order.

    Parameters
    ----------
    token
        Secret of the cluster; makes a mark unlike anything a program would print.
    """

    def __init__(self, token: str) -> None:
        self.lock = threading.RLock()
        self._token = token.encode()
        self._pid = os.getpid()
        self._mark = 0
        self._last: RankStream | None = None
        self._pipes = (os.dup(1), os.dup(2))  # kept where a cell that closes or redirects 1 and 2 does not reach
        self.stdout = RankStream(self, 1, "<stdout>")
        self.stderr = RankStream(self, 2, "<stderr>")
        os.register_at_fork(after_in_child=self._after_fork)
        for name in ("stdout", "stderr"):
            _libc.setvbuf(ctypes.c_void_p.in_dll(_libc, name), None, _LINE_BUFFERED, ctypes.c_size_t(0))

    def _after_fork(self) -> None:
        self.lock = threading.RLock()
        self._last = None
        for stream in (self.stdout, self.stderr):
            stream._partial.clear()  # the parent writes it

    def put(self, stream: RankStream, data: bytes) -> None:
        """Write all of `data` to the stream's pipe; the caller holds the lock."""
        if self._last is not stream:
            if self._last is not None:
                self._write_mark("s")
            if os.getpid() == self._pid:
                self._last = stream
        self._write(stream.fileno(), data)

    def _write(self, fd: int, data: bytes) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(fd, view) :]
            except BlockingIOError:  # a cell, or a program it ran, made the pipe non-blocking
                os.set_blocking(fd, True)
            except OSError:
                spare = self._pipes[0 if fd == 1 else 1]
                if fd == spare:
                    return  # the notebook is gone
                fd = spare

    def _write_mark(self, kind: str) -> int:
        self._mark += 1
        data = b"\x1b]nbdist;%s;%s;%d\x07" % (self._token, kind.encode(), self._mark)
        for fd in self._pipes:
            self._write(fd, data)
        return self._mark

    def mark(self, kind: str) -> int:
        """Let everything written so far go and put a mark behind it.

        Parameters
        ----------
        kind
            ``d`` where a display belongs, ``e`` at the end of a cell.

        Returns
        -------
        int
            The mark's number, to be named in the message that belongs here.
        """
        with self.lock:
            self.stdout.flush_all()
            self.stderr.flush_all()
            _libc.fflush(None)
            self._last = None
            return self._write_mark(kind)

    def flush_stale(self) -> bool:
        """Let go of unfinished lines older than 50 ms; True if some are still held (the I/O thread asks)."""
        before = time.monotonic() - _STALE_S
        for stream in (self.stdout, self.stderr):
            if stream._partial:
                stream.flush_all(before)
        return bool(self.stdout._partial or self.stderr._partial)

    def restore(self, installed: Iterable[str] = ("stdout", "stderr")) -> None:
        """Put the rank's streams and descriptors back where a cell has replaced them."""
        import sys

        for name in installed:
            setattr(sys, name, getattr(self, name))
            setattr(sys, f"__{name}__", getattr(self, name))
        for fd, pipe in zip((1, 2), self._pipes, strict=True):
            try:
                same = os.path.sameopenfile(fd, pipe)
            except OSError:
                same = False
            if not same:
                os.dup2(pipe, fd)
