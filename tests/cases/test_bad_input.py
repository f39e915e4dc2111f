"""Mistakes at the keyboard: each is one line that says what was expected, and the cluster stays as it was."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.shared


def one_line(played) -> str:
    """The only line that was shown."""
    assert played.status == "error"
    lines = [line for line in played.text.splitlines() if line.strip()]
    assert len(lines) == 1, played.text
    return lines[0]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--nonsense", "--nonsense"),
        ("-r 0-", "0-"),
        ("-r 9", "0 to 1"),
        ("-r a", "a"),
        ("-r 1-0", "1-0"),
        ("-r -1", "-r"),
        ("-n 0", "-n"),
        ("-n two", "two"),
        ("-n 3", "restart -n 3"),
        ("--backend mpi", "nccl"),
        ("--timeout soon", "--timeout"),
        ("--timeout -1", "--timeout"),
        ("--watch 'a b'", "--watch"),
        ("'unclosed", "quotation"),
    ],
)
def test_flags_of_a_cell(notebook, flags, said):
    line = one_line(notebook.cell("print('must not run')", flags))
    assert said in line
    assert "must not run" not in line
    assert notebook.cell("print('on')").of(1) == ["on"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("%distributed nonsense", "status"),
        ("%distributed start -n 2", "restart"),
        ("%distributed restart -n two", "two"),
        ("%distributed push nothing_of_this_name", "nothing_of_this_name"),
        ("%distributed pull nothing_of_this_name", "nothing_of_this_name"),
        ("%distributed pull", "NAME"),
        ("%distributed output 9", "0 to 1"),
        ("%distributed output x", "x"),
        ("%distributed history nothing", "nothing"),
        ("%distributed dashboard nothing", "nothing"),
    ],
)
def test_commands(notebook, line, said):
    notebook.cell("nbdist.log(loss=1.0, step=0)")  # so that there is a run
    assert said in one_line(notebook.run(line))
    assert notebook.cell("print('on')").of(1) == ["on"]


def test_a_value_that_cannot_be_pickled(notebook):
    notebook.run("import threading\nlock = threading.Lock()")
    assert "lock" in one_line(notebook.run("%distributed push lock"))
    notebook.cell("lock = __import__('threading').Lock()")
    assert "lock" in one_line(notebook.run("%distributed pull lock"))
    assert notebook.cell("print('on')").of(1) == ["on"]


def test_loading_twice_changes_nothing(notebook):
    before = notebook.rank_pids()
    assert notebook.run("%load_ext nbdist").ok
    assert notebook.run("%load_ext nbdist").ok
    after = notebook.cell("print('on')")
    assert after.of(1) == ["on"]
    assert notebook.rank_pids() == before


def test_before_any_start(fresh):
    notebook = fresh()
    notebook.run("x = 1")
    for command in ("stop", "restart", "interrupt", "where", "output 0", "push x", "pull x", "history", "dashboard"):
        played = notebook.run(f"%distributed {command}")
        lines = [text for text in played.text.splitlines() if text.strip()]
        assert len(lines) == 1, (command, played.text)
        assert "no cluster" in lines[0], (command, lines)
        assert "Traceback" not in lines[0]
    assert notebook.run("%distributed status").ok
