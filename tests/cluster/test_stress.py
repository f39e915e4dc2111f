"""Random faults against a cluster that trains: after each one it answers, its ranks agree, and nothing is left.

The short form runs in every gate; ``--full`` plays several hundred faults. Both print how many of each kind were
survived. A failure names the seed, with which the same faults come again.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable

import psutil
import pytest

import nbdist
from nbdist.errors import CellError
from nbdist.notebook.cluster import Cluster

RANKS = 3
SHORT_S, FULL_S = 45.0, 900.0

SETUP = """
import os, signal, sys, time
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
def build():
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)))
    return model, torch.optim.SGD(model.parameters(), lr=0.01)
def train(steps):
    for _ in range(steps):
        loss = model(torch.randn(8, 16)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
model, optimizer = build()
"""
CHECK = """
flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
every = [torch.zeros_like(flat) for _ in range(world_size)]
dist.all_gather(every, flat)
same = all(torch.equal(every[0], other) for other in every)
"""


class Faults:
    """Each method plays one fault and says whether variables of a rank are lost."""

    def __init__(self, cluster: Cluster, draw: random.Random) -> None:
        self.cluster, self.draw = cluster, draw

    def _run(self, code: str, during: Callable[[], None] | None = None, after_s: float = 0.0) -> None:
        timer = threading.Timer(after_s, during) if during else None
        if timer:
            timer.start()
        try:
            self.cluster.run(code, dashboard=False)
        except (CellError, KeyboardInterrupt):
            pass  # what the cell is for
        finally:
            if timer:
                timer.join()

    def interrupt_training(self) -> bool:
        self._run("train(10**9)", self.cluster.interrupt, self.draw.uniform(0.0, 0.6))
        return False

    def interrupt_python(self) -> bool:
        self._run("while True: time.sleep(0.01)", self.cluster.interrupt, self.draw.uniform(0.0, 0.3))
        return False

    def interrupt_collective(self) -> bool:
        rank = self.draw.randrange(RANKS)
        self._run(f"if rank == {rank}: dist.barrier()", self.cluster.interrupt, self.draw.uniform(0.1, 0.4))
        return False

    def kill_a_rank(self) -> bool:
        victim = self.cluster.members.ranks[self.draw.randrange(RANKS)].pid
        self._run("train(10**9)", lambda: os.kill(victim, signal.SIGKILL), self.draw.uniform(0.0, 0.4))
        return True

    def exit_a_rank(self) -> bool:
        self._run(f"train(3)\nif rank == {self.draw.randrange(RANKS)}: os._exit(3)\ntrain(3)")
        return True

    def raise_before_a_collective(self) -> bool:
        self._run(f"if rank == {self.draw.randrange(RANKS)}: raise ValueError('on purpose')\ndist.barrier()")
        return False

    def raise_between_steps(self) -> bool:
        self._run(f"train(2)\nif rank == {self.draw.randrange(RANKS)}: raise ValueError('on purpose')\ntrain(2)")
        return False

    def mismatched_collective(self) -> bool:
        # gloo aborts a rank, or waits for ever, as the messages happen to meet: a user would press Stop
        self._run("dist.all_reduce(torch.ones(1 + (rank == 0)))", self.cluster.interrupt, 1.5)
        return True

    def flood(self) -> bool:
        self._run("for i in range(5000): print(i, '.' * 50)")
        return False

    def restart(self) -> bool:
        self.cluster.restart()
        return True


def play(seconds: float, seed: int) -> Counter[str]:
    """Faults for so long; how many of each kind were survived."""
    draw = random.Random(seed)
    survived: Counter[str] = Counter()
    others = {p.pid for p in psutil.Process().children(recursive=True)}  # of other tests
    with nbdist.start(RANKS, say=lambda _: None, waiting_s=0) as cluster:
        faults = Faults(cluster, draw)
        kinds = [name for name in vars(Faults) if not name.startswith("_")]
        cluster.run(SETUP)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            name = draw.choice(kinds)
            lost = getattr(faults, name)()
            if lost:
                cluster.run("")  # a rank that died is replaced here
                cluster.run(SETUP)
            cluster.run(CHECK)
            assert all(cluster.pull("same").values()), f"after {name} (seed {seed}) the ranks differ"
            ranks = [p for p in cluster.members.ranks if p.alive]
            assert len(ranks) == RANKS, f"after {name} (seed {seed}) ranks are missing"
            survived[name] += 1
        below = {p.pid for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE}
        server = cluster.members.server_pid
        assert below - (others - {server}) == {p.pid for p in cluster.members.ranks} | {server}
    return survived


@pytest.mark.timeout(FULL_S + 300)
@pytest.mark.parametrize("seconds", [SHORT_S, pytest.param(FULL_S, marks=pytest.mark.full)], ids=["short", "long"])
def test_faults_at_random(seconds: float, capsys: pytest.CaptureFixture[str]) -> None:
    seed = int(os.environ.get("NBDIST_STRESS_SEED", str(random.randrange(10**6))))
    survived = play(seconds, seed)
    with capsys.disabled():
        print(f"\nseed {seed}, survived: " + ", ".join(f"{n} × {name}" for name, n in sorted(survived.items())))
    assert sum(survived.values()) > 0
