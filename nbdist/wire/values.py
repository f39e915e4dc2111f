"""Variables on the wire: pickle protocol 5 with out-of-band buffers, large ones in a memfd that the other side maps.

Tensors and arrays travel as raw bytes beside the pickle. Functions and classes of `__main__` go by value
(cloudpickle), since the other side's `__main__` is another one. A CUDA tensor arrives as a CPU tensor, so that the
notebook's kernel makes no CUDA context; a DTensor as its local shard. Only ever unpickle what a verified message brought.
"""

from __future__ import annotations

import importlib
import io
import mmap
import os
import pickle
import sys
from collections.abc import Sequence
from typing import Any

import cloudpickle

__all__ = ["MEMFD_BYTES", "close_memfd", "dumps", "loads", "map_memfd", "to_memfd"]

MEMFD_BYTES = 1 << 20  # buffers of at least this size in sum go through a memfd
_CHUNK = 1 << 26


def _rebuild_tensor(buffer: Any, dtype: str, shape: tuple[int, ...], requires_grad: bool, parameter: bool) -> Any:
    torch = importlib.import_module("torch")  # only where a tensor arrives: nothing here needs it otherwise
    kind = getattr(torch, dtype)
    size = memoryview(buffer).nbytes
    if size == 0:
        tensor = torch.empty(shape, dtype=kind)
    else:
        view = memoryview(buffer).cast("B")
        data = bytearray(view) if view.readonly else view
        tensor = torch.frombuffer(data, dtype=torch.uint8).view(kind).reshape(shape)
    if parameter:
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    return tensor.requires_grad_() if requires_grad else tensor


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(obj, torch.Tensor):
            reduced = self._reduce_tensor(torch, obj)
            if reduced is not None:
                return reduced
        return super().reducer_override(obj)

    @staticmethod
    def _reduce_tensor(torch: Any, tensor: Any) -> Any:
        requires_grad = bool(tensor.requires_grad and tensor.is_leaf)
        parameter = isinstance(tensor, torch.nn.Parameter)
        plain = tensor.detach()
        if hasattr(plain, "to_local"):
            plain = plain.to_local()
        if plain.layout is not torch.strided or plain.is_quantized or plain.is_complex() or plain.device.type == "meta":
            return None
        if type(plain) is not torch.Tensor:
            return None
        plain = plain.cpu().contiguous()
        if plain.is_neg():
            plain = plain.resolve_neg()
        raw = plain.reshape(-1).view(torch.uint8).numpy() if plain.numel() else b""
        dtype = str(plain.dtype).removeprefix("torch.")
        args = (pickle.PickleBuffer(raw), dtype, tuple(plain.shape), requires_grad, parameter)
        return _rebuild_tensor, args


def dumps(value: object) -> tuple[bytes, list[memoryview]]:
    """Pickle a value; its large parts as contiguous buffers that share its memory."""
    buffers: list[pickle.PickleBuffer] = []
    with io.BytesIO() as file:
        _Pickler(file, protocol=5, buffer_callback=buffers.append).dump(value)
        return file.getvalue(), [b.raw() for b in buffers]


def loads(data: bytes | memoryview, buffers: Sequence[Any]) -> Any:
    """The value again; its arrays and tensors use the memory of `buffers`."""
    return pickle.loads(data, buffers=buffers)


def to_memfd(buffers: Sequence[memoryview]) -> str:
    """Copy buffers one after another into a new memfd; the path at which a process of the same user can open it."""
    fd = os.memfd_create("nbdist-value", os.MFD_CLOEXEC)
    try:
        for buffer in buffers:
            view = buffer.cast("B") if buffer.nbytes else buffer
            while view.nbytes:
                view = view[os.write(fd, view[:_CHUNK]) :]
    except BaseException:
        os.close(fd)
        raise
    return f"/proc/{os.getpid()}/fd/{fd}"


def close_memfd(path: str) -> None:
    """Close a memfd of this process."""
    os.close(int(path.rpartition("/")[2]))


def map_memfd(path: str, sizes: Sequence[int], *, alone: bool) -> list[memoryview]:
    """The buffers of another process's memfd, writable.

    Parameters
    ----------
    path
        From `to_memfd`.
    sizes
        Bytes of each buffer.
    alone
        True if nobody else maps it: the pages are then used as they are. Otherwise a page is copied when it is written.
    """
    total = sum(sizes)
    if total == 0:
        return [memoryview(bytearray()) for _ in sizes]
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_size != total:
            raise ValueError("the memfd has another size than the message says")
        area = memoryview(mmap.mmap(fd, total, access=mmap.ACCESS_WRITE if alone else mmap.ACCESS_COPY))
    finally:
        os.close(fd)
    parts, start = [], 0
    for size in sizes:
        parts.append(area[start : start + size])
        start += size
    return parts
