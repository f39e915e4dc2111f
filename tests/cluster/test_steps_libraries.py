"""Loops of accelerate, Lightning Fabric and torch.compile run in a cell: loss, count, agreed stop, healing."""

from __future__ import annotations

import os
from typing import Any

import pytest
from forked import Rank, agree, expect, run_ranks

LOOPS = {
    "accelerate": """
import torch
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
net = torch.nn.Linear(4, 2)
model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
def step(x):
    loss = model(x).square().mean()
    accelerator.backward(loss)
    optimizer.step(); optimizer.zero_grad()
    return loss
""",
    "lightning_fabric": """
import torch
from lightning_fabric import Fabric
fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
net = torch.nn.Linear(4, 2)
model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
def step(x):
    loss = model(x).square().mean()
    fabric.backward(loss)
    optimizer.step(); optimizer.zero_grad()
    return loss
""",
    "torch": """
import torch
from torch.nn.parallel import DistributedDataParallel as DDP
net = torch.nn.Linear(4, 2)
model = torch.compile(DDP(net), backend="eager")
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
def step(x):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step(); optimizer.zero_grad()
    return loss
""",
}

TRAIN = """
for i in range(done, 10**9):
    loss = step(torch.full((3, 4), rank + 1.0))
    losses.append(loss.item()); done = i + 1
    if i == 6 and rank == 0: going()
"""


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("library", LOOPS)
def test_a_librarys_loop(library: str) -> None:
    pytest.importorskip(library)

    def body(me: Rank) -> list[Any]:
        import warnings

        warnings.simplefilter("ignore")
        os.environ |= {"LOCAL_RANK": str(me.rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
        os.environ |= {"LOCAL_WORLD_SIZE": "2", "NODE_RANK": "0", "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "cells"}
        me.namespace.update(rank=me.rank, losses=[], done=0, going=lambda: me.link.send(("going", None)))
        for code in (LOOPS[library],):
            error = me.cell("torch_seed = __import__('torch').manual_seed(0)\n" + code)
            assert error is None, repr(error)
        error = me.cell(TRAIN)
        assert isinstance(error, KeyboardInterrupt), repr(error)
        assert me.steps.agreed
        losses = me.namespace["losses"]
        recorded = me.telemetry.values("loss")
        assert recorded == losses, (recorded, losses)
        steps = me.steps.count
        attached, lost = me.group.renew(1, me.namespace, attach=True)
        assert len(attached) >= 1, (attached, lost)
        assert lost == []
        error = me.cell("for _ in range(3): loss = step(torch.full((3, 4), rank + 1.0))")
        assert error is None, repr(error)
        return [steps, me.namespace["net"].weight.tolist()]

    def drive(links: list) -> None:
        expect(links[0], "going")
        agree(links)

    zero, one = run_ranks(2, body, drive)
    assert zero == one
