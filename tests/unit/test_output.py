"""One rank's pipes: bytes become text in the order in which they were written, terminal controls become lines."""

from __future__ import annotations

import io
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from deadlines import wait_until
from hypothesis import given, settings
from hypothesis import strategies as st
from tqdm import tqdm

from nbdist.notebook import logs, output
from nbdist.notebook.logs import RankLog, new_log_folder
from nbdist.notebook.output import Line, RankOutput, Screen
from nbdist.worker.streams import Streams

TOKEN = "5ec8e7"


def mark(kind: str, number: int, token: str = TOKEN) -> bytes:
    return b"\x1b]nbdist;%s;%s;%d\x07" % (token.encode(), kind.encode(), number)


class Pipes:
    """A rank's two pipes, written to by hand, and what is read from them."""

    def __init__(self) -> None:
        (out_r, out), (err_r, err) = os.pipe(), os.pipe()
        self.ends = {"stdout": out, "stderr": err}
        self.log = io.BytesIO()
        self.heard: list[tuple[str, Any]] = []
        self.missing: set[int] = set()  # marks whose message has not come
        self.output = RankOutput(out_r, err_r, TOKEN, self.log, self._text, self._mark)

    def _text(self, stream: str, text: str) -> None:
        if self.heard and self.heard[-1][0] == stream:
            self.heard[-1] = (stream, self.heard[-1][1] + text)
        else:
            self.heard.append((stream, text))

    def _mark(self, kind: str, number: int) -> bool:
        if number in self.missing:
            return False
        self.heard.append((kind, number))
        return True

    def write(self, stream: str, data: bytes) -> None:
        os.write(self.ends[stream], data)
        self.output.read()

    def mark(self, kind: str, number: int) -> None:
        for stream in self.ends:
            self.write(stream, mark(kind, number))

    def end(self, *streams: str) -> None:
        for stream in streams or tuple(self.ends):
            os.close(self.ends.pop(stream))
        while self.output.read():
            pass

    def close(self) -> None:
        for fd in self.ends.values():
            os.close(fd)
        self.output.close()


@pytest.fixture
def pipes() -> Iterator[Pipes]:
    made = Pipes()
    yield made
    made.close()


# ---- marks


def test_marks_keep_text_displays_and_ends_in_order(pipes):
    pipes.write("stdout", b"A\n")
    pipes.mark("s", 1)
    pipes.write("stderr", b"E\n")
    pipes.mark("s", 2)
    pipes.write("stdout", b"B\n")
    pipes.mark("d", 3)
    pipes.write("stdout", b"C\n")
    pipes.mark("e", 4)
    assert pipes.heard == [
        ("stdout", "A\n"),
        ("s", 1),
        ("stderr", "E\n"),
        ("s", 2),
        ("stdout", "B\n"),
        ("d", 3),
        ("stdout", "C\n"),
        ("e", 4),
    ]
    assert pipes.log.getvalue() == b"A\nE\nB\nC\n"


def test_what_stands_behind_a_mark_waits_for_the_other_pipe(pipes):
    pipes.write("stderr", b"late" + mark("s", 1))
    pipes.write("stderr", b"later")
    assert pipes.heard == [("stderr", "late")]
    assert pipes.output.held()
    assert pipes.output.fds() == [pipes.output._pipes[0].fd]
    pipes.write("stdout", b"first" + mark("s", 1))
    pipes.output.read()
    assert pipes.heard == [("stderr", "late"), ("stdout", "first"), ("s", 1), ("stderr", "later")]
    assert not pipes.output.held()


def test_what_stands_behind_a_display_waits_for_its_message(pipes):
    pipes.missing.add(1)
    pipes.mark("d", 1)
    pipes.write("stdout", b"behind")
    assert pipes.heard == []
    pipes.missing.clear()
    pipes.output.advance()
    pipes.output.read()
    assert pipes.heard == [("d", 1), ("stdout", "behind")]


def test_a_message_that_never_comes_is_not_waited_for_for_ever(pipes, monkeypatch):
    monkeypatch.setattr(output, "_HOLD_S", 0.02)
    pipes.missing.add(1)
    pipes.mark("d", 1)
    pipes.write("stdout", b"behind")

    def passed() -> bool:
        pipes.output.read()
        return not pipes.output.held()

    wait_until(passed)
    pipes.output.read()
    assert pipes.heard == [("stdout", "behind")]


def test_a_mark_that_reached_one_pipe_only_is_passed_in_time(pipes, monkeypatch):
    monkeypatch.setattr(output, "_HOLD_S", 0.02)
    pipes.write("stdout", mark("s", 1) + mark("d", 2) + b"behind")

    def passed() -> bool:
        pipes.output.read()
        return not pipes.output.held()

    wait_until(passed)
    assert pipes.heard == [("s", 1), ("d", 2), ("stdout", "behind")]


def test_the_lower_mark_comes_first_with_its_own_kind(pipes, monkeypatch):
    monkeypatch.setattr(output, "_HOLD_S", 0.0)
    os.write(pipes.ends["stdout"], mark("s", 7))
    pipes.write("stderr", mark("e", 8))
    pipes.output.read()
    assert pipes.heard == [("s", 7), ("e", 8)]


def test_a_closed_pipe_is_not_waited_for(pipes):
    pipes.end("stderr")
    pipes.write("stdout", b"a" + mark("e", 1) + b"b")
    assert pipes.heard == [("stdout", "a"), ("e", 1), ("stdout", "b")]
    assert not pipes.output.ended
    pipes.end("stdout")
    assert pipes.output.ended


@pytest.mark.parametrize("cut", [b"\x1b]nbdist;", mark("e", 1)[:-1], mark("e", 1)[:-3], b"\x1b"])
def test_a_process_that_ends_in_the_middle_of_a_mark(pipes, cut):
    pipes.write("stdout", b"last words" + cut)
    pipes.end()
    assert pipes.output.ended
    assert pipes.heard[0][1].startswith("last words")
    pipes.output.read()


@settings(max_examples=25, deadline=None)
@given(seed=st.randoms(use_true_random=False))
def test_marks_and_characters_split_anywhere(seed: random.Random):
    pipes = Pipes()
    try:
        expected: list[tuple[str, Any]] = []
        written = {"stdout": b"", "stderr": b""}
        for number in range(1, 6):
            for stream in written:
                text = "".join(seed.choices("aé✓\n\x1b[31m]🙂", k=seed.randrange(5)))
                written[stream] += text.encode() + mark("s", number)
                if text:
                    expected.append((stream, text))
            expected.append(("s", number))
        data = dict(written)
        while any(data.values()):
            stream = seed.choice([s for s in data if data[s]])
            size = seed.randrange(1, 9)
            pipes.write(stream, data[stream][:size])
            data[stream] = data[stream][size:]
        pipes.end()

        def by_interval(heard: list[tuple[str, Any]]) -> list[Any]:
            parts: list[Any] = [{"stdout": "", "stderr": ""}]
            for what, value in heard:
                if what == "s":
                    parts += [value, {"stdout": "", "stderr": ""}]
                else:
                    parts[-1][what] += value
            return parts

        assert by_interval(pipes.heard) == by_interval(expected)
    finally:
        pipes.close()


@pytest.mark.parametrize(
    "forged",
    [
        mark("e", 1, token="another"),
        mark("e", 1, token=""),
        mark("e", 1)[:-1] + b";\x07",
        b"\x1b]nbdist;" + TOKEN.encode() + b";e;x\x07",
        b"\x1b]nbdist;" + TOKEN.encode() + b";E;1\x07",
        b"\x1b]nbdist;" + TOKEN.encode() + b";e;" + b"9" * 5000 + b"\x07",
        b"\x1b]nbdist\x07",
        b"\x1b]8;;https://example.org\x07",
    ],
)
def test_what_only_looks_like_a_mark_is_text(pipes, forged):
    for stream in ("stdout", "stderr"):
        pipes.write(stream, b"a" + forged + b"b\n")
    pipes.mark("e", 9)
    marks = [entry for entry in pipes.heard if entry[0] not in ("stdout", "stderr")]
    assert marks == [("e", 9)]
    assert pipes.log.getvalue() == (b"a" + forged + b"b\n") * 2


def test_bytes_that_are_no_text(pipes):
    pipes.write("stdout", b"caf\xe9 \xff\n" + "✓".encode()[:1])
    pipes.write("stdout", "✓".encode()[1:] + b"\xc3")
    pipes.end()
    assert pipes.heard == [("stdout", "caf\ufffd \ufffd\n✓\ufffd")]


def test_the_last_lines_are_known(pipes):
    for number in range(5000):
        pipes.write("stderr" if number % 2 else "stdout", b"line %d\n" % number)
    assert pipes.output.tail(3) == ["line 4997", "line 4998", "line 4999"]
    assert len(pipes.output.tail()) == 12
    for _ in range(100):
        pipes.write("stdout", b"x" * 4000)
    assert sum(map(len, pipes.output.tail())) < 20_000


# ---- both ends: a rank's streams, read by the notebook


class Mouth:
    """A rank's own streams over two pipes of this process, read on demand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pipes = Pipes()
        given = iter(self.pipes.ends.values())
        with monkeypatch.context() as patch:
            patch.setattr(os, "dup", lambda _: next(given))
            patch.setattr(os, "register_at_fork", lambda **_: None)
            self.streams = Streams(TOKEN)
        self.streams.stdout._fd, self.streams.stderr._fd = self.pipes.ends.values()

    @property
    def said(self) -> list[tuple[str, str]]:
        """Text by stream, marks left out."""
        while self.pipes.output.read():
            pass
        said: list[tuple[str, str]] = []
        for stream, text in self.pipes.heard:
            if stream not in ("stdout", "stderr"):
                continue
            if said and said[-1][0] == stream:
                said[-1] = (stream, said[-1][1] + text)
            else:
                said.append((stream, text))
        return said


@pytest.fixture
def mouth(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mouth]:
    made = Mouth(monkeypatch)
    yield made
    made.pipes.close()


def test_streams_alternate_in_the_order_of_the_writes(mouth):
    for number in range(20):
        print("out", number, file=mouth.streams.stdout)
        print("err", number, file=mouth.streams.stderr)
    mouth.streams.mark("e")
    assert mouth.said == [
        (stream, f"{stream[3:]} {number}\n") for number in range(20) for stream in ("stdout", "stderr")
    ]


def test_an_unfinished_line_leaves_at_a_mark_a_flush_or_in_time(mouth):
    out = mouth.streams.stdout
    out.write("a")
    assert mouth.said == []
    out.flush()
    assert mouth.said == [("stdout", "a")]
    out.write("b")
    number = mouth.streams.mark("d")
    assert number == 1
    assert mouth.said == [("stdout", "ab")]
    out.write("c")
    wait_until(lambda: not mouth.streams.flush_stale(), what="the stale text has left")
    assert mouth.said == [("stdout", "abc")]
    mouth.streams.stdout.write("d")
    mouth.streams.stderr.write("e\n")
    mouth.streams.mark("e")
    assert mouth.said == [("stdout", "abc"), ("stderr", "e\n"), ("stdout", "d")]


def test_bytes_and_text_go_out_in_order(mouth):
    out = mouth.streams.stdout
    out.write("text ")
    out.buffer.write(b"\xff bytes ")
    out.write("lone \ud800\n")
    assert mouth.said == [("stdout", "text \ufffd bytes lone \\ud800\n")]
    with pytest.raises(TypeError, match="write\\(\\) argument must be str"):
        out.write(b"bytes")
    assert out.writable() and not out.isatty() and not out.closed
    out.close()
    out.reconfigure(encoding="latin-1")
    print("still open", file=out)
    assert mouth.said[-1][1].endswith("still open\n")


def test_lines_of_threads_stay_whole(mouth):
    go = threading.Barrier(4)

    def talk(name: int) -> None:
        go.wait()
        for number in range(100):
            print(name, number, "x" * 20, file=mouth.streams.stdout)

    threads = [threading.Thread(target=talk, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = mouth.said[0][1].splitlines()
    assert sorted(lines) == sorted(f"{n} {k} {'x' * 20}" for n in range(4) for k in range(100))
    for name in range(4):
        assert [line.split()[1] for line in lines if line.startswith(f"{name} ")] == [str(k) for k in range(100)]


def test_a_forked_child_speaks_without_marks_and_without_its_parents_unfinished_line(mouth):
    mouth.streams.stdout.write("parent")
    mouth.streams.lock.acquire()  # as if a thread wrote at this moment
    pid = os.fork()
    if pid == 0:
        mouth.streams._after_fork()
        print("child", file=mouth.streams.stdout)
        print("child", file=mouth.streams.stderr)
        os._exit(0)
    assert os.waitpid(pid, 0) == (pid, 0)
    mouth.streams.lock.release()
    print("'s line", file=mouth.streams.stdout)
    mouth.streams.mark("e")
    while mouth.pipes.output.read():
        pass
    assert mouth.pipes.log.getvalue().count(b"child\n") == 2
    assert b"parent's line\n" in mouth.pipes.log.getvalue()
    assert mouth.pipes.log.getvalue().count(b"parent") == 1


def test_what_a_cell_put_in_their_place_is_taken_back(mouth, monkeypatch):
    monkeypatch.setattr(os, "dup2", lambda *_: None)
    for name in ("stdout", "stderr", "__stdout__", "__stderr__"):
        monkeypatch.setattr(sys, name, io.StringIO())
    mouth.streams.restore()
    found = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    monkeypatch.undo()
    assert found == (mouth.streams.stdout, mouth.streams.stderr) * 2


# ---- the screen


def lines(*texts: str, stream: str = "stdout") -> list[str]:
    """What becomes of text, when the cell ends behind it."""
    screen = Screen()
    found = [line for text in texts for line in screen.feed(stream, text)]
    found += screen.end()
    assert all(line.stream == stream for line in found if line.text)
    return [line.text for line in found]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a\nb\n", ["a", "b"]),
        ("a\n\n\nb", ["a", "", "", "b"]),
        ("a\r\nb\r\n", ["a", "b"]),
        ("tab\there\n", ["tab\there"]),
        ("10%\r20%\r100%\n", ["100%"]),
        ("a long text\rshort\n", ["shortg text"]),
        ("a long text\rshort\x1b[K\n", ["short"]),
        ("a long text\r\x1b[Kshort\n", ["short"]),
        ("a long text\x1b[2K\rshort\n", ["short"]),
        ("|\x08/\x08-\x08done\n", ["done"]),
        ("abc\x08\x08X\n", ["aXc"]),
        ("\x08\x08a\n", ["a"]),
        ("bell\x07 null\x00 form\x0c feed\x0b\n", ["bell null form feed"]),
        ("\x1b]0;title\x07text \x1b]8;;http://a\x1b\\link\x1b]8;;\x1b\\\n", ["text link"]),
        ("\x1b]never ended\nnext\n", ["never ended", "next"]),
        ("a\x1b\nb\n", ["a", "b"]),
        ("\x1bP+q\x1b\\dcs\n", ["dcs"]),
        ("\x1b[?25l\x1b[10;20Hmoved\x1b[?25h\n", ["moved"]),
        ("\x1b[99999999999A up\n", [" up"]),
        ("\x1b[31mred\x1b[0m plain\n", ["\x1b[31mred\x1b[0m plain"]),
        ("\x1b[32mgreen\nnext\n", ["\x1b[32mgreen\x1b[0m", "next"]),
        ("\x1b[1m50%\x1b[0m\r\x1b[1m99%\x1b[0m\n", ["\x1b[1m99%\x1b[0m"]),
        ("50% plain\r\x1b[1m9%\x1b[0m\n", ["\x1b[1m9%\x1b[0m"]),
        ("one\ntwo\x1b[1A\x1b[2Kover\n", ["over", "two"]),
    ],
)
def test_controls_become_lines(text, expected):
    assert lines(text) == expected
    pieces = lines(*text)  # one character at a time: the same, but that rows above may have been shown already
    assert pieces == expected or "\x1b[1A" in text


def test_a_bar_that_changes_is_one_line_whatever_the_reads():
    for size in (1, 2, 3, 7, 1000):
        text = "".join(f"\rtrain: {n:3d}%|{'#' * (n // 5):20}|" for n in range(101)) + "\ndone\n"
        assert lines(*(text[i : i + size] for i in range(0, len(text), size))) == [f"train: 100%|{'#' * 20}|", "done"]


def test_live_rows_are_those_that_may_change():
    screen = Screen()
    assert screen.feed("stdout", "done\n\x1b[31m 10%") == []
    assert screen.settle() == [Line("stdout", "done")]
    assert screen.live() == ["\x1b[31m 10%\x1b[0m"]
    assert screen.feed("stdout", "\r 20%") == []
    assert screen.live() == [" 20%"]
    assert screen.end() == [Line("stdout", " 20%")]
    assert screen.live() == []


def played(make: Callable[[io.StringIO], None]) -> list[str]:
    file = io.StringIO()
    make(file)
    return lines(file.getvalue())


def test_nested_bars_of_tqdm_are_one_line_each():
    def train(file: io.StringIO) -> None:
        for _ in tqdm(range(3), desc="epochs", file=file, mininterval=0, ncols=60):
            for _ in tqdm(range(5), desc="batches", file=file, mininterval=0, ncols=60, leave=False):
                pass

    found = [line for line in played(train) if line.strip()]
    assert len(found) <= 4
    assert found[0].startswith("epochs: 100%")
    assert not any(line.count("%|") > 1 for line in found)


def test_lines_written_beside_a_bar_are_kept():
    def train(file: io.StringIO) -> None:
        for number in tqdm(range(4), desc="steps", file=file, mininterval=0, ncols=60):
            tqdm.write(f"loss {number}", file=file)

    found = [line.rstrip() for line in played(train) if line.strip()]
    assert [line for line in found if line.startswith("loss")] == [f"loss {n}" for n in range(4)]
    assert [line[:11] for line in found if line.startswith("steps")] == ["steps: 100%"]


def test_a_line_without_end_is_cut_and_says_so():
    (one,) = lines("x" * 100_000 + "\n")
    assert one == "x" * output._MAX_LINE + " ... (a line of more than 20,000 characters)"
    (one,) = lines(*["x" * 1000] * 100)
    assert one.endswith("... (a line of more than 20,000 characters)")
    (one,) = lines("\x1b[31m" * 50_000 + "x")
    assert len(one) < output._MAX_LINE + 300
    screen = Screen()
    for _ in range(30):
        screen.feed("stdout", "\x1b[31m" * 1000 + "y" * 1000)
    assert sum(len(row) for _, row in screen._rows) < 50_000


def test_many_rows_that_could_change_do_not_pile_up():
    screen = Screen()
    found = screen.feed("stdout", "\r" + "row\n" * 1000)
    assert len(found) == 1000 - output._MAX_ROWS + 1
    assert len(screen.live()) <= output._MAX_ROWS


def test_a_row_belongs_to_the_stream_that_wrote_it():
    screen = Screen()
    screen.feed("stderr", "bar")
    assert screen.feed("stdout", " text\nplain\n") == [Line("stderr", "bar text"), Line("stdout", "plain")]


@settings(max_examples=80, deadline=None)
@given(text=st.text(alphabet="ab\n\t é✓", max_size=200), cuts=st.lists(st.integers(1, 20), max_size=20))
def test_plain_text_is_never_changed(text, cuts):
    pieces, at = [], 0
    for cut in cuts:
        pieces.append(text[at : at + cut])
        at += cut
    pieces.append(text[at:])
    assert "\n".join(lines(*pieces)).rstrip("\n") == text.rstrip("\n")


@settings(max_examples=80, deadline=None)
@given(
    pieces=st.lists(
        st.sampled_from(
            [
                *(
                    "a",
                    "word",
                    "\n",
                    "\r",
                    "\x08",
                    "\x1b",
                    "\x1b[A",
                    "\x1b[2A",
                    "\x1b[B",
                    "\x1b[K",
                    "\x1b[2K",
                    "\x1b[31m",
                ),
                *("\x1b[0m", "\x1b[", "]", "\x1b]0;", "\x07", "\x1b\\", "é", "\x1bM", "\x9b", "7"),
            ]
        ),
        max_size=60,
    )
)
def test_no_control_but_colours_gets_out(pieces):
    screen = Screen()
    shown: list[str] = []
    for piece in pieces:
        shown += [line.text for line in screen.feed("stdout", piece)]
        shown += [line.text for line in screen.settle()]
        for row in screen.live():
            assert output._CONTROL.sub(lambda m: "" if m[0].endswith("m") else "?", row).count("?") == 0
    shown += [line.text for line in screen.end()]
    for row in shown:
        controls = output._CONTROL.findall(row)
        assert all(c.startswith("\x1b[") and c.endswith("m") for c in controls), (row, controls)


# ---- logs


def test_a_log_is_cut_in_two_files_and_keeps_the_latest(tmp_path, monkeypatch):
    monkeypatch.setattr(logs, "MAX_BYTES", 1000)
    log = RankLog(tmp_path / "rank-0.log")
    for number in range(500):
        log.write(b"line %03d\n" % number)
    log.close()
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == ["rank-0.log", "rank-0.old"]
    assert all(p.stat().st_size <= 1010 for p in tmp_path.iterdir())
    whole = (tmp_path / "rank-0.old").read_text() + (tmp_path / "rank-0.log").read_text()
    assert whole.splitlines()[-100:] == [f"line {n}" for n in range(400, 500)]


def test_a_log_is_read_from_a_position(tmp_path):
    log = RankLog(tmp_path / "rank-0.log")
    log.write(b"before\n")
    position = log.position()
    log.write("behind ✓\n".encode() + b"\xff")
    assert log.text_from(position) == "behind ✓\n\ufffd"
    assert log.text_from(0).startswith("before\n")
    assert log.text_from(10**9) == log.text_from(0)
    log.close()
    assert log.text_from(0).startswith("before\n")
    log.close()
    assert log.write(b"lost") == 0


def test_a_log_that_cannot_be_written_ends_nothing(tmp_path, monkeypatch):
    for path in (None, tmp_path / "missing" / "rank-0.log"):
        log = RankLog(path)
        assert log.write(b"text") == 0
        assert log.text_from(0) == ""
        log.close()
    full = RankLog(tmp_path / "full.log")
    full.close()
    full._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
    assert full.write(b"text") == 0
    full.close()


def test_folders_of_logs_are_private_and_few(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    folders = [new_log_folder() for _ in range(logs.KEPT_FOLDERS + 5)]
    left = list((tmp_path / "nbdist" / "output").iterdir())
    assert len(left) == logs.KEPT_FOLDERS
    assert folders[-1] is not None
    assert folders[-1].stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("XDG_STATE_HOME", "/dev/null")
    assert new_log_folder() is None
