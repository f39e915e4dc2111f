"""A pretended process group of any size, beside the real one: collectives return at once and move nothing.

torch keeps its groups in one place, ``distributed_c10d._world`` and the tables it shows. They are put aside for the
time of the pretence and put back afterwards; the real groups' own objects and connections are not touched.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
import torch.distributed.fsdp._fully_shard._fsdp_param as fsdp_module
import torch.nn.parallel.distributed as ddp_module
import torch.optim.optimizer as optimizer_module
from torch._subclasses.fake_tensor import FakeTensorMode

__all__ = ["FakeReducer", "fake_tensors", "fake_world", "reduced_at_once", "replaced"]

_TABLES = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "tags_to_pg", "pg_to_tag")


@contextmanager
def fake_world(world_size: int) -> Iterator[None]:
    """Be rank 0 of ``world_size`` ranks that do not exist."""
    # Importing it registers the backend "fake".
    from torch.testing._internal.distributed.fake_pg import FakeStore

    real: Any = c10d._world
    tables = {name: dict(getattr(real, name)) for name in _TABLES}
    count, hook = real.group_count, sys.excepthook
    try:
        c10d._world = c10d._World()
        for name in _TABLES:
            getattr(real, name).clear()
        # In a rank of nbdist init_process_group is not torch's own.
        inspect.unwrap(dist.init_process_group)(backend="fake", store=FakeStore(), rank=0, world_size=world_size)
        yield
    finally:
        for group in list(real.pg_names):
            c10d._unregister_process_group(  # type: ignore[attr-defined]
                group.group_name
            )
        c10d._world = real
        for name, entries in tables.items():
            getattr(real, name).clear()
            getattr(real, name).update(entries)
        real.group_count = count
        c10d._update_default_pg(real.default_pg)
        sys.excepthook = hook


@contextmanager
def fake_tensors() -> Iterator[FakeTensorMode]:
    """Tensors that have a shape and no values; what DDP does to values when it is made is left out.

    So are hooks on all optimizers: a pretended step is none of the training that they count or read a loss of.
    """
    with (
        replaced(optimizer_module, "_global_optimizer_pre_hooks", {}),
        replaced(optimizer_module, "_global_optimizer_post_hooks", {}),
        replaced(ddp_module, "_verify_param_shape_across_processes", _nothing),
        replaced(ddp_module, "_sync_module_states", _nothing),
        replaced(fsdp_module, "_chunk_with_empty", _first_chunk),
        FakeTensorMode(allow_non_fake_inputs=True) as mode,
    ):
        yield mode


def _first_chunk(tensor: torch.Tensor, num_chunks: int, dim: int) -> list[torch.Tensor]:
    """Rank 0's chunk in every place: 512 chunks of each parameter would take most of the time, and one is looked at."""
    return [tensor.narrow(dim, 0, min(-(-tensor.size(dim) // num_chunks), tensor.size(dim)))] * num_chunks


def _nothing(*_: object, **__: object) -> None:
    pass


@contextmanager
def replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    """Give an attribute another value for a while, if it is there (some are names inside torch, which may go)."""
    if not hasattr(owner, name):
        yield
        return
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


class FakeReducer:
    """DDP's reducer, without the second sorting of its buckets, for which rank 0 would read tensors' values."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False


def reduced_at_once(_state: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """DDP's communication hook in a fake world, whose own all-reduce has no result to hand back."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


# DDP compares the annotations as objects; as strings they would be refused.
reduced_at_once.__annotations__.clear()
