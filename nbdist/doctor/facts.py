"""Everything the doctor judges, gathered in one place into one structure.

`gather` reads /proc, /sys, cgroups (v1 and v2), limits, the environment and NVML, and asks torch in a short-lived child
process. `Facts` travels as JSON, so that a pasted report or a fixture can be judged as well. None means: unknown.
"""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import json
import os
import platform
import re
import resource
import signal
import subprocess
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from nbdist.doctor import gpu
from nbdist.doctor.machine import Machine
from nbdist.doctor.visible import Visible, visible
from nbdist.errors import InputError

__all__ = [
    "Facts",
    "Health",
    "Torch",
    "gather",
    "gather_gpus",
    "num_ranks",
    "outside_address",
    "reachable",
    "seen_by_cuda",
]

_PROBE_TIMEOUT_S = 40.0

_VARIABLES = re.compile(
    r"(NCCL|GLOO|TORCH|PYTORCH|TORCHELASTIC|CUDA|NVIDIA|OMP|MKL|SLURM|UCX|FI)_\w+|(LOCAL_)?(RANK|WORLD_SIZE)"
    r"|MASTER_(ADDR|PORT)|LD_(LIBRARY_PATH|PRELOAD)|PYTHONPATH|KUBERNETES_SERVICE_HOST"
)
_PACKAGES = (
    "nbdist", "torch", "numpy", "jupyterlab", "notebook", "jupyter_server", "ipykernel", "ipython", "jupyter_client",
    "pyzmq", "ipywidgets", "jupyterlab_widgets", "anywidget", "matplotlib", "psutil", "nvidia-ml-py",
)  # fmt: skip
_WIDGET_EXTENSIONS = ("anywidget", "@jupyter-widgets/jupyterlab-manager")
_WATCHED_NAMES = set("torch numpy nbdist IPython ipykernel zmq anywidget ipywidgets psutil matplotlib".split())
_BRIDGES = ("docker", "br-", "veth", "virbr", "cni", "flannel", "cali", "podman")


@dataclass(frozen=True, slots=True, kw_only=True)
class Torch:
    """What torch says of itself, in a process of its own; ``error``: why it could not be imported.

    ``uuids``, ``capabilities``, ``peers`` (whether each can read the other's memory): of ``cuda:0``, ``cuda:1``, ...
    """

    version: str | None = None
    cuda: str | None = None  # the version it was built for, None: a CPU build
    hip: str | None = None
    cudnn: int | None = None
    nccl: str | None = None
    nccl_library: str | None = None
    gloo: bool | None = None
    cuda_available: bool | None = None
    device_count: int | None = None
    cuda_error: str | None = None
    architectures: tuple[str, ...] = ()
    uuids: tuple[str, ...] | None = None
    capabilities: tuple[tuple[int, ...], ...] | None = None
    peers: tuple[tuple[bool, ...], ...] | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """What NVML's and the kernel's tables add to a GPU's readings."""

    index: int
    ecc_errors: int | None = None  # uncorrected, since the driver was loaded
    remap_pending: bool | None = None  # a row of memory waits for a reset to be replaced
    remap_failed: bool | None = None  # one could not be replaced
    compute_mode: str | None = None  # Default, Exclusive_Process, Prohibited
    pcie_width: int | None = None  # lanes in use
    pcie_width_max: int | None = None  # lanes, and their speed, that card and slot both have
    pcie_gt_s: float | None = None
    nvlink_version: int | None = None  # NVML's number, see `nbdist.doctor.bandwidth`
    numa_node: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """One machine, as a process on it sees it. Limits: -1 is unlimited."""

    # What is planned: machines, ranks on this one (None: one per GPU, else 2), DataLoader workers per rank.
    nodes: int = 1
    ranks: int | None = None
    loader_workers: int | None = None
    system: str | None = None
    python: str | None = None
    packages: Mapping[str, str] = field(default_factory=dict)
    labextensions: tuple[str, ...] = ()  # those of the widgets' that are installed
    torch: Torch | None = None
    nccl_package: str | None = None
    gpus: gpu.Snapshot | None = None
    health: tuple[Health, ...] = ()
    links: tuple[gpu.Link, ...] = ()
    pci_gpus: int | None = None  # NVIDIA display devices on the PCI bus, with or without a driver
    own_pids: tuple[int, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    container: str | None = None
    iommu: str | None = None  # for the GPUs: off, translated, passthrough
    acs: bool | None = None  # a bridge above a GPU redirects peer-to-peer traffic to the root
    numa_cpus: Mapping[str, int] = field(default_factory=dict)  # by memory node: CPUs that this process may use
    cpus: int | None = None
    cpus_allowed: int | None = None
    cpu_quota: float | None = None  # CPU time, as a number of CPUs
    memory_bytes: int | None = None
    memory_limit_bytes: int | None = None
    shm_bytes: int | None = None
    shm_free_bytes: int | None = None
    memlock_bytes: int | None = None
    nofile: int | None = None
    processes: int | None = None
    hostname: str | None = None
    hostname_addresses: tuple[str, ...] | None = None
    addresses: Mapping[str, tuple[str, ...]] | None = None
    shadows: tuple[str, ...] = ()  # files beside the notebook that hide modules

    @property
    def devices(self) -> tuple[gpu.Device, ...]:
        """GPUs that NVML lists."""
        return self.gpus.devices if self.gpus else ()

    def to_json(self) -> dict[str, Any]:
        """The facts as JSON values; unknown ones are left out."""
        known = {k: v for k, v in dataclasses.asdict(self).items() if v not in (None, (), {})}
        return typing.cast("dict[str, Any]", json.loads(json.dumps(known)))

    @classmethod
    def from_json(cls, value: Any) -> Facts:
        """Facts from what `to_json` returned; `InputError` if a field is unknown or of the wrong kind."""
        return typing.cast("Facts", _build(cls, value, "facts"))


def _build(kind: Any, value: Any, where: str) -> Any:
    """Make a value of a dataclass, tuple, mapping or plain type out of JSON."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        return _build(next(a for a in args if a is not type(None)), value, where)
    if dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
        hints = typing.get_type_hints(kind)
        if unknown := set(value) - set(hints):
            raise InputError(f"{where}: unknown field {min(unknown)!r}")
        return kind(**{k: _build(hints[k], v, f"{where}.{k}") for k, v in value.items()})  # type: ignore[operator]
    if origin is tuple and isinstance(value, (list, tuple)):
        inner = args[:1] * len(value) if args[1:] == (...,) else args
        if len(inner) == len(value):
            return tuple(_build(a, v, where) for a, v in zip(inner, value, strict=True))
    elif origin is not None and isinstance(value, Mapping):
        return {str(k): _build(args[1], v, f"{where}.{k}") for k, v in value.items()}
    elif kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    elif isinstance(kind, type) and isinstance(value, kind) and (kind is bool) == isinstance(value, bool):
        return value
    raise InputError(f"{where}: expected {getattr(kind, '__name__', kind)}, got {type(value).__name__}")


def seen_by_cuda(facts: Facts) -> Visible:
    """Which GPUs CUDA shows a process here."""
    uuids = facts.torch.uuids if facts.torch else None
    if facts.gpus is None or not facts.gpus.devices:
        return Visible()
    return visible(facts.gpus, facts.variables, torch_uuids=uuids)


def num_ranks(facts: Facts) -> int:
    """Ranks planned on this machine: as asked for, else one per visible GPU, else 2."""
    return facts.ranks or len(seen_by_cuda(facts).devices) or 2


def outside_address(facts: Facts) -> str | None:
    """The address under which other machines reach this one (for MASTER_ADDR), None if there is none.

    Never a loopback address: a host's own name often resolves to 127.0.1.1, which means another machine to each.
    """
    by_name = [a for a in facts.hostname_addresses or () if reachable(a)]
    listed = [a for name, found in (facts.addresses or {}).items() if not name.startswith(_BRIDGES) for a in found]
    usable = [a for a in listed if reachable(a)]
    known = [a for a in by_name if a in usable] or usable or by_name
    return min(known, key=lambda a: ":" in a, default=None)


def reachable(address: str) -> bool:
    """Whether another machine can mean this one by an address."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    return not (found.is_loopback or found.is_link_local or found.is_unspecified)


# ---- gathering


def gather_gpus() -> Facts:
    """The GPUs of this machine and what lies between them: the part of `gather` that asks no other process."""
    return _gpus(Machine(), gpu.snapshot(processes=False))


def _gpus(machine: Machine, snapshot: gpu.Snapshot) -> Facts:
    buses = {d.index: machine.pci(d.pci) for d in snapshot.devices if d.pci}
    folders = list(buses.values())
    health = tuple(_health(d, machine, buses.get(d.index)) for d in snapshot.devices)
    return Facts(
        gpus=snapshot, links=gpu.links(), health=health, iommu=machine.iommu(folders), acs=machine.acs(folders)
    )


def gather(*, nodes: int = 1, ranks: int | None = None, folder: Path | None = None) -> Facts:
    """Look at this machine; takes a few seconds (torch is imported in a child process), leaves nothing running.

    Parameters
    ----------
    nodes, ranks
        What is planned, see `Facts`.
    folder
        The notebook's folder, where files may hide modules; None: the current one.
    """
    machine, own, allowed = Machine(), psutil.Process(), os.sched_getaffinity(0)
    with _probe() as probe:
        shm = machine.shm()
        facts = dataclasses.replace(
            _gpus(machine, gpu.snapshot()),
            nodes=nodes,
            ranks=ranks,
            system=f"{platform.system()} {platform.release()}, {platform.machine()}",
            python=platform.python_version(),
            packages=_versions(_PACKAGES),
            labextensions=_labextensions(),
            nccl_package=next(iter(_versions(("nvidia-nccl-cu13", "nvidia-nccl-cu12")).values()), None),
            pci_gpus=machine.pci_gpus(),
            own_pids=tuple(sorted({own.pid, *(c.pid for c in own.children(recursive=True))} - {probe.pid})),
            variables={k: v for k, v in sorted(os.environ.items()) if _VARIABLES.fullmatch(k)},
            container=machine.container(),
            numa_cpus=machine.numa_cpus(allowed),
            cpus=os.cpu_count(),
            cpus_allowed=len(allowed),
            cpu_quota=machine.cpu_quota(),
            memory_bytes=psutil.virtual_memory().total,
            memory_limit_bytes=machine.memory_limit(),
            shm_bytes=shm and shm[0],
            shm_free_bytes=shm and shm[1],
            memlock_bytes=_limit(resource.RLIMIT_MEMLOCK),
            nofile=_limit(resource.RLIMIT_NOFILE),
            processes=_least(_limit(resource.RLIMIT_NPROC), machine.pids_limit()),
            addresses=_addresses(),
            shadows=_shadows(folder or Path.cwd()),
        )
        told = _build(Facts, _answer(probe), "torch's answer")
    return dataclasses.replace(
        facts, torch=told.torch, hostname=told.hostname, hostname_addresses=told.hostname_addresses
    )


@contextlib.contextmanager
def _probe() -> Iterator[subprocess.Popen[bytes]]:
    """The child that imports torch; whatever happens, it is gone at the end of the block."""
    command = [sys.executable, "-P", str(Path(__file__).with_name("probe.py"))]
    pipe, none = subprocess.PIPE, subprocess.DEVNULL
    child = subprocess.Popen(command, stdin=none, stdout=pipe, stderr=pipe, start_new_session=True)
    try:
        yield child
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
        child.communicate()


def _answer(probe: subprocess.Popen[bytes]) -> Any:
    try:
        out, err = probe.communicate(timeout=_PROBE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return {"torch": {"error": f"importing torch did not end within {_PROBE_TIMEOUT_S:.0f} s"}}
    try:
        return json.loads(out.splitlines()[-1])
    except (ValueError, IndexError):
        last = err.decode(errors="replace").strip().splitlines()[-1:]
        return {"torch": {"error": f"importing torch ended the process ({probe.returncode}): {last}"}}


def _versions(names: tuple[str, ...]) -> dict[str, str]:
    installed = {name: list(metadata.distributions(name=name)) for name in names}
    return {name: found[0].version for name, found in installed.items() if found}


def _labextensions() -> tuple[str, ...]:
    prefixes = dict.fromkeys([sys.prefix, os.path.expanduser("~/.local"), "/usr/local", "/usr"])
    folders = [Path(p) / "share/jupyter/labextensions" for p in prefixes]
    return tuple(n for n in _WIDGET_EXTENSIONS if any((f / n / "package.json").is_file() for f in folders))


def _limit(which: int) -> int:
    soft = resource.getrlimit(which)[0]
    return -1 if soft == resource.RLIM_INFINITY else soft


def _least(*limits: int | None) -> int | None:
    """The smallest of some limits, of which -1 is unlimited and None unknown."""
    known = [n for n in limits if n is not None]
    return min((n for n in known if n >= 0), default=-1 if known else None)


def _addresses() -> dict[str, tuple[str, ...]]:
    up = psutil.net_if_stats()
    return {
        name: tuple(a.address.split("%")[0] for a in found if a.family.name in ("AF_INET", "AF_INET6"))
        for name, found in sorted(psutil.net_if_addrs().items())
        if name not in up or up[name].isup
    }


def _shadows(folder: Path) -> tuple[str, ...]:
    """Files and packages in the notebook's folder (first in its search path) named like modules that are needed."""
    # Built-in modules cannot be hidden, and nobody needs the others taken out here.
    names = _WATCHED_NAMES | sys.stdlib_module_names - set(sys.builtin_module_names) - {"test", "this", "turtle"}
    return tuple(
        str(e)
        for e in (sorted(folder.iterdir()) if folder.is_dir() else ())
        if (e.suffix == ".py" and e.stem in names) or (e.name in names and (e / "__init__.py").is_file())
        if not (e.name == "nbdist" and (e / "doctor").is_dir())  # the source tree itself
    )


def _health(device: gpu.Device, machine: Machine, bus: Path | None) -> Health:
    """Add what NVML's less common calls say; a call that a GPU or driver lacks leaves its field unknown."""
    found: dict[str, Any] = machine.pcie(bus) if bus else {}
    try:
        import pynvml as nvml

        handle = nvml.nvmlDeviceGetHandleByIndex(device.index)
    except Exception:  # no NVML any more: everything stays unknown
        return Health(index=device.index, **found)

    def field_value(number: int) -> int:
        (value,) = nvml.nvmlDeviceGetFieldValues(handle, [number])
        if value.nvmlReturn != nvml.NVML_SUCCESS:
            raise nvml.NVMLError(value.nvmlReturn)
        return int(value.value.uiVal)

    uncorrected, volatile = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    modes = {0: "Default", 2: "Prohibited", 3: "Exclusive_Process"}
    questions: dict[str, Callable[[], Any]] = {
        "ecc_errors": lambda: int(nvml.nvmlDeviceGetTotalEccErrors(handle, uncorrected, volatile)),
        "remap_pending": lambda: bool(field_value(nvml.NVML_FI_DEV_REMAPPED_PENDING)),
        "remap_failed": lambda: bool(field_value(nvml.NVML_FI_DEV_REMAPPED_FAILURE)),
        "compute_mode": lambda: modes.get(nvml.nvmlDeviceGetComputeMode(handle)),
        "nvlink_version": lambda: int(nvml.nvmlDeviceGetNvLinkVersion(handle, 0)),
    }
    for name, question in questions.items():
        try:
            found[name] = question()
        except Exception:  # not supported here
            found[name] = None
    return Health(index=device.index, **found)
