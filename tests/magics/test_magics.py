"""The magics in an IPython shell: what is typed, what is shown, what is refused, what stays of the user's own."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from console import Console, Shown
from deadlines import CELL_S

from nbdist.errors import CellError, InputError
from nbdist.magics import parse_ranks

pytestmark = pytest.mark.shared


@pytest.fixture
def console(shared_console: Console) -> Iterator[Console]:
    """The shell with two ranks that all tests share; each must leave them usable."""
    shell = shared_console
    if "nbdist" not in shell.shell.extension_manager.loaded:
        assert shell.run("%load_ext nbdist").lines == []
        assert shell.run("%distributed start -n 2").ok
    yield shell
    assert shell.cell("print('usable')").lines == ["[all] usable"]


def refused(shown: Shown) -> str:
    """The one line of a usage error."""
    assert not shown.ok
    (line,) = shown.lines
    assert line.startswith("UsageError: ")
    return line.removeprefix("UsageError: ")


# ---- running


def test_a_cell_is_shown_with_labels_and_values(console):
    shown = console.cell("print('same'); print(rank)\nrank * 10")
    assert shown.ok
    assert shown.lines == ["[all] same", "[0] 0", "[0] 0", "[1] 1", "[1] 10"]
    assert shown.value is None
    assert console.cell("'equal'").lines == ["[all] 'equal'"]
    assert console.cell("rank;").lines == []
    assert console.cell("").lines == []


TRAINING = """
from torch.nn.parallel import DistributedDataParallel as DDP
model = DDP(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range({steps}):
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
del model, optimizer
"""


def test_profile_shows_a_table_and_writes_a_trace(console, tmp_path):
    console.cell(f"import os; os.chdir({str(tmp_path)!r})")
    shown = console.cell(TRAINING.format(steps=6), "--profile 2 --profile-ranks 1")
    assert shown.ok, shown.text
    (table,) = [d["text/html"] for d in shown.displays if "not hidden behind computation" in d.get("text/html", "")]
    assert "rank 1: 2 steps in" in table and "aten::" in table
    assert [p.name for p in (tmp_path / "profile").iterdir()] == ["rank1.json.gz"]


def test_profile_of_too_few_steps_says_so(console, tmp_path):
    console.cell(f"import os; os.chdir({str(tmp_path)!r})")
    shown = console.cell(TRAINING.format(steps=2), "--profile")
    assert shown.ok
    (line,) = [d["text/plain"] for d in shown.displays if "recorded" in d.get("text/plain", "")]
    assert line.endswith("nothing recorded: 2 optimizer steps were done, the first 3 are never recorded")
    assert "takes a number of optimizer steps" in refused(console.cell("pass", "--profile none"))


def test_displays_stand_where_they_were_made(console):
    shown = console.cell(
        "from IPython.display import HTML, display\n"
        "print('before'); display(HTML(f'<b>{rank // 2}</b>')); print('between')\n"
        "display(HTML('<i>only 1</i>')) if rank == 1 else None\nprint('behind')"
    )
    assert shown.ok
    assert [d.get("text/html") for d in shown.displays] == ["<b>0</b>", "<i>only 1</i>"]
    assert shown.lines == ["[all] before", "[all]", "[all] between", "[1]", "[all] behind"]


def test_figures_are_pictures_of_each_rank(console):
    shown = console.cell(
        "%matplotlib inline\nimport matplotlib.pyplot as plt\nplt.plot([rank, 1]); plt.show()\nprint('shown')"
    )
    assert shown.ok
    assert [sorted(d) for d in shown.displays] == [["image/png", "text/plain"]] * 2
    assert sum("shown" in line for line in shown.lines) in (1, 2)


def test_cells_are_numbered_as_the_notebook_numbers_them(console):
    number = console.shell.execution_count
    shown = console.cell("x = 1\nraise ValueError('here')")
    assert not shown.ok
    assert f"Cell In[{number}], line 2" in shown.text
    assert shown.text.count("ValueError: here") == 2  # the headline and the traceback's own last line
    assert "magics.py" not in shown.text and "site-packages" not in shown.text


def test_a_syntax_error_is_found_before_any_rank_runs(console):
    shown = console.cell("print('must not run')\ndef broken(:\n    pass")
    assert not shown.ok
    assert "must not run" not in shown.text.replace("print('must not run')", "")
    assert shown.text.count("SyntaxError") == 1
    assert "line 2" in shown.text


def test_ipython_syntax_works_in_cells(console):
    shown = console.cell("!echo shell\nfiles = %who_ls\nimport asyncio\nawait asyncio.sleep(0)\nprint(type(files))")
    assert shown.ok
    assert shown.lines == ["[all] shell", "[all] <class 'list'>"]


def test_some_ranks_a_name_and_no_time_limit_reached(console):
    assert console.cell("print('one')", "-r 1 --timeout 60 --name mine --watch '' --no-dashboard").lines == ["[1] one"]


def test_a_cell_whose_time_is_over(console):
    shown = console.cell("import time\nwhile True: time.sleep(0.01)", "--timeout 0.2")
    assert not shown.ok
    assert "the cell's time is over" in shown.text
    assert shown.text.count("KeyboardInterrupt") == 1
    assert "Traceback" not in shown.text


def test_a_name_of_the_notebook_gets_the_hint_to_push_it(console):
    console.run("only_here = 5")
    shown = console.cell("print(only_here)")
    assert "NameError: name 'only_here' is not defined" in shown.text
    assert shown.lines[-1] == (
        "hint: `only_here` exists in the notebook, not in the ranks: send it with `%distributed push only_here`"
    )
    assert console.run("%distributed push only_here").lines == []
    assert console.cell("print(only_here)").lines == ["[all] 5"]


def test_push_and_pull(console):
    console.run("import numpy\nsent = numpy.arange(5)")
    assert console.run("%distributed push sent -r 1").ok
    assert console.cell("print('sent' in globals())").lines == ["[0] False", "[1] True"]
    console.cell("both = [rank]; one = rank + 100")
    assert console.run("%distributed pull both").ok
    assert console.run("%distributed pull one -r 1").ok
    assert console.run("both, one").value == ({0: [0], 1: [1]}, 101)
    assert console.run("import nbdist; nbdist.cluster()[0]['one']").value == 100


def test_a_run_in_the_background_leaves_the_notebook_usable(console, tmp_path):
    gate = tmp_path / "gate"
    shown = console.cell(
        f"import os, time\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.01)\nprint('at last')",
        "--background handle",
    )
    assert shown.ok
    assert console.run("1 + 1").value == 2
    assert console.run("handle.done, handle.status").value == (False, "running")
    assert console.run("handle").value.run.name.startswith("run ")
    where = console.run("%distributed where").lines
    assert any("Cell In[" in line for line in where), where
    gate.touch()
    handle = console.shell.user_ns["handle"]
    assert handle.result(CELL_S) == {0: "ok", 1: "ok"}
    assert "at last" not in shown.text
    assert "at last" in console.run("%distributed output 1").text


def test_a_run_in_the_background_without_a_name_is_the_cells_value(console):
    handle = console.cell("1 / 0", "--background").value
    with pytest.raises(CellError, match="ZeroDivisionError"):
        handle.result(CELL_S)


def test_interrupting_the_run_in_the_background(console):
    console.cell("import time\nwhile True: time.sleep(0.01)", "--background handle")
    assert console.run("%distributed interrupt").ok
    with pytest.raises(KeyboardInterrupt):
        console.shell.user_ns["handle"].result(CELL_S)


def test_runs_with_metrics_can_be_looked_at_again(console, tmp_path):
    assert console.cell("for step in range(5): nbdist.log(loss=1.0 / (step + 1), step=step)", "--name first").ok
    run = console.run("%distributed history").value
    assert run.name == "first"
    assert run.history.last("loss") == {0: 0.2, 1: 0.2}
    file = tmp_path / "points.csv"
    assert console.run(f"%distributed history first --csv {file}").ok
    assert len(file.read_text().splitlines()) == 1 + 2 * 5
    assert console.run("%distributed dashboard first").ok


def test_status_and_output(console):
    console.cell("print('some'); print('text')")
    status = console.run("%distributed status").lines
    assert re.match(r"2 workers on (CPU|GPU), backend (gloo|nccl) \(.+\)$", status[0])
    assert status[1] == "2 ranks, idle"
    assert console.run("%distributed output 0 --tail 2").lines == ["some", "text"]


def test_restart_gives_fresh_ranks_and_can_replay(console):
    console.cell("kept = 1")
    assert console.cell("ready = 'set up'; print(ready)", "--setup").ok
    assert console.run("%distributed restart").lines == ["2 fresh ranks"]
    assert console.cell("print('kept' in globals(), 'ready' in globals())").lines == ["[all] False False"]
    assert console.run("%distributed restart --replay").lines == ["2 fresh ranks", "[all] set up"]
    assert console.cell("print(ready)").lines == ["[all] set up"]


# ---- help


@pytest.mark.parametrize("line", ["%%distributed -h\nraise SystemExit", "%%distributed --help\n"])
def test_help_of_a_cell(console, line):
    shown = console.run(line)
    assert shown.ok
    for flag in ("-n", "-r", "--backend", "--background", "--timeout", "--watch", "--no-dashboard"):
        assert flag in shown.text


@pytest.mark.parametrize("line", ["%distributed", "%distributed -h"])
def test_help_of_the_commands(console, line):
    shown = console.run(line)
    assert shown.ok
    for command in "start status stop restart interrupt where output doctor push pull history dashboard".split():
        assert re.search(rf"^ +{command}\b", shown.text, re.MULTILINE), command


def test_help_of_one_command_and_ipythons_own(console):
    assert "--tail" in console.run("%distributed output -h").text
    for question in ("%distributed?", "%%distributed?"):
        found = console.shell.object_inspect(question.rstrip("?"))
        assert found["found"] and "distributed" in found["docstring"]


# ---- refusals


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--nonsense", "unrecognized arguments: --nonsense"),
        ("-r 0-", "-r takes ranks such as 0, 0,2 or 1-3, not '0-'"),
        ("-r a", "-r takes ranks such as 0, 0,2 or 1-3, not 'a'"),
        ("-r 1-0", "-r takes ranks such as 0, 0,2 or 1-3, not '1-0'"),
        ("-r 0,,1", "-r takes ranks such as 0, 0,2 or 1-3, not '0,,1'"),
        ("-r __import__('os')", "-r takes ranks such as 0, 0,2 or 1-3, not"),
        ("-r 9", "ranks are numbers from 0 to 1, not 9"),
        ("-r", "expected one argument"),
        ("-n 0", "takes a number of ranks of at least 1, not 0"),
        ("-n -2", "-n"),
        ("-n two", "takes a number of ranks of at least 1, not 'two'"),
        ("-n 1.5", "takes a number of ranks of at least 1, not '1.5'"),
        ("-n 4", "2 ranks are running, not 4: `%distributed restart -n 4` changes that"),
        ("--backend mpi", "'nccl', 'gloo'"),
        ("--timeout 0", "takes a number of seconds above 0, not 0"),
        ("--timeout soon", "takes a number of seconds, not 'soon'"),
        ("--timeout nan", "takes a number of seconds above 0, not nan"),
        ("--name 'unclosed", "No closing quotation"),
        ("one two", "unrecognized arguments: two"),
    ],
)
def test_bad_flags_of_a_cell_are_one_line(console, flags, said):
    line = refused(console.cell("print('must not run')", flags))
    assert said in line


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("nonsense", "invalid choice: 'nonsense'"),
        ("start", "2 ranks are running already: `%distributed restart` gives fresh ones"),
        ("start -n 3", "2 ranks are running already"),
        ("restart -n two", "takes a number of ranks of at least 1, not 'two'"),
        ("restart -n 0", "takes a number of ranks of at least 1, not 0"),
        ("push nothing_here", "the notebook has no variable nothing_here"),
        ("push lock", "lock cannot be sent: TypeError: cannot pickle '_thread.lock' object"),
        ("push", "the following arguments are required: NAME"),
        ("push x -r 7", "the notebook has no variable x"),
        ("pull nothing_there", "there is no nothing_there on rank 0"),
        ("pull 1+1", "takes names of variables, not '1+1'"),
        ("pull rank -r 0-9", "ranks are numbers from 0 to 1"),
        ("output 2", "ranks are numbers from 0 to 1, not 2"),
        ("output one", "invalid int value: 'one'"),
        ("output", "the following arguments are required: rank"),
        ("history no_such_run", "there is no run 'no_such_run'"),
        ("dashboard no_such_run", "there is no run 'no_such_run'"),
        ("where --fully", "unrecognized arguments: --fully"),
    ],
)
def test_bad_commands_are_one_line(console, line, said):
    console.run("import threading; lock = threading.Lock()")
    console.shell.user_ns.pop("x", None)
    if "run" in said:
        console.cell("nbdist.log(loss=1.0, step=0)")
    assert said in refused(console.run(f"%distributed {line}"))


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("0", [0]),
        ("0,2", [0, 2]),
        ("1-3", [1, 2, 3]),
        ("0,2-3", [0, 2, 3]),
        ("3,1,1-2", [1, 2, 3]),
        (" 0 , 2 ", [0, 2]),
    ],
)
def test_lists_of_ranks(text, ranks):
    assert parse_ranks(text) == ranks


@pytest.mark.parametrize("text", ["", "-", "-1", "0-", "a", "1-0", "0;1", "0..2", "1e3", "²", "0-1-2", "0, ,1", "[0]"])
def test_what_is_no_list_of_ranks(text):
    with pytest.raises(InputError, match="-r takes ranks such as 0, 0,2 or 1-3"):
        parse_ranks(text)


# ---- the user's own cells


def test_the_notebooks_own_cells_are_left_alone(console):
    assert console.run("x = 1\nx + 1").value == 2
    assert console.run("%%capture caught\nprint('mine')").ok
    assert console.run("caught.stdout").value == "mine\n"
    with_error = console.run("1 / 0")
    assert "ZeroDivisionError" in with_error.text and "[0]" not in with_error.text
