"""Cases about pasted DDP scripts, metrics, checkpoints and ranks that leave a cell in odd ways, on one kernel."""

from __future__ import annotations

import re

import pytest
from deadlines import BREAK_S, CELL_S, wait_until
from player import run_python

pytestmark = pytest.mark.shared


# ---- DDP


def test_dd05_init_process_group_again(notebook):
    first = notebook.cell('import torch.distributed as dist\ndist.init_process_group(backend="nccl")\nprint("trained")')
    assert first.ok, first.text
    for rank in (0, 1):
        assert first.of(rank).count("trained") == 1
        assert len(first.of(rank)) <= 2  # at most one notice
    if notebook.value("__import__('torch').cuda.is_available()") == "False":
        assert "gloo" in first.text
    second = notebook.cell('dist.init_process_group("gloo", init_method="env://"); print("trained")')
    assert second.ok
    assert second.of(0) == second.of(1) == ["trained"]


def test_dd06_destroy_process_group(notebook):
    first = notebook.cell(
        'import torch.distributed as dist\ndist.barrier(); dist.destroy_process_group(); print("bye")'
    )
    assert first.ok
    assert first.of(0) == first.of(1) == ["bye"]
    second = notebook.cell("import torch.distributed as dist\ndist.barrier(); print(dist.get_rank())")
    assert second.ok, second.text
    assert (second.of(0), second.of(1)) == (["0"], ["1"])


def test_dd12_training_cell_five_times(notebook):
    body = (
        "import gc, os, torch\n"
        "from torch.nn.parallel import DistributedDataParallel as DDP\n"
        "m = DDP(torch.nn.Sequential(*[torch.nn.Linear(1000, 1000) for _ in range(10)]))\n"
        "m(torch.ones(8, 1000)).sum().backward(); gc.collect()\n"
        "print(int(open('/proc/self/statm').read().split()[1]) * 4 // 1024, 'MB')\n"
        "m"
    )
    sizes: dict[int, list[int]] = {0: [], 1: []}
    for _ in range(5):
        played = notebook.cell(body)
        assert played.ok, played.text
        for rank in (0, 1):
            sizes[rank].append(
                int(next(re.match(r"(\d+) MB", line)[1] for line in played.of(rank) if line.endswith(" MB")))
            )
    notebook.cell("del m")
    for rank in (0, 1):
        assert sizes[rank][-1] <= 1.3 * sizes[rank][0], sizes


# ---- metrics


def test_wm02_loss_with_its_graph_is_logged(notebook):
    played = notebook.cell(
        "import gc, weakref, torch\n"
        "from nbdist import log\n"
        "w = torch.randn(50, 50, requires_grad=True); refs = []\n"
        "for s in range(20):\n"
        "    loss = (w @ w).pow(2).mean()\n"
        "    refs.append(weakref.ref(loss)); log(step=s, loss=loss); assert loss.requires_grad\n"
        "del loss; gc.collect()\n"
        "print('graphs alive', sum(r() is not None for r in refs))"
    )
    assert played.ok, played.text
    for rank in (0, 1):
        alive = next(line for line in played.of(rank) if line.startswith("graphs alive"))
        assert int(alive.split()[-1]) <= 1
    assert all(isinstance(value, float) for points in notebook.points().values() for _, value in points)


def test_wm08_only_rank_0_logs(fresh):
    notebook = fresh()
    notebook.start(3)
    played = notebook.cell(
        "import torch.distributed as dist\n"
        "from nbdist import log\n"
        "for s in range(20):\n"
        "    if dist.get_rank() == 0: log(step=s, loss=1 / (s + 1))\n"
        "dist.barrier(); print('end')"
    )
    assert played.ok
    assert "[all] end" in played.text
    assert not any(word in played.text for word in ("stalled", "failed", "waiting"))
    assert set(notebook.points()) == {0}
    assert len(notebook.points()[0]) == 20


def test_wm10_log_outside_a_distributed_cell(notebook):
    played = notebook.run("from nbdist import log\nlog(step=0, loss=1.0)")
    assert played.status == "error"
    assert "%%distributed" in played.report
    assert not any(name in played.report for name in ("AttributeError", "KeyError", "NoneType"))
    inside = notebook.cell("from nbdist import log\nlog(step=0, loss=2.0); print('ok')")
    assert inside.ok
    assert "ok" in inside.of(0) and "ok" in inside.of(1)


def test_wm12_short_cell_is_flushed(notebook):
    assert notebook.cell("from nbdist import log\nfor s in range(5): log(step=s, loss=float(s))").ok
    points = [(float(s), float(s)) for s in range(5)]
    assert notebook.points() == {0: points, 1: points}
    failed = notebook.cell("from nbdist import log\nfor s in range(3): log(step=s, loss=float(s))\n1 / 0")
    assert "ZeroDivisionError" in failed.report
    assert notebook.points() == {0: points[:3], 1: points[:3]}


# ---- checkpoints and paths


def test_ck03_class_of_a_cell_pickled(notebook):
    played = notebook.cell(
        "import torch, torch.distributed as dist\n"
        "class Net(torch.nn.Linear): pass\n"
        "if dist.get_rank() == 0: torch.save(Net(2, 2), 'obj.pt'); print(Net.__module__)"
    )
    assert played.of(0) == ["__main__"]
    loaded = notebook.run(
        "import torch\nclass Net(torch.nn.Linear): pass\nprint(type(torch.load('obj.pt', weights_only=False)).__name__)"
    )
    assert loaded.text.strip() == "Net"


def test_ck05_relative_paths(fresh, tmp_path):
    folder = tmp_path / "sub dir"
    folder.mkdir()
    (folder / "note.txt").write_text("hi")
    notebook = fresh(folder=folder)
    played = notebook.cell(
        "import os, torch, torch.distributed as dist\n"
        "print(open('note.txt').read())\n"
        "if dist.get_rank() == 0: os.makedirs('out', exist_ok=True); torch.save(torch.ones(1), 'out/ck.pt')",
        "-n 2",
    )
    assert played.ok
    assert played.of(0) == played.of(1) == ["hi"]
    assert notebook.value("__import__('os').path.exists('out/ck.pt')") == "True"
    assert notebook.value("open('note.txt').read()") == "hi"
    assert run_python("import os; print(os.path.exists('out/ck.pt'))", folder).strip() == "True"


# ---- leaving a cell


def test_rf02_sys_exit_in_its_forms(notebook):
    before = notebook.rank_pids()
    for body in ("z = 1\nimport sys; sys.exit()", "import sys; sys.exit(0)", "exit()", "quit()"):
        played = notebook.cell(body)
        assert played.ok, (body, played.text)
        assert not played.errors
    for body, word in (("import sys; sys.exit(3)", "3"), ('import sys; sys.exit("msg")', "msg")):
        played = notebook.cell(body)
        assert played.status == "error", body
        assert word in played.report
    last = notebook.cell("print('kept', z)")
    assert last.of(0) == last.of(1) == ["kept 1"]
    assert notebook.rank_pids() == before


def test_rf08_exceptions_that_cannot_be_pickled(notebook):
    played = notebook.cell(
        "import threading, torch.distributed as dist\n"
        "class Locked(Exception):\n"
        "    def __init__(self, a, b): super().__init__('needs two args'); self.lock = threading.Lock(); self.a = a\n"
        "class Sneaky(Exception):\n"
        "    def __reduce__(self): raise RuntimeError('no pickling')\n"
        "    def __str__(self): return 'Sneaky'\n"
        "raise (Locked(1, 2) if dist.get_rank() == 0 else Sneaky())",
        timeout_s=BREAK_S,
    )
    assert played.status == "error"
    for text in ("Locked", "needs two args", "Sneaky"):
        assert text in played.report
    assert played.report.count("raise (Locked(1, 2)") >= 1
    for wrong in ("PicklingError", "no pickling", "TypeError"):
        assert wrong not in played.report.replace("RuntimeError('no pickling')", "")


def test_rf13_what_is_kept_after_a_failure(fresh):
    notebook = fresh()
    notebook.start(2)
    assert notebook.cell('model = "model kept"').ok
    assert "all ranks alike" in notebook.cell('raise RuntimeError("all ranks alike")').report
    kept = notebook.cell("print(model)")
    assert kept.of(0) == kept.of(1) == ["model kept"]
    died = notebook.cell("import os, torch.distributed as dist\nif dist.get_rank() == 1: os._exit(1)", timeout_s=CELL_S)
    assert died.status == "error"
    assert "rank 1" in died.report and "1" in died.report
    # one rank lost is one rank replaced: the other keeps its state, and what is gone is said
    after = notebook.cell("print(model)", timeout_s=CELL_S)
    assert "model kept" in after.of(0)
    assert "name 'model' is not defined" in after.report
    assert "rank 1" in after.text and "gone" in after.text


def test_rf16_abort_at_exit_is_not_shown(fresh):
    notebook = fresh()
    notebook.start(2)
    body = "import torch, torch.distributed as dist\nfor _ in range(50): dist.all_reduce(torch.ones(10)); dist.all_gather_object([None, None], 'x')\nprint('fine')"
    assert notebook.cell(body).of(0) == ["fine"]
    restarted = notebook.run("%distributed restart")
    assert restarted.ok
    again = notebook.cell("print('fine again')")
    assert again.of(1) == ["fine again"]
    notebook.cell(body)
    stopped = notebook.run("%distributed stop")
    assert stopped.ok
    for played in (restarted, again, stopped):
        assert not any(word in played.text for word in ("terminate called", "SIGABRT", "signal 6", "-6"))
    wait_until(lambda: len(notebook.processes()) <= 1, BREAK_S, "only the fork server left")


# ---- devices


def test_nv19_visible_devices_changed_late(fresh):
    notebook = fresh()
    count = notebook.run(
        'import os, torch\nprint(torch.cuda.device_count())\nos.environ["CUDA_VISIBLE_DEVICES"] = "1"'
    ).text.strip()
    played = notebook.cell("import os, torch\nprint(os.environ.get('CUDA_VISIBLE_DEVICES'), torch.cuda.device_count())")
    assert played.ok
    expected = "1 1" if int(count) >= 2 else "1 0"
    notebook.world_size = 1 if int(count) >= 2 else 2
    assert expected in played.text
    assert not played.errors
