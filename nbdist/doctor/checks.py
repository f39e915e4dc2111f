"""The doctor's checks: small functions over the gathered facts, each yielding findings.

Unknown facts are not judged. A healthy machine gets no warning.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from nbdist.doctor.facts import Facts, Health, Torch, num_ranks, outside_address, reachable, seen_by_cuda
from nbdist.doctor.finding import Finding, Verdict, counted, size_text, text_table
from nbdist.doctor.gpu import NO_GPU, Device, Link

__all__ = ["SHM_REMEDY", "check", "link_table"]

MIB, GIB = 1 << 20, 1 << 30
SMALL_SHM = 512 * MIB  # NCCL makes segments of some 10 to 33 MB each, a DataLoader worker holds whole batches
LOADER_WORKERS = 4  # per rank, where nothing else is said
FILES = 1024  # the usual soft limit; a DataLoader passes each tensor as a descriptor
PIDS_PER_RANK = 256  # threads of a rank with its loaders and NCCL's helpers
SHM_REMEDY = "start the container with --shm-size=1g or --ipc=host (Kubernetes: a Memory emptyDir at /dev/shm)"

# The oldest driver that runs any build of a CUDA major version (minor-version compatibility):
# https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html
OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}


# ---- torch, driver, GPUs


def torch_import(facts: Facts) -> Iterator[Finding]:
    """Torch is there, and nothing hides it."""
    for path in facts.shadows:
        name = Path(path).stem
        vital = name in ("torch", "numpy", "nbdist")
        fact = f"{path} hides the {'library' if vital else 'module'} {name}"
        matters, remedy = f"`import {name}` loads this file instead", "rename it, and remove __pycache__ beside it"
        yield Finding("file names", "fail" if vital else "warn", fact, matters, remedy)
    error = facts.torch and facts.torch.error
    if error and "No module named 'torch'" in error:
        yield Finding("torch", "fail", "torch is not installed", "no rank can start", "pip install torch")
    elif error:
        remedy = "reinstall it in this environment (pip install --force-reinstall torch)"
        yield Finding("torch", "fail", f"torch cannot be imported: {error}", "no rank can start", remedy)
    elif facts.torch and facts.torch.version:
        yield Finding("torch", "ok", facts.torch.version)
        if facts.torch.gloo is False:
            fact = f"torch {facts.torch.version} was built without gloo"
            yield Finding("torch", "fail", fact, "CPU ranks need it", "install torch from PyPI")


def gpu_presence(facts: Facts) -> Iterator[Finding]:
    """There is a GPU, and the driver answers."""
    found = facts.gpus
    if found is None:
        return
    reason = found.reason or NO_GPU
    if found.devices:
        names = {d.name or "unknown" for d in found.devices}
        yield Finding("GPUs", "ok", f"{len(found.devices)} × {', '.join(sorted(names))}")
    elif found.error not in (None, "LibraryNotFound", "ImportError"):
        fact, _, remedy = reason.partition(": ")
        remedy = remedy or "run nvidia-smi: it shows the driver's own message"
        yield Finding("GPUs", "fail", fact, "no GPU can be used or watched", remedy)
    elif facts.pci_gpus:
        fact, remedy = (
            f"{counted(facts.pci_gpus, 'NVIDIA GPU')} on the PCI bus, but {reason}",
            "install the NVIDIA driver",
        )
        if facts.container not in (None, "none"):
            remedy = "start the container with --gpus all (and the NVIDIA container toolkit)"
        yield Finding("GPUs", "warn", fact, "training runs on the CPU (gloo)", remedy)
    elif facts.torch and facts.torch.cuda_available:
        fact = f"CUDA works, but NVML does not: {reason}"
        yield Finding("GPUs", "info", fact, "memory, load and power of the GPUs cannot be shown")
    else:
        yield Finding("GPUs", "info", f"no GPU: gloo on CPU ({reason})")


def torch_build(facts: Facts) -> Iterator[Finding]:
    """Torch was built for GPUs, the driver supports that build, and CUDA comes up."""
    torch, found, seen = facts.torch, facts.gpus, seen_by_cuda(facts)
    if torch is None or not torch.version:
        return
    if found is None or not found.devices:
        yield Finding("driver", "skipped", "no GPU")
        return
    gpus = f"{counted(len(found.devices), 'GPU')} present"
    if torch.cuda is None and torch.hip is None:
        fact = f"{gpus}, but torch {torch.version} cannot use them: the wheel is a CPU build"
        remedy = "install a CUDA build: pip install --force-reinstall torch (pytorch.org names the index)"
        yield Finding("torch", "warn", fact, "training runs on gloo; the driver is not the cause", remedy)
        return
    if torch.cuda and found.driver and found.cuda_driver:
        major = int(torch.cuda.split(".")[0])
        newest = ".".join(map(str, found.cuda_driver))
        # A forward-compatibility package makes an old driver do: what torch says counts.
        if major > found.cuda_driver[0] and not torch.cuda_available:
            need = f" (driver {OLDEST_DRIVER[major]} or newer)" if major in OLDEST_DRIVER else ""
            fact = f"driver {found.driver} supports CUDA {newest}, torch was built for {torch.cuda}"
            matters = f"torch.cuda.is_available() is False for that reason, although {gpus}; until then gloo on CPU"
            remedy = f"update the driver{need}, or install a torch build for CUDA {found.cuda_driver[0]}"
            yield Finding("driver", "fail", fact, matters, remedy)
            return
        yield Finding("driver", "ok", f"{found.driver} runs torch's CUDA {torch.cuda} build")
    if torch.cuda_available is False and not seen.reason:
        fact = f"{gpus}, but torch.cuda.is_available() is False" + (f": {torch.cuda_error}" if torch.cuda_error else "")
        remedy = "look at nvidia-smi, dmesg; NVSwitch machines need nvidia-fabricmanager, containers /dev/nvidia-uvm"
        yield Finding("CUDA", "fail", fact, "until then the backend is gloo on CPU", remedy)
    elif torch.device_count not in (None, len(seen.devices)) and not seen.reason:
        fact = f"torch counts {torch.device_count} GPUs where {len(seen.devices)} should be visible"
        remedy = "restart the kernel after changing CUDA_VISIBLE_DEVICES, and compare with nvidia-smi -L"
        yield Finding("CUDA", "warn", fact, "ranks are given GPUs by number", remedy)
    for number, capability in enumerate(torch.capabilities or ()):
        if not _has_kernels(capability, torch):
            model = ".".join(map(str, capability))
            fact = f"torch {torch.version} has no kernels for cuda:{number} (compute capability {model})"
            remedy = "install a torch build for an older CUDA, which still supports this GPU"
            yield Finding("torch", "fail", fact, "every operation on it raises: no kernel image is available", remedy)


def _has_kernels(capability: tuple[int, ...], torch: Torch) -> bool:
    """Whether a build runs on a GPU: machine code of its major version up to its minor, or code to be compiled."""
    for name in torch.architectures:
        kind, _, digits = name.partition("_")
        digits = digits.rstrip("af")  # sm_90a, sm_100f: for this architecture, or its family
        if digits.isdigit() and len(digits) > 1:
            built = (int(digits[:-1]), int(digits[-1]))
            if built <= capability and (kind == "compute" or built[0] == capability[0]):
                return True
    return not torch.architectures


def visibility(facts: Facts) -> Iterator[Finding]:
    """CUDA_VISIBLE_DEVICES hides, repeats and reorders no GPU."""
    seen, name = seen_by_cuda(facts), "visible GPUs"
    if seen.reason and "hidden" in seen.reason:
        yield Finding(name, "info", seen.reason, "no GPU: gloo on CPU", "unset it to use the GPUs")
    elif seen.reason:
        remedy = "name each GPU once, by an index that exists"
        yield Finding(name, "warn", seen.reason, "no GPU: gloo on CPU", remedy)
    for note in () if seen.reason else seen.notes:
        if "MIG" in note:
            yield Finding(name, "info", note, "one rank can be started")
        else:
            yield Finding(name, "warn", note, "ranks get what is left", "name GPUs that exist (nvidia-smi -L)")
    order = [None if d is None else d.index for d in seen.devices]
    if None in order:
        fact = "different cards: CUDA counts the fastest first, NVML by PCI bus"
        remedy = "set CUDA_DEVICE_ORDER=PCI_BUS_ID to have one order"
        yield Finding(name, "info", fact, "cuda:0 need not be GPU 0 of nvidia-smi", remedy)
    elif order != list(range(len(order))):
        listed = ", ".join(f"cuda:{i} is GPU {n}" for i, n in enumerate(order[:8]))
        yield Finding(name, "info", f"{listed} of nvidia-smi", "their numbers differ")
    for d in facts.devices:
        if d.mig:
            fact = f"GPU {d.index} is divided into {counted(len(d.instances), 'instance')}"
            yield Finding("MIG", "info", fact, "a process sees one instance: one rank")


def gpu_health(facts: Facts) -> Iterator[Finding]:
    """Memory errors, slowed clocks, other users, compute mode, PCIe lanes."""
    found = [f for h in facts.health for f in _health(h)] + [f for d in facts.devices for f in _use(facts, d)]
    yield from found
    if facts.health and not found:
        yield Finding("GPU health", "ok", "no memory errors, full clocks and lanes, as far as told")


def _health(h: Health) -> Iterator[Finding]:
    gpu, reset = f"GPU {h.index}", "reset the GPU (nvidia-smi -r) or reboot; if they come back, have it exchanged"
    wrong = "results may be wrong and processes killed (Xid 48, 63, 64, 94, 95 in dmesg)"
    if h.remap_failed:
        yield Finding("memory errors", "fail", f"{gpu}: a memory row is broken", wrong, "have it exchanged")
    elif h.ecc_errors:
        yield Finding("memory errors", "warn", f"{gpu}: {h.ecc_errors} uncorrected memory errors", wrong, reset)
    elif h.remap_pending:
        yield Finding("memory errors", "warn", f"{gpu}: a memory row waits to be replaced", "a reset does it", reset)
    if h.compute_mode == "Prohibited":
        yield Finding("compute mode", "fail", f"{gpu}: Prohibited", "no process may use it", "nvidia-smi -c DEFAULT")
    elif h.compute_mode == "Exclusive_Process":
        yield Finding("compute mode", "info", f"{gpu}: Exclusive_Process", "one process at a time may use it")
    if h.pcie_width and h.pcie_width_max and h.pcie_width < h.pcie_width_max:
        fact = f"{gpu} runs on {h.pcie_width} of {h.pcie_width_max} lanes"
        remedy = "look for a loose card or riser, or a slot shared with another card"
        yield Finding("PCIe", "warn", fact, "copies to and from it take longer in proportion", remedy)


def _use(facts: Facts, d: Device) -> Iterator[Finding]:
    slowed = [t for t in d.throttle or () if t not in ("power limit", "sync boost")]  # a busy GPU meets its limit
    if slowed:
        fact = f"GPU {d.index} is slowed down: {', '.join(slowed)}"
        yield Finding("clocks", "warn", fact, "it holds up every other rank", "look at cooling and power supply")
    others = [p for p in d.processes or () if p.pid not in facts.own_pids]
    if others:
        sizes = [p.used_bytes for p in others if p.used_bytes is not None]
        told = f", {sum(sizes) / GIB:.1f} GiB" if len(sizes) == len(others) else ""
        full = bool(d.memory_total_bytes and (d.memory_used_bytes or 0) > d.memory_total_bytes / 2)
        fact = f"GPU {d.index}: {counted(len(others), 'other process')}{told}"
        remedy = "nvidia-smi shows them; CUDA_VISIBLE_DEVICES chooses other GPUs"
        yield Finding("other processes", "warn" if full else "info", fact, "they share its memory and time", remedy)


def nccl(facts: Facts) -> Iterator[Finding]:
    """NCCL is there, and it is the one torch came with."""
    torch = facts.torch
    if torch is None or torch.error:
        return
    if torch.cuda is None or not facts.devices:
        yield Finding("NCCL", "skipped", "a CPU build of torch" if facts.devices else "no GPU")
    elif torch.nccl is None:
        fact = f"torch {torch.version} was built without NCCL"
        remedy = "install torch from pytorch.org's index or PyPI"
        yield Finding("NCCL", "fail", fact, "GPUs can only be joined by gloo, through the CPU", remedy)
    elif facts.nccl_package and torch.nccl != facts.nccl_package:
        where = f" ({torch.nccl_library})" if torch.nccl_library else ""
        fact = f"NCCL {torch.nccl} is loaded{where}, torch came with {facts.nccl_package}"
        remedy = "take the other one out of LD_LIBRARY_PATH and LD_PRELOAD"
        yield Finding("NCCL", "warn", fact, "all ranks must run the same, and torch was tested with its own", remedy)
    else:
        yield Finding("NCCL", "ok", torch.nccl)


# ---- links


def link_table(facts: Facts) -> list[str]:
    """How the GPUs are wired, as a matrix of text lines; empty with fewer than two."""
    if len(facts.devices) < 2 or not facts.links:
        return []
    cells = {}
    for link in facts.links:
        path = f"NV{link.nvlinks}" if link.nvlinks else link.path or "?"
        cells[link.first, link.second] = cells[link.second, link.first] = path + "!P2P" * (link.peer is False)
    indices = [d.index for d in facts.devices]
    rows = [[f"GPU{a}", *("." if a == b else cells.get((a, b), "?") for b in indices)] for a in indices]
    table = text_table([["links", *(f"GPU{b}" for b in indices)], *rows])
    legend = "NVn: NVLinks; PIX, PXB: PCIe switches; PHB, NODE, SYS: through the CPU, ever longer; !P2P: no peer access"
    return [*table, legend]


def links(facts: Facts) -> Iterator[Finding]:
    """The GPUs reach each other's memory, over NVLink, and nothing stands in between."""
    if facts.gpus is not None and len(facts.devices) < 2:
        for name in ("P2P", "NVLink"):
            yield Finding(name, "skipped", "one GPU" if facts.devices else "no GPU")
    if not facts.links:
        return
    bare = [link for link in facts.links if not link.nvlinks]
    peers = {link: _peer(facts, link) for link in facts.links}
    if any(peers[link] for link in bare) and (facts.acs or facts.iommu == "translated"):
        causes = ["ACS is on"] * bool(facts.acs) + ["the IOMMU translates"] * (facts.iommu == "translated")
        fact = f"PCIe GPUs offer peer access, and {' and '.join(causes)}"
        remedy = "nbdist doctor --preflight tests it; if it hangs NCCL_P2P_DISABLE=1, or ACS off and iommu=pt"
        yield Finding("P2P", "warn", fact, "copies are known to hang or to deliver wrong data then", remedy)
    elif False in peers.values():
        fact = f"no peer access between GPUs {_pairs([link for link in peers if peers[link] is False])}"
        yield Finding("P2P", "info", fact, "NCCL goes through host memory there: slower, and needs a large /dev/shm")
    elif all(peers.values()):
        yield Finding("P2P", "ok", "every GPU can read every other's memory")
    if len(bare) == len(facts.links):
        yield Finding("NVLink", "ok", "none; the GPUs are joined by PCIe")
    elif bare:
        fact, matters = (
            f"no NVLink between GPUs {_pairs(bare)}, others have it",
            "a ring is as fast as its slowest pair",
        )
        yield Finding("NVLink", "info", fact, matters, "choose GPUs that NVLink joins (CUDA_VISIBLE_DEVICES)")
    else:
        counts = sorted({link.nvlinks or 0 for link in facts.links})
        yield Finding("NVLink", "ok", f"{'-'.join(map(str, counts))} links between any two GPUs")


def _peer(facts: Facts, link: Link) -> bool | None:
    """Whether CUDA, else the driver, offers peer access between two GPUs."""
    torch = facts.torch
    at = {d.index: i for i, d in enumerate(seen_by_cuda(facts).devices) if d is not None}
    i, j = at.get(link.first), at.get(link.second)
    if torch and torch.peers and i is not None and j is not None and max(i, j) < len(torch.peers):
        return torch.peers[i][j] and torch.peers[j][i]
    return link.peer


def _pairs(links: list[Link]) -> str:
    return ", ".join(f"{link.first}-{link.second}" for link in links[:8]) + " and more" * (len(links) > 8)


def numa(facts: Facts) -> Iterator[Finding]:
    """The process may run on CPUs near its GPUs."""
    far = [str(h.index) for h in facts.health if facts.numa_cpus.get(str(h.numa_node)) == 0]
    if far:
        fact = f"no CPU near GPU {', '.join(far)} may be used by this process"
        remedy = "widen the CPU set (taskset, --cpuset-cpus, Slurm --cpu-bind)"
        yield Finding("NUMA", "info", fact, "copies between host and GPU cross the CPU sockets", remedy)


# ---- what the machine or the container allows


def shared_memory(facts: Facts) -> Iterator[Finding]:
    """/dev/shm is large enough for NCCL and for DataLoader workers."""
    size, free = facts.shm_bytes, facts.shm_free_bytes
    matters = "NCCL's shared-memory segments and DataLoader workers need it (workers are killed by a bus error)"
    if size is None:
        return
    if size < SMALL_SHM:
        needed = len(seen_by_cuda(facts).devices) > 1 or facts.loader_workers
        fact = f"/dev/shm has {size_text(size)}" + " (docker's default of 64 MB)" * (size == 64 * MIB)
        yield Finding("shared memory", "fail" if needed else "warn", fact, matters, SHM_REMEDY)
    elif free is not None and free < SMALL_SHM:
        fact = f"/dev/shm has only {size_text(free)} left"
        yield Finding("shared memory", "warn", fact, matters, "remove what was left there (ls -l /dev/shm)")
    else:
        yield Finding("shared memory", "ok", f"/dev/shm has {size_text(size)}")


def limits(facts: Facts) -> Iterator[Finding]:
    """Locked memory, open files, processes."""
    memlock = facts.memlock_bytes
    if memlock is None or not 0 <= memlock < GIB or (facts.nodes == 1 and not facts.devices):
        yield from _limit("locked memory", memlock, 0, "", "")
    elif facts.nodes == 1:
        matters = "InfiniBand needs it unlimited; irrelevant on one node"
        yield Finding("locked memory", "info", f"memlock is {size_text(memlock)}", matters)
    else:
        remedy = "docker --ulimit memlock=-1, systemd LimitMEMLOCK=infinity"
        fact = f"memlock is {size_text(memlock)}"
        yield Finding("locked memory", "warn", fact, "InfiniBand needs it unlimited", remedy)
    matters = "DataLoader workers pass tensors as open files: 'Too many open files'"
    remedy = "docker --ulimit nofile=65536:65536, systemd LimitNOFILE=65536, `ulimit -n 65536`"
    yield from _limit("open files", facts.nofile, FILES, matters, remedy)
    need = PIDS_PER_RANK * num_ranks(facts)
    matters = f"ranks may want {need}: starting one fails with 'Resource temporarily unavailable'"
    yield from _limit("processes", facts.processes, need, matters, "docker --pids-limit=-1, `ulimit -u unlimited`")


def _limit(name: str, value: int | None, least: int, matters: str, remedy: str) -> Iterator[Finding]:
    if value is not None and 0 <= value < least:
        yield Finding(name, "warn", f"only {value} allowed", matters, remedy)
    elif value is not None:
        yield Finding(name, "ok", "unlimited" if value == -1 else str(value))


def cpus_and_memory(facts: Facts) -> Iterator[Finding]:
    """What a container leaves of the machine, and whether the ranks fit."""
    usable = min((float(n) for n in (facts.cpu_quota, facts.cpus_allowed, facts.cpus) if n), default=None)
    ranks, memory, limit = num_ranks(facts), facts.memory_bytes, facts.memory_limit_bytes
    if usable is not None:
        limited = usable < (facts.cpus or usable)
        fact = f"{usable:g} CPU{'s' * (usable != 1)}" + (f" (limit; the machine has {facts.cpus})" if limited else "")
        if usable < ranks:
            fact += f": {ranks} ranks x {facts.loader_workers or LOADER_WORKERS} loader workers do not fit"
            remedy = "give it more (docker --cpus), use fewer workers, and set OMP_NUM_THREADS=1"
            yield Finding("CPUs", "warn", fact, "ranks and workers wait for each other, GPUs for them", remedy)
        elif limited:
            room = max(int(usable / ranks) - 1, 0)
            yield Finding("CPUs", "info", fact, f"room for {room} DataLoader workers per rank")
        else:
            yield Finding("CPUs", "ok", fact)
    if limit is not None and (memory is None or limit < memory):
        host = f"; the machine has {size_text(memory)}" if memory else ""
        matters = f"beyond it the kernel kills a rank (SIGKILL); {size_text(limit // ranks)} for each of {ranks} ranks"
        yield Finding("memory", "info", f"{size_text(limit)} (container limit{host})", matters)
    elif memory:
        yield Finding("memory", "ok", size_text(memory))


# ---- the environment


# What each left-over variable does: the values that do it, the verdict on one node, that on several.
_SWITCHES: tuple[tuple[str, str, Verdict, Verdict, str], ...] = (
    ("NCCL_P2P_DISABLE", "[^0]", "warn", "warn", "GPUs do not copy to each other directly: slow"),
    ("NCCL_SHM_DISABLE", "[^0]", "warn", "warn", "no shared memory; with P2P off NCCL falls to sockets on one host"),
    ("NCCL_IB_DISABLE", "[^0]", "info", "warn", "NCCL does not use InfiniBand: slow between nodes"),
    ("NCCL_NET", "(?i)socket", "info", "warn", "NCCL uses TCP sockets between nodes"),
    ("NCCL_NET_GDR_LEVEL", "(LOC|0)$", "info", "warn", "NCCL uses no GPUDirect RDMA"),
    ("NCCL_(ALGO|PROTO|MAX_NCHANNELS|MIN_NCHANNELS)", ".", "info", "info", "NCCL does not choose it itself"),
    ("NCCL_DEBUG", "TRACE", "info", "info", "every NCCL call is logged: slow"),
    ("NCCL_(BLOCKING_WAIT|ASYNC_ERROR_HANDLING)", ".", "info", "info", "torch reads it with TORCH_ before it now"),
    ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", "warn", "warn", "a failed collective hangs for ever"),
    ("TORCH_NCCL_BLOCKING_WAIT", "[^0]", "info", "info", "every collective blocks the CPU"),
    ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "info", "info", "collectives are checked: small ones several times slower"),
    ("CUDA_LAUNCH_BLOCKING", "[^0]", "warn", "warn", "every kernel is waited for: slow, for debugging only"),
    ("PYTORCH_NO_CUDA_MEMORY_CACHING", ".", "warn", "warn", "every tensor is allocated anew: slow"),
)


def variables(facts: Facts) -> Iterator[Finding]:
    """Left-over variables that slow down, break or override something."""
    found = []
    for pattern, values, alone, several, effect in _SWITCHES:
        for name, value in facts.variables.items():
            if re.fullmatch(pattern, name) and re.match(values, value.strip()):
                verdict = several if facts.nodes > 1 else alone
                remedy = f"unset {name}, unless it was set for a known fault"
                found.append(Finding("variables", verdict, f"{name}={value.strip()} is set", effect, remedy))
    found += _interfaces(facts)
    if preset := [n for n in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if n in facts.variables]:
        fact = f"{', '.join(preset)} set in this environment"
        found.append(Finding("variables", "info", fact, "local ranks get their own values"))
    yield from found or [Finding("variables", "ok", "none that slows down or breaks anything")]


def _interfaces(facts: Facts) -> Iterator[Finding]:
    """Network interfaces that variables name but this machine does not have; NCCL takes prefixes, gloo names."""
    here = facts.addresses or {}
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME") if here else ():
        value, gloo = facts.variables.get(name, "").strip(), name.startswith("GLOO")
        exact = gloo or value.startswith("=")
        wanted = [w for w in value.removeprefix("=").split(",") if w and not value.startswith("^")]
        known = [w for w in wanted if any(i == w if exact else i.startswith(w.split(":")[0]) for i in here)]
        if wanted and (len(known) < len(wanted) if gloo else not known):
            fact = f"{name}={value}: no such interface (this machine has {', '.join(here)})"
            matters = "ranks cannot find each other"
            remedy = f"unset {name}, or name one that exists"
            yield Finding("variables", "fail" if gloo else "warn", fact, matters, remedy)


def host_name(facts: Facts) -> Iterator[Finding]:
    """The host's own name resolves, for several nodes to an address that others can reach."""
    found, address = facts.hostname_addresses, outside_address(facts)
    if facts.hostname is None or found is None:
        return
    if not found:
        matters = "several nodes cannot find each other by it; on one node all works (ranks use 127.0.0.1)"
        remedy = "add it to /etc/hosts" + (f"; for several nodes use {address}" if address else "")
        yield Finding("host name", "warn", "this host's own name does not resolve", matters, remedy)
    elif facts.nodes > 1 and not any(map(reachable, found)):
        fact = f"this host's own name resolves to {found[0]}"
        remedy = f"use {address or 'an address of a real interface'} as MASTER_ADDR"
        yield Finding("host name", "warn", fact, "to every other node that address is itself", remedy)
    else:
        yield Finding("host name", "ok", "resolves")


def jupyter(facts: Facts) -> Iterator[Finding]:
    """The live widget can be shown."""
    fronts = {"anywidget": "anywidget", "@jupyter-widgets/jupyterlab-manager": "jupyterlab_widgets"}
    lacking = [p for p in ("ipywidgets", "anywidget") if p not in facts.packages]
    lost = [package for front, package in fronts.items() if front not in facts.labextensions]
    if not facts.packages:
        return
    if lacking:
        fact, remedy = f"{' and '.join(lacking)} not installed", f"pip install {' '.join(lacking)}"
        yield Finding("Jupyter", "warn", fact, "the live dashboard is shown as text", remedy)
    elif "jupyterlab" not in facts.packages:
        fact = "JupyterLab is not in this environment, but in its server's"
        yield Finding("Jupyter", "info", fact, "that one needs anywidget and jupyterlab_widgets for the dashboard")
    elif lost:
        fact = f"JupyterLab lacks the front end of {' and '.join(lost)}"
        remedy = f"pip install --force-reinstall {' '.join(lost)}, then reload the page"
        yield Finding("Jupyter", "warn", fact, "the live dashboard is shown as text", remedy)
    else:
        yield Finding("Jupyter", "ok", f"JupyterLab {facts.packages['jupyterlab']}")


def allocation(facts: Facts) -> Iterator[Finding]:
    """Who gave this machine to us: for information."""
    v = facts.variables
    if "SLURM_JOB_ID" in v:
        nodes, tasks = v.get("SLURM_JOB_NUM_NODES", "?"), v.get("SLURM_NTASKS", "?")
        fact = f"inside a Slurm job: {nodes} nodes, {tasks} tasks"
        yield Finding("allocation", "info", fact, "ranks are started on this machine only")
    if facts.container not in (None, "none", "docker", "podman"):
        yield Finding("allocation", "info", f"inside a container ({facts.container})")


CHECKS = (
    torch_import, gpu_presence, torch_build, visibility, gpu_health, nccl, links, numa, shared_memory, limits,
    cpus_and_memory, variables, host_name, jupyter, allocation,
)  # fmt: skip


def check(facts: Facts) -> list[Finding]:
    """Judge a machine: findings in the order of the checks; those that found nothing to say are silent."""
    found = [f for each in CHECKS for f in each(facts)]
    troubled = {f.name for f in found if f.verdict not in ("ok", "skipped")}
    return [f for f in found if f.verdict not in ("ok", "skipped") or f.name not in troubled]
