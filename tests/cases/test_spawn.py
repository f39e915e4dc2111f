"""Cases about starting ranks: what the kernel has done before, its environment, its folder, odd numbers."""

from __future__ import annotations

import socket

import psutil
import pytest
from deadlines import BREAK_S, GONE_S, START_S, wait_until

RENDEZVOUS = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "5",
    "MASTER_ADDR": "203.0.113.9",
    "MASTER_PORT": "1",
}


def rank_processes(notebook) -> list[psutil.Process]:
    """Processes below the fork server."""
    return [p for server in psutil.Process(notebook.pid).children() for p in server.children(recursive=True)]


def test_sp01_kernel_that_has_used_torch_and_threads(fresh):
    notebook = fresh()
    used = notebook.run(
        "import torch, threading\n"
        "dev = 'cuda' if torch.cuda.is_available() else 'cpu'\n"
        "warm = torch.ones(10, device=dev).sum()\n"
        "stay = threading.Event()\n"
        "threading.Thread(target=stay.wait, daemon=True).start()"
    )
    assert used.ok
    played = notebook.cell(
        "import torch, torch.distributed as dist\n"
        "t = torch.arange(10, dtype=torch.float32)\n"
        "print('ok', dist.get_rank(), float(t.sum()))",
        "-n 2",
        timeout_s=START_S,
    )
    assert played.ok
    assert played.of(0) == ["ok 0 45.0"]
    assert played.of(1) == ["ok 1 45.0"]
    assert not any(word in played.text for word in ("re-initialize", "bootstrapping", "fork"))
    assert notebook.value("float(warm)") == "10.0"


@pytest.mark.parametrize(("call", "name"), [("scale(2)", "scale"), ("twice(3)", "twice")])
def test_sp03_names_that_live_only_in_the_kernel(fresh, call, name):
    notebook = fresh()
    notebook.run(
        "k = 3\nscale = lambda v: v * k\n"
        "def make():\n    hidden = 2\n    def inner(v): return v * hidden\n    return inner\n"
        "twice = make()"
    )
    played = notebook.cell(f"print({call})", "-n 2")
    assert not played.ok
    assert len(played.errors) == 1
    assert played.report.count(f"ranks 0-1: NameError: name '{name}' is not defined") == 1
    assert played.report.count("print(") == 1  # one traceback, not one for each rank
    assert f"%distributed push {name}" in played.report
    assert "ickl" not in played.report


def test_sp04_rendezvous_variables_in_the_notebooks_environment(fresh):
    notebook = fresh(env=RENDEZVOUS)
    played = notebook.cell(
        "import os, torch.distributed as dist\n"
        "print(dist.get_rank(), dist.get_world_size(), os.environ['LOCAL_RANK'], os.environ['MASTER_ADDR'])",
        "-n 2",
        timeout_s=START_S,
    )
    assert played.ok
    assert [line.split()[:3] for line in (*played.of(0), *played.of(1))] == [["0", "2", "0"], ["1", "2", "1"]]
    assert RENDEZVOUS["MASTER_ADDR"] not in played.text
    notices = [line for line in played.text.splitlines() if "MASTER_ADDR" in line or "overrid" in line]
    assert len(notices) <= 1
    shown = notebook.run(f"import os; print({{v: os.environ[v] for v in {tuple(RENDEZVOUS)!r}}})")
    assert shown.text.strip() == str(RENDEZVOUS)


def test_sp05_default_port_is_taken(fresh):
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("0.0.0.0", 29500))
        taken.listen()
        notebook = fresh(env={"MASTER_PORT": "29500"})
        played = notebook.cell(
            "import torch.distributed as dist\ndist.barrier(); print('rank', dist.get_rank())", "-n 2"
        )
    assert played.ok
    assert (played.of(0), played.of(1)) == (["rank 0"], ["rank 1"])


def test_sp07_folder_with_spaces_accents_apostrophe_percent(fresh, tmp_path):
    folder = tmp_path / "Zoë's run 100% (v2)"
    folder.mkdir()
    (folder / "helper.py").write_text("VALUE = 41\n")
    (folder / "data file.txt").write_text("naïve ✓", encoding="utf-8")
    notebook = fresh(folder=folder)
    played = notebook.cell(
        "import os, helper\n"
        "print(os.path.basename(os.getcwd()), helper.VALUE, open('data file.txt', encoding='utf-8').read())",
        "-n 2",
    )
    assert played.ok
    for rank in (0, 1):
        assert played.of(rank) == ["Zoë's run 100% (v2) 41 naïve ✓"]
    stopped = notebook.cell(
        "import time\nprint('going', flush=True)\nfor i in range(600): time.sleep(0.1)",
        actions=[(lambda p: "going" in p.text, notebook.interrupt)],
        timeout_s=BREAK_S,
    )
    assert "KeyboardInterrupt" in stopped.report
    after = notebook.cell("print('on')")
    assert after.of(1) == ["on"], after.text


def test_sp08_a_file_called_torch_beside_the_notebook(fresh, tmp_path):
    (tmp_path / "torch.py").write_text("# my notes about torch\nx = 1\n")
    notebook = fresh()
    played = notebook.cell("import torch\nprint(torch.__version__)", "-n 2", timeout_s=BREAK_S)
    assert played.status != "late"
    assert str(tmp_path / "torch.py") in played.text
    assert "partially initialized" not in played.text


def test_sp10_odd_numbers_of_ranks(fresh):
    notebook = fresh()
    for number in ("0", "-2", "two"):
        played = notebook.cell("print('must not run')", f"-n {number}")
        assert not played.ok
        assert "must not run" not in played.text
        lines = [line for line in played.text.splitlines() if line.strip()]
        assert len(lines) == 1, played.text
        assert "-n" in lines[0] or "number of ranks" in lines[0]
        assert "1" in lines[0] or "whole number" in lines[0]
        assert not rank_processes(notebook)
    notebook.world_size = 1
    played = notebook.cell(
        "import torch.distributed as dist\ndist.barrier(); print('solo', dist.get_world_size())", "-n 1"
    )
    assert played.ok
    assert "solo 1" in played.text


def test_sp12_inside_a_slurm_allocation(fresh):
    notebook = fresh(
        env={
            "SLURM_JOB_ID": "4242",
            "SLURM_NTASKS": "4",
            "SLURM_PROCID": "0",
            "SLURM_LOCALID": "0",
            "SLURM_NODELIST": "node[17-18]",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_JOB_NAME": "bash",
        }
    )
    played = notebook.cell(
        "import torch.distributed as dist\ndist.barrier(); print(dist.get_rank(), 'of', dist.get_world_size())",
        "-n 2",
        timeout_s=START_S,
    )
    assert played.ok
    assert (played.of(0), played.of(1)) == (["0 of 2"], ["1 of 2"])
    assert "node17" not in played.text


def test_sp13_settings_made_in_the_kernel(fresh, tmp_path):
    (tmp_path / "extra").mkdir()
    (tmp_path / "extra" / "mylib.py").write_text("def hi(): return 'lib-ok'\n")
    notebook = fresh()
    notebook.run("import os, sys\nos.environ['FLAG'] = '1'; sys.path.append(os.path.abspath('extra'))")
    played = notebook.cell("import os, mylib\nprint(mylib.hi(), 'FLAG=' + os.environ.get('FLAG', '?'))", "-n 2")
    assert played.ok
    for rank in (0, 1):
        assert played.of(rank) == ["lib-ok FLAG=1"]


def test_sp15_interface_that_does_not_exist(fresh):
    notebook = fresh()
    notebook.run("import os; os.environ['GLOO_SOCKET_IFNAME'] = 'nosuch0'")
    played = notebook.cell("print('must not run')", "-n 2", timeout_s=START_S)
    assert played.status == "error"
    assert "GLOO_SOCKET_IFNAME" in played.text
    assert "nosuch0" in played.text
    assert played.streams.count("must not run") == 0
    assert "magics.py" not in played.report
    wait_until(lambda: not rank_processes(notebook), GONE_S, "no rank left after a failed start")
    notebook.run("del os.environ['GLOO_SOCKET_IFNAME']")
    played = notebook.cell(
        "import torch.distributed as dist\ndist.barrier(); print('recovered', dist.get_rank())", "-n 2"
    )
    assert played.ok
    assert (played.of(0), played.of(1)) == (["recovered 0"], ["recovered 1"])
