"""Everything the doctor judges, gathered in one place into one structure.

`gather` reads /proc, /sys, cgroups (v1 and v2), limits, the environment and NVML, and asks torch in a short-lived child
process. `Facts` travels as JSON, so that a pasted report or a fixture can be judged as well. None means: unknown.
"""

from __future__ import annotations

import dataclasses
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
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from nbdist.doctor import gpu
from nbdist.doctor.machine import Machine
from nbdist.errors import InputError

__all__ = ["Facts", "Health", "Torch", "gather", "gather_gpus"]

_PROBE_TIMEOUT_S = 40.0

_VARIABLES = re.compile(
    r"(NCCL|GLOO|TORCH|PYTORCH|TORCHELASTIC|CUDA|NVIDIA|OMP|MKL|SLURM|UCX|FI)_\w+|(LOCAL_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)"
    r"|LD_(LIBRARY_PATH|PRELOAD)|PYTHONPATH|KUBERNETES_SERVICE_HOST|PBS_JOBID|LSB_JOBID"
)
_PACKAGES = (
    "nbdist", "torch", "numpy", "jupyterlab", "notebook", "jupyter_server", "ipykernel", "ipython", "jupyter_client",
    "pyzmq", "ipywidgets", "jupyterlab_widgets", "anywidget", "matplotlib", "psutil", "nvidia-ml-py",
)  # fmt: skip
_WIDGET_EXTENSIONS = ("anywidget", "@jupyter-widgets/jupyterlab-manager")
_WATCHED_NAMES = {
    "torch",
    "numpy",
    "nbdist",
    "IPython",
    "ipykernel",
    "zmq",
    "anywidget",
    "ipywidgets",
    "psutil",
    "matplotlib",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Torch:
    """What torch says of itself, in a process of its own.

    Attributes
    ----------
    cuda
        CUDA version it was built for, None: a CPU build.
    nccl
        Version of the NCCL it runs with, None: none.
    uuids, capabilities, peers
        Of ``cuda:0``, ``cuda:1``, ...; whether each can read the other's memory.
    cuda_error
        CUDA's own words when it could not be used.
    error
        Why torch could not be imported.
    """

    version: str | None = None
    path: str | None = None
    cuda: str | None = None
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
    """What NVML's and the kernel's tables add to a GPU's readings.

    Attributes
    ----------
    ecc_errors
        Uncorrected memory errors since the driver was loaded.
    remap_pending, remap_failed
        Rows of memory waiting for a reset to be replaced; that could not be.
    compute_mode
        ``Default``, ``Exclusive_Process``, ``Prohibited``.
    pcie_width, pcie_width_max
        Lanes in use; lanes that card and slot both have.
    pcie_gt_s
        Speed of a lane that card and slot both reach, in GT/s.
    nvlink_version
        NVML's number for the NVLinks' generation (5: third, 6: fourth, 7: fifth), see `nbdist.doctor.bandwidth`.
    numa_node
        The memory node it is attached to.
    """

    index: int
    ecc_errors: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    compute_mode: str | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    pcie_gt_s: float | None = None
    nvlink_version: int | None = None
    numa_node: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """One machine, as a process on it sees it. Limits: -1 is unlimited.

    Attributes
    ----------
    nodes, ranks, loader_workers
        What is planned: machines, ranks on this one (None: one per GPU, else 2), DataLoader workers per rank.
    pci_gpus
        NVIDIA display devices on the PCI bus, with or without a driver.
    own_pids
        Processes that belong to this notebook.
    container
        Its kind, ``none``, or None.
    iommu
        ``off``, ``translated`` or ``passthrough``, for the GPUs.
    acs
        A bridge above a GPU redirects peer-to-peer traffic to the root.
    numa_cpus
        By memory node, how many of its CPUs this process may use.
    cpus, cpus_allowed, cpu_quota
        Of the machine; that this process may use; CPU time as a number of CPUs.
    memory_bytes, memory_limit_bytes
        Of the machine; of the container.
    labextensions
        Which of the widgets' JupyterLab extensions are installed in this environment.
    shadows
        Files beside the notebook that hide modules.
    """

    nodes: int = 1
    ranks: int | None = None
    loader_workers: int | None = None
    system: str | None = None
    python: str | None = None
    packages: Mapping[str, str] = field(default_factory=dict)
    labextensions: tuple[str, ...] = ()
    torch: Torch | None = None
    nccl_package: str | None = None
    gpus: gpu.Snapshot | None = None
    health: tuple[Health, ...] = ()
    links: tuple[gpu.Link, ...] = ()
    pci_gpus: int | None = None
    own_pids: tuple[int, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    container: str | None = None
    iommu: str | None = None
    acs: bool | None = None
    numa_cpus: Mapping[str, int] = field(default_factory=dict)
    cpus: int | None = None
    cpus_allowed: int | None = None
    cpu_quota: float | None = None
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
    shadows: tuple[str, ...] = ()

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
        """Facts from what `to_json` returned.

        Raises
        ------
        InputError
            If a field is unknown or of the wrong kind.
        """
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


# ---- gathering


def gather_gpus() -> Facts:
    """The GPUs of this machine and what lies between them: the part of `gather` that asks no other process."""
    machine, snapshot = Machine(), gpu.snapshot(processes=False)
    buses = {d.index: machine.pci(d.pci) for d in snapshot.devices if d.pci}
    health = tuple(_health(d, machine, buses.get(d.index)) for d in snapshot.devices)
    return Facts(gpus=snapshot, links=gpu.links(), health=health)


def gather(*, nodes: int = 1, ranks: int | None = None, folder: Path | None = None) -> Facts:
    """Look at this machine; takes a few seconds (torch is imported in a child process), leaves nothing running.

    Parameters
    ----------
    nodes, ranks
        What is planned, see `Facts`.
    folder
        The notebook's folder, where files may hide modules; None: the current one.
    """
    machine = Machine()
    with _Probe() as probe:
        snapshot = gpu.snapshot()
        buses = {d.index: machine.pci(d.pci) for d in snapshot.devices if d.pci}
        shm = machine.shm()
        own = psutil.Process()
        facts = Facts(
            nodes=nodes,
            ranks=ranks,
            system=f"{platform.system()} {platform.release()}, {platform.machine()}",
            python=platform.python_version(),
            packages=_versions(_PACKAGES),
            labextensions=_labextensions(),
            nccl_package=next((v for n, v in _versions(("nvidia-nccl-cu13", "nvidia-nccl-cu12")).items()), None),
            gpus=snapshot,
            health=tuple(_health(d, machine, buses.get(d.index)) for d in snapshot.devices),
            links=gpu.links(),
            pci_gpus=machine.pci_gpus(),
            own_pids=tuple(sorted({own.pid, *(c.pid for c in own.children(recursive=True))} - {probe.pid})),
            variables={k: v for k, v in sorted(os.environ.items()) if _VARIABLES.fullmatch(k)},
            container=machine.container(),
            iommu=machine.iommu(list(buses.values())),
            acs=machine.acs(list(buses.values())),
            numa_cpus=machine.numa_cpus(os.sched_getaffinity(0)),
            cpus=os.cpu_count(),
            cpus_allowed=len(os.sched_getaffinity(0)),
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
        answer = probe.answer()
    return dataclasses.replace(facts, torch=_build(Torch, answer.get("torch", {}), "torch"), **_host(answer))


def _host(answer: Mapping[str, Any]) -> dict[str, Any]:
    host = answer.get("host", {})
    found = host.get("hostname_addresses")
    return {"hostname": host.get("hostname"), "hostname_addresses": None if found is None else tuple(found)}


class _Probe:
    """The child that imports torch; whatever happens, it is gone at the end of the block."""

    def __enter__(self) -> _Probe:
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).with_name("probe.py"))],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.pid = self._process.pid
        return self

    def answer(self) -> dict[str, Any]:
        try:
            out, err = self._process.communicate(timeout=_PROBE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return {"torch": {"error": f"importing torch did not end within {_PROBE_TIMEOUT_S:.0f} s"}}
        try:
            return typing.cast("dict[str, Any]", json.loads(out.splitlines()[-1]))
        except (ValueError, IndexError):
            last = err.decode(errors="replace").strip().splitlines()[-1:]
            return {"torch": {"error": f"importing torch ended the process ({self._process.returncode}): {last}"}}

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


def _versions(names: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


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
    standard = (
        sys.stdlib_module_names - set(sys.builtin_module_names) - {"test", "this", "antigravity", "turtle", "idlelib"}
    )
    names = _WATCHED_NAMES | standard
    try:
        entries = sorted(folder.iterdir())
    except OSError:
        return ()
    return tuple(
        str(e)
        for e in entries
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

    def ask(name: str, question: Any) -> None:
        try:
            found[name] = question()
        except Exception:  # not supported here
            found[name] = None

    uncorrected, volatile = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    ask("ecc_errors", lambda: int(nvml.nvmlDeviceGetTotalEccErrors(handle, uncorrected, volatile)))

    def field_value(number: int) -> int:
        (value,) = nvml.nvmlDeviceGetFieldValues(handle, [number])
        if value.nvmlReturn != nvml.NVML_SUCCESS:
            raise nvml.NVMLError(value.nvmlReturn)
        return int(value.value.uiVal)

    ask("remap_pending", lambda: bool(field_value(nvml.NVML_FI_DEV_REMAPPED_PENDING)))
    ask("remap_failed", lambda: bool(field_value(nvml.NVML_FI_DEV_REMAPPED_FAILURE)))
    modes = {0: "Default", 2: "Prohibited", 3: "Exclusive_Process"}
    ask("compute_mode", lambda: modes.get(nvml.nvmlDeviceGetComputeMode(handle)))
    ask("nvlink_version", lambda: int(nvml.nvmlDeviceGetNvLinkVersion(handle, 0)))
    return Health(index=device.index, **found)
