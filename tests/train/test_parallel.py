"""What ddp() and fsdp() wrap, say and refuse; every rank refuses with the same line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy, ShardingStrategy
from torch.nn.parallel import DistributedDataParallel

import nbdist
from nbdist.train.blocks import find_blocks, shared_across
from nbdist.train.parallel import strategy_name

pytestmark = pytest.mark.shared


def test_document_names_of_strategies() -> None:
    for name, short in {"FULL_SHARD": "full", "SHARD_GRAD_OP": "grad_op", "NO_SHARD": "none"}.items():
        assert strategy_name(name) == short
        assert strategy_name(ShardingStrategy[name]) == short
    with pytest.raises(nbdist.errors.InputError, match="not 1 \\(a number is not a ShardingStrategy\\)"):
        strategy_name(1)  # what the document writes


class Stage(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.parts = nn.Sequential(*(models.Block() for _ in range(count)))
        self.head = nn.Linear(models.WIDTH, models.WIDTH)


def _names(model: nn.Module, blocks: Any = None) -> list[str]:
    return [name for name, _ in find_blocks(model, blocks)[0]]


def test_the_repeated_block_is_found_and_the_reason_said() -> None:
    units, why = find_blocks(models.Net(blocks=3))
    assert [n for n, _ in units] == ["blocks.0", "blocks.1", "blocks.2"]
    assert why == "one unit per block: 3 × Block, found as what repeats, with 92% of the parameters"
    # Stages made of many blocks give way to the blocks.
    assert _names(nn.Sequential(Stage(3), Stage(3))) == [f"{s}.parts.{b}" for s in range(2) for b in range(3)]
    # Two kinds of block, as in an encoder and a decoder.
    layers = [nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(2)]
    both = nn.Sequential(*layers, *(models.Block(16) for _ in range(2)))
    assert _names(both) == ["0", "1", "2", "3"]
    # Plain layers where nothing else repeats; nothing at all.
    assert _names(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))) == ["0", "2"]
    assert find_blocks(nn.Linear(4, 4)) == (
        [],
        "no block class repeats in the model, so it is one unit (blocks= names one)",
    )


def test_blocks_given() -> None:
    net = models.Net()
    assert (
        _names(net, models.Block) == _names(net, "Block") == _names(net, list(net.blocks)) == ["blocks.0", "blocks.1"]
    )
    assert _names(net, [nn.LayerNorm, "Block"]) == ["blocks.0", "blocks.0.norm", "blocks.1", "blocks.1.norm"]
    for wrong in ("Layer", nn.Conv2d, models.Block()):
        with pytest.raises(nbdist.errors.InputError, match="does not occur in the model; repeated there: Block"):
            find_blocks(net, wrong)
    with pytest.raises(nbdist.errors.InputError, match="blocks expects module classes"):
        find_blocks(net, 3)


def test_a_parameter_of_two_blocks_is_noticed() -> None:
    net = models.Net()
    assert shared_across(net, find_blocks(net)[0]) is None
    net.blocks[1].up.weight = net.blocks[0].up.weight
    assert shared_across(net, find_blocks(net)[0]) == ("blocks.0.up.weight", "blocks.1.up.weight")


def _kinds() -> dict[str, Any]:
    two = nbdist.fsdp(models.Net(), "FULL_SHARD")
    one = nbdist.fsdp(models.Net(), ShardingStrategy.SHARD_GRAD_OP, version=1)
    replica = nbdist.fsdp(models.Net(), "NO_SHARD")
    names = [n for n, _ in nbdist.ddp(models.Net(), activation_checkpointing=True).module.named_parameters()]
    return {
        "blocks": [isinstance(b, FSDPModule) and isinstance(b, models.Block) for b in two.blocks],
        "root": isinstance(two, FSDPModule) and isinstance(two, models.Net),
        "one": sum(isinstance(m, FullyShardedDataParallel) for m in one.modules()),
        "replica": type(replica) is DistributedDataParallel,
        "local": sum(p.to_local().numel() for p in two.parameters()),
        "whole": sum(p.numel() for p in two.parameters()),
        "names": names == [n for n, _ in models.Net().named_parameters()],
    }


def test_plain_torch_objects_come_out(ranks: Callable[..., list[Any]]) -> None:
    told = ranks(2, _kinds)
    for one in told:
        assert one["blocks"] == [True, True]
        assert one["root"]
        assert one["replica"]
        assert one["names"]
        assert one["one"] == 3
    assert sum(one["local"] for one in told) == told[0]["whole"]


def _start(kind: str) -> list[float]:
    model = models.Net(seed=dist.get_rank() + 3)
    model.register_buffer("mean", torch.full((2,), float(dist.get_rank() + 3)))
    match kind:
        case "ddp":
            model = nbdist.ddp(model)
        case "meta":
            with torch.device("meta"):
                model = models.Net(seed=None)
            torch.manual_seed(dist.get_rank())
            model = nbdist.fsdp(model)
        case _:
            model = nbdist.fsdp(model, version=int(kind))
    full = models.full_parameters(model)
    return [float(p.double().sum()) for p in full.values()]


@pytest.mark.parametrize("kind", ["ddp", "2", "1", "meta"])
def test_every_rank_starts_from_the_same_weights(ranks: Callable[..., list[Any]], kind: str) -> None:
    told = ranks(3, _start, kind)
    assert told[0] == told[1] == told[2]
    assert any(told[0])
    if kind == "ddp":
        assert told[0][1] == float(models.Net(seed=3).first.weight.detach().double().sum())


def _precision(kind: str) -> tuple[str, str, str]:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    model = nbdist.fsdp(
        models.Net(), mixed_precision=policy if kind == "policy" else "bf16", version=1 if kind == "1" else 2
    )
    seen = []
    (model.module if kind == "1" else model).first.register_forward_hook(lambda _, __, out: seen.append(str(out.dtype)))
    out = model(models.data()[0])
    out.float().mean().backward()
    grads = {str(p.grad.dtype) for p in model.parameters() if p.grad is not None}
    return seen[0], str(out.dtype), grads.pop()


def test_mixed_precision(ranks: Callable[..., list[Any]]) -> None:
    assert ranks(2, _precision, "2") == [("torch.bfloat16", "torch.bfloat16", "torch.float32")] * 2
    assert ranks(2, _precision, "1") == [("torch.bfloat16", "torch.bfloat16", "torch.float32")] * 2
    assert ranks(2, _precision, "policy") == [("torch.bfloat16", "torch.float32", "torch.float32")] * 2


def _says(kind: str) -> None:
    match kind:
        case "blocks":
            nbdist.fsdp(models.Net())
        case "unit":
            nbdist.fsdp(nn.Linear(4, 4))
        case "none":
            nbdist.fsdp(models.Net(), "none")
        case "hybrid":
            nbdist.fsdp(models.Net(), "hybrid")
        case "checkpointing":
            nbdist.ddp(models.Net(), activation_checkpointing=True)
        case "silent":
            nbdist.ddp(models.Net())


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("blocks", "nbdist: fsdp: one unit per block: 2 × Block, found as what repeats, with 89% of the parameters\n"),
        ("unit", "nbdist: fsdp: no block class repeats in the model, so it is one unit (blocks= names one)\n"),
        ("none", "nbdist: fsdp: strategy none keeps a replica on every rank, so this is DistributedDataParallel\n"),
        ("hybrid", "nbdist: fsdp: all ranks are on one machine, so hybrid shards over all of them (shard_size= makes"),
        ("checkpointing", "nbdist: ddp: activations recomputed in 2 blocks"),
        ("silent", ""),
    ],
)
def test_choices_are_said_once_with_their_reason(notices: Callable[..., list[str]], kind: str, text: str) -> None:
    said = notices(2, _says, kind)
    assert said[0].startswith(text)
    assert said[1] == ""


def _refused(name: str) -> None:
    rank = dist.get_rank()
    net = models.Net()
    if name == "half meta":
        net.blocks[1].up = nn.Linear(8, 16, device="meta")
    if name == "tied":
        net.blocks[1].up.weight = net.blocks[0].up.weight
    if name == "other model":
        net = models.Net(blocks=2 + rank)
    if name == "frozen":
        net.requires_grad_(False)
    if name == "wrapped":
        net = nbdist.ddp(net)
    if name == "sharded":
        net = nbdist.fsdp(net)
    if name == "own meta":
        net.scale = nn.Parameter(torch.empty(2, device="meta"))
    if name == "channels last":
        net = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    calls: dict[str, Callable[[], object]] = {
        "channels last": lambda: nbdist.fsdp(net),
        "block": lambda: nbdist.fsdp(net, blocks="Layer"),
        "block class": lambda: nbdist.fsdp(net, blocks=nn.Conv2d),
        "strategy": lambda: nbdist.fsdp(net, "zero"),
        "number": lambda: nbdist.fsdp(net, 1),
        "version": lambda: nbdist.fsdp(net, version=3),
        "offload": lambda: nbdist.fsdp(net, cpu_offload=True),
        "offload none": lambda: nbdist.fsdp(net, "none", cpu_offload=True),
        "fp16": lambda: nbdist.fsdp(net, mixed_precision="fp16"),
        "precision": lambda: nbdist.fsdp(net, mixed_precision="fp8"),
        "precision none": lambda: nbdist.fsdp(net, "none", mixed_precision="bf16"),
        "shard size": lambda: nbdist.fsdp(net, "hybrid", shard_size=2),
        "shard size full": lambda: nbdist.fsdp(net, shard_size=2),
        "checkpointing": lambda: nbdist.fsdp(nn.Linear(2, 2), activation_checkpointing=True),
        "half meta": lambda: nbdist.ddp(net),
        "half meta fsdp 1": lambda: nbdist.fsdp(net, version=1),
        "own meta": lambda: nbdist.fsdp(net),
        "tied": lambda: nbdist.fsdp(net),
        "other model": lambda: nbdist.ddp(net),
        "frozen": lambda: nbdist.ddp(net),
        "wrapped": lambda: nbdist.ddp(net),
        "sharded": lambda: nbdist.fsdp(net),
        "module": lambda: nbdist.ddp("net"),
        "batchnorm": lambda: nbdist.ddp(net, sync_batchnorm=True),
        "option": lambda: nbdist.ddp(net, find_unused=True),
        "device": lambda: nbdist.ddp(net, device="cuda:0"),
        "one rank only": lambda: nbdist.fsdp(net, "full" if rank else "nonsense"),
        "arguments": lambda: nbdist.fsdp(net, "full" if rank else "grad_op"),
        "calls": lambda: nbdist.ddp(net) if rank else nbdist.fsdp(net),
    }
    calls[name]()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("block", "fsdp(): blocks: Layer does not occur in the model; repeated there: Block, LayerNorm, Linear"),
        ("block class", "blocks: Conv2d does not occur in the model"),
        (
            "strategy",
            "strategy expects none, grad_op, full, hybrid or NO_SHARD, SHARD_GRAD_OP, FULL_SHARD, HYBRID_SHARD",
        ),
        ("number", "a number is not a ShardingStrategy"),
        ("version", "version expects 2 (fully_shard) or 1 (FullyShardedDataParallel), not 3"),
        ("offload", "cpu_offload needs an accelerator: on CPU ranks everything is in host memory already"),
        ("offload none", "cpu_offload needs"),
        ("fp16", "float16 needs an accelerator; on the CPU use 'bf16'"),
        ("precision", "mixed_precision expects 'bf16', 'fp16', a MixedPrecisionPolicy or None, not 'fp8'"),
        ("precision none", "use nbdist.autocast() for mixed precision"),
        ("shard size", "shard_size expects a divisor of the 3 ranks, not 2"),
        ("shard size full", "shard_size belongs to strategy 'hybrid', not to 'full'"),
        ("checkpointing", "activation_checkpointing: no block class repeats in the model; name it with blocks="),
        ("half meta", "`blocks.1.up.weight` is on the meta device and has no values"),
        ("own meta", "the Net is on the meta device and has no reset_parameters() to give it values"),
        ("tied", "`blocks.0.up.weight` and `blocks.1.up.weight` are one parameter in two blocks"),
        (
            "other model",
            "the model differs between ranks: rank 0 has parameter last.weight (3, 8) torch.float32, rank 1 has",
        ),
        ("frozen", "the model has no parameter that requires a gradient"),
        ("wrapped", "the model is wrapped in DistributedDataParallel already"),
        ("sharded", "the model is wrapped in FSDP already"),
        ("module", "ddp(): expects a torch.nn.Module, not str"),
        ("batchnorm", "sync_batchnorm needs GPUs"),
        ("option", "find_unused is no argument of ddp() or of DistributedDataParallel"),
        ("device", "device cuda:0 was asked for, and torch sees no CUDA device here"),
        ("one rank only", "fsdp(): rank 0: strategy expects"),
        ("arguments", "fsdp(): the arguments differs between ranks"),
    ],
)
def test_refused_by_every_rank_alike(refusal: Callable[..., str], name: str, says: str) -> None:
    if name == "device" and torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    assert says in refusal(3, _refused, name)


def test_different_calls_on_different_ranks(fleet: Any) -> None:
    told = fleet.run(2, _refused, "calls")
    assert [t.ename for t in told] == ["InputError"] * 2
    assert "rank 0 has fsdp(), rank 1 has ddp()" in told[0].evalue


def _own_mistake() -> None:
    class Strange(nn.Module):
        def named_parameters(self, *_: Any, **__: Any) -> Any:
            raise ZeroDivisionError("a bug of the model" if dist.get_rank() == 1 else "everywhere")

    if dist.get_rank() == 1:
        nbdist.ddp(Strange())
    nbdist.ddp(models.Net())


def test_a_bug_on_one_rank_leaves_none_waiting(fleet: Any) -> None:
    told = fleet.run(3, _own_mistake)
    assert [t.ename for t in told] == ["InputError", "ZeroDivisionError", "InputError"]
    assert told[0].evalue == "ddp(): rank 1: ZeroDivisionError: a bug of the model"


def test_outside_of_a_group() -> None:
    for call in (nbdist.ddp, nbdist.fsdp):
        with pytest.raises(
            nbdist.errors.NotRunningError, match=r"needs a process group: call it in a %%distributed cell"
        ):
            call(models.Net())


def _many_times() -> tuple[int, int]:
    import gc
    import weakref

    kept = []
    for kind in ("ddp", "full", "full"):
        model = models.Net()
        kept.append(weakref.ref(model.blocks[0].up.weight))
        model = nbdist.ddp(model) if kind == "ddp" else nbdist.fsdp(model)
        model(models.data()[0]).sum().backward()
        del model
    gc.collect()
    return sum(k() is not None for k in kept), dist.get_rank()


def test_nothing_is_kept_of_a_model(ranks: Callable[..., list[Any]]) -> None:
    assert [alive for alive, _ in ranks(2, _many_times)] == [0, 0]


def test_the_cells_device_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    import __main__
    from nbdist.train.ranks import device_of
    from nbdist.worker import telemetry

    assert device_of() == torch.device("cpu")
    monkeypatch.setattr(__main__, "device", torch.device("meta"), raising=False)
    assert device_of() == torch.device("cpu"), "a script's own variable means nothing"
    monkeypatch.setattr(telemetry, "current", object())
    assert device_of() == torch.device("meta")
    assert device_of(device="cpu") == torch.device("cpu")
