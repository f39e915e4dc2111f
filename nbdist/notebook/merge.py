"""One voice from many ranks: lines that all print alike become one, floods keep head and tail.

Knows nothing of IPython: it takes what ranks say and gives, in order, what a cell should show.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

from nbdist.errors import name_ranks
from nbdist.notebook.output import Line, Screen

__all__ = ["Shown", "Text", "Voice", "label"]

WINDOW_S = 0.15  # how long a line waits for its like from the other ranks
_DISPLAY_WINDOW_S = 0.5
_BURST_LINES = 1500  # shown before a cell's output counts as a flood
_BURST_CHARS = 200_000
_LINES_PER_S = 10.0  # what a long run may go on showing
_TAIL_LINES = 10  # shown of each rank behind what was omitted
_ALL_TAILS_LINES = 160  # of all ranks together
_TAIL_CHARS = 8_000
_QUEUE_ITEMS = 4 * _BURST_LINES  # of one rank; a longer queue does not wait for the other ranks
_TURN_LINES = 50  # of one rank in a row, while others have something to say
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

    def key(self) -> Hashable:
        """Equal for what ranks display alike."""
        data = tuple(sorted((kind, str(value)) for kind, value in self.data.items()))
        return (data, str(self.metadata), self.display_id, self.update, self.result, self.replace)


def label(ranks: Iterable[int], world: Sequence[int]) -> str:
    """``[all]``, or ``[0,2-3]``: who says it."""
    said = sorted(set(ranks))
    if len(world) > 1 and said == sorted(world):
        return "[all]"
    return f"[{name_ranks(said)}]"


class _Item(NamedTuple):
    content: Line | Shown
    key: Hashable  # equal for equal contents
    at_s: float


@dataclass(slots=True)
class _Speaker:
    rank: int
    place: int
    screen: Screen = field(default_factory=Screen)
    queue: deque[_Item] = field(default_factory=deque)
    waiting: Counter[Hashable] = field(default_factory=Counter)  # keys in the queue
    ended: bool = False
    omitted: int = 0
    tail: str = ""
    fed_s: float = 0.0
    replace: bool = False

    def add(self, content: Line | Shown, now: float) -> None:
        key = content if isinstance(content, Line) else content.key()
        self.queue.append(_Item(content, key, now))
        self.waiting[key] += 1

    def take(self) -> Line | Shown:
        item = self.queue.popleft()
        self.waiting[item.key] -= 1
        if not self.waiting[item.key]:
            del self.waiting[item.key]
        return item.content


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
        self._speakers = {rank: _Speaker(rank, place) for place, rank in enumerate(ranks)}
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
        self._queue(speaker, speaker.screen.feed(stream, text), now)
        if len(speaker.queue) > _QUEUE_ITEMS:
            self._merge(now, flush=True)

    def show(self, rank: int, shown: Shown) -> None:
        """A display of one rank, behind what it has said so far."""
        speaker = self._speakers[rank]
        now = self._now()
        self._queue(speaker, speaker.screen.end(), now)
        if self._flooded_s is not None and speaker.tail and speaker.tail[-1] != "\n":
            self._omit(speaker, "\n", now)
        if speaker.replace:
            speaker.replace = False
            shown = Shown(shown.data, shown.metadata, shown.display_id, shown.update, shown.result, replace=True)
        speaker.add(shown, now)

    def clear(self, rank: int) -> None:
        """The rank asked to clear its output: its next display takes the place of its last."""
        self._speakers[rank].replace = True

    def end(self, rank: int) -> None:
        """The rank says nothing more in this run."""
        speaker = self._speakers[rank]
        self._queue(speaker, speaker.screen.end(), self._now())
        speaker.ended = True

    def _queue(self, speaker: _Speaker, lines: Sequence[Line], now: float) -> None:
        if self._flooded_s is not None:
            self._omit(speaker, "".join(f"{line.text}\n" for line in lines), now)
        else:
            for line in lines:
                speaker.add(line, now)

    def _begin_flood(self, now: float) -> None:
        """From now on text is only counted, and its end kept; what already waits comes first, so that order is kept."""
        self._flooded_s = now
        for speaker in self._speakers.values():
            contents = [speaker.take() for _ in range(len(speaker.queue))]
            for content in contents:
                if isinstance(content, Line):
                    self._omit(speaker, f"{content.text}\n", now)
                else:
                    speaker.add(content, now)
            self._omit(speaker, speaker.screen.rest(), now)

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
            self._end_flood(flush)
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
            for speaker in [s for s in self._speakers.values() if "\n" in s.tail][:_TAIL_LINES]:
                last = Screen()
                last.feed("stdout", speaker.tail.rpartition("\n")[0].rpartition("\n")[2][-200:])
                rows += [f"{label([speaker.rank], self._world)} {row}" for row in last.live()]
            rows.append(f"... {omitted:,} lines omitted so far")
        return rows

    @property
    def waiting(self) -> bool:
        """Whether there is anything that `take` will give later."""
        return self._flooded_s is not None or any(s.queue or s.screen.live() for s in self._speakers.values())

    def _refill(self, now: float) -> None:
        passed, self._refilled_s = now - self._refilled_s, now
        self._lines_left = min(_BURST_LINES, self._lines_left + passed * _LINES_PER_S)
        self._chars_left = min(_BURST_CHARS, self._chars_left + passed * _LINES_PER_S * 120)

    def _merge(self, now: float, flush: bool) -> None:
        turn = spoken = 0  # who speaks, by place, and how many lines in a row
        while heads := [s for s in self._speakers.values() if s.queue]:
            at_s = min(s.queue[0].at_s for s in heads)
            near = [s for s in heads if s.queue[0].at_s - at_s < WINDOW_S]
            near.sort(key=lambda s: (s.place - turn) % len(self._world))
            speaker = next((s for s in near if not _comes_later(s.queue[0].key, heads)), near[0])
            content, key, _ = speaker.queue[0]
            alike = [s for s in heads if s.queue[0].key == key]
            others = any(not s.ended for s in self._speakers.values() if s not in alike)
            window = WINDOW_S if isinstance(content, Line) else _DISPLAY_WINDOW_S
            if others and not flush and now - at_s < window:
                return
            for one in alike:
                one.take()
            self._emit([s.rank for s in alike], content, now)
            if len(alike) > 1:
                turn = spoken = 0
            elif speaker.place != turn:
                turn, spoken = speaker.place, 1
            else:
                spoken += 1
            if spoken >= _TURN_LINES:
                turn, spoken = (turn + 1) % len(self._world), 0

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
        if self._lines_left < 1 or self._chars_left < 0:
            for rank in ranks:
                self._omit(self._speakers[rank], content.text + "\n", now)
            self._begin_flood(now)
            return
        self._lines_left -= 1
        self._chars_left -= len(content.text)
        self._ready.append(Text(content.stream, f"{who} {content.text}\n"))

    def _end_flood(self, flush: bool) -> None:
        self._flooded_s = None
        total = 0
        flooded = [s for s in self._speakers.values() if s.tail]
        most = max(1, min(_TAIL_LINES, _ALL_TAILS_LINES // max(1, len(flooded))))
        ends = []
        for speaker in flooded:
            whole, _, rest = speaker.tail.rpartition("\n")
            omitted = speaker.omitted
            if rest and (flush or speaker.ended):
                whole, rest, omitted = speaker.tail, "", omitted + 1
            screen = Screen()
            lines = [*screen.feed("stdout", f"{whole}\n"), *screen.end()] if omitted else []
            ends.append((label([speaker.rank], self._world), [line.text for line in lines[-most:]]))
            total += max(0, omitted - len(ends[-1][1]))
            speaker.omitted, speaker.tail = 0, ""
            speaker.screen.feed("stdout", rest)
        if total:
            self._ready.append(Text("stdout", f"... {total:,} line{'s' * (total > 1)} omitted ({self._whole()})\n"))
        self._ready += [Text("stdout", "".join(f"{who} {line}\n" for line in lines)) for who, lines in ends if lines]


def _comes_later(key: Hashable, speakers: Sequence[_Speaker]) -> bool:
    """Whether a rank has the same further back: what stands before it there goes first, so that the two can meet."""
    return any(key in s.waiting and s.queue[0].key != key for s in speakers)


def _join(items: Iterable[Text | Shown]) -> list[Text | Shown]:
    """Neighbouring texts of one stream become one."""
    joined: list[Text | Shown] = []
    for stream, group in groupby(items, key=lambda i: i.stream if isinstance(i, Text) else None):
        if stream is None:
            joined += group
        else:
            joined.append(Text(stream, "".join(i.text for i in group if isinstance(i, Text))))
    return joined
