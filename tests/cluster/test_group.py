"""The process group's life: joining, what pasted scripts do, breaking off, renewing."""

from __future__ import annotations

import os
import threading

import pytest
import torch
import torch.distributed as dist
from forked import Rank, expect, run_ranks


def _sum(value: float = 1.0) -> float:
    x = torch.tensor([value])
    dist.all_reduce(x)
    return x.item()


def test_ranks_join_and_reduce() -> None:
    assert run_ranks(2, lambda me: _sum(me.rank + 1)) == [3.0, 3.0]


def test_a_missing_interface_is_named_at_once() -> None:
    def body(me: Rank) -> str:
        os.environ["GLOO_SOCKET_IFNAME"] = "nosuch0"
        with pytest.raises(Exception, match="GLOO_SOCKET_IFNAME=nosuch0") as caught:
            me.group.join(0)
        return type(caught.value).__name__

    assert run_ranks(2, body, join=False) == ["StartError", "StartError"]


@pytest.mark.parametrize(
    "call",
    [
        'dist.init_process_group(backend="nccl")',
        'dist.init_process_group("gloo", init_method="env://")',
        'dist.init_process_group("gloo", init_method="tcp://127.0.0.1:29500", rank=RANK, world_size=2)',
        "dist.init_process_group()",
        "dist.init_process_group(timeout=datetime.timedelta(seconds=77 + calls)); calls += 1",
        'dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=77))',
        'os.environ["MASTER_ADDR"] = "localhost"; os.environ["MASTER_PORT"] = "1"; dist.init_process_group()',
        'dist.init_process_group("cpu:gloo")',
        "dist.destroy_process_group(); dist.init_process_group(rank=RANK, world_size=2)",
    ],
)
def test_a_script_may_init_again_and_again(call: str) -> None:
    code = f"import os, datetime, torch, torch.distributed as dist\n{call}\nx = torch.ones(1); dist.all_reduce(x)"

    def body(me: Rank) -> list[float]:
        me.namespace.update(RANK=me.rank, calls=0)
        sums = []
        for _ in range(3):
            error = me.cell(code)
            assert error is None, repr(error)
            sums.append(me.namespace["x"].item())
        return [sums, me.notices, me.group.state]

    (sums, notices, state), (other_sums, other_notices, other_state) = run_ranks(2, body)
    assert sums == other_sums == [2.0] * 3
    assert state == other_state
    assert len(notices) == (3 if "nccl" in call else 0) and other_notices == []
    assert all("gloo" in n for n in notices)


def test_destroying_destroys_and_the_next_generation_is_a_group_again() -> None:
    def body(me: Rank) -> list:
        error = me.cell("import torch.distributed as dist\ndist.barrier(); dist.destroy_process_group()")
        gone = (error, dist.is_initialized(), me.group.broken, me.group.given_up)
        me.group.renew(1, me.namespace, attach=True)
        return [gone, _sum(), me.group.broken]

    assert run_ranks(2, body) == [[(None, False, True, False), 2.0, False]] * 2


@pytest.mark.parametrize(("arguments", "said"), [("world_size=4", "-n 4"), ("rank=7, world_size=2", "rank=7")])
def test_other_sizes_are_refused_in_one_line(arguments: str, said: str) -> None:
    def body(me: Rank) -> str:
        return str(me.cell(f'import torch.distributed as dist\ndist.init_process_group("gloo", {arguments})'))

    for text in run_ranks(2, body):
        assert said in text and "\n" not in text


def test_mp_spawn_calls_the_function_once_in_each_rank() -> None:
    code = """
import os, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch.multiprocessing.spawn import spawn
calls = []
def train(rank, world_size, more):
    os.environ["MASTER_PORT"] = "29500"
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    calls.append((rank, more)); dist.barrier(); dist.destroy_process_group()
if __name__ == "__main__":
    mp.spawn(train, args=(2, "a"), nprocs=2, join=True)
    context = spawn(train, args=(2, "b"), nprocs=2, join=False)
    joined = context.join()
"""

    def body(me: Rank) -> list:
        error = me.cell(code)
        assert error is None, repr(error)
        return [me.namespace["calls"], me.namespace["joined"], len(me.notices)]

    assert run_ranks(2, body) == [[[(0, "a"), (0, "b")], True, 1], [[(1, "a"), (1, "b")], True, 0]]


COLLECTIVES = {
    "all_reduce": "dist.all_reduce(torch.ones(4))",
    "barrier": "dist.barrier()",
    "broadcast": "dist.broadcast(torch.ones(4), src=1)",
    "all_gather": "dist.all_gather([torch.zeros(2), torch.zeros(2)], torch.ones(2))",
    "reduce_scatter": "dist.reduce_scatter(torch.zeros(1), [torch.ones(1), torch.ones(1)])",
    "recv": "dist.recv(torch.ones(1), src=1)",
    "all_gather_object": "dist.all_gather_object([None, None], 1)",
    "monitored_barrier": "dist.monitored_barrier()",
    "wait": "work = dist.all_reduce(torch.ones(4), async_op=True)\nwork.wait()",
    "new_group": "dist.new_group([0, 1])",
}


@pytest.mark.parametrize("operation", COLLECTIVES)
def test_a_blocked_collective_is_named_and_broken_off(operation: str) -> None:
    """Rank 0 waits for rank 1, which does something else and stays alive."""
    code = f"import torch, torch.distributed as dist\n{COLLECTIVES[operation]}"

    def body(me: Rank) -> list:
        error = None
        if me.rank == 0:
            error = me.cell(code)
            assert isinstance(error, RuntimeError), repr(error)
        else:
            me.wait_for("go")
        me.group.renew(1, me.namespace, attach=True)
        return [_sum(), me.group.broken]

    def drive(links: list) -> None:
        while True:
            links[0].send(("waiting",))
            found = expect(links[0], "waiting")
            if found is not None and found[0] == operation:
                break
        links[0].send(("give_up", "rank 1 failed", 0))
        links[1].send(("go",))

    assert run_ranks(2, body, drive) == [[2.0, False]] * 2


MODULES = {
    "DDP backward": "model(x).sum().backward()",
    "FSDP forward": "sharded(x)",
    "FSDP backward": "sharded(x).sum().backward()",
}


@pytest.mark.parametrize("operation", MODULES)
def test_a_wait_in_a_wrapped_module_is_named_and_broken_off(operation: str) -> None:
    setup = """
import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.distributed.fsdp import fully_shard
model = DDP(torch.nn.Linear(4, 2))
sharded = fully_shard(torch.nn.Sequential(fully_shard(torch.nn.Linear(4, 4)), fully_shard(torch.nn.Linear(4, 2))))
x = torch.ones(2, 4)
"""

    def body(me: Rank) -> float:
        error = me.cell(setup)
        assert error is None, repr(error)
        if me.rank == 0:
            error = me.cell(MODULES[operation])
            assert isinstance(error, RuntimeError), repr(error)
        else:
            if operation == "FSDP backward":
                assert me.cell("sharded(x)") is None
            me.wait_for("go")
        attached, lost = me.group.renew(1, me.namespace, attach=True)
        assert (attached, lost) == (["model", "sharded"], [])
        error = me.cell("sharded(x).sum().backward(); model(x).sum().backward()")
        assert error is None, repr(error)
        return _sum()

    def drive(links: list) -> None:
        since = []
        while len(since) < 2:
            links[0].send(("waiting",))
            found = expect(links[0], "waiting")
            if found is not None and operation in found[0]:
                since.append(found[1])
        assert since[0] <= since[1]
        links[0].send(("give_up", "rank 1 failed", 0))
        links[1].send(("go",))

    assert run_ranks(2, body, drive) == [2.0] * 2


def test_a_rank_that_computes_waits_in_nothing() -> None:
    code = """
import torch
parameter = torch.ones(300, 300, requires_grad=True)
while not stop.is_set():
    y = parameter
    for _ in range(20): y = y @ parameter
    y.sum().backward()
"""

    def body(me: Rank) -> None:
        me.namespace["stop"] = threading.Event()
        threading.Thread(target=lambda: (me.wait_for("enough"), me.namespace["stop"].set())).start()
        error = me.cell(code)
        assert error is None, repr(error)

    def drive(links: list) -> None:
        for _ in range(200):
            links[0].send(("waiting",))
            assert expect(links[0], "waiting") is None
        links[0].send(("enough",))

    run_ranks(1, body, drive)


def test_peers_of_a_rank_that_gives_up_are_freed() -> None:
    def body(me: Rank) -> list:
        if me.rank == 1:
            me.group.give_up("its cell raised")
            error = None
        else:
            error = type(me.cell("import torch.distributed as dist\ndist.barrier()")).__name__
            me.group.give_up("a peer failed")
        me.group.renew(1, {}, attach=False)
        return [error, _sum()]

    assert run_ranks(3, body) == [["RuntimeError", 3.0], [None, 3.0], ["RuntimeError", 3.0]]


def test_other_connections_are_not_touched() -> None:
    """A connection of the user's survives, also one that was opened while groups were being made."""
    import selectors
    import socket

    def body(me: Rank) -> list:
        server = socket.create_server(("127.0.0.1", 0))
        pairs = []
        stop = threading.Event()

        def keep_opening() -> None:
            while not stop.is_set():
                client = socket.create_connection(server.getsockname())
                peer, _ = server.accept()
                watch = selectors.DefaultSelector()
                watch.register(client, selectors.EVENT_READ)
                watch.register(server, selectors.EVENT_READ)
                pairs.append((client, peer, watch))
                stop.wait(0.002)

        thread = threading.Thread(target=keep_opening)
        thread.start()
        for generation in range(1, 4):
            me.group.renew(generation, {}, attach=False)
            dist.new_group([0, 1])
            dist.barrier()  # one that goes on to the next renewal would close its connections on the other
        stop.set()
        thread.join()
        me.group.give_up("test")
        for client, peer, watch in pairs:
            client.sendall(b"x")
            assert peer.recv(1) == b"x"
            peer.sendall(b"y")
            assert client.recv(1) == b"y"
            watch.close(), client.close(), peer.close()
        server.close()
        me.group.renew(9, {}, attach=False)
        assert len(pairs) > 3
        return [True, _sum()]

    assert run_ranks(2, body) == [[True, 2.0]] * 2


def test_a_rank_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nbdist.worker.group.JOIN_PATIENCE_S", 0.5)

    def body(me: Rank) -> str:
        if me.rank == 1:
            me.wait_for("leave")
            return ""
        try:
            me.group.join(0)
        except Exception as error:
            return str(error)
        finally:
            me.link.send(("tried", None))
        return "joined"

    def drive(links: list) -> None:
        expect(links[0], "tried")
        links[1].send(("leave",))

    assert "rank 1 did not join" in run_ranks(2, body, drive, join=False)[0]


@pytest.mark.parametrize(
    ("code", "used"),
    [
        ("x = 1", False),
        ("pass  # nothing", False),
        ("dist.barrier()", True),
        ("dist.send(torch.ones(1), 1) if rank == 0 else dist.recv(torch.ones(1), 0)", True),
        ("dist.monitored_barrier()", True),
        ("dist.all_reduce(torch.ones(1), group=sub)", True),
        ("sub2 = dist.new_group([0, 1])", True),
    ],
)
def test_whether_a_cell_used_a_group_is_known(code: str, used: bool) -> None:
    def body(me: Rank) -> list[bool]:
        me.namespace.update(rank=me.rank, dist=dist, torch=torch)
        assert me.cell("sub = dist.new_group([0, 1]); dist.barrier()") is None
        found = []
        for _ in range(2):
            error = me.cell(code)
            assert error is None, repr(error)
            found.append(me.group.communicated)
        return found

    assert run_ranks(2, body) == [[used, used]] * 2


def test_a_renewal_that_failed_is_made_good_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nbdist.worker.group.JOIN_PATIENCE_S", 0.5)

    def body(me: Rank) -> list:
        assert me.cell("import torch.distributed as dist; sub = dist.new_group([0, 1])") is None
        if me.rank == 0:
            with pytest.raises(Exception, match="rank 1 did not join"):
                me.group.renew(1, me.namespace, attach=True)
            assert me.group.broken
            me.link.send(("tried", None))
        me.wait_for("again")
        found = me.group.renew(2, me.namespace, attach=True)
        return [found, _sum()]

    def drive(links: list) -> None:
        expect(links[0], "tried")
        for link in links:
            link.send(("again",))

    assert run_ranks(2, body, drive) == [[(["sub"], []), 2.0]] * 2
