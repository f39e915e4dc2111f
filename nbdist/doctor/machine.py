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


class Machine:
    """Reads a machine's files; everything that cannot be read is None.

    Parameters
    ----------
    root
        Where its file system begins; tests put a made-up one there.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root

    def _text(self, path: str | Path) -> str | None:
        try:
            return (self._root / str(path).lstrip("/")).read_text(errors="replace").strip()
        except OSError:
            return None

    def _entries(self, path: str) -> list[Path]:
        try:
            return sorted((self._root / path.lstrip("/")).iterdir())
        except OSError:
            return []

    # ---- limits

    def _cgroup(self, controller: str, name: str) -> list[str]:
        """The values of a file in this process's control group and in all above it."""
        values = []
        for line in (self._text("/proc/self/cgroup") or "").splitlines():
            if line.count(":") < 2:
                continue
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                bases = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"]
            elif controller in controllers.split(","):
                bases = [f"/sys/fs/cgroup/{controller}", f"/sys/fs/cgroup/{controllers}"]
            else:
                continue
            for base in bases:
                place = Path(path)
                for folder in (place, *place.parents):
                    # In a container the path may be the host's; its own limits then stand at the top.
                    text = self._text(f"{base}/{str(folder).strip('/')}/{name}")
                    if text is not None:
                        values.append(text)
        return values

    def memory_limit(self) -> int | None:
        """Bytes of memory this control group may use; None: no limit is set."""
        texts = self._cgroup("memory", "memory.max") + self._cgroup("memory", "memory.limit_in_bytes")
        return min((int(t) for t in texts if t.isdigit() and int(t) < _NO_LIMIT), default=None)

    def cpu_quota(self) -> float | None:
        """CPU time this control group may use, as a number of CPUs; None: no limit is set."""
        quotas = []
        for text in self._cgroup("cpu", "cpu.max"):
            quota, _, period = text.partition(" ")
            if quota.isdigit() and period.isdigit() and int(period):
                quotas.append(int(quota) / int(period))
        periods = self._cgroup("cpu", "cpu.cfs_period_us")
        for quota, period in zip(self._cgroup("cpu", "cpu.cfs_quota_us"), periods, strict=False):
            if quota.isdigit() and period.isdigit() and int(period):
                quotas.append(int(quota) / int(period))
        return min(quotas, default=None)

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

    def container(self) -> str | None:
        """The kind of container this is, ``none`` if it is none."""
        if os.environ.get("KUBERNETES_SERVICE_HOST"):
            return "kubernetes"
        if (self._root / ".dockerenv").exists():
            return "docker"
        if (self._root / "run/.containerenv").exists():
            return "podman"
        if (self._root / ".singularity.d").exists():
            return "apptainer"
        told = self._text("/run/systemd/container")
        above = re.search(r"(docker|kubepods|containerd|libpod|lxc)", self._text("/proc/1/cgroup") or "")
        return told or (above[1] if above else "none")

    def numa_cpus(self, allowed: Iterable[int]) -> dict[str, int]:
        """By memory node, how many of the allowed CPUs it has."""
        usable = set(allowed)
        found = {}
        for entry in self._entries("/sys/devices/system/node"):
            if re.fullmatch(r"node\d+", entry.name) and (text := self._text(f"{_inside(entry, self._root)}/cpulist")):
                found[entry.name[4:]] = len(usable & set(_numbers(text)))
        return found

    # ---- the PCI bus

    def pci_gpus(self) -> int | None:
        """NVIDIA display devices on the bus, with or without a driver."""
        devices = self._entries("/sys/bus/pci/devices")
        if not devices:
            return None
        here = [_inside(d, self._root) for d in devices]
        return sum(
            self._text(f"{d}/vendor") == _NVIDIA and (self._text(f"{d}/class") or "").startswith(_DISPLAY) for d in here
        )

    def pci(self, bus_id: str) -> Path | None:
        """The kernel's folder of a device that NVML names, e.g. ``00000000:17:00.0``."""
        domain, _, rest = bus_id.lower().partition(":")
        folder = self._root / "sys/bus/pci/devices" / f"{domain[-4:]}:{rest}"
        return folder.resolve() if folder.exists() else None

    def pcie(self, folder: Path) -> dict[str, Any]:
        """Lanes, speed and memory node of a device; the slot above it may have fewer than the card."""

        def number(path: Path, name: str) -> float | None:
            try:
                match = re.match(r"[\d.]+", (path / name).read_text())
            except OSError:
                return None
            return float(match[0]) if match and float(match[0]) > 0 else None

        def both(name: str) -> float | None:
            return min((v for v in (number(folder, name), number(folder.parent, name)) if v), default=None)

        width, lanes, node = number(folder, "current_link_width"), both("max_link_width"), number(folder, "numa_node")
        text = self._text(_inside(folder / "numa_node", self._root))
        return {
            "pcie_width": int(width) if width and width < 255 else None,
            "pcie_width_max": int(lanes) if lanes and lanes < 255 else None,
            "pcie_gt_s": both("max_link_speed"),
            "numa_node": 0 if text == "0" else None if node is None else int(node),
        }

    def iommu(self, folders: Sequence[Path | None]) -> str | None:
        """Whether an IOMMU translates what the devices send; None without devices."""
        kinds = set()
        for folder in filter(None, folders):
            group = folder / "iommu_group"
            if not group.exists():
                kinds.add("off")
                continue
            try:
                kind = (group / "type").read_text().strip()
            except OSError:
                continue
            kinds.add("passthrough" if kind == "identity" else "translated")
        return next((k for k in ("translated", "passthrough", "off") if k in kinds), None)

    def acs(self, folders: Sequence[Path | None]) -> bool | None:
        """Whether a bridge above a device sends peer-to-peer traffic to the root; needs root to be read."""
        bridges = {p for f in folders if f for p in f.parents if re.fullmatch(r"[0-9a-f]{4}:[0-9a-f:.]+", p.name)}
        answers = [a for b in bridges if (a := _redirects(b / "config")) is not None]
        return any(answers) if answers else None


def _inside(path: Path, root: Path) -> str:
    """A path as it is named inside the root."""
    return "/" + os.path.relpath(path, root)


def _numbers(text: str) -> Iterable[int]:
    """``0-3,8`` as numbers."""
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            yield from range(int(first), int(last or first) + 1)


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
