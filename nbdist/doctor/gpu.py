"""What NVML says about this machine's GPUs, and which of them CUDA will see.

Nothing here raises for what a driver answers: a field that cannot be read is None, and ``reasons`` says why. Neither
torch nor CUDA is used, so the notebook's kernel and every rank may ask.

Sources: the NVML API reference (error codes, clock event reasons, topology levels), the CUDA programming guide
(CUDA_VISIBLE_DEVICES, CUDA_DEVICE_ORDER), the MIG user guide (one compute instance a process) and
``torch.cuda._parse_visible_devices`` (what counts as an entry).
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

__all__ = [
    "Device",
    "Link",
    "Process",
    "Reader",
    "Snapshot",
    "bare_uuid",
    "bytes_text",
    "explain_memory",
    "links",
    "snapshot",
]

NO_GPU = "no NVIDIA driver/GPU found"

_INIT_REASONS = {
    "LibraryNotFound": NO_GPU,
    "DriverNotLoaded": "the NVIDIA driver is installed but not loaded",
    "LibRmVersionMismatch": "driver and NVML library differ (kernel module not reloaded): reboot, or restart the "
    "container",
    "NoPermission": "no permission to ask the NVIDIA driver",
}
_FIELD_REASONS = {
    "NotSupported": "n/a from driver",
    "NoPermission": "no permission",
    "FunctionNotFound": "the driver is too old to tell",
    "GpuIsLost": "the GPU is lost (fallen off the bus, or in an error state)",
    "NotFound": "n/a from driver",
}
_FINAL = {"NotSupported", "NoPermission", "FunctionNotFound", "NotFound"}  # asking again will not help

# NVML's clock event reasons; bit 0 (idle) and bits 1, 8 (clocks chosen by somebody) slow nothing down by themselves
_THROTTLE_BITS = {
    0x04: "power limit",
    0x08: "hardware slowdown",
    0x10: "sync boost",
    0x20: "temperature (software)",
    0x40: "temperature (hardware)",
    0x80: "power brake",
}
_PATHS = {0: "same board", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}  # as in `nvidia-smi topo -m`
_MOST_NVLINKS = 18
_P2P_READ = 0  # pynvml has a tuple under this name


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process that uses a GPU.

    Attributes
    ----------
    pid
        As the driver counts them: in a container these may be the host's.
    used_bytes
        None where the driver does not tell.
    """

    pid: int
    used_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One reading of a GPU, or of one MIG instance of it. None: not available, see ``reasons``.

    Attributes
    ----------
    index
        NVML's index (of the parent, for a MIG instance). CUDA may count differently: see `visible`.
    load_percent
        Share of the last moments in which a kernel ran.
    throttle
        What holds the clocks back at the moment, in words; empty: nothing.
    mig
        True if the GPU is divided; then work runs on ``instances`` only.
    gpu_instance, compute_instance
        Numbers of a MIG instance.
    reasons
        By field name, why it is None.
    """

    index: int
    uuid: str | None = None
    name: str | None = None
    pci: str | None = None
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    memory_free_bytes: int | None = None
    load_percent: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    temperature_c: int | None = None
    throttle: tuple[str, ...] | None = None
    processes: tuple[Process, ...] | None = None
    mig: bool | None = None
    instances: tuple[Device, ...] = ()
    gpu_instance: int | None = None
    compute_instance: int | None = None
    reasons: Mapping[str, str] = field(default_factory=dict)

    def process_bytes(self, pid: int) -> int | None:
        """Memory of one process on this GPU, None if it is not listed or the driver does not tell."""
        return next((p.used_bytes for p in self.processes or () if p.pid == pid), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All GPUs of this machine at one moment.

    Attributes
    ----------
    driver
        Version of the driver, e.g. ``550.90.07``.
    cuda_driver
        Newest CUDA version the driver supports, e.g. ``(12, 4)``.
    reason
        Why there is no device, None if there is one.
    error
        NVML's name of that reason, e.g. ``LibRmVersionMismatch``; None if NVML has answered.
    """

    devices: tuple[Device, ...] = ()
    driver: str | None = None
    cuda_driver: tuple[int, int] | None = None
    reason: str | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What lies between two GPUs.

    Attributes
    ----------
    first, second
        NVML indices.
    path
        PCIe topology as in ``nvidia-smi topo -m``: PIX, PXB, PHB, NODE, SYS.
    nvlinks
        Active NVLinks between the two; through NVSwitches, those of the one that has fewer.
    peer
        Whether each can read the other's memory.
    """

    first: int
    second: int
    path: str | None
    nvlinks: int | None
    peer: bool | None


class _Nvml:
    """NVML in this process. A fork must not use its parent's: each process opens its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pid: int | None = None

    def open(self) -> tuple[ModuleType | None, str, str]:
        """Pynvml, initialised; or None, the reason in words, and NVML's name of it."""
        with self._lock:
            try:
                import pynvml
            except ImportError:
                return None, "the package nvidia-ml-py is not installed", "ImportError"
            if self._pid != os.getpid():
                try:
                    pynvml.nvmlInit()
                except Exception as error:  # a broken installation may raise anything; it must not stop training
                    name = _name_of(error)
                    return None, _INIT_REASONS.get(name, f"NVML cannot be used: {_text_of(error)}"), name
                self._pid = os.getpid()
            return pynvml, "", ""


_nvml = _Nvml()


def _name_of(error: Exception) -> str:
    """NVML's own name of an error: pynvml makes a class for each code."""
    return type(error).__name__.removeprefix("NVMLError_")


def _text_of(error: Exception) -> str:
    try:
        return str(error) or type(error).__name__
    except Exception:  # pynvml asks the library for the text, which may lack the function
        return type(error).__name__


def _text(value: object) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


class Reader:
    """Reads one GPU or MIG instance again and again, at little cost.

    Parameters
    ----------
    handle
        NVML's handle.
    index
        NVML's index of the GPU.
    parent
        For a MIG instance, the GPU's own name and bus id are taken from here.
    """

    def __init__(self, nvml: ModuleType, handle: Any, index: int, parent: Reader | None = None) -> None:
        self._nvml = nvml
        self._handle = handle
        self._index = index
        self._parent = parent
        self._fixed: dict[str, Any] = {}
        self._refused: dict[str, str] = {}  # fields that need not be asked again
        self._reasons: dict[str, str] = {}

    @classmethod
    def of_uuid(cls, uuid: str) -> Reader | None:
        """A reader of the GPU or MIG instance that CUDA names so (with or without ``GPU-``), None if there is none."""
        nvml, _, _ = _nvml.open()
        wanted = bare_uuid(uuid)
        for reader in _readers(nvml) if nvml else ():
            for each in (reader, *reader.instances()):
                if bare_uuid(each.identity()["uuid"] or "") == wanted:
                    return each
        return None

    def _ask(self, name: str, question: Callable[[], Any]) -> Any:
        if name in self._refused:
            self._reasons[name] = self._refused[name]
            return None
        try:
            return question()
        except Exception as error:  # an answer that cannot be had is a reason, never an error
            kind = _name_of(error)
            reason = self._reasons[name] = _FIELD_REASONS.get(kind, _text_of(error))
            if kind in _FINAL:
                self._refused[name] = reason
            return None

    def identity(self) -> dict[str, Any]:
        """What does not change: uuid, name, pci, mig, gpu_instance, compute_instance."""
        if not self._fixed:
            nvml, handle = self._nvml, self._handle
            fixed: dict[str, Any] = {"uuid": self._ask("uuid", lambda: _text(nvml.nvmlDeviceGetUUID(handle)))}
            if self._parent is None:
                fixed["name"] = self._ask("name", lambda: _text(nvml.nvmlDeviceGetName(handle)))
                fixed["pci"] = self._ask("pci", lambda: _text(nvml.nvmlDeviceGetPciInfo(handle).busId))
                fixed["mig"] = bool(self._ask("mig", lambda: nvml.nvmlDeviceGetMigMode(handle)[0]))
                self._reasons.pop("mig", None)  # a GPU that cannot be divided is not divided
            else:
                above = self._parent.identity()
                fixed |= {"name": f"{above['name']} (MIG)", "pci": above["pci"], "mig": None}
                fixed["gpu_instance"] = self._ask("gpu_instance", lambda: nvml.nvmlDeviceGetGpuInstanceId(handle))
                fixed["compute_instance"] = self._ask(
                    "compute_instance", lambda: nvml.nvmlDeviceGetComputeInstanceId(handle)
                )
            self._fixed = fixed
        return self._fixed

    def instances(self) -> list[Reader]:
        """Readers of this GPU's MIG instances."""
        nvml, handle = self._nvml, self._handle
        if self._parent is not None or not self.identity()["mig"]:
            return []
        found = []
        for number in range(_answer(nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
            instance = _answer(nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, number)  # None: there are gaps
            if instance is not None:
                found.append(Reader(nvml, instance, self._index, self))
        return found

    def read(self, *, processes: bool = True) -> Device:
        """One reading.

        Parameters
        ----------
        processes
            Also ask which processes use the GPU, the dearest of the questions.
        """
        nvml, handle = self._nvml, self._handle
        self._reasons = {}
        values = dict(self.identity())
        memory = self._ask("memory", lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        for name in ("total", "used", "free"):
            values[f"memory_{name}_bytes"] = None if memory is None else int(getattr(memory, name))
        values["load_percent"] = self._ask("load_percent", lambda: int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu))
        if self._parent is None:
            values["power_w"] = self._ask("power_w", lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000)
            values["power_limit_w"] = self._ask(
                "power_limit_w", lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000
            )
            values["temperature_c"] = self._ask(
                "temperature_c", lambda: int(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
            )
            values["throttle"] = self._ask("throttle", self._throttle)
        else:
            for name in ("power_w", "power_limit_w", "temperature_c", "throttle"):
                self._reasons[name] = "n/a (MIG)"
        if processes:
            values["processes"] = self._ask("processes", self._processes)
        if (self._parent is not None or values["mig"]) and "load_percent" in self._reasons:
            self._reasons["load_percent"] = "n/a (MIG)"
        if (reason := self._reasons.pop("memory", None)) is not None:
            for name in ("total", "used", "free"):
                self._reasons[f"memory_{name}_bytes"] = reason
        return Device(
            index=self._index,
            instances=tuple(reader.read(processes=processes) for reader in self.instances()),
            reasons=dict(self._reasons),
            **values,
        )

    def _throttle(self) -> tuple[str, ...]:
        bits = self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle)
        return tuple(text for bit, text in _THROTTLE_BITS.items() if bits & bit)

    def _processes(self) -> tuple[Process, ...]:
        return tuple(
            Process(pid=int(p.pid), used_bytes=None if p.usedGpuMemory is None else int(p.usedGpuMemory))
            for p in self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
        )


def bare_uuid(uuid: str) -> str:
    """A UUID as it can be compared: torch leaves out the ``GPU-`` that NVML puts in front."""
    return uuid.lower().removeprefix("gpu-").removeprefix("mig-")


def _answer(question: Callable[..., Any], *args: Any) -> Any:
    """NVML's answer, None if it has none: for what may be missing without a word."""
    try:
        return question(*args)
    except Exception:  # a broken driver may raise anything; it must not stop training
        return None


def _readers(nvml: ModuleType) -> Iterable[Reader]:
    for index in range(_answer(nvml.nvmlDeviceGetCount) or 0):
        handle = _answer(nvml.nvmlDeviceGetHandleByIndex, index)
        if handle is not None:  # a GPU that is lost, or not ours, has none; the others still count
            yield Reader(nvml, handle, index)


def snapshot(*, processes: bool = True) -> Snapshot:
    """Read every GPU of this machine.

    Parameters
    ----------
    processes
        Also ask which processes use them.
    """
    nvml, reason, error = _nvml.open()
    if nvml is None:
        return Snapshot(reason=reason, error=error)
    devices = tuple(reader.read(processes=processes) for reader in _readers(nvml))
    driver = _answer(nvml.nvmlSystemGetDriverVersion)
    version = _answer(nvml.nvmlSystemGetCudaDriverVersion)
    return Snapshot(
        devices=devices,
        driver=None if driver is None else _text(driver),
        cuda_driver=None if version is None else (version // 1000, version % 1000 // 10),
        reason=None if devices else "the NVIDIA driver is loaded, but lists no GPU",
    )


def links() -> tuple[Link, ...]:
    """What lies between each two GPUs of this machine; empty where NVML does not answer or there are fewer."""
    nvml, _, _ = _nvml.open()
    if nvml is None:
        return ()
    readers = list(_readers(nvml))
    gpus = {reader.identity()["pci"] for reader in readers}
    far = [_nvlinks(nvml, reader._handle) for reader in readers]
    found = []
    for i, j in itertools.combinations(range(len(readers)), 2):
        first, second = readers[i], readers[j]
        pair = first._handle, second._handle
        level = _answer(nvml.nvmlDeviceGetTopologyCommonAncestor, *pair)
        peer = _answer(nvml.nvmlDeviceGetP2PStatus, *pair, _P2P_READ)
        nvlinks = None
        here, there = far[i], far[j]
        if here is not None and there is not None:
            direct = here.count(second.identity()["pci"])
            nvlinks = direct or min(sum(pci not in gpus for pci in ends) for ends in (here, there))
        found.append(
            Link(
                first=first._index,
                second=second._index,
                path=_PATHS.get(level),
                nvlinks=nvlinks,
                peer=None if peer is None else peer == 0,
            )
        )
    return tuple(found)


def _nvlinks(nvml: ModuleType, handle: Any) -> list[str] | None:
    """PCI bus ids at the far ends of a GPU's active NVLinks (those of NVSwitches are no GPU's); None: no answer."""
    ends: list[str] = []
    for link in range(_MOST_NVLINKS):
        active = _answer(nvml.nvmlDeviceGetNvLinkState, handle, link)
        if active is None:  # link numbers a GPU does not have
            return ends if link else None
        if active:
            far = _answer(nvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)
            ends.append("" if far is None else _text(far.busId))
    return ends


def explain_memory(
    *,
    allocated_bytes: int | None,
    reserved_bytes: int | None,
    inactive_split_bytes: int | None = None,
    retries: int | None = None,
    used_bytes: int | None = None,
    total_bytes: int | None = None,
    ranks: int = 1,
) -> list[str]:
    """Why torch's two numbers and the driver's differ, one line each; what is not known is left out.

    Parameters
    ----------
    allocated_bytes, reserved_bytes
        Tensors alive, and what torch's allocator has taken from the device for them (it contains the former).
    inactive_split_bytes
        Free parts of blocks that are otherwise in use: they fit smaller tensors only.
    retries
        How often the allocator had to give back its cache to serve a request.
    used_bytes, total_bytes
        Of the device, from the driver: all processes together.
    ranks
        How many ranks of this cluster use the device; their numbers are summed in the first two.
    """
    lines = []
    if allocated_bytes is not None and reserved_bytes is not None:
        cached = reserved_bytes - allocated_bytes
        lines.append(f"tensors alive {bytes_text(allocated_bytes)} (allocated)")
        line = f"torch's allocator holds {bytes_text(reserved_bytes)} (reserved)"
        line += f": these tensors and {bytes_text(cached)} it keeps for reuse"
        if inactive_split_bytes is not None:
            line += f", {bytes_text(inactive_split_bytes)} of that in pieces between live tensors"
        lines.append(line)
        if inactive_split_bytes is not None and inactive_split_bytes > max(0.1 * reserved_bytes, 512 * 2**20):
            tried = f" and {retries} requests had to wait for a clean-up" if retries else ""
            lines.append(
                f"fragmentation: large requests may not fit into the pieces{tried}; try "
                "PYTORCH_ALLOC_CONF=expandable_segments:True before the workers start"
            )
    if used_bytes is not None:
        of = f" of {bytes_text(total_bytes)}" if total_bytes else ""
        line = f"the device has {bytes_text(used_bytes)}{of} in use"
        if reserved_bytes is not None and used_bytes >= reserved_bytes:
            whose = "this rank's" if ranks == 1 else f"the {ranks} ranks'"
            outside = bytes_text(used_bytes - reserved_bytes)
            line += f": {outside} outside {whose} allocator (CUDA context, NCCL, other processes)"
        lines.append(line)
    return lines


def bytes_text(count: int) -> str:
    """A size as people read it: ``1.5 GiB``, ``20.0 MiB``."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**29 else f"{count / 2**20:.1f} MiB"
