"""Finds what facts do not show, by trying it in the ranks: copies, an all-reduce, a DataLoader.

Some machines offer peer access between GPUs and deliver zeros, or hang: that is measured here, never looked up in a
list of cards. Imports torch: the notebook's kernel has it run in ranks (`nbdist.doctor.ranks`).
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from nbdist.doctor.bandwidth import rank_device
from nbdist.doctor.checks import SHM_REMEDY
from nbdist.doctor.finding import Finding, counted
from nbdist.errors import CollectiveBroken

__all__ = ["copy_between_gpus", "preflight"]

LIMIT_S = 20.0
_ELEMENTS = 1 << 18  # 1 MiB of int32
_POLL_S = 0.005

_WRONG = "training would go on with wrong numbers, without an error"
_P2P_REMEDY = "set NCCL_P2P_DISABLE=1 before the workers start; then look at IOMMU and ACS (nbdist doctor names them)"
_HANGS = {
    "nccl": "likely GPUs that offer peer access but cannot use it: set NCCL_P2P_DISABLE=1 before the workers start; if "
    "that does not help, NCCL_SHM_DISABLE=1, and NCCL_DEBUG=INFO shows where it stands",
    "gloo": "likely a network interface that the ranks cannot reach each other through: set GLOO_SOCKET_IFNAME",
}


def preflight(*, limit_s: float = LIMIT_S, loader_workers: int = 2) -> tuple[Finding, ...]:
    """Try what training needs; every rank calls this at the same time and gets the same findings.

    Parameters
    ----------
    limit_s
        How long each step may take on each rank.
    loader_workers
        Worker processes of the DataLoader that every rank tries.

    Raises
    ------
    NotRunningError
        If there is no process group.
    CollectiveBroken
        If a collective did not end within the limit: the group cannot be used any more. The message names the likely
        cause and the variable to set.
    """
    device = rank_device()
    mine = [_all_reduce(device, limit_s), _exchange(device, limit_s), _loader(loader_workers, limit_s)]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    found: list[Finding] = []
    for of_step in zip(*gathered, strict=True):
        bad = [replace(f, fact=f"rank {rank}: {f.fact}") for rank, f in enumerate(of_step) if f.verdict != "ok"]
        found += bad or of_step[:1]
    return tuple(found)


def _finish(works: Sequence[Any], what: str, limit_s: float) -> None:
    """Wait for collectives, but not for ever; `CollectiveBroken` when they fail or the time is over."""
    backend = "nccl" if "nccl" in str(dist.get_backend_config()) else "gloo"
    end = time.monotonic() + limit_s
    reason = f"did not end within {limit_s:g} s"
    try:
        for work in works:
            if backend == "gloo":  # its sends and receives only end inside wait()
                work.wait(timedelta(seconds=max(end - time.monotonic(), 0.001)))
            while backend == "nccl" and not work.is_completed():  # wait() would only queue the wait on the GPU
                if time.monotonic() > end:
                    raise TimeoutError
                time.sleep(_POLL_S)
    except (TimeoutError, RuntimeError) as error:
        if time.monotonic() < end - _POLL_S:  # gloo waits whole milliseconds, and so ends a little early
            reason = f"failed: {str(error).splitlines()[0][:200]}"
        raise CollectiveBroken(f"{what} {reason} on rank {dist.get_rank()}: {_HANGS[backend]}") from None


def _all_reduce(device: torch.device, limit_s: float) -> Finding:
    size = dist.get_world_size()
    value = torch.full((_ELEMENTS,), dist.get_rank() + 1, dtype=torch.int32, device=device)
    _finish([dist.all_reduce(value, async_op=True)], "all_reduce", limit_s)
    if bool((value == size * (size + 1) // 2).all()):
        return Finding("all-reduce", "ok", f"right on {counted(size, 'rank')}")
    return Finding("all-reduce", "fail", "its sum is wrong", _WRONG, _P2P_REMEDY)


def _pattern(sender: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """What a sender sends: never zero, different for each sender."""
    return torch.arange(1, _ELEMENTS + 1, dtype=torch.int32, device=device) * 31 + sender * 7919


def _difference(got: torch.Tensor, sender: int, receiver: int) -> list[str]:
    """Say how what has arrived differs from what was sent, if it does."""
    got = got.cpu()
    if torch.equal(got, _pattern(sender)):
        return []
    count = int((got != _pattern(sender)).sum())
    how = f"{count} of {_ELEMENTS} numbers differ" if got.any() else "zeros arrived"
    return [f"{sender} to {receiver}: {how}"]


def _copies(name: str, count: int, wrong: Sequence[str]) -> Finding:
    if wrong:
        return Finding(name, "fail", "; ".join(wrong[:8]), _WRONG, _P2P_REMEDY)
    return Finding(name, "ok", f"all {count * (count - 1)} deliver what was sent")


def _exchange(device: torch.device, limit_s: float) -> Finding:
    """Every rank sends to every other, and compares what arrives."""
    rank, size = dist.get_rank(), dist.get_world_size()
    wrong = []
    for step in range(1, size):
        to, of = (rank + step) % size, (rank - step) % size
        got = torch.zeros(_ELEMENTS, dtype=torch.int32, device=device)
        send, receive = dist.P2POp(dist.isend, _pattern(rank, device), to), dist.P2POp(dist.irecv, got, of)
        _finish(dist.batch_isend_irecv([send, receive]), f"a copy from rank {of} to rank {rank}", limit_s)
        wrong += _difference(got, of, rank)
    return _copies("copies between ranks", size, wrong)


def copy_between_gpus() -> Finding:
    """Copy a tensor from each GPU to each other one directly, and compare; makes a CUDA context on each."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < 2:
        return Finding("copies between GPUs", "skipped", counted(count, "GPU"))
    wrong = []
    for i in range(count):
        source = _pattern(i, f"cuda:{i}")
        for j in set(range(count)) - {i}:
            wrong += _difference(source.to(f"cuda:{j}"), i, j)
    return _copies("copies between GPUs", count, wrong)


# What a DataLoader's error says, its cause, the remedy; there is text only (seen in torch 2.12, 2.13).
_LOADER_FAULTS = (
    ("bus error", "its workers ran out of shared memory", SHM_REMEDY),
    ("shared memory", "its workers ran out of shared memory", SHM_REMEDY),
    ("no space left", "its workers ran out of shared memory", SHM_REMEDY),
    ("too many open files", "too many open files", "`ulimit -n 65536`, docker --ulimit nofile=65536:65536"),
    ("timed out", "its workers did not answer in time", "num_workers=0, or look at the machine's load and memory"),
)


def _loader(workers: int, limit_s: float) -> Finding:
    """Read a small data set through worker processes, which hand over batches in shared memory."""
    rows, row = 64, 1 << 14  # batches of 1 MiB, 4 MiB in all
    data = TensorDataset(torch.arange(rows).repeat_interleave(row).reshape(rows, row).to(torch.float32))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "more workers than CPUs" is judged from the facts
            loader = DataLoader(data, batch_size=16, num_workers=workers, timeout=limit_s if workers else 0)
            total = sum(float(batch[:, 0].sum()) for (batch,) in loader)
    except (RuntimeError, OSError) as error:
        other = ("", str(error).splitlines()[0][:200], "num_workers=0 works without worker processes")
        _, cause, remedy = next((f for f in _LOADER_FAULTS if f[0] in str(error).lower()), other)
        fact = f"with {workers} workers: {cause}"
        return Finding("DataLoader", "fail", fact, "training with DataLoader workers stops like this", remedy)
    if total != rows * (rows - 1) / 2:
        return Finding("DataLoader", "fail", "its workers delivered wrong numbers", _WRONG)
    return Finding("DataLoader", "ok", f"works with {workers} workers")
