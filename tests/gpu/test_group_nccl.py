"""Breaking off and renewing NCCL groups, on two GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from deadlines import START_S
from forked import Rank, expect, run_ranks

SETUP = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.distributed.fsdp import fully_shard
torch.manual_seed(0)
device = torch.device("cuda", rank)
pair = dist.new_group([0, 1])
def net(): return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4)).to(device)
model = DDP(net(), device_ids=[rank])
sharded = net()
for layer in (sharded[0], sharded[2]): fully_shard(layer)
fully_shard(sharded)
optimizer = torch.optim.SGD([*model.parameters()], lr=0.1)
other = torch.optim.SGD([*sharded.parameters()], lr=0.1)
losses = []
"""

STEP = """
x = torch.full((4, 16), 1.0 + rank, device=device)
for m, o in ((model, optimizer), (sharded, other)):
    o.zero_grad(); loss = m(x).square().mean(); loss.backward(); o.step(); losses.append(loss.item())
"""

BLOCKED = {
    "all_reduce": "dist.all_reduce(torch.ones(4, device=device)); torch.cuda.synchronize()",
    "subgroup": "dist.all_reduce(torch.ones(4, device=device), group=pair); torch.cuda.synchronize()",
    "DDP backward": "model(torch.ones(2, 16, device=device)).sum().backward(); torch.cuda.synchronize()",
    "FSDP forward": "sharded(torch.ones(2, 16, device=device)).sum().item()",
}


def _break_and_heal(operation: str) -> None:
    def body(me: Rank) -> Any:
        me.namespace["rank"] = me.rank
        for code in (SETUP, STEP):
            error = me.cell(code)
            assert error is None, repr(error)
        if me.rank == 0:
            me.link.send(("blocking", None))
            me.cell(BLOCKED[operation])  # NCCL may end it with or without an error
        else:
            me.wait_for("go")
        attached, lost = me.group.renew(1, me.namespace, attach=True)
        assert {"pair", "model", "sharded"} <= set(attached), (attached, lost)
        assert lost == []
        for _ in range(2):
            error = me.cell(STEP)
            assert error is None, repr(error)
        return me.namespace["losses"]

    def drive(links: list) -> None:
        expect(links[0], "blocking")
        while True:
            links[0].send(("waiting",))
            if expect(links[0], "waiting") is not None:
                break
        for link in links:
            link.send(("give_up", "rank 1 failed", 0))
        links[1].send(("go",))

    def undisturbed(me: Rank) -> Any:
        me.namespace["rank"] = me.rank
        for code in (SETUP, STEP, STEP, STEP):
            error = me.cell(code)
            assert error is None, repr(error)
        return me.namespace["losses"]

    assert run_ranks(2, body, drive, cuda=True) == run_ranks(2, undisturbed, cuda=True)


@pytest.mark.requires_gpus(2)
@pytest.mark.parametrize("operation", BLOCKED)
def test_a_blocked_nccl_collective_is_broken_off_and_healed(operation: str) -> None:
    """In a process of its own: pytest's may have touched CUDA, and then a fork of it cannot."""
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1])])
    code = f"import test_group_nccl as t; t._break_and_heal({operation!r})"
    environment = {**os.environ, "PYTHONPATH": path}
    ended = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=2 * START_S
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
