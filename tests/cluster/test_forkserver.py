"""The rules of the fork server: what it never does before a fork, and that everything below it ends with the notebook."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import traces
from deadlines import GONE_S, START_S, wait_until

import nbdist
from nbdist.errors import CellError, StartError
from nbdist.notebook import cluster as clusters
from nbdist.notebook.cluster import Cluster
from nbdist.notebook.launch import ForkServer


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    """One for what only looks at it."""
    made = ForkServer()
    yield made
    made.close()


@pytest.fixture(scope="module", autouse=True)
def _cool() -> Iterator[None]:
    yield
    clusters.cool()


@pytest.fixture
def start() -> Iterator[Callable[..., Cluster]]:
    """Start clusters, and stop them after the test; the fork server stays."""
    made: list[Cluster] = []

    def start(n: int = 2, **kwargs: Any) -> Cluster:
        made.append(nbdist.start(n, **{"say": lambda _: None} | kwargs))
        return made[-1]

    yield start
    for cluster in made:
        cluster.stop()


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def gone(*pids: int) -> None:
    wait_until(lambda: not any(alive(p) for p in pids), GONE_S, f"{pids} gone")


def all_imported(server: ForkServer) -> None:
    """Wait until it has also imported what it imports while nobody asks; matplotlib comes last."""
    server.wait_warm()
    maps = Path(f"/proc/{server.process.pid}/maps")
    wait_until(lambda: "matplotlib" in maps.read_text(), START_S, "the later imports")


# ---- what it never does


def test_it_has_one_thread_whenever_it_forks(server):
    server.wait_warm()
    assert psutil.Process(server.process.pid).num_threads() == 1
    all_imported(server)
    assert psutil.Process(server.process.pid).num_threads() == 1
    assert server._ask({"do": "describe"})["threads"] == 1


def test_it_holds_nothing_that_a_fork_must_not_inherit(server):
    all_imported(server)
    open_files = [os.readlink(entry.path) for entry in os.scandir(f"/proc/{server.process.pid}/fd")]
    # No epoll or eventfd (asyncio, zmq), no database (IPython's history), no device (CUDA), no other socket (a store).
    kinds = sorted(re.sub(r"\d+", "", name) for name in open_files)
    assert kinds == [*["/dev/null"] * 3, "anon_inode:[pidfd]", *["pipe:[]"] * 2, "socket:[]"]
    assert psutil.Process(server.process.pid).net_connections("inet") == []


def test_devices_are_counted_in_a_process_thrown_away(server):
    seen = server.count_devices()
    assert set(seen) <= {"count", "cuda", "torch", "error"}
    import torch

    assert (seen["count"], seen["cuda"]) == (torch.cuda.device_count(), torch.version.cuda)
    assert psutil.Process(server.process.pid).children() == []
    assert not any("nvidia" in os.readlink(e.path) for e in os.scandir(f"/proc/{server.process.pid}/fd"))


def test_a_forked_rank_computes_with_several_threads(start):
    start().run(
        textwrap.dedent(
            """
            torch.set_num_threads(3)
            a = torch.randn(1200, 1200, requires_grad=True)
            (a @ a).relu().sum().backward()
            net = torch.nn.Conv2d(8, 16, 3)
            net(torch.randn(8, 8, 64, 64)).sum().backward()
            from torch.utils.data import DataLoader
            assert len(list(DataLoader(range(64), batch_size=8, num_workers=2))) == 8
            """
        )
    )


def test_ranks_start_with_their_own_random_numbers(start):
    cluster = start()
    cluster.run("import random, numpy\ndrawn = random.random(), numpy.random.rand()")
    (one, other) = cluster.pull("drawn").values()
    assert one[0] != other[0] and one[1] != other[1]


# ---- its end, and that of all below it

CELL = """
import os, subprocess, sys, time
from torch.utils.data import DataLoader
loader = iter(DataLoader(range(10_000), num_workers=1, persistent_workers=True))
next(loader)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
os.system("setsid sleep 1000 & nohup sleep 1000 >/dev/null 2>&1 &")
shared = torch.zeros(10).share_memory_()
"""
HOST = """
import json, os, sys, time
import nbdist
from nbdist.notebook import cluster as clusters
stage, cell = sys.argv[1:]
if "inherited" in stage:
    clusters.warm()
    if os.fork() == 0:
        print("child", os.getpid(), flush=True)
        time.sleep(1000)
        os._exit(0)
if "importing" in stage:
    clusters.warm()
elif "warm" in stage:
    clusters.warm()
    clusters._server.wait_warm()
else:
    cluster = nbdist.start(2, say=lambda _: None)
    cluster.run(cell)
    if "busy" in stage:
        cluster.run("import time\\nif rank == 1: dist.barrier()\\nwhile True: pass", background=True, dashboard=False)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.case("IN08")
@pytest.mark.parametrize("stage", ["importing", "warm", "idle", "busy, descriptors inherited by a child"])
def test_nothing_outlives_a_notebook_that_is_killed(stage, tmp_path, monkeypatch):
    runtime = Path(os.environ["XDG_RUNTIME_DIR"])
    before = set(traces.session_processes())
    folders = set(runtime.iterdir())
    shared = set(os.listdir("/dev/shm"))
    host = subprocess.Popen(
        [sys.executable, "-c", HOST, stage, CELL], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    heirs = []
    try:
        while (line := host.stdout.readline()) != "ready\n":
            assert line, "the notebook ended"
            heirs += [int(line.split()[1])] if line.startswith("child ") else []
        if stage.startswith(("idle", "busy")):  # per rank a loader's worker, one Popen, two of the shell
            wait_until(lambda: len(set(traces.session_processes()) - before) >= 2 + 2 * (1 + 4), what="all processes")
            assert set(runtime.iterdir()) > folders
        host.kill()
        host.wait()
        wait_until(lambda: set(traces.session_processes()) - before == set(heirs), GONE_S, "all processes gone")
        wait_until(lambda: set(runtime.iterdir()) == folders, GONE_S, "the cluster's folder gone")
        assert not [n for n in set(os.listdir("/dev/shm")) - shared if n.startswith(("torch", "nbdist", "gloo"))]
    finally:
        host.kill()
        host.wait()
        host.stdin.close()
        host.stdout.close()
        for pid in heirs:
            os.kill(pid, signal.SIGKILL)
        gone(*heirs)


def test_what_ranks_left_in_sessions_of_their_own_ends_with_the_cluster(start):
    cluster = start()
    cluster.run(CELL.replace("import os", "import os, psutil"))
    server = psutil.Process(cluster.members.server_pid)
    assert len(server.children(recursive=True)) >= 2 * (1 + 4)
    cluster.stop()
    wait_until(lambda: server.children(recursive=True) == [], GONE_S, "all below the fork server gone")
    assert server.is_running()


def test_a_rank_that_ends_takes_its_session_along_and_no_other(start):
    cluster = start()
    cluster.run("import subprocess\nchild = subprocess.Popen(['sleep', '1000']); child_pid = child.pid")
    pids = cluster.pull("child_pid")
    with pytest.raises(CellError, match="rank 1 exited with code 3"):
        cluster.run("import os\nif rank == 1: os._exit(3)")
    gone(pids[1])
    assert alive(pids[0])


def test_closing_it_while_it_imports_does_not_wait_for_the_imports():
    server = ForkServer()
    server.close()
    assert server.process.returncode == 0  # it left by itself


def test_closing_it_ends_its_ranks(start):
    cluster = start()
    pids = [p.pid for p in cluster.members.ranks]
    clusters.cool()
    gone(*pids)


# ---- when it cannot be used any more


def said_by(start: Callable[..., Cluster]) -> str:
    lines: list[str] = []
    start(1, say=lines.append).stop()
    return lines[0]


def test_another_environment_replaces_it_and_says_so(start, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    start(1).stop()
    first = clusters._server
    monkeypatch.setenv("UNRELATED", "1")
    assert "anew" not in said_by(start)
    assert clusters._server is first
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setenv("TORCH_HOME", "/nowhere")
    line = said_by(start)
    assert line.endswith("; the fork server was started anew: OMP_NUM_THREADS, TORCH_HOME changed")
    assert clusters._server is not first
    gone(first.process.pid)


def test_the_environment_ranks_see_is_that_of_the_moment(start, monkeypatch):
    start(1).stop()
    monkeypatch.setenv("UNRELATED", "a b=ü\n\udcff")
    monkeypatch.setenv("RANK", "7")
    cluster = start(1)
    cluster.run("import os\nfound = dict(os.environ), os.environb[b'UNRELATED'], torch.get_num_threads()")
    env, raw, _ = cluster[0]["found"]
    assert raw == os.environb[b"UNRELATED"]
    assert (env["RANK"], env["WORLD_SIZE"], env["MASTER_ADDR"]) == ("0", "1", "127.0.0.1")


def test_a_path_that_leads_to_another_torch_makes_it_outdated(server, tmp_path, monkeypatch):
    server.wait_warm()
    assert server.outdated() is None
    (tmp_path / "elsewhere" / "torch").mkdir(parents=True)
    (tmp_path / "elsewhere" / "torch" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "elsewhere")
    assert server.outdated() == "sys.path leads to another torch"
    monkeypatch.undo()
    assert server.outdated() is None


def test_a_torch_beside_the_notebook_is_not_taken_for_the_library(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("raise RuntimeError('not me')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", str(tmp_path), *sys.path])
    server = ForkServer()
    try:
        assert "torch.py" not in server.wait_warm()["file"]
    finally:
        server.close()


def test_a_torch_that_cannot_be_imported_is_told_with_its_own_words(tmp_path, monkeypatch):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libcudart.so.99: cannot open')")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    server = ForkServer()
    try:
        with pytest.raises(StartError, match=r"torch cannot be imported in the workers: ImportError: libcudart.so.99"):
            server.count_devices()
    finally:
        server.close()


def test_a_setting_that_a_later_import_refuses_ends_nothing(monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "no such backend")
    server = ForkServer()
    try:
        server.wait_warm()
        maps = Path(f"/proc/{server.process.pid}/maps")
        wait_until(lambda: "matplotlib" in maps.read_text() or server.outdated(), START_S)
        assert server._ask({"do": "describe"})["threads"] == 1
    finally:
        server.close()


def test_ranks_live_on_when_it_is_killed_and_their_end_is_still_seen(start):
    cluster = start()
    cluster.run("x = rank + 1; import subprocess\nchild = subprocess.Popen(['sleep', '1000']); child_pid = child.pid")
    children = cluster.pull("child_pid").values()
    os.kill(cluster.members.server_pid, signal.SIGKILL)
    gone(cluster.members.server_pid)
    cluster.run("x += 1; dist.barrier()")
    assert cluster.pull("x") == {0: 2, 1: 3}
    with pytest.raises(CellError, match="rank 1"):
        cluster.run("import os\nif rank == 1: os._exit(3)\ndist.barrier()")
    cluster.run("x += 1", ranks=[0])
    assert cluster[0]["x"] == 3
    with pytest.raises(StartError, match=r"%distributed restart"):
        cluster.run("x")
    cluster.stop()
    gone(*(p.pid for p in cluster.members.ranks), *children)
    line = said_by(start)
    assert line.endswith("; the fork server was started anew: it had ended")


def test_no_process_can_be_forked(start, monkeypatch):
    cluster = start(1)
    cluster.stop()

    def refuse(request: dict[str, Any], fds: Any = ()) -> dict[str, Any]:
        return (
            {"error": "Resource temporarily unavailable (errno 11)"} if request["do"] == "fork" else ask(request, fds)
        )

    ask = clusters._server._ask
    monkeypatch.setattr(clusters._server, "_ask", refuse)
    with pytest.raises(
        StartError, match=r"a worker could not be forked: Resource temporarily unavailable \(errno 11\)"
    ):
        start(2)
    monkeypatch.undo()
    start(1).run("pass")


def test_a_folder_that_is_gone_is_told(start, tmp_path, monkeypatch):
    start(1).stop()
    folder = tmp_path / "removed"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    with pytest.raises(StartError, match=r"the notebook's folder was removed"):
        start(1)


def test_a_question_that_is_not_answered_in_time_ends_it():
    server = ForkServer()
    os.kill(server.process.pid, signal.SIGSTOP)
    with server._lock, pytest.raises(StartError, match="did not answer within 0 s"):
        server._receive(0.05)
    server.process.wait(GONE_S)
    assert server.outdated() == "it had ended"
    with pytest.raises(StartError, match="the fork server ended"):
        server.count_devices()
    server.close()


def test_what_is_no_request_is_refused(server):
    server.wait_warm()
    assert server._ask({"do": "dance"}) == {"error": "unknown request 'dance'"}
    assert server._ask({"do": "describe"})["threads"] == 1


def test_a_pair_of_sockets_is_all_that_connects_them(server):
    """No name in the file system, nothing that another process could dial."""
    server.wait_warm()
    end = server._control
    assert (end.family, end.type) == (socket.AF_UNIX, socket.SOCK_SEQPACKET)
    assert end.getsockname() == "" and end.getpeername() == ""
    assert not os.get_inheritable(end.fileno())
