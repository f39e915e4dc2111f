"""What /proc, /sys and the cgroup file systems say about this machine and this container."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["Machine"]

_NVIDIA, _DISPLAY = "0x10de", ("0x0300", "0x0302")  # PCI vendor; class: VGA and 3D controllers
_ACS, _ACS_REDIRECTS = 0x000D, 0b1100  # PCI Express extended capability; its P2P request and completion redirects
_NO_LIMIT = 1 << 60  # cgroup v1 writes a number near 2**63 for no limit


def _text(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None


def _number(path: Path) -> float | None:
    match = re.match(r"-?[\d.]+", _text(path) or "")
    return float(match[0]) if match else None


def _entries(path: Path) -> list[Path]:
    return sorted(path.iterdir()) if path.is_dir() else []


class Machine:
    """Reads a machine's files; everything that cannot be read is None. ``root``: where its file system begins."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root

    # ---- limits

    def _cgroup(self, controller: str, name: str) -> list[str]:
        """The values of a file in this process's control group and in all above it."""
        values = []
        for line in (_text(self._root / "proc/self/cgroup") or "").splitlines():
            _, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            if controllers and controller not in controllers.split(","):
                continue
            # In a container the path may be the host's; its own limits then stand at the top.
            for base in (controller, controllers) if controllers else ("", "unified"):
                for folder in (Path(path), *Path(path).parents):
                    values.append(_text(self._root / "sys/fs/cgroup" / base / str(folder).strip("/") / name))
        return [v for v in values if v is not None]

    def memory_limit(self) -> int | None:
        """Bytes of memory this control group may use; None: no limit is set."""
        texts = self._cgroup("memory", "memory.max") + self._cgroup("memory", "memory.limit_in_bytes")
        return min((int(t) for t in texts if t.isdigit() and int(t) < _NO_LIMIT), default=None)

    def cpu_quota(self) -> float | None:
        """CPU time this control group may use, as a number of CPUs; None: no limit is set."""
        quotas, periods = self._cgroup("cpu", "cpu.cfs_quota_us"), self._cgroup("cpu", "cpu.cfs_period_us")
        pairs = [text.split() for text in self._cgroup("cpu", "cpu.max")]
        pairs += [list(pair) for pair in zip(quotas, periods, strict=False)]
        known = [pair for pair in pairs if len(pair) == 2 and pair[0].isdigit() and pair[1].isdigit()]
        return min((int(quota) / int(period) for quota, period in known if int(period)), default=None)

    def pids_limit(self) -> int | None:
        """Processes and threads this control group may have, -1: unlimited."""
        texts = self._cgroup("pids", "pids.max")
        return min((int(t) for t in texts if t.isdigit()), default=-1 if texts else None)

    def shm(self) -> tuple[int, int] | None:
        """Bytes of /dev/shm: all, free."""
        try:
            found = os.statvfs(self._root / "dev/shm")
        except OSError:
            return None
        return found.f_frsize * found.f_blocks, found.f_frsize * found.f_bavail

    def container(self) -> str:
        """The kind of container this is, ``none`` if it is none."""
        if os.environ.get("KUBERNETES_SERVICE_HOST"):
            return "kubernetes"
        marks = {".dockerenv": "docker", "run/.containerenv": "podman", ".singularity.d": "apptainer"}
        marked = next((kind for mark, kind in marks.items() if (self._root / mark).exists()), None)
        above = re.search("docker|kubepods|containerd|libpod|lxc", _text(self._root / "proc/1/cgroup") or "")
        return marked or _text(self._root / "run/systemd/container") or (above[0] if above else "none")

    def numa_cpus(self, allowed: Iterable[int]) -> dict[str, int]:
        """By memory node, how many of the allowed CPUs it has."""
        usable, found = set(allowed), {}
        for entry in _entries(self._root / "sys/devices/system/node"):
            if re.fullmatch(r"node\d+", entry.name) and (text := _text(entry / "cpulist")):
                ranges = re.findall(r"(\d+)(?:-(\d+))?", text)
                cpus = {n for first, last in ranges for n in range(int(first), int(last or first) + 1)}
                found[entry.name[4:]] = len(usable & cpus)
        return found

    # ---- the PCI bus

    def pci_gpus(self) -> int | None:
        """NVIDIA display devices on the bus, with or without a driver."""
        devices = _entries(self._root / "sys/bus/pci/devices")
        found = [_text(d / "vendor") == _NVIDIA and (_text(d / "class") or "").startswith(_DISPLAY) for d in devices]
        return sum(found) if devices else None

    def pci(self, bus_id: str) -> Path | None:
        """The kernel's folder of a device that NVML names, e.g. ``00000000:17:00.0``."""
        domain, _, rest = bus_id.lower().partition(":")
        folder = self._root / "sys/bus/pci/devices" / f"{domain[-4:]}:{rest}"
        return folder.resolve() if folder.exists() else None

    def pcie(self, folder: Path) -> dict[str, Any]:
        """Lanes, speed and memory node of a device; the slot above it may have fewer than the card."""

        def least(name: str, *folders: Path) -> float | None:
            known = [_number(f / name) for f in folders]
            return min((n for n in known if n and 0 < n < 255), default=None)  # 255: not known

        width, lanes = least("current_link_width", folder), least("max_link_width", folder, folder.parent)
        node = _number(folder / "numa_node")
        return {
            "pcie_width": width and int(width),
            "pcie_width_max": lanes and int(lanes),
            "pcie_gt_s": least("max_link_speed", folder, folder.parent),
            "numa_node": None if node is None or node < 0 else int(node),
        }

    def iommu(self, folders: Sequence[Path | None]) -> str | None:
        """Whether an IOMMU translates what the devices send; None without devices."""
        kinds = set()
        for group in (f / "iommu_group" for f in folders if f):
            if not group.exists():
                kinds.add("off")
            elif kind := _text(group / "type"):
                kinds.add("passthrough" if kind == "identity" else "translated")
        return next((k for k in ("translated", "passthrough", "off") if k in kinds), None)

    def acs(self, folders: Sequence[Path | None]) -> bool | None:
        """Whether a bridge above a device sends peer-to-peer traffic to the root; needs root to be read."""
        bridges = {p for f in folders if f for p in f.parents if re.fullmatch(r"[0-9a-f]{4}:[0-9a-f:.]+", p.name)}
        answers = [a for b in bridges if (a := _redirects(b / "config")) is not None]
        return any(answers) if answers else None


def _redirects(config: Path) -> bool | None:
    """Whether ACS redirects are on in a bridge's configuration space (PCI Express base specification, 7.7.11)."""
    try:
        space = config.read_bytes()
    except OSError:
        return None
    if len(space) <= 256:  # only root may read the extended part
        return None
    at, seen = 256, set[int]()
    while 256 <= at <= len(space) - 8 and at not in seen:
        seen.add(at)
        (header,) = struct.unpack_from("<I", space, at)
        if header & 0xFFFF == _ACS:
            return bool(struct.unpack_from("<H", space, at + 6)[0] & _ACS_REDIRECTS)
        at = header >> 20
    return False
