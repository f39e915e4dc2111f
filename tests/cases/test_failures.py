"""Cases about ranks that raise, die or run out of memory, and what is kept of a failed cell, on one kernel."""

from __future__ import annotations

import re

import pytest
from deadlines import BREAK_S

pytestmark = pytest.mark.shared

BARRIER = "import torch.distributed as dist; dist.barrier(); print('ok', rank)"


def order(text: str, *parts: str) -> list[int]:
    """Where each part is first said; fails where one is not."""
    places = [text.find(part) for part in parts]
    assert -1 not in places, f"missing {[p for p, at in zip(parts, places, strict=True) if at < 0]} in:\n{text}"
    return places


def goes_on(notebook, n: int) -> None:
    """The next cell meets on all ranks."""
    after = notebook.cell(BARRIER)
    assert after.ok, after.text
    for rank in range(n):
        assert after.of(rank)[-1] == f"ok {rank}"


# ---- a rank raises


def test_rf01_one_rank_raises_before_a_barrier(notebook):
    notebook.resize(3)
    pids = notebook.rank_pids()
    body = (
        "import torch.distributed as dist\n"
        "if dist.get_rank() == 1:\n"
        "    raise RuntimeError('bad shard 17')\n"
        "dist.barrier(); print('never')"
    )
    played = notebook.cell(body, timeout_s=BREAK_S)
    assert played.status == "error"
    assert "never" not in played.streams
    assert len(played.errors) == 1
    assert "rank 1: RuntimeError: bad shard 17" in played.report.splitlines()
    assert re.findall(r"^-+> +(\d+)", played.report, re.MULTILINE) == ["3"]
    cause, secondary = order(played.report, "bad shard 17", "stopped because rank 1 failed")
    assert cause < secondary
    assert "ranks 0,2" in played.report
    goes_on(notebook, 3)
    assert notebook.rank_pids() == pids


def test_rf07_secondary_errors_do_not_hide_the_first(notebook):
    notebook.resize(4)
    body = (
        "import torch, torch.distributed as dist\n"
        "r = dist.get_rank()\n"
        "dist.barrier()\n"
        "if r == 2: raise ValueError('root cause')\n"
        "dist.all_reduce(torch.ones(1))\n"
        "raise RuntimeError(f'later problem on {r}')"
    )
    played = notebook.cell(body, timeout_s=BREAK_S)
    assert played.status == "error"
    assert "later problem" not in played.report.replace("raise RuntimeError(f'later problem on {r}')", "")
    assert "ValueError: root cause" in played.report
    cause, secondary = order(played.report, "rank 2", "stopped because rank 2 failed")
    assert cause < secondary
    assert not any(noise in played.report for noise in ("Connection closed by peer", "Broken pipe"))
    goes_on(notebook, 4)


def test_rf11_exception_inside_a_dataloader_worker(notebook):
    notebook.resize(2)
    body = (
        "import torch.distributed as dist\n"
        "from torch.utils.data import DataLoader, Dataset\n"
        "class Rows(Dataset):\n"
        "    def __len__(self): return 32\n"
        "    def __getitem__(self, i):\n"
        "        if i == 13 and dist.get_rank() == 1: raise KeyError('row 13 is broken')\n"
        "        return i\n"
        "for batch in DataLoader(Rows(), batch_size=4, num_workers=2): pass\n"
        "dist.barrier(); print('done')"
    )
    played = notebook.cell(body, timeout_s=BREAK_S)
    assert played.status == "error"
    assert "done" not in played.streams
    assert "rank 1" in played.report
    assert "row 13 is broken" in played.report
    assert re.search(r"DataLoader worker process [01]", played.report)
    assert "in __getitem__" in played.report
    assert "stopped because rank 1 failed" in played.report
    goes_on(notebook, 2)


def test_endless_recursion_is_told_in_a_few_lines(notebook):
    notebook.resize(2)
    played = notebook.cell("def f(n): return g(n)\ndef g(n): return f(n + 1)\nf(0)")
    assert "RecursionError" in played.report
    assert "more frames at these lines" in played.report
    assert len(played.report.splitlines()) < 60


# ---- a rank ends


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("os._exit(7)", "rank 1 exited with code 7"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "rank 1 was killed by signal 9 (SIGKILL)"),
    ],
    ids=["os_exit", "sigkill"],
)
def test_rf03_rf04_a_rank_ends_without_a_word(notebook, end, said):
    notebook.resize(2)
    body = (
        "import os, signal, torch.distributed as dist\n"
        "print('step', 1)\n"
        f"if dist.get_rank() == 1: {end}\n"
        "dist.barrier(); print('never')"
    )
    played = notebook.cell(body, timeout_s=BREAK_S)
    assert played.status == "error"
    assert said in played.report
    assert (played.of(0)[0], played.of(1)[0]) == ("step 1", "step 1")
    assert "never" not in played.streams
    assert "stopped because rank 1" in played.report
    assert ("out-of-memory killer" in played.report) == ("SIGKILL" in end)
    goes_on(notebook, 2)


def test_rf10_rank_0_dies(notebook):
    notebook.resize(3)
    body = "import os, torch.distributed as dist\nif dist.get_rank() == 0: os._exit(1)\ndist.barrier()"
    played = notebook.cell(body, timeout_s=BREAK_S)
    assert played.status == "error"
    assert "rank 0 exited with code 1" in played.report
    assert not any(noise in played.report for noise in ("Connection closed by peer", "Broken pipe"))
    goes_on(notebook, 3)


def test_hg04_all_reduce_of_different_sizes(notebook):
    notebook.resize(2)
    body = (
        "import torch, torch.distributed as dist\n"
        "t = torch.ones(3 if dist.get_rank() == 0 else 5)\n"
        "dist.all_reduce(t); print(t.tolist())"
    )
    played = notebook.cell(body, timeout_s=BREAK_S)
    assert played.status == "error"
    assert "rank 0 was killed by signal 6 (SIGABRT)" in played.report.splitlines()
    assert re.search(r"^it was at Cell In\[\d+\], line 3$", played.report, re.MULTILINE)
    cause, secondary = order(played.report, "match expected size", "stopped because rank 0 failed: rank 1")
    assert cause < secondary
    assert not any(noise in played.report for noise in ("Connection reset", "Connection closed", "Broken pipe"))
    goes_on(notebook, 2)


def test_a_crash_is_traced_to_its_line(notebook):
    notebook.resize(2)
    body = "import ctypes\ndef crash():\n    ctypes.string_at(0)\nif rank == 1: crash()\ndist.barrier()"
    played = notebook.cell(body, timeout_s=BREAK_S)
    assert "rank 1 was killed by signal 11 (SIGSEGV)" in played.report.splitlines()
    assert re.search(r"^it was at Cell In\[\d+\], line 3, in crash$", played.report, re.MULTILINE)
    goes_on(notebook, 2)


# ---- memory


def test_me01_memory_summary_without_cuda(notebook):
    notebook.resize(2)
    if notebook.value("__import__('torch').cuda.is_available()") == "True":
        pytest.skip("needs a machine without a GPU")
    body = (
        "import torch\n"
        "print(torch.cuda.is_available(), torch.cuda.memory_allocated())\n"
        "print(torch.cuda.memory_summary())"
    )
    played = notebook.cell(body)
    assert played.of(0)[0] == played.of(1)[0] == "False 0"
    assert len(played.errors) == 1
    assert "ranks 0-1: KeyError: 'allocated_bytes.all.current'" in played.report.splitlines()
    assert "no CUDA device" in played.report


def test_me02_memory_snapshot_without_cuda(notebook):
    notebook.resize(2)
    if notebook.value("__import__('torch').cuda.is_available()") == "True":
        pytest.skip("needs a machine without a GPU")
    body = "import torch\ntorch.cuda.memory._record_memory_history(max_entries=1000)\nprint('recorded')"
    played = notebook.cell(body)
    assert played.status == "error"
    assert len(played.errors) == 1
    assert "_cuda_record_memory_history" in played.report
    assert "CUDA device" in played.report


def test_me05_a_failed_cell_keeps_no_tensor(notebook):
    notebook.resize(2)
    body = (
        "import torch, weakref\n"
        "probe = None\n"
        "def step():\n"
        "    global probe\n"
        "    big = torch.ones(1_000_000); probe = weakref.ref(big)\n"
        "    raise RuntimeError('CUDA out of memory. (pretended)')\n"
        "step()"
    )
    assert "pretended" in notebook.cell(body).report
    after = notebook.cell("import gc; gc.collect(); print('alive:', probe() is not None)")
    assert after.of(0) == after.of(1) == ["alive: False"]


def test_me06_out_of_memory_is_explained(notebook):
    notebook.resize(2)
    body = (
        "import torch, torch.distributed as dist\n"
        "if dist.get_rank() == 1:\n"
        "    raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total '\n"
        "                                 'capacity of 23.69 GiB of which 512.00 MiB is free.')\n"
        "dist.barrier()"
    )
    played = notebook.cell(body, timeout_s=BREAK_S)
    cause, secondary = order(played.report, "OutOfMemoryError", "stopped because rank 1 failed")
    assert cause < secondary
    assert all(word in played.report for word in ("this process", "smaller batch", "checkpointing", "fsdp()"))
    plain = notebook.cell("raise RuntimeError('memory of the dataset index is stale')")
    assert "memory of the dataset index is stale" in plain.report
    assert not any(word in plain.report for word in ("what helps", "batch", "checkpointing", "fsdp()"))


# ---- checkpoints


def test_ck02_checkpoint_of_a_wrapped_model(notebook):
    notebook.resize(2)
    body = (
        "import torch, torch.distributed as dist\n"
        "from torch.nn.parallel import DistributedDataParallel as DDP\n"
        "model = DDP(torch.nn.Linear(2, 2))\n"
        "if dist.get_rank() == 0: torch.save(model.state_dict(), 'ddp.pt')\n"
        "dist.barrier()\n"
        "torch.nn.Linear(2, 2).load_state_dict(torch.load('ddp.pt'))"
    )
    played = notebook.cell(body)
    assert played.status == "error"
    assert len(played.errors) == 1
    assert played.report.count("Missing key(s)") == 1
    assert "module.weight" in played.report
    assert "model.module.state_dict()" in played.report
