"""Numbers from a GPU arrive without a synchronisation, and the rank's sample matches the device torch uses."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nbdist.wire.messages import Message, Metrics
from nbdist.worker.step_parts import PARTS
from nbdist.worker.telemetry import Telemetry

pytestmark = pytest.mark.requires_gpus(1)


def telemetry(sent: list[tuple[Message, list[bytes]]]) -> Telemetry:
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    return Telemetry(lambda m, b: sent.append((m, [bytes(x) for x in b])), rank=0, device=device)


def values(sent: list[tuple[Message, list[bytes]]], name: str) -> list[float]:
    import numpy as np

    found: list[float] = []
    for message, buffers in sent:
        if isinstance(message, Metrics):
            for series, buffer in zip(message.series, buffers, strict=True):
                if series["name"] == name:
                    found += np.frombuffer(buffer).reshape(3, -1)[2].tolist()
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool])
def test_values_are_those_at_the_time_of_the_call(dtype: torch.dtype) -> None:
    sent: list[tuple[Message, list[bytes]]] = []
    rank = telemetry(sent)
    rank.begin("r", interval_s=0.1)
    total = torch.zeros(1, device="cuda", dtype=dtype)
    expected = []
    for step in range(3000):  # more than one chunk of slots
        total.fill_(step % 2)
        rank.record({"x": total}, step, 0.0)
        expected.append(float(step % 2))
    rank.end()
    rank.pump(final=True)
    assert values(sent, "x") == expected


def test_no_synchronisation() -> None:
    sent: list[tuple[Message, list[bytes]]] = []
    rank = telemetry(sent)
    rank.begin("r", interval_s=0.1)
    model = nn.Linear(64, 64, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model(torch.ones(8, 64, device="cuda")).sum().backward()
    optimizer.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(20):
            loss = model(torch.ones(8, 64, device="cuda")).sum()
            loss.backward()
            optimizer.step()
            rank.record({"loss": loss}, step, 0.0)
            rank.pump()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    rank.end()
    rank.pump(final=True)
    assert len(values(sent, "loss")) == 20


def test_sample_of_a_gpu() -> None:
    rank = telemetry([])
    rank.begin("r", interval_s=0.1)
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512)).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(5):
        model(torch.ones(64, 512, device="cuda")).sum().backward()
        optimizer.step()
    torch.cuda.synchronize()
    sample = rank.sample()
    rank.end()
    assert sample["parts_steps"] == 4
    assert sum(sample[f"{part}_s"] for part in PARTS) == pytest.approx(sample["step_s"])
    assert sample["allocated_bytes"] == torch.cuda.memory_allocated()
    assert sample["reserved_bytes"] >= sample["allocated_bytes"]
    assert str(torch.cuda.get_device_properties(0).uuid) in sample["device_uuid"]
    assert sample["device_reason"] is None
    assert sample["parameters_bytes"] == sum(p.nbytes for p in model.parameters())
