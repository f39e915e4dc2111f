"""``replicas_equal()``: do all ranks hold the same parameters, and if not, which differ where and by how much."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from nbdist.train.ranks import agree, flat_shards, require_group, signature

__all__ = ["Difference", "Replicas", "replicas_equal"]

_CHUNK = 1 << 22  # elements summed at a time, which bounds the memory this takes
_SHOWN = 5  # differences that are measured and named


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One parameter that is not the same everywhere.

    Attributes
    ----------
    name
        Its name in the model.
    ranks
        Ranks whose values are not rank 0's.
    largest
        Largest absolute difference to rank 0's values; None where it was not measured.
    """

    name: str
    ranks: tuple[int, ...]
    largest: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """What the comparison found; true if nothing differs.

    Attributes
    ----------
    compared, sharded
        Number of tensors compared, and of those that have no second copy to compare with.
    differences
        What differs, in the model's order.
    """

    compared: int
    sharded: int
    differences: tuple[Difference, ...]

    def __bool__(self) -> bool:
        return not self.differences

    def __str__(self) -> str:
        aside = f" ({self.sharded} are sharded: each rank holds its own part)" if self.sharded else ""
        if not self.differences:
            return f"equal on all ranks: {self.compared} compared{aside}"
        told = []
        for d in self.differences[:_SHOWN]:
            where = f"rank{'s' if len(d.ranks) > 1 else ''} {', '.join(map(str, d.ranks))}"
            told.append(f"`{d.name}` on {where}" + (f" by up to {d.largest:.3g}" if d.largest is not None else ""))
        more = f", and {len(self.differences) - _SHOWN} more" if len(self.differences) > _SHOWN else ""
        return f"{len(self.differences)} of {self.compared} differ from rank 0: {', '.join(told)}{more}{aside}"

    __repr__ = __str__


def replicas_equal(model: nn.Module, *, buffers: bool = False) -> Replicas:
    """Compare every parameter's bits over all ranks; call it on all of them.

    Usual reasons for a difference: a forward through ``model.module`` instead of ``model``, an optimizer step on one
    rank only, weights changed after wrapping.

    Parameters
    ----------
    model
        Wrapped or not. What FSDP has divided has no replicas and is left out; replicas of shards are compared.
    buffers
        Compare buffers too. Running statistics may rightly differ between steps: DDP takes rank 0's before a forward.

    Returns
    -------
    Replicas
        The same on every rank.
    """
    require_group("replicas_equal")
    tensors, sharded = agree("replicas_equal", lambda: _comparable(model, buffers))
    world_size = dist.get_world_size()
    if not tensors:
        return Replicas(compared=0, sharded=sharded, differences=())
    mine = torch.stack([torch.stack(_checksum(t)) for _, t, _ in tensors])
    everyone = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(everyone, mine)
    differences: list[Difference] = []
    for i, (name, tensor, period) in enumerate(tensors):
        # Rank r holds the same part as rank r % period; an unsharded tensor has period 1.
        ranks = tuple(r for r in range(world_size) if not torch.equal(everyone[r][i], everyone[r % period][i]))
        if ranks and len(differences) < _SHOWN and period == 1:
            reference = tensor.detach().clone()
            dist.broadcast(reference, src=0)
            largest = (tensor.detach().double() - reference.double()).abs().max()
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
            differences.append(Difference(name=name, ranks=ranks, largest=float(largest)))
        elif ranks:
            differences.append(Difference(name=name, ranks=ranks))
    return Replicas(compared=len(tensors), sharded=sharded, differences=tuple(differences))


def _comparable(
    model: nn.Module, buffers: bool
) -> tuple[tuple[list[tuple[str, torch.Tensor, int]], int], dict[str, object]]:
    """Name, this rank's part and period of each tensor with a second copy; the number of those without."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    flat = flat_shards(inner)
    found: list[tuple[str, torch.Tensor, int]] = []
    sharded = 0
    for name, tensor in [*inner.named_parameters(), *(inner.named_buffers() if buffers else ())]:
        if id(tensor) in flat:
            sharded += 1
        elif isinstance(tensor, DTensor):
            shards = tensor.device_mesh.size(-1)
            if shards == dist.get_world_size() and shards > 1:
                sharded += 1
            else:
                found.append((name, tensor.to_local(), shards))
        else:
            found.append((name, tensor, 1))
    return (found, sharded), {"the model": signature(inner), "the number of sharded parameters": sharded}


def _checksum(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Two sums of a tensor's bit patterns, the second weighted by position; exact, on its own device."""
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    plain = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    bits = plain.contiguous().view(-1).view(integer[plain.element_size()])
    sums = [torch.zeros((), dtype=torch.int64, device=tensor.device) for _ in range(2)]
    for start in range(0, bits.numel(), _CHUNK):
        part = bits[start : start + _CHUNK].long()
        weights = torch.arange(start + 1, start + 1 + part.numel(), device=tensor.device)
        sums[0] += part.sum()
        # Products wrap around 2**64, alike on every rank.
        sums[1] += (part * (weights * 0x9E3779B1 + 1)).sum()
    return sums
