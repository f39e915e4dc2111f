"""What a cell prints: the merged voice of its ranks, and one report of what went wrong.

Only the kernel's main thread prints a foreground cell. A background run has a display of its own, which any thread may
update, so that nothing lands under the cell that happens to run.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from IPython.core.getipython import get_ipython
from IPython.display import publish_display_data as _publish_untyped

from nbdist.errors import RankFailure, name_ranks
from nbdist.notebook.merge import Shown, Text

__all__ = ["BackgroundPrinter", "Printer", "failure_report", "interrupt_report"]

_publish_in_ipython: Callable[..., None] = _publish_untyped

_LIVE_EVERY_S = 0.25
_LIVE_AFTER_S = 0.4  # an unfinished line is shown by itself only if it stays unfinished for so long
_MESSAGES_PER_S = 40
_RULE = "-" * 75
_RED, _BOLD, _END = "\x1b[31m", "\x1b[1m", "\x1b[0m"
_BACKGROUND_LINES = 200


def _has_displays() -> bool:
    """Whether there is a front end that shows displays and updates them in place."""
    shell = get_ipython()
    return shell is not None and hasattr(shell, "kernel")


def _publish(data: dict[str, Any], metadata: dict[str, Any], **where: Any) -> None:
    if get_ipython() is not None:
        _publish_in_ipython(data, metadata, **where)
    elif (text := data.get("text/plain")) and not where.get("update"):
        sys.stdout.write(f"{text}\n")  # a plain Python process: IPython's function would make a shell in it


def _only_text(data: dict[str, Any]) -> str | None:
    return data["text/plain"] if set(data) == {"text/plain"} else None


def _labelled(label: str, text: str) -> str:
    return "".join(f"{label} {line}\n" for line in text.split("\n"))


class Printer:
    """Prints a foreground cell.

    Parameters
    ----------
    run_id
        Makes display ids of this cell.
    """

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._live_id: str | None = None
        self._live_text = ""
        self._live_s = 0.0
        self._rows_since_s = time.monotonic()
        self._stream = "stdout"
        self._unflushed = False
        self._last_display: dict[tuple[int, ...], str] = {}
        self._count = 0
        self._sent: deque[float] = deque()

    def may_print(self) -> bool:
        """False while the front end has had its share of messages of this second."""
        now = time.monotonic()
        while self._sent and now - self._sent[0] > 1.0:
            self._sent.popleft()
        return len(self._sent) < _MESSAGES_PER_S

    def show(self, items: Iterable[Text | Shown]) -> None:
        """Print texts and displays in order."""
        for item in items:
            if isinstance(item, Text):
                self.print(item.text, item.stream)
            else:
                self._display(item)
        self.flush()

    def print(self, text: str, stream: str = "stdout") -> None:
        """Print to the cell's stdout or stderr."""
        if stream != self._stream:
            self.flush()  # ipykernel keeps a buffer for each stream: order is kept by emptying the other first
            self._stream = stream
        getattr(sys, stream).write(text)
        self._unflushed = True
        self._sent.append(time.monotonic())

    def flush(self) -> None:
        """Let the text go to the front end; nothing to do (and no wait for ipykernel's thread) if there is none."""
        if self._unflushed:
            self._unflushed = False
            getattr(sys, self._stream).flush()

    def _display(self, shown: Shown) -> None:
        plain = _only_text(shown.data)
        if plain is not None and not shown.update and shown.display_id is None and not shown.replace:
            self.print(_labelled(shown.label, plain))
            return
        self.flush()
        key = f"{self._run_id}-{shown.ranks[0]}-{shown.display_id}" if shown.display_id else None
        if shown.update:
            _publish(shown.data, shown.metadata, transient={"display_id": key}, update=True)
            self._sent.append(time.monotonic())
            return
        if shown.replace and shown.ranks in self._last_display and _has_displays():
            key = self._last_display[shown.ranks]
            _publish(shown.data, shown.metadata, transient={"display_id": key}, update=True)
            self._sent.append(time.monotonic())
            return
        self._count += 1
        key = key or f"{self._run_id}-{self._count}"
        self._last_display[shown.ranks] = key
        self.print(f"{shown.label}\n")
        self.flush()
        _publish(shown.data, shown.metadata, transient={"display_id": key})
        self._sent.append(time.monotonic())

    def live(self, rows: Sequence[str], final: bool = False) -> None:
        """Show rows that change in place: progress bars, one line each."""
        now = time.monotonic()
        text = "" if final else "\n".join(rows)
        if not text:
            self._rows_since_s = now
        if text == self._live_text or not _has_displays() or (not final and now - self._live_s < _LIVE_EVERY_S):
            return
        first = self._live_id is None
        if first and now - self._rows_since_s < _LIVE_AFTER_S:
            return
        self._live_text, self._live_s = text, now
        self.flush()
        if first:
            self._live_id = f"{self._run_id}-live"
        _publish({"text/plain": text}, {}, transient={"display_id": self._live_id}, update=not first)
        self._sent.append(time.monotonic())


class BackgroundPrinter:
    """The display of a background run: its last lines, updated in place."""

    def __init__(self, run_id: str) -> None:
        self._id = f"{run_id}-background"
        self._lines: deque[str] = deque(maxlen=_BACKGROUND_LINES)
        self._dropped = 0
        self._rows: list[str] = []
        self._open = False
        self._shown = ""
        self._count = 0
        self._at_s = 0.0

    def open(self) -> None:
        """Make the display under the present cell (main thread)."""
        self._open = True
        _publish({"text/plain": ""}, {}, transient={"display_id": self._id})

    def show(self, items: Iterable[Text | Shown]) -> None:
        """Add texts; a display's text stands for it."""
        for item in items:
            text = item.text if isinstance(item, Text) else _labelled(item.label, str(item.data.get("text/plain", "")))
            for line in text.splitlines():
                self._dropped += len(self._lines) == self._lines.maxlen
                self._lines.append(line)

    def show_lines(self, lines: Iterable[str]) -> None:
        """Add lines of nbdist's own."""
        self._lines.extend(line for text in lines for line in text.split("\n"))

    def live(self, rows: Sequence[str], final: bool = False) -> None:
        """Rows that change in place."""
        self._rows = [] if final else list(rows)
        self._update(final)

    def _update(self, final: bool) -> None:
        now = time.monotonic()
        if not self._open or (not final and now - self._at_s < _LIVE_EVERY_S):
            return
        head = [f"... {self._dropped:,} lines omitted"] if self._dropped else []
        text = "\n".join([*head, *self._lines, *self._rows])
        if text != self._shown:
            self._shown, self._at_s = text, now
            _publish({"text/plain": text}, {}, transient={"display_id": self._id}, update=True)


def _who(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {name_ranks(ranks)}"


def _groups(failures: Sequence[RankFailure]) -> list[list[RankFailure]]:
    """Equal failures together, in the order of the first of each."""
    groups: dict[tuple[object, ...], list[RankFailure]] = {}
    for failure in failures:
        where = tuple(line for line in failure.traceback if "-->" in line or "line" in line)
        key = (failure.secondary, failure.ename, failure.evalue if not where else "", *where)
        groups.setdefault(key, []).append(failure)
    return list(groups.values())


def _headline(group: Sequence[RankFailure]) -> str:
    first = group[0]
    who = _who([f.rank for f in group])
    text = f"{first.ename}: {first.evalue}" if first.ename and first.evalue else first.ename or first.evalue
    return f"{who} {text}" if not first.ename else f"{who}: {text}"


def failure_report(failures: Sequence[RankFailure], hints: Sequence[str] = (), colour: bool = True) -> list[str]:
    """The one report of a cell: the cause with its traceback, then what else failed, then hints.

    Parameters
    ----------
    failures
        In the order in which they happened, causes before consequences.
    hints
        One line each.
    """
    red, bold, end = (_RED, _BOLD, _END) if colour else ("", "", "")
    groups = _groups(failures)
    cause, *others = groups
    lines = [f"{red}{_RULE}{end}", f"{red}{bold}{_headline(cause).splitlines()[0]}{end}"]
    lines += _body(cause)
    shown = 1
    for group in others:
        if not group[0].secondary and shown < 3:
            shown += 1
            lines += ["", f"{red}{bold}{_headline(group).splitlines()[0]}{end}", *_body(group)]
    also = [g for g in others[shown - 1 :] if not g[0].secondary]
    after = [g for g in others if g[0].secondary]
    for group in also:
        lines.append(f"also failed: {_headline(group).splitlines()[0]}")
    if after:
        ranks = sorted(f.rank for g in after for f in g)
        lines.append(f"stopped because {_who([f.rank for f in cause])} failed: {_who(ranks)}")
    lines += [f"{bold}hint:{end} {hint}" for hint in dict.fromkeys(hints)]
    return lines


def _body(group: Sequence[RankFailure]) -> list[str]:
    lines = list(group[0].traceback)
    texts = {f.evalue: f.rank for f in group}
    if len(texts) > 1:
        said_by_all = set.intersection(*(set(text.splitlines()) for text in texts))
        for text, rank in texts.items():
            own = next((line for line in text.splitlines() if line not in said_by_all), "")
            lines.append(f"  rank {rank}: {own}")
    return lines


def interrupt_report(text: str) -> list[str]:
    """What the notebook shows for an interrupted cell."""
    return [f"{_RED}KeyboardInterrupt{_END}: {text}"]
