"""``recommend()``: which strategy a model needs on so many GPUs, with the numbers that decide."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from nbdist.errors import InputError
from nbdist.train.charts import lines
from nbdist.train.estimates import LEFT_OUT, Estimate, without_host_states
from nbdist.train.forecast import forecast
from nbdist.train.tables import gib, html_table, text_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Advice", "Candidate", "recommend"]

_DEFAULT_BYTES = 80 * 2**30
_MARGIN = 0.1  # for what an estimate leaves out
_CURVE = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One way to train, and its memory by number of GPUs.

    Attributes
    ----------
    name
        In words.
    code
        The call that sets it up.
    why
        What it costs against the one before it.
    estimates
        By number of GPUs.
    """

    name: str
    code: str
    why: str
    estimates: Mapping[int, Estimate]

    def fits_from(self, usable_bytes: float) -> int | None:
        """Smallest number of GPUs looked at from which on it fits; None if it never does."""
        fitting = [n for n in sorted(self.estimates) if self.estimates[n].peak_bytes <= usable_bytes]
        return fitting[0] if fitting else None

    def batch_factor(self, gpus: int, usable_bytes: float) -> float:
        """How many times the batch would fit, as activations grow with it and nothing else does."""
        estimate = self.estimates[gpus]
        grows = estimate.at_peak["activations"]
        return (usable_bytes - estimate.peak_bytes + grows) / grows if grows else float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """The candidates, from the simplest to the most frugal, and the first of them that fits.

    Attributes
    ----------
    gpus, memory_bytes, usable_bytes
        What there is, and the part of each GPU's memory that the tensors may take.
    chosen
        None if nothing fits.
    """

    gpus: int
    memory_bytes: int
    usable_bytes: float
    batch_size: int | None
    candidates: tuple[Candidate, ...]
    chosen: Candidate | None

    def with_memory(self, memory_bytes: int) -> Advice:
        """The advice for GPUs with another amount of memory, without forecasting again."""
        return _advice(self.candidates, self.gpus, memory_bytes, self.batch_size)

    def rows(self) -> list[tuple[str, ...]]:
        """One row per candidate, as shown."""
        rows: list[tuple[str, ...]] = []
        for c in self.candidates:
            estimate = c.estimates[self.gpus]
            fits = estimate.peak_bytes <= self.usable_bytes
            least = c.fits_from(self.usable_bytes)
            verdict = "fits" if fits else "too large"
            if not fits:
                verdict += f", fits from {least} GPUs on" if least and least > self.gpus else ""
            rows.append(
                (
                    ("> " if c is self.chosen else "  ") + c.name,
                    gib(estimate.states_bytes),
                    gib(estimate.at_peak["activations"]),
                    gib(estimate.peak_bytes),
                    verdict,
                )
            )
        return rows

    @property
    def sentence(self) -> str:
        """The advice in words, with the numbers that decided."""
        limit = f"{gib(self.usable_bytes)} of each GPU's {gib(self.memory_bytes)}"
        if self.chosen is None:
            last = self.candidates[-1]
            need, rest = last.estimates[self.gpus].peak_bytes, last.estimates[self.gpus].at_peak["activations"]
            least = last.fits_from(self.usable_bytes)
            way = (
                f"; it fits from {least} GPUs on"
                if least
                else f", {gib(rest)} of it activations: make the batch smaller"
            )
            return f"nothing fits {limit} on {self.gpus}: {last.name} still needs {gib(need)}{way}"
        peak = self.chosen.estimates[self.gpus].peak_bytes
        before = self.candidates[: self.candidates.index(self.chosen)]
        text = f"{self.chosen.name}: {gib(peak)} per GPU at the peak, of {limit} ({self.chosen.why})"
        if before:
            text += f"; {before[-1].name} would need {gib(before[-1].estimates[self.gpus].peak_bytes)}"
        factor = self.chosen.batch_factor(self.gpus, self.usable_bytes)
        if self.batch_size and factor < float("inf"):
            text += f". A batch of up to about {max(int(factor * self.batch_size), 1)} per GPU would fit"
        return text

    def figure(self) -> Figure:
        """Memory per GPU over the number of GPUs, by strategy."""
        numbers = sorted(self.candidates[0].estimates)
        curves = {c.name: [c.estimates[n].peak_bytes for n in numbers] for c in self.candidates}
        title = "memory per GPU at the peak, by strategy"
        return lines(numbers, curves, self.usable_bytes, title, f"usable: {gib(self.usable_bytes)}")

    def _notes(self) -> list[str]:
        return [self.sentence, *([self.chosen.code] if self.chosen else []), LEFT_OUT]

    def __str__(self) -> str:
        header = ("", "states", "activations", "peak", f"on {self.gpus} GPUs")
        return "\n".join([text_table(header, self.rows()), *self._notes()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        header = ("", "states", "activations", "peak", f"on {self.gpus} GPUs")
        return html_table("bytes per GPU, from the simplest way to the most frugal", header, self.rows(), self._notes())


def recommend(
    model_fn: Callable[[], nn.Module],
    batch: Any,
    gpus: int,
    *,
    memory_bytes: int | None = None,
    gpu_counts: Sequence[int] = _CURVE,
    **options: Any,
) -> Advice:
    """Find the simplest way to train a model that fits so many GPUs.

    The ladder: DDP; DDP in bfloat16; gradients and optimizer state divided; parameters divided too; activations
    computed again instead of kept; the states in host memory. Each rung saves memory and costs time, so the first that
    fits is the advice.

    Parameters
    ----------
    model_fn, batch
        As in :func:`estimate`; the batch is one GPU's.
    gpus
        Number of GPUs there are.
    memory_bytes
        Of each GPU; default: this machine's GPU, else 80 GiB. A tenth of it is left for what an estimate leaves out.
    gpu_counts
        Numbers of GPUs for the figure.
    **options
        ``optimizer``, ``loss``, ``blocks`` and ``dtype`` of :func:`estimate`.

    Returns
    -------
    Advice

    Raises
    ------
    InputError
    """
    if isinstance(gpus, bool) or not isinstance(gpus, int) or gpus < 1:
        raise InputError(f"recommend(): gpus expects a positive number, not {gpus!r}")
    unknown = sorted(set(options) - {"optimizer", "loss", "blocks", "dtype"})
    if unknown:
        raise InputError(f"recommend(): {unknown[0]} is no argument of it; the ladder tries the strategies itself")
    if memory_bytes is None:
        found = torch.cuda.is_available()
        memory_bytes = torch.cuda.get_device_properties(0).total_memory if found else _DEFAULT_BYTES
    counts = sorted({gpus, *gpu_counts})
    candidates = tuple(_ladder(model_fn, batch, counts, options))
    return _advice(candidates, gpus, memory_bytes, _batch_size(batch))


def _advice(candidates: tuple[Candidate, ...], gpus: int, memory_bytes: int, batch_size: int | None) -> Advice:
    usable = (1 - _MARGIN) * memory_bytes
    return Advice(
        gpus=gpus,
        memory_bytes=memory_bytes,
        usable_bytes=usable,
        batch_size=batch_size,
        candidates=candidates,
        chosen=next((c for c in candidates if c.estimates[gpus].peak_bytes <= usable), None),
    )


def _ladder(
    model_fn: Callable[[], nn.Module], batch: Any, counts: Sequence[int], options: Mapping[str, Any]
) -> list[Candidate]:
    half: dict[str, Any] = {"mixed_precision": "bf16"}
    frugal: dict[str, Any] = {**half, "activation_checkpointing": True}
    rungs: list[tuple[str, str, str, dict[str, Any], str]] = [
        ("DDP", "ddp", "nbdist.ddp(model)", {}, "a replica on each GPU, the fastest and simplest"),
        ("DDP, bf16", "ddp", "nbdist.ddp(model), with nbdist.autocast('bf16')", half, "a replica, computing in half"),
        ("FSDP grad_op, bf16", "grad_op", "nbdist.fsdp(model, 'grad_op', mixed_precision='bf16')", half,
         "gradients and optimizer state divided"),
        ("FSDP full, bf16", "full", "nbdist.fsdp(model, 'full', mixed_precision='bf16')", half,
         "parameters divided too, gathered again in backward: half as much more communication"),
    ]  # fmt: skip
    found = []
    for name, strategy, code, more, why in rungs:
        found.append(
            Candidate(
                name=name, code=code, why=why, estimates=_curve(model_fn, batch, strategy, counts, {**options, **more})
            )
        )
    try:
        curve = _curve(model_fn, batch, "full", counts, {**options, **frugal})
    except InputError:  # no block repeats, so there is nothing to checkpoint by
        return found
    code = "nbdist.fsdp(model, 'full', mixed_precision='bf16', activation_checkpointing=True"
    found.append(
        Candidate(
            name="FSDP full, bf16, checkpointing",
            code=code + ")",
            why="activations computed again in backward: about a third more computing",
            estimates=curve,
        )
    )
    found.append(
        Candidate(
            name="FSDP full, bf16, checkpointing, CPU offload",
            code=code + ", cpu_offload=True)",
            why="states in host memory, over the bus in every step",
            estimates={n: without_host_states(e) for n, e in curve.items()},
        )
    )
    return found


def _curve(
    model_fn: Callable[[], nn.Module], batch: Any, strategy: str, counts: Sequence[int], options: Mapping[str, Any]
) -> dict[int, Estimate]:
    return dict(zip(counts, forecast(model_fn, batch, strategy, counts, **options), strict=True))


def _batch_size(batch: Any) -> int | None:
    from torch.utils._pytree import tree_leaves

    return next((int(t.shape[0]) for t in tree_leaves(batch) if isinstance(t, torch.Tensor) and t.dim()), None)
