"""Recording a few steps: which, on which ranks, and how much of the communication was hidden."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import models
import pytest
import torch
from torch import nn
from torch._C._autograd import DeviceType

import nbdist
from nbdist.train.profile import Profile, _fill, memory_snapshot, profile, span

pytestmark = pytest.mark.shared


def _recorded(folder: str, kind: str) -> tuple[int, str, bool, float, float]:
    model = nbdist.ddp(models.Net()) if kind == "ddp" else nbdist.fsdp(models.Net())
    optimizer = models.sgd(model.parameters())
    x, y = models.data()
    with profile(steps=2, wait=1, folder=folder) as found:
        for _ in range(6):
            with span("the loss"):
                loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return found.steps, str(found), found.trace is not None, found.communication_s, found.exposed_s


@pytest.mark.parametrize("kind", ["ddp", "full"])
def test_steps_of_one_rank(ranks: Callable[..., list[Any]], tmp_path: Path, kind: str) -> None:
    first, second = ranks(2, _recorded, str(tmp_path), kind)
    assert first[0] == 2
    assert "the loss" in first[1]
    assert first[1].startswith("rank 0: 2 steps in")
    assert first[2]
    assert 0 < first[4] <= first[3]
    assert second[:3] == (0, "rank 1: nothing recorded", False)
    assert [p.name for p in tmp_path.iterdir()] == ["rank0.json.gz"]
    events = json.loads(gzip.decompress((tmp_path / "rank0.json.gz").read_bytes()))["traceEvents"]
    assert sum(e.get("name") == "the loss" for e in events) == 2


def _event(name: str, start: float, end: float, device: DeviceType = DeviceType.CUDA) -> Any:
    return SimpleNamespace(name=name, device_type=device, time_range=SimpleNamespace(start=start, end=end))


def test_communication_not_hidden() -> None:
    found = Profile(rank=0, steps=1)
    events = [
        _event("cudaLaunchKernel", 0, 1e6, DeviceType.CPU),
        _event("ncclDevKernel_AllGather", 1e5, 3e5),
        _event("ncclDevKernel_ReduceScatter", 2e5, 5e5),
        _event("gemm", 0, 1.5e5),
        _event("gemm", 2.5e5, 3e5),
        _event("gemm", 3e5, 3.5e5),
    ]
    _fill(found, events, [])
    assert found.communication_s == pytest.approx(0.4)
    assert found.exposed_s == pytest.approx(0.25)  # 0.15 to 0.25 and 0.35 to 0.5
    assert "62% of that not hidden behind computation, which is 25% of the time" in found.sentence


def test_refused() -> None:
    with pytest.raises(nbdist.errors.InputError, match="steps expects 1 or more"), profile(steps=0):
        pass
    if not torch.cuda.is_available():
        with pytest.raises(nbdist.errors.InputError, match="needs a CUDA device"), memory_snapshot("snapshot.pickle"):
            pass
    assert not Path("snapshot.pickle").exists()
