"""The agreed stop: every form of training loop ends after the same step on all ranks, and goes on as if undisturbed."""

from __future__ import annotations

import hashlib
import time
from typing import Any

import pytest
from forked import Rank, agree, expect, run_ranks

ITERATIONS = 30
STOP_AFTER = 8  # iterations; the stop is asked for then

SETUP = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.distributed.fsdp import fully_shard
torch.manual_seed(0)
def net():
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
def wrap(module):
    if kind == "ddp":
        return DDP(module)
    for layer in module:
        if list(layer.parameters()):
            fully_shard(layer)
    return fully_shard(module)
model, critic = wrap(net()), wrap(net())
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
other = torch.optim.SGD(critic.parameters(), lr=0.05, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=5)
average = {}
losses, done, cleaned = [], 0, False
def data(i):
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(100 * i + rank))
def loss_of(module, i):
    pace(i)
    return module(data(i)).square().mean()
"""

LOOPS = {
    "zero_grad_last": """
for i in range(done, N):
    loss = loss_of(model, i)
    loss.backward(); optimizer.step(); optimizer.zero_grad()
    losses.append(loss.item()); done = i + 1
""",
    "zero_grad_first": """
for i in range(done, N):
    optimizer.zero_grad()
    loss = loss_of(model, i)
    loss.backward()
    losses.append(loss.item()); done = i + 1
    optimizer.step()
""",
    "one_line": """
for i in range(done, N): loss = loss_of(model, i); loss.backward(); losses.append(loss.item()); optimizer.step(); optimizer.zero_grad(); done = i + 1
""",
    "scheduler_and_average": """
for i in range(done, N):
    loss = loss_of(model, i)
    loss.backward()
    optimizer.step()
    scheduler.step()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            average[name] = 0.9 * average.get(name, 0) + 0.1 * parameter.detach().clone()
    optimizer.zero_grad()
    losses.append(loss.item()); done = i + 1
""",
    "accumulation": """
for i in range(done, N):
    loss = loss_of(model, i) / 3
    loss.backward()
    losses.append(loss.item())
    if (i + 1) % 3 == 0:
        optimizer.step()
        optimizer.zero_grad()
        done = i + 1
""",
    "accumulation_inside": """
for i in range(done, N, 3):
    for j in range(3):
        loss = loss_of(model, i + j) / 3
        loss.backward()
        losses.append(loss.item())
    optimizer.step()
    optimizer.zero_grad()
    done = i + 3
""",
    "scaler": """
for i in range(done, N):
    optimizer.zero_grad()
    loss = loss_of(model, i)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item()); done = i + 1
""",
    "function": """
def train():
    global done
    for i in range(done, N):
        loss = loss_of(model, i)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item()); done = i + 1
train()
""",
    "step_in_function": """
def train_step(i):
    loss = loss_of(model, i)
    loss.backward()
    optimizer.step()
    return loss
for i in range(done, N):
    loss = train_step(i)
    scheduler.step()
    optimizer.zero_grad()
    losses.append(loss.item()); done = i + 1
""",
    "two_optimizers": """
for i in range(done, N):
    loss = loss_of(model, i)
    loss.backward()
    optimizer.step()
    other_loss = loss_of(critic, i)
    other_loss.backward()
    other.step()
    optimizer.zero_grad(); other.zero_grad()
    losses.extend([loss.item(), other_loss.item()]); done = i + 1
""",
    "loop_over_optimizers": """
for i in range(done, N):
    loss = loss_of(model, i) + loss_of(critic, i)
    loss.backward()
    for o in (optimizer, other):
        o.step()
    for o in (optimizer, other):
        o.zero_grad()
    losses.append(loss.item()); done = i + 1
""",
    "while": """
while done < N:
    loss = loss_of(model, done)
    loss.backward()
    optimizer.step()
    losses.append(loss.item()); done += 1
    if done % 2:
        optimizer.zero_grad()
        continue
    optimizer.zero_grad()
""",
    "epochs": """
while done < N:
    for i in range(done, min(done + 4, N)):
        loss = loss_of(model, i)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item()); done = i + 1
""",
    "comprehension": """
def train_step(i):
    global done
    loss = loss_of(model, i)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item()); done = i + 1
    return loss.item()
_ = [train_step(i) for i in range(done, N)]
""",
    "generator": """
def train():
    global done
    for i in range(done, N):
        loss = loss_of(model, i)
        loss.backward()
        optimizer.step()
        yield loss.item()
        optimizer.zero_grad()
        done = i + 1
for value in train():
    losses.append(value)
""",
    "cleanup": """
try:
    for i in range(done, N):
        with torch.enable_grad():
            loss = loss_of(model, i)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item()); done = i + 1
except KeyboardInterrupt:
    cleaned = True
    raise
finally:
    last = done
""",
}


def _digest(parameters: Any) -> str:
    digest = hashlib.sha256()
    for p in parameters:
        whole = p.full_tensor() if hasattr(p, "full_tensor") else p
        digest.update(whole.detach().numpy().tobytes())
    return digest.hexdigest()


def _run(me: Rank, loop: str, kind: str, *, report: bool) -> list[Any]:
    reported = not report

    def pace(i: int) -> None:
        nonlocal reported
        if not report:
            return
        time.sleep(0.001 + 0.004 * ((i + me.rank) % 2))  # ranks are in different places when the stop comes
        if i >= STOP_AFTER and not reported:
            reported = True
            if me.rank == 0:
                me.link.send(("going", None))

    me.namespace.clear()
    me.namespace.update(kind=kind, rank=me.rank, N=ITERATIONS, pace=pace)
    assert me.cell(SETUP) is None
    begun = me.steps.count
    error = me.cell(loop)
    stopped_at = me.steps.count - begun
    space = me.namespace
    parameters = [*space["model"].parameters(), *space["critic"].parameters()]
    at_stop = [stopped_at, space["done"], _digest(parameters), space["cleaned"]]
    if report:
        assert me.steps.agreed
        assert isinstance(error, KeyboardInterrupt), repr(error)
        assert 0 < space["done"] < ITERATIONS
        error = me.cell(loop)
    assert error is None, repr(error)
    average = _digest(space["average"].values()) if space["average"] else ""
    lr = space["scheduler"].get_last_lr()
    assert not me.group.broken
    return [at_stop, [space["losses"], _digest(parameters), average, lr, me.steps.count - begun]]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_stopped_loop_goes_on_as_if_undisturbed(kind: str) -> None:
    """One pair of ranks goes through all forms of loop."""

    def body(me: Rank) -> dict[str, Any]:
        at_stop = {}
        for name, loop in LOOPS.items():
            _, undisturbed = _run(me, loop, kind, report=False)
            at_stop[name], disturbed = _run(me, loop, kind, report=True)
            assert disturbed == undisturbed, (name, disturbed, undisturbed)
        return at_stop

    def drive(links: list) -> None:
        for _ in LOOPS:
            expect(links[0], "going")
            agree(links)

    zero, one = run_ranks(2, body, drive)
    for name in LOOPS:
        assert zero[name] == one[name], name  # steps, iterations and parameters
        assert zero[name][3] == (name == "cleanup")
