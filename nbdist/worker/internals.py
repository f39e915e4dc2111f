"""Everything of nbdist that touches private parts of torch, in one place.

Written against torch 2.9 to 2.13. What is used, and why there is no public way:

========================================  =====================================================================
``distributed_c10d._world``               lists the groups that exist, with name, ranks and backend
``_new_process_group_helper``             makes a group under a given name, so that device meshes, which hold
                                          names, find the new group where they had the old one
``_abort_process_group``'s parts          ``abort()`` of every NCCL communicator inside one NCCL group call
``FSDPModule._get_fsdp_state()``          the groups FSDP2 has put aside in each module's mesh info
``DistributedDataParallel.__dict__``      what ``__init__`` resets when it is run again
========================================  =====================================================================
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import BuiltinCommHookType, Store
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

__all__ = [
    "GroupRecord",
    "abort_communicators",
    "attach_ddp",
    "attach_fsdp",
    "default_timeout",
    "issued",
    "make_default_group",
    "make_subgroup",
    "mesh_groups",
    "on_group_made",
    "records",
    "refresh_mesh",
    "replace_everywhere",
    "replace_groups",
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
    """How many collectives this rank has issued on the default group; -1 without one."""
    group = c10d._world.default_pg
    try:
        return -1 if group is None else int(group._get_sequence_number_for_group())
    except RuntimeError:  # a backend that does not count
        return -1


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


# ---- modules


_DDP_KEPT = (
    "training",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks",
    "_forward_hooks_always_called",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_is_full_backward_hook",
    "_load_state_dict_post_hooks",
    "_load_state_dict_pre_hooks",
    "_non_persistent_buffers_set",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
)


def attach_ddp(ddp: Any, group_of: Callable[[Any], Any]) -> str | None:
    """Give a DDP module a new reducer on the new group, in place, without any communication.

    ``__init__`` runs again on the same object: only it makes the C++ reducer. ``init_sync=False`` keeps it from
    broadcasting rank 0's weights, which would hide that ranks stand at different steps.

    Parameters
    ----------
    ddp
        The module.
    group_of
        Gives the new process group for an old one, or None.

    Returns
    -------
    str or None
        Why it could not be attached; it is unchanged then.
    """
    old = dict(ddp.__dict__)
    group = group_of(old["process_group"])
    if group is None:
        return "its process group no longer exists"
    if old.get("mixed_precision") is not None:
        return "it was made with mixed_precision=, which hooks every submodule"
    if old.get("_delay_all_reduce_params"):
        return "it was made with delay_all_reduce_named_params="
    hooks = list(old.get("_comm_hooks", ()))
    builtin = _builtin_hook(ddp) if not hooks else None
    for handle in old.get("_accum_grad_hooks", ()):
        handle.remove()
    for name in ("reducer", "logger"):  # the old reducer's autograd hooks go with it
        ddp.__dict__.pop(name, None)
    try:
        DistributedDataParallel.__init__(ddp, old["_modules"]["module"], **_ddp_arguments(old), process_group=group)
        for hook, state in hooks:
            _restart_hook_state(state, group_of)
            ddp.register_comm_hook(state, hook)
        if builtin is not None:
            ddp._register_builtin_comm_hook(builtin)
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        ddp.__dict__.clear()
        ddp.__dict__.update(old)
        return f"{type(error).__name__}: {error}".splitlines()[0]
    for name, value in old.items():
        if (name in _DDP_KEPT or name not in ddp.__dict__) and name not in ("reducer", "logger"):
            ddp.__dict__[name] = value
    for table in ("_modules", "_parameters", "_buffers"):
        for name, value in old[table].items():
            ddp.__dict__[table].setdefault(name, value)
    return None


def _ddp_arguments(old: dict[str, Any]) -> dict[str, Any]:
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    if "bucket_bytes_cap_list" in old and len(old["bucket_bytes_cap_list"]) > 2:
        buckets = {"bucket_cap_mb_list": [size / 2**20 for size in old["bucket_bytes_cap_list"]]}
    elif old.get("bucket_bytes_cap_default", True):
        buckets = {}
    else:
        buckets = {"bucket_cap_mb": old["bucket_bytes_cap"] / 2**20}
    # Until 2.12 broadcast_buffers; from 2.13 on that one is deprecated, and warns.
    sync = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    arguments = {
        "device_ids": old.get("device_ids"),
        "output_device": old.get("output_device"),
        "dim": old.get("dim", 0),
        sync: old.get(sync, True),
        "init_sync": False,
        "find_unused_parameters": old.get("find_unused_parameters", False),
        "gradient_as_bucket_view": old.get("gradient_as_bucket_view", False),
        "static_graph": old.get("static_graph", False),
        "skip_all_reduce_unused_params": old.get("skip_all_reduce_unused_params", False),
        "batched_grad_copy": old.get("batched_grad_copy", False),
        **buckets,
    }
    return {name: value for name, value in arguments.items() if name in known}


def _builtin_hook(ddp: Any) -> Any:
    """The communication hook written in C++ that a module has; only its logging data knows."""
    name = str(ddp._get_ddp_logging_data().get("comm_hook", ""))
    return BuiltinCommHookType.__members__.get(name.rpartition(".")[2])


def _restart_hook_state(state: Any, group_of: Callable[[Any], Any]) -> None:
    """Put new groups into a communication hook's state, and restart one that belongs to a bucket layout (PowerSGD)."""
    replace_groups(state, group_of)
    if hasattr(state, "error_dict") and hasattr(state, "iter"):
        for table in ("error_dict", "p_memory_dict", "q_memory_dict"):
            getattr(state, table).clear()
        state.iter = 0


def replace_groups(owner: Any, group_of: Callable[[Any], Any]) -> bool:
    """Set the new groups in an object's attributes; return whether every group in it has a new one."""
    whole = True
    for name, value in list(getattr(owner, "__dict__", {}).items()):
        if isinstance(value, dist.ProcessGroup):
            new = group_of(value)
            if new is None:
                whole = False
            else:
                owner.__dict__[name] = new
    return whole


def fsdp_states(module: torch.nn.Module) -> list[Any]:
    """The FSDP2 state of a module and of all modules in it, each once."""
    states: dict[int, Any] = {}
    for part in module.modules():
        if isinstance(part, FSDPModule):
            state = part._get_fsdp_state()
            states.setdefault(id(state), state)
    return list(states.values())


def _param_groups(state: Any) -> list[Any]:
    if hasattr(state, "_fsdp_param_groups"):  # from 2.11 on
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def attach_fsdp(module: torch.nn.Module, group_of: Callable[[Any], Any]) -> str | None:
    """Give a module that ``fully_shard`` was applied to its new groups, and end the iteration that was broken off.

    Its device meshes need nothing: they hold names of groups, and the new groups have the old names.

    Returns
    -------
    str or None
        Why it could not be attached.
    """
    states = fsdp_states(module)
    whole = True
    for state in states:
        for params in _param_groups(state):
            for info in _mesh_infos(params):
                whole = replace_groups(info, group_of) and whole
            for part in (params._all_gather_comm, params._reduce_scatter_comm) if _has_comms(params) else ():
                whole = replace_groups(part, group_of) and whole
    if not whole:
        return "a process group of its mesh no longer exists"
    for state in states:
        _end_iteration(state)
    root = next((state for state in states if state._is_root), None)
    if root is not None and hasattr(root, "_reset_iter_state"):  # from 2.13 on; the rest is ours, for 2.9 to 2.12
        root._reset_iter_state()
    return None


def _has_comms(params: Any) -> bool:
    return hasattr(params, "_all_gather_comm") and hasattr(params, "_reduce_scatter_comm")


def _mesh_infos(params: Any) -> list[Any]:
    infos = [params.mesh_info, params.post_forward_mesh_info]
    for param in params.fsdp_params:
        infos += [getattr(param, "mesh_info", None), getattr(param, "post_forward_mesh_info", None)]
    return list({id(info): info for info in infos if info is not None}.values())


def _end_iteration(state: Any) -> None:
    """Bring one FSDP2 state back to between two iterations: parameters sharded, no gradient, nothing in flight."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    device = getattr(state, "_device", None)
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
    shared = getattr(state, "_state_ctx", None)
    if shared is not None:
        shared.iter_forward_root = None
        shared.post_backward_final_callback_queued = False
    communication = getattr(state, "_comm_ctx", None)
    for name, empty in (("all_gather_state", None), ("reduce_scatter_state", None)):
        if hasattr(communication, name):
            setattr(communication, name, empty)
    for name in ("reduce_scatter_states", "_last_post_reduce_events", "post_forward_order"):
        if hasattr(communication, name):
            getattr(communication, name).clear()
    state._training_state = TrainingState.IDLE
    if hasattr(state, "_modules_to_run_forward"):
        state._modules_to_run_forward.clear()
    for params in _param_groups(state):
        for name in ("_all_gather_result", "_post_reduce_event", "_all_reduce_state", "_reshard_after_forward_event"):
            if hasattr(params, name):
                setattr(params, name, None)
        params._partial_reduce_output = None
        params._post_forward_indices.clear()
        params._training_state = TrainingState.IDLE
        params._to_sharded()
        for param in params.fsdp_params:
            param.unsharded_accumulated_grad = None
            param.sharded_param.grad = None
            if (unsharded := getattr(param, "_unsharded_param", None)) is not None:
                unsharded.grad = None


def mesh_groups(mesh: DeviceMesh) -> list[str]:
    """Names of the groups of a device mesh."""
    return [str(name) for name in getattr(mesh, "_dim_group_names", ())]


def refresh_mesh(mesh: DeviceMesh, groups: Mapping[str, Any]) -> bool:
    """Let a mesh find the new groups; return whether all of its groups exist."""
    registry = getattr(mesh, "_pg_registry", None)  # from 2.11 on beside the registry in C++
    if registry is not None:
        registry.update({name: groups[name] for name in registry if name in groups})
    return all(name in groups for name in mesh_groups(mesh))
