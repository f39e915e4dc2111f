"""What every call of :mod:`nbdist.train` shares: the group, this rank's device, one notice, one verdict on all ranks.

A rank that refuses an argument while another goes on into a collective leaves that other one waiting for ever. So each
call checks its arguments inside :func:`agree`: every rank tells the others whether it refuses, and all refuse alike.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from nbdist.errors import InputError, NotRunningError
from nbdist.worker import telemetry

__all__ = [
    "agree",
    "device_of",
    "flat_shards",
    "gather",
    "local_world_size",
    "require_group",
    "say",
    "signature",
    "together",
]

T = TypeVar("T")


def require_group(call: str) -> None:
    """Refuse to go on where there is no process group.

    Parameters
    ----------
    call
        The public name that was called, for the message.

    Raises
    ------
    NotRunningError
        If ``torch.distributed`` is not initialised.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise NotRunningError(
            f"{call}() needs a process group: call it in a %%distributed cell, or after "
            "torch.distributed.init_process_group() in a script that torchrun starts"
        )


def local_world_size() -> int:
    """Number of ranks on this machine (``LOCAL_WORLD_SIZE``; without it, all of them)."""
    world_size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size))


def device_of(model: nn.Module | None = None, device: torch.device | str | None = None) -> torch.device:
    """Device this rank trains on: the one given, the model's accelerator, the cell's, or the one the backend calls for.

    Parameters
    ----------
    model
        A model that may already be on an accelerator.
    device
        What the caller asked for.

    Returns
    -------
    torch.device
        With an index, unless it is the CPU.
    """
    chosen: torch.device | None = torch.device(device) if device is not None else None
    if chosen is None and model is not None:
        chosen = next((p.device for p in model.parameters() if p.device.type not in ("cpu", "meta")), None)
    if chosen is None:
        chosen = _named_device()
    if chosen is None:
        nccl = dist.is_available() and dist.is_initialized() and "nccl" in str(dist.get_backend_config())
        chosen = torch.device("cuda" if nccl and torch.cuda.is_available() else "cpu")
    if str(chosen) == "cuda":
        chosen = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % max(torch.cuda.device_count(), 1))
    return chosen


def _named_device() -> torch.device | None:
    """What ``device`` means in a rank of nbdist: gloo serves the CPU, and GPUs that ranks share."""
    if telemetry.current is None:
        return None
    named = getattr(sys.modules.get("__main__"), "device", None)
    return torch.device(named) if isinstance(named, torch.device | str) else None


def say(text: str) -> None:
    """Print one notice, on rank 0 only: the choice that was made and its reason."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        sys.stdout.write(f"nbdist: {text}\n")
        sys.stdout.flush()


def gather(value: T) -> list[T]:
    """Values of all ranks, in rank order, on every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    if len(values) == 1:
        return [value]
    if "nccl" in str(dist.get_backend_config()) and torch.cuda.is_available():
        # Objects travel through the current GPU, and two ranks on GPU 0 are an error of NCCL.
        torch.cuda.set_device(device_of())
    dist.all_gather_object(values, value)
    return values


def signature(model: nn.Module) -> list[str]:
    """One line for each parameter and buffer: name, shape, dtype; equal on every rank if the models are."""
    flat = flat_shards(model)
    lines = [
        f"parameter {n} {'' if id(p) in flat else tuple(p.shape)} {p.dtype}{'' if p.requires_grad else ' frozen'}"
        for n, p in model.named_parameters()
    ]
    return lines + [f"buffer {n} {tuple(b.shape)} {b.dtype}" for n, b in model.named_buffers()]


def flat_shards(model: nn.Module) -> set[int]:
    """Ids of the parameters that version 1 of FSDP has cut up: their shapes here differ from rank to rank."""
    return {
        id(p)
        for module in model.modules()
        if isinstance(module, FullyShardedDataParallel) and module.sharding_strategy is not ShardingStrategy.NO_SHARD
        for p in module.parameters()
    }


def agree(call: str, check: Callable[[], tuple[T, Mapping[str, object]]]) -> T:
    """Run a check on every rank; where one refuses, all refuse, and none is left waiting.

    Parameters
    ----------
    call
        The public name that was called, e.g. ``"fsdp"``.
    check
        Returns its result and the facts that must be the same on every rank, by name. A fact that is a list of lines
        is compared by digest first.

    Raises
    ------
    InputError
        On every rank alike: what one of them refused, or which fact differs between which ranks.
    """
    failure: BaseException | None = None
    verdict: str | None = None
    facts: Mapping[str, object] = {}
    result: T | None = None
    try:
        result, facts = check()
    except InputError as error:
        verdict = str(error)
    except Exception as error:
        failure, verdict = error, f"{type(error).__name__}: {error}"
    told = {name: _digest(fact) for name, fact in {"call": f"{call}()", **facts}.items()}
    answers = gather((verdict, told))
    refusals = {rank: said for rank, (said, _) in enumerate(answers) if said is not None}
    if failure is not None:
        raise failure
    if refusals:
        first = next(iter(refusals.values()))
        everywhere = len(refusals) == len(answers) and len(set(refusals.values())) == 1
        where = "" if everywhere else f"rank {next(iter(refusals))}: "
        raise InputError(f"{call}(): {where}{first}")
    for name in answers[0][1]:
        for rank, (_, theirs) in enumerate(answers):
            if theirs.get(name) != answers[0][1][name]:
                raise InputError(_difference(call, name, facts.get(name, told.get(name)), rank, answers))
    return result  # type: ignore[return-value]


def together(call: str, action: Callable[[], T]) -> T:
    """Run what may fail on some ranks (a file, a folder) on every rank; where one fails, all raise, none waits."""
    return agree(call, lambda: (action(), {}))


def _digest(fact: object) -> str:
    if isinstance(fact, list):
        return hashlib.sha1("\n".join(fact).encode(), usedforsecurity=False).hexdigest()
    return str(fact)


def _difference(
    call: str, name: str, mine: object, rank: int, answers: Sequence[tuple[str | None, Mapping[str, str]]]
) -> str:
    """The sentence about a fact that differs; for a list of lines, all ranks exchange it to name the first one."""
    zero, other = answers[0][1].get(name, "none"), answers[rank][1].get(name, "none")
    if any(isinstance(kind, list) for kind in gather(mine if isinstance(mine, list) else None)):
        lists = gather(mine)
        pair = [lists[0] or [], lists[rank] or []]
        for ours, theirs in zip(*pair, strict=False):
            if ours != theirs:
                zero, other = ours, theirs
                break
        else:
            zero, other = (f"{len(lines)} parameters and buffers" for lines in pair)  # type: ignore[arg-type]
    return f"{call}(): {name} differs between ranks: rank 0 has {zero}, rank {rank} has {other}; make it the same"
