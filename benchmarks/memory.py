"""Compare what ``nbdist.estimate`` forecasts with the living tensors of real ranks: ``python benchmarks/memory.py``.

Each pair of model and strategy is trained for three steps on real CPU ranks; the peak is that of the third, counted by
the same tracker. Where a GPU is at hand (``--gpu``), torch's own peak of one rank on it is compared too.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

STATES_AT_MOST, PEAK_AT_MOST = 0.05, 0.15


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self, vocabulary: int = 2000, width: int = 256, heads: int = 4, layers: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(x + self.norm2(self.conv2(y)))


def convolutional() -> nn.Module:
    stem = [nn.Conv2d(3, 96, 3, padding=1), nn.BatchNorm2d(96), nn.ReLU()]
    return nn.Sequential(
        *stem, *(Residual(96) for _ in range(6)), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(96, 10)
    )


def perceptron() -> nn.Module:
    layers = [m for _ in range(6) for m in (nn.Linear(1024, 1024), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(1024, 10))


def tokens(batch: int = 4, length: int = 128) -> Any:
    text = torch.randint(0, 2000, (batch, length + 1), generator=torch.Generator().manual_seed(0))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def images() -> Any:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(8, 3, 24, 24, generator=generator), torch.randint(0, 10, (8,), generator=generator)


def rows() -> Any:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(256, 1024, generator=generator), torch.randint(0, 10, (256,), generator=generator)


@dataclass
class Pair:
    """A model and a strategy, on a number of ranks."""

    model: Callable[[], nn.Module]
    batch: Callable[[], Any]
    strategy: str
    ranks: int = 2
    optimizer: str = "AdamW"
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        more = "".join(f" {k}={v}" for k, v in self.options.items())
        return f"{self.model.__name__}, {self.strategy} on {self.ranks}, {self.optimizer}{more}"


PAIRS = [
    Pair(perceptron, rows, "ddp"),
    Pair(perceptron, rows, "full", 4),
    Pair(convolutional, images, "ddp", optimizer="SGD"),
    Pair(convolutional, images, "full", 3),
    Pair(Gpt, tokens, "ddp"),
    Pair(Gpt, tokens, "full", 2),
    Pair(Gpt, tokens, "full", 4),
    Pair(Gpt, tokens, "grad_op", 3),
    Pair(Gpt, tokens, "hybrid", 4, options={"shard_size": 2}),
    Pair(Gpt, tokens, "full", 2, options={"activation_checkpointing": True}),
    Pair(Gpt, tokens, "full", 4, options={"mixed_precision": "bf16"}),
    Pair(Gpt, tokens, "ddp", options={"mixed_precision": "bf16", "activation_checkpointing": True}),
]


def run_rank(number: int, device: str) -> dict[str, float]:
    """Train three steps in this rank, and count."""
    import nbdist
    from nbdist.train.forecast import _default_loss
    from nbdist.train.gradients import autocast
    from nbdist.train.tracker import Tracker

    pair = PAIRS[number]
    torch.manual_seed(0)
    model, batch = pair.model(), [t.to(device) for t in pair.batch()]
    options = dict(pair.options)
    cast = options.pop("mixed_precision", None) if pair.strategy == "ddp" else None
    tracker = Tracker()
    with tracker:
        wrapped = (
            nbdist.ddp(model, device=device, **options)
            if pair.strategy == "ddp"
            else nbdist.fsdp(model, pair.strategy, device=device, **options)
        )
        tracker.watch_gradients(wrapped)
        optimizer = getattr(torch.optim, pair.optimizer)(wrapped.parameters())
        for _ in range(3):
            tracker.mark("forward")
            if device != "cpu":
                torch.cuda.reset_peak_memory_stats()
            with autocast(cast or "bf16", enabled=cast is not None):
                loss = _default_loss(wrapped, batch)
            loss.backward()
            del loss
            tracker.own(wrapped, optimizer)
            tracker.mark("step")
            states = nbdist.account(wrapped, optimizer).mine
            optimizer.step()
            tracker.own(wrapped, optimizer)
            optimizer.zero_grad()
    timeline = tracker.timeline()
    total = sum(timeline.by_kind().values())
    found = {"peak": float(total[timeline.after("forward") :].max()), "states": float(states.states_bytes)}
    if device != "cpu":
        found["torch's peak"] = float(torch.cuda.max_memory_allocated())
    return found


def measured(number: int, device: str) -> list[dict[str, float]]:
    """What each rank of a pair has counted."""
    ranks = PAIRS[number].ranks if device == "cpu" else 1
    # Forked from a process that has imported all this: a fresh interpreter per rank would take most of the time.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["torch.distributed.fsdp", "torch._dynamo", "nbdist.train.memory", "nbdist.train.parallel"]
    )
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=rank_process, args=(number, device, r, ranks, folder)) for r in range(ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            sys.exit(f"{PAIRS[number].name}: a rank failed")
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]


def rank_process(number: int, device: str, rank: int, ranks: int, folder: str) -> None:
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)})
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), ranks)
    dist.init_process_group("gloo" if device == "cpu" else "nccl", store=store, rank=rank, world_size=ranks)
    with contextlib.redirect_stdout(io.StringIO()):  # the choices are not of interest here
        found = run_rank(number, device)
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def compare(device: str) -> None:
    import nbdist

    torch.set_num_threads(1)
    print(f"{'pair':72}{'states':>10}{'error':>8}{'peak':>10}{'error':>8}   {'closed form':>11}")
    worst = {"states": 0.0, "peak": 0.0}
    for number, pair in enumerate(PAIRS):
        if device != "cpu" and pair.strategy == "hybrid":
            continue
        ranks = measured(number, device)
        options = dict(pair.options)
        estimate = nbdist.estimate(
            pair.model,
            pair.batch(),
            pair.strategy,
            len(ranks),
            optimizer=pair.optimizer,
            device=device[:4].rstrip(":"),
            **options,
        )
        real = {key: max(r[key] for r in ranks) for key in ranks[0]}
        peak = real.get("torch's peak", real["peak"])
        states_error = estimate.states_bytes / real["states"] - 1
        peak_error = estimate.peak_bytes / peak - 1
        form = (estimate.form.parameters + estimate.form.gradients + estimate.form.optimizer_state) / real["states"] - 1
        worst = {"states": max(worst["states"], abs(states_error)), "peak": max(worst["peak"], abs(peak_error))}
        print(
            f"{pair.name:72}{real['states'] / 2**20:8.1f} M{states_error:+8.1%}"
            f"{peak / 2**20:8.1f} M{peak_error:+8.1%}   {form:+11.1%}",
            flush=True,
        )
    print(f"largest error: {worst['states']:.1%} of the states, {worst['peak']:.1%} of the peak")
    if worst["states"] > STATES_AT_MOST or worst["peak"] > PEAK_AT_MOST:
        sys.exit(f"more than {STATES_AT_MOST:.0%} of the states or {PEAK_AT_MOST:.0%} of the peak")


class SwiGlu(nn.Module):
    """A block of Llama's shape."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up, self.down = (
            nn.Linear(*s, bias=False) for s in ((width, inner), (width, inner), (inner, width))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        y = self.norm1(x)
        q, k, v = (f(y).view(batch, length, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).reshape(batch, length, width))
        y = self.norm2(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class Llama7b(Gpt):
    """6.7 billion parameters."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.embed = nn.Embedding(32000, 4096)
        self.blocks = nn.ModuleList(SwiGlu(4096, 32, 11008) for _ in range(32))
        self.norm, self.head = nn.RMSNorm(4096), nn.Linear(4096, 32000, bias=False)


def seven_billion() -> None:
    """Forecast a model of 7 billion parameters on 8 to 512 GPUs; prints the seconds and the memory that took."""
    from nbdist.train.memory import forecast

    start, busy = time.perf_counter(), time.process_time()
    batch = tuple(torch.zeros(1, 2048, dtype=torch.int64, device="meta") for _ in range(2))
    curve = forecast(
        Llama7b, batch, "full", [8, 16, 32, 64, 128, 256, 512], mixed_precision="bf16", activation_checkpointing=True
    )
    for one in curve:
        print(
            f"{one.world_size:4} GPUs: states {one.states_bytes / 2**30:6.2f} GiB, "
            f"peak {one.peak_bytes / 2**30:6.2f} GiB"
        )
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    took = f"{time.perf_counter() - start:.1f} s ({time.process_time() - busy:.1f} s of processor time)"
    print(f"in {took}, {used:.2f} GiB of host memory")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", action="store_true", help="compare with torch's peak of one rank on a GPU")
    parser.add_argument(
        "--seven-billion", action="store_true", help="forecast a 7-billion-parameter model on 8 to 512 GPUs"
    )
    given = parser.parse_args()
    if given.seven_billion:
        seven_billion()
    else:
        compare("cuda:0" if given.gpu else "cpu")


if __name__ == "__main__":
    main()
