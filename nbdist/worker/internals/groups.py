"""Process groups, as torch keeps them."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed import distributed_c10d

__all__ = [
    "GroupRecord",
    "abort_communicators",
    "default_timeout",
    "issued",
    "make_default_group",
    "make_subgroup",
    "nccl_operation",
    "on_group_made",
    "records",
    "replace_everywhere",
    "reserve_names",
    "tear_down",
]

_log = logging.getLogger(__name__)

c10d: Any = distributed_c10d  # its private names have no types

_init_process_group = c10d.init_process_group
_destroy_process_group = c10d.destroy_process_group


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRecord:
    """What is needed to make a process group again.

    Attributes
    ----------
    group
        The process group itself.
    name
        The name torch resolves it by; the same on every member.
    ranks
        Global ranks of the members, in the order of their ranks in the group.
    """

    group: Any
    name: str
    ranks: tuple[int, ...]
    backend: str
    tag: str
    description: str
    timeout: timedelta


def replace_everywhere(name: str, function: Callable[..., Any]) -> None:
    """Set a function of torch.distributed in every torch module that has it (some imported it by name)."""
    for module_name in ("torch.distributed", "torch.distributed.distributed_c10d", "torch.distributed.device_mesh"):
        module = sys.modules.get(module_name)
        if module is not None and hasattr(module, name):
            setattr(module, name, function)


def default_timeout(backend: str) -> timedelta:
    """The time-out torch gives a group's collectives when none is asked for."""
    return timedelta(minutes=10) if backend == "nccl" else timedelta(minutes=30)


def make_default_group(
    backend: str,
    *,
    store: Store,
    rank: int,
    world_size: int,
    timeout: timedelta,
    device_id: torch.device | None,
    options: Any = None,
) -> None:
    """Make the default process group.

    torch wraps ``sys.excepthook`` each time, so that a group renewed ten times would print ``[rank0]:`` ten times.
    """
    hook = sys.excepthook
    try:
        _init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            device_id=device_id,
            pg_options=options,
        )
    finally:
        sys.excepthook = hook


def records() -> list[GroupRecord]:
    """Every process group of this rank, the default one first, then in the order they were made."""
    world = c10d._world
    found = []
    for group, (backend, _) in world.pg_map.items():
        ranks = world.pg_group_ranks.get(group, {})
        found.append(
            GroupRecord(
                group=group,
                name=str(world.pg_names[group]),
                ranks=tuple(sorted(ranks, key=ranks.__getitem__)),
                backend=str(backend),
                tag=str(world.pg_to_tag.get(group, "")),
                description=str(getattr(group, "group_desc", "") or ""),
                timeout=_timeout_of(group, str(backend)),
            )
        )
    default = world.default_pg
    return sorted(found, key=lambda record: record.group is not default)


def _timeout_of(group: Any, backend: str) -> timedelta:
    for device in _devices(group):
        options = getattr(group._get_backend(device), "options", None)
        timeout = getattr(options, "_timeout", None)
        if isinstance(timeout, timedelta):
            return timeout
    return default_timeout(backend)


def _devices(group: Any) -> list[torch.device]:
    try:
        return list(group._device_types)
    except (AttributeError, RuntimeError):
        return []


def make_subgroup(record: GroupRecord, *, rank: int, device_id: torch.device | None) -> Any:
    """Make a group of some ranks again, under its old name; every member calls this, nobody else.

    Returns
    -------
    ProcessGroup
        The new group, known to torch under the name, tag and description of the old one.
    """
    tag = record.tag.removeprefix("user:") if record.tag.startswith("user:") else None
    store = c10d._world.pg_map[c10d._world.default_pg][1]
    group, _ = c10d._new_process_group_helper(
        len(record.ranks),
        record.ranks.index(rank),
        list(record.ranks),
        record.backend,
        store,
        c10d.GroupName(record.name) if hasattr(c10d, "GroupName") else record.name,
        timeout=record.timeout,
        pg_tag=tag,
        device_id=device_id,
        group_desc=record.description,
    )
    c10d._world.pg_group_ranks[group] = {global_rank: i for i, global_rank in enumerate(record.ranks)}
    if record.name.isdecimal():  # the next group made must not get a name that is taken
        c10d._world.group_count = max(c10d._world.group_count, int(record.name) + 1)
    return group


def reserve_names(count: int) -> None:
    """Let the names of groups that will be made start at a number (all ranks must count alike)."""
    c10d._world.group_count = max(c10d._world.group_count, count)


def issued() -> int:
    """How many collectives this rank has issued on all groups (send and recv are none); -1 without a group."""
    total = -1
    for group in list(c10d._world.pg_map):
        with contextlib.suppress(RuntimeError):  # a backend that does not count
            total += int(group._get_sequence_number_for_group())
    return total


def tear_down() -> None:
    """Forget every process group of this rank, whatever state they are in."""
    if not dist.is_initialized():
        return
    try:
        _destroy_process_group()
    except (RuntimeError, ValueError, AssertionError) as error:
        _log.debug("destroying a broken group: %s", error)
    world = c10d._world
    if world.default_pg is None and not world.pg_map:
        return
    world.default_pg = None
    for table in (
        world.pg_map,
        world.pg_names,
        world.pg_group_ranks,
        world.pg_backend_config,
        world.pg_to_tag,
        world.tags_to_pg,
        world.pg_coalesce_state,
    ):
        table.clear()
    c10d._unregister_all_process_groups()
    world.group_count = 0


@contextlib.contextmanager
def _nccl_group_call(backend: Any) -> Iterator[None]:
    """Several aborts as one NCCL call: one after the other can deadlock across communicators (pytorch #119797)."""
    backend._group_start()
    try:
        yield
    finally:
        backend._group_end()


def nccl_operation() -> tuple[str, float] | None:
    """The oldest collective that NCCL has not ended, and since when (unix time); None if there is none.

    From torch's flight recorder, which is on by default. Calls of NCCL return at once, so that a stack tells nothing.
    """
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", None)
    if dump is None or not dist.is_initialized():
        return None
    entries = json.loads(dump(True, True)).get("entries", ())  # with collectives, only those that are active
    active = [entry for entry in entries if entry.get("state") != "completed" and "time_created_ns" in entry]
    if not active:
        return None
    oldest = min(active, key=lambda entry: int(entry["time_created_ns"]))
    name = str(oldest.get("profiling_name", "a collective")).removeprefix("nccl:")
    return name, int(oldest["time_created_ns"]) / 1e9


def abort_communicators() -> None:
    """Abort every NCCL communicator of this rank, from any thread; blocked kernels and calls return.

    The groups stay known to torch: they are forgotten on the main thread, by `tear_down`.
    """
    if not dist.is_nccl_available():
        return
    backends = []
    for group in list(c10d._world.pg_map):
        for device in _devices(group):
            backend = group._get_backend(device)
            if isinstance(backend, dist.ProcessGroupNCCL) and backend not in backends:
                backends.append(backend)
    if not backends:
        return
    with _nccl_group_call(backends[0]):
        for backend in backends:
            backend.abort()


def on_group_made(around: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
    """Run a context manager around the making of every process group, also the user's own (``new_group``, meshes)."""
    make = c10d._new_process_group_helper

    def making(*args: Any, **kwargs: Any) -> Any:
        with around():
            return make(*args, **kwargs)

    making.__name__, making.__qualname__, making.__doc__ = make.__name__, make.__qualname__, make.__doc__
    c10d._new_process_group_helper = making
