"""Finds what facts do not show, by trying it: copies, an all-reduce, a DataLoader.

`preflight` runs in every rank of a process group, in a cell or under torchrun. `copy_between_gpus` is run in a process
of its own (``python -m nbdist.doctor.preflight``), because it makes a CUDA context on every GPU. Some machines offer
peer access between GPUs and deliver zeros, or hang: that is measured here, never looked up in a list of cards.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from nbdist.doctor.bandwidth import rank_device
from nbdist.doctor.finding import Finding, fail, ok, skipped
from nbdist.doctor.nccl_problems import SHM_REMEDY
from nbdist.errors import CollectiveBroken, NotRunningError

if TYPE_CHECKING:
    import torch

__all__ = ["copy_between_gpus", "preflight"]

LIMIT_S = 20.0
_ELEMENTS = 1 << 18  # 1 MiB of int32
_POLL_S = 0.005

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
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        raise NotRunningError("there is no process group to try: run this in a distributed cell or under torchrun")
    device = rank_device()
    mine = [_all_reduce(device, limit_s), *_exchange(device, limit_s), _loader(loader_workers, limit_s)]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    return tuple(_joined(gathered))


def _joined(gathered: Sequence[Sequence[Finding]]) -> list[Finding]:
    """One finding where all ranks say the same, else one for each that found a fault, with its rank."""
    found = []
    for of_step in zip(*gathered, strict=True):
        bad = [(rank, f) for rank, f in enumerate(of_step) if f.verdict != "ok"]
        for rank, f in bad:
            found.append(
                Finding(
                    name=f.name, verdict=f.verdict, fact=f"rank {rank}: {f.fact}", matters=f.matters, remedy=f.remedy
                )
            )
        if not bad:
            found.append(of_step[0])
    return found


def _finish(works: Sequence[Any], what: str, limit_s: float) -> None:
    """Wait for collectives, but not for ever; `CollectiveBroken` when they fail or the time is over."""
    import torch.distributed as dist

    backend = "nccl" if "nccl" in str(dist.get_backend_config()) else "gloo"
    end = time.monotonic() + limit_s
    error = ""
    try:
        for work in works:
            if backend == "gloo":  # its sends and receives only end inside wait()
                work.wait(timedelta(seconds=max(end - time.monotonic(), 0.001)))
            else:
                while not work.is_completed():  # wait() would only queue the wait on the GPU
                    if time.monotonic() > end:
                        raise TimeoutError
                    time.sleep(_POLL_S)
        return
    except TimeoutError:
        pass
    except RuntimeError as failure:
        error = str(failure).splitlines()[0][:200] if time.monotonic() < end else ""
    reason = f"failed: {error}" if error else f"did not end within {limit_s:g} s"
    raise CollectiveBroken(f"{what} {reason} on rank {dist.get_rank()}: {_HANGS[backend]}")


def _all_reduce(device: torch.device, limit_s: float) -> Finding:
    import torch
    import torch.distributed as dist

    size = dist.get_world_size()
    value = torch.full((_ELEMENTS,), dist.get_rank() + 1, dtype=torch.int32, device=device)
    _finish([dist.all_reduce(value, async_op=True)], "all_reduce", limit_s)
    if bool((value == size * (size + 1) // 2).all()):
        return ok("all-reduce", f"right on {size} rank{'s' * (size > 1)}")
    return fail(
        "all-reduce", "its sum is wrong", "training would go on with wrong gradients, without an error", _P2P_REMEDY
    )


def _pattern(sender: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """What a sender sends: never zero, different for each sender."""
    import torch

    return torch.arange(1, _ELEMENTS + 1, dtype=torch.int32, device=device) * 31 + sender * 7919


def _difference(got: torch.Tensor, sender: int) -> str | None:
    """Say how what has arrived differs from what was sent, None if it does not."""
    import torch

    got = got.cpu()
    if torch.equal(got, _pattern(sender)):
        return None
    return "zeros arrived" if not got.any() else f"{int((got != _pattern(sender)).sum())} of {_ELEMENTS} numbers differ"


def _exchange(device: torch.device, limit_s: float) -> list[Finding]:
    """Every rank sends to every other, and compares what arrives."""
    import torch
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    wrong = []
    for step in range(1, size):
        to, of = (rank + step) % size, (rank - step) % size
        got = torch.zeros(_ELEMENTS, dtype=torch.int32, device=device)
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, _pattern(rank, device), to), dist.P2POp(dist.irecv, got, of)]
        )
        _finish(works, f"a copy from rank {of} to rank {rank}", limit_s)
        if (how := _difference(got, of)) is not None:
            wrong.append(f"{of} to {rank}: {how}")
    if size == 1:
        return [ok("copies between ranks", "one rank: none to make")]
    if not wrong:
        return [ok("copies between ranks", f"all {size * (size - 1)} deliver what was sent")]
    return [
        fail(
            "copies between ranks",
            "; ".join(wrong),
            "training would go on with wrong numbers, without an error",
            _P2P_REMEDY,
        )
    ]


def _loader(workers: int, limit_s: float) -> Finding:
    """Read a small data set through worker processes, which hand over batches in shared memory."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    rows, row = 64, 1 << 14  # batches of 1 MiB, 4 MiB in all
    data = TensorDataset(torch.arange(rows).repeat_interleave(row).reshape(rows, row).to(torch.float32))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "more workers than CPUs" is judged from the facts
            loader = DataLoader(data, batch_size=16, num_workers=workers, timeout=limit_s if workers else 0)
            total = sum(float(batch[:, 0].sum()) for (batch,) in loader)
    except (RuntimeError, OSError) as error:
        text = str(error)
        if "bus error" in text.lower() or "shared memory" in text.lower() or "No space left" in text:
            cause, remedy = "its workers ran out of shared memory", SHM_REMEDY
        elif "Too many open files" in text or getattr(error, "errno", None) == 24:
            cause, remedy = (
                "too many open files",
                "raise the limit: `ulimit -n 65536`, docker --ulimit nofile=65536:65536",
            )
        elif "timed out" in text:
            cause = f"its workers did not answer within {limit_s:g} s"
            remedy = "use num_workers=0, or look at the machine's load and memory"
        else:
            cause, remedy = text.splitlines()[0][:200], "num_workers=0 works without worker processes"
        return fail(
            "DataLoader", f"with {workers} workers: {cause}", "training with DataLoader workers stops like this", remedy
        )
    right = total == rows * (rows - 1) / 2
    return Finding(
        name="DataLoader",
        verdict="ok" if right else "fail",
        fact=f"works with {workers} workers" if right else "its workers delivered wrong numbers",
    )


def copy_between_gpus() -> list[Finding]:
    """Copy a tensor from each GPU to each other one directly, and compare; makes a CUDA context on each."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    name = "copies between GPUs"
    if count < 2:
        return [skipped(name, f"{count} GPU{'s' * (count != 1)}")]
    wrong = []
    for i in range(count):
        source = _pattern(i, f"cuda:{i}")
        for j in set(range(count)) - {i}:
            if (how := _difference(source.to(f"cuda:{j}"), i)) is not None:
                wrong.append(f"{i} to {j}: {how}")
    if not wrong:
        return [ok(name, f"all {count * (count - 1)} deliver what was sent")]
    return [
        fail(
            name,
            "; ".join(wrong[:8]),
            "peer access is offered but does not work: training would go on with wrong numbers",
            _P2P_REMEDY,
        )
    ]


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps([asdict(f) for f in copy_between_gpus()]) + "\n")
