"""What NCCL's warnings mean: the likely cause of each, and the variable or option that mends it.

NCCL offers text only, so its wordings are kept here, with the versions whose sources have them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import NamedTuple

from nbdist.doctor.checks import SHM_REMEDY
from nbdist.doctor.finding import Finding
from nbdist.doctor.nccl_reader import NcclLog

__all__ = ["problems"]

_SHOWN = 3  # warnings shown that are not understood


class _Problem(NamedTuple):
    """A wording, what it means, what to do; the variables of the remedy may have caused it."""

    pattern: str
    name: str
    fact: str
    remedy: str


# 2.10-2.30: init.cc; told once for each GPU
_DUPLICATE = _Problem(
    r"Duplicate GPU detected : rank (?P<a>\d{1,7}) and rank (?P<b>\d{1,7}) both on CUDA device (?P<bus>[0-9a-f]{1,16})",
    "GPUs",
    "ranks {ranks} use the same GPU (bus id {bus}); NCCL takes one rank per GPU",
    "start no more ranks than GPUs, or call torch.cuda.set_device(local_rank) before the first collective",
)
# 2.10-2.30: misc/socket.cc, proxy.cc; follows from something else: told only when nothing else is
_CLOSED = _Problem(
    r"[Cc]onnection closed|[Cc]onnection reset|[Pp]eer .*closed|Broken pipe",
    "connection",
    "the connection to another rank was closed: it ended first",
    "look for the rank that failed first: the cause is in its output",
)
_PROBLEMS = (
    _Problem(  # 2.10-2.30: misc/shmutils.cc
        r"/dev/shm/\S* (?:to |\(size )(?P<size>\d{1,15})|No space left on device",
        "shared memory",
        "/dev/shm is too small",
        SHM_REMEDY,
    ),
    _DUPLICATE,
    _Problem(  # 2.10-2.30: bootstrap.cc, transport/net_socket.cc
        r"no socket interface found|no interface found|[Nn]o usable listening interface",
        "interfaces",
        "NCCL found no network interface, which it needs on one host too",
        "unset NCCL_SOCKET_IFNAME, or name one that `ip -br addr` lists",
    ),
    _Problem(  # 2.10-2.30: misc/ibvwrap.cc
        r"ibv_\w+ failed(?: with error)? ?.*Cannot allocate memory|ibv_create_[cq]\w+ failed",
        "locked memory",
        "InfiniBand could not lock memory",
        "raise the limit: docker --ulimit memlock=-1, systemd LimitMEMLOCK=infinity, `ulimit -l unlimited`",
    ),
    _Problem(
        r"ibv_modify_qp|ibv_poll_cq|Got completion (?:from peer \S+ )?with (?:status|error)|Got async event",
        "InfiniBand",
        "the InfiniBand or RoCE link broke or could not be set up",
        "check `ibstat` and, on RoCE, NCCL_IB_GID_INDEX and NCCL_IB_HCA; NCCL_IB_DISABLE=1 shows whether sockets work",
    ),
    _Problem(  # 2.17-2.30: transport/nvls.cc
        r"NVLink SHARP \(NVLS\)|transport/nvls",
        "NVLS",
        "NVLink SHARP multicast memory could not be bound",
        "restart nvidia-fabricmanager (or reboot), give containers its devices; NCCL_NVLS_ENABLE=0 works without",
    ),
    # CUDA's own texts
    _Problem(
        r"Cuda failure.*out of memory",
        "GPU memory",
        "no GPU memory was left for NCCL's buffers: some hundred MB a communicator",
        "free memory before the first collective, or look who else uses the GPU (nvidia-smi)",
    ),
    _Problem(
        r"Cuda failure.*system not yet initialized",
        "fabric manager",
        "the system is not yet initialised: on NVSwitch machines no GPU works before the fabric manager runs",
        "start nvidia-fabricmanager, in the driver's own version",
    ),
    _Problem(
        r"Cuda failure.*(?:driver version is insufficient|not supported in the installed CUDA driver)",
        "driver",
        "the driver is too old for this NCCL's CUDA",
        "update the driver, or install a torch built for an older CUDA",
    ),
    _Problem(
        r"Cuda failure.*invalid device ordinal",
        "GPUs",
        "a rank chose a GPU that does not exist for it",
        "use local_rank, not rank, as the device number, and look at CUDA_VISIBLE_DEVICES",
    ),
    _Problem(
        r"Cuda failure.*(?:peer mapping resources exhausted|peer access)|failed to peer with device",
        "P2P",
        "peer access between GPUs failed, although the driver offers it",
        "set NCCL_P2P_DISABLE=1 (slower, and it works), then look at IOMMU and ACS",
    ),
    _Problem(
        r"P2P is disabled between .*GPUs (?P<a>\d{1,5}) and (?P<b>\d{1,5})",
        "P2P",
        "P2P is off between GPUs {a} and {b} although NVLink joins them: usually a hardware fault",
        "look at `nvidia-smi nvlink -s` and dmesg; NCCL_IGNORE_DISABLED_P2P=1 goes on without",
    ),
    _Problem(
        r"Cuda failure.*(?:illegal memory access|unspecified launch failure|device-side assert)",
        "CUDA",
        "a CUDA kernel failed before NCCL noticed it: the fault is in the code that ran on the GPU",
        "run the cell with CUDA_LAUNCH_BLOCKING=1 to see the line",
    ),
    _Problem(  # 2.10-2.30: bootstrap.cc, misc/socket.cc
        r"mismatch in rank count|Message truncated",
        "ranks",
        "ranks disagree: about the number of ranks, or about the size of a message",
        "compare WORLD_SIZE and the collectives of the ranks: all must make the same calls in the same order",
    ),
    _Problem(
        r"[Cc]onnect to (?P<to>\S{1,80}) (?:failed|returned)|[Cc]onnection refused|[Nn]o route to host|[Tt]imed out",
        "connection",
        "a rank could not reach another",
        "check firewall and route between the hosts, and that NCCL_SOCKET_IFNAME names the same network on all",
    ),
    _CLOSED,
)


def problems(log: NcclLog) -> list[Finding]:
    """Say what NCCL's warnings mean, each cause once."""
    hits: defaultdict[_Problem, list[dict[str, str]]] = defaultdict(list)
    unknown = []
    for text in log.warnings:
        match = next(((p, m) for p in _PROBLEMS if (m := re.search(p.pattern, text))), None)
        if match is None:
            unknown.append(text)
        else:
            hits[match[0]].append(match[1].groupdict(""))
    causes = [p for p in _PROBLEMS if p in hits and (p is not _CLOSED or len(hits) == 1)]
    if causes:
        return [Finding(p.name, "fail", fact, "", p.remedy) for p in causes for fact in _facts(log, p, hits[p])]
    found = [Finding("warning", "warn", text[:300], "NCCL's own words, not known here") for text in unknown[:_SHOWN]]
    if len(unknown) > _SHOWN:
        found.append(Finding("warning", "info", f"... {len(unknown) - _SHOWN} more warnings in the log"))
    return found


def _facts(log: NcclLog, problem: _Problem, groups: list[dict[str, str]]) -> list[str]:
    """What happened, from what the pattern has caught in each warning."""
    if problem is _DUPLICATE:  # every rank reports its own pairs
        sharing: defaultdict[str, set[int]] = defaultdict(set)
        for g in groups:
            sharing[g["bus"]] |= {int(g["a"]), int(g["b"])}
        return [problem.fact.format(ranks=" and ".join(map(str, sorted(r))), bus=bus) for bus, r in sharing.items()]
    fact = problem.fact.format_map(groups[-1])
    if size := max(int(g.get("size") or 0) for g in groups):
        fact += f": a segment of {size / 1e6:.0f} MB could not be made"
    if to := groups[-1].get("to"):
        fact += f" ({to})"
    causes = [f"{n}={log.variables[n][0]}" for n in re.findall(r"NCCL_\w+", problem.remedy) if log.variables.get(n)]
    return [fact + (f" ({', '.join(causes)} is set)" if causes else "")]
