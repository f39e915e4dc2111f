"""Cases about what a cell is: errors, magics, await, values, state, sources. One kernel and two ranks serve them all."""

from __future__ import annotations

import pytest
from deadlines import BREAK_S

pytestmark = pytest.mark.shared


def test_ce01_syntax_error(notebook):
    before = notebook.rank_pids()
    assert notebook.cell("marker = 7").ok
    played = notebook.cell('print("before")\nfor i in range(3)\n    print(i)')
    assert played.status == "error"
    assert len(played.errors) == 1
    assert played.errors[0]["ename"] == "SyntaxError"
    assert played.report.count("SyntaxError") == 1
    assert "for i in range(3)" in played.report
    assert "line 2" in played.report
    assert "before" not in played.streams
    after = notebook.cell('print("marker", marker)')
    assert after.of(0) == after.of(1) == ["marker 7"]
    assert notebook.rank_pids() == before


def test_ce02_traceback_points_into_the_cell(notebook):
    played = notebook.cell(
        "import torch.distributed as dist\ndef ratio(d):\n    return 10 / d\nif dist.get_rank() == 1:\n    ratio(0)\nprint('fine')"
    )
    assert played.status == "error"
    assert "rank 1" in played.report
    assert "ZeroDivisionError" in played.report
    lines = [line.strip() for line in played.report.splitlines()]
    assert any("return 10 / d" in line and "3" in line for line in lines)
    assert any("ratio(0)" in line and "5" in line for line in lines)
    assert "nbdist/" not in played.report
    assert "run_code" not in played.report
    assert played.of(0) == ["fine"]


def test_ce03_shell_and_magic_lines(notebook):
    played = notebook.cell(
        "import os\n!echo shell-$RANK\n%time sum(range(1000))\nout = !pwd\nprint(type(out).__name__)"
    )
    assert played.ok
    for rank in (0, 1):
        text = "\n".join(played.of(rank))
        assert f"shell-{rank}" in text
        assert "Wall time" in text
        assert "SList" in text or "list" in text
    assert "SyntaxError" not in played.text


def test_ce05_top_level_await(notebook):
    played = notebook.cell(
        "import asyncio\n"
        "await asyncio.sleep(0.1); print('slept')\n"
        "async def gen():\n    for i in range(3): yield i\n"
        "print([i async for i in gen()])\n"
        "t = asyncio.create_task(asyncio.sleep(0, 5))\n"
        "print('task', await t)"
    )
    assert played.ok
    again = notebook.cell("import asyncio\nawait asyncio.sleep(0); print('again')")
    assert again.ok
    for rank in (0, 1):
        assert played.of(rank) == ["slept", "[0, 1, 2]", "task 5"]
        assert again.of(rank) == ["again"]


def test_ce06_value_of_the_last_expression(notebook):
    played = notebook.cell("import torch.distributed as dist\ndist.get_rank() * 10")
    assert played.ok
    assert (played.of(0), played.of(1)) == (["0"], ["10"])
    assert notebook.cell("dist.get_rank() * 10;").text.strip() == ""
    assert notebook.cell("None").text.strip() == ""
    odd = notebook.cell(
        "class Odd:\n"
        "    def __repr__(self):\n"
        "        if dist.get_rank() == 1: raise ValueError('no repr today')\n"
        "        return 'odd-ok'\n"
        "Odd()"
    )
    assert "odd-ok" in odd.of(0)
    assert "no repr today" in odd.text
    assert len(odd.errors) == 1
    assert "odd-ok" not in odd.of(1)


def test_ce07_builtins_and_usual_names_rebound(notebook):
    before = notebook.rank_pids()
    first = notebook.cell(
        "import sys\n"
        "print = None; list = tuple; open = 'x'; len = lambda x: -1\n"
        "Exception = ValueError; os = None; time = None; json = None; dist = None\n"
        "sys.stdout.write('still here\\n')\n"
        "nbdist.log(step=0, loss=1.0)"
    )
    assert first.ok
    second = notebook.cell(
        "import builtins\n"
        "for n in ('print', 'list', 'open', 'len', 'Exception'): globals().pop(n, None)\n"
        "print(list(range(3)))"
    )
    third = notebook.cell("sys = None\n1 / 0")
    notebook.cell("import sys, os, time, json, torch.distributed as dist")
    for rank in (0, 1):
        assert "still here" in first.of(rank)
        assert second.of(rank) == ["[0, 1, 2]"]
    assert third.status == "error"
    assert "ZeroDivisionError" in third.report
    assert "1 / 0" in third.report
    assert notebook.rank_pids() == before


def test_ce09_state_is_kept_per_rank(notebook):
    notebook.cell("import torch.distributed as dist\nx = 1")
    step = "x = x + dist.get_rank(); print(x)"
    first, second = notebook.cell(step), notebook.cell(step)
    assert (first.of(0), first.of(1)) == (["1"], ["2"])
    assert (second.of(0), second.of(1)) == (["1"], ["3"])
    one = notebook.cell("print(x)", "-r 1")
    assert one.of(1) == ["3"]
    assert one.of(0) == []


@pytest.mark.parametrize("body", ["", "# only a comment\n   ", '"""only a docstring""";'])
def test_ce11_empty_cells(notebook, body):
    played = notebook.cell(body)
    assert played.ok
    assert played.text.strip() == ""


def test_ce11_a_cell_that_is_one_string(notebook):
    """IPython shows the value of such a cell; so do ranks."""
    played = notebook.cell('"""only a docstring"""')
    assert played.ok
    assert played.of(0) == played.of(1) == ["'only a docstring'"]


@pytest.mark.parametrize(
    "body", ['name = input("name? ")\nprint("got", name)', 'import getpass\ngetpass.getpass("token: ")']
)
def test_ce13_input_and_getpass(notebook, body):
    played = notebook.cell(body, timeout_s=BREAK_S)
    assert played.status == "error"
    assert "EOFError" in played.report or "StdinNotImplementedError" in played.report
    assert "is not available in ranks" in played.report
    assert "%distributed push" in played.report
    assert "got" not in played.streams
    assert notebook.cell("print('on')").of(1) == ["on"]


def test_ce15_sources_and_pickle(notebook):
    played = notebook.cell(
        "import inspect, pickle, dataclasses\n"
        "@dataclasses.dataclass\n"
        "class Point: x: int\n"
        "def f(a):\n"
        "    return a + 1\n"
        "print(inspect.getsource(f).splitlines()[0])\n"
        "print(Point(1), pickle.loads(pickle.dumps(Point(1))) == Point(1), Point.__module__)"
    )
    assert played.ok
    later = notebook.cell("print(inspect.getsource(f).count('return'))")
    for rank in (0, 1):
        assert played.of(rank) == ["def f(a):", "Point(x=1) True __main__"]
        assert later.of(rank) == ["1"]


def test_ce16_module_edited_between_cells(notebook):
    """Without autoreload both ranks keep the old version; a reload in the cell, which the README names, brings the new."""
    module = notebook.folder / "mymod.py"
    module.write_text("class A:\n    v = 'v1'\n")
    first = notebook.cell("import mymod; a = mymod.A(); print(a.v)")
    module.write_text("class A:\n    v = 'version two'\n")
    second = notebook.cell("import mymod\nprint(mymod.A.v, a.v)")
    assert first.of(0) == first.of(1) == ["v1"]
    assert second.of(0) == second.of(1) == ["v1 v1"]
    reloaded = notebook.cell("import importlib; importlib.reload(mymod); print(mymod.A.v)")
    assert reloaded.of(0) == reloaded.of(1) == ["version two"]


def test_ce16_autoreload_of_the_kernel_is_honoured(notebook):
    module = notebook.folder / "mymod2.py"
    module.write_text("class A:\n    v = 'v1'\n")
    notebook.run("%load_ext autoreload\n%autoreload 2")
    first = notebook.cell("import mymod2; a = mymod2.A(); print(a.v)")
    module.write_text("class A:\n    v = 'version two'\n")
    second = notebook.cell("import mymod2, pickle\nprint(mymod2.A.v, a.v)\npickle.dumps(a);")
    notebook.run("%autoreload 0")
    assert first.of(0) == first.of(1) == ["v1"]
    assert second.ok, second.text
    assert second.of(0) == second.of(1) == ["version two version two"]


def test_ce18_pasted_script(notebook):
    played = notebook.cell(
        "import argparse\n"
        "def main():\n"
        "    p = argparse.ArgumentParser(); p.add_argument('--epochs', type=int, default=3)\n"
        "    print('main', p.parse_args().epochs)\n"
        "if __name__ == '__main__':\n"
        "    main()"
    )
    assert played.ok
    assert played.of(0) == played.of(1) == ["main 3"]
    path = notebook.cell("print(__file__)")
    assert path.ok or "NameError" in path.report
    assert notebook.cell("print('on')").of(1) == ["on"]


def test_ce20_display_and_get_ipython(notebook):
    played = notebook.cell('from IPython.display import display, HTML\ndisplay(HTML("<b>bold</b>")); display({"a": 1})')
    assert played.ok
    assert any("<b>bold</b>" in html for html in played.data("text/html"))
    assert "{'a': 1}" in played.text
    shell = notebook.cell("ip = get_ipython()\nprint(type(ip).__name__)")
    assert shell.ok
    assert "Shell" in shell.of(0)[0]
