"""Between loss and step: mixed precision, accumulation, clipping and the mean over uneven ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from nbdist.errors import InputError
from nbdist.train.parallel import Precision, precision_of
from nbdist.train.ranks import device_of, require_group

__all__ = ["accumulate", "autocast", "clip_gradients", "grad_scaler", "mean_over_ranks"]


def autocast(dtype: Precision = None, *, enabled: bool = True) -> torch.autocast:
    """``torch.autocast`` for this rank's device.

    Parameters
    ----------
    dtype
        ``"bf16"`` or ``"fp16"``; default: bf16 where the device has it, else fp16.
    enabled
        False makes it do nothing, so that one loop serves both.

    Returns
    -------
    torch.autocast

    Raises
    ------
    InputError
        For fp16 on the CPU, or another type.
    """
    device = device_of()
    chosen = precision_of(True if dtype is None else dtype, device)
    if not isinstance(chosen, torch.dtype):
        raise InputError(f"autocast(): dtype expects 'bf16' or 'fp16', not {dtype!r}")
    return torch.autocast(device.type, dtype=chosen, enabled=enabled)


def grad_scaler(
    model: nn.Module, dtype: Precision = None, *, enabled: bool | None = None, **options: Any
) -> torch.amp.GradScaler:
    """Make the loss scaler that float16 gradients need; for every other type, one that does nothing.

    Parameters
    ----------
    model
        The wrapped model: version 1 of FSDP needs a scaler of its own, which asks all ranks for overflows.
    dtype
        The type computed in.
    enabled
        Overrules the choice by ``dtype``.
    **options
        Passed on, e.g. ``init_scale``.

    Returns
    -------
    torch.amp.GradScaler

    Raises
    ------
    InputError
        For fp16 on the CPU, or another type.
    """
    device = device_of(model)
    chosen = precision_of(dtype, device)
    half = chosen.param_dtype if chosen is not None and not isinstance(chosen, torch.dtype) else chosen
    on = half is torch.float16 if enabled is None else enabled
    if any(isinstance(m, FullyShardedDataParallel) for m in model.modules()):
        return ShardedGradScaler(device.type, enabled=on, **options)
    return torch.amp.GradScaler(device.type, enabled=on, **options)


@contextmanager
def accumulate(model: nn.Module, *, last: bool) -> Iterator[None]:
    """Run forward and backward of one micro-batch; gradients are communicated only in the last one before a step.

    ::

        for i, (x, y) in enumerate(batches):
            last = (i + 1) % 4 == 0 or i + 1 == len(batches)
            with nbdist.accumulate(model, last=last):
                (loss_of(model(x), y) / 4).backward()
            if last:
                optimizer.step(); optimizer.zero_grad()

    Under FSDP the gradients that wait are whole, so this trades memory for communication.

    Parameters
    ----------
    model
        What ``ddp()`` or ``fsdp()`` returned.
    last
        Whether ``optimizer.step()`` follows; the same on every rank.
    """
    if isinstance(model, DistributedDataParallel | FullyShardedDataParallel):
        if last:
            yield
        else:
            with model.no_sync():
                yield
    elif isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)
    else:
        raise InputError(f"accumulate() expects what ddp() or fsdp() returned, not {type(model).__name__}")


def clip_gradients(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Scale all gradients so that their norm over the whole model is at most ``max_norm``.

    ``torch.nn.utils.clip_grad_norm_`` alone takes the norm of this rank's shard under FSDP 1.

    Parameters
    ----------
    model
        Wrapped or not; called on every rank.
    max_norm
        Largest norm allowed.
    norm_type
        2 for the Euclidean norm, ``float("inf")`` for the largest element.

    Returns
    -------
    torch.Tensor
        The norm before scaling, shape ``()``, the same on every rank.
    """
    if not max_norm > 0:
        raise InputError(f"clip_gradients(): max_norm expects a positive number, not {max_norm!r}")
    if isinstance(model, FullyShardedDataParallel):
        return model.clip_grad_norm_(max_norm, norm_type)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def mean_over_ranks(total: torch.Tensor, count: int | torch.Tensor) -> torch.Tensor:
    """Mean over the samples of all ranks, with the gradient of the whole batch, however unevenly it is shared.

    DDP and FSDP average the ranks' gradients. The mean of each rank's mean is that of the whole batch only while all
    ranks have equally many samples (or tokens that count).

    ::

        loss = nbdist.mean_over_ranks(F.cross_entropy(model(x), y, reduction="sum"), len(y))

    Parameters
    ----------
    total
        This rank's sum of losses, shape ``()``.
    count
        Number of samples in it; not the same on every rank.

    Returns
    -------
    torch.Tensor
        The mean over all ranks, shape ``()``: its value the same on every rank, its gradient this rank's share.
    """
    require_group("mean_over_ranks")
    told = torch.stack([total.detach().double(), torch.as_tensor(count, device=total.device).double()])
    dist.all_reduce(told)
    mean = (told[0] / told[1]).to(total.dtype)
    share = total * (dist.get_world_size() / told[1]).to(total.dtype)
    return share + (mean - share.detach())
