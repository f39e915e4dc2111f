"""Variables on the wire: pickle protocol 5 with out-of-band buffers, large ones in a memfd that the other side maps.

Tensors and arrays travel as raw bytes beside the pickle. Functions and classes of `__main__` go by value
(cloudpickle), since the other side's `__main__` is another one. A CUDA tensor arrives as a CPU tensor, so that the
notebook's kernel makes no CUDA context; a DTensor as its local shard. Only unpickle what a verified message brought.
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
_APART_BYTES = 4096  # smaller parts stay in the pickle: each one beside it is a frame, and takes a page
_NO_DESCRIPTOR: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}  # else it keeps a duplicate
_ALIGNMENT = 64  # of each buffer in a memfd, as allocators have it: vector instructions are slow or fail elsewhere


def _rebuild_tensor(buffer: Any, dtype: str, shape: tuple[int, ...], requires_grad: bool, parameter: bool) -> Any:
    torch = importlib.import_module("torch")  # only where a tensor arrives: nothing here needs it otherwise
    kind = getattr(torch, dtype)
    size = memoryview(buffer).nbytes
    if size == 0:
        tensor = torch.empty(shape, dtype=kind)
    else:
        view = memoryview(buffer).cast("B")
        data = torch.frombuffer(bytearray(view) if view.readonly else view, dtype=torch.uint8)
        if data.data_ptr() % kind.itemsize:  # it came within a larger message
            data = data.clone()
        tensor = data.view(kind).reshape(shape)
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
    buffers: list[memoryview] = []

    def keep(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < _APART_BYTES:
            return True
        buffers.append(raw)
        return False

    with io.BytesIO() as file:
        _Pickler(file, protocol=5, buffer_callback=keep).dump(value)
        return file.getvalue(), buffers


def loads(data: bytes | memoryview, buffers: Sequence[Any]) -> Any:
    """The value again; its arrays and tensors use the memory of `buffers`, or a copy where that cannot be written."""
    return pickle.loads(data, buffers=[bytearray(b) if memoryview(b).readonly else b for b in buffers])


def to_memfd(buffers: Sequence[memoryview]) -> str:
    """Copy buffers into a new memfd; the path at which a process of the same user can open it."""
    fd = os.memfd_create("nbdist-value", os.MFD_CLOEXEC)
    try:
        starts, total = _layout([b.nbytes for b in buffers])
        os.ftruncate(fd, total)
        for buffer, at in zip(buffers, starts, strict=True):
            view = buffer.cast("B") if buffer.nbytes else buffer
            os.lseek(fd, at, os.SEEK_SET)
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
    starts, total = _layout(sizes)
    if total == 0:
        return [memoryview(bytearray()) for _ in sizes]
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_size != total:
            raise ValueError("the memfd has another size than the message says")
        access = mmap.ACCESS_WRITE if alone else mmap.ACCESS_COPY
        area = memoryview(mmap.mmap(fd, total, access=access, **_NO_DESCRIPTOR))
    finally:
        os.close(fd)
    return [area[at : at + size] for at, size in zip(starts, sizes, strict=True)]


def _layout(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where each buffer begins in a memfd, and how long the memfd is."""
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
    return starts, end
