"""Measures collectives inside the ranks, and says what the links between the GPUs could carry.

Algorithm and bus bandwidth are those of nccl-tests (doc/PERFORMANCE.md there): algorithm bandwidth is the size S over
the time; bus bandwidth corrects it for what each rank must send at least, so that it can be compared with a link's
speed whatever the number of ranks n: all-reduce 2(n-1)/n, all-gather and reduce-scatter (n-1)/n. S is the whole buffer:
of all-gather what every rank ends with, of reduce-scatter what it starts with. Times are means over the ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from nbdist.doctor.facts import Health, gather_gpus
from nbdist.doctor.finding import html_table, size_text, text_table
from nbdist.doctor.gpu import Link
from nbdist.errors import InputError, NotRunningError

if TYPE_CHECKING:
    import torch

__all__ = ["OPERATIONS", "Bandwidth", "Row", "bus_factor", "link_limit", "measure", "rank_device"]

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter")
GPU_SIZES = tuple(1 << n for n in (16, 20, 24, 27, 29))  # 64 KiB to 512 MiB
CPU_SIZES = tuple(1 << n for n in (12, 16, 20, 24))  # 4 KiB to 16 MiB

# By NVML's number of a link's version (nvmlNvlinkVersion_t: 5 is 3.1, A100; 6: 4.0, H100; 7: 5.0, B200): GB/s of one
# NVLink in one direction, and links of one GPU. NVIDIA's NVLink page gives all links, both ways: 600, 900, 1800 GB/s.
_NVLINKS = {1: (20.0, 4), 2: (25.0, 6), 3: (25.0, 6), 4: (25.0, 12), 5: (25.0, 12), 6: (25.0, 18), 7: (50.0, 18)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One operation at one size S; bandwidths in 1e9 bytes a second, None with one rank, which sends nothing."""

    operation: str
    num_bytes: int
    time_s: float
    algbw_gb_s: float
    busbw_gb_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidth:
    """A table of measurements, and what the links could carry.

    Attributes
    ----------
    limit_gb_s
        The most a link lets through in one direction, None: unknown (CPU ranks, several nodes).
    limit
        Where that number comes from.
    """

    world_size: int
    backend: str
    device: str
    rows: tuple[Row, ...]
    limit_gb_s: float | None = None
    limit: str = ""

    def best(self, operation: str) -> float | None:
        """The highest bus bandwidth of an operation, None if it was not measured."""
        return max((r.busbw_gb_s for r in self.rows if r.operation == operation and r.busbw_gb_s), default=None)

    @property
    def title(self) -> str:
        """What was measured where."""
        return f"{self.world_size} ranks, {self.backend}, {self.device}"

    @property
    def summary(self) -> str:
        """What was reached, beside the limit if that is known."""
        best = self.best("all_reduce")
        if best is None:
            return "one rank: nothing is sent"
        text = f"all_reduce reached {best:.3g} GB/s bus bandwidth"
        if self.limit_gb_s:
            return f"{text}, {best / self.limit_gb_s:.0%} of {self.limit_gb_s:.4g} GB/s ({self.limit})"
        return f"{text}; {self.limit}" if self.limit else text

    def _table(self) -> list[list[str]]:
        table = [["operation", "size", "time (us)", "algbw (GB/s)", "busbw (GB/s)"]]
        for r in self.rows:
            bus = "-" if r.busbw_gb_s is None else f"{r.busbw_gb_s:.3g}"
            table.append([r.operation, size_text(r.num_bytes), f"{r.time_s * 1e6:.0f}", f"{r.algbw_gb_s:.3g}", bus])
        return table

    def __str__(self) -> str:
        return "\n".join([self.title, *text_table(self._table()), self.summary])

    def _repr_html_(self) -> str:
        return f"<p>{escape(self.title)}</p>{html_table(self._table())}<p>{escape(self.summary)}</p>"

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Bandwidth:
        """The table that `to_json` returned."""
        return cls(**{**value, "rows": tuple(Row(**r) for r in value["rows"])})


def bus_factor(operation: str, world_size: int) -> float:
    """What nccl-tests multiply algorithm bandwidth with; 0 for one rank."""
    return (2 if operation == "all_reduce" else 1) * (world_size - 1) / world_size


def measure(
    sizes: Sequence[int] | None = None, operations: Sequence[str] = OPERATIONS, *, seconds: float = 0.2
) -> Bandwidth:
    """Measure collectives; every rank of a process group calls this at the same time and gets the same table.

    Parameters
    ----------
    sizes
        Bytes of the buffers; None: 64 KiB to 512 MiB on GPUs, 4 KiB to 16 MiB on the CPU.
    operations
        Of ``all_reduce``, ``all_gather``, ``reduce_scatter``.
    seconds
        About how long each measurement goes on.

    Raises
    ------
    NotRunningError
        If there is no process group.
    """
    import torch
    import torch.distributed as dist

    device, world_size = rank_device(), dist.get_world_size()
    if unknown := set(operations) - set(OPERATIONS):
        raise InputError(f"expected operations of {', '.join(OPERATIONS)}, got {min(unknown)!r}")
    on_gpu, rows = device.type == "cuda", []
    for operation in operations:
        for num_bytes in sizes or (GPU_SIZES if on_gpu else CPU_SIZES):
            count = max(num_bytes // 4 // world_size, 1)  # elements of one rank's share
            time_s, total = _time(_prepared(operation, count, device), device, seconds), count * world_size * 4
            algbw = total / time_s / 1e9
            busbw = algbw * bus_factor(operation, world_size) or None
            row = Row(operation=operation, num_bytes=total, time_s=time_s, algbw_gb_s=algbw, busbw_gb_s=busbw)
            rows.append(row)
    told: list[tuple[float | None, str]] = [(None, "CPU ranks: this is what sockets or shared memory here carry")]
    if on_gpu and dist.get_rank() == 0:
        facts = gather_gpus()
        told = [link_limit(facts.links, facts.health)]
        if world_size > len(facts.devices):
            told = [(None, "several nodes: the network is not known here")]
    dist.broadcast_object_list(told, src=0)
    return Bandwidth(
        world_size=world_size,
        backend=dist.get_backend(),
        device=torch.cuda.get_device_name(device) if on_gpu else "cpu",
        rows=tuple(rows),
        limit_gb_s=told[0][0],
        limit=told[0][1],
    )


def rank_device() -> torch.device:
    """The device this rank's process group works on; `NotRunningError` if there is none."""
    import torch
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        raise NotRunningError("there is no process group: run this in a distributed cell or under torchrun")
    if "nccl" in str(dist.get_backend_config()) and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _prepared(operation: str, count: int, device: torch.device) -> Callable[[], object]:
    """Buffers made, the collective to be called again and again."""
    import torch
    import torch.distributed as dist

    whole, share = torch.zeros(count * dist.get_world_size(), device=device), torch.zeros(count, device=device)
    # Torch 2.13 renames these two and warns of the older names.
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: all_gather(whole, share),
        "reduce_scatter": lambda: reduce_scatter(share, whole),
    }
    return calls[operation]


def _time(run: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Mean time of one call, over the calls and over the ranks."""
    import torch
    import torch.distributed as dist

    def timed(calls: int) -> float:
        dist.barrier()
        wait()
        start = time.perf_counter()
        for _ in range(calls):
            run()
        wait()
        mean = torch.tensor((time.perf_counter() - start) / calls, dtype=torch.float64, device=device)
        dist.all_reduce(mean)
        return mean.item() / dist.get_world_size()

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    timed(2)  # connections are made by the first calls
    # Every rank computes the same mean, so all of them choose the same number of calls.
    return timed(max(3, min(int(seconds / max(timed(2), 1e-7)), 1000)))


def link_limit(links: Sequence[Link], health: Sequence[Health]) -> tuple[float | None, str]:
    """What a ring over all GPUs of a machine can carry at most: GB/s in one direction, and where that comes from."""
    counts = [link.nvlinks or 0 for link in links]
    versions = {h.nvlink_version for h in health}
    if counts and min(counts) > 0 and len(versions) == 1 and (version := versions.pop()) in _NVLINKS:
        rate, most = _NVLINKS[version]
        each = min(counts) * (len(health) - 1)
        # Through switches every pair shares all links of a GPU; without, each pair has its own.
        each = min(counts) if each > most else each
        return each * rate, f"{each} NVLinks × {rate:g} GB/s"
    # Payload of a lane: 8b/10b coding up to generation 2, 128b/130b from 3 (PCI Express base specification).
    speeds = [
        (h.pcie_width_max * h.pcie_gt_s * (0.8 if h.pcie_gt_s < 8 else 128 / 130) / 8, h.pcie_width_max, h.pcie_gt_s)
        for h in health
        if h.pcie_width_max and h.pcie_gt_s
    ]
    if len(health) > 1 and len(speeds) == len(health):
        speed, lanes, gt_s = min(speeds)
        return speed, f"PCIe, {lanes} lanes at {gt_s:g} GT/s"
    return None, ""
