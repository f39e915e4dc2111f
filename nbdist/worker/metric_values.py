"""From what a user logs to a float64: at once on the CPU, through pinned memory and an event from a GPU."""

from __future__ import annotations

import decimal
import sys
from collections import deque
from time import monotonic, sleep
from typing import Any, cast

import numpy as np
import torch

__all__ = ["Pending", "number"]

_CHUNK = 1024  # slots allocated together, 8 bytes each


class Pending:
    """A number on its way from a GPU.

    Parameters
    ----------
    tensor
        One element on a CUDA device. It is copied in the order of the current stream, so that later changes in place
        do not count; no stream and no thread waits.
    """

    __slots__ = ("_event", "_slot", "_slots")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._slots = _Slots.of(tensor.device)
        self._slot, view, self._event = self._slots.take(tensor.dtype)
        view.copy_(tensor.detach().reshape(()), non_blocking=True)
        self._event.record(torch.cuda.current_stream(tensor.device))
        self._slot = self._slot, tensor.dtype  # type: ignore[assignment]

    def read(self, deadline_s: float | None) -> float | None:
        """The number, once; None if it is not there yet, or not by the deadline (monotonic time), or never."""
        try:
            while not self._event.query():
                if deadline_s is None or monotonic() > deadline_s:
                    return None
                sleep(0.001)
        except RuntimeError:  # the CUDA context has failed, e.g. by a device-side assert
            return float("nan") if deadline_s is None else None
        slot, dtype = cast("tuple[int, torch.dtype]", self._slot)
        value = self._slots.view(slot, dtype).item()
        self._slots.free.append(slot)
        return float(value)


class _Slots:
    """Pinned memory of 8-byte slots for one device, each with an event; both are used again and again."""

    _by_device: dict[torch.device, _Slots] = {}

    def __init__(self) -> None:
        self.free: deque[int] = deque()
        self._chunks: list[torch.Tensor] = []
        self._events: list[Any] = []
        self._views: dict[torch.dtype, list[torch.Tensor]] = {}

    @classmethod
    def of(cls, device: torch.device) -> _Slots:
        """The slots of a device."""
        slots = cls._by_device.get(device)
        if slots is None:
            slots = cls._by_device[device] = cls()
        return slots

    def take(self, dtype: torch.dtype) -> tuple[int, torch.Tensor, Any]:
        """A free slot: its number, memory as a 0-d tensor of that type, and event."""
        try:
            slot = self.free.popleft()
        except IndexError:
            first = len(self._events)
            self._chunks.append(torch.empty(8 * _CHUNK, dtype=torch.uint8, pin_memory=True))
            self._events += [torch.cuda.Event() for _ in range(_CHUNK)]  # type: ignore[no-untyped-call]
            self.free.extend(range(first + 1, first + _CHUNK))
            slot = first
        return slot, self.view(slot, dtype), self._events[slot]

    def view(self, slot: int, dtype: torch.dtype) -> torch.Tensor:
        """A slot's memory as a 0-d tensor of a type of at most 8 bytes."""
        views = self._views.setdefault(dtype, [])
        while len(views) <= slot:
            chunk = self._chunks[len(views) // _CHUNK]
            views += chunk.view(dtype)[:: 8 // dtype.itemsize].unbind()
        return views[slot]


def number(value: object) -> float | Pending:
    """The number a value stands for.

    Parameters
    ----------
    value
        int, bool, float, a numpy scalar, `Decimal`, or a tensor or array of one element.

    Returns
    -------
    float or Pending
        Pending for a tensor on a GPU.

    Raises
    ------
    Exception
        If it is none; the text says why. A value's own conversion may raise anything.
    """
    if isinstance(value, torch.Tensor):
        return _of_tensor(value)
    if isinstance(value, (int, float, np.bool_, np.integer, np.floating, decimal.Decimal)):
        return float(value)
    if isinstance(value, np.ndarray):
        if value.size == 1 and value.dtype.kind in "biuf":
            return float(value.reshape(())[()])
        raise TypeError(f"an array of shape {value.shape} and type {value.dtype} is not one number")
    if isinstance(value, (str, bytes, complex, np.generic)) or not hasattr(type(value), "__float__"):
        raise TypeError(f"{type(value).__name__} is not a number")
    return float(value)  # type: ignore[arg-type]


def _of_tensor(value: torch.Tensor) -> float | Pending:
    if type(value) is not torch.Tensor:
        # its module takes a second to import: whoever has made a DTensor has imported it
        dtensors = sys.modules.get("torch.distributed.tensor")
        if dtensors is not None and isinstance(value, dtensors.DTensor):
            if not all(placement.is_replicate() for placement in value.placements):
                raise TypeError("a DTensor that is not replicated: its value needs a collective, log its full_tensor()")
            value = value.to_local()
    if value.numel() != 1:
        raise TypeError(f"a Tensor of shape {tuple(value.shape)} is not one number")
    if value.is_complex():
        raise TypeError("a complex Tensor is not a number")
    if value.is_cpu:
        return float(value.item())
    if not value.is_cuda:
        raise TypeError(f"a Tensor on the {value.device.type} device has no number to read")
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("a number cannot be read while a CUDA graph is captured")
    return Pending(value)
