"""Cases about interrupts, kernels that are restarted, and ranks that wait for one that does not come, on one kernel."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from deadlines import CELL_S, GONE_S, wait_until
from player import Notebook, Played

pytestmark = pytest.mark.shared


@pytest.fixture(autouse=True)
def _early_notices(notebook: Notebook) -> Iterator[None]:
    """Tell of waiting ranks after half a second, not nine; no case may leave a cell behind."""
    _tell_early(notebook)
    yield
    assert notebook.cell("import torch.distributed as dist; dist.barrier()").ok


def _tell_early(notebook: Notebook) -> None:
    assert notebook.run("import nbdist; nbdist.cluster().waiting_s = 0.5").ok


def interrupted(notebook: Notebook, body: str, when: Callable[[Played], object], within_s: float) -> Played:
    """Press Stop when ``when(shown so far)`` is true; the kernel must be idle ``within_s`` later."""
    asked: list[float] = []

    def stop() -> None:
        asked.append(time.monotonic())
        notebook.interrupt()

    played = notebook.cell(body, actions=[(lambda shown: bool(when(shown)), stop)])
    assert played.status == "error", played.text
    assert time.monotonic() - asked[0] < within_s, played.text
    assert [e["ename"] for e in played.errors] == ["KeyboardInterrupt"]
    assert played.text.count("KeyboardInterrupt") == 1
    assert len(played.report.splitlines()) == 1
    return played


def children(pids: list[str], *command: str) -> list[psutil.Process]:
    """Processes below the ranks whose command line ends like that; all that are no ranks' own where none is named."""
    below = [child for pid in pids for child in psutil.Process(int(pid)).children(recursive=True)]
    return [p for p in below if not command or p.cmdline()[-len(command) :] == list(command)]


def said(shown: Played, *texts: str) -> bool:
    return all(text in shown.text for text in texts)


def gone(processes: list[psutil.Process]) -> bool:
    return not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)


# ---- interrupts


def test_in01_every_rank_sleeps(notebook):
    before = notebook.rank_pids()
    body = "import time\nfor i in range(1000):\n    if i == 1: print('once round')\n    time.sleep(0.2)"
    played = interrupted(notebook, body, lambda shown: shown.of(0) and shown.of(1), within_s=5)
    assert "all ranks stopped" in played.report
    after = notebook.cell("print('i =', i)")
    for rank in (0, 1):
        assert int(after.of(rank)[0].removeprefix("i = ")) >= 1
    assert notebook.rank_pids() == before


def test_in02_a_rank_waits_in_a_collective(notebook):
    """Nobody is killed: the wait is broken off, and the group and the variables are there for the next cell."""
    before = notebook.rank_pids()
    assert notebook.cell("kept = 7").ok
    body = "import torch.distributed as dist, time\nif dist.get_rank() == 0: dist.barrier()\nelse: time.sleep(10_000)"
    played = interrupted(notebook, body, lambda shown: "rank 0: waiting in barrier" in shown.text, within_s=15)
    assert "all ranks stopped" in played.report
    assert "killed" not in played.text
    after = notebook.cell("t = torch.ones(1); dist.all_reduce(t); print('fresh', dist.get_rank(), int(t), kept)")
    assert (after.of(0)[-1], after.of(1)[-1]) == ("fresh 0 2 7", "fresh 1 2 7")
    assert notebook.rank_pids() == before


def test_in03_dataloader_workers_are_alive(notebook):
    pids = notebook.rank_pids()
    loaders: list[psutil.Process] = []

    def begun(shown: Played) -> bool:
        loaders[:] = children(pids)
        return bool(shown.of(0) and shown.of(1))

    body = (
        "import torch, time\n"
        "from torch.utils.data import DataLoader, Dataset\n"
        "class Slow(Dataset):\n"
        "    def __len__(self): return 10_000\n"
        "    def __getitem__(self, i): time.sleep(0.05); return i\n"
        "for b in DataLoader(Slow(), batch_size=4, num_workers=2): print('batch')"
    )
    played = interrupted(notebook, body, begun, within_s=10)
    assert len(loaders) == 4
    assert not any(noise in played.text for noise in ("Process Spawn", "Process Fork", "Exception ignored"))
    wait_until(lambda: gone(loaders), GONE_S, "no loader's worker")
    assert notebook.rank_pids() == pids


def test_in06_a_rank_runs_a_program(notebook):
    pids = notebook.rank_pids()
    sleepers: list[psutil.Process] = []

    def begun(_: Played) -> bool:
        sleepers[:] = children(pids, "sleep", "9999")
        return len(sleepers) == 2

    interrupted(notebook, 'import subprocess\nsubprocess.run(["sleep", "9999"])', begun, within_s=10)
    wait_until(lambda: gone(sleepers), GONE_S, "no sleep 9999")


def test_in10_finally_has_time_to_finish(notebook):
    body = (
        "import time, torch.distributed as dist\n"
        "try:\n"
        "    print('begun'); time.sleep(1000)\n"
        "finally:\n"
        "    time.sleep(1.5); open(f'saved-{dist.get_rank()}', 'w').write('done')"
    )
    played = interrupted(notebook, body, lambda shown: shown.of(0) and shown.of(1), within_s=15)
    assert "all ranks stopped" in played.report
    assert [(notebook.folder / f"saved-{rank}").read_text() for rank in (0, 1)] == ["done", "done"]


def test_in07_kernel_is_restarted_while_a_cell_runs(notebook):
    pids = notebook.rank_pids()
    notebook.send(
        "import subprocess, time\n"
        "subprocess.Popen(['sleep', '9998']); dist.barrier(); open(f'past-{rank}', 'w').close(); time.sleep(10_000)"
    )
    wait_until(lambda: all((notebook.folder / f"past-{rank}").exists() for rank in (0, 1)), CELL_S, "past the barrier")
    old = notebook.processes()
    assert len([p for p in old if p.cmdline()[-1:] == ["9998"]]) == 2
    assert {int(pid) for pid in pids} < {p.pid for p in old}
    notebook.restart()
    wait_until(lambda: gone(old), GONE_S, "no process of the old kernel")
    played = notebook.cell('import torch.distributed as dist\ndist.barrier(); print("new", dist.get_rank())', "-n 2")
    assert played.ok, played.text
    assert (played.of(0), played.of(1)) == (["new 0"], ["new 1"])


# ---- waits that would not end


def test_hg01_ddp_with_uneven_numbers_of_batches(notebook):
    body = (
        "import torch, torch.distributed as dist\n"
        "from torch.nn.parallel import DistributedDataParallel as DDP\n"
        "m = DDP(torch.nn.Linear(4, 1)); opt = torch.optim.SGD(m.parameters(), lr=0.1)\n"
        "for i in range(3 if dist.get_rank() == 0 else 5):\n"
        "    loss = m(torch.ones(2, 4)).sum()\n"
        "    loss.backward(); opt.step(); opt.zero_grad()\n"
        "    print('batch', i)"
    )
    played = interrupted(
        notebook, body, lambda shown: said(shown, "waiting in DDP backward", "rank 0: finished"), within_s=15
    )
    where = r"^rank 1: waiting in DDP backward for \d+ s at Cell In\[\d+\], line 6: loss\.backward\(\)"
    assert re.search(where, played.text, re.MULTILINE)
    assert "\nrank 0: finished the cell\n" in played.text
    assert "stopped 1 of 2 ranks after optimizer step 3" in played.report
    assert "failed" not in played.text
    # the same model works on in both ranks, without being wrapped again
    again = notebook.cell("m(torch.ones(2, 4)).sum().backward(); opt.step(); print(m.module.bias.grad.item())")
    assert again.of(0)[-1] == again.of(1)[-1] == "2.0"
    joined = notebook.cell(
        "with m.join():\n"
        "    for i in range(3 if dist.get_rank() == 0 else 5):\n"
        "        m(torch.ones(2, 4)).sum().backward(); opt.step(); opt.zero_grad()\n"
        "print('joined')"
    )
    assert joined.ok, joined.text
    assert "joined" in joined.of(0) and "joined" in joined.of(1)


def test_hg07_a_rank_is_still_in_a_barrier_when_the_others_have_finished(notebook):
    told: list[int] = []

    def notice(shown: Played) -> bool:
        if not said(shown, "rank 1: waiting in barrier", "rank 0: finished"):
            return False
        if not told:
            notebook.send("dist.barrier(); open(f'clean-{rank}', 'w').close()")
        told.append(1)
        return len(told) > 10  # looked at ten times more: the cell behind must not reach rank 0 meanwhile

    body = "import torch.distributed as dist\ndist.barrier()\nif dist.get_rank() == 1: dist.barrier()"
    played = interrupted(notebook, body, notice, within_s=15)
    assert "\nrank 0: finished the cell\n" in "\n" + played.text
    assert re.search(r"^rank 1: waiting in barrier for \d+ s at Cell In\[\d+\], line 3: ", played.text, re.MULTILINE)
    assert "stopped 1 of 2 ranks" in played.report
    wait_until(lambda: all((notebook.folder / f"clean-{rank}").exists() for rank in (0, 1)), CELL_S, "the next cell")


def test_fs03_full_state_dict_on_rank_0_only(notebook):
    body = (
        "import torch, torch.distributed as dist\n"
        "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n"
        "m = FSDP(torch.nn.Linear(8, 8), device_id=torch.device('cpu'))\n"
        "if dist.get_rank() == 0:\n"
        "    torch.save(m.state_dict(), 'rank0.pt')\n"
        "print('end')"
    )
    played = interrupted(notebook, body, lambda shown: said(shown, "rank 0: waiting", "rank 1: finished"), within_s=15)
    where = (
        r"^rank 0: waiting in all_gather \(FSDP \w+\) for \d+ s at Cell In\[\d+\], line 5: torch\.save\(m\.state_dict"
    )
    assert re.search(where, played.text, re.MULTILINE)
    assert "\nrank 1: finished the cell\n" in played.text
    assert (played.of(0), played.of(1)) == ([], ["end"])
    # torch 2.13 itself fails here with cpu_offload=True, on CPU ranks
    right = notebook.cell(
        "from torch.distributed.checkpoint.state_dict import get_model_state_dict, StateDictOptions\n"
        "m = FSDP(torch.nn.Linear(8, 8), device_id=torch.device('cpu'))\n"
        "sd = get_model_state_dict(m, options=StateDictOptions(full_state_dict=True))\n"
        "if dist.get_rank() == 0: torch.save(sd, 'full.pt')\n"
        "print(len(sd))"
    )
    assert right.ok, right.text
    assert right.of(0)[-1] == "2" and right.of(1)[-1] in ("0", "2")
    assert loaded(notebook.folder / "full.pt") == {"weight": (8, 8), "bias": (8,)}


def loaded(path: Path) -> dict[str, tuple[int, ...]]:
    import torch

    return {name: tuple(tensor.shape) for name, tensor in torch.load(path).items()}


def test_hg02_a_collective_on_rank_0_only(notebook):
    notebook.resize(3)
    _tell_early(notebook)
    body = (
        "import torch, torch.distributed as dist\n"
        "if dist.get_rank() == 0:\n"
        "    dist.all_reduce(torch.ones(1))\n"
        "print('end', dist.get_rank())"
    )
    played = interrupted(
        notebook, body, lambda shown: said(shown, "waiting in all_reduce", "ranks 1-2: finished"), within_s=15
    )
    where = r"^rank 0: waiting in all_reduce for \d+ s at Cell In\[\d+\], line 3: dist\.all_reduce\(torch\.ones\(1\)\)$"
    assert re.search(where, played.text, re.MULTILINE)
    assert "\nranks 1-2: finished the cell\n" in played.text
    assert [played.of(rank) for rank in range(3)] == [[], ["end 1"], ["end 2"]]
    assert "stopped 1 of 3 ranks" in played.report


def test_hg05_a_rank_spins_in_python_while_the_others_wait(notebook):
    notebook.resize(3)
    _tell_early(notebook)
    before = notebook.rank_pids()
    body = (
        "import torch.distributed as dist\n"
        "ready = False\n"
        "if dist.get_rank() == 1:\n"
        "    while not ready: pass\n"
        "dist.barrier()"
    )
    played = interrupted(
        notebook, body, lambda shown: said(shown, "rank 1: running", "ranks 0,2: waiting"), within_s=15
    )
    assert re.search(r"^rank 1: running Cell In\[\d+\], line 4: while not ready: pass$", played.text, re.MULTILINE)
    where = r"^ranks 0,2: waiting in barrier for \d+ s at Cell In\[\d+\], line 5: dist\.barrier\(\)$"
    assert re.search(where, played.text, re.MULTILINE)
    assert "all ranks stopped" in played.report
    assert notebook.rank_pids() == before
