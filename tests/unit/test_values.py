"""Variables between processes: what comes out is what went in, whatever way it took."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import pickle
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from nbdist.wire import values

DTYPES = [
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64, torch.uint64),
    *(torch.bool, torch.complex64, torch.complex128),
]


def apart(value: Any) -> Any:
    """As a small value travels: beside the pickle, in frames that begin anywhere."""
    data, buffers = values.dumps(value)
    frames = []
    for buffer in buffers:
        frame = bytearray(buffer.nbytes + 1)
        frame[1:] = buffer
        frames.append(memoryview(frame)[1:].toreadonly() if len(frames) % 2 else memoryview(frame)[1:])
    return values.loads(data, frames)


def by_memfd(value: Any, alone: bool = True) -> Any:
    """As a large value travels."""
    data, buffers = values.dumps(value)
    path = values.to_memfd(buffers)
    try:
        return values.loads(data, values.map_memfd(path, [b.nbytes for b in buffers], alone=alone))
    finally:
        values.close_memfd(path)


WAYS = pytest.mark.parametrize("way", [apart, by_memfd], ids=["frames", "memfd"])


def raw(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().contiguous().reshape(-1)
    return bytes(plain.view(torch.uint8).numpy()) if plain.numel() else b""


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.dtype, one.shape, type(one)) == (other.dtype, other.shape, type(other)) and raw(one) == raw(other)


# ---- tensors


@WAYS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (7,), (130, 41)], ids=str)
def test_tensors_of_every_dtype(dtype, shape, way):
    size = int(np.prod(shape)) * dtype.itemsize
    data = torch.randint(0, 2, (size,), dtype=torch.uint8) if dtype is torch.bool else torch.randint(0, 255, (size,))
    tensor = data.to(torch.uint8).view(dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)
    found = way(tensor)
    assert same(found, tensor)
    assert not found.requires_grad
    assert found.data_ptr() % dtype.itemsize == 0
    found.fill_(1)
    assert torch.all(found.to(torch.float64 if not dtype.is_complex else dtype) == 1)


@WAYS
def test_tensors_whose_memory_is_not_in_order(way):
    base = torch.arange(24_000.0).reshape(2, 3, 4000)
    for tensor in (base.transpose(0, 2), base[:, ::2, 1::3], base.expand(5, 2, 3, 4000)[:, :, 0], base.flip(0)):
        assert same(way(tensor), tensor)
    channels_last = torch.arange(8000.0).reshape(2, 4, 10, 100).to(memory_format=torch.channels_last)
    assert same(way(channels_last), channels_last)
    conjugate = torch.randn(600, dtype=torch.complex64).conj()
    assert torch.equal(way(conjugate), conjugate)
    negative = conjugate.imag
    assert negative.is_neg()
    assert torch.equal(way(negative), negative)


@WAYS
def test_gradients_wanted_stay_wanted(way):
    leaf = torch.randn(3000, requires_grad=True)
    assert way(leaf).requires_grad and way(leaf).is_leaf
    computed = way(leaf * 2)
    assert not computed.requires_grad and computed.is_leaf
    for wanted in (True, False):
        parameter = nn.Parameter(torch.randn(2000), requires_grad=wanted)
        found = way(parameter)
        assert same(found, parameter) and found.requires_grad is wanted


@WAYS
def test_a_view_takes_only_its_own_elements_along(way):
    large = torch.zeros(1_000_000)
    data, buffers = values.dumps(large[5:2000])
    assert len(data) + sum(b.nbytes for b in buffers) < 20_000
    assert same(way(large[5:2000]), large[5:2000])


@WAYS
def test_modules_and_what_they_share(way):
    model = nn.Sequential(nn.Linear(40, 50), nn.BatchNorm1d(50), nn.Linear(50, 40, bias=False), nn.Linear(40, 50))
    model[3].weight = model[0].weight
    model[1].eval()
    found = way({"model": model, "again": model})
    assert found["model"] is found["again"]
    copy = found["model"]
    assert copy[3].weight is copy[0].weight
    assert [m.training for m in copy.modules()] == [m.training for m in model.modules()]
    for (name, one), (_, other) in zip(model.state_dict().items(), copy.state_dict().items(), strict=True):
        assert same(one, other), name
    copy(torch.randn(3, 40)).sum().backward()
    with torch.no_grad():
        copy[0].weight -= 0.1 * copy[0].weight.grad


@WAYS
def test_a_sparse_a_quantized_and_a_meta_tensor(way):
    sparse = torch.eye(30).to_sparse()
    assert torch.equal(way(sparse).to_dense(), torch.eye(30))
    meta = way(torch.empty(3, 5, device="meta"))
    assert (meta.device.type, meta.shape) == ("meta", (3, 5))


def test_thousands_of_small_parts_stay_in_the_pickle():
    many = {f"bias{i}": torch.full((3,), float(i)) for i in range(3000)} | {"a": [np.arange(5)] * 2}
    data, buffers = values.dumps(many)
    assert buffers == []
    found = values.loads(data, [])
    assert all(same(found[name], many[name]) for name in many if name != "a")
    found["bias7"] += 1
    found["a"][0][0] = 9


# ---- arrays, frames, code


@WAYS
def test_arrays_and_frames(way):
    arrays = {
        "plain": np.arange(12_000.0).reshape(3, 4000),
        "fortran": np.asfortranarray(np.arange(12_000).reshape(3, 4000)),
        "steps": np.arange(12_000)[::3],
        "empty": np.empty((0, 3)),
        "text": np.array(["a", "bcd"] * 900),
        "records": np.zeros(900, dtype=[("x", "i4"), ("y", "f8")]),
        "objects": np.array([1, "a", None], dtype=object),
        "scalar": np.float32(0.5),
    }
    found = way(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)
        assert found[name].dtype == array.dtype
    found["plain"][0, 0] = 7
    found["fortran"][0, 0] = 7
    frame = pd.DataFrame({"n": range(3000), "s": ["x"] * 3000, "t": pd.date_range("2024", periods=3000, freq="h")})
    pd.testing.assert_frame_equal(way(frame), frame)


@WAYS
def test_plain_objects(way):
    value = {"a": [1, 2.5, None, "\ud800é"], (1, 2): {3, 4}, "b": b"x" * 9000, "c": bytearray(b"y" * 9000)}
    assert way(value) == value


CELL = """
scale = 3
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)
    def forward(self, x):
        return self.inner(x) * scale
def outer(k):
    def inner(v): return v * k * scale
    return inner
made = [Net(), outer(2), lambda v: v + scale, Net]
"""


def test_code_of_main_goes_by_value():
    names: dict[str, Any] = {"__name__": "__main__", "nn": nn}
    exec(CELL, names)
    data, buffers = values.dumps(names["made"])
    names.clear()
    net, closure, function, kind = values.loads(data, buffers)
    assert (closure(5), function(5)) == (30, 8)
    assert type(net) is kind and kind.__module__ == "__main__"
    assert net(torch.ones(1, 2)).shape == (1, 2)


@pytest.mark.parametrize(
    "make", [threading.Lock, lambda: (i for i in range(3)), socket.socket, sys._getframe], ids=lambda m: m.__name__
)
def test_what_cannot_be_pickled_raises(make):
    thing = make()
    with pytest.raises((TypeError, pickle.PicklingError)):
        values.dumps({"thing": thing})
    if hasattr(thing, "close"):
        thing.close()


def test_an_error_of_the_value_itself_is_passed_on():
    class Sour:
        def __reduce__(self) -> Any:
            raise RuntimeError("not today")

    with pytest.raises(RuntimeError, match="not today"):
        values.dumps(Sour())


# ---- memory


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_no_descriptor_stays_open():
    before = open_descriptors()
    found = by_memfd(torch.arange(1_000_000))
    assert found.sum() == 999_999 * 500_000
    assert open_descriptors() <= before + (sys.version_info < (3, 13))  # older Pythons keep one while it is mapped
    del found
    gc.collect()
    assert open_descriptors() == before


def test_a_mapping_of_ones_own_is_written_in_place_and_another_one_is_copied():
    data, buffers = values.dumps(torch.zeros(300_000))
    path = values.to_memfd(buffers)
    sizes = [b.nbytes for b in buffers]
    shared = values.loads(data, values.map_memfd(path, sizes, alone=True))
    private = values.loads(data, values.map_memfd(path, sizes, alone=False))
    private[0] = 1
    assert shared[0] == 0
    shared[1] = 2
    later = values.loads(data, values.map_memfd(path, sizes, alone=False))
    values.close_memfd(path)
    assert later[:2].tolist() == [0, 2]
    assert private[0] == 1


def test_nothing_is_copied_on_the_way_out():
    tensor, array = torch.zeros(300_000), np.zeros(300_000)
    _, buffers = values.dumps([tensor, array])
    where = [ctypes.addressof(ctypes.c_char.from_buffer(b)) for b in buffers]
    assert where == [tensor.data_ptr(), array.ctypes.data]


def test_a_memfd_of_another_size_is_refused():
    _, buffers = values.dumps(torch.zeros(300_000))
    path = values.to_memfd(buffers)
    before = open_descriptors()
    for sizes in ([10], [300_000 * 4 + 4096], [1] * 5):
        with pytest.raises(ValueError, match="another size"):
            values.map_memfd(path, sizes, alone=True)
    assert open_descriptors() == before
    values.close_memfd(path)
    with pytest.raises(FileNotFoundError):
        values.map_memfd(path, [300_000 * 4], alone=True)


@settings(max_examples=30, deadline=None)
@given(sizes=st.lists(st.integers(0, 10_000), max_size=8))
def test_buffers_of_any_sizes_keep_apart_and_begin_where_vectors_do(sizes):
    parts = [memoryview(os.urandom(size)) for size in sizes]
    path = values.to_memfd(parts)
    found = values.map_memfd(path, sizes, alone=False)
    values.close_memfd(path)
    assert [bytes(f) for f in found] == [bytes(p) for p in parts]
    for view in found:
        if view.nbytes:
            assert ctypes.addressof(ctypes.c_char.from_buffer(view)) % 64 == 0


def test_a_large_value_is_written_in_pieces(monkeypatch):
    monkeypatch.setattr(values, "_CHUNK", 1000)
    tensor = torch.arange(100_000)
    assert same(by_memfd(tensor), tensor)


def test_no_memory_for_the_copy_leaves_nothing(monkeypatch):
    def full(fd: int, data: Callable[..., Any]) -> int:
        raise OSError(28, "No space left on device")

    before = open_descriptors()
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"):
        values.to_memfd([memoryview(bytearray(mmap.PAGESIZE))])
    monkeypatch.undo()
    assert open_descriptors() == before
