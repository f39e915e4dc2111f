"""Measures collectives inside the ranks, and says what the links between the GPUs could carry.

Algorithm and bus bandwidth are those of nccl-tests (doc/PERFORMANCE.md there): algorithm bandwidth is the size S over
the time; bus bandwidth corrects it for what each rank must send at least, so that it can be compared with a link's
speed whatever the number of ranks n: all-reduce 2(n-1)/n, all-gather and reduce-scatter (n-1)/n. S is the whole buffer:
of all-gather what every rank ends with, of reduce-scatter what it starts with. Times are means over the ranks.

`measure` runs in every rank of a process group, in a cell or under torchrun; what it returns needs no torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from nbdist.doctor.facts import Health, gather_gpus
from nbdist.doctor.gpu import Link
from nbdist.errors import InputError, NotRunningError

if TYPE_CHECKING:
    import torch

__all__ = ["OPERATIONS", "Bandwidth", "Row", "link_limit", "measure"]

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter")
GPU_SIZES = tuple(1 << n for n in (16, 20, 24, 27, 29))  # 64 KiB to 512 MiB
CPU_SIZES = tuple(1 << n for n in (12, 16, 20, 24))  # 4 KiB to 16 MiB

# GB/s of one NVLink in one direction, by NVML's number of its version (nvmlNvlinkVersion_t: 5 is 3.1, A100; 6 is 4.0,
# H100; 7 is 5.0, B200); NVIDIA's NVLink page gives both directions of all links of a GPU: 600, 900, 1800.
NVLINK_GB_S = {1: 20.0, 2: 25.0, 3: 25.0, 4: 25.0, 5: 25.0, 6: 25.0, 7: 50.0}
_MOST_LINKS = {1: 4, 2: 6, 3: 6, 4: 12, 5: 12, 6: 18, 7: 18}  # of one GPU: more than these between pairs means a switch


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One operation at one size.

    Attributes
    ----------
    num_bytes
        The size S.
    algbw_gb_s, busbw_gb_s
        Algorithm and bus bandwidth, in 1e9 bytes a second; the latter None with one rank, which sends nothing.
    """

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
    def summary(self) -> str:
        """What was reached, beside the limit if that is known."""
        best = self.best("all_reduce")
        if best is None:
            return "one rank: nothing is sent"
        text = f"all_reduce reached {best:.3g} GB/s bus bandwidth"
        if self.limit_gb_s:
            return f"{text}, {best / self.limit_gb_s:.0%} of {self.limit_gb_s:.4g} GB/s ({self.limit})"
        return f"{text}; {self.limit}" if self.limit else text

    def _cells(self) -> list[tuple[str, ...]]:
        return [
            (r.operation, _size(r.num_bytes), f"{r.time_s * 1e6:.0f}", f"{r.algbw_gb_s:.3g}",
             "-" if r.busbw_gb_s is None else f"{r.busbw_gb_s:.3g}")
            for r in self.rows
        ]  # fmt: skip

    def __str__(self) -> str:
        table = [_HEADS, *self._cells()]
        widths = [max(len(row[i]) for row in table) for i in range(len(_HEADS))]
        lines = []
        for first, *others in table:
            lines.append(
                "  ".join([first.ljust(widths[0]), *(c.rjust(w) for c, w in zip(others, widths[1:], strict=True))])
            )
        return "\n".join([f"{self.world_size} ranks, {self.backend}, {self.device}", *lines, self.summary])

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{escape(h)}</th>" for h in _HEADS)
        body = "".join("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in row) + "</tr>" for row in self._cells())
        title = f"{self.world_size} ranks, {escape(self.backend)}, {escape(self.device)}"
        return f"<p>{title}</p><table><tr>{head}</tr>{body}</table><p>{escape(self.summary)}</p>"

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON values."""
        return asdict(self) | {"rows": [asdict(r) for r in self.rows]}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Bandwidth:
        """The table that `to_json` returned."""
        return cls(**{**value, "rows": tuple(Row(**r) for r in value["rows"])})


_HEADS = ("operation", "size", "time (us)", "algbw (GB/s)", "busbw (GB/s)")


def bus_factor(operation: str, world_size: int) -> float:
    """What nccl-tests multiply algorithm bandwidth with; 0 for one rank."""
    return (2 if operation == "all_reduce" else 1) * (world_size - 1) / world_size


def measure(
    sizes: Sequence[int] | None = None,
    operations: Sequence[str] = OPERATIONS,
    *,
    seconds: float = 0.2,
    device: torch.device | str | None = None,
) -> Bandwidth:
    """Measure collectives; every rank calls this at the same time and gets the same table.

    Parameters
    ----------
    sizes
        Bytes of the buffers; None: 64 KiB to 512 MiB on GPUs, 4 KiB to 16 MiB on the CPU.
    operations
        Of ``all_reduce``, ``all_gather``, ``reduce_scatter``.
    seconds
        About how long each measurement goes on.
    device
        Where the buffers lie; None: the rank's GPU with nccl, else the CPU.

    Raises
    ------
    NotRunningError
        If there is no process group.
    """
    import torch
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        raise NotRunningError("there is no process group to measure: run this in a distributed cell or under torchrun")
    if unknown := set(operations) - set(OPERATIONS):
        raise InputError(f"expected operations of {', '.join(OPERATIONS)}, got {min(unknown)!r}")
    where = torch.device(device) if device is not None else rank_device()
    world_size = dist.get_world_size()
    chosen = sizes if sizes is not None else GPU_SIZES if where.type == "cuda" else CPU_SIZES
    rows = []
    for operation in operations:
        for num_bytes in chosen:
            count = max(num_bytes // 4 // world_size, 1)  # elements of one rank's share
            run = _prepared(operation, count, where)
            time_s = _time(run, where, seconds)
            total = count * world_size * 4
            algbw = total / time_s / 1e9
            factor = bus_factor(operation, world_size)
            rows.append(
                Row(
                    operation=operation,
                    num_bytes=total,
                    time_s=time_s,
                    algbw_gb_s=algbw,
                    busbw_gb_s=algbw * factor or None,
                )
            )
    name = torch.cuda.get_device_name(where) if where.type == "cuda" else "cpu"
    limit = _limit_here(where)
    return Bandwidth(
        world_size=world_size,
        backend=dist.get_backend(),
        device=name,
        rows=tuple(rows),
        limit_gb_s=limit[0],
        limit=limit[1],
    )


def rank_device() -> torch.device:
    """The device this rank's process group works on."""
    import torch
    import torch.distributed as dist

    if "nccl" in str(dist.get_backend_config()) and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _prepared(operation: str, count: int, device: torch.device) -> Callable[[], None]:
    """Buffers made, the collective to be called again and again."""
    import torch
    import torch.distributed as dist

    whole = torch.zeros(count * dist.get_world_size(), device=device)
    if operation == "all_reduce":
        return lambda: dist.all_reduce(whole) and None
    share = torch.zeros(count, device=device)
    # Torch 2.13 renames these two and warns of the older names.
    if operation == "all_gather":
        all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return lambda: all_gather(whole, share) and None
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return lambda: reduce_scatter(share, whole) and None


def _time(run: Callable[[], None], device: torch.device, seconds: float) -> float:
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


def _limit_here(device: torch.device) -> tuple[float | None, str]:
    """The links' limit as this rank's machine has it; the same on all ranks, as rank 0 tells the others."""
    import torch.distributed as dist

    found: list[tuple[float | None, str]] = [(None, "")]
    if device.type != "cuda":
        return None, "CPU ranks: this is what sockets or shared memory of this machine carry"
    if dist.get_rank() == 0:
        facts = gather_gpus()
        found = [link_limit(facts.links, facts.health)]
        if dist.get_world_size() > len(facts.devices):
            found = [(None, "several nodes: the network is not known here")]
    dist.broadcast_object_list(found, src=0)
    return found[0]


def link_limit(links: Sequence[Link], health: Sequence[Health]) -> tuple[float | None, str]:
    """What a ring over all GPUs can carry at most: GB/s in one direction, and where the number comes from.

    Parameters
    ----------
    links, health
        As `nbdist.doctor.facts` has them; of the GPUs of one machine.
    """
    counts = [link.nvlinks or 0 for link in links]
    versions = {h.nvlink_version for h in health}
    if counts and min(counts) > 0 and len(versions) == 1 and (version := versions.pop()) in NVLINK_GB_S:
        peers = len(health) - 1
        rate, most = NVLINK_GB_S[version], _MOST_LINKS[version]
        # Through switches every pair shares all links of a GPU; without, each pair has its own.
        each = min(counts) if min(counts) * peers > most else min(counts) * peers
        return each * rate, f"{each} NVLinks × {rate:g} GB/s"
    speeds = [(h.pcie_width_max * _lane_gb_s(h.pcie_gt_s), h) for h in health if h.pcie_width_max and h.pcie_gt_s]
    if len(health) > 1 and len(speeds) == len(health):
        speed, slowest = min(speeds, key=lambda s: s[0])
        return speed, f"PCIe, {slowest.pcie_width_max} lanes at {slowest.pcie_gt_s:g} GT/s"
    return None, ""


def _lane_gb_s(gt_s: float) -> float:
    """Payload of a PCIe lane: 8b/10b coding up to generation 2, 128b/130b from 3 (PCI Express base specification)."""
    return gt_s * (0.8 if gt_s < 8 else 128 / 130) / 8


def _size(num_bytes: int) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.3g} {unit}"
    return f"{num_bytes} B"
