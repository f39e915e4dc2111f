"""What the ranks' pipes carry, put back in order: bytes become lines, marks become events.

`RankOutput` reads one rank's stdout and stderr. A `Screen` per rank plays the few terminal controls that programs use
for progress bars, so that a bar is one line that changes, and drops the rest, so that no rank moves another's cursor.
"""

from __future__ import annotations

import codecs
import os
import re
import time
from collections import deque
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import IO, NamedTuple

from nbdist.notebook.logs import RankLog

__all__ = ["Line", "RankOutput", "Screen"]

READ_BYTES = 1 << 18
_HOLD_S = 1.0  # how long one pipe waits at a mark for the other pipe, or for the message that belongs there
_MARK_END_BYTES = 21  # kind, semicolon and the longest number
_TAIL_CHARS = 1000
_MAX_ROWS = 40
_MAX_LINE = 20_000  # characters of one line that are shown

_CONTROL = re.compile(
    r"\x1b\][^\x07\x1b\n]*(?:\x07|\x1b\\)"  # OSC: titles, hyperlinks
    r"|\x1b\[[0-?]*[ -/]*[@-~]"  # CSI
    r"|\x1b[PX^_][^\x1b\n]*\x1b\\"  # DCS and their like
    r"|\x1b[ -/]*[0-~]"
    r"|[\x00-\x08\x0b-\x1f\x7f\n]"
)
_MAX_CONTROL = 1100  # characters
_UNFINISHED = re.compile(r"\x1b(?:[\]PX^_][^\x07\x1b\n]{0,1000}\x1b?|\[[0-?]{0,100}[ -/]{0,10}|[ -/]{0,10})\Z")
_CURSOR = re.compile(r"\x1b\[(\d{0,6})([ABK])")
_PLAIN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


class Line(NamedTuple):
    """A finished line of text of one rank, without its end."""

    stream: str
    text: str


def _line(stream: str, text: str) -> Line:
    if len(text) > _MAX_LINE:
        end = "\x1b[0m" if "\x1b" in text else ""
        text = f"{text[:_MAX_LINE]}{end} ... (a line of more than {_MAX_LINE:,} characters)"
    return Line(stream, text)


class Screen:
    """The last rows of one rank's terminal: finished rows leave it, rows that may still change stay."""

    def __init__(self) -> None:
        self._rows: list[tuple[str, str]] = [("stdout", "")]
        self._row = 0
        self._column: int | None = None  # where the next text goes; None: behind the row's last character
        self._landed = False  # a line end led to a row that exists: text there would hide it, unless a return follows
        self._colour = ""
        self._unfinished = ""  # the beginning of a control sequence

    def feed(self, stream: str, text: str) -> list[Line]:
        """Play text; the lines that have scrolled out of reach. Call `settle` when nothing follows at once."""
        text, self._unfinished = self._unfinished + text, ""
        if match := _UNFINISHED.search(text, max(0, len(text) - _MAX_CONTROL)):
            text, self._unfinished = text[: match.start()], match.group()
        if self._simple() and not _PLAIN.search(text.replace("\n", "")):
            return self._feed_plain(stream, text)
        position = 0
        for match in _CONTROL.finditer(text):
            self._put(stream, text[position : match.start()])
            self._control(stream, match.group())
            position = match.end()
        self._put(stream, text[position:])
        done: list[Line] = []
        while len(self._rows) > _MAX_ROWS:
            done.append(self._pop())
        return done

    def _simple(self) -> bool:
        return len(self._rows) == 1 and self._column is None and not self._colour and not self._landed

    def _feed_plain(self, stream: str, text: str) -> list[Line]:
        *ended, rest = text.split("\n")
        if not ended:
            self._put(stream, rest)
            return []
        first_stream, before = self._rows[0]
        lines = [_line(first_stream if before else stream, before + ended[0])]
        lines += [_line(stream, line) for line in ended[1:]]
        self._rows[0] = (stream, rest[: _MAX_LINE + 1])
        return lines

    def _put(self, stream: str, text: str) -> None:
        if not text:
            return
        if self._landed:
            self._landed = False
            self._row = len(self._rows)
            self._rows.append((stream, ""))
        owner, row = self._rows[self._row]
        if self._column is not None and ("\x1b" in row or self._colour):
            row = row[: self._column] if "\x1b" not in row else ""  # columns of a coloured row are not counted
            self._column = None
        if self._column is not None:
            start, end = self._column, self._column + len(text)
            self._column = end if end < len(row) else None
            row = row[:start] + text + row[end:]
        elif self._colour and "\x1b" not in row:
            row += self._colour + text
        else:
            row += text
        self._rows[self._row] = (stream if len(row) == len(text) or not owner else owner, row[: _MAX_LINE + 1])

    def _control(self, stream: str, code: str) -> None:
        if code == "\n":
            self._close_colour()
            self._row += 1
            self._column = None
            if self._row == len(self._rows):
                self._rows.append((stream, ""))
            else:
                self._landed = True
        elif code == "\r":
            self._close_colour()
            self._column, self._landed = 0, False
        elif code == "\x08":
            row = self._rows[self._row][1]
            if "\x1b" not in row:
                self._column = max(0, (len(row) if self._column is None else self._column) - 1)
        elif code.endswith("m") and code.startswith("\x1b["):
            owner, row = self._rows[self._row]
            if self._column is not None:
                row, self._column = "" if "\x1b" in row else row[: self._column], None
            if len(row) > _MAX_LINE:
                return
            self._rows[self._row] = (owner, row + code)
            self._colour = "" if code in ("\x1b[m", "\x1b[0m") else self._colour * (len(self._colour) < 200) + code
        elif match := _CURSOR.fullmatch(code):
            self._move(stream, int(match.group(1) or 1), match.group(2), match.group(1))

    def _move(self, stream: str, count: int, what: str, given: str) -> None:
        self._close_colour()
        self._landed = False
        if what == "A":
            if count > self._row:  # above lie lines that have been shown already
                self._finish_row(stream)
            else:
                self._row -= count
                self._column = 0
        elif what == "B":
            self._row = min(self._row + count, len(self._rows) - 1)
            self._column = 0
        elif what == "K" and given == "2":
            self._rows[self._row] = (self._rows[self._row][0], "")
            self._column = None
        elif what == "K" and given in ("", "0") and self._column is not None:
            owner, row = self._rows[self._row]
            self._rows[self._row] = (owner, "" if "\x1b" in row else row[: self._column])
            self._column = None

    def _finish_row(self, stream: str) -> None:
        if self._rows[self._row][1]:
            self._row += 1
            if self._row == len(self._rows):
                self._rows.append((stream, ""))

    def _close_colour(self) -> None:
        if self._colour:
            owner, row = self._rows[self._row]
            self._rows[self._row] = (owner, row + "\x1b[0m")
            self._colour = ""

    def _pop(self) -> Line:
        stream, row = self._rows.pop(0)
        self._row = max(0, self._row - 1)
        return _line(stream, row)

    def settle(self) -> list[Line]:
        """The rows above the cursor: nothing will change them any more."""
        done: list[Line] = []
        while self._row > 0:
            done.append(self._pop())
        return done

    def live(self) -> list[str]:
        """Rows that may still change, e.g. progress bars."""
        return [row.rstrip() + "\x1b[0m" * ("\x1b" in row) for _, row in self._rows if row.strip()]

    def end(self) -> list[Line]:
        """All that is left, at the end of a cell."""
        self._close_colour()
        while self._rows and not self._rows[-1][1]:
            self._rows.pop()
        done = [_line(stream, row) for stream, row in self._rows]
        self._clear()
        return done

    def rest(self) -> str:
        """All that is left as text to which more can be added."""
        self._close_colour()
        text = "\n".join(row for _, row in self._rows) + self._unfinished
        self._clear()
        return text

    def _clear(self) -> None:
        self._rows, self._row, self._column = [("stdout", "")], 0, None
        self._landed, self._unfinished = False, ""


@dataclass(slots=True)
class _Pipe:
    fd: int
    name: str
    decoder: codecs.IncrementalDecoder
    data: bytes = b""
    mark: int = 0  # number of the mark it stands at; what follows waits
    kind: str = ""  # of that mark
    open: bool = True


class RankOutput:
    """Reads one rank's two pipes and tells what was written, in order.

    Parameters
    ----------
    stdout, stderr
        Read ends; set non-blocking and closed here.
    token
        The cluster's secret, which makes a mark a mark.
    log
        Gets every byte of text, marks taken out.
    on_text
        Called with the stream's name and decoded text.
    on_mark
        Called with a mark's kind and number once both pipes have reached it; returns False if what belongs there has
        not arrived yet.
    """

    def __init__(
        self,
        stdout: int,
        stderr: int,
        token: str,
        log: IO[bytes] | RankLog,
        on_text: Callable[[str, str], None],
        on_mark: Callable[[str, int], bool],
    ) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")
        self._pipes = [_Pipe(fd, name, decoder("replace")) for fd, name in ((stdout, "stdout"), (stderr, "stderr"))]
        for fd in (stdout, stderr):
            os.set_blocking(fd, False)
        self._begin = f"\x1b]nbdist;{token};".encode()
        self._mark = re.compile(re.escape(self._begin) + rb"([a-z]);(\d{1,18})\x07")
        self._half_mark = re.compile(re.escape(self._begin) + rb"(?:[a-z](?:;\d{0,18})?)?")
        self._log = log
        self._on_text = on_text
        self._on_mark = on_mark
        self._since_s = 0.0
        self._tail: deque[str] = deque(maxlen=64)

    def fds(self) -> list[int]:
        """The descriptors to wait for: open ones that are not held at a mark."""
        return [p.fd for p in self._pipes if p.open and not p.mark]

    @property
    def ended(self) -> bool:
        """Both pipes are at their end."""
        return not any(p.open for p in self._pipes)

    def read(self, ready: Container[int] | None = None) -> int:
        """Read what has arrived on pipes that are not held; how many bytes.

        Parameters
        ----------
        ready
            The descriptors that can be read, where that is known.
        """
        total = 0
        for pipe in self._pipes:
            if not pipe.open or pipe.mark or (ready is not None and pipe.fd not in ready):
                continue
            try:
                data = os.read(pipe.fd, READ_BYTES)
            except BlockingIOError:
                continue
            except OSError:
                data = b""
            if not data:
                pipe.open = False
            total += len(data)
            pipe.data += data
        self.advance()
        return total

    def advance(self) -> None:
        """Go on past marks whose other half, or message, has arrived, or has been waited for long enough."""
        moved = True
        while moved:
            moved = False
            for pipe in self._pipes:
                moved |= self._consume(pipe)
            moved |= self._pass_mark()

    def _consume(self, pipe: _Pipe) -> bool:
        """Hand on the pipe's text up to its next mark; True if anything changed."""
        if pipe.mark or not pipe.data:
            if not pipe.open and not pipe.mark:
                self._text(pipe, b"", final=True)
            return False
        match = self._mark.search(pipe.data)
        if match is None:
            keep = self._may_begin(pipe.data) if pipe.open else 0
            self._text(pipe, pipe.data[: len(pipe.data) - keep], final=not pipe.open)
            pipe.data = pipe.data[len(pipe.data) - keep :]
            return False
        self._text(pipe, pipe.data[: match.start()])
        pipe.data = pipe.data[match.end() :]
        pipe.kind, pipe.mark = match[1].decode(), int(match[2])
        self._since_s = time.monotonic()
        return True

    def _may_begin(self, data: bytes) -> int:
        """How many bytes at the end could be the beginning of a mark."""
        at = data.rfind(b"\x1b", -len(self._begin) - _MARK_END_BYTES)
        rest = data[at:] if at >= 0 else b""
        return len(rest) if self._begin.startswith(rest) or self._half_mark.fullmatch(rest) else 0

    def _text(self, pipe: _Pipe, data: bytes, final: bool = False) -> None:
        if data:
            self._log.write(data)
        if text := pipe.decoder.decode(data, final):
            self._tail.append(text[-_TAIL_CHARS:])
            self._on_text(pipe.name, text)

    def _pass_mark(self) -> bool:
        standing = [p for p in self._pipes if p.mark]
        if not standing:
            return False
        waited = time.monotonic() - self._since_s > _HOLD_S
        if len(standing) == 1 and not waited and all(p.open for p in self._pipes):
            return False
        first = min(standing, key=lambda p: p.mark)
        if not self._on_mark(first.kind, first.mark) and not waited:
            return False
        number = first.mark
        for pipe in standing:
            if pipe.mark == number:
                pipe.mark = 0
        return True

    def held(self) -> bool:
        """Whether a pipe stands at a mark."""
        return any(p.mark for p in self._pipes)

    def forget_tail(self) -> None:
        """What is written from now on belongs to another cell."""
        self._tail.clear()

    def tail(self, lines: int = 12) -> list[str]:
        """The last lines that were written."""
        return [line[:_TAIL_CHARS] for line in "".join(self._tail).splitlines()[-lines:]]

    def close(self) -> None:
        """Read no more."""
        for pipe in self._pipes:
            pipe.open = False
            os.close(pipe.fd)
