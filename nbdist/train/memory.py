"""``account()``: the bytes a model really takes on each rank, by kind; ``estimate()`` and ``recommend()`` beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from nbdist.errors import InputError
from nbdist.train.advice import Advice, recommend
from nbdist.train.charts import bars
from nbdist.train.closed_form import ClosedForm, closed_form
from nbdist.train.estimates import Estimate
from nbdist.train.forecast import estimate, forecast
from nbdist.train.ranks import agree, gather
from nbdist.train.tables import gib, html_table, text_table
from nbdist.train.tracker import states

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "Account",
    "Advice",
    "ClosedForm",
    "Estimate",
    "Usage",
    "account",
    "closed_form",
    "estimate",
    "forecast",
    "recommend",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Bytes of one rank.

    Attributes
    ----------
    parameters, gradients, optimizer_state, buffers
        Of the model; sharded ones as the part that this rank holds.
    allocated, reserved, peak
        What torch's allocator on the GPU has given out, holds, and gave out at most; None without one.
    host
        Memory of the process that it shares with no other; None where the system does not tell.
    """

    rank: int
    parameters: int
    gradients: int
    optimizer_state: int
    buffers: int
    allocated: int | None = None
    reserved: int | None = None
    peak: int | None = None
    host: int | None = None

    @property
    def states_bytes(self) -> int:
        """Parameters, gradients and optimizer state together."""
        return self.parameters + self.gradients + self.optimizer_state


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Bytes of every rank, in rank order; shown as a table."""

    ranks: Sequence[Usage]
    title: str = ""
    rank: int = 0

    @property
    def mine(self) -> Usage:
        """Those of the rank that asks."""
        return self.ranks[self.rank]

    def rows(self) -> list[tuple[str, ...]]:
        """One row per kind, one column per rank, as shown."""
        rows = []
        names = ["parameters", "gradients", "optimizer_state", "buffers", "states_bytes"]
        on_gpu = any(u.allocated is not None for u in self.ranks)
        names += ["allocated", "reserved", "peak"] if on_gpu else ["host"]
        shown = {"states_bytes": "states together", "allocated": "allocated on the GPU", "host": "process, unshared"}
        for name in names:
            values = [getattr(u, name) for u in self.ranks]
            if name == "buffers" and not any(values):
                continue
            label = shown.get(name, name.replace("_", " "))
            rows.append((label, *("not available" if v is None else gib(v) for v in values)))
        return rows

    def figure(self, label: str = "", **others: Account) -> Figure:
        """Parameters, gradients and optimizer state per rank as bars; those of other accounts beside them.

        ``ddp_account.figure("DDP", FSDP=fsdp_account)``
        """
        kinds = ("parameters", "gradients", "optimizer_state", "buffers")
        columns = {
            f"{name}\nrank {u.rank}".strip(): {kind: getattr(u, kind) for kind in kinds}
            for name, one in {label: self, **others}.items()
            for u in one.ranks
        }
        return bars(columns, "model states per rank")

    def _header(self) -> tuple[str, ...]:
        return ("", *(f"rank {u.rank}" for u in self.ranks))

    def _note(self) -> str:
        if any(u.allocated is not None for u in self.ranks):
            return (
                "allocated: tensors on the GPU; reserved: held by torch's allocator for them; peak: allocated at most"
            )
        return "no CUDA device, so this is host memory"

    def __str__(self) -> str:
        return "\n".join([self.title, text_table(self._header(), self.rows()), self._note()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return html_table(self.title, self._header(), self.rows(), [self._note()])


def account(model: nn.Module, optimizer: Optimizer | None = None) -> Account:
    """Count the bytes of parameters, gradients and optimizer state that each rank holds; call it on every rank.

    Parameters
    ----------
    model
        Wrapped or not. Gradients are there after ``backward()``, the optimizer's state after its first step.
    optimizer
        Its state is counted too.

    Returns
    -------
    Account
        Of all ranks, on every rank; of this process alone where there is no process group.
    """
    together = dist.is_available() and dist.is_initialized()
    rank = dist.get_rank() if together else 0

    def check() -> tuple[Usage, dict[str, object]]:
        if not isinstance(model, nn.Module):
            raise InputError(f"expects a torch.nn.Module, not {type(model).__name__}")
        if optimizer is not None and not isinstance(optimizer, Optimizer):
            raise InputError(f"expects a torch.optim.Optimizer, not {type(optimizer).__name__}")
        return _usage(rank, model, optimizer), {}

    if together:
        ranks = gather(agree("account", check))
    else:
        try:
            ranks = [check()[0]]
        except InputError as error:
            raise InputError(f"account(): {error}") from None
    number = sum(p.numel() for p in model.parameters())
    title = f"{type(model).__name__}: bytes per rank" + (f", {number:,} parameters" if number else "")
    return Account(ranks=tuple(ranks), title=title, rank=rank)


def _usage(rank: int, model: nn.Module, optimizer: Optimizer | None) -> Usage:
    counted: set[int] = set()
    sizes = {kind: _bytes(tensors, counted) for kind, tensors in states(model, optimizer).items()}
    device = next((p.device for p in model.parameters() if p.device.type == "cuda"), None)
    on_gpu: dict[str, int] = {}
    if device is not None:
        on_gpu = {
            "allocated": torch.cuda.memory_allocated(device),
            "reserved": torch.cuda.memory_reserved(device),
            "peak": torch.cuda.max_memory_allocated(device),
        }
    return Usage(rank=rank, host=_unshared(), **sizes, **on_gpu)


def _bytes(tensors: Sequence[torch.Tensor], counted: set[int]) -> int:
    """Bytes of the storages behind tensors, each once."""
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage._cdata not in counted:
            counted.add(storage._cdata)
            total += storage.nbytes()
    return total


def _unshared() -> int | None:
    """Unique set size: forked ranks share the pages of the libraries, which must not be counted for each."""
    try:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    except OSError:
        return None
    private = [int(line.split()[1]) for line in lines if line.startswith(("Private_Clean:", "Private_Dirty:"))]
    return 1024 * sum(private)
