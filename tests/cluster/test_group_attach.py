"""After a broken collective: modules, sub-groups and meshes work again in place, and train on as if undisturbed."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked import Rank, run_ranks

SETUP = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.distributed.fsdp import fully_shard
torch.manual_seed(0)
def net():
    layers = [torch.nn.Linear(8, 64), torch.nn.BatchNorm1d(64), torch.nn.ReLU(), torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 4)]
    return torch.nn.Sequential(*layers)
def wrap(module):
    if kind == "ddp":
        return DDP(module, bucket_cap_mb=0.01)
    for layer in module:
        if list(layer.parameters()):
            fully_shard(layer)
    return fully_shard(module)
model = wrap(net())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
losses = []
def data(i):
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(100 * i + rank))
done = 0
"""  # noqa: E501

TRAIN = """
while done < until:
    optimizer.zero_grad()
    x = data(done)
    model.module[1].track_running_stats if kind == "ddp" else None
    maybe_break("forward")
    loss = model(x).square().mean()
    handle = hook_in_the_middle()
    loss.backward()
    maybe_break("between")
    optimizer.step()
    losses.append(loss.item()); done += 1
"""


class PeerLeft(Exception):
    """What rank 1's cell raises in these tests."""


def _digest(parameters: Any) -> str:
    digest = hashlib.sha256()
    for p in parameters:
        digest.update((p.full_tensor() if hasattr(p, "full_tensor") else p).detach().numpy().tobytes())
    return digest.hexdigest()


def _train(me: Rank, kind: str, where: str | None, generation: int) -> list[Any]:
    """Train 8 steps; at step 4 rank 1 fails at a place, and the cell is run again."""
    space = me.namespace
    space.clear()
    armed = where is not None
    handles: list[Any] = []

    def maybe_break(place: str) -> None:
        both = place == "between"  # after the last collective of a step, one rank alone would be a step behind
        if armed and place == where and space["done"] == 4 and (me.rank == 1 or both):
            raise PeerLeft(place)

    def hook_in_the_middle() -> None:
        while handles:
            handles.pop().remove()
        if armed and where == "backward" and space["done"] == 4 and me.rank == 1:
            model = space["model"].module if kind == "ddp" else space["model"]

            def fail(*_: Any) -> None:
                raise PeerLeft("backward")

            handles.append(model[3].register_full_backward_pre_hook(fail))

    def place_hook_before_forward() -> None:
        hook_in_the_middle()

    space.update(kind=kind, rank=me.rank, until=8, maybe_break=maybe_break)
    space["hook_in_the_middle"] = lambda: None
    code = TRAIN.replace("    maybe_break(\"forward\")", "    place()\n    maybe_break(\"forward\")")
    space["place"] = place_hook_before_forward
    assert me.cell(SETUP) is None
    error = me.cell(code)
    if where is None:
        assert error is None, repr(error)
    else:
        expected = PeerLeft if me.rank == 1 or where == "between" else RuntimeError
        assert isinstance(error, expected), repr(error)
        me.group.give_up("a cell failed")
        me.wait_for(f"renew{generation}")
        attached, lost = me.group.renew(generation, space, attach=True)
        assert attached == ["model"], (attached, lost)
        assert lost == []
        assert all(p.grad is None for p in space["model"].parameters())
        armed = False
        hook_in_the_middle()
        error = me.cell(code)
        assert error is None, repr(error)
    return [space["losses"], _digest(space["model"].parameters()), space["done"]]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_training_goes_on_after_a_break(kind: str) -> None:
    places = ["forward", "backward", "between"]

    def body(me: Rank) -> Any:
        undisturbed = _train(me, kind, None, 0)
        for generation, where in enumerate(places, start=1):
            disturbed = _train(me, kind, where, generation)
            assert disturbed == undisturbed, (where, disturbed, undisturbed)
            me.link.send(("healed", where))
        return undisturbed[1:]

    def drive(links: list) -> None:
        for generation in range(1, len(places) + 1):
            for link in links:
                link.send((f"renew{generation}",))

    zero, one = run_ranks(2, body, drive)
    if kind == "ddp":
        assert zero == one
