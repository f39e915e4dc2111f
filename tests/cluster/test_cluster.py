"""The cluster from Python: what it runs, what it says of failures, what stays and what goes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from deadlines import BREAK_S, CELL_S, GONE_S, wait_until

import nbdist
from nbdist.errors import CellError, InputError, NotRunningError
from nbdist.notebook import cluster as clusters
from nbdist.notebook import merge
from nbdist.notebook.cluster import Cluster
from nbdist.wire import values

pytestmark = pytest.mark.shared


@pytest.fixture(scope="module", autouse=True)
def _cool() -> Iterator[None]:
    yield
    clusters.cool()


@pytest.fixture(scope="module")
def kept() -> Iterator[Cluster]:
    with nbdist.start(2, say=lambda _: None) as made:
        yield made


@pytest.fixture
def cluster(kept: Cluster) -> Iterator[Cluster]:
    """Two ranks that all tests share; each must leave them usable."""
    yield kept
    kept.run("pass", background=True, dashboard=False).result(BREAK_S)  # behind a cell that a test has left: fails
    assert [p.state for p in kept.members.ranks] == ["idle", "idle"]


@pytest.fixture
def fresh() -> Iterator[Callable[..., Cluster]]:
    """Start clusters that a test may harm."""
    made: list[Cluster] = []

    def start(n: int = 2, **kwargs: Any) -> Cluster:
        made.append(nbdist.start(n, **{"say": lambda _: None} | kwargs))
        return made[-1]

    yield start
    for one in made:
        one.stop()


def pids(cluster: Cluster) -> list[int]:
    return [p.pid for p in cluster.members.ranks]


def said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


# ---- start, cells, state


def test_the_start_says_what_was_chosen_and_why(fresh):
    lines: list[str] = []
    cluster = fresh(2, say=lines.append, backend="gloo")
    (line,) = lines
    assert re.match(r"2 workers on (CPU|GPU), backend gloo \(.+\)$", line)
    assert line == str(cluster.choice)
    assert repr(cluster) == f"<Cluster: {line}>"


def test_a_cell_runs_on_every_rank_and_is_told_with_labels(cluster, capsys, monkeypatch):
    monkeypatch.setattr(merge, "WINDOW_S", CELL_S)  # however long the other rank takes on a busy machine
    handle = cluster.run("print('same'); print('rank', rank, local_rank, world_size, dist.get_rank())")
    assert said(capsys) == ["[all] same", "[0] rank 0 0 2 0", "[1] rank 1 1 2 1"]
    assert (handle.done, handle.status) == (True, "ok")
    assert handle.result() == {0: "ok", 1: "ok"}
    assert re.fullmatch(r"<run \d+: ok, \d+\.\d s>", repr(handle))


def test_some_ranks_only(cluster, capsys):
    cluster.run("x = rank * 10")
    cluster.run("x += 1; print(x)", ranks=[1])
    assert said(capsys) == ["[1] 11"]
    assert cluster.pull("x") == {0: 0, 1: 11}
    assert cluster.pull("x", ranks=[1, 1]) == {1: 11}


@pytest.mark.parametrize("ranks", [[2], [-1], [], [0, 5]])
def test_ranks_that_are_not_there_are_refused(cluster, ranks):
    with pytest.raises(InputError, match="ranks are numbers from 0 to 1"):
        cluster.run("pass", ranks=ranks)
    with pytest.raises(InputError, match="ranks are numbers from 0 to 1"):
        cluster.pull("rank", ranks=ranks)


def test_variables_stay_and_main_is_fresh(cluster):
    cluster.run("import __main__\nclass Kept:\n    value = rank\nkept = Kept()\ncount = 1")
    cluster.run("count += 1\nassert kept.value == rank and __main__.kept is kept and __name__ == '__main__'")
    cluster.run("assert not hasattr(__main__, '__file__')")
    assert cluster.pull("count") == {0: 2, 1: 2}


# ---- variables


def test_push_and_pull_small_and_large(cluster):
    for size in (10, 100_000, 3_000_000):
        sent = {"t": torch.arange(size).float(), "a": np.arange(size), "d": {"x": [1, (2, None)]}}
        cluster.push(sent)
        cluster.run("t += rank; a += rank")
        for rank in range(2):
            assert torch.equal(cluster[rank]["t"], sent["t"] + rank)
            np.testing.assert_array_equal(cluster[rank]["a"], sent["a"] + rank)
        found = cluster.pull("(t, a, d)")
        assert found[1][2] == sent["d"]
        found[0][0].add_(1)
        assert torch.equal(cluster[0]["t"], sent["t"])
    cluster.run("del t, a, d")


def test_one_rank_as_a_mapping(cluster):
    cluster[1]["name"] = "one"
    cluster[0]["name"] = torch.zeros(400_000)
    cluster.run("if rank == 0: name += 1")
    assert cluster[1]["name"] == "one"
    assert cluster[0]["name"].sum() == 400_000
    assert cluster[1]["len(name) + rank"] == 4


def test_modules_and_code_travel(cluster):
    names: dict[str, Any] = {"__name__": "__main__", "torch": torch}
    exec(
        "class Net(torch.nn.Linear):\n    def forward(self, x): return super().forward(x) * 2\ndef twice(v): return 2 * v",
        names,
    )
    cluster.push(net=names["Net"](3, 1), twice=names["twice"])
    cluster.run("out = net(torch.ones(2, 3)).shape, twice(rank)")
    assert cluster.pull("out") == {0: ((2, 1), 0), 1: ((2, 1), 2)}


def test_many_small_tensors_travel(cluster):
    state = {f"layer{i}": torch.full((4,), float(i)) for i in range(3000)}
    cluster.push(state=state)
    found = cluster[1]["state"]
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


def test_nothing_of_a_transfer_stays_open(cluster):
    def open_here() -> int:
        return len(os.listdir("/proc/self/fd"))

    def open_there() -> list[int]:
        return [len(os.listdir(f"/proc/{pid}/fd")) for pid in pids(cluster)]

    cluster.push(big=torch.zeros(1_000_000))
    cluster.pull("big")
    cluster.run("del big")
    before = open_here(), open_there()
    for _ in range(5):
        cluster.push(big=torch.zeros(1_000_000))
        cluster.pull("big")
    cluster.run("del big; import gc; gc.collect()")
    wait_until(lambda: (open_here(), open_there()) == before, GONE_S, "the same descriptors as before")


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("no_such_name", "there is no no_such_name on rank 0"),
        ("1 +", "'1 +' is no variable or expression"),
        ("x = 1", "'x = 1' is no variable or expression"),
        ("1 / 0", "rank 0 could not send 1 / 0: ZeroDivisionError: division by zero"),
        ("(i for i in [])", "rank 0 could not send (i for i in []): TypeError: cannot pickle 'generator' object"),
    ],
)
def test_what_cannot_be_pulled_is_one_line(cluster, name, line):
    with pytest.raises(InputError) as refused:
        cluster.pull(name)
    assert str(refused.value) == line


def test_what_cannot_be_pushed_is_one_line(cluster):
    with pytest.raises(InputError, match=r"^lock cannot be sent: TypeError: cannot pickle '_thread.lock' object$"):
        cluster.push(lock=threading.Lock())
    with pytest.raises(InputError, match="'a b' is no name a variable can have"):
        cluster.push({"a b": 1})
    with pytest.raises(InputError, match=r"rank 0 could not take strange: ModuleNotFoundError"):
        cluster.push(strange=_of_a_module_that_ranks_do_not_have())
    with pytest.raises(InputError, match="there is no lock on rank 0"):
        cluster.pull("lock")


def _of_a_module_that_ranks_do_not_have() -> object:
    import types

    module = types.ModuleType("only_here")
    exec("class Strange: pass", module.__dict__)
    sys.modules["only_here"] = module
    return module.__dict__["Strange"]()


def test_a_value_that_cannot_be_read_here_is_one_line(cluster, tmp_path):
    (tmp_path / "only_there.py").write_text("class Strange: pass")
    cluster.run(f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import only_there; strange = only_there.Strange()")
    with pytest.raises(InputError, match=r"strange of rank 0 cannot be read here: ModuleNotFoundError.*only_there"):
        cluster.pull("strange")
    cluster.run("sys.path.pop(0)")


# ---- failures


def test_a_failure_says_which_rank_what_and_where(cluster):
    with pytest.raises(CellError) as failed:
        cluster.run("def half(x):\n    return x / 0\n\nif rank == 1:\n    half(3)", cell=17)
    error = failed.value
    assert str(error) == "rank 1: ZeroDivisionError: division by zero"
    (failure,) = error.failures
    assert error.cause is failure
    assert (failure.rank, failure.ename, failure.evalue, failure.secondary) == (
        1,
        "ZeroDivisionError",
        "division by zero",
        False,
    )
    report = re.sub(r"\x1b\[[\d;]*m", "", "\n".join(error.report))
    assert "rank 1: ZeroDivisionError: division by zero" in report
    assert "Cell In[17], line 5" in report and "Cell In[17], line 2" in report
    assert "return x / 0" in report
    assert "nbdist" not in report and "site-packages" not in report
    assert error._render_traceback_() == list(error.report)


def test_equal_failures_are_one_and_different_ones_are_told(cluster):
    with pytest.raises(CellError, match="ranks 0-1: ValueError: same"):
        cluster.run("raise ValueError('same')")
    with pytest.raises(CellError) as failed:
        cluster.run("import time\nif rank == 0: time.sleep(0.05)\nraise (ValueError, KeyError)[rank](f'mine {rank}')")
    assert [(f.rank, f.ename) for f in failed.value.failures] == [(1, "KeyError"), (0, "ValueError")]
    report = "\n".join(failed.value.report)
    assert "mine 0" in report and "mine 1" in report


def test_the_ranks_that_waited_for_the_failed_one_are_secondary(cluster, capsys):
    cluster.run("kept = rank")
    with pytest.raises(CellError) as failed:
        cluster.run("if rank == 1: raise RuntimeError('the cause')\ndist.barrier()")
    error = failed.value
    assert (error.cause.rank, error.cause.evalue) == (1, "the cause")
    assert [(f.rank, f.secondary) for f in error.failures] == [(1, False), (0, True)]
    assert "stopped because rank 1 failed: rank 0" in "\n".join(error.report)
    cluster.run("t = torch.ones(1); dist.all_reduce(t); print(int(t), kept)")
    assert said(capsys)[-2:] == ["[0] 2 0", "[1] 2 1"]


@pytest.mark.parametrize(
    ("code", "ename", "evalue"),
    [
        ("raise type('Odd', (Exception,), {'__str__': lambda s: 1 / 0})()", "Odd", "<Odd whose __str__ failed>"),
        ("raise ValueError('lone \\ud800')", "ValueError", "lone ?"),
        ("raise ValueError('x' * 50_000_000)", "ValueError", "x" * 10_000 + "... (50,000,000 characters)"),
        ("raise ValueError('line\\n' * 1_000_000)", "ValueError", None),
        ("import sys; sys.exit(3)", "SystemExit", "exit code 3"),
        ("def f(): f()\nf()", "RecursionError", None),
        ("raise BaseExceptionGroup('g', [KeyboardInterrupt()])", "BaseExceptionGroup", None),
        ("raise StopIteration", "StopIteration", ""),
        ("raise GeneratorExit", "GeneratorExit", ""),
        ("assert False", "AssertionError", ""),
    ],
    ids=lambda v: v[:30] if isinstance(v, str) else None,
)
def test_odd_failures_come_through(cluster, code, ename, evalue):
    with pytest.raises(CellError) as failed:
        cluster.run(code)
    (first, second) = failed.value.failures
    assert (first.ename, second.ename) == (ename, ename)
    assert evalue is None or first.evalue == evalue
    assert sum(map(len, failed.value.report)) < 200_000


def test_displays_that_cannot_be_sent_are_told_and_harm_nothing(cluster, capsys):
    cluster.run(
        "from IPython.display import publish_display_data\n"
        "endless = {}; endless['again'] = endless\n"
        "publish_display_data({'text/plain': 'odd', 'application/x': endless})\n"
        "publish_display_data({'text/plain': 'kept', 'application/x': object(), 'a/b': {1, 2}})\n"
        "publish_display_data({'text/html': 'x' * (70 * 2**20)})\n"
        "print('behind')"
    )
    text = capsys.readouterr().out
    assert "cannot be written as JSON" in text
    assert re.search(r"rank 0: display_data has 73,\d+,\d+ bytes, more than the 67,108,864 allowed", text)
    assert "[all] behind" in text


# ---- time


def test_a_run_in_the_background(cluster, capsys):
    handle = cluster.run("import time\nwhile not globals().get('go'): time.sleep(0.01)", background=True, ranks=[0])
    assert (handle.done, handle.status) == (False, "running")
    with pytest.raises(TimeoutError, match=r"run \d+ still runs after 0.01 s"):
        handle.result(0.01)
    assert cluster.where()[0].startswith("rank 0: running Cell In[")
    handle.interrupt()
    with pytest.raises(KeyboardInterrupt):
        handle.result(BREAK_S)
    assert handle.status == "interrupted"
    failing = cluster.run("1 / 0", background=True)
    with pytest.raises(CellError, match="ZeroDivisionError"):
        failing.result(CELL_S)
    assert failing.status == "error"


def test_a_cell_waits_for_the_run_in_the_background_and_says_so(cluster, capsys, tmp_path):
    gate = tmp_path / "gate"
    cluster.run(
        f"import os, time\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.01)\nprint('first')", background=True
    )
    threading.Timer(0.3, gate.touch).start()
    cluster.run("print('second')")
    lines = said(capsys)
    assert re.match(r"waiting for run \d+, which runs in the background", lines[0])
    assert lines[-1] == "[all] second"
    assert not any("first" in line for line in lines)  # it goes into the run's own display
    assert "first" in cluster.output(0)


def test_a_cell_whose_time_is_over_is_interrupted(cluster, capsys):
    cluster.run("kept = rank")
    with pytest.raises(KeyboardInterrupt):
        cluster.run("import time\ntry:\n    while True: time.sleep(0.01)\nfinally: print('tidy')", timeout_s=0.3)
    lines = said(capsys)
    assert "the cell's time is over: interrupting it" in lines
    assert "[all] tidy" in lines
    assert cluster.pull("kept") == {0: 0, 1: 1}


def test_an_interrupt_of_the_notebook_stops_the_ranks(cluster):
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        cluster.run("import time\nwhile True: time.sleep(0.01)")
    timer.join()


# ---- the dead


def test_a_rank_that_dies_is_told_replaced_and_the_others_keep_their_state(fresh, capsys):
    cluster = fresh()
    cluster.run("kept = rank + 10")
    before = pids(cluster)
    with pytest.raises(CellError) as failed:
        cluster.run("import os, sys\nif rank == 1:\n    print('last words'); os.kill(os.getpid(), 9)\ndist.barrier()")
    error = failed.value
    assert str(error) == "rank 1 was killed by signal 9 (SIGKILL)"
    report = "\n".join(error.report)
    assert "last words" in report and "out-of-memory" in report
    with pytest.raises(InputError, match=r"rank 1 has ended: a cell on all ranks replaces it; -r 0 reaches the others"):
        cluster.run("pass", ranks=[1])
    cluster.run("print(kept)", ranks=[0])
    assert said(capsys)[-1] == "[0] 10"
    cluster.run("print(dist.get_world_size(), 'kept' in globals())")
    lines = said(capsys)
    assert lines[0] == "rank 1 was killed by signal 9 (SIGKILL) and was started anew: its variables are gone"
    assert lines[-2:] == ["[0] 2 True", "[1] 2 False"]
    assert pids(cluster)[0] == before[0] and pids(cluster)[1] != before[1]


def test_all_ranks_die(fresh, capsys):
    cluster = fresh()
    with pytest.raises(CellError, match="ranks 0-1 exited with code 7"):
        cluster.run("import os; os._exit(7)")
    cluster.run("print('on')")
    assert said(capsys)[-1] == "[all] on"


def test_a_rank_that_dies_between_cells(fresh, capsys):
    cluster = fresh()
    os.kill(pids(cluster)[0], signal.SIGKILL)
    wait_until(lambda: not cluster.members.ranks[0].alive, BREAK_S)
    assert cluster.where() == ["1 of 2 ranks, idle"]
    with pytest.raises(NotRunningError, match="rank 0 has ended"):
        cluster.pull("rank")
    cluster.run("t = torch.ones(1); dist.all_reduce(t); print(int(t))")
    assert said(capsys)[-1] == "[all] 2"


# ---- restart and stop


def test_restart_gives_fresh_ranks_of_the_same_fork_server(fresh):
    cluster = fresh()
    cluster.run("kept = 1")
    before, server = pids(cluster), cluster.members.server_pid
    assert cluster.can_restart()
    cluster.restart()
    assert not set(pids(cluster)) & set(before)
    assert cluster.members.server_pid == server
    with pytest.raises(InputError, match="there is no kept on rank 0"):
        cluster.pull("kept")
    cluster.run("dist.barrier()")


def test_restart_in_the_midst_of_a_run(fresh):
    cluster = fresh()
    cluster.run("while True: pass", background=True)
    cluster.restart()
    cluster.run("dist.barrier()")


def test_nothing_stays_of_a_stopped_cluster(fresh):
    cluster = fresh()
    threads = threading.active_count()
    cluster.run("while True: pass", background=True)
    processes, folder = [psutil.Process(p) for p in pids(cluster)], cluster.members._folder
    cluster.stop()
    cluster.stop()
    assert not cluster.alive
    assert repr(cluster).endswith(", stopped>")
    wait_until(lambda: not any(p.is_running() for p in processes), GONE_S, "no rank")
    assert not folder.exists()
    assert threading.active_count() == threads - 1
    for use in (lambda: cluster.run("pass"), lambda: cluster.pull("x"), lambda: cluster.push(x=1), cluster.where):
        with pytest.raises(NotRunningError, match="the cluster was stopped: start another"):
            use()


def test_two_clusters_side_by_side_and_a_changed_environment(cluster, fresh, monkeypatch):
    cluster.run("kept = rank")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    other = fresh(1)
    other.run("kept = torch.get_num_threads()")
    assert other.pull("kept") == {0: 2}
    assert cluster.pull("kept") == {0: 0, 1: 1}  # its own fork server lives on
    other.stop()
    cluster.run("dist.barrier()")


def test_more_ranks_than_cores(fresh, capsys):
    fresh(6).run("t = torch.ones(1); dist.all_reduce(t); print(int(t))")
    assert said(capsys) == ["[all] 6"]


# ---- the network

TRAIN = """
import time
from torch.nn.parallel import DistributedDataParallel as DDP
model = DDP(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
steps, done = 0, torch.zeros(1)
while not done:  # all ranks see it in the same step
    done += os.path.exists(gate)
    dist.all_reduce(done)
    optimizer.zero_grad(); model(torch.randn(4, 8)).sum().backward(); optimizer.step()
    steps += 1
"""


def test_nothing_listens_beyond_loopback_while_ranks_train(cluster, tmp_path):
    gate = tmp_path / "gate"
    cluster.push(gate=str(gate))
    cluster.run("import os")
    handle = cluster.run(TRAIN, background=True, dashboard=False)
    try:
        server = psutil.Process(cluster.members.server_pid)
        processes = [psutil.Process(), server, *server.children(recursive=True)]
        wait_until(lambda: handle.run.history.last("steps") or cluster.where()[0].count("line"), CELL_S)

        def connections() -> list[Any]:
            return [c for p in processes for c in p.net_connections("inet")]

        wait_until(connections, CELL_S, "gloo's connections")
        for connection in connections():
            for address in filter(None, (connection.laddr, connection.raddr)):
                assert address.ip in ("127.0.0.1", "::1"), connection
        sockets = [c.laddr for p in processes for c in p.net_connections("unix") if c.laddr]
        assert all(str(cluster.members._folder) in path for path in sockets if "nbdist" in path)
    finally:
        gate.touch()
    assert handle.result(CELL_S) == {0: "ok", 1: "ok"}


def test_a_group_given_up_for_peers_that_failed_too_is_renewed(cluster):
    """Rank 0 is told to free its peer, which is still at work and then fails without any collective."""
    with pytest.raises(CellError):
        cluster.run("import time\nif rank == 1: time.sleep(0.8)\nraise ValueError(rank)")
    cluster.run("t = torch.ones(1); dist.all_reduce(t)")
    assert cluster.pull("t.item()") == {0: 2.0, 1: 2.0}


WRAPS = {
    "DDP": "from torch.nn.parallel import DistributedDataParallel\nmodel = DistributedDataParallel(model)",
    "FSDP2": "from torch.distributed.fsdp import fully_shard\nmodel = fully_shard(model)",
    None: "",
}


@pytest.mark.parametrize("strategy", WRAPS)
def test_how_a_runs_model_is_spread_is_seen(cluster, strategy):
    handle = cluster.run(
        f"model = torch.nn.Linear(8, 8)\n{WRAPS[strategy]}\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.01)\n"
        "loss = model(torch.ones(4, 8)).square().mean(); loss.backward(); optimizer.step()\n"
        "del model, optimizer",
        dashboard=False,
    )
    assert handle.run.history.names() == ["loss"]
    assert handle.run.strategy == strategy


# ---- two notebooks at the same moment

NOTEBOOK = """
import sys
import nbdist
from nbdist.notebook import cluster as clusters
clusters.warm()
clusters._server.wait_warm()
print("warm", flush=True)
for line in sys.stdin:
    with nbdist.start(2, say=lambda _: None) as cluster:
        cluster.run("t = torch.tensor([float(rank + 1)]); dist.all_reduce(t)")
        print("sum", [float(t) for t in cluster.pull("t").values()], flush=True)
"""


@pytest.mark.parametrize("rounds", [8, pytest.param(50, marks=pytest.mark.full)])
def test_two_notebooks_that_start_at_the_same_moment(rounds):
    notebooks = [
        subprocess.Popen([sys.executable, "-c", NOTEBOOK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        for notebook in notebooks:
            assert notebook.stdout.readline() == "warm\n"
        for _ in range(rounds):
            for notebook in notebooks:
                notebook.stdin.write("go\n")
                notebook.stdin.flush()
            assert [notebook.stdout.readline() for notebook in notebooks] == ["sum [3.0, 3.0]\n"] * 2
    finally:
        for notebook in notebooks:
            notebook.stdin.close()
        codes = [notebook.wait(GONE_S) for notebook in notebooks]
        for notebook in notebooks:
            notebook.stdout.close()
    assert codes == [0, 0]


# ---- training

EQUAL = """
import copy
import torch.nn.functional as F
torch.manual_seed(0)
plain = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3)).double()
x, y = torch.randn(32, 6).double(), torch.randint(3, (32,))
model = WRAP(copy.deepcopy(plain))
losses, expected = [], []
for net, inputs, targets, kept in ((model, x.chunk(world_size)[rank], y.chunk(world_size)[rank], losses), (plain, x, y, expected)):
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    for _ in range(6):
        loss = F.cross_entropy(net(inputs), targets)
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        kept.append(loss.item())
"""


@pytest.mark.parametrize("wrap", ["nbdist.ddp(NET)", "nbdist.fsdp(NET)"])
def test_two_ranks_train_as_one_process_on_the_whole_batch(cluster, wrap):
    cluster.run(EQUAL.replace("WRAP(copy.deepcopy(plain))", wrap.replace("NET", "copy.deepcopy(plain)")))
    losses, expected = cluster.pull("losses"), cluster[0]["expected"]
    mean = [sum(pair) / 2 for pair in zip(*losses.values(), strict=True)]
    assert mean == pytest.approx(expected, rel=1e-9)
    assert expected[-1] < expected[0]


def test_memfds_have_a_name_only_in_proc():
    path = values.to_memfd([memoryview(b"x" * 100)])
    try:
        assert path == f"/proc/{os.getpid()}/fd/{path.rpartition('/')[2]}"
        assert not [n for n in os.listdir("/dev/shm") if "nbdist" in n]
        assert Path(path).stat().st_uid == os.getuid()
    finally:
        values.close_memfd(path)
