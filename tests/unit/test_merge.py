"""One voice from many ranks: equal lines become one, order within a rank is kept, floods keep head, tail and count."""

from __future__ import annotations

import re
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbdist.errors import name_ranks
from nbdist.notebook import merge
from nbdist.notebook.merge import Shown, Text, Voice, label

LABEL = re.compile(r"\[(all|[\d,-]+)\] ")


class Stage:
    """A voice with a clock of its own, and what it has shown."""

    def __init__(self, num_ranks: int, first: int = 0) -> None:
        self.ranks = list(range(first, first + num_ranks))
        self.now = 1000.0
        self.voice = Voice(self.ranks, lambda: "the whole text: there", now=lambda: self.now)
        self.shown: list[Text | Shown] = []

    def say(self, rank: int, text: str, stream: str = "stdout") -> None:
        self.voice.say(rank, stream, text)

    def take(self, after_s: float = 0.0, flush: bool = False) -> list[Text | Shown]:
        self.now += after_s
        taken = self.voice.take(flush)
        self.shown += taken
        return taken

    def end(self) -> str:
        for rank in self.ranks:
            self.voice.end(rank)
        self.take(flush=True)
        return self.text

    @property
    def text(self) -> str:
        return "".join(item.text for item in self.shown if isinstance(item, Text))

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    def of(self, rank: int) -> list[str]:
        """What this rank has said, by the labels."""
        mine = []
        for line in self.lines:
            match = LABEL.match(line)
            assert match, line
            if rank in members(match[1], self.ranks):
                mine.append(line[match.end() :])
        return mine


def members(text: str, world: list[int]) -> set[int]:
    if text == "all":
        return set(world)
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def figure(name: str = "a", **fields: Any) -> Shown:
    return Shown({"image/png": name}, {}, **fields)


# ---- labels


@pytest.mark.parametrize(
    ("ranks", "world", "expected"),
    [
        ([0], [0], "[0]"),
        ([0, 1], [0, 1], "[all]"),
        ([1], [0, 1], "[1]"),
        ([3, 0, 2], [0, 1, 2, 3], "[0,2-3]"),
        ([2, 3], [2, 3], "[all]"),
        ([0, 1, 2, 4, 6, 7], range(8), "[0-2,4,6-7]"),
        ([5], [5], "[5]"),
    ],
)
def test_labels(ranks, world, expected):
    assert label(ranks, world) == expected


@given(ranks=st.sets(st.integers(0, 200), min_size=1))
def test_ranks_named_in_short_can_be_read_back(ranks):
    text = name_ranks(ranks)
    assert members(text, []) == ranks
    assert re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", text)


# ---- merging


def test_equal_lines_become_one():
    stage = Stage(4)
    for rank in range(4):
        stage.say(rank, f"same\nrank {rank % 2}\n\n")
    stage.end()
    assert stage.lines == ["[all] same", "[0,2] rank 0", "[1,3] rank 1", "[all] "]


def test_a_line_waits_a_moment_for_its_like():
    stage = Stage(3)
    stage.say(0, "same\n")
    assert stage.take(after_s=0.01) == []
    stage.say(2, "same\n")
    assert stage.take(after_s=0.01) == []
    stage.say(1, "same\n")
    stage.take()
    assert stage.lines == ["[all] same"]


def test_a_line_does_not_wait_for_ever():
    stage = Stage(2)
    stage.say(0, "first\n")
    stage.take(after_s=2 * merge.WINDOW_S)
    assert stage.lines == ["[0] first"]
    stage.say(1, "first\n")
    stage.take(after_s=2 * merge.WINDOW_S)
    assert stage.lines == ["[0] first", "[1] first"]


def test_ranks_that_have_ended_are_not_waited_for():
    stage = Stage(3)
    stage.voice.end(1)
    for rank in (0, 2):
        stage.say(rank, "same\n")
    stage.take()
    assert stage.lines == ["[0,2] same"]


def test_one_rank_alone_is_shown_at_once():
    stage = Stage(1, first=3)
    stage.say(3, "alone\n")
    stage.take()
    assert stage.lines == ["[3] alone"]


def test_what_all_say_alike_is_found_behind_what_they_say_differently():
    stage = Stage(3)
    for epoch in range(3):
        for rank in range(3):
            stage.say(rank, f"loss {rank}{epoch}\n" * (rank + 1) + "epoch done\n")
            stage.voice.show(rank, figure(str(epoch)))
            stage.take(after_s=0.01)
    stage.take(after_s=1)
    stage.end()
    assert stage.text.count("[all] epoch done\n") == 3
    assert [i.label for i in stage.shown if isinstance(i, Shown)] == ["[all]"] * 3
    assert stage.of(1) == [f"loss 1{e}" if k < 2 else "epoch done" for e in range(3) for k in range(3)]
    ranks = [line[:3] for line in stage.lines]
    assert ranks == ["[0]", "[1]", "[1]", "[2]", "[2]", "[2]", "[al"] * 3


def test_lines_that_cross_come_out_too():
    stage = Stage(2)
    stage.say(0, "a\nb\na\n")
    stage.say(1, "b\na\nb\n")
    stage.end()
    assert (stage.of(0), stage.of(1)) == (["a", "b", "a"], ["b", "a", "b"])
    assert "[all] " in stage.text


def test_streams_are_kept_apart():
    stage = Stage(2)
    stage.say(0, "same\n")
    stage.say(1, "same\n", "stderr")
    stage.end()
    assert [item.stream for item in stage.shown] == ["stdout", "stderr"]
    assert stage.lines == ["[0] same", "[1] same"]


def test_neighbouring_lines_are_one_text():
    stage = Stage(2)
    for rank in range(2):
        for number in range(100):
            stage.say(rank, f"line {number}\n")
        stage.say(rank, "warning\n", "stderr")
        stage.say(rank, "more\n")
    stage.take()
    assert [(i.stream, i.text.count("\n")) for i in stage.shown] == [("stdout", 100), ("stderr", 1), ("stdout", 1)]


def test_an_unfinished_line_is_live_until_it_ends():
    stage = Stage(2)
    for rank in range(2):
        stage.say(rank, f"\r{rank}0%")
    assert stage.take(after_s=1) == []
    assert stage.voice.live() == ["[0] 00%", "[1] 10%"]
    assert stage.voice.waiting
    stage.say(0, "\r100%\n")
    stage.take(after_s=1)
    stage.take(after_s=1)
    assert stage.lines == ["[0] 100%"]
    assert stage.voice.live() == ["[1] 10%"]
    stage.end()
    assert stage.lines == ["[0] 100%", "[1] 10%"]
    assert stage.voice.live() == []
    assert not stage.voice.waiting


# ---- displays


def test_equal_displays_are_shown_once_between_their_texts():
    stage = Stage(3)
    for rank in range(3):
        stage.say(rank, "before\n")
        stage.voice.show(rank, figure("a" if rank < 2 else "b"))
        stage.say(rank, "behind\n")
    stage.end()
    assert [i if isinstance(i, Text) else (i.label, i.ranks) for i in stage.shown] == [
        Text("stdout", "[all] before\n"),
        ("[0-1]", (0, 1)),
        ("[2]", (2,)),
        Text("stdout", "[all] behind\n"),
    ]


def test_a_display_ends_the_line_before_it():
    stage = Stage(1)
    stage.say(0, "loss: ")
    stage.voice.show(0, figure())
    stage.say(0, "0.5\n")
    stage.end()
    assert [i.text if isinstance(i, Text) else "figure" for i in stage.shown] == ["[0] loss: \n", "figure", "[0] 0.5\n"]


def test_a_display_keeps_what_it_is():
    stage = Stage(2)
    shown = Shown({"text/html": "x"}, {"w": 3}, "id", True, True)
    stage.voice.show(1, shown)
    stage.voice.clear(1)
    stage.voice.show(1, figure())
    stage.end()
    first, second = stage.shown
    assert (first.data, first.metadata, first.display_id, first.update, first.result, first.replace) == (
        {"text/html": "x"},
        {"w": 3},
        "id",
        True,
        True,
        False,
    )
    assert second.replace and second.ranks == (1,) and second.label == "[1]"


# ---- order


@st.composite
def speeches(draw: st.DrawFn) -> tuple[int, list[tuple[Any, ...]]]:
    num_ranks = draw(st.integers(1, 5))
    text = st.text(alphabet="ab\n", min_size=1, max_size=6)
    events = st.one_of(
        st.tuples(st.just("say"), st.integers(0, num_ranks - 1), text, st.sampled_from(["stdout", "stderr"])),
        st.tuples(st.just("show"), st.integers(0, num_ranks - 1), st.sampled_from("xy")),
        st.tuples(st.just("take"), st.sampled_from([0.0, 0.03, 0.3, 2.0])),
    )
    return num_ranks, draw(st.lists(events, max_size=40))


@settings(max_examples=80, deadline=None)
@given(speech=speeches(), burst=st.sampled_from([4, 1000]))
def test_order_within_a_rank_is_kept_and_nothing_is_lost(speech, burst):
    num_ranks, events = speech
    before = (merge._BURST_LINES, merge._LINES_PER_S)
    merge._BURST_LINES, merge._LINES_PER_S = burst, 0.0
    try:
        stage = Stage(num_ranks)
        said: dict[int, list[str]] = {rank: [] for rank in range(num_ranks)}
        begun = dict.fromkeys(range(num_ranks), "")
        displays: dict[int, list[str]] = {rank: [] for rank in range(num_ranks)}
        for event in events:
            if event[0] == "say":
                stage.say(event[1], event[2], event[3])
                *ended, rest = event[2].split("\n")
                for line in ended:
                    said[event[1]].append(begun[event[1]] + line)
                    begun[event[1]] = ""
                begun[event[1]] += rest
            elif event[0] == "show":
                stage.voice.show(event[1], figure(event[2]))
                if begun[event[1]]:
                    said[event[1]].append(begun[event[1]])
                begun[event[1]] = ""
                displays[event[1]].append(event[2])
            else:
                stage.take(event[1])
        stage.end()
    finally:
        merge._BURST_LINES, merge._LINES_PER_S = before
    shown = [i for i in stage.shown if isinstance(i, Shown)]
    omitted = sum(int(n.replace(",", "")) for n in re.findall(r"^\.\.\. ([\d,]+) lines? omitted", stage.text, re.M))
    stage.shown = [Text("stdout", re.sub(r"^\.\.\. .*\n", "", stage.text, flags=re.M))]
    missing = 0
    for rank in range(num_ranks):
        whole = [*said[rank], *([begun[rank]] if begun[rank] else [])]
        mine = stage.of(rank)
        at = -1
        for line in mine:  # a subsequence of what was said
            at = whole.index(line, at + 1)
        missing += len(whole) - len(mine)
        assert [s.data["image/png"] for s in shown if rank in s.ranks] == displays[rank]
        if burst == 1000:
            assert mine == whole
        elif whole and not begun[rank]:
            assert mine[-1:] == whole[-1:]
    if not any(event[0] == "show" for event in events):
        assert omitted == missing


# ---- floods


def test_a_flood_keeps_head_tail_and_count():
    stage = Stage(2)
    for start in range(0, 100_000, 500):
        for rank in range(2):
            stage.say(rank, "".join(f"rank {rank} line {n}\n" for n in range(start, start + 500)))
        stage.take(after_s=0.01)
    text = stage.end()
    assert len(stage.lines) == merge._BURST_LINES + 1 + 2 * merge._TAIL_LINES
    for rank in range(2):
        mine = [line for line in stage.lines if line.startswith(f"[{rank}] ")]
        assert mine[0].endswith("line 0")
        assert mine[-merge._TAIL_LINES :] == [f"[{rank}] rank {rank} line {n}" for n in range(99_990, 100_000)]
    (omitted,) = re.findall(r"\.\.\. ([\d,]+) lines omitted \(the whole text: there\)", text)
    assert int(omitted.replace(",", "")) == 200_000 - merge._BURST_LINES - 2 * merge._TAIL_LINES


def test_a_flood_that_comes_in_one_read_has_a_head():
    stage = Stage(2)
    for rank in range(2):
        stage.say(rank, "".join(f"rank {rank} line {n}\n" for n in range(20_000)))
    stage.end()
    assert stage.lines[0] == "[0] rank 0 line 0"
    assert len(stage.lines) == merge._BURST_LINES + 1 + 2 * merge._TAIL_LINES
    assert stage.lines[-1] == "[1] rank 1 line 19999"


def test_a_flood_of_equal_lines_counts_each_rank():
    stage = Stage(8)
    for rank in range(8):
        stage.say(rank, "".join(f"line {n}\n" for n in range(5000)))
    text = stage.end()
    assert stage.lines[0] == "[all] line 0"
    (omitted,) = re.findall(r"\.\.\. ([\d,]+) lines omitted", text)
    shown = sum(8 if line.startswith("[all]") else 1 for line in stage.lines if line.startswith("["))
    assert int(omitted.replace(",", "")) + shown == 8 * 5000


def test_while_a_flood_lasts_the_last_lines_are_live():
    stage = Stage(2)
    for n in range(4000):
        stage.say(0, f"line {n}\n")
    stage.say(1, "quiet\n")
    stage.take(after_s=0.2)
    stage.say(0, "line 4000\nline 40")
    live = stage.voice.live()
    assert "[0] line 4000" in live
    assert re.fullmatch(r"\.\.\. 2,5\d\d lines omitted so far", live[-1])
    assert stage.voice.waiting


def test_what_comes_after_a_flood_is_shown_again():
    stage = Stage(2)
    stage.say(0, "".join(f"line {n}\n" for n in range(5000)) + "unfin")
    stage.take(after_s=2 * merge.WINDOW_S)
    stage.take(after_s=2)
    assert stage.lines[-1] == "[0] line 4999"
    stage.say(0, "ished\nnext\n")
    stage.say(1, "other\n")
    stage.take(after_s=1)
    assert stage.lines[-3:] == ["[0] unfinished", "[0] next", "[1] other"]


def test_a_long_run_may_go_on_talking():
    stage = Stage(2)
    for n in range(5000):
        stage.say(0, f"line {n}\n")
        stage.say(1, f"line {n}\n")
        stage.take(after_s=0.25)
    assert stage.lines == [f"[all] line {n}" for n in range(5000)]


def test_long_lines_are_a_flood_too():
    stage = Stage(1)
    for _ in range(500):
        stage.say(0, "x" * 10_000 + "\n")
        stage.take(after_s=0.01)
    text = stage.end()
    assert len(text) < merge._BURST_CHARS + 3 * merge._TAIL_CHARS
    assert "lines omitted" in text


def test_displays_in_a_flood_are_shown():
    stage = Stage(2)
    stage.say(0, "".join(f"line {n}\n" for n in range(5000)))
    stage.voice.show(0, figure("in the flood"))
    stage.say(0, "".join(f"line {n}\n" for n in range(5000)))
    stage.take(after_s=1)
    stage.voice.show(0, figure("behind it"))
    stage.end()
    assert [i.data["image/png"] for i in stage.shown if isinstance(i, Shown)] == ["in the flood", "behind it"]


def test_the_tails_of_many_ranks_are_bounded_together():
    stage = Stage(64)
    for rank in range(64):
        stage.say(rank, "".join(f"rank {rank} line {n}\n" for n in range(1000)))
    stage.end()
    assert len(stage.lines) <= merge._BURST_LINES + 1 + merge._ALL_TAILS_LINES
    assert {f"[{rank}] rank {rank} line 999" for rank in range(64)} <= set(stage.lines)


def test_memory_stays_bounded_in_a_flood():
    stage = Stage(8)
    chunk = "".join(f"line {n} {'.' * 60}\n" for n in range(3000))
    tracemalloc.start()
    for _ in range(100):  # 170 MB in all; nobody takes anything meanwhile
        for rank in range(8):
            stage.say(rank, chunk)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 40 * 2**20
    stage.end()
    (omitted,) = re.findall(r"\.\.\. ([\d,]+) lines omitted", stage.text)
    shown = sum(len(stage.ranks) if line.startswith("[all]") else 1 for line in stage.lines if line[0] == "[")
    assert int(omitted.replace(",", "")) + shown == 100 * 8 * 3000
