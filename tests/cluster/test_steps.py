"""The step boundary: counting, the loss of an unmodified loop, and interrupts where no agreed stop can be."""

from __future__ import annotations

import signal
import sys
import time
import weakref
from typing import Any

import pytest
from forked import Rank, agree, expect, run_ranks

SETUP = """
import torch
torch.manual_seed(0)
net = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
x = torch.ones(2, 4)
"""


def _cell(code: str, watch: list[str] | None = None, check: Any = None) -> list[Any]:
    """Run a cell on one rank; return the recorded points, the notices, the count and what check returned."""

    def body(me: Rank) -> list[Any]:
        assert me.cell(SETUP) is None
        error = me.cell(code, watch)
        assert error is None, repr(error)
        return [me.telemetry.points, me.notices, me.steps.count, check(me) if check else None]

    return run_ranks(1, body)[0]


LOSSES = {
    "cell": "for i in range(4):\n    loss = net(x).sum() + i; loss.backward(); optimizer.step(); losses.append(loss.item())",
    "function": """
def train():
    for i in range(4):
        loss = net(x).sum() + i; loss.backward(); optimizer.step(); losses.append(loss.item())
train()
""",
    "closure": """
def train():
    def report(): return loss
    for i in range(4):
        loss = net(x).sum() + i; loss.backward(); optimizer.step(); losses.append(report().item())
train()
""",
    "number": """
for i in range(4):
    loss = net(x).sum() + i; loss.backward(); loss = loss.item(); optimizer.step(); losses.append(loss)
""",
    "outer": """
def update(value):
    value.backward(); optimizer.step()
for i in range(4):
    loss = net(x).sum() + i; update(loss); losses.append(loss.item())
""",
    "scaler and scheduler": """
scaler = torch.amp.GradScaler("cpu")
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
for i in range(4):
    loss = net(x).sum() + i; scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update(); scheduler.step()
    losses.append(loss.item())
""",
    "closure of the optimizer": """
optimizer = torch.optim.LBFGS(net.parameters(), max_iter=1)
for i in range(4):
    def again():
        optimizer.zero_grad(); value = net(x).sum() ** 2; value.backward(); return value
    loss = optimizer.step(again)
    losses.append(loss.item())
losses.pop()
""",
    "same value again": """
for i in range(4):
    loss = net(x).sum() * 0 + 1; loss.backward(); optimizer.step(); losses.append(loss.item())
""",
}


@pytest.mark.parametrize("form", LOSSES)
def test_the_loss_of_an_unmodified_loop_is_found(form: str) -> None:
    points, notices, count, losses = _cell("losses = []\n" + LOSSES[form], check=lambda me: me.namespace["losses"])
    assert [values["loss"] for values, _ in points] == pytest.approx(losses)
    assert count == 4
    assert [step for _, step in points] == [1, 2, 3, 4][-len(losses) :]
    assert notices == []


@pytest.mark.parametrize(
    "code",
    [
        "value = net(x).sum(); value.backward(); optimizer.step()",
        "loss = net(x); loss.sum().backward(); optimizer.step()",  # not a scalar
        "loss = torch.nn.MSELoss(); net(x).sum().backward(); optimizer.step()",
        "loss = 'a'; net(x).sum().backward(); optimizer.step()",
        "loss = True; net(x).sum().backward(); optimizer.step()",
        "loss = 3; net(x).sum().backward(); optimizer.step()",
    ],
)
def test_what_is_no_loss_is_not_drawn_and_that_is_said_once(code: str) -> None:
    points, notices, *_ = _cell(f"for _ in range(9):\n    {code}")
    assert points == []
    assert len(notices) == 1 and "--watch" in notices[0]


def test_a_loss_that_does_not_change_is_no_flat_line() -> None:
    points, *_ = _cell("loss = torch.tensor(1.0)\nfor _ in range(5):\n    net(x).sum().backward(); optimizer.step()")
    assert len(points) == 1


def test_named_values_are_watched() -> None:
    code = """
class Meter: pass
meter = Meter()
def train():
    for i in range(3):
        d_loss = net(x).sum(); meter.average = float(i) / 2
        d_loss.backward(); optimizer.step()
train()
"""
    points, notices, *_ = _cell(code, ["d_loss", "meter.average", "nothing"])
    assert [set(values) for values, _ in points] == [{"d_loss", "meter.average"}] * 3
    assert notices == []
    _, notices, *_ = _cell(code, ["nothing"])
    assert len(notices) == 1 and "nothing" in notices[0]


def test_nothing_of_the_callers_frame_is_kept_alive() -> None:
    code = """
alive = []
def train():
    for i in range(3):
        logits = net(x) * 1.0
        refs.append(weakref.ref(logits))
        loss = logits.sum()
        refs.append(weakref.ref(loss))
        loss.backward()
        optimizer.step()
        del logits, loss
        alive.append([r() is not None for r in refs])
train()
"""

    def body(me: Rank) -> Any:
        me.namespace.update(refs=[], weakref=weakref)
        assert me.cell(SETUP) is None
        error = me.cell(code)
        assert error is None, repr(error)
        return me.namespace["alive"]

    assert not any(any(row) for row in run_ranks(1, body)[0])


def test_steps_inside_steps_count_once_and_a_step_that_raises_does_not() -> None:
    code = """
class Outer(torch.optim.Optimizer):
    def __init__(self, inner):
        super().__init__(inner.param_groups[0]["params"], {})
        self.inner = inner
    def step(self, closure=None):
        self.inner.step()
outer = Outer(optimizer)
for i in range(3):
    loss = net(x).sum(); loss.backward(); outer.step()
def fail(): raise ValueError
for i in range(2):
    try: outer.inner.step(fail)
    except ValueError: pass
optimizer.step()
"""
    assert _cell(code)[2] == 4


def test_a_million_times_cheap() -> None:
    """Not a timing assertion: it shows the figure in the report, and fails only where something is absurd."""

    def body(me: Rank) -> float:
        me.cell(SETUP + "\nnet(x).sum().backward()")
        code = "import time\nbegan = time.perf_counter()\nfor i in range(2000): loss = float(i) / 3; optimizer.step()\n"
        code += "spent = time.perf_counter() - began"
        me.cell(code)
        hooked = me.namespace["spent"]
        from torch.optim import optimizer

        optimizer._global_optimizer_post_hooks.clear()
        optimizer._global_optimizer_pre_hooks.clear()
        me.cell(code)
        return (hooked - me.namespace["spent"]) / 2000 * 1e6

    microseconds = run_ranks(1, body)[0]
    print(f"a step costs {microseconds:.1f} us more")
    assert microseconds < 1000


# ---- interrupts


def _interrupted(code: str, *, ranks: int = 1, setup: str = SETUP) -> list[Any]:
    def body(me: Rank) -> list[Any]:
        me.namespace["going"] = lambda: me.link.send(("going", None)) if me.rank == 0 else None
        assert me.cell(setup) is None
        error = me.cell(code)
        return [type(error).__name__, me.namespace.get("trail"), sys.gettrace() is None]

    def drive(links: list) -> None:
        expect(links[0], "going")
        for link in links:
            link.send(("stop", None))

    return run_ranks(ranks, body, drive)


@pytest.mark.parametrize(
    "code",
    [
        "import time\ngoing()\ntime.sleep(600)",
        "going()\nwhile True: pass",
        "import threading\ngoing()\nthreading.Event().wait()",
        "import subprocess\nchild = subprocess.Popen(['sleep', '600'])\n"
        "try: going(); child.wait()\nfinally: child.kill(); child.wait()",
        # trained before, in the same cell: validation is interrupted at once
        "import time\nfor i in range(3): net(x).sum().backward(); optimizer.step()\ngoing()\ntime.sleep(600)",
        "import time\nfor e in range(3):\n    for i in range(3): net(x).sum().backward(); optimizer.step()\n"
        "    going(); time.sleep(600)",
    ],
)
def test_other_code_is_interrupted_at_once(code: str) -> None:
    assert _interrupted(code)[0] == ["KeyboardInterrupt", None, True]


def test_finally_and_except_blocks_run() -> None:
    code = """
import time
trail = []
try:
    try:
        going(); time.sleep(600)
    finally:
        trail.append("finally")
except KeyboardInterrupt:
    trail.append("except")
"""
    assert _interrupted(code)[0] == ["NoneType", ["finally", "except"], True]


@pytest.mark.parametrize("handler", ["lambda *_: trail.append('handled')", "signal.SIG_IGN", "signal.SIG_DFL"])
def test_a_handler_of_the_users_does_not_hinder_the_interrupt(handler: str) -> None:
    code = f"""
import signal, time
trail = []
signal.signal(signal.SIGINT, {handler})
going()
while True: time.sleep(0.05)
"""
    name, trail, _ = _interrupted(code)[0]
    assert name == "KeyboardInterrupt"
    assert trail == (["handled"] if "lambda" in handler else [])


def test_a_rank_whose_peers_do_not_answer_stops_after_the_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """It halts at its boundary and nobody tells it where to stop: after the grace it stops there, as cleanly."""
    monkeypatch.setattr("nbdist.worker.stop.LEAST_GRACE_S", 0.3)
    code = """
trail = []
for i in range(10**9):
    loss = net(x).sum(); loss.backward(); optimizer.step()
    if i == 5: going()
    optimizer.zero_grad()
    trail = [i, all(p.grad is None for p in net.parameters())]
"""
    name, (i, clean), untraced = _interrupted(code)[0]
    assert name == "KeyboardInterrupt"
    assert i >= 5 and clean and untraced


def test_a_halted_rank_can_be_interrupted_again_and_lets_others_run() -> None:
    code = """
import threading
ticks = []
def tick():
    while not stop.wait(0.001): ticks.append(None)
stop = threading.Event()
thread = threading.Thread(target=tick); thread.start()
try:
    for i in range(10**9):
        loss = net(x).sum(); loss.backward(); optimizer.step()
        if i == 5: going()
finally:
    trail = len(ticks)
    stop.set(); thread.join()
"""

    def body(me: Rank) -> list[Any]:
        me.namespace["going"] = lambda: me.link.send(("going", None))
        assert me.cell(SETUP) is None
        error = me.cell(code)
        return [type(error).__name__, me.namespace["trail"]]

    def drive(links: list) -> None:
        expect(links[0], "going")
        links[0].send(("stop", None))
        expect(links[0], "halted")
        time.sleep(0.1)  # it stands there; the other thread ticks on
        links[0].send(("stop", None))

    name, ticks = run_ranks(1, body, drive)[0]
    assert name == "KeyboardInterrupt"
    assert ticks > 20


def test_a_signal_during_a_long_operation_in_c_ends_at_the_next_line() -> None:
    code = """
import os, signal, torch
trail = []
a = torch.ones(1500, 1500)
going()
while True:
    b = a @ a
"""
    assert _interrupted(code)[0][0] == "KeyboardInterrupt"


def test_a_tracer_of_the_users_is_given_back() -> None:
    code = """
import sys
def tracer(*_): return None
sys.settrace(tracer)
for i in range(10**9):
    loss = net(x).sum(); loss.backward(); optimizer.step()
    if i == 5: going()
"""

    def body(me: Rank) -> bool:
        me.namespace["going"] = lambda: me.link.send(("going", None))
        assert me.cell(SETUP) is None
        error = me.cell(code)
        assert isinstance(error, KeyboardInterrupt)
        kept = sys.gettrace() is me.namespace["tracer"]
        sys.settrace(None)
        return kept

    def drive(links: list) -> None:
        expect(links[0], "going")
        agree(links)

    assert run_ranks(1, body, drive) == [True]


def test_sigint_itself_interrupts(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(me: Rank) -> str:
        import os

        me.namespace["going"] = lambda: os.kill(os.getpid(), signal.SIGINT)
        return type(me.cell("going()\nwhile True: pass")).__name__

    assert run_ranks(1, body) == ["KeyboardInterrupt"]
