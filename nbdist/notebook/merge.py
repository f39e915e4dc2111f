"""One voice from many ranks: lines that all print alike become one, floods keep head and tail.

Knows nothing of IPython: it takes what ranks say and gives, in order, what a cell should show.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from nbdist.errors import name_ranks
from nbdist.notebook.output import Line, Screen

__all__ = ["Shown", "Text", "Voice", "label"]

WINDOW_S = 0.08  # how long a line waits for its like from the other ranks
_DISPLAY_WINDOW_S = 0.5
_BURST_LINES = 1500  # shown before a cell's output counts as a flood
_BURST_CHARS = 200_000
_LINES_PER_S = 10.0  # what a long run may go on showing
_TAIL_LINES = 10  # shown of each rank behind what was omitted
_TAIL_CHARS = 8_000
_CALM_S = 1.0  # a flood is over when nothing was omitted for so long


class Text(NamedTuple):
    """Lines to print, labelled already, each with its end."""

    stream: str
    text: str


@dataclass(frozen=True, slots=True)
class Shown:
    """A display of one rank, or of several that displayed the same."""

    data: dict[str, Any]
    metadata: dict[str, Any]
    display_id: str | None = None
    update: bool = False
    result: bool = False
    ranks: tuple[int, ...] = ()
    label: str = ""
    replace: bool = False  # takes the place of what the rank displayed last (after clear_output)


def label(ranks: Iterable[int], world: Sequence[int]) -> str:
    """``[all]``, or ``[0,2-3]``: who says it."""
    said = sorted(set(ranks))
    if len(world) > 1 and said == sorted(world):
        return "[all]"
    return f"[{name_ranks(said)}]"


class _Item(NamedTuple):
    content: Line | Shown
    at_s: float


@dataclass(slots=True)
class _Speaker:
    rank: int
    screen: Screen = field(default_factory=Screen)
    queue: deque[_Item] = field(default_factory=deque)
    ended: bool = False
    omitted: int = 0
    tail: str = ""
    fed_s: float = 0.0
    replace: bool = False


class Voice:
    """What a run's ranks say, merged and bounded.

    Parameters
    ----------
    ranks
        The ranks that run the cell.
    whole
        Called when a flood is shown in part: says where the whole text is.
    now
        Clock, in seconds.
    """

    def __init__(
        self, ranks: Sequence[int], whole: Callable[[], str], now: Callable[[], float] = time.monotonic
    ) -> None:
        self._world = tuple(ranks)
        self._speakers = {rank: _Speaker(rank) for rank in ranks}
        self._whole = whole
        self._now = now
        self._lines_left = float(_BURST_LINES)
        self._chars_left = float(_BURST_CHARS)
        self._refilled_s = now()
        self._flooded_s: float | None = None  # when something was omitted last
        self._ready: deque[Text | Shown] = deque()

    # ---- from the ranks

    def say(self, rank: int, stream: str, text: str) -> None:
        """Text of one rank's stream."""
        speaker = self._speakers[rank]
        now = self._now()
        speaker.fed_s = now
        if self._flooded_s is not None:
            self._omit(speaker, text, now)
            return
        if len(text) > 4 * _TAIL_CHARS and text.count("\n") > self._lines_left:
            self._flooded_s = now
            self._queue(speaker, speaker.screen.end(), now)
            self._omit(speaker, text, now)
            return
        self._queue(speaker, speaker.screen.feed(stream, text), now)

    def show(self, rank: int, shown: Shown) -> None:
        """A display of one rank, behind what it has said so far."""
        speaker = self._speakers[rank]
        now = self._now()
        self._queue(speaker, speaker.screen.end(), now)
        if speaker.replace:
            speaker.replace = False
            shown = Shown(shown.data, shown.metadata, shown.display_id, shown.update, shown.result, replace=True)
        speaker.queue.append(_Item(shown, now))

    def clear(self, rank: int) -> None:
        """The rank asked to clear its output: its next display takes the place of its last."""
        self._speakers[rank].replace = True

    def end(self, rank: int) -> None:
        """The rank says nothing more in this run."""
        speaker = self._speakers[rank]
        self._queue(speaker, speaker.screen.end(), self._now())
        speaker.ended = True

    def _queue(self, speaker: _Speaker, lines: Sequence[Line], now: float) -> None:
        speaker.queue.extend(_Item(line, now) for line in lines)

    def _omit(self, speaker: _Speaker, text: str, now: float) -> None:
        if text:
            self._flooded_s = now
        speaker.omitted += text.count("\n")
        speaker.tail = (speaker.tail + text)[-_TAIL_CHARS:]

    # ---- to the cell

    def take(self, flush: bool = False) -> list[Text | Shown]:
        """What should be shown now.

        Parameters
        ----------
        flush
            Do not wait for likes any more; the run has ended.
        """
        now = self._now()
        self._refill(now)
        for speaker in self._speakers.values():
            if flush or now - speaker.fed_s > 0.02:
                self._queue(speaker, speaker.screen.settle(), now)
        self._merge(now, flush)
        if self._flooded_s is not None and (flush or now - self._flooded_s > _CALM_S):
            self._end_flood()
        ready, self._ready = list(self._ready), deque()
        return _join(ready)

    def live(self) -> list[str]:
        """Rows that still change: progress bars, and how much of a flood was left out so far."""
        rows = []
        for speaker in self._speakers.values():
            if speaker.ended:
                continue
            rows += [f"{label([speaker.rank], self._world)} {row}" for row in speaker.screen.live()]
        if omitted := sum(s.omitted for s in self._speakers.values()):
            rows.append(f"... {omitted:,} lines omitted so far")
        return rows

    @property
    def waiting(self) -> bool:
        """Is there anything that `take` will give later?"""
        return self._flooded_s is not None or any(s.queue or s.screen.live() for s in self._speakers.values())

    def _refill(self, now: float) -> None:
        passed, self._refilled_s = now - self._refilled_s, now
        self._lines_left = min(_BURST_LINES, self._lines_left + passed * _LINES_PER_S)
        self._chars_left = min(_BURST_CHARS, self._chars_left + passed * _LINES_PER_S * 120)

    def _merge(self, now: float, flush: bool) -> None:
        while True:
            heads = [(s.queue[0].at_s, s) for s in self._speakers.values() if s.queue]
            if not heads:
                return
            at_s = min(at for at, _ in heads)
            # Of what came at about the same time, the lowest rank speaks first.
            speaker = min((s for at, s in heads if at - at_s < WINDOW_S), key=lambda s: s.rank)
            content = speaker.queue[0].content
            alike = [s for _, s in heads if s.queue[0].content == content]
            silent = [s for s in self._speakers.values() if not s.queue and not s.ended]
            window = WINDOW_S if isinstance(content, Line) else _DISPLAY_WINDOW_S
            if silent and not flush and now - at_s < window:
                return
            for one in alike:
                one.queue.popleft()
            self._emit([s.rank for s in alike], content, now)

    def _emit(self, ranks: list[int], content: Line | Shown, now: float) -> None:
        who = label(ranks, self._world)
        if isinstance(content, Shown):
            self._ready.append(
                Shown(
                    content.data,
                    content.metadata,
                    content.display_id,
                    content.update,
                    content.result,
                    tuple(ranks),
                    who,
                    content.replace,
                )
            )
            return
        if self._flooded_s is not None or self._lines_left < 1 or self._chars_left < 0:
            for rank in ranks:
                self._omit(self._speakers[rank], content.text + "\n", now)
            return
        self._lines_left -= 1
        self._chars_left -= len(content.text)
        self._ready.append(Text(content.stream, f"{who} {content.text}\n"))

    def _end_flood(self) -> None:
        self._flooded_s = None
        total = sum(s.omitted for s in self._speakers.values())
        ends = []
        for speaker in self._speakers.values():
            screen = Screen()
            lines = [*screen.feed("stdout", speaker.tail), *screen.end()]
            shown = [line.text for line in lines[-_TAIL_LINES:]]
            if speaker.omitted:
                ends.append((speaker.rank, shown))
                total -= len(shown)
            speaker.omitted, speaker.tail = 0, ""
        if total > 0:
            self._ready.append(Text("stdout", f"... {total:,} lines omitted ({self._whole()})\n"))
        for rank, shown in ends:
            who = label([rank], self._world)
            self._ready.append(Text("stdout", "".join(f"{who} {line}\n" for line in shown)))


def _join(items: list[Text | Shown]) -> list[Text | Shown]:
    """Neighbouring texts of one stream become one."""
    joined: list[Text | Shown] = []
    parts: list[str] = []
    for item in items:
        if isinstance(item, Text):
            last = joined[-1] if joined else None
            if parts and isinstance(last, Text) and last.stream == item.stream:
                parts.append(item.text)
                continue
            if parts and isinstance(last, Text):
                joined[-1] = Text(last.stream, "".join(parts))
            parts = [item.text]
            joined.append(item)
        else:
            if parts and joined and isinstance(joined[-1], Text):
                joined[-1] = Text(joined[-1].stream, "".join(parts))
            parts = []
            joined.append(item)
    if parts and joined and isinstance(joined[-1], Text):
        joined[-1] = Text(joined[-1].stream, "".join(parts))
    return joined
