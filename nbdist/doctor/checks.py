"""The doctor's checks: pure functions over the gathered facts, each yielding findings.

Unknown facts are not judged. A healthy machine gets no warning.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from pathlib import Path

from nbdist.doctor.checks_gpu import GIB, GPU_CHECKS, seen_by_cuda
from nbdist.doctor.facts import Facts
from nbdist.doctor.finding import Finding, Verdict, fail, info, ok, warn
from nbdist.doctor.nccl_problems import SHM_REMEDY

__all__ = ["check", "explain_memory", "outside_address"]

MIB = 1 << 20
SMALL_SHM = 512 * MIB  # NCCL makes segments of some 10 to 33 MB each, a DataLoader worker holds whole batches
LOADER_WORKERS = 4  # per rank, where nothing else is said
FILES = 1024  # the usual soft limit; a DataLoader passes each tensor as a descriptor
PIDS_PER_RANK = 256  # threads of a rank with its loaders and NCCL's helpers


def num_ranks(facts: Facts) -> int:
    """Ranks planned on this machine: as asked for, else one per visible GPU, else 2."""
    seen = seen_by_cuda(facts)
    return facts.ranks or (len(seen.devices) if seen and seen.devices else 2)


def torch_import(facts: Facts) -> Iterator[Finding]:
    """Torch is there, and nothing hides it."""
    torch = facts.torch
    for path in facts.shadows:
        name = Path(path).stem
        vital = name in ("torch", "numpy", "nbdist")
        yield Finding(
            name="file names",
            verdict="fail" if vital else "warn",
            fact=f"{path} hides the {'library' if vital else 'module'} {name}",
            matters=f"`import {name}` in the notebook loads this file instead",
            remedy="rename it, and remove __pycache__ beside it",
        )
    if torch is None:
        return
    if torch.error:
        missing = "No module named 'torch'" in torch.error
        yield fail(
            "torch",
            "torch is not installed" if missing else f"torch cannot be imported: {torch.error}",
            "no rank can start",
            "pip install torch"
            if missing
            else "reinstall it in this environment (pip install --force-reinstall torch)",
        )
    elif torch.version:
        if torch.gloo is not False:
            yield ok("torch", torch.version)
        else:
            yield fail(
                "torch",
                f"torch {torch.version} was built without gloo",
                "CPU ranks and the checks between ranks need it",
                "install torch from PyPI",
            )


def shared_memory(facts: Facts) -> Iterator[Finding]:
    """/dev/shm is large enough for NCCL and for DataLoader workers."""
    if facts.shm_bytes is None:
        return
    free = facts.shm_bytes if facts.shm_free_bytes is None else facts.shm_free_bytes
    small, full = facts.shm_bytes < SMALL_SHM, free < SMALL_SHM
    if not (small or full):
        yield ok("shared memory", f"/dev/shm has {_size(facts.shm_bytes)}")
        return
    seen = seen_by_cuda(facts)
    needed = bool((seen and len(seen.devices) > 1) or facts.loader_workers)
    yield Finding(
        name="shared memory",
        verdict="fail" if small and needed else "warn",
        fact=f"/dev/shm has {_size(facts.shm_bytes)}" + " (docker's default of 64 MB)" * (facts.shm_bytes == 64 * MIB)
        if small
        else f"/dev/shm has only {_size(free)} left",
        matters="NCCL's shared-memory segments and DataLoader workers need it (workers are killed by a bus error)",
        remedy=SHM_REMEDY if small else "remove what was left there (ls -l /dev/shm)",
    )


def limits(facts: Facts) -> Iterator[Finding]:
    """Locked memory, open files, processes."""
    memlock, nofile = facts.memlock_bytes, facts.nofile
    if memlock is not None and memlock != -1 and memlock < GIB:
        several = facts.nodes > 1
        verdict: Verdict = "warn" if several else "info" if facts.devices else "ok"
        yield Finding(
            name="locked memory",
            verdict=verdict,
            fact=f"memlock is {_size(memlock)}" if verdict != "ok" else f"{_size(memlock)}",
            matters="InfiniBand needs it unlimited" + ("" if several else "; irrelevant on one node"),
            remedy="docker --ulimit memlock=-1, systemd LimitMEMLOCK=infinity" if several else "",
        )
    elif memlock is not None:
        yield ok("locked memory", "unlimited" if memlock == -1 else _size(memlock))
    if nofile is not None and 0 <= nofile < FILES:
        yield warn(
            "open files",
            f"nofile is {nofile}",
            "DataLoader workers pass tensors as open files: 'Too many open files'",
            "docker --ulimit nofile=65536:65536, systemd LimitNOFILE=65536, `ulimit -n 65536`",
        )
    elif nofile is not None:
        yield ok("open files", "unlimited" if nofile == -1 else str(nofile))
    need = PIDS_PER_RANK * num_ranks(facts)
    if facts.processes is not None and 0 <= facts.processes < need:
        yield warn(
            "processes",
            f"{facts.processes} processes and threads allowed, {num_ranks(facts)} ranks may want {need}",
            "starting a rank or a DataLoader worker fails with 'Resource temporarily unavailable'",
            "docker --pids-limit=-1, `ulimit -u unlimited`",
        )
    elif facts.processes is not None:
        yield ok("processes", "enough allowed")


def cpus_and_memory(facts: Facts) -> Iterator[Finding]:
    """What a container leaves of the machine, and whether the ranks fit."""
    known = [n for n in (facts.cpu_quota, facts.cpus_allowed, facts.cpus) if n]
    ranks = num_ranks(facts)
    if known:
        usable = float(min(known))
        limited = usable < (facts.cpus or usable)
        fact = f"{usable:g} CPU{'s' * (usable != 1)}" + (f" (limit; the machine has {facts.cpus})" if limited else "")
        workers = facts.loader_workers or LOADER_WORKERS
        if usable < ranks:
            yield warn(
                "CPUs",
                f"{fact}: {ranks} ranks x {workers} loader workers do not fit",
                "ranks and DataLoader workers wait for each other, and GPUs for them",
                "give it more (docker --cpus), use fewer workers, and set OMP_NUM_THREADS=1",
            )
        elif limited:
            yield info("CPUs", fact, f"room for {max(int(usable / ranks) - 1, 0)} DataLoader workers per rank")
        else:
            yield ok("CPUs", fact)
    memory, limit = facts.memory_bytes, facts.memory_limit_bytes
    if limit is not None and (memory is None or limit < memory):
        host = f"; the machine has {_size(memory)}" if memory else ""
        yield info(
            "memory",
            f"{_size(limit)} (container limit{host})",
            f"beyond it the kernel kills a rank (SIGKILL); {_size(limit // ranks)} for each of {ranks} ranks",
        )
    elif memory:
        yield ok("memory", _size(memory))


# What each left-over variable does: the values that do it, whether it hurts on one node, how it is said.
_SWITCHES: tuple[tuple[str, str, Verdict, Verdict, str, str], ...] = (
    ("NCCL_P2P_DISABLE", "[^0]", "warn", "warn", "GPUs do not copy to each other directly: slow", ""),
    ("NCCL_SHM_DISABLE", "[^0]", "warn", "warn", "{shm}", ""),
    ("NCCL_IB_DISABLE", "[^0]", "info", "warn", "NCCL does not use InfiniBand: slow between nodes", ""),
    ("NCCL_NET", "(?i)socket", "info", "warn", "NCCL uses TCP sockets between nodes", ""),
    ("NCCL_NET_GDR_LEVEL", "(LOC|0)$", "info", "warn", "NCCL uses no GPUDirect RDMA", ""),
    ("NCCL_ALGO", ".", "info", "info", "NCCL does not choose its algorithm itself", ""),
    ("NCCL_PROTO", ".", "info", "info", "NCCL does not choose its protocol itself", ""),
    ("NCCL_M(AX|IN)_NCHANNELS", ".", "info", "info", "NCCL does not choose its number of channels itself", ""),
    ("NCCL_DEBUG", "TRACE", "info", "info", "every NCCL call is logged: slow", ""),
    ("NCCL_BLOCKING_WAIT|NCCL_ASYNC_ERROR_HANDLING", ".", "info", "info", "torch reads it as TORCH_{name} now", ""),
    ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", "warn", "warn", "a failed collective hangs for ever", ""),
    ("TORCH_NCCL_BLOCKING_WAIT", "[^0]", "info", "info", "every collective blocks the CPU", ""),
    (
        "TORCH_DISTRIBUTED_DEBUG",
        "DETAIL",
        "info",
        "info",
        "collectives are checked: small ones several times slower",
        "",
    ),
    ("CUDA_LAUNCH_BLOCKING", "[^0]", "warn", "warn", "every kernel is waited for: slow, for debugging only", ""),
    ("PYTORCH_NO_CUDA_MEMORY_CACHING", ".", "warn", "warn", "every tensor is allocated anew: slow", ""),
)


def variables(facts: Facts) -> Iterator[Finding]:
    """Left-over variables that slow down, break or override something."""
    set_here, quiet = facts.variables, True
    for pattern, values, alone, several, effect, remedy in _SWITCHES:
        for name in (n for n in set_here if re.fullmatch(pattern, n)):
            value = set_here[name].strip()
            if re.match(values, value):
                quiet = False
                shm = "ranks of one host cannot exchange data through shared memory"
                if set_here.get("NCCL_P2P_DISABLE", "0").strip() not in ("0", ""):
                    shm += "; with P2P off as well, NCCL falls to sockets on one host"
                text = effect.replace("{shm}", shm).replace("{name}", name)
                yield Finding(
                    name="variables",
                    verdict=several if facts.nodes > 1 else alone,
                    fact=f"{name}={value} is set",
                    matters=text,
                    remedy=remedy or f"unset {name}, unless it was set for a known fault",
                )
    yield from _interfaces(facts)
    preset = [n for n in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if n in set_here]
    if preset:
        quiet = False
        yield info("variables", f"{', '.join(preset)} set in this environment", "local ranks get their own values")
    if quiet:
        yield ok("variables", "none that slows down or breaks anything")


def _interfaces(facts: Facts) -> Iterator[Finding]:
    """Network interfaces that variables name but this machine does not have."""
    if facts.addresses is None:
        return
    here = list(facts.addresses)
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = facts.variables.get(name, "").strip()
        exact = name.startswith("GLOO") or value.startswith("=")
        if not value or value.startswith("^"):
            continue
        wanted = [w for w in value.removeprefix("=").split(",") if w]
        missing = [w for w in wanted if not any(i == w if exact else i.startswith(w.split(":")[0]) for i in here)]
        if missing and (name.startswith("GLOO") or len(missing) == len(wanted)):
            fails = name.startswith("GLOO")
            yield Finding(
                name="variables",
                verdict="fail" if fails else "warn",
                fact=f"{name}={value}: no such interface (this machine has {', '.join(here)})",
                matters="ranks cannot find each other" if fails else "NCCL finds no interface to start on",
                remedy=f"unset {name}, or name one that exists",
            )


def outside_address(facts: Facts) -> str | None:
    """The address under which other machines reach this one (for MASTER_ADDR), None if there is none.

    Never a loopback address: a host's own name often resolves to 127.0.1.1, which means another machine to each.
    """
    by_name = [a for a in facts.hostname_addresses or () if _reachable(a)]
    listed = [a for name, found in (facts.addresses or {}).items() if not name.startswith(_BRIDGES) for a in found]
    usable = [a for a in listed if _reachable(a)]
    known = [a for a in by_name if a in usable] or usable or by_name
    return next((a for a in known if ":" not in a), known[0] if known else None)


_BRIDGES = ("docker", "br-", "veth", "virbr", "cni", "flannel", "cali", "podman")


def _reachable(address: str) -> bool:
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    return not (found.is_loopback or found.is_link_local or found.is_unspecified)


def host_name(facts: Facts) -> Iterator[Finding]:
    """The host's own name resolves, for several nodes to an address that others can reach."""
    found = facts.hostname_addresses
    if facts.hostname is None or found is None:
        return
    if not found:
        yield warn(
            "host name",
            "this host's own name does not resolve",
            "several nodes cannot find each other by it; on one node all works (ranks use 127.0.0.1)",
            "add it to /etc/hosts"
            + (f"; for several nodes use {outside_address(facts)}" if outside_address(facts) else ""),
        )
    elif not any(map(_reachable, found)) and facts.nodes > 1:
        yield warn(
            "host name",
            f"this host's own name resolves to {found[0]}",
            "to every other node that address is itself",
            f"use {outside_address(facts) or 'an address of a real interface'} as MASTER_ADDR",
        )
    else:
        yield ok("host name", "resolves")


def jupyter(facts: Facts) -> Iterator[Finding]:
    """The live widget can be shown."""
    packages = facts.packages
    if not packages:
        return
    lacking = [p for p in ("ipywidgets", "anywidget") if p not in packages]
    if lacking:
        yield warn(
            "Jupyter",
            f"{' and '.join(lacking)} not installed",
            "the live dashboard is shown as text",
            f"pip install {' '.join(lacking)}",
        )
    elif "jupyterlab" not in packages:
        yield info(
            "Jupyter",
            "JupyterLab is not in this environment, but in its server's",
            "that one needs anywidget and jupyterlab_widgets to show the live dashboard",
        )
    elif len(facts.labextensions) < 2:
        lost = {"anywidget": "anywidget", "@jupyter-widgets/jupyterlab-manager": "jupyterlab_widgets"}
        names = [p for e, p in lost.items() if e not in facts.labextensions]
        yield warn(
            "Jupyter",
            f"JupyterLab lacks the front end of {' and '.join(names)}",
            "the live dashboard is shown as text",
            f"pip install --force-reinstall {' '.join(names)}, then reload the page",
        )
    else:
        yield ok("Jupyter", f"JupyterLab {packages['jupyterlab']}")


def allocation(facts: Facts) -> Iterator[Finding]:
    """Who gave this machine to us: for information."""
    v = facts.variables
    if "SLURM_JOB_ID" in v:
        nodes, tasks = v.get("SLURM_JOB_NUM_NODES", "?"), v.get("SLURM_NTASKS", "?")
        yield info(
            "allocation", f"inside a Slurm job: {nodes} nodes, {tasks} tasks", "ranks are started on this machine only"
        )
    if facts.container not in (None, "none", "docker", "podman"):
        yield info("allocation", f"inside a container ({facts.container})")


CHECKS = (torch_import, *GPU_CHECKS, shared_memory, limits, cpus_and_memory, variables, host_name, jupyter, allocation)


def check(facts: Facts) -> list[Finding]:
    """Judge a machine.

    Returns
    -------
    list of Finding
        In the order of the checks; those that found nothing to say are silent.
    """
    found = [f for each in CHECKS for f in each(facts)]
    troubled = {f.name for f in found if f.verdict not in ("ok", "skipped")}
    return [f for f in found if f.verdict not in ("ok", "skipped") or f.name not in troubled]


def explain_memory(
    *,
    allocated_bytes: int,
    reserved_bytes: int,
    used_bytes: int | None = None,
    total_bytes: int | None = None,
    inactive_split_bytes: int = 0,
) -> list[Finding]:
    """Explain why torch's and the driver's numbers of one GPU differ; none of them is to be added to another.

    Parameters
    ----------
    allocated_bytes, reserved_bytes, inactive_split_bytes
        ``torch.cuda.memory_stats``: in tensors; held by torch's allocator; unused parts of blocks partly in use.
    used_bytes, total_bytes
        What the driver says of the whole GPU, None if it does not.
    """
    cached = max(reserved_bytes - allocated_bytes, 0)
    found = [
        ok("allocated", f"{_size(allocated_bytes)} in tensors"),
        Finding(
            name="reserved",
            verdict="info" if inactive_split_bytes > reserved_bytes // 5 else "ok",
            fact=f"{_size(reserved_bytes)} held by torch: the tensors, and {_size(cached)} cached for the next ones"
            + (f", of which {_size(inactive_split_bytes)} in pieces between tensors" if inactive_split_bytes else ""),
            matters="fragmentation: large tensors may not fit although memory is free" if inactive_split_bytes else "",
            remedy="set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before the ranks start"
            if inactive_split_bytes > reserved_bytes // 5
            else "",
        ),
    ]
    if used_bytes is not None:
        outside = max(used_bytes - reserved_bytes, 0)
        of = f" of {_size(total_bytes)}" if total_bytes else ""
        fact = f"{_size(used_bytes)}{of}: {_size(outside)} outside torch (CUDA context, NCCL, other processes)"
        found.append(ok("GPU in use", fact))
    return found


def _size(num_bytes: int) -> str:
    """``64 MiB``, ``4 GiB``, ``21.5 GiB``."""
    for unit, scale in (("TiB", GIB * 1024), ("GiB", GIB), ("MiB", MIB), ("KiB", 1024)):
        if num_bytes >= scale:
            return f"{round(num_bytes / scale, 1):g} {unit}"
    return f"{num_bytes} B"
