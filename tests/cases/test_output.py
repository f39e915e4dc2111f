"""Cases about what ranks print: bars, floods, odd bytes, C code, threads, children, logging, figures, HTML."""

from __future__ import annotations

import re
from pathlib import Path

import psutil
import pytest
from deadlines import CELL_S

pytestmark = pytest.mark.shared

FLOOD_S = 60.0  # what the case itself allows
MEBIBYTE = 2**20


def test_ou01_progress_bars_on_every_rank(notebook):
    played = notebook.cell(
        "import time\n"
        "from tqdm import tqdm\n"
        "from tqdm.auto import tqdm as auto\n"
        "for i in tqdm(range(300), desc='train'): time.sleep(0.005)\n"
        "for i in auto(range(50), desc='auto'): time.sleep(0.005)\n"
        "print('done')"
    )
    assert played.ok
    lines = played.text.splitlines()
    assert len(lines) < 100
    assert len(played.raw) < 50_000
    for line in lines:
        assert line.count("train:") <= 1, line
    for rank in (0, 1):
        mine = played.of(rank)
        assert "done" in mine
        for name in ("train", "auto"):
            bars = [line for line in mine if line.startswith(f"{name}:")]
            assert bars, played.text
            assert "100%" in bars[-1]


def test_ou02_flood(notebook):
    kernel = psutil.Process(notebook.pid)
    before = kernel.memory_info().rss
    played = notebook.cell("for i in range(200_000): print('line', i, '.' * 60)", timeout_s=FLOOD_S)
    assert played.ok
    assert kernel.memory_info().rss - before < 200 * MEBIBYTE
    omitted = re.search(r"([\d,]+) lines omitted", played.text)
    assert omitted
    shown = played.text.splitlines()
    assert len(shown) < 10_000
    for rank in (0, 1):
        assert any(line.startswith("line 199999 ") for line in played.of(rank))
    # the whole text of each rank is in a file of a folder that is named there
    folders = [Path(p) for p in re.findall(r"(/[^\s)]+)", played.text) if Path(p).is_dir()]
    assert folders
    logs = sorted(folders[0].glob("*0*")), sorted(folders[0].glob("*1*"))
    for mine in logs:
        whole = "".join(path.read_text() for path in mine if path.is_file())
        assert whole.count("\n") >= 200_000
        assert "line 100000 " in whole


def test_ou02_interrupt_in_a_flood(notebook):
    played = notebook.cell(
        "import itertools\nfor i in itertools.count(): print('line', i, '.' * 60)",
        actions=[(lambda p: "line 100 " in p.text, notebook.interrupt)],
        timeout_s=FLOOD_S,
    )
    assert played.status == "error"
    assert "KeyboardInterrupt" in played.report
    assert notebook.cell("print('on')").of(1) == ["on"]


def test_ou03_bytes_that_are_not_utf8(notebook):
    played = notebook.cell(
        "import os, sys\n"
        "print('before', flush=True)\n"
        "os.write(1, b'latin1: caf\\xe9 \\xff\\xfe\\x80\\n'); os.write(2, bytes(range(128, 256)) + b'\\n')\n"
        "sys.stdout.buffer.write(b'\\xc3\\n'); sys.stdout.flush()\n"
        "print('after')"
    )
    assert played.ok
    assert "UnicodeDecodeError" not in played.text
    for rank in (0, 1):
        mine = played.of(rank)
        assert "before" in mine and "after" in mine
        assert any(line.startswith("latin1: caf") and "\ufffd" in line for line in mine)


def test_ou04_colours_and_cursor_movement(notebook):
    played = notebook.cell(
        "print('\\x1b[31mred\\x1b[0m plain')\n"
        "print('\\x1b[32mgreen without reset')\n"
        "print('line A\\nline B\\x1b[1A\\x1b[2Kover A')\n"
        "print('\\x1b]0;my title\\x07 after-title \\x1b]8;;http://example.org\\x1b\\\\link\\x1b]8;;\\x1b\\\\')"
    )
    assert played.ok
    assert "\x1b" not in played.text  # only colours are left in the raw text, and front ends show those as colours
    assert "my title" not in played.text
    assert "example.org" not in played.text
    for rank in (0, 1):
        mine = played.of(rank)
        assert "red plain" in mine
        assert "green without reset" in mine
        assert any("over A" in line for line in mine)
        assert any("after-title" in line and "link" in line for line in mine)
    for line in played.raw.splitlines():
        if "\x1b[32m" in line:
            assert line.rstrip().endswith("\x1b[0m"), "a colour leaks into the next line"
        assert not line.startswith("\x1b[32m"), "a colour leaks into the label"


def test_ou05_output_that_python_does_not_see(notebook):
    played = notebook.cell(
        "import os, sys, ctypes, subprocess\n"
        "r = os.environ['RANK']; sys.stdout.flush()\n"
        "os.write(1, f'fd1 {r}\\n'.encode()); os.write(2, f'fd2 {r}\\n'.encode())\n"
        "ctypes.CDLL(None).printf(f'printf {r}\\n'.encode())\n"
        "os.system(f'echo system {r}')\n"
        "subprocess.run(['sh', '-c', f'echo child {r}; echo childerr {r} >&2'])"
    )
    assert played.ok
    for rank in (0, 1):
        wanted = {f"{what} {rank}" for what in ("fd1", "fd2", "printf", "system", "child", "childerr")}
        assert wanted <= set(played.of(rank))
        assert not wanted & set(played.of(1 - rank))


def test_ou06_prints_from_threads(notebook):
    played = notebook.cell(
        "import threading\n"
        "def say(k):\n"
        "    for i in range(10): print(f't{k}-{i}')\n"
        "ts = [threading.Thread(target=say, args=(k,)) for k in range(4)]\n"
        "[t.start() for t in ts]; [t.join() for t in ts];"
    )
    assert played.ok
    for rank in (0, 1):
        assert sorted(played.of(rank)) == sorted(f"t{k}-{i}" for k in range(4) for i in range(10))


def test_ou06_a_thread_that_outlives_its_cell(notebook):
    """What it prints afterwards is shown with the next cell, under its rank, not lost and not under the first."""
    notebook.cell(
        "import threading\ngo = threading.Event()\nt = threading.Thread(target=lambda: (go.wait(), print('late')))\nt.start()"
    )
    played = notebook.cell("go.set(); t.join(); print('next')")
    for rank in (0, 1):
        assert played.of(rank) == ["late", "next"]


def test_ou07_prints_from_dataloader_workers(notebook):
    played = notebook.cell(
        "from torch.utils.data import DataLoader, Dataset\n"
        "class Chatty(Dataset):\n"
        "    def __len__(self): return 8\n"
        "    def __getitem__(self, i): print('item', i); return i\n"
        "for method in ('fork', 'spawn'):\n"
        "    list(DataLoader(Chatty(), batch_size=2, num_workers=2, multiprocessing_context=method)); print('end', method)",
        timeout_s=2 * CELL_S,
    )
    assert played.ok, played.text
    for rank in (0, 1):
        mine = played.of(rank)
        assert sorted(line for line in mine if line.startswith("item")) == sorted(
            f"item {i}" for i in range(8) for _ in "12"
        )
        assert "end fork" in mine and "end spawn" in mine


def test_ou09_logging_across_cells(notebook):
    first = notebook.cell(
        "import logging, sys\n"
        "logging.basicConfig(level=logging.INFO, format='%(levelname)s %(message)s')\n"
        "h = logging.StreamHandler(sys.stdout); lg = logging.getLogger('mine'); lg.addHandler(h); lg.propagate = False\n"
        "lg.warning('cell one')"
    )
    second = notebook.cell(
        "logging.basicConfig(level=logging.DEBUG)\nlogging.info('root line'); lg.warning('cell two')"
    )
    assert first.ok and second.ok
    for rank in (0, 1):
        assert first.of(rank) == ["cell one"]
        assert sorted(second.of(rank)) == ["INFO root line", "cell two"]
    assert "closed file" not in second.text


def test_ou12_partial_lines_and_order(notebook):
    played = notebook.cell(
        "import sys, time, torch.distributed as dist\n"
        "print('part-one...', end='', flush=True); time.sleep(0.5); print('part-two')\n"
        "print('A'); print('E1', file=sys.stderr); print('B', end='')\n"
        "if dist.get_rank() == 1: raise ValueError('after B')"
    )
    assert played.status == "error"
    for rank in (0, 1):
        assert played.of(rank) == ["part-one...part-two", "A", "E1", "B"]
    # what was printed before the error stands before it, and the report begins on a line of its own
    whole = played.text
    assert whole.index("ValueError") > max(match.start() for match in re.finditer(r"\] B$", whole, re.MULTILINE))
    assert re.search(r"^.*\] B.*ValueError", whole, re.MULTILINE) is None


def test_ou14_figures(notebook):
    played = notebook.cell(
        "import matplotlib.pyplot as plt, torch.distributed as dist\n"
        "plt.plot([0, 1, 4]); plt.title(f'rank {dist.get_rank()}')\n"
        "plt.show(); print('shown')"
    )
    assert played.ok
    assert len(played.data("image/png")) == 2
    for rank in (0, 1):
        assert "shown" in played.of(rank)
        assert any(line == f"[{rank}]" or line.startswith(f"[{rank}] ") for line in played.text.splitlines())
    assert "connect to" not in played.text


def test_ou16_stdout_replaced(notebook):
    first = notebook.cell(
        "import contextlib, io, sys\n"
        "print('visible 1')\n"
        "with contextlib.redirect_stdout(io.StringIO()) as b: print('captured')\n"
        "print('visible 2', len(b.getvalue()))\n"
        "sys.stdout = io.StringIO(); sys.stdout.close()"
    )
    second = notebook.cell("print('cell two')")
    assert second.ok
    for rank in (0, 1):
        assert first.of(rank) == ["visible 1", "visible 2 9"]
        assert second.of(rank) == ["cell two"]
    assert "captured" not in first.streams


def test_ou18_text_that_looks_like_html(notebook):
    tricky = "<b>bold?</b> <img src=x onerror=alert(1)> <script>document.title='owned'</script> # head"
    played = notebook.cell(f'print("{tricky}")\nraise ValueError("<i>italic?</i> & </pre>")')
    assert played.status == "error"
    for rank in (0, 1):
        assert played.of(rank) == [tricky]
    assert "<i>italic?</i> & </pre>" in played.report
    # plain text and error outputs are escaped by every front end; nothing of it may have become HTML
    assert not [html for html in played.data("text/html") if "<b>bold?" in html or "<i>italic" in html]


def test_ou18_names_of_metrics_that_look_like_html(notebook):
    played = notebook.cell("for i in range(3): nbdist.log(**{'<b>loss</b>': 1.0}, step=i)")
    assert played.ok
    for kind in ("text/html", "image/svg+xml"):
        assert not [data for data in played.data(kind) if "<b>loss" in data]
