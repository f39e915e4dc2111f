"""log(), track() and what a rank sends: on a Telemetry whose messages are kept, pumped by the test or by a thread."""

from __future__ import annotations

import dataclasses
import decimal
import gc
import json
import math
import subprocess
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from deadlines import CELL_S, wait_until
from torch.utils.data import DataLoader, TensorDataset

from nbdist.errors import InputError
from nbdist.wire.messages import FROM_RANK, Message, Metrics, Notice, Sample, kind_of, parse
from nbdist.worker import telemetry as module
from nbdist.worker.telemetry import Telemetry, log, track

Curve = list[tuple[float, float]]


class Rank:
    """A rank's telemetry, and what it has sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[Message, list[bytes]]] = []
        self.telemetry = Telemetry(self._send, rank=0, device=torch.device("cpu"))

    def _send(self, message: Message, buffers: Sequence[memoryview | bytes]) -> None:
        content = json.loads(json.dumps(dataclasses.asdict(message), allow_nan=False))  # valid JSON, as on the wire
        self.sent.append((parse(kind_of(message), content, FROM_RANK), [bytes(b) for b in buffers]))

    def run(self, run_id: str = "r") -> None:
        self.telemetry.begin(run_id, interval_s=0.1)

    def end(self) -> None:
        self.telemetry.end()
        self.telemetry.pump(final=True)

    def curves(self, run_id: str = "r") -> dict[str, Curve]:
        """(step, value) by name."""
        found: dict[str, Curve] = {}
        for message, buffers in self.sent:
            if isinstance(message, Metrics) and message.run_id == run_id:
                for series, buffer in zip(message.series, buffers, strict=True):
                    steps, times, values = np.frombuffer(buffer).reshape(3, series["n"])
                    assert (times > 1e9).all()
                    found.setdefault(series["name"], []).extend(zip(steps.tolist(), values.tolist(), strict=True))
        return found

    def of(self, kind: type[Message]) -> list[Any]:
        return [message for message, _ in self.sent if isinstance(message, kind)]

    def notices(self) -> list[str]:
        return [notice.text for notice in self.of(Notice)]


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    rank = Rank()
    monkeypatch.setattr(module, "current", rank.telemetry)
    rank.run()
    yield rank
    rank.telemetry.end()


# ---- values


@pytest.mark.case("WM01")
def test_non_finite_values_stay(rank: Rank) -> None:
    for step in range(10):
        log(step=step, loss=(math.nan, math.inf, -math.inf)[step - 3] if 3 <= step < 6 else 0.1 * step)
    rank.end()
    curve = rank.curves()["loss"]
    assert [step for step, _ in curve] == list(range(10))
    assert math.isnan(curve[3][1])
    assert [value for _, value in curve[4:6]] == [math.inf, -math.inf]
    assert curve[9][1] == pytest.approx(0.9)


@pytest.mark.case("WM02")
def test_graphs_are_freed_at_once(rank: Rank) -> None:
    w = torch.randn(50, 50, requires_grad=True)
    alive = []
    for step in range(20):
        loss = (w @ w).pow(2).mean()
        alive.append(weakref.ref(loss))
        log(step=step, loss=loss)
        assert loss.requires_grad
    del loss
    gc.collect()
    assert sum(reference() is not None for reference in alive) == 0
    rank.end()
    assert len(rank.curves()["loss"]) == 20


def test_a_tensor_changed_in_place_afterwards(rank: Rank) -> None:
    total = torch.zeros(())
    for _ in range(4):
        total += 1
        log(total=total)
    rank.end()
    assert rank.curves()["total"] == [(0, 1), (1, 2), (2, 3), (3, 4)]


@pytest.mark.case("WM04")
def test_odd_values(rank: Rank) -> None:
    good = [
        3,
        True,
        np.float32(1.5),
        torch.tensor(2.0),
        torch.tensor([2.5]),
        torch.tensor(1.0, dtype=torch.bfloat16),
        decimal.Decimal("0.5"),
        np.array([4]),
        np.bool_(True),
        torch.nn.Parameter(torch.tensor(5.0)),
        torch.tensor(True),
    ]
    bad: list[Any] = [
        "0.3",
        None,
        [1, 2],
        {"a": 1},
        1 + 2j,
        torch.ones(3),
        object(),
        10**400,
        np.ones(2),
        np.complex64(1),
        torch.tensor(1j),
        torch.ones((), device="meta"),
        Hostile(),
    ]
    for step, value in enumerate([*good, *bad]):
        log(step=step, loss=1.0 * step, odd=value)
    log(step=99, big=2**63 - 1, obj=object())
    rank.end()
    curves = rank.curves()
    assert [value for _, value in curves["odd"]] == [3, 1, 1.5, 2, 2.5, 1, 0.5, 4, 1, 5, 1]
    assert len(curves["loss"]) == len(good) + len(bad)
    assert curves["big"] == [(99, float(2**63))]
    assert "obj" not in curves
    assert rank.notices() == [
        "log(odd=...) skipped: str is not a number",  # one for each name
        "log(obj=...) skipped: object is not a number",
    ]


class Hostile:
    def __float__(self) -> float:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (torch.ones(3), "a Tensor of shape (3,) is not one number"),
        (torch.tensor(1j), "a complex Tensor is not a number"),
        (torch.ones((), device="meta"), "a Tensor on the meta device has no number to read"),
        (None, "NoneType is not a number"),
        (Hostile(), "no"),
    ],
)
def test_refusals_say_why(rank: Rank, value: object, reason: str) -> None:
    log(x=value)
    log(x=value)
    rank.end()
    assert rank.notices() == [f"log(x=...) skipped: {reason}"]


def test_a_dtensor_is_read_only_where_no_collective_is_needed(rank: Rank) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        log(whole=DTensor.from_local(torch.tensor(2.5), mesh, [Replicate()]))
        log(norm=DTensor.from_local(torch.tensor(2.5), mesh, [Partial()]))  # what clip_grad_norm_ gives under FSDP
    finally:
        dist.destroy_process_group()
    rank.end()
    assert rank.curves() == {"whole": [(0, 2.5)]}
    assert rank.notices() == [
        "log(norm=...) skipped: a DTensor that is not replicated: its value needs a collective, log its full_tensor()"
    ]


def test_each_run_refuses_anew(rank: Rank) -> None:
    log(x=None)
    rank.end()
    rank.run("second")
    log(x=None)
    rank.end()
    assert [notice.run_id for notice in rank.of(Notice)] == ["r", "second"]


# ---- steps


@pytest.mark.case("WM05")
def test_names_do_not_mix(rank: Rank) -> None:
    for step in range(5):
        log(step=step, loss=float(step), only=-1.0)
    log(step=7, late=2)
    rank.end()
    assert rank.curves() == {
        "loss": [(s, float(s)) for s in range(5)],
        "only": [(s, -1.0) for s in range(5)],
        "late": [(7, 2.0)],
    }


@pytest.mark.case("WM06")
def test_steps_repeat_go_back_and_count_on(rank: Rank) -> None:
    for step in range(8):
        log(step=step, loss=float(step))
    log(step=2, loss=20.0)
    log(step=2, loss=21.0)
    for step in range(3):
        log(step=step, loss=0.5)
    log(loss=0.25)
    log(other=1.0)
    log(step=1.5, other=2.0)
    log(step=torch.tensor(4), other=3.0)
    rank.end()
    steps = [step for step, _ in rank.curves()["loss"]]
    assert steps == [0, 1, 2, 3, 4, 5, 6, 7, 2, 2, 0, 1, 2, 3]
    assert rank.curves()["other"] == [(0, 1), (1.5, 2), (4, 3)]


def test_a_step_that_is_no_number(rank: Rank) -> None:
    log(step="3", loss=1.0)  # type: ignore[arg-type]
    log(step="4", loss=2.0)  # type: ignore[arg-type]
    rank.end()
    assert rank.curves()["loss"] == [(0, 1), (1, 2)]
    assert rank.notices() == ["log(step=...): counted by nbdist instead: str is not a number"]


def test_steps_begin_anew_with_each_run(rank: Rank) -> None:
    log(loss=1)
    log(loss=2)
    rank.end()
    rank.run("second")
    log(loss=3)
    rank.end()
    assert rank.curves("second")["loss"] == [(0, 3)]


def test_metrics_go_by_name(rank: Rank) -> None:
    with pytest.raises(InputError, match="by name"):
        log({"loss": 1})
    log(**{"train/loss": 1})
    rank.end()
    assert rank.curves() == {"train/loss": [(0, 1)]}


def test_what_is_found_gives_way_to_what_is_logged(rank: Rank) -> None:
    for step in range(1, 4):
        rank.telemetry.record({"loss": 10.0 * step, "found": 1.0}, step, 1e9 + 1)
        log(loss=step)
    rank.end()
    assert rank.curves()["loss"] == [(0, 1), (1, 2), (2, 3)]
    assert len(rank.curves()["found"]) == 3


# ---- sending


@pytest.mark.case("WM03")
def test_flood(rank: Rank) -> None:
    done = threading.Event()

    def io() -> None:
        wait_s = 0.0
        while not done.wait(wait_s):
            wait_s = rank.telemetry.pump()
        rank.telemetry.pump(final=True)

    thread = threading.Thread(target=io)
    thread.start()
    for step in range(100_000):
        log(step=step, loss=float(step), lr=1.0 / (step + 1))
    rank.telemetry.end()
    done.set()
    thread.join()
    curves = rank.curves()
    merged = rank.telemetry._merged
    assert len(curves["loss"]) + len(curves["lr"]) + merged == 200_000
    assert curves["loss"][-1] == (99_999, 99_999)
    assert [step for step, _ in curves["loss"]] == sorted(step for step, _ in curves["loss"])
    assert bool(merged) == any("merged" in text for text in rank.notices())
    assert [m.seq for m in rank.of(Metrics)] == list(range(len(rank.of(Metrics))))


def test_a_full_queue_keeps_the_last_of_each_name(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_WAITING", 10)
    for step in range(100):
        log(step=step, a=step, b=-step)
    log(c=1)
    rank.end()
    curves = rank.curves()
    assert curves["a"] == [(0, 0), (1, 1), (2, 2), (3, 3), (4, 4), (99, 99)]
    assert curves["b"][-1] == (99, -99)
    assert curves["c"] == [(0, 1)]
    assert rank.notices() == ["log(): 191 points merged into later ones, as they came faster than sent"]
    assert rank.of(Sample)[-1].values["merged_points"] == 191


@pytest.mark.case("WM12")
def test_the_end_sends_everything_before_anything_else(rank: Rank) -> None:
    for step in range(5):
        log(step=step, loss=float(step))
    rank.telemetry.end()
    assert rank.sent == []  # only pump sends
    rank.telemetry.pump()
    assert len(rank.curves()["loss"]) == 5
    assert isinstance(rank.sent[-1][0], Sample)
    count = len(rank.sent)
    rank.telemetry.end()
    rank.telemetry.pump(final=True)
    assert len(rank.sent) == count


def test_a_cell_that_reports_nothing_sends_nothing(rank: Rank) -> None:
    rank.telemetry.end()
    rank.telemetry.pump()
    assert rank.sent == []


def test_points_between_cells_belong_to_none(rank: Rank) -> None:
    rank.end()
    log(loss=1)  # a thread of the last cell
    rank.telemetry.pump()
    rank.run("second")
    log(loss=2)
    rank.end()
    assert rank.curves("second")["loss"] == [(0, 2)]
    assert rank.curves() == {}


def test_at_most_ten_messages_a_second(rank: Rank) -> None:
    waits = []
    for step in range(1000):
        log(loss=step)
        waits.append(rank.telemetry.pump())
    assert min(waits) >= 0.1
    began_s = rank.telemetry._began_s
    elapsed_s = module.monotonic() - began_s
    assert len(rank.of(Metrics)) <= elapsed_s / 0.1 + 1


def test_pump_sends_while_the_cell_runs(rank: Rank) -> None:
    log(loss=1)

    def arrived() -> bool:
        rank.telemetry.pump()
        return bool(rank.of(Metrics)) and bool(rank.of(Sample))

    wait_until(arrived, CELL_S, "a metric and a sample")


def test_threads_may_log(rank: Rank) -> None:
    def work(name: str) -> None:
        for value in range(2000):
            log(**{name: value})

    threads = [threading.Thread(target=work, args=(f"t{i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        rank.telemetry.pump()
    rank.end()
    assert Counter({name: len(curve) for name, curve in rank.curves().items()}) == {f"t{i}": 2000 for i in range(4)}


# ---- samples


def test_samples_say_what_is_not_available(rank: Rank) -> None:
    rank.telemetry.add_source("good", lambda: {"steps": 3, "bad_number": math.inf})
    rank.telemetry.add_source("bad", lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    log(loss=1)
    rank.end()
    rank.run("second")
    log(loss=1)
    rank.end()
    values = rank.of(Sample)[0].values
    assert values["steps"] == 3
    assert values["bad_number"] is None
    assert values["process_pss_bytes"] > 0
    assert values["process_uss_bytes"] <= values["process_rss_bytes"]
    assert values["allocated_bytes"] is values["device_used_bytes"] is values["load_percent"] is None
    assert isinstance(values["device_reason"], str)
    assert rank.notices() == ["bad: no longer measured (ZeroDivisionError: division by zero)"]


def test_bytes_of_a_model_follow_the_closed_form(rank: Rank) -> None:
    def bytes_now() -> list[int]:
        values = rank.telemetry.sample()
        return [values[f"{name}_bytes"] for name in ("parameters", "gradients", "optimizer")]

    model = torch.nn.Sequential(torch.nn.Linear(10, 20), torch.nn.Linear(20, 5))
    model[0].requires_grad_(False)  # frozen: seen as the model is called
    optimizer = torch.optim.Adam(model[1].parameters())
    model(torch.randn(4, 10)).sum().backward()
    optimizer.step()
    trained, frozen = 20 * 5 + 5, 10 * 20 + 20
    assert bytes_now() == [4 * (trained + frozen), 4 * trained, 2 * 4 * trained + 2 * 4]  # two moments, two counters
    gone = weakref.ref(model), weakref.ref(optimizer)
    del model, optimizer
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


def test_a_failed_allocation_is_explained(rank: Rank) -> None:
    lines = rank.telemetry.memory.explain_failure()
    assert lines[0].startswith("this process alone holds")
    assert "nbdist.fsdp()" in lines[-1]
    model = torch.nn.Linear(1024, 1024)
    optimizer = torch.optim.SGD(model.parameters())
    model(torch.ones(1, 1024)).sum().backward()
    optimizer.step()
    assert (
        "parameters 4.0 MiB, gradients 4.0 MiB, optimizer state 0.0 MiB" in rank.telemetry.memory.explain_failure()[1]
    )


# ---- track


def rows(rank: Rank) -> list[dict[str, Any]]:
    return list(rank.telemetry.sample()["progress"])


def test_track_counts_nested_loops(rank: Rank) -> None:
    for epoch in track(range(2), name="epoch"):
        for item in track(iter("abc"), total=3):
            if epoch == 1 and item == "c":
                assert [(r["name"], r["done"], r["total"], r["active"]) for r in rows(rank)] == [
                    ("epoch", 1, 2, True),
                    ("progress 2", 2, 3, True),
                ]
                assert rows(rank)[1]["left_s"] >= 0
    assert [(r["done"], r["active"], r["left_s"]) for r in rows(rank)] == [(2, False, None), (3, False, None)]
    rank.end()
    rank.run("second")
    assert rows(rank) == []


def test_track_passes_everything_through(monkeypatch: pytest.MonkeyPatch, rank: Rank) -> None:
    assert len(track([1, 2, 3])) == 3  # type: ignore[arg-type]
    loop = iter(track(x for x in range(10)))
    assert [next(loop), next(loop)] == [0, 1]
    assert (rows(rank)[0]["done"], rows(rank)[0]["total"], rows(rank)[0]["left_s"]) == (1, None, None)
    del loop
    gc.collect()
    assert rows(rank)[0]["active"] is False
    monkeypatch.setattr(module, "current", None)
    assert list(track(range(3), name="n")) == [0, 1, 2]


@pytest.mark.parametrize(
    "call",
    [
        lambda: track(5),  # type: ignore[arg-type]
        lambda: track([], total=-1),
        lambda: track([], total="3"),  # type: ignore[arg-type]
        lambda: track([], total=True),
        lambda: track([], name=3),  # type: ignore[arg-type]
    ],
)
def test_track_refuses(call: Any) -> None:
    with pytest.raises(InputError, match="takes"):
        call()


def test_a_loader_shows_its_progress(rank: Rank) -> None:
    loader = DataLoader(TensorDataset(torch.arange(10.0)), batch_size=2)
    batches = iter(loader)
    next(batches)
    next(batches)
    (row,) = rows(rank)
    assert (row["name"], row["done"], row["total"]) == ("batches", 2, 5)


# ---- outside of a rank


def elsewhere(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=CELL_S, check=False)


@pytest.mark.case("WM10")
def test_in_the_notebooks_kernel() -> None:
    code = """
import sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
from nbdist import log, track
assert list(track([1])) == [1]
try: log(step=0, loss=1.0)
except Exception as error: print(type(error).__name__, error)
assert "torch" not in sys.modules
"""
    done = elsewhere(code)
    assert done.stdout == (
        "NotRunningError log() works inside %%distributed cells, not in the notebook's own kernel\n"
    ), done.stderr


@pytest.mark.case("WM10")
def test_in_a_script() -> None:
    done = elsewhere("from nbdist import log; print(log(step=0, loss=1.0))")
    assert done.stdout == "None\n", done.stderr


def test_in_a_process_forked_from_a_rank() -> None:
    code = """
import os, torch
from nbdist.worker import telemetry
telemetry.current = telemetry.Telemetry(print, rank=0, device=torch.device("cpu"))
telemetry.current.begin("r", interval_s=0.1)
if (pid := os.fork()) == 0:
    telemetry.log(loss=1)
    os._exit(0)
os.waitpid(pid, 0)
print(telemetry.current is not None)
"""
    done = elsewhere(code)
    assert done.stdout == "True\n"
    assert "log() records nothing in a process forked from a rank" in done.stderr
