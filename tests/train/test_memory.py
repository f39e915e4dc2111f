"""Forecasts against living tensors of real ranks, the closed form against plain cases, and what the accounts say."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import nbdist
from nbdist.train.closed_form import closed_form
from nbdist.train.estimates import LEFT_OUT
from nbdist.train.fake_world import fake_world
from nbdist.train.forecast import _default_loss, estimate, forecast
from nbdist.train.memory import account, recommend
from nbdist.train.tracker import Tracker

STATES, PEAK, PLAIN = 0.05, 0.15, 0.03
PLAIN_CASES = json.loads(Path(__file__).with_name("cases").joinpath("ME03_estimates_plain.json").read_text())["cases"]

pytestmark = pytest.mark.shared


@pytest.mark.case("ME03")
@pytest.mark.parametrize("case", PLAIN_CASES, ids=lambda c: c["name"])
def test_closed_form_of_plain_cases(case: dict[str, Any]) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    strategy, _, more = case["strategy"].partition(" + ")
    form = closed_form(
        case["params"],
        strategy=strategy,
        world_size=case["ranks"],
        dtype=getattr(torch, case["dtype"]),
        optimizer=case["optimizer"],
        momentum=case.get("momentum", 0),
        largest_unit_params=case.get("largest_unit_params", 0),
        gradient_as_bucket_view=False,
        cpu_offload=bool(more),
    )
    sharded = form.parameters + form.gradients + form.optimizer_state
    found = {
        "params": form.parameters,
        "grads": form.gradients,
        "optimizer": form.optimizer_state,
        "ddp_buckets": form.communication,
        "total": form.total,
        "sharded": sharded,
        "transient_max": form.communication,
        "gpu_static": sharded,
        "host": form.host,
    }
    for name, expected in case["expected"].items():
        if name == "total_between":
            assert expected[0] * (1 - PLAIN) <= form.total <= expected[1] * (1 + PLAIN)
        elif name == "total_at_least":
            assert form.total >= expected * (1 - PLAIN)
        else:
            assert found[name] == pytest.approx(expected, rel=PLAIN), name
    if case["name"] == "A":  # the buckets are the gradients
        assert closed_form(case["params"], strategy="ddp", optimizer="Adam").total == pytest.approx(24e9, rel=PLAIN)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024
    assert str(form).endswith("without activations")


def large() -> nn.Module:
    return nn.Sequential(*(m for _ in range(30) for m in (nn.Linear(7071, 7071, bias=False), nn.ReLU())))


@pytest.mark.case("ME03")
def test_a_billion_parameters_without_allocating_them() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = estimate(large, torch.zeros(2, 7071, device="meta"), "FULL_SHARD", 8, optimizer="Adam")
    assert found.states_bytes == pytest.approx(3e9, rel=PLAIN)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024
    assert LEFT_OUT in str(found)


SETTINGS = [
    ("ddp", 2, {}),
    ("ddp", 2, {"mixed_precision": "bf16"}),
    ("full", 2, {}),
    ("full", 3, {"activation_checkpointing": True}),
    ("grad_op", 2, {}),
    ("full", 2, {"mixed_precision": "bf16"}),
]


def net() -> nn.Module:
    return models.Net(width=96, blocks=4, seed=None)


def _real(strategy: str, options: dict[str, Any]) -> tuple[float, float]:
    """States and peak of the third step of a real rank."""
    from nbdist.train.gradients import autocast

    options = dict(options)
    cast = options.pop("mixed_precision", None) if strategy == "ddp" else None
    model, batch = net(), models.data(64)
    with Tracker() as tracker:
        wrapped = nbdist.ddp(model, **options) if strategy == "ddp" else nbdist.fsdp(model, strategy, **options)
        tracker.watch_gradients(wrapped)
        optimizer = models.adamw(wrapped.parameters())
        for _ in range(3):
            tracker.mark("forward")
            with autocast(cast, enabled=cast is not None):
                loss = _default_loss(wrapped, batch)
            loss.backward()
            del loss
            tracker.own(wrapped, optimizer)
            states = account(wrapped, optimizer).mine
            optimizer.step()
            tracker.own(wrapped, optimizer)
            optimizer.zero_grad()
    timeline = tracker.timeline()
    total = sum(timeline.by_kind().values())
    return float(states.states_bytes), float(total[timeline.after("forward") :].max())


@pytest.mark.parametrize(("strategy", "world_size", "options"), SETTINGS)
def test_forecast_against_real_ranks(
    ranks: Callable[..., list[Any]], strategy: str, world_size: int, options: dict[str, Any]
) -> None:
    told = ranks(world_size, _real, strategy, options)
    found = estimate(net, models.data(64), strategy, world_size, device="cpu", **options)
    assert found.states_bytes == pytest.approx(max(states for states, _ in told), rel=STATES)
    assert found.peak_bytes == pytest.approx(max(peak for _, peak in told), rel=PEAK)
    assert sum(found.at_peak.values()) == pytest.approx(found.peak_bytes, abs=8)


def test_curve_between_two_numbers_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    from nbdist.train import forecast as module

    batch = (torch.zeros(4, 5), torch.zeros(4, dtype=torch.int64))
    wide = lambda: models.Net(width=256, seed=None)
    exact = forecast(wide, batch, "full", [2, 4, 8])
    monkeypatch.setattr(module, "_SMALL", 0)
    drawn = forecast(wide, batch, "full", [2, 4, 8])
    for one, other in zip(exact, drawn, strict=True):
        assert one.peak_bytes == pytest.approx(other.peak_bytes, rel=0.02)
        assert one.states_bytes == pytest.approx(other.states_bytes, rel=0.02)
    assert drawn[0].states_bytes == pytest.approx(4 * drawn[2].states_bytes, rel=0.02)


def test_activations_are_not_divided_and_checkpointing_saves_them() -> None:
    batch = (torch.zeros(512, 5), torch.zeros(512, dtype=torch.int64))
    deep = lambda: models.Net(width=32, blocks=6, seed=None)
    few, many = forecast(deep, batch, "full", [2, 32])
    assert few.at_peak["activations"] == pytest.approx(many.at_peak["activations"], rel=0.05)
    saved = estimate(deep, batch, "full", 32, activation_checkpointing=True)
    assert saved.at_peak["activations"] < 0.5 * many.at_peak["activations"]
    offloaded = estimate(deep, batch, "full", 2, cpu_offload=True)
    assert offloaded.host_bytes == few.states_bytes
    assert offloaded.states_bytes == 0
    assert offloaded.peak_bytes < few.peak_bytes


def _inside() -> tuple[int, float, bool]:
    """A forecast in the middle of real training: the real groups are as they were."""
    model = nbdist.fsdp(net())
    optimizer = models.sgd(model.parameters())
    group = dist.new_group([0, 1])
    _default_loss(model, models.data(8)).backward()
    found = estimate(net, models.data(8), "full", 64)
    dist.all_reduce(torch.ones(1), group=group)
    optimizer.step()
    optimizer.zero_grad()
    _default_loss(model, models.data(8)).backward()
    fresh = dist.new_group([0, 1])
    total = torch.ones(1)
    dist.all_reduce(total, group=fresh)
    return dist.get_world_size(), float(total), found.world_size == 64


def test_real_groups_survive_a_pretended_one(ranks: Callable[..., list[Any]]) -> None:
    assert ranks(2, _inside) == [(2, 2.0, True)] * 2


def test_a_pretended_step_calls_no_hook_of_all_optimizers() -> None:
    stepped: list[object] = []
    hooks = [
        register(lambda *told: stepped.append(told))
        for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook)
    ]
    try:
        estimate(net, models.data(8), "ddp", 2)
        assert not stepped
        parameter = nn.Parameter(torch.ones(1))
        torch.optim.SGD([parameter]).step()
        assert len(stepped) == 2
    finally:
        for hook in hooks:
            hook.remove()


def test_no_group_is_left_behind() -> None:
    with fake_world(16):
        assert dist.get_world_size() == 16
    assert not dist.is_initialized()
    with pytest.raises(ZeroDivisionError):
        with fake_world(4):
            raise ZeroDivisionError
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"strategy": "zero"}, "strategy expects none, grad_op, full, hybrid"),
        ({"world_size": 0}, "world_size expects a positive number of ranks, not 0"),
        ({"model_fn": nn.Linear(2, 2)}, "model_fn expects a function that builds the model"),
        ({"model_fn": lambda: 3}, "model_fn expects to return a torch.nn.Module, not int"),
        ({"optimizer": "Adamm"}, "optimizer expects a class of torch.optim or a function, not 'Adamm'"),
        ({"blocks": "Layer"}, "blocks: Layer does not occur in the model"),
        ({"strategy": "ddp", "cpu_offload": True}, "cpu_offload needs a sharding strategy"),
        ({"strategy": "hybrid"}, "strategy 'hybrid' needs shard_size="),
        ({"shard_size": 2}, "shard_size belongs to strategy 'hybrid'"),
        ({"mixed_precision": "fp8"}, "mixed_precision expects 'bf16', 'fp16'"),
        ({"device": "tpu"}, "device expects 'cuda' or 'cpu', not 'tpu'"),
    ],
)
def test_refused(options: dict[str, Any], says: str) -> None:
    given = {"model_fn": net, "batch": models.data(4), "strategy": "full", "world_size": 8, **options}
    with pytest.raises(nbdist.errors.InputError, match=None) as error:
        estimate(**given)
    assert says in str(error.value)
    assert "\n" not in str(error.value)
    assert not dist.is_initialized()


def _account(kind: str) -> tuple[list[tuple[int, int, int]], str, str]:
    model = nbdist.ddp(models.Net()) if kind == "ddp" else nbdist.fsdp(models.Net(), version=int(kind))
    optimizer = models.adamw(model.parameters())
    _default_loss(model, models.data(8)).backward()
    optimizer.step()
    found = account(model, optimizer)
    return [(u.parameters, u.gradients, u.optimizer_state) for u in found.ranks], str(found), found._repr_html_()


@pytest.mark.parametrize("kind", ["ddp", "2", "1"])
def test_account(ranks: Callable[..., list[Any]], kind: str) -> None:
    whole = 4 * sum(p.numel() for p in models.Net().parameters())
    for used, text, html in ranks(2, _account, kind):
        assert len(used) == 2
        for parameters, gradients, state in used:
            share = whole if kind == "ddp" else whole / 2
            assert share <= parameters <= 1.25 * share  # shards are padded to whole rows
            assert gradients == pytest.approx(parameters, rel=0.05)
            assert state == pytest.approx(2 * parameters, rel=0.05)
        assert "rank 0" in text
        assert "rank 1" in text
        assert "<table>" in html
        if not torch.cuda.is_available():
            assert "no CUDA device, so this is host memory" in text
            assert "process, unshared" in text


def test_account_of_one_process() -> None:
    model = models.Net()
    found = account(model)
    assert found.mine.parameters == 4 * sum(p.numel() for p in model.parameters())
    assert found.mine.gradients == 0
    assert found.figure("alone", again=found)._repr_png_().startswith(b"\x89PNG")
    with pytest.raises(nbdist.errors.InputError, match=r"account\(\): expects a torch.optim.Optimizer, not str"):
        account(model, "AdamW")


def test_recommendation_goes_down_the_ladder() -> None:
    batch = (torch.zeros(256, 5), torch.zeros(256, dtype=torch.int64))
    deep = lambda: models.Net(width=64, blocks=4, seed=None)
    advice = recommend(deep, batch, 4, memory_bytes=2**30, gpu_counts=(2, 8))
    assert advice.chosen is advice.candidates[0]
    assert advice.chosen.name == "DDP"
    peaks = [c.estimates[4].peak_bytes for c in advice.candidates]
    # Between the rungs a limit, which makes the next one the advice.
    for i in (3, 4, 5):
        limit = int((peaks[i] + min(peaks[:i])) / 2 / 0.9)
        if peaks[i] < min(peaks[:i]):
            found = advice.with_memory(limit)
            assert found.chosen is not None
            assert found.chosen.name == advice.candidates[i].name
            assert found.candidates[i - 1].name in found.sentence
    nothing = advice.with_memory(2**12)
    assert nothing.chosen is None
    assert "make the batch smaller" in nothing.sentence
    assert "too large" in str(nothing)
    assert "> DDP" in str(advice)
    assert advice.chosen.code in advice._repr_html_()
    assert advice.figure()._repr_png_().startswith(b"\x89PNG")
    assert advice.chosen.estimates[4].figure()._repr_png_().startswith(b"\x89PNG")


def test_recommendation_refuses() -> None:
    with pytest.raises(nbdist.errors.InputError, match="gpus expects a positive number, not 0"):
        recommend(net, models.data(4), 0)
    with pytest.raises(nbdist.errors.InputError, match="strategy is no argument of it; the ladder tries"):
        recommend(net, models.data(4), 4, strategy="full")
