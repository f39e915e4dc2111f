"""What a forecast comes to: one rank's memory by kind, as numbers, a table and a figure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from nbdist.train.charts import course
from nbdist.train.closed_form import ClosedForm
from nbdist.train.tables import gib, html_table, text_table
from nbdist.train.tracker import KINDS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["LEFT_OUT", "STATES", "Estimate", "without_host_states"]

LEFT_OUT = (
    "left out: CUDA context, NCCL's buffers, workspaces inside operations, the allocator's rounding and fragments"
)
STATES = ("parameters", "gradients", "optimizer_state")


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Forecast of one rank's memory in bytes; rank 0's, whose share is the largest.

    Attributes
    ----------
    strategy, world_size, num_parameters
        What was asked, and the number of parameters of the whole model.
    states
        Bytes of parameters, gradients and optimizer state at the end of backward.
    peak_bytes, peak_during
        The largest sum of living tensors in a step, and in which part of it.
    at_peak
        That sum by kind.
    host_bytes
        Bytes kept in host memory by CPU offload.
    form
        The closed form for the same model, for orientation.
    curve, step_at
        Living bytes by kind over one step, ``(points,)`` each, and the point at which the optimizer's step begins.
    """

    strategy: str
    world_size: int
    num_parameters: int
    settings: str
    states: Mapping[str, int]
    peak_bytes: int
    peak_during: str
    at_peak: Mapping[str, int]
    form: ClosedForm
    host_bytes: int = 0
    curve: Mapping[str, npt.NDArray[np.float64]] = field(default_factory=dict, repr=False)
    step_at: int = 0

    @property
    def states_bytes(self) -> int:
        """Parameters, gradients and optimizer state together."""
        return sum(self.states.values())

    def rows(self) -> list[tuple[str, str, str]]:
        """Kind, bytes at the end of backward, bytes at the peak; as shown."""
        rows = []
        for kind in KINDS:
            if self.at_peak.get(kind) or self.states.get(kind):
                rested = gib(self.states[kind]) if kind in self.states else ""
                rows.append((kind.replace("_", " "), rested, gib(self.at_peak.get(kind, 0))))
        rows.append((f"peak, during {self.peak_during}", gib(self.states_bytes), gib(self.peak_bytes)))
        if self.host_bytes:
            rows.append(("in host memory", gib(self.host_bytes), ""))
        return rows

    def figure(self) -> Figure:
        """Living bytes by kind in the course of one step."""
        return course(self.curve, self._title(), f"{gib(self.peak_bytes)}, during {self.peak_during}")

    def _title(self) -> str:
        count = f"{self.num_parameters / 1e9:.3g} billion" if self.num_parameters >= 1e8 else f"{self.num_parameters:,}"
        return f"{self.strategy} on {self.world_size} ranks, {count} parameters{self.settings}: bytes per rank"

    def __str__(self) -> str:
        table = text_table(("", "states", "at the peak"), self.rows())
        return "\n".join([self._title(), table, f"closed form: {self.form}", LEFT_OUT])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        notes = (f"closed form: {self.form}", LEFT_OUT)
        return html_table(self._title(), ("", "states", "at the peak"), self.rows(), notes)


def without_host_states(estimate: Estimate) -> Estimate:
    """The same with CPU offload: parameters, gradients and optimizer state at rest are in host memory.

    The step is the host's too; what is gathered, computed and on its way to be reduced stays on the GPU.
    """
    curve = {kind: np.zeros_like(c) if kind in (*STATES, "temporaries") else c for kind, c in estimate.curve.items()}
    total = np.asarray(sum(curve.values()))
    peak = int(np.argmax(total[: estimate.step_at]))
    return replace(
        estimate,
        settings=estimate.settings.replace(", CPU offload", "") + ", CPU offload",
        states=dict.fromkeys(STATES, 0),
        host_bytes=estimate.states_bytes,
        peak_bytes=round(float(total[peak])),
        peak_during="forward and backward",
        at_peak={kind: round(float(c[peak])) for kind, c in curve.items()},
        curve=curve,
    )
