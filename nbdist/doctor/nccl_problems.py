"""What NCCL's warnings mean: the likely cause of each, and the variable or option that mends it.

NCCL offers text only, so its wordings are kept here, with the versions whose sources have them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass

from nbdist.doctor.finding import Finding, fail, info, warn
from nbdist.doctor.nccl_model import NcclLog

__all__ = ["SHM_REMEDY", "problems"]

SHM_REMEDY = "start the container with --shm-size=1g or --ipc=host (Kubernetes: a Memory emptyDir at /dev/shm)"


@dataclass(frozen=True, slots=True)
class _Problem:
    """A wording, and what it means; ``fact`` may use the pattern's groups and ``{variable}``."""

    pattern: re.Pattern[str]
    name: str
    fact: str
    matters: str
    remedy: str
    variable: str | None = None
    secondary: bool = False  # follows from something else: told only when nothing else is


def _problem(pattern: str, name: str, fact: str, matters: str, remedy: str, **more: str | bool) -> _Problem:
    return _Problem(re.compile(pattern), name, fact, matters, remedy, **more)  # type: ignore[arg-type]


_PROBLEMS = (
    # 2.10-2.30: misc/shmutils.cc
    _problem(
        r"failed to extend /dev/shm/\S* to (?P<size>\d{1,15}) bytes"
        r"|shared memory segment /dev/shm/\S* \(size (?P<size2>\d{1,15})\)|No space left on device",
        "shared memory",
        "/dev/shm is too small{size}",
        "ranks of one host exchange data and proxies through segments there",
        SHM_REMEDY,
    ),
    # 2.10-2.30: init.cc
    _problem(
        r"Duplicate GPU detected : rank (?P<a>\d{1,7}) and rank (?P<b>\d{1,7}) both on CUDA device "
        r"(?P<bus>[0-9a-f]{1,16})",
        "GPUs",
        "ranks {ranks} use the same GPU (bus id {bus})",
        "NCCL takes one rank per GPU",
        "start no more ranks than GPUs, or call torch.cuda.set_device(local_rank) before the first collective",
    ),
    # 2.10-2.30: bootstrap.cc, transport/net_socket.cc
    _problem(
        r"no socket interface found|no interface found|[Nn]o usable listening interface",
        "interfaces",
        "NCCL found no network interface{variable}",
        "ranks find each other over one, also on one host",
        "unset NCCL_SOCKET_IFNAME, or name one that `ip -br addr` lists",
        variable="NCCL_SOCKET_IFNAME",
    ),
    # 2.10-2.30: misc/ibvwrap.cc
    _problem(
        r"ibv_\w+ failed(?: with error)? ?.*Cannot allocate memory|ibv_create_[cq]\w+ failed",
        "locked memory",
        "InfiniBand could not lock memory",
        "the network card reads and writes it directly",
        "raise the limit: docker --ulimit memlock=-1, systemd LimitMEMLOCK=infinity, `ulimit -l unlimited`",
    ),
    _problem(
        r"ibv_modify_qp|ibv_poll_cq|Got completion (?:from peer \S+ )?with (?:status|error)|Got async event",
        "InfiniBand",
        "the InfiniBand or RoCE link broke or could not be set up{variable}",
        "ranks on other hosts cannot be reached through it",
        "check `ibstat` and, on RoCE, NCCL_IB_GID_INDEX and NCCL_IB_HCA; NCCL_IB_DISABLE=1 shows whether sockets work",
        variable="NCCL_IB_GID_INDEX",
    ),
    # 2.17-2.30: transport/nvls.cc
    _problem(
        r"NVLink SHARP \(NVLS\)|transport/nvls",
        "NVLS",
        "NVLink SHARP multicast memory could not be bound",
        "NVSwitch machines need a running fabric manager, containers its devices",
        "restart nvidia-fabricmanager (or reboot); NCCL_NVLS_ENABLE=0 works without",
    ),
    # CUDA's own texts
    _problem(
        r"Cuda failure.*out of memory",
        "GPU memory",
        "no GPU memory was left for NCCL's buffers",
        "a communicator takes some hundred MB on each GPU",
        "free memory before the first collective, or look who else uses the GPU (nvidia-smi)",
    ),
    _problem(
        r"Cuda failure.*system not yet initialized",
        "fabric manager",
        "CUDA says that the system is not yet initialised",
        "on NVSwitch machines no GPU works before the fabric manager runs",
        "start nvidia-fabricmanager, in the driver's own version",
    ),
    _problem(
        r"Cuda failure.*(?:driver version is insufficient|not supported in the installed CUDA driver)",
        "driver",
        "the driver is too old for this NCCL's CUDA",
        "NCCL cannot start",
        "update the driver, or install a torch built for an older CUDA",
    ),
    _problem(
        r"Cuda failure.*invalid device ordinal",
        "GPUs",
        "a rank chose a GPU that does not exist for it",
        "it has no device to work on",
        "use local_rank, not rank, as the device number, and look at CUDA_VISIBLE_DEVICES",
    ),
    _problem(
        r"Cuda failure.*(?:peer mapping resources exhausted|peer access)|failed to peer with device",
        "P2P",
        "peer access between GPUs failed",
        "NCCL was told that the GPUs can reach each other",
        "set NCCL_P2P_DISABLE=1 (slower, and it works), then look at IOMMU and ACS",
    ),
    _problem(
        r"P2P is disabled between .*GPUs (?P<a>\d{1,5}) and (?P<b>\d{1,5})",
        "P2P",
        "P2P is off between GPUs {a} and {b} although NVLink joins them",
        "usually a hardware fault",
        "look at `nvidia-smi nvlink -s` and dmesg; NCCL_IGNORE_DISABLED_P2P=1 goes on without",
    ),
    _problem(
        r"Cuda failure.*(?:illegal memory access|unspecified launch failure|device-side assert)",
        "CUDA",
        "a CUDA kernel failed before NCCL noticed it",
        "the fault is in the code that ran on the GPU, not in NCCL",
        "run the cell with CUDA_LAUNCH_BLOCKING=1 to see the line",
    ),
    # 2.10-2.30: bootstrap.cc, misc/socket.cc, proxy.cc
    _problem(
        r"mismatch in rank count|Message truncated",
        "ranks",
        "ranks disagree: about the number of ranks, or about the size of a message",
        "each rank must make the same calls in the same order",
        "compare WORLD_SIZE and the collectives of the ranks",
    ),
    _problem(
        r"[Cc]onnect to (?P<to>\S{1,80}) (?:failed|returned)|[Cc]onnection refused|[Nn]o route to host|[Tt]imed out",
        "connection",
        "a rank could not reach another{to}{variable}",
        "ranks connect to each other on free ports",
        "check firewall and route between the hosts, and that NCCL_SOCKET_IFNAME names the same network on all",
        variable="NCCL_SOCKET_IFNAME",
    ),
    _problem(
        r"[Cc]onnection closed|[Cc]onnection reset|[Pp]eer .*closed|Broken pipe",
        "connection",
        "the connection to another rank was closed: it ended first",
        "the cause is in the other rank's output",
        "look for the rank that failed first",
        secondary=True,
    ),
)

_SHOWN = 3  # warnings shown that are not understood


def problems(log: NcclLog) -> list[Finding]:
    """Say what NCCL's warnings mean, each cause once."""
    hits: defaultdict[_Problem, list[re.Match[str]]] = defaultdict(list)
    unknown = []
    for text in log.warnings:
        for problem in _PROBLEMS:
            if match := problem.pattern.search(text):
                hits[problem].append(match)
                break
        else:
            unknown.append(text)
    first = [f for p in _PROBLEMS if not p.secondary and p in hits for f in _explained(log, p, hits[p])]
    second = [f for p in _PROBLEMS if p.secondary and p in hits for f in _explained(log, p, hits[p])]
    found = first or second
    for text in unknown[: 0 if found else _SHOWN]:
        found.append(warn("warning", text[:300], "NCCL's own words, not known here"))
    if not first and not second and len(unknown) > _SHOWN:
        found.append(info("warning", f"... {len(unknown) - _SHOWN} more warnings in the log"))
    return found


def _explained(log: NcclLog, problem: _Problem, matches: list[re.Match[str]]) -> list[Finding]:
    groups = [{k: v for k, v in m.groupdict().items() if v is not None} for m in matches]
    values = log.variables.get(problem.variable or "", [])
    common = {"variable": f" ({problem.variable}={values[0]} is set)" if values else "", "to": "", "size": ""}
    facts = []
    if "{ranks}" in problem.fact:
        # Every rank reports its own pairs: one line per GPU.
        sharing: defaultdict[str, set[int]] = defaultdict(set)
        for g in groups:
            sharing[g["bus"]] |= {int(g["a"]), int(g["b"])}
        for bus, ranks in sharing.items():
            *most, last = map(str, sorted(ranks))
            facts.append(problem.fact.format(ranks=f"{', '.join(most)} and {last}" if most else last, bus=bus))
    else:
        chosen = dict(common)
        for g in groups:
            chosen |= {"to": f" ({g['to']})"} if "to" in g else {}
            chosen |= {k: g[k] for k in ("a", "b") if k in g}
        if sizes := [int(g.get("size") or g.get("size2") or 0) for g in groups]:
            chosen["size"] = f": a segment of {max(sizes) / 1e6:.0f} MB could not be made" if max(sizes) else ""
        facts.append(problem.fact.format(**chosen))
    return [fail(problem.name, fact, problem.matters, problem.remedy) for fact in facts]
