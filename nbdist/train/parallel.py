"""``ddp()`` and ``fsdp()``: a model wrapped right for this rank's device, returned as torch's own object."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from nbdist.errors import InputError
from nbdist.train.blocks import Blocks, checkpoint_activations, find_blocks, shared_across
from nbdist.train.ranks import agree, device_of, local_world_size, require_group, say, signature

__all__ = ["STRATEGIES", "ddp", "fsdp", "strategy_name"]

STRATEGIES = {
    "none": ShardingStrategy.NO_SHARD,
    "grad_op": ShardingStrategy.SHARD_GRAD_OP,
    "full": ShardingStrategy.FULL_SHARD,
    "hybrid": ShardingStrategy.HYBRID_SHARD,
}
_DTYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
}
Precision = bool | str | torch.dtype | MixedPrecisionPolicy | None
Unit = tuple[str, nn.Module]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the arguments of one call come to, once every rank has found them good."""

    device: torch.device
    units: list[Unit]
    reason: str
    strategy: str = "none"
    precision: torch.dtype | MixedPrecisionPolicy | None = None
    shard_size: int = 1
    cpu_offload: bool = False


def ddp(
    model: nn.Module,
    *,
    device: torch.device | str | None = None,
    activation_checkpointing: bool = False,
    blocks: Blocks | None = None,
    sync_batchnorm: bool = False,
    find_unused_parameters: bool = False,
    gradient_as_bucket_view: bool = True,
    **options: Any,
) -> DistributedDataParallel:
    """Move a model to this rank's device and wrap it in ``DistributedDataParallel``.

    Every rank starts from rank 0's weights. Build the optimizer afterwards, from the parameters of what is returned.

    Parameters
    ----------
    model
        The same module on every rank; its weights may differ.
    device
        Default: where the model is, else this rank's GPU under NCCL and the CPU under gloo.
    activation_checkpointing
        Recompute each block in backward: less memory for activations, about a third more computing.
    blocks
        Where to checkpoint: a module class, its name, or modules; default: the repeated block.
    sync_batchnorm
        Batch statistics over all ranks (GPUs only, as torch has it).
    find_unused_parameters
        For models whose loss does not reach every parameter in every step.
    gradient_as_bucket_view
        Gradients live in the buckets that are communicated, which saves one copy of them.
    **options
        Passed on to ``DistributedDataParallel``.

    Returns
    -------
    DistributedDataParallel

    Raises
    ------
    InputError
        On every rank alike.
    """
    require_group("ddp")

    def check() -> tuple[Plan, Mapping[str, object]]:
        _check_model(model)
        chosen = device_of(model, device)
        _check_device(chosen)
        meta = next((n for n, t in [*model.named_parameters(), *model.named_buffers()] if t.is_meta), None)
        if meta is not None:
            raise InputError(f"`{meta}` is on the meta device and has no values; build the model on the CPU first")
        if not any(p.requires_grad for p in model.parameters()):
            raise InputError("the model has no parameter that requires a gradient, so there is nothing to synchronise")
        if sync_batchnorm and chosen.type == "cpu":
            raise InputError("sync_batchnorm needs GPUs: torch's SyncBatchNorm does not run on the CPU")
        unknown = sorted(set(options) - _ddp_options())
        if unknown:
            raise InputError(f"{unknown[0]} is no argument of ddp() or of DistributedDataParallel")
        units, reason = find_blocks(model, blocks) if activation_checkpointing or blocks is not None else ([], "")
        if activation_checkpointing and not units:
            raise InputError("activation_checkpointing: no block class repeats in the model; name it with blocks=")
        asked = (activation_checkpointing, sync_batchnorm, find_unused_parameters, gradient_as_bucket_view, options)
        facts = {"the model": signature(model), "the device type": chosen.type, "the arguments": asked}
        return Plan(device=chosen, units=units, reason=reason), facts

    plan = agree("ddp", check)
    model.to(plan.device)
    if sync_batchnorm:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
    if activation_checkpointing:
        say(f"ddp: activations recomputed in {checkpoint_activations(plan.units)} blocks ({plan.reason})")
    return DistributedDataParallel(
        model,
        # device_ids must be left out on the CPU; on a GPU it also moves the inputs there.
        device_ids=None if plan.device.type == "cpu" else [plan.device.index],
        find_unused_parameters=find_unused_parameters,
        gradient_as_bucket_view=gradient_as_bucket_view,
        **options,
    )


def fsdp(
    model: nn.Module,
    strategy: str | ShardingStrategy = "full",
    *,
    blocks: Blocks | None = None,
    mixed_precision: Precision = None,
    cpu_offload: bool = False,
    activation_checkpointing: bool = False,
    version: int = 2,
    shard_size: int | None = None,
    device: torch.device | str | None = None,
) -> nn.Module:
    """Shard a model over the ranks, block by block.

    Every rank starts from rank 0's weights. Build the optimizer afterwards: before sharding it would hold the old
    parameters and train nothing.

    Parameters
    ----------
    model
        The same module on every rank; its weights may differ, and it may be on the meta device if each of its modules
        that owns parameters has ``reset_parameters``.
    strategy
        ``"full"`` (FULL_SHARD: parameters, gradients and optimizer state divided), ``"grad_op"`` (SHARD_GRAD_OP:
        parameters stay whole between forward and backward), ``"none"`` (NO_SHARD: a replica per rank, as DDP) or
        ``"hybrid"`` (HYBRID_SHARD: sharded within ``shard_size`` ranks, replicated across); FSDP1's names work too
    blocks
        What becomes one unit each: a module class, its name, or modules; default: the repeated block, and said so.
    mixed_precision
        ``"bf16"`` or ``"fp16"`` (compute in it, keep and reduce in the parameters' own type), or a
        ``MixedPrecisionPolicy``. fp16 wants a gradient scaler too: ``nbdist.grad_scaler``.
    cpu_offload
        Keep parameters, gradients and optimizer state in host memory (accelerators only).
    activation_checkpointing
        Recompute each block in backward.
    version
        2: ``fully_shard``; 1: ``FullyShardedDataParallel``, which torch is phasing out.
    shard_size
        Ranks that hold one copy together (``"hybrid"``); default: the ranks of one machine.
    device
        As in :func:`ddp`.

    Returns
    -------
    nn.Module
        The model itself, sharded in place (version 2), or its wrapper (version 1, and ``"none"``).

    Raises
    ------
    InputError
        On every rank alike.
    """
    require_group("fsdp")

    def check() -> tuple[Plan, Mapping[str, object]]:
        _check_model(model)
        chosen = device_of(model, device)
        _check_device(chosen)
        name = strategy_name(strategy)
        if version not in (1, 2):
            raise InputError(f"version expects 2 (fully_shard) or 1 (FullyShardedDataParallel), not {version!r}")
        dtype = precision_of(mixed_precision, chosen)
        if name == "none" and version == 2 and dtype is not None:
            raise InputError(
                "strategy 'none' replicates the model as DDP does; use nbdist.autocast() for mixed precision"
            )
        if cpu_offload and chosen.type == "cpu":
            raise InputError("cpu_offload needs an accelerator: on CPU ranks everything is in host memory already")
        if cpu_offload and name == "none":
            raise InputError("cpu_offload needs a sharding strategy; 'none' keeps a replica on the device")
        size = shard_size_of(name, shard_size)
        units, reason = find_blocks(model, blocks)
        shared = None if name == "none" else shared_across(model, units)
        if shared:
            raise InputError(
                f"`{shared[0]}` and `{shared[1]}` are one parameter in two blocks; sharding would untie them: "
                "name blocks that keep them together"
            )
        if activation_checkpointing and not units:
            raise InputError("activation_checkpointing: no block class repeats in the model; name it with blocks=")
        bent = next((n for n, p in model.named_parameters() if not p.is_contiguous()), None)
        if bent and version == 2 and name != "none":
            raise InputError(
                f"`{bent}` is not contiguous (channels_last?), which fully_shard does not take; ddp() does"
            )
        _check_meta(model, late_start=name != "none" and version == 2)
        asked = (name, version, str(dtype), cpu_offload, activation_checkpointing, size, [n for n, _ in units])
        facts = {"the model": signature(model), "the device type": chosen.type, "the arguments": asked}
        plan = Plan(
            device=chosen,
            units=units,
            reason=reason,
            strategy=name,
            precision=dtype,
            shard_size=size,
            cpu_offload=cpu_offload,
        )
        return plan, facts

    plan = agree("fsdp", check)
    if plan.strategy == "none" and version == 2:
        say("fsdp: strategy none keeps a replica on every rank, so this is DistributedDataParallel")
        return ddp(
            model,
            device=plan.device,
            activation_checkpointing=activation_checkpointing,
            blocks=[m for _, m in plan.units] if activation_checkpointing else None,
        )
    if plan.strategy == "hybrid" and plan.shard_size == dist.get_world_size():
        say("fsdp: all ranks are on one machine, so hybrid shards over all of them (shard_size= makes smaller groups)")
    say(f"fsdp: {plan.reason}")
    if activation_checkpointing:
        checkpoint_activations(plan.units)
    if version == 1:
        return wrap_1(model, plan)
    return wrap_2(model, plan, make_mesh(plan))


def strategy_name(strategy: str | ShardingStrategy) -> str:
    """Short name of a sharding strategy, from it or from FSDP1's own name for it."""
    names = {document.name: short for short, document in STRATEGIES.items()}
    asked: object = strategy.name if isinstance(strategy, ShardingStrategy) else strategy
    if isinstance(asked, str):
        short = names.get(asked.upper(), asked.lower())
        if short in STRATEGIES:
            return short
    hint = " (a number is not a ShardingStrategy)" if isinstance(asked, int) else ""
    raise InputError(f"strategy expects {', '.join(STRATEGIES)} or {', '.join(names)}, not {strategy!r}{hint}")


def precision_of(asked: Precision, device: torch.device) -> torch.dtype | MixedPrecisionPolicy | None:
    """Compute type of mixed precision, refused where this device does not have it."""
    if asked is None or asked is False:
        return None
    if asked is True:
        half = device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.float16 if half else torch.bfloat16
    dtype = _DTYPES.get(asked.lower()) if isinstance(asked, str) else asked
    if isinstance(dtype, MixedPrecisionPolicy):
        if dtype.param_dtype is torch.float16 and device.type == "cpu":
            raise InputError("float16 needs an accelerator; on the CPU use 'bf16'")
        return dtype
    if dtype not in (torch.bfloat16, torch.float16):
        raise InputError(f"mixed_precision expects 'bf16', 'fp16', a MixedPrecisionPolicy or None, not {asked!r}")
    if dtype is torch.float16 and device.type == "cpu":
        raise InputError("float16 needs an accelerator; on the CPU use 'bf16'")
    return dtype


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise InputError(f"expects a torch.nn.Module, not {type(model).__name__}")
    for module in model.modules():
        if isinstance(module, DistributedDataParallel | FullyShardedDataParallel | FSDPModule):
            kind = "DistributedDataParallel" if isinstance(module, DistributedDataParallel) else "FSDP"
            raise InputError(f"the model is wrapped in {kind} already; build it anew, or keep what you have")


def _check_meta(model: nn.Module, *, late_start: bool) -> None:
    for name, module in model.named_modules():
        if any(p.is_meta for p in module.parameters(recurse=False)):
            where = f"`{name}`" if name else f"the {type(module).__name__}"
            if not late_start:
                raise InputError(
                    f"{where} is on the meta device; only fsdp(version=2) with sharding can start from there"
                )
            if not callable(getattr(module, "reset_parameters", None)):
                raise InputError(f"{where} is on the meta device and has no reset_parameters() to give it values")


def _check_device(device: torch.device) -> None:
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError(f"device {device} was asked for, and torch sees no CUDA device here")


def _ddp_options() -> set[str]:
    return set(inspect.signature(DistributedDataParallel.__init__).parameters) - {"self", "module", "device_ids"}


def shard_size_of(strategy: str, asked: int | None) -> int:
    world_size = dist.get_world_size()
    if strategy != "hybrid":
        if asked is not None:
            raise InputError(f"shard_size belongs to strategy 'hybrid', not to {strategy!r}")
        return 1 if strategy == "none" else world_size
    size = asked if asked is not None else local_world_size()
    if not isinstance(size, int) or size < 1 or world_size % size:
        raise InputError(f"shard_size expects a divisor of the {world_size} ranks, not {size!r}")
    return size


def wrap_2(model: nn.Module, plan: Plan, mesh: DeviceMesh, *, start_equal: bool = True) -> nn.Module:
    """``fully_shard`` each unit, innermost first, then the rest as the root unit."""
    policy = plan.precision
    if isinstance(policy, torch.dtype):
        # Gradients are summed over the ranks in the parameters' own type: float32 as a rule.
        policy = MixedPrecisionPolicy(param_dtype=policy, reduce_dtype=next(model.parameters()).dtype)
    offload: OffloadPolicy = CPUOffloadPolicy() if plan.cpu_offload else OffloadPolicy()
    # None keeps torch's own choice for "full": units are freed after forward, the root's rest is not.
    reshard = False if plan.strategy == "grad_op" else None
    policy = policy or MixedPrecisionPolicy()
    # Only the whole model's output is converted: between units it would meet weights of the other type.
    within = replace(policy, output_dtype=None)
    for _, module in [*reversed(plan.units), ("", model)]:
        root = module is model
        if start_equal:
            _start_equal(module, plan.device)
        fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=reshard,
            mp_policy=policy if root else within,
            offload_policy=offload,
        )
    return model


def make_mesh(plan: Plan) -> DeviceMesh:
    world_size = dist.get_world_size()
    if plan.strategy == "hybrid" and plan.shard_size < world_size:
        shape = (world_size // plan.shard_size, plan.shard_size)
        return init_device_mesh(plan.device.type, shape, mesh_dim_names=("replicate", "shard"))
    return init_device_mesh(plan.device.type, (world_size,), mesh_dim_names=("shard",))


@torch.no_grad()
def _start_equal(module: nn.Module, device: torch.device) -> None:
    """Put rank 0's weights on every rank's device; only this unit's are whole there, and only until it is sharded."""
    for owner in module.modules():
        own = [p for p in owner.parameters(recurse=False) if not _is_sharded(p)]
        if any(p.is_meta for p in own):
            owner.to_empty(device=device, recurse=False)
            owner.reset_parameters()  # type: ignore[operator]
        for tensor in [*owner.parameters(recurse=False), *owner.buffers(recurse=False)]:
            if not _is_sharded(tensor):
                tensor.data = tensor.data.to(device)
                whole = tensor.data.contiguous()  # channels_last weights are not
                dist.broadcast(whole, src=0)
                tensor.data.copy_(whole)


def _is_sharded(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, DTensor)


def wrap_1(model: nn.Module, plan: Plan) -> nn.Module:
    units = {id(m) for _, m in plan.units}
    dtype = plan.precision
    if isinstance(dtype, MixedPrecisionPolicy):
        precision: MixedPrecision | None = MixedPrecision(
            param_dtype=dtype.param_dtype, reduce_dtype=dtype.reduce_dtype
        )
    else:
        precision = MixedPrecision(param_dtype=dtype, reduce_dtype=next(model.parameters()).dtype) if dtype else None
    world_size = dist.get_world_size()
    # In one group hybrid sharding is full sharding.
    hybrid = plan.strategy == "hybrid" and plan.shard_size < world_size
    strategy = STRATEGIES["full" if plan.strategy == "hybrid" and not hybrid else plan.strategy]
    on_cpu = plan.device.type == "cpu"
    if on_cpu:
        # Its own sync_module_states wants an accelerator.
        _start_equal(model, plan.device)
    with warnings.catch_warnings():
        # What these two say (NO_SHARD is DDP; one rank has nobody to share with) is in the notices and the docstring.
        warnings.filterwarnings("ignore", message="The `NO_SHARD` sharding strategy is deprecated")
        warnings.filterwarnings("ignore", message="FSDP is switching to use `NO_SHARD`")
        return FullyShardedDataParallel(
            model,
            sharding_strategy=strategy,
            # With a mesh its state dicts hold DTensors, which read back on any number of ranks.
            device_mesh=make_mesh(plan) if plan.strategy != "none" else None,
            auto_wrap_policy=CustomPolicy(lambda module: id(module) in units),
            mixed_precision=precision,
            cpu_offload=CPUOffload(offload_params=True) if plan.cpu_offload else None,
            # Without it torch refuses to run on the CPU.
            device_id=plan.device,
            sync_module_states=not on_cpu,
            use_orig_params=True,
        )
