"""Modules that hold process groups: DDP's reducer, FSDP2's state, device meshes."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import BuiltinCommHookType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

__all__ = ["attach_ddp", "attach_fsdp", "mesh_groups", "never_trace", "refresh_mesh", "replace_groups"]

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


def never_trace(function: Any) -> None:
    """Let a compiled model run a function as it is, as ``torch.compiler.disable`` would after a long import."""
    function._torchdynamo_disable = True  # for code that calls it
    with contextlib.suppress(ImportError, AttributeError):
        from torch._C._dynamo import eval_frame

        skip, default = eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT
        strategy = eval_frame._FrameExecStrategy(skip, default)
        eval_frame.set_code_exec_strategy(function.__code__, strategy)  # for the function itself
