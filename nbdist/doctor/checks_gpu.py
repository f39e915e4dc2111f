"""Checks of driver, torch's build, GPUs, their links and NCCL: pure functions over the gathered facts."""

from __future__ import annotations

from collections.abc import Iterator

from nbdist.doctor.facts import Facts
from nbdist.doctor.finding import Finding, fail, info, ok, skipped, warn
from nbdist.doctor.gpu import NO_GPU, Link
from nbdist.doctor.visible import Visible, visible

__all__ = ["GPU_CHECKS", "link_table", "seen_by_cuda"]

GIB = 1 << 30

# The oldest driver that runs any build of a CUDA major version (minor-version compatibility):
# https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html
OLDEST_DRIVER = {11: (450, 80), 12: (525, 60), 13: (580, 65)}

_MENDS_NVML = {
    "LibRmVersionMismatch": "reboot, or restart the container",
    "DriverNotLoaded": "load it (modprobe nvidia), or reboot after an update of the kernel",
    "ImportError": "install nvidia-ml-py",
}


def seen_by_cuda(facts: Facts) -> Visible | None:
    """Which GPUs CUDA shows a process here; None where NVML lists none."""
    if facts.gpus is None or not facts.gpus.devices:
        return None
    uuids = facts.torch.uuids if facts.torch else None
    return visible(facts.gpus, facts.variables, torch_uuids=uuids)


def _count(facts: Facts) -> int:
    """GPUs that ranks can use."""
    seen = seen_by_cuda(facts)
    return len(seen.devices) if seen else 0


def gpu_presence(facts: Facts) -> Iterator[Finding]:
    """There is a GPU, and the driver answers."""
    found = facts.gpus
    if facts.devices or found is None:
        if facts.devices:
            names = {d.name or "unknown" for d in facts.devices}
            yield ok("GPUs", f"{len(facts.devices)} × {', '.join(sorted(names))}")
        return
    reason, error = found.reason or NO_GPU, found.error
    if error not in (None, "LibraryNotFound", "ImportError"):
        short = reason.split(":")[0]
        remedy = _MENDS_NVML.get(error or "", "run nvidia-smi: it shows the driver's own message")
        yield fail("GPUs", short, "no GPU can be used or watched", remedy)
    elif facts.pci_gpus:
        yield warn(
            "GPUs",
            f"{facts.pci_gpus} NVIDIA GPU{'s' * (facts.pci_gpus > 1)} on the PCI bus, but {reason}",
            "training runs on the CPU (gloo)",
            "start the container with --gpus all (and the NVIDIA container toolkit)"
            if facts.container not in (None, "none")
            else "install the NVIDIA driver",
        )
    elif facts.torch and facts.torch.cuda_available:
        yield info(
            "GPUs", f"CUDA works, but NVML does not: {reason}", "memory, load and power of the GPUs cannot be shown"
        )
    else:
        yield info("GPUs", f"no GPU: gloo on CPU ({reason})")


def torch_build(facts: Facts) -> Iterator[Finding]:
    """Torch was built for GPUs, and the driver supports that build."""
    torch = facts.torch
    if torch is None or torch.error or torch.version is None:
        return
    if not facts.devices:
        yield skipped("driver", "no GPU")
        return
    count = len(facts.devices)
    gpus = f"{count} GPU{'s' * (count > 1)} present"
    if torch.cuda is None and torch.hip is None:
        yield warn(
            "torch",
            f"{gpus}, but torch {torch.version} cannot use them: the wheel is a CPU build",
            "training runs on the CPU (gloo); the driver is not the cause",
            "install a CUDA build: pip install --force-reinstall torch (pytorch.org names the index)",
        )
        return
    driver, supported = facts.gpus and facts.gpus.driver, facts.gpus and facts.gpus.cuda_driver
    if torch.cuda and driver and supported:
        major = int(torch.cuda.split(".")[0])
        oldest = OLDEST_DRIVER.get(major)
        if major > supported[0] and not torch.cuda_available:
            need = f" (driver {oldest[0]} or newer)" if oldest else ""
            yield fail(
                "driver",
                f"driver {driver} supports CUDA {supported[0]}.{supported[1]}, torch was built for {torch.cuda}",
                f"torch.cuda.is_available() is False for that reason, although {gpus}; until then the "
                "backend is gloo on CPU",
                f"update the driver{need}, or install a torch build for CUDA {supported[0]}",
            )
            return
        yield ok("driver", f"{driver} runs torch's CUDA {torch.cuda} build")
    yield from _usable(facts, gpus)


def _usable(facts: Facts, gpus: str) -> Iterator[Finding]:
    """What else keeps CUDA from working, or a GPU from running torch's kernels."""
    torch, seen = facts.torch, seen_by_cuda(facts)
    if torch is None or seen is None or seen.reason:
        return
    if torch.cuda_available is False:
        said = f": {torch.cuda_error}" if torch.cuda_error else ""
        yield fail(
            "CUDA",
            f"{gpus}, but torch.cuda.is_available() is False{said}",
            "until then the backend is gloo on CPU",
            "look at nvidia-smi and dmesg; on NVSwitch machines nvidia-fabricmanager must run, in containers "
            "/dev/nvidia-uvm must exist",
        )
    elif torch.device_count is not None and torch.device_count != len(seen.devices):
        yield warn(
            "CUDA",
            f"torch counts {torch.device_count} GPUs where {len(seen.devices)} should be visible",
            "ranks are given GPUs by number",
            "restart the kernel after changing CUDA_VISIBLE_DEVICES, and compare with nvidia-smi -L",
        )
    lacking = [i for i, c in enumerate(torch.capabilities or ()) if not _has_kernels(c, torch.architectures)]
    if lacking and torch.capabilities:
        model = ".".join(map(str, torch.capabilities[lacking[0]]))
        yield fail(
            "torch",
            f"torch {torch.version} has no kernels for cuda:{lacking[0]} (compute capability {model})",
            "every operation on it raises: no kernel image is available",
            "install a torch build for an older CUDA, which still supports this GPU",
        )


def _has_kernels(capability: tuple[int, ...], architectures: tuple[str, ...]) -> bool:
    """Whether a build runs on a GPU: machine code of its major version up to its minor, or code to be compiled."""
    if not architectures:
        return True
    major, minor = capability
    for name in architectures:
        kind, _, digits = name.partition("_")
        digits = digits.rstrip("af")  # sm_90a, sm_100f: for this architecture, or its family
        if digits.isdigit() and len(digits) > 1:
            built = (int(digits[:-1]), int(digits[-1]))
            if (kind == "sm" and built[0] == major and built[1] <= minor) or (
                kind == "compute" and built <= (major, minor)
            ):
                return True
    return False


def visibility(facts: Facts) -> Iterator[Finding]:
    """CUDA_VISIBLE_DEVICES hides, repeats and reorders no GPU."""
    seen = seen_by_cuda(facts)
    if seen is None:
        return
    name = "visible GPUs"
    if seen.reason:
        hidden = "hidden" in seen.reason
        yield Finding(
            name=name,
            verdict="info" if hidden else "warn",
            fact=seen.reason,
            matters="no GPU: gloo on CPU",
            remedy="unset it to use the GPUs" if hidden else "name each GPU once, by an index that exists",
        )
        return
    for note in seen.notes:
        mig = "MIG" in note
        yield Finding(
            name=name,
            verdict="info" if mig else "warn",
            fact=note,
            matters="one rank can be started" if len(seen.devices) == 1 else "ranks get what is left",
            remedy="" if mig else "name GPUs that exist (nvidia-smi -L)",
        )
    order = [None if d is None else d.index for d in seen.devices]
    if None in order:
        yield info(
            name,
            "different cards: CUDA counts the fastest first, NVML by PCI bus",
            "cuda:0 need not be GPU 0 of nvidia-smi",
            "set CUDA_DEVICE_ORDER=PCI_BUS_ID to have one order",
        )
    elif order != list(range(len(order))):
        listed = ", ".join(f"cuda:{i} is GPU {n}" for i, n in enumerate(order[:8]))
        yield info(name, f"{listed} of nvidia-smi", "their numbers differ")
    for device in facts.devices:
        if device.mig:
            yield info(
                "MIG",
                f"GPU {device.index} is divided into {len(device.instances)} instances",
                "a process sees one instance: one rank",
            )


def gpu_health(facts: Facts) -> Iterator[Finding]:
    """Memory errors, slowed clocks, other users, compute mode, PCIe lanes."""
    quiet = True
    for h in facts.health:
        gpu = f"GPU {h.index}"
        if h.remap_failed or h.ecc_errors:
            quiet = False
            fact = (
                f"{gpu}: {h.ecc_errors} uncorrected memory errors" if h.ecc_errors else f"{gpu}: a memory row is broken"
            )
            yield Finding(
                name="memory errors",
                verdict="fail" if h.remap_failed else "warn",
                fact=fact,
                matters="results may be wrong and processes killed (Xid 48, 63, 64, 94, 95 in dmesg)",
                remedy="have it exchanged"
                if h.remap_failed
                else "reset the GPU (nvidia-smi -r) or reboot; if they come back, have it exchanged",
            )
        elif h.remap_pending:
            quiet = False
            yield warn(
                "memory errors",
                f"{gpu}: a memory row waits to be replaced",
                "the replacement takes place at the next reset",
                "reset the GPU (nvidia-smi -r) or reboot",
            )
        if h.compute_mode in ("Prohibited", "Exclusive_Process"):
            quiet = False
            barred = h.compute_mode == "Prohibited"
            yield Finding(
                name="compute mode",
                verdict="fail" if barred else "info",
                fact=f"{gpu}: {h.compute_mode}",
                matters="no process may use it" if barred else "one process at a time may use it",
                remedy="nvidia-smi -c DEFAULT",
            )
        if h.pcie_width and h.pcie_width_max and h.pcie_width < h.pcie_width_max:
            quiet = False
            yield warn(
                "PCIe",
                f"{gpu} runs on {h.pcie_width} of {h.pcie_width_max} lanes",
                "copies to and from it take longer in proportion",
                "look for a loose card or riser, or a slot shared with another card",
            )
    for d in facts.devices:
        slowed = [
            t for t in d.throttle or () if t not in ("power limit", "sync boost")
        ]  # a busy GPU meets its power limit
        if slowed:
            quiet = False
            yield warn(
                "clocks",
                f"GPU {d.index} is slowed down: {', '.join(slowed)}",
                "it holds up every other rank",
                "look at cooling and power supply",
            )
        yield from _others(facts, d.index)
    if facts.health and quiet:
        yield ok("GPU health", "no memory errors, full clocks and lanes, as far as told")


def _others(facts: Facts, index: int) -> Iterator[Finding]:
    device = next(d for d in facts.devices if d.index == index)
    others = [p for p in device.processes or () if p.pid not in facts.own_pids]
    if not others:
        return
    sizes = [p.used_bytes for p in others]
    told = f", {sum(s or 0 for s in sizes) / GIB:.1f} GiB" if None not in sizes else ""
    full = bool(device.memory_total_bytes and (device.memory_used_bytes or 0) > device.memory_total_bytes / 2)
    yield Finding(
        name="other processes",
        verdict="warn" if full else "info",
        fact=f"GPU {index}: {len(others)} other process{'es' * (len(others) > 1)}{told}",
        matters="they share its memory and its time",
        remedy="nvidia-smi shows them; CUDA_VISIBLE_DEVICES chooses other GPUs",
    )


def nccl(facts: Facts) -> Iterator[Finding]:
    """NCCL is there, and it is the one torch came with."""
    torch = facts.torch
    if torch is None or torch.cuda is None or not facts.devices:
        if torch is not None and torch.error is None:
            yield skipped("NCCL", "no GPU" if not facts.devices else "a CPU build of torch")
        return
    if torch.nccl is None:
        yield fail(
            "NCCL",
            f"torch {torch.version} was built without NCCL",
            "GPUs can only be joined by gloo, through the CPU",
            "install torch from pytorch.org's index or PyPI",
        )
    elif facts.nccl_package and torch.nccl != facts.nccl_package:
        where = f" ({torch.nccl_library})" if torch.nccl_library else ""
        yield warn(
            "NCCL",
            f"NCCL {torch.nccl} is loaded{where}, torch came with {facts.nccl_package}",
            "all ranks must run the same version, and torch was tested with its own",
            "take the other one out of LD_LIBRARY_PATH and LD_PRELOAD",
        )
    else:
        yield ok("NCCL", torch.nccl)


def link_table(facts: Facts) -> list[str]:
    """How the GPUs are wired, as a matrix of text lines; empty with fewer than two."""
    if len(facts.devices) < 2 or not facts.links:
        return []
    at = {(link.first, link.second): link for link in facts.links}
    names = [f"GPU{d.index}" for d in facts.devices]

    def cell(a: int, b: int) -> str:
        link = at.get((min(a, b), max(a, b)))
        return "." if a == b else _wire(link) if link else "?"

    rows = [[cell(a.index, b.index) for b in facts.devices] for a in facts.devices]
    width = max(len(c) for c in [*names, *(c for row in rows for c in row)])
    lines = ["links" + " " * (width - 3) + "".join(f"  {n:>{width}}" for n in names)]
    lines += [f"  {n:<{width}}" + "".join(f"  {c:>{width}}" for c in row) for n, row in zip(names, rows, strict=True)]
    return [
        *lines,
        "  NVn: NVLinks; PIX, PXB: PCIe switches; PHB, NODE, SYS: through the CPU, ever longer; !P2P: no peer access",
    ]


def _wire(link: Link) -> str:
    path = f"NV{link.nvlinks}" if link.nvlinks else link.path or "?"
    return path + ("!P2P" if link.peer is False else "")


def _peer(facts: Facts, link: Link) -> bool | None:
    """Whether CUDA, else the driver, offers peer access between two GPUs."""
    torch, seen = facts.torch, seen_by_cuda(facts)
    if torch and torch.peers and seen:
        at = {d.index: i for i, d in enumerate(seen.devices) if d is not None}
        i, j = at.get(link.first), at.get(link.second)
        if i is not None and j is not None and max(i, j) < len(torch.peers):
            return torch.peers[i][j] and torch.peers[j][i]
    return link.peer


def links(facts: Facts) -> Iterator[Finding]:
    """The GPUs reach each other's memory, over NVLink, and nothing stands in between."""
    if facts.gpus is None:
        return
    if len(facts.devices) < 2:
        reason = "no GPU" if not facts.devices else "one GPU"
        yield skipped("P2P", reason)
        yield skipped("NVLink", reason)
        return
    if not facts.links:
        return
    nvlink = [link for link in facts.links if link.nvlinks]
    bare = [link for link in facts.links if not link.nvlinks]
    offered = [link for link in bare if _peer(facts, link)]
    refused = [link for link in facts.links if _peer(facts, link) is False]
    if offered and (facts.acs or facts.iommu == "translated"):
        causes = ["ACS is on"] * bool(facts.acs) + ["the IOMMU translates"] * (facts.iommu == "translated")
        yield warn(
            "P2P",
            f"PCIe GPUs offer peer access, and {' and '.join(causes)}",
            "copies between GPUs are known to hang or to deliver wrong data then",
            "test it: nbdist doctor --preflight; if it hangs set NCCL_P2P_DISABLE=1, or switch ACS off and boot "
            "with iommu=pt",
        )
    elif refused:
        pairs = ", ".join(f"{link.first}-{link.second}" for link in refused[:8])
        yield info(
            "P2P",
            f"no peer access between GPUs {pairs}" + (" and more" if len(refused) > 8 else ""),
            "NCCL goes through host memory there: slower, and /dev/shm must be large enough",
            "nothing, if cards or virtual machine do not offer it",
        )
    elif all(_peer(facts, link) for link in facts.links):
        yield ok("P2P", "every GPU can read every other's memory")
    if nvlink and bare:
        pairs = ", ".join(f"{link.first}-{link.second}" for link in bare[:8])
        yield info(
            "NVLink",
            f"no NVLink between GPUs {pairs}, others have it",
            "a ring over all GPUs runs at the speed of the slowest pair",
            "choose GPUs that NVLink joins (CUDA_VISIBLE_DEVICES)",
        )
    elif nvlink:
        counts = sorted({link.nvlinks or 0 for link in nvlink})
        yield ok("NVLink", f"{'-'.join(map(str, counts))} links between any two GPUs")
    else:
        yield ok("NVLink", "none; the GPUs are joined by PCIe")


def numa(facts: Facts) -> Iterator[Finding]:
    """The process may run on CPUs near its GPUs."""
    far = [h.index for h in facts.health if h.numa_node is not None and facts.numa_cpus.get(str(h.numa_node), 1) == 0]
    if far:
        gpus = ", ".join(map(str, far))
        yield info(
            "NUMA",
            f"no CPU near GPU {gpus} may be used by this process",
            "copies between host and GPU cross the CPU sockets",
            "widen the CPU set (taskset, --cpuset-cpus, Slurm --cpu-bind)",
        )


GPU_CHECKS = (gpu_presence, torch_build, visibility, gpu_health, nccl, links, numa)
