"""Loading and unloading the extension: what it brings into the user's shell, and that all of it goes again."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from console import Console, Shown
from deadlines import CELL_S, GONE_S, wait_until
from traces import session_processes

import nbdist
from nbdist.errors import NotRunningError
from nbdist.notebook import cluster as clusters


def state(console: Console) -> dict[str, Any]:
    """What an extension could have changed."""
    shell = console.shell
    return {
        "line": set(shell.magics_manager.magics["line"]),
        "cell": set(shell.magics_manager.magics["cell"]),
        "cleanup": list(shell.input_transformers_cleanup),
        "post": list(shell.input_transformers_post),
        "ast": list(shell.ast_transformers),
        "events": {name: list(callbacks) for name, callbacks in shell.events.callbacks.items()},
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "names": {name for name in shell.user_ns if not name.startswith("_")},
        "path": list(sys.path),
        "hooks": (sys.excepthook, sys.displayhook, sys.breakpointhook, sys.stdout, sys.stderr),
        "completers": {n: list(d.regexs) + list(d.strs) for n, d in shell.strdispatchers.items()},
        "custom": set(shell.custom_exceptions),
    }


def test_loading_twice_unloading_and_loading_again(bare):
    clusters.cool()  # what another test has left warm
    before, processes = state(bare), set(session_processes())
    assert bare.run("%load_ext nbdist").lines == []
    once = state(bare)
    assert once["line"] - before["line"] == once["cell"] - before["cell"] == {"distributed"}
    assert bare.run("%load_ext nbdist").lines == [
        "The nbdist extension is already loaded. To reload it, use:",
        "  %reload_ext nbdist",
    ]
    nbdist.load_ipython_extension(bare.shell)
    assert state(bare) == once
    assert bare.cell("print(rank)", "-n 2").ok
    assert len(set(session_processes()) - processes) == 3
    assert bare.run("%unload_ext nbdist").lines == []
    wait_until(lambda: set(session_processes()) <= processes, GONE_S, "no process of nbdist")
    assert state(bare) == before
    nbdist.unload_ipython_extension(bare.shell)
    assert "UsageError" in bare.run("%distributed status").text
    assert bare.run("%load_ext nbdist").ok
    assert bare.cell("print('again')", "-n 1").lines[-1] == "[0] again"


def usage_error(shown: Shown) -> str:
    """The one line of a usage error."""
    assert not shown.ok
    (line,) = shown.lines
    assert line.startswith("UsageError: ")
    return line.removeprefix("UsageError: ")


def test_nothing_is_started_by_a_bad_flag_or_asked_of_no_cluster(bare):
    bare.run("%load_ext nbdist")
    for flags in ("-n 0", "-r a", "--timeout -1", "--nonsense", "--backend mpi"):
        usage_error(bare.cell("pass", flags))
        assert bare.run("%distributed status").lines == ["no cluster is running"]
    for command in ("stop", "restart", "interrupt", "where", "output 0", "push x", "pull x", "history", "dashboard"):
        assert usage_error(bare.run(f"%distributed {command}")).startswith("no cluster is running: start one with")
    with pytest.raises(NotRunningError):
        nbdist.cluster()
    import torch

    if torch.cuda.device_count() < 99:
        assert "nccl" in usage_error(bare.cell("pass", "-n 99 --backend nccl"))
        assert bare.run("%distributed status").lines == ["no cluster is running"]


def test_the_kernel_imports_no_torch(tmp_path):
    code = (
        "import sys, numpy\n"
        "from IPython.core.interactiveshell import InteractiveShell\n"
        "from traitlets.config import Config\n"
        "config = Config(); config.HistoryManager.enabled = False\n"
        "shell = InteractiveShell.instance(config=config)\n"
        "shell.run_line_magic('load_ext', 'nbdist')\n"
        "assert not {'torch', 'matplotlib', 'pandas'} & set(sys.modules), 'after loading'\n"
        "shell.user_ns['a'] = numpy.zeros(400_000)\n"
        "assert shell.run_cell('%%distributed -n 2\\nloss = rank; a = 0').success\n"
        "assert shell.run_cell('%distributed push a').success\n"
        "assert shell.run_cell('%distributed pull a').success\n"
        "assert shell.run_cell('%%distributed\\nnbdist.log(loss=1.0, step=0)').success\n"
        "print('torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=CELL_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "False"


def test_nothing_is_written_beside_the_notebook(bare, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bare.run("%load_ext nbdist")
    assert bare.cell("nbdist.log(loss=1.0, step=0)", "-n 1").ok
    assert list(Path(tmp_path).iterdir()) == []
