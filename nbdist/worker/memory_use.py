"""How much memory this rank uses, in bytes; None where a number is not available."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["MemoryUse"]


class MemoryUse:
    """Reads this rank's memory.

    Parameters
    ----------
    device
        The rank's device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def read(self) -> dict[str, Any]:
        """Bytes by name; None where not available."""
        values: dict[str, Any] = {"process_pss_bytes": None, "process_uss_bytes": None}
        try:
            with open("/proc/self/smaps_rollup", "rb") as file:
                kib = {k: int(v.split()[0]) for k, _, v in (x.partition(b":") for x in file.readlines()[1:])}
        except (OSError, ValueError, IndexError):
            return values
        values["process_pss_bytes"] = kib[b"Pss"] * 1024
        values["process_uss_bytes"] = (kib[b"Private_Clean"] + kib[b"Private_Dirty"]) * 1024
        return values
