"""``estimate()``: what one rank's memory will be on any number of GPUs, found by running the step on fake tensors.

The real model, the real wrapper and the real optimizer run two steps on tensors that have shapes and no values, as rank
0 of a pretended group. So everything that depends on the model's code is counted as it is: what autograd keeps, what
FSDP gathers at a time, what checkpointing saves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, ShardingStrategy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from nbdist.errors import InputError
from nbdist.train.blocks import Blocks, checkpoint_activations, find_blocks, shared_across
from nbdist.train.closed_form import closed_form
from nbdist.train.estimates import STATES, Estimate, without_host_states
from nbdist.train.fake_world import FakeReducer, fake_tensors, fake_world, reduced_at_once
from nbdist.train.parallel import Plan, Precision, make_mesh, precision_of, shard_size_of, strategy_name, wrap_2
from nbdist.train.tracker import Timeline, Tracker

__all__ = ["estimate", "forecast"]

_POINTS = 600  # of the curve that is kept
_SMALL = 50_000_000  # parameters up to which every number of ranks is run by itself
_DEFAULTS: dict[str, Any] = {
    "dtype": None,
    "mixed_precision": None,
    "optimizer": "AdamW",
    "activation_checkpointing": False,
    "cpu_offload": False,
    "blocks": None,
    "shard_size": None,
    "loss": None,
    "device": "cuda",
}

OptimizerMaker = str | type[Optimizer] | Callable[[Iterable[nn.Parameter]], Optimizer]
Loss = Callable[[nn.Module, Any], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Settings:
    """One forecast's arguments, found good."""

    model_fn: Callable[[], nn.Module]
    batch: Any
    strategy: str
    dtype: torch.dtype | None
    precision: torch.dtype | MixedPrecisionPolicy | None
    optimizer: OptimizerMaker
    activation_checkpointing: bool
    cpu_offload: bool
    blocks: Blocks | None
    shard_size: int | None
    loss: Loss
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """What one run on fake tensors has shown."""

    timeline: Timeline
    num_parameters: int
    largest_unit: int
    param_dtype: torch.dtype
    optimizer: Optimizer


def estimate(
    model_fn: Callable[[], nn.Module],
    batch: Any,
    strategy: str | ShardingStrategy = "full",
    world_size: int = 8,
    *,
    dtype: torch.dtype | None = None,
    mixed_precision: Precision = None,
    optimizer: OptimizerMaker = "AdamW",
    activation_checkpointing: bool = False,
    cpu_offload: bool = False,
    blocks: Blocks | None = None,
    shard_size: int | None = None,
    loss: Loss | None = None,
    device: str = "cuda",
) -> Estimate:
    """Forecast one rank's memory on ``world_size`` GPUs, without having them and without allocating the model.

    Parameters
    ----------
    model_fn
        Builds the model; it is called with fake tensors.
    batch
        What one rank gets in one step: a tensor, ``(inputs, targets)`` or a dict of the model's arguments. Only shapes
        and types matter; tensors on the meta device do.
    strategy
        ``"ddp"``, or a strategy of :func:`nbdist.fsdp`.
    world_size
        Number of ranks.
    dtype
        Convert the model to it first; default: as it is built.
    mixed_precision
        As in :func:`nbdist.fsdp`; for DDP, autocast.
    optimizer
        Name or class from ``torch.optim``, or a function of the parameters.
    activation_checkpointing, cpu_offload, blocks, shard_size
        As in :func:`nbdist.fsdp`.
    loss
        ``loss(model, batch)``; default: the output's ``loss``, or cross entropy (integer targets) or squared error
        against the second part of the batch, or the output's mean.
    device
        ``"cuda"`` or ``"cpu"``: which device's defaults the optimizer takes.

    Returns
    -------
    Estimate

    Raises
    ------
    InputError
        For an unknown strategy, a block class that does not occur, ...
    """
    return forecast(
        model_fn,
        batch,
        strategy,
        [world_size],
        dtype=dtype,
        mixed_precision=mixed_precision,
        optimizer=optimizer,
        activation_checkpointing=activation_checkpointing,
        cpu_offload=cpu_offload,
        blocks=blocks,
        shard_size=shard_size,
        loss=loss,
        device=device,
    )[0]


def forecast(
    model_fn: Callable[[], nn.Module],
    batch: Any,
    strategy: str | ShardingStrategy,
    world_sizes: Sequence[int],
    **options: Any,
) -> list[Estimate]:
    """Make one estimate for each number of ranks, with two runs where the curve between them is known.

    A sharded tensor's bytes are ``a + b / ranks``. From the smallest and the largest number of ranks both follow, for
    each change in the course of a step, and with them every number between.

    Parameters
    ----------
    model_fn, batch, strategy
        As in :func:`estimate`.
    world_sizes
        Numbers of ranks.
    **options
        The others of :func:`estimate`.

    Returns
    -------
    list of Estimate
        In the order of ``world_sizes``.
    """
    sizes = list(world_sizes)
    settings = _checked(
        model_fn=model_fn, batch=batch, strategy=strategy, world_sizes=sizes, **{**_DEFAULTS, **options}
    )
    low, high = min(sizes), max(sizes)
    first = _run(settings, low)
    runs = {low: first}
    if settings.strategy in ("ddp", "none"):
        runs |= dict.fromkeys(sizes, first)
    elif first.num_parameters <= _SMALL or len(set(sizes)) <= 2 or settings.strategy == "hybrid":
        runs |= {n: _run(settings, n) for n in set(sizes) if n != low}
    else:
        runs[high] = _run(settings, high)
        missing = set(sizes) - {low, high}
        one, other = runs[low].timeline, runs[high].timeline
        if len(one.keys) == len(other.keys) and bool((one.keys == other.keys).all()):
            part = (one.changes - other.changes) / (1 / low - 1 / high)
            for n in missing:
                line = Timeline(
                    keys=one.keys,
                    changes=one.changes + part * (1 / n - 1 / low),
                    kinds=one.kinds,
                    marks=one.marks,
                )
                runs[n] = _Run(
                    timeline=line,
                    num_parameters=first.num_parameters,
                    largest_unit=first.largest_unit,
                    param_dtype=first.param_dtype,
                    optimizer=first.optimizer,
                )
        else:
            runs |= {n: _run(settings, n) for n in missing}
    return [_summed(settings, n, runs[n]) for n in sizes]


def _checked(*, strategy: Any, world_sizes: Sequence[Any], **given: Any) -> _Settings:
    """The arguments of `estimate`, refused where they make no sense."""
    bad = [n for n in world_sizes if isinstance(n, bool) or not isinstance(n, int) or n < 1]
    if bad or not world_sizes:
        raise InputError(
            f"estimate(): world_size expects a positive number of ranks, not {bad[0] if bad else 'none'!r}"
        )
    unknown = sorted(set(given) - set(_DEFAULTS) - {"model_fn", "batch"})
    if unknown:
        raise InputError(f"estimate(): {unknown[0]} is no argument of it")
    if not callable(given["model_fn"]) or isinstance(given["model_fn"], nn.Module):
        raise InputError("estimate(): model_fn expects a function that builds the model, e.g. lambda: Net()")
    name = "ddp" if isinstance(strategy, str) and strategy.lower() == "ddp" else strategy_name(strategy)
    if given["device"] not in ("cuda", "cpu"):
        raise InputError(f"estimate(): device expects 'cuda' or 'cpu', not {given['device']!r}")
    target = torch.device(given["device"])
    asked = given.pop("mixed_precision")
    precision = torch.bfloat16 if asked is True else precision_of(asked, target)
    replicated = name in ("ddp", "none")
    if replicated and isinstance(precision, MixedPrecisionPolicy):
        raise InputError("estimate(): with DDP mixed_precision is autocast: say 'bf16' or 'fp16'")
    if given["cpu_offload"] and (replicated or target.type == "cpu"):
        why = "a sharding strategy" if replicated else "an accelerator"
        raise InputError(f"estimate(): cpu_offload needs {why}")
    if given["shard_size"] is not None and name != "hybrid":
        raise InputError(f"estimate(): shard_size belongs to strategy 'hybrid', not to {name!r}")
    if name == "hybrid" and given["shard_size"] is None:
        raise InputError("estimate(): strategy 'hybrid' needs shard_size=, the GPUs of one machine")
    if isinstance(given["optimizer"], str) and not hasattr(torch.optim, given["optimizer"]):
        raise InputError(
            f"estimate(): optimizer expects a class of torch.optim or a function, not {given['optimizer']!r}"
        )
    given["loss"] = given["loss"] or _default_loss
    return _Settings(strategy=name, precision=precision, **given)


# ---- one run


def _run(settings: _Settings, world_size: int) -> _Run:
    with fake_world(world_size):
        return _run_inside(settings, world_size)


def _run_inside(settings: _Settings, world_size: int) -> _Run:
    cpu = torch.device("cpu")
    size = shard_size_of(settings.strategy.replace("ddp", "none"), settings.shard_size)
    plan = Plan(device=cpu, units=[], reason="", strategy=settings.strategy, shard_size=size)
    mesh = make_mesh(plan)  # it computes with real numbers
    with fake_tensors():
        model = settings.model_fn()
        if not isinstance(model, nn.Module):
            raise InputError(f"estimate(): model_fn expects to return a torch.nn.Module, not {type(model).__name__}")
        if settings.dtype is not None:
            model.to(settings.dtype)
        units, _ = find_blocks(model, settings.blocks)
        num_parameters = sum(p.numel() for p in model.parameters())
        param_dtype = next((p.dtype for p in model.parameters()), torch.float32)
        largest = _largest_unit(model, units)
        if settings.activation_checkpointing and not units:
            raise InputError("estimate(): activation_checkpointing: no block class repeats; name it with blocks=")
        with Tracker() as tracker:
            if settings.activation_checkpointing:
                checkpoint_activations(units)
            wrapped = _wrapped(model, settings, plan, units, mesh)
            tracker.watch_gradients(wrapped)
            step = _made(settings, wrapped)
            batch = _fake(settings.batch, settings.dtype)
            _make_state(wrapped, step)
            _step(wrapped, step, batch, settings, tracker)
            timeline = tracker.timeline()
    return _Run(
        timeline=timeline,
        num_parameters=num_parameters,
        largest_unit=largest,
        param_dtype=param_dtype,
        optimizer=step,
    )


def _largest_unit(model: nn.Module, units: Sequence[tuple[str, nn.Module]]) -> int:
    sizes = [sum(p.numel() for p in module.parameters()) for _, module in units]
    rest = sum(p.numel() for p in model.parameters()) - sum(sizes)
    return max([*sizes, rest])


def _wrapped(
    model: nn.Module, settings: _Settings, plan: Plan, units: list[tuple[str, nn.Module]], mesh: Any
) -> nn.Module:
    if settings.strategy in ("ddp", "none"):
        replicated = DistributedDataParallel(model, gradient_as_bucket_view=True)
        replicated.register_comm_hook(None, reduced_at_once)
        replicated.reducer = FakeReducer(replicated.reducer)  # type: ignore[assignment]
        return replicated
    shared = shared_across(model, units)
    if shared:
        raise InputError(f"estimate(): `{shared[0]}` and `{shared[1]}` are one parameter in two blocks")
    complete = Plan(
        device=plan.device,
        units=units,
        reason="",
        strategy=settings.strategy,
        precision=settings.precision,
        shard_size=plan.shard_size,
    )
    return wrap_2(model, complete, mesh, start_equal=False)


def _made(settings: _Settings, model: nn.Module) -> Optimizer:
    maker: Any = settings.optimizer
    parameters = list(model.parameters())
    if not isinstance(maker, str):
        made = maker(parameters)
        if not isinstance(made, Optimizer):
            raise InputError(
                f"estimate(): optimizer expects to return a torch.optim.Optimizer, not {type(made).__name__}"
            )
        return made
    made = getattr(torch.optim, maker)(parameters)
    # On a GPU torch works on all plain parameters at once, with temporaries as large as they are.
    if settings.device == "cuda" and not any(isinstance(p, DTensor) for p in parameters):
        for group in made.param_groups:
            if "foreach" in group:
                group["foreach"] = True
    return made  # type: ignore[no-any-return]


def _make_state(model: nn.Module, optimizer: Optimizer) -> None:
    """Let the optimizer make its state, so that the step that follows is as all later ones."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def _fake(batch: Any, dtype: torch.dtype | None) -> Any:
    def empty(tensor: torch.Tensor) -> torch.Tensor:
        kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        return torch.empty(tensor.shape, dtype=kind, device="cpu")

    return tree_map_only(torch.Tensor, empty, batch)


def _step(model: nn.Module, optimizer: Optimizer, batch: Any, settings: _Settings, tracker: Tracker) -> None:
    ddp = settings.strategy in ("ddp", "none")
    cast = isinstance(settings.precision, torch.dtype) and ddp
    dtype = settings.precision if isinstance(settings.precision, torch.dtype) else None
    tracker.mark("forward")
    with torch.autocast("cpu", dtype=dtype) if cast else nullcontext():
        value = settings.loss(model, batch)
    tracker.mark("backward")
    value.backward()  # type: ignore[no-untyped-call]
    del value
    tracker.own(model, optimizer)
    tracker.mark("step")
    optimizer.step()
    tracker.own(model, optimizer)
    optimizer.zero_grad()


def _default_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    if isinstance(batch, Mapping):
        output = model(**batch)
        targets: list[Any] = []
    elif isinstance(batch, tuple | list):
        output, targets = model(batch[0]), list(batch[1:])
    else:
        output, targets = model(batch), []
    if hasattr(output, "loss") and isinstance(output.loss, torch.Tensor):
        return output.loss
    output = output[0] if isinstance(output, tuple | list) else getattr(output, "logits", output)
    if not targets:
        return output.float().mean()  # type: ignore[no-any-return]
    target = targets[0]
    if target.is_floating_point():
        return nn.functional.mse_loss(output, target.to(output.dtype))
    if output.shape[:-1] == target.shape:
        return nn.functional.cross_entropy(output.flatten(0, -2), target.flatten())
    return nn.functional.cross_entropy(output, target)


# ---- what it comes to


def _summed(settings: _Settings, world_size: int, run: _Run) -> Estimate:
    timeline = run.timeline
    curves = timeline.by_kind()
    start, backward, step = (timeline.after(mark) for mark in ("forward", "backward", "step"))
    states = {kind: round(float(curves[kind][max(step - 1, 0)])) for kind in STATES}
    total = np.asarray(sum(curves.values()))
    peak = start + int(np.argmax(total[start:]))
    points = _points(curves, start, step)
    form = closed_form(
        run.num_parameters,
        dtype=run.param_dtype,
        optimizer=type(run.optimizer).__name__,
        momentum=float(run.optimizer.defaults.get("momentum") or 0.0),
        strategy=settings.strategy,
        world_size=world_size,
        largest_unit_params=run.largest_unit,
        cpu_offload=settings.cpu_offload,
        shard_size=settings.shard_size,
        mixed_precision=_compute_dtype(settings.precision),
    )
    found = Estimate(
        strategy=settings.strategy,
        world_size=world_size,
        num_parameters=run.num_parameters,
        settings=_words(settings),
        states=states,
        peak_bytes=round(float(total[peak])),
        peak_during="forward" if peak < backward else "backward" if peak < step else "the optimizer's step",
        at_peak={kind: round(float(curve[peak])) for kind, curve in curves.items()},
        form=form,
        curve={kind: curve[points] for kind, curve in curves.items()},
        step_at=int(np.searchsorted(points, step)),
    )
    return without_host_states(found) if settings.cpu_offload else found


def _points(curves: Mapping[str, npt.NDArray[np.float64]], start: int, step: int) -> npt.NDArray[np.int64]:
    """Events that the curve shows: of each stretch the fullest moment, with the states and without them."""
    total = np.asarray(sum(curves.values()))
    passing = curves["activations"] + curves["communication"]
    edges = np.unique(np.append(np.linspace(start, len(total), _POINTS + 1).astype(int), step))
    pairs = [(a, b) for a, b in pairwise(edges) if b > a]
    found = {a + int(np.argmax(curve[a:b])) for a, b in pairs for curve in (total, passing)}
    return np.array(sorted(found), dtype=np.int64)


def _compute_dtype(precision: torch.dtype | MixedPrecisionPolicy | None) -> torch.dtype | None:
    return precision.param_dtype if isinstance(precision, MixedPrecisionPolicy) else precision


def _words(settings: _Settings) -> str:
    half = _compute_dtype(settings.precision)
    words = [
        str(settings.dtype).removeprefix("torch.") if settings.dtype else "",
        f"computing in {str(half).removeprefix('torch.')}" if half else "",
        "activations checkpointed" if settings.activation_checkpointing else "",
        "CPU offload" if settings.cpu_offload else "",
    ]
    return "".join(f", {w}" for w in words if w)
