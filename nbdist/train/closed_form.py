"""Model states in closed form: bytes per rank from the number of parameters alone, for orientation.

After Rajbhandari, Rasley, Ruwase, He: "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020
(arXiv 1910.02054), section 3.1 and figure 1, with the types torch really keeps: gradients and the optimizer's state
have the parameters' own type, and mixed precision keeps one copy of the parameters, not two.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nbdist.errors import InputError
from nbdist.train.parallel import strategy_name
from nbdist.train.tables import gib

__all__ = ["STATES_PER_PARAMETER", "ClosedForm", "closed_form"]

STATES_PER_PARAMETER = {
    "Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "Adamax": 2, "Adagrad": 1, "RMSprop": 1, "Rprop": 2, "Adadelta": 2,
    "ASGD": 1, "SGD": 0, "Adafactor": 0, "Muon": 1,
}  # fmt: skip
"""Tensors of a parameter's size that each optimizer of ``torch.optim`` keeps (one more for SGD with momentum)."""

_UNITS_AT_A_TIME = 2  # FSDP computes with one unit and gathers the next


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedForm:
    """Bytes of one rank.

    Attributes
    ----------
    parameters, gradients, optimizer_state
        On the device.
    communication
        DDP's buckets where they are not the gradients themselves; under FSDP, the units that are whole for a moment,
        and their gradients.
    host
        In host memory, with CPU offload.
    """

    parameters: int
    gradients: int
    optimizer_state: int
    communication: int
    host: int = 0

    @property
    def total(self) -> int:
        """On the device, without activations."""
        return self.parameters + self.gradients + self.optimizer_state + self.communication

    def __str__(self) -> str:
        parts = [
            f"{gib(self.parameters)} parameters",
            f"{gib(self.gradients)} gradients",
            f"{gib(self.optimizer_state)} optimizer state",
            f"{gib(self.communication)} communication",
        ]
        host = f", and {gib(self.host)} in host memory" if self.host else ""
        return f"{' + '.join(parts)} = {gib(self.total)}{host}, without activations"


def closed_form(
    num_parameters: int,
    *,
    strategy: str = "full",
    world_size: int = 8,
    dtype: torch.dtype = torch.float32,
    optimizer: str = "AdamW",
    momentum: float = 0.0,
    largest_unit_params: int = 0,
    gradient_as_bucket_view: bool = True,
    cpu_offload: bool = False,
    shard_size: int | None = None,
    mixed_precision: torch.dtype | None = None,
) -> ClosedForm:
    """Compute parameters, gradients and optimizer state of one rank.

    Parameters
    ----------
    num_parameters
        Of the whole model.
    strategy
        ``"ddp"``, or a strategy of :func:`nbdist.fsdp` by any of its names.
    world_size
        Number of ranks.
    dtype
        Type of the parameters; torch's optimizers keep their state in it.
    optimizer, momentum
        Class in ``torch.optim``; whether SGD keeps a momentum.
    largest_unit_params
        Parameters of FSDP's largest unit.
    gradient_as_bucket_view
        DDP: whether its buckets are the gradients, as :func:`nbdist.ddp` has it, or a copy as large.
    cpu_offload, shard_size
        As in :func:`nbdist.fsdp`.
    mixed_precision
        Type of the parameters while they are whole.

    Returns
    -------
    ClosedForm
    """
    name = "none" if strategy.lower() == "ddp" else strategy_name(strategy)
    if optimizer not in STATES_PER_PARAMETER:
        kept = 2  # an optimizer of somebody else's: as Adam
    else:
        kept = STATES_PER_PARAMETER[optimizer] + (1 if momentum and optimizer == "SGD" else 0)
    if num_parameters < 0 or world_size < 1:
        raise InputError("closed_form(): num_parameters and world_size expect positive numbers")
    whole = num_parameters * dtype.itemsize
    computed = num_parameters * (mixed_precision or dtype).itemsize
    if name == "none":
        buckets = 0 if gradient_as_bucket_view else whole
        return ClosedForm(parameters=whole, gradients=whole, optimizer_state=kept * whole, communication=buckets)
    ranks = shard_size or world_size if name == "hybrid" else world_size
    shard = -(-whole // ranks)
    unit = largest_unit_params * (mixed_precision or dtype).itemsize
    if name == "grad_op":
        # Whole from forward to the end of backward; its own shard is kept beside it, if the type is another.
        parameters = computed + (shard if mixed_precision not in (None, dtype) else 0)
        transient = _UNITS_AT_A_TIME * unit
    else:
        parameters = shard
        transient = 2 * _UNITS_AT_A_TIME * unit if ranks > 1 else 0
    if cpu_offload:
        gathered = computed if name == "grad_op" else 0
        return ClosedForm(
            parameters=gathered, gradients=0, optimizer_state=0, communication=transient, host=(2 + kept) * shard
        )
    return ClosedForm(parameters=parameters, gradients=shard, optimizer_state=kept * shard, communication=transient)
