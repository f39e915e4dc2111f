"""What the dashboard says of real ranks of which one is slow: 200 ms put in turn into each part of rank 1's step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

import nbdist
from nbdist.notebook.summary import findings, rank_rows, straggler

if TYPE_CHECKING:
    from nbdist.notebook.cluster import Cluster

pytestmark = pytest.mark.shared

CELL = """
import time, torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

where = {where!r}

def slow(part):
    if rank == 1 and part == where:
        time.sleep(0.2)

class Data(Dataset):
    def __len__(self):
        return 64 * 10
    def __getitem__(self, i):
        if i % 64 == 0:
            slow("data")
        return torch.randn(16), i % 4

class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, gradient):
        slow("backward")
        return gradient

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(16, 32), torch.nn.Linear(32, 4)
    def forward(self, x):
        slow("forward")
        return self.b(Backward.apply(self.a(x)))

class SGD(torch.optim.SGD):
    def step(self, closure=None):
        slow("optimizer")
        return super().step(closure)

model = torch.nn.parallel.DistributedDataParallel(Net())
optimizer = SGD(model.parameters(), 0.1)
for x, y in DataLoader(Data(), batch_size=64):
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with nbdist.start(2, say=lambda _: None) as started:
        yield started


@pytest.mark.parametrize("part", ["data", "forward", "backward", "optimizer"])
def test_the_slow_rank_and_part_are_named(cluster, part):
    cluster.run(CELL.format(where=part), dashboard=False)
    run = cluster.runs[-1]
    late = straggler(rank_rows(run))
    assert late is not None
    assert (late[0].rank, late[1]) == (1, f"{part}_s")
    assert any(found.text.startswith("Rank 1 is behind") for found in findings(run))


def test_nobody_is_named_in_an_even_run(cluster):
    cluster.run(
        CELL.format(where="nowhere").replace("slow(part):", "slow(part):\n    time.sleep(0.02)"), dashboard=False
    )
    assert straggler(rank_rows(cluster.runs[-1])) is None
