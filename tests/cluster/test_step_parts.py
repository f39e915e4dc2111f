"""Two ranks, one of them slow in one part: its work is longer there, and the other rank's is only its wait."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deadlines import CELL_S, START_S
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from nbdist.worker.step_parts import PARTS, Chunk
from nbdist.worker.telemetry import Telemetry

NAP_S = 0.2
STEPS = 5
WORK = [part for part in PARTS if part != "wait"]
PLACES = ("data", "forward", "backward", "optimizer", "")

slow_at = ""


def nap(where: str) -> None:
    if slow_at == where:
        time.sleep(NAP_S)


class Data(Dataset[Any]):
    def __len__(self) -> int:
        return 4 * STEPS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index % 4 == 0:
            nap("data")
        return torch.ones(20), torch.tensor(1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # with buffers, which DDP makes equal before each forward: a wait for rank 0 inside the forward part
        self.layers = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        nap("forward")
        return self.layers(x)


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        nap("backward")
        return grad


class Adam(torch.optim.Adam):
    def step(self, closure: Any = None) -> Any:
        nap("optimizer")
        return super().step(closure)


def measure(telemetry: Telemetry, strategy: str) -> dict[str, Any]:
    """Medians over the steps of a new model, so that a busy machine matters little, for each place of a nap."""
    global slow_at
    net = Net()
    if strategy == "ddp":
        model: nn.Module = DistributedDataParallel(net)
    else:
        for layer in (net.layers[0], net.layers[3], net):
            model = fully_shard(layer)
    optimizer = Adam(model.parameters())
    results = {}
    for place in PLACES:
        slow_at = place if telemetry.rank == 1 else "-"
        telemetry.begin(place, interval_s=0.1)
        for x, y in DataLoader(Data(), batch_size=4):
            nn.functional.cross_entropy(Slow.apply(model(x)), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        steps = [Chunk(0.0) for _ in telemetry.parts._steps]
        for chunk, (marks, samples) in zip(steps, telemetry.parts._steps, strict=True):
            chunk.add(marks, samples)
        sample = telemetry.sample()
        telemetry.end()
        assert sum(sample[f"{part}_s"] for part in PARTS) == pytest.approx(sample["step_s"])
        medians = {part: statistics.median(chunk.seconds[part] for chunk in steps) for part in PARTS}
        held = {name: sample[name] for name in ("parameters_bytes", "gradients_bytes", "optimizer_bytes")}
        results[place] = medians | held
        dist.barrier()
    return results


def rank_main(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.set_num_threads(1)
    telemetry = Telemetry(lambda message, buffers: None, rank=rank, device=torch.device("cpu"))
    for strategy in ("ddp", "fsdp"):
        results = measure(telemetry, strategy)
        Path(folder, f"{strategy}{rank}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the ranks, each this file run as a script, have left their samples."""
    folder = tmp_path_factory.mktemp("ranks")
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    ranks = [
        subprocess.Popen([sys.executable, __file__, str(rank), folder], env=os.environ | {"PYTHONPATH": path})
        for rank in range(2)
    ]
    end_s = time.monotonic() + START_S + CELL_S
    try:
        assert [rank.wait(end_s - time.monotonic()) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return folder


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_slow_rank_and_part_stand_out(folder: Path, strategy: str) -> None:
    fast, slow = (json.loads((folder / f"{strategy}{rank}.json").read_text()) for rank in range(2))
    for place in filter(None, PLACES):
        excess = {part: slow[place][part] - fast[place][part] for part in WORK}
        assert max(excess, key=lambda part: excess[part]) == place, (place, excess)
        assert slow[place][place] >= NAP_S
        assert fast[place]["wait"] > slow[place]["wait"]
    parameters = 20 * 64 + 64 + 64 + 64 + 64 * 10 + 10
    held = parameters if strategy == "ddp" else parameters // 2  # each divisible by two: no padding
    counters = 4 * 6  # Adam counts the steps of each of its six parameters
    for values in (fast[""], slow[""]):
        assert values["parameters_bytes"] == values["gradients_bytes"] == 4 * held
        assert values["optimizer_bytes"] == 2 * 4 * held + counters


if __name__ == "__main__":
    rank_main(int(sys.argv[1]), sys.argv[2])
