"""Bandwidth and pre-flight on real GPUs: that they run, are right, and stay below what the links carry."""

from __future__ import annotations

import pytest
import torch

from nbdist.doctor import ranks
from nbdist.doctor.bandwidth import OPERATIONS, Bandwidth
from nbdist.doctor.facts import gather_gpus
from nbdist.doctor.report import diagnose


@pytest.mark.requires_gpus(1)
def test_facts_of_the_gpus_agree_with_torch():
    found = diagnose()
    assert found.facts.torch is not None
    assert found.facts.torch.device_count == torch.cuda.device_count()
    assert len(found.facts.health) == len(found.facts.devices) == len(gather_gpus().devices)
    assert found.facts.gpus is not None
    assert found.facts.gpus.driver
    assert not torch.cuda.is_initialized()  # asked in a process of its own


@pytest.mark.requires_gpus(1)
def test_preflight_on_every_gpu():
    count = torch.cuda.device_count()
    found = [*ranks.copies(), *ranks.run_preflight(count, "nccl")]
    assert [f for f in found if f.verdict not in ("ok", "skipped")] == []


@pytest.mark.requires_gpus(1)
def test_one_rank_sends_nothing():
    table = ranks.run_bandwidth(1, "nccl")
    assert isinstance(table, Bandwidth)
    assert {r.busbw_gb_s for r in table.rows} == {None}
    assert table.device == torch.cuda.get_device_name(0)


@pytest.mark.requires_gpus(2)
def test_bandwidth_stays_below_the_links_limit():
    table = ranks.run_bandwidth(torch.cuda.device_count(), "nccl")
    assert isinstance(table, Bandwidth)
    assert {r.operation for r in table.rows} == set(OPERATIONS)
    assert table.limit_gb_s is not None, table.limit
    # In-switch reduction (NVLS) sends less than a ring must: up to twice a ring's bus bandwidth.
    assert 0 < (table.best("all_reduce") or 0) <= 2 * table.limit_gb_s
    assert 0 < (table.best("all_gather") or 0) <= 1.1 * table.limit_gb_s
