"""Small models and data of the training tests, and the loop of one process they are compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import nn

SAMPLES = 120  # divides by 2, 3 and 4
WIDTH = 8


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """Two residual blocks between two layers; sizes that do not divide evenly by 2, 3 and 4."""

    def __init__(self, width: int = WIDTH, blocks: int = 2, seed: int | None = 0) -> None:
        if seed is not None:
            torch.manual_seed(seed)
        super().__init__()
        self.first = nn.Linear(5, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.last = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def data(samples: int = SAMPLES) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(samples, 5, generator=generator), torch.randint(0, 3, (samples,), generator=generator)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3)


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def momentum(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9)


OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": adamw,
    "sgd": sgd,
    "momentum": momentum,
}


def whole(
    optimizer: str, steps: int, *, clip: float | None = None, model: nn.Module | None = None
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and parameters of one process on the whole batch."""
    model = model or Net()
    x, y = data()
    step = OPTIMIZERS[optimizer](model.parameters())
    losses = []
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        step.step()
        step.zero_grad()
        losses.append(loss.item())
    return losses, {n: p.detach().clone() for n, p in model.named_parameters()}


def mean(loss: torch.Tensor) -> float:
    """Mean of a loss over the ranks."""
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def full_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Whole parameters of a wrapped model, on every rank."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    return {
        n: p.clone() for n, p in get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)).items()
    }


def far(ours: list[float], theirs: list[float]) -> float:
    """Largest relative difference of two curves."""
    assert len(ours) == len(theirs)
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))
