"""Accumulation without needless communication, clipping by the whole norm, scaling that all ranks agree on."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from torch import nn

import nbdist
from nbdist.train.gradients import accumulate, autocast, clip_gradients, grad_scaler, mean_over_ranks
from nbdist.train.replicas import replicas_equal

pytestmark = pytest.mark.shared


def _collectives(version: int) -> tuple[int, int]:
    """Reducing collectives of a micro-batch that is not the last, and of one that is."""
    from torch.distributed.tensor.debug import CommDebugMode

    model = nbdist.fsdp(models.Net(), version=version)
    counts = []
    for last in (False, True):
        x = models.data()[0].requires_grad_()
        with warnings.catch_warnings(), CommDebugMode() as comm, accumulate(model, last=last):
            # The counting mode's own hooks return views.
            warnings.filterwarnings("ignore", message=".*returned a view tensor")
            model(x).sum().backward()
        counts.append(sum(n for op, n in comm.get_comm_counts().items() if "reduce" in str(op)))
    return counts[0], counts[1]


@pytest.mark.parametrize("version", [2, 1])
def test_only_the_last_micro_batch_communicates(ranks: Callable[..., list[Any]], version: int) -> None:
    for waiting, last in ranks(2, _collectives, version):
        assert waiting == 0
        assert last > 0


def _ddp_collectives() -> tuple[bool, bool]:
    model = nbdist.ddp(models.Net())
    x, _ = models.data()
    x = x[dist.get_rank() :: dist.get_world_size()]
    with accumulate(model, last=False):
        model(x).sum().backward()
    apart = not replicas_equal(_gradients(model))
    with accumulate(model, last=True):
        model(x).sum().backward()
    return apart, bool(replicas_equal(_gradients(model)))


def _gradients(model: nn.Module) -> nn.Module:
    holder = nn.Module()
    for i, p in enumerate(model.parameters()):
        holder.register_parameter(f"g{i}", nn.Parameter(p.grad.clone()))
    return holder


def test_ddp_gradients_meet_in_the_last_micro_batch(ranks: Callable[..., list[Any]]) -> None:
    assert ranks(2, _ddp_collectives) == [(True, True)] * 2


def _interrupted(kind: str) -> bool:
    model = nbdist.fsdp(models.Net())
    try:
        with accumulate(model, last=False):
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    model(models.data()[0]).sum().backward()
    return all(p.grad is not None for p in model.parameters())


def test_an_interrupted_accumulation_leaves_the_model_usable(ranks: Callable[..., list[Any]]) -> None:
    assert ranks(2, _interrupted, "full") == [True] * 2


def _norm(kind: str) -> tuple[float, float]:
    net = models.Net()
    model = nbdist.ddp(net) if kind == "ddp" else nbdist.fsdp(net, version=int(kind))
    model(models.data()[0]).pow(2).sum().backward()
    norm = float(clip_gradients(model, 0.5))
    return norm, float(clip_gradients(model, 1e9))


@pytest.mark.parametrize("kind", ["ddp", "1", "2"])
def test_clipping_by_the_norm_of_the_whole_model(ranks: Callable[..., list[Any]], kind: str) -> None:
    net = models.Net()
    net(models.data()[0]).pow(2).sum().backward()
    whole = float(nn.utils.clip_grad_norm_(net.parameters(), 1e9))
    for norm, after in ranks(3, _norm, kind):
        assert norm == pytest.approx(whole, rel=1e-4)
        assert after == pytest.approx(0.5, rel=1e-4)


def _overflow(kind: str) -> tuple[float, bool]:
    net = models.Net()
    model = nbdist.ddp(net) if kind == "ddp" else nbdist.fsdp(net, version=int(kind))
    optimizer = models.sgd(model.parameters())
    scaler = grad_scaler(model, enabled=True, init_scale=1024.0)
    before = models.full_parameters(model)
    loss = model(models.data()[0]).sum()
    scaler.scale(loss * (float("inf") if dist.get_rank() == 1 else 1.0)).backward()
    scaler.step(optimizer)
    scaler.update()
    after = models.full_parameters(model)
    return scaler.get_scale(), all(torch.equal(before[n], p) for n, p in after.items())


@pytest.mark.parametrize("kind", ["ddp", "1", "2"])
def test_an_overflow_on_one_rank_skips_the_step_on_all(ranks: Callable[..., list[Any]], kind: str) -> None:
    assert ranks(2, _overflow, kind) == [(512.0, True)] * 2


def _scalers() -> list[bool]:
    model = nbdist.ddp(models.Net())
    return [grad_scaler(model).is_enabled(), grad_scaler(model, "bf16").is_enabled()]


def test_no_scaler_where_none_is_needed(ranks: Callable[..., list[Any]]) -> None:
    assert ranks(2, _scalers) == [[False, False]] * 2


def test_autocast() -> None:
    with autocast():
        assert models.Net()(models.data()[0]).dtype is torch.bfloat16
    with autocast(enabled=False):
        assert models.Net()(models.data()[0]).dtype is torch.float32
    for wrong, says in (("fp16", "float16 needs an accelerator"), ("fp8", "expects 'bf16', 'fp16'")):
        with pytest.raises(nbdist.errors.InputError, match=says):
            autocast(wrong)


def test_arguments() -> None:
    net = models.Net()
    with pytest.raises(
        nbdist.errors.InputError, match=r"accumulate\(\) expects what ddp\(\) or fsdp\(\) returned, not Net"
    ):
        with accumulate(net, last=True):
            pass
    with pytest.raises(nbdist.errors.InputError, match="max_norm expects a positive number, not 0"):
        clip_gradients(net, 0)


def _mean() -> tuple[float, float]:
    rank = dist.get_rank()
    weight = nn.Parameter(torch.ones(()))
    values = torch.arange(1.0, rank + 2)  # rank 0: 1; rank 1: 1, 2; ...
    loss = mean_over_ranks((weight * values).sum(), len(values))
    loss.backward()
    gradient = weight.grad.clone()
    dist.all_reduce(gradient)
    return loss.item(), gradient.item() / dist.get_world_size()


def test_mean_over_uneven_ranks(ranks: Callable[..., list[Any]]) -> None:
    for value, gradient in ranks(3, _mean):
        assert value == pytest.approx(10 / 6)
        assert gradient == pytest.approx(10 / 6)


def _replicas(kind: str) -> tuple[bool, str, Any]:
    torch.manual_seed(0)
    rank = dist.get_rank()
    model: nn.Module = models.Net()
    match kind:
        case "ddp" | "bypassed" | "nan":
            model = nbdist.ddp(model)
            inner = model.module if kind == "bypassed" else model
            x = models.data()[0][rank :: dist.get_world_size()]
            inner(x).pow(2).mean().backward()
            models.sgd(model.parameters()).step()
            if kind == "nan":
                model.module.last.bias.data.fill_(float("nan"))
        case "one weight":
            if rank == 2:
                model.blocks[0].up.weight.data[0, 0] += 0.5
        case "buffer":
            model.register_buffer("mean", torch.full((1,), float(rank)))
        case "full/2" | "full/1" | "none/1":
            name, _, version = kind.partition("/")
            model = nbdist.fsdp(model, name, version=int(version))
        case "hybrid" | "hybrid apart":
            model = nbdist.fsdp(model, "hybrid", shard_size=2)
            if kind == "hybrid apart" and rank == 3:
                model.last.weight.to_local().data.fill_(3.0)
    found = replicas_equal(model, buffers=kind == "buffer")
    return bool(found), str(found), [(d.name, d.ranks, d.largest) for d in found.differences]


def test_equal_replicas(ranks: Callable[..., list[Any]]) -> None:
    for kind in ("ddp", "nan", "none/1"):
        assert {t[:2] for t in ranks(2, _replicas, kind)} == {(True, "equal on all ranks: 16 compared")}


def test_which_parameters_differ_where_and_by_how_much(ranks: Callable[..., list[Any]]) -> None:
    for same, text, differences in ranks(3, _replicas, "one weight"):
        assert not same
        assert text == "1 of 16 differ from rank 0: `blocks.0.up.weight` on rank 2 by up to 0.5"
        assert differences == [("blocks.0.up.weight", (2,), 0.5)]
    for same, text, differences in ranks(2, _replicas, "bypassed"):
        assert not same
        assert len(differences) == 16
        assert text.endswith("and 11 more")
    for same, text, _ in ranks(2, _replicas, "buffer"):
        assert (same, text) == (False, "1 of 17 differ from rank 0: `mean` on rank 1 by up to 1")


def test_shards_are_no_replicas(ranks: Callable[..., list[Any]]) -> None:
    for kind in ("full/2", "full/1"):
        for same, text, _ in ranks(2, _replicas, kind):
            assert same
            assert text == "equal on all ranks: 0 compared (16 are sharded: each rank holds its own part)"
    for same, text, _ in ranks(4, _replicas, "hybrid"):
        assert (same, text) == (True, "equal on all ranks: 16 compared")
    for same, _, differences in ranks(4, _replicas, "hybrid apart"):
        assert (same, differences) == (False, [("last.weight", (3,), None)])
