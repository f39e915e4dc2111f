"""Where a step's time goes, in one process. Sleeping gives a part a length it cannot be shorter than."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from nbdist.worker import step_parts
from nbdist.worker.step_parts import PARTS, StepParts

NAP_S = 0.03


class Naps:
    """What sleeps at the moment."""

    where = ""

    @classmethod
    def at(cls, where: str) -> None:
        if cls.where == where:
            time.sleep(NAP_S)


class Data(Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index % 4 == 0:
            Naps.at("data")
            nn.Identity()(torch.zeros(1))  # a transform: loading, not the forward part
        return torch.ones(6), torch.ones(1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Naps.at("forward")
        return self.layers(x)


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        Naps.at("backward")
        return grad


class Optimizer(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        Naps.at("optimizer")
        return super().step(closure)


class Loop:
    def __init__(self) -> None:
        self.stepped: list[torch.optim.Optimizer] = []
        self.called: list[nn.Module] = []
        self.parts = StepParts(torch.device("cpu"), stepped=self.stepped.append, called=self.called.append)
        self.model = Net()
        self.optimizer = Optimizer(self.model.parameters(), lr=0.01)

    def train(self, where: str = "") -> dict[str, Any]:
        Naps.where = where
        self.parts.begin()
        for x, y in DataLoader(Data(), batch_size=4):
            out = Slow.apply(self.model(x))
            Naps.at("loss")
            loss = nn.functional.mse_loss(out, y)
            loss.backward()
            Naps.at("clipping")
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.parts.end()
        Naps.where = ""
        return dict(self.parts.read())


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.parts.end()


@pytest.mark.parametrize(
    ("where", "part"),
    [
        ("data", "data"),
        ("forward", "forward"),
        ("loss", "forward"),
        ("backward", "backward"),
        ("clipping", "rest"),
        ("optimizer", "optimizer"),
    ],
)
def test_each_part_is_told_apart(loop: Loop, where: str, part: str) -> None:
    values = loop.train(where)
    assert values["parts_steps"] == 1  # the first one of a run pays for what is set up once
    assert values[f"{part}_s"] >= NAP_S
    assert sum(values[f"{name}_s"] for name in PARTS) == pytest.approx(values["step_s"])
    assert values["step_s"] >= NAP_S


def test_samples_come_from_the_loader(loop: Loop) -> None:
    values = loop.train("optimizer")
    assert values["samples_per_s"] == pytest.approx(4 / values["step_s"])
    assert 0 < values["samples_per_s"] <= 4 / NAP_S


def test_samples_without_a_loader(loop: Loop) -> None:
    loop.parts.begin()
    for _ in range(2):
        loss = loop.model(torch.ones(5, 6)).sum() + loop.model(torch.ones(5, 6)).sum()  # one batch, twice through
        loss.backward()
        loop.optimizer.step()
    with torch.no_grad():
        loop.model(torch.ones(100, 6))
    values = loop.parts.read()
    assert values["samples_per_s"] == pytest.approx(5 / values["step_s"])


def test_modules_and_optimizers_are_reported(loop: Loop) -> None:
    loop.train()
    assert set(loop.called) == {loop.model}  # the outermost only
    assert loop.stepped == [loop.optimizer] * 2


def test_the_latest_values_stay_until_the_next_run(loop: Loop) -> None:
    values = loop.train()
    assert loop.parts.read() == values
    loop.parts.begin()
    assert loop.parts.read()["step_s"] is None


def test_live_values_are_those_of_the_latest_steps(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_parts, "_WINDOW_S", 0.0)
    monkeypatch.setattr(step_parts, "_WINDOW_STEPS", 2)
    loop.parts.begin()
    for number in range(12):
        Naps.where = "optimizer" if number < 10 else ""
        loop.model(torch.ones(2, 6)).sum().backward()
        loop.optimizer.step()
        if number % 2:
            live = loop.parts.read()
            assert live["parts_steps"] <= 4
    assert live["parts_steps"] == 2
    loop.parts.end()
    whole = loop.parts.read()
    assert whole["parts_steps"] == 11
    assert whole["optimizer_s"] >= 9 * NAP_S / 11


def test_accumulated_gradients_are_one_step(loop: Loop) -> None:
    loop.parts.begin()
    Naps.where = "forward"
    for _ in range(3):
        loop.model(torch.ones(2, 6)).sum().backward()
    loop.optimizer.step()
    Naps.where = ""
    values = loop.parts.read()
    assert values["parts_steps"] == 1
    assert values["forward_s"] >= 3 * NAP_S
    assert values["samples_per_s"] == pytest.approx(6 / values["step_s"])


def test_a_closure_runs_inside_the_optimizer(loop: Loop) -> None:
    optimizer = torch.optim.LBFGS(loop.model.parameters(), max_iter=2)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loop.model(torch.ones(2, 6)).sum()
        loss.backward()
        return loss

    loop.parts.begin()
    Naps.where = "forward"
    optimizer.step(closure)
    Naps.where = ""
    values = loop.parts.read()
    assert values["parts_steps"] == 1
    assert values["forward_s"] >= NAP_S


def test_errors_leave_no_part_open(loop: Loop) -> None:
    class Broken(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("no")

    loop.parts.begin()
    with pytest.raises(ValueError, match="no"):
        Broken()(torch.ones(1))
    with pytest.raises(RuntimeError, match="does not require grad"):
        torch.ones(1).backward()
    assert loop.parts._stack == []
    assert loop.parts._in_backward is False
    loop.parts.end()
    assert loop.train()["parts_steps"] == 1


def test_a_loop_that_never_steps_is_bounded(loop: Loop) -> None:
    loop.parts.begin()
    for _ in range(step_parts._MOST_MARKS):
        nn.functional.relu(torch.zeros(1))
        loop.model(torch.ones(1, 6))
    assert len(loop.parts._marks) <= step_parts._MOST_MARKS + 1
    assert loop.parts.read()["step_s"] is None


def test_several_losses_and_double_backward(loop: Loop) -> None:
    loop.parts.begin()
    x = torch.ones(2, 6, requires_grad=True)
    first, second = loop.model(x).sum(), loop.model(x).mean()
    torch.autograd.backward([first, second], inputs=list(loop.model.parameters()), retain_graph=True)
    (grad,) = torch.autograd.grad(first, x, create_graph=True)
    grad.pow(2).sum().backward()
    loop.optimizer.step()
    assert loop.parts.read()["parts_steps"] == 1


def test_nothing_is_measured_between_cells(loop: Loop) -> None:
    loop.train()
    loop.model(torch.ones(2, 6)).sum().backward()
    loop.optimizer.step()
    assert len(loop.parts._steps) == 0


def test_loader_workers_and_other_threads_are_not_counted(loop: Loop) -> None:
    import threading

    loop.parts.begin()
    thread = threading.Thread(target=loop.model, args=(torch.ones(1, 6),))
    thread.start()
    thread.join()
    assert loop.parts._marks == []
    batches = list(DataLoader(Data(), batch_size=4, num_workers=1, multiprocessing_context="fork"))
    assert len(batches) == 2


def test_compiled_without_a_break(loop: Loop) -> None:
    compiled = torch.compile(loop.model.layers, backend="aot_eager", fullgraph=True)
    loop.parts.begin()
    for _ in range(2):
        compiled(torch.ones(4, 6)).sum().backward()
        loop.optimizer.step()
    assert loop.parts.read()["parts_steps"] == 1
    loop.parts.end()
    compiled(torch.ones(4, 6))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1  # nothing of ours is guarded on
