"""The dashboard without a browser: sentences, packed messages, the static form, and what is displayed when."""

from __future__ import annotations

import json
import math
import struct
import threading
import time
from typing import Any

import numpy as np
import pytest
from deadlines import wait_until
from simulated import add, make_run, sample

from nbdist.errors import InputError
from nbdist.notebook import dashboard as module
from nbdist.notebook import feed as feeds
from nbdist.notebook import figure, summary, units
from nbdist.notebook.dashboard import Dashboard, FrontEnd, static_data, table_data
from nbdist.notebook.feed import CHUNK, KEYFRAME, STEPS, TIMES, Feed, state
from nbdist.notebook.history import Run, compare
from nbdist.notebook.summary import findings, memory, memory_note, rank_rows

GIB = 1024**3
EVEN = {"data_s": 0.01, "forward_s": 0.02, "backward_s": 0.03, "wait_s": 0.005, "optimizer_s": 0.004, "rest_s": 0.001}


def run(ranks: int = 2, **fields: Any) -> Run:
    return make_run(ranks, **({"started_s": 1000.0} | fields))


def texts(one: Any) -> list[str]:
    return [found.text for found in findings(one)]


# ---- sentences


@pytest.mark.parametrize("part", ["data_s", "forward_s", "backward_s", "optimizer_s"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_straggler_and_its_part_are_named(part, ranks):
    one = run(ranks)
    for rank in range(ranks):
        slow = {part: EVEN[part] + 0.2} if rank == 1 else {"wait_s": EVEN["wait_s"] + 0.2}
        sample(one.history, rank, **(EVEN | slow))
    late = summary.straggler(rank_rows(one))
    assert late is not None
    assert (late[0].rank, late[1]) == (1, part)
    assert late[2] == pytest.approx(0.2)
    expected = (
        f"Rank 1 is behind: its {summary.PARTS[part]} takes {(EVEN[part] + 0.2) * 1e3:.3g} ms a step, 200 ms more"
    )
    assert any(text.startswith(expected) for text in texts(one))


def test_nobody_is_named_in_an_even_run():
    one = run(4)
    for rank in range(4):
        sample(one.history, rank, **{key: value * (1 + 0.02 * rank) for key, value in EVEN.items()})
    assert summary.straggler(rank_rows(one)) is None
    assert "All ranks are even: none holds the others up." in texts(one)


def test_a_rank_that_nobody_waits_for_is_not_named():
    one = run(2)
    sample(one.history, 0, **(EVEN | {"backward_s": EVEN["backward_s"] + 0.02}))
    sample(one.history, 1, **(EVEN | {"forward_s": EVEN["forward_s"] + 0.02}))
    assert summary.straggler(rank_rows(one)) is None


def test_one_restless_reading_names_nobody():
    one = run(2)
    for k in range(summary.READINGS):
        sample(one.history, 0, k, **EVEN)
        late = k == summary.READINGS - 1
        sample(one.history, 1, k, **(EVEN | ({"data_s": EVEN["data_s"] + 0.05, "wait_s": 0.0} if late else {})))
    assert summary.straggler(rank_rows(one)) is None


def test_waiting_for_data_is_named():
    one = run(1)
    sample(one.history, 0, **(EVEN | {"data_s": 0.2}))
    assert any("Waiting for data takes 77% of a step" in text for text in texts(one))


@pytest.mark.case("WM01")
def test_a_value_that_is_not_finite_is_named_with_rank_and_step():
    one = run()
    add(one.history, 0, loss=[(s, 0.1 * s) for s in range(10)])
    add(one.history, 1, loss=[(s, math.nan if 3 <= s < 6 else 0.1 * s) for s in range(10)])
    assert "loss is not finite on rank 1: nan first at step 3 (3 values so far)." in texts(one)
    assert rank_rows(one)[1].last == {"loss": 0.1 * 9}


@pytest.mark.case("WM06")
def test_steps_that_went_back_are_named():
    one = run()
    add(one.history, 0, loss=[(5, 1.0), (0, 1.0)])
    assert any("went back to 0 on rank 0" in text for text in texts(one))


@pytest.mark.case("WM14")
def test_a_rank_that_died_is_named_and_its_curve_stays():
    one = run(states={0: "failed", 1: "died"}, status="error", ended_s=1001.0)
    for rank in (0, 1):
        add(one.history, rank, loss=[(s, float(s)) for s in range(5)])
        sample(one.history, rank, device_reason="no NVIDIA driver found", load_percent=None, process_uss_bytes=10**8)
    assert "Rank 1 died after step 4; its curves end there." in texts(one)
    heads, rows = summary.table(one)
    assert [row[heads.index("state")] for row in rows] == ["failed", "died"]
    assert "GPU load" not in heads
    note = "Each process uses up to 95.4 MiB, shared pages left out. No GPU: no NVIDIA driver found."
    assert memory_note(one) == note


@pytest.mark.case("WM08")
def test_ranks_that_log_nothing_are_not_failed():
    one = run(3)
    add(one.history, 0, loss=[(s, 1 / (s + 1)) for s in range(20)])
    assert [row.state for row in rank_rows(one)] == ["running"] * 3
    assert [row.last for row in rank_rows(one)] == [{"loss": 0.05}, {}, {}]
    assert not [found for found in findings(one) if found.level in ("bad", "warn")]


@pytest.mark.case("DD13")
def test_the_mean_of_all_ranks_is_called_so():
    one = run()
    for rank in (0, 1):
        add(one.history, rank, loss=[(s, 1.0 + 2 * rank) for s in range(10)])
    (line,) = [line for line in summary.text_lines(one) if line.startswith("loss")]
    assert line == "loss  [0] 1  [1] 3  mean of 2 ranks 2"


@pytest.mark.case("ME08")
def test_the_three_numbers_of_a_gpu_are_told_apart():
    values = {
        "allocated_bytes": 10 * GIB, "reserved_bytes": 18 * GIB, "inactive_split_bytes": 6 * GIB,
        "device_used_bytes": int(21.5 * GIB), "device_total_bytes": 24 * GIB, "alloc_retries": 14,
    }  # fmt: skip
    found = memory(values)
    assert found.parts == {"tensors": 10 * GIB, "cached by torch": 8 * GIB, "outside torch": int(3.5 * GIB)}
    assert found.used == sum(found.parts.values()) == int(21.5 * GIB)
    one = run(1, device="cuda")
    sample(one.history, 0, **values)
    note = memory_note(one)
    assert note is not None
    for expected in ("18.00 GiB", "10.00 GiB in tensors", "8.00 GiB cached", "6.00 GiB lie in pieces", "expandable_segments:True",
                     "21.50 GiB in use", "3.50 GiB are outside torch"):  # fmt: skip
        assert expected in note
    assert "leak" not in note
    assert any("empty torch's cache 14 times" in text for text in texts(one))


def test_memory_that_is_not_known_is_never_zero():
    found = memory({"allocated_bytes": None, "process_uss_bytes": None})
    assert (found.parts, found.used, found.limit, found.peak) == ({}, None, None, None)
    assert units.bytes_text(None) == units.number_text(None) == units.seconds_text(None) == "n/a"


def test_on_a_cpu_the_model_is_told_apart_from_the_process():
    states = {"parameters_bytes": 4000, "gradients_bytes": 4000, "optimizer_bytes": 8000}
    found = memory({"process_uss_bytes": 10**8, **states})
    assert found.parts == {"parameters": 4000, "gradients": 4000, "optimizer state": 8000}
    assert found.used == 10**8
    assert memory({"process_uss_bytes": 10**8}).parts == {"process": 10**8}
    assert units.bytes_text(4096) == "4.0 KiB"


def test_progress_is_the_slowest_rank_of_the_outer_loop_or_the_loader():
    one = run()
    for rank, done in ((0, 7), (1, 5)):
        rows = [{"name": "epoch", "done": done, "total": 10, "left_s": 3.0}, {"name": "inner", "done": 0, "total": 4}]
        sample(one.history, rank, progress=rows, loader={"name": "batches", "done": 1, "total": 2})
    going = summary.progress(one)
    assert going is not None
    assert (going.name, going.done, going.total, going.left_s, going.fraction) == ("epoch", 5, 10, 3.0, 0.5)
    two = run(1)
    sample(two.history, 0, progress=[], loader={"name": "batches", "done": 1, "total": None, "left_s": None})
    going = summary.progress(two)
    assert going is not None
    assert (going.name, going.fraction) == ("batches", None)
    assert summary.progress(run()) is None


def test_unknown_keys_and_odd_values_do_no_harm():
    one = run()
    sample(one.history, 0, progress="soon", throttle=None, data_s=None, steps="many", new_key={"deep": [1]})
    assert texts(one) == []
    json.dumps(state(one), allow_nan=False)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.4, "59 s"), (185, "3 min 05 s"), (7620, "2 h 07 min"), (math.inf, "n/a")]
)
def test_durations(seconds, text):
    assert units.duration_text(seconds) == text


def test_ranks_are_folded():
    assert units.ranks_text([3]) == "rank 3"
    assert units.ranks_text([5, 0, 2, 1]) == "ranks 0-2, 5"


# ---- what is sent


class Page:
    """Reads messages as the page does, with another unpacker than the packer's."""

    def __init__(self) -> None:
        self.curves: dict[tuple[str, int], dict[str, Any]] = {}
        self.state: dict[str, Any] = {}
        self.bytes = 0

    def receive(self, message: tuple[dict[str, Any], list[bytes]] | None) -> None:
        if message is None:
            return
        content, buffers = message
        self.bytes += len(json.dumps(content, allow_nan=False)) + sum(map(len, buffers))
        self.state = content["state"] or self.state
        if not buffers:
            return
        floats = np.frombuffer(buffers[1], dtype="<f4")
        at = 0
        for record in struct.iter_unpack("<HHIIIIIdffff", buffers[0]):
            name, rank, flags, n, before, total, every, step0, stride, t0, t1, _ = record
            values = floats[at : at + n]
            at += n
            steps = step0 + stride * np.arange(n)
            if flags & STEPS:
                steps = step0 + floats[at : at + n]
                at += n
            times = np.linspace(t0, t1, n)
            if flags & TIMES:
                times = floats[at : at + n]
                at += n
            key = (content["names"][name], content["ranks"][rank])
            curve = self.curves.setdefault(key, {"total": 0, "every": 1, "points": np.empty((3, 0)), "gap": False})
            if flags & KEYFRAME or before == 0:
                if curve["total"] == total and not curve["gap"]:
                    continue
                curve.update(points=np.empty((3, 0)), gap=False)
            elif before != curve["total"]:
                curve["gap"] = True
            curve["points"] = np.concatenate([curve["points"], np.stack([steps, times, values])], axis=1)
            curve.update(total=total, every=max(curve["every"], every))
        assert at == len(floats)


def test_the_page_gets_every_point():
    one = run()
    feed, page = Feed(one), Page()
    for k in range(10):
        for rank in (0, 1):
            add(one.history, rank, k, loss=[(20 * k + i, k + i / 20 + rank) for i in range(20)], odd=[(k * k, 1e300)])
        page.receive(feed.message(k * 0.2))
    for rank in (0, 1):
        curve = page.curves["loss", rank]
        steps, times, values = one.history.series("loss", rank)
        assert curve["points"][0].tolist() == steps.tolist()
        np.testing.assert_allclose(curve["points"][1], times - one.started_s, rtol=1e-6)
        np.testing.assert_allclose(curve["points"][2], values, rtol=1e-6)
        assert page.curves["odd", rank]["points"][0].tolist() == [k * k for k in range(10)]
        assert np.isfinite(page.curves["odd", rank]["points"][2]).all()
    assert CHUNK.itemsize == 48


def test_nothing_new_sends_nothing():
    one = run(ended_s=1001.0)
    add(one.history, 0, loss=[(0, 1.0)])
    feed = Feed(one)
    assert feed.message(0.0) is not None
    feed.message(10.0)  # a keyframe
    assert feed.message(20.0) is None


def test_a_lost_message_is_healed_by_a_keyframe(monkeypatch):
    monkeypatch.setattr(feeds, "KEYFRAME_BYTES_PER_S", 0)
    one = run(1)
    feed, page = Feed(one), Page()
    now = 0.0
    for k in range(6):
        add(one.history, 0, k, loss=[(10 * k + i, float(i)) for i in range(10)])
        message = feed.message(now)
        now += 0.01
        if k != 2:
            page.receive(message)
    assert page.curves["loss", 0]["gap"]
    monkeypatch.undo()
    while page.curves["loss", 0]["gap"] and now < 10:
        now += 0.2
        page.receive(feed.message(now))
    assert page.curves["loss", 0]["points"][0].tolist() == list(range(60))


def test_a_page_opened_again_gets_the_whole_run():
    one = run()
    feed = Feed(one)
    for k in range(5):
        add(one.history, 0, k, loss=[(k, 1.0)])
        feed.message(float(k))
    feed.restart()
    page = Page()
    page.receive(feed.message(9.0))
    assert page.curves["loss", 0]["points"][0].tolist() == [0, 1, 2, 3, 4]
    assert page.state["status"] == "running"


def test_a_flood_is_thinned_and_says_so_and_the_last_value_is_exact():
    one = run()
    feed, page = Feed(one), Page()
    for k in range(10):
        for rank in (0, 1):
            add(one.history, rank, k, loss=[(10_000 * k + i, float(10_000 * k + i)) for i in range(10_000)])
        page.receive(feed.message(k * 0.1))
    assert page.bytes < feeds.BURST + 1.2 * feeds.BYTES_PER_S
    one.ended_s = 1001.0
    page.receive(feed.message(2.0))
    assert page.state["columns"]["last"] == {"loss": [99_999, 99_999]}
    assert page.curves["loss", 0]["points"][0, -1] == 99_999
    assert page.curves["loss", 0]["total"] == 100_000
    assert page.curves["loss", 0]["points"].shape[1] < 100_000


def test_a_thinned_history_is_sent_whole_again(monkeypatch):
    monkeypatch.setattr("nbdist.notebook.history.POINTS_PER_SERIES", 1000)
    one = run(1)
    feed, page = Feed(one), Page()
    for k in range(30):
        add(one.history, 0, k, loss=[(100 * k + i, 1.0) for i in range(100)])
        if k in (5, 29):
            page.receive(feed.message(float(k)))
    curve = page.curves["loss", 0]
    assert curve["total"] == 3000
    assert (curve["points"][0, 0], curve["points"][0, -1]) == (0, 2999)
    assert curve["every"] > 1


@pytest.mark.case("WM01")
def test_what_is_sent_is_json_without_nan():
    one = run()
    add(one.history, 0, loss=[(0, math.nan)], acc=[(0, math.inf)], other=[(0, -math.inf)])
    sample(one.history, 0, load_percent=math.nan)
    sent = json.dumps(Feed(one).message(0.0)[0], allow_nan=False)  # type: ignore[index]
    last = json.loads(sent)["state"]["columns"]["last"]
    assert last == {"loss": ["nan", None], "acc": ["inf", None], "other": ["-inf", None]}


def test_ranks_are_placed_by_their_place_in_the_run():
    one = run(2, world_size=8)
    one.ranks = [3, 5]
    add(one.history, 5, loss=[(0, 1.0)])
    add(one.history, 7, loss=[(0, 9.0)])  # not of this run
    page = Page()
    page.receive(Feed(one).message(0.0))
    assert list(page.curves) == [("loss", 5)]


# ---- the static form


def test_ranks_of_different_steps_meet_on_one_grid():
    a = (np.array([0.0, 2, 4, 6, 8]), np.array([0.0, 2, 4, 6, 8]))
    b = (np.array([1.0, 3, 5]), np.array([1.0, 3, 5]))
    x, values = figure.grid([a, b, (np.empty(0), np.empty(0))])
    assert values.shape == (3, len(x))
    known = np.isfinite(values[0])
    np.testing.assert_allclose(values[0][known], x[known], atol=1.0)
    assert np.isnan(values[2]).all()
    low, mean, high = figure.spread(np.array([[1.0, np.nan, np.nan], [3.0, 4.0, np.nan]]))
    assert (low[:2].tolist(), mean[:2].tolist(), high[:2].tolist()) == ([1, 4], [2, 4], [3, 4])
    assert np.isnan([low[2], mean[2], high[2]]).all()


def many(ranks: int) -> Any:
    one = run(ranks, ended_s=1010.0, status="ok", name="a $1 <b>run</b>")
    rng = np.random.default_rng(0)
    for rank in range(ranks):
        curve = [(s, float(np.exp(-s / 20) + rng.normal(0, 0.02))) for s in range(60)]
        add(one.history, rank, loss=curve, lr=curve, accuracy=curve, more=curve)
        sample(one.history, rank, steps=400, steps_per_s=20.0, process_uss_bytes=3e8, parameters_bytes=10**8, **EVEN)
    return one


@pytest.mark.parametrize("ranks", [1, 4, 64])
def test_the_static_form_is_light(ranks):
    data = static_data(many(ranks))
    assert len(data["image/png"]) < 200_000  # 150 kB, in base64
    assert data["text/plain"].startswith("a $1 <b>run</b>")


@pytest.mark.case("OU18")
def test_the_table_shows_markup_as_it_is():
    one = many(2)
    add(one.history, 0, 1, **{"<img src=x onerror=alert(1)>": [(0, 1.0)]})
    one.states[1] = "</td><script>"
    html = table_data(one)["text/html"]
    assert "<script>" not in html
    assert "<img" not in html
    assert "&lt;/td&gt;&lt;script&gt;" in html
    figure.draw(one)


def test_very_many_ranks_are_folded_in_the_table():
    one = many(64)
    one.states[7] = "died"
    heads, rows = summary.table(one)
    assert [row[0] for row in rows] == ["7", "smallest of 64", "median of 64", "largest of 64"]
    assert rows[1][heads.index("state")] == "63 ok, 1 died"


@pytest.mark.case("WM12")
def test_a_run_of_a_few_points_or_none_is_drawn():
    one = run(ended_s=1000.1, status="error")
    assert figure.png(figure.draw(one)).startswith(b"\x89PNG")
    for rank in (0, 1):
        add(one.history, rank, loss=[(0, 1.0)], flat=[(0, 1.0), (1, math.nan)])
    drawn = figure.draw(one)
    assert figure.png(drawn).startswith(b"\x89PNG")
    assert drawn._repr_png_().startswith(b"\x89PNG")


def test_curves_are_broken_where_steps_go_back():
    x, y = figure._broken(np.array([0.0, 1, 2, 0, 1]), np.array([1.0, 2, 3, 4, 5]))
    assert np.isnan(x[3])
    assert np.isnan(y[3])
    assert len(x) == 6


def test_runs_are_compared():
    one, two = many(2), many(4)
    two.name = "run 2"
    drawn = compare(one, two)
    axes = drawn.axes
    assert [line.get_label() for line in axes[0].lines] == [r"a \$1 <b>run</b>", "run 2"]
    assert figure.png(drawn).startswith(b"\x89PNG")
    assert figure.png(compare(run(), run())).startswith(b"\x89PNG")


def test_the_users_style_changes_nothing():
    import matplotlib

    one = many(2)
    plain = figure.png(figure.draw(one))
    with matplotlib.rc_context({"text.color": "white", "axes.facecolor": "black", "lines.linewidth": 9}):
        assert figure.png(figure.draw(one)) == plain


# ---- what is displayed, and when


class Shown:
    """Stands where IPython's display is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.outputs: dict[str, dict[str, Any]] = {}
        self.order: list[tuple[str, bool]] = []
        monkeypatch.setattr("IPython.display.display", self)

    def __call__(self, data: dict[str, Any], *, raw: bool, display_id: str, update: bool) -> None:
        assert raw
        assert update == (display_id in self.outputs)
        self.outputs[display_id] = data
        self.order.append((threading.current_thread().name, update))


class Widget:
    """Stands where the anywidget is: it keeps what was sent."""

    model_id = "m"

    def __init__(self, meta: dict[str, Any]) -> None:
        json.dumps(meta, allow_nan=False)
        self.meta = meta
        self.sent: list[tuple[dict[str, Any], list[bytes]]] = []
        self.closed = False
        self.threads: set[str] = set()

    def on_msg(self, callback: Any) -> None:
        self.hear = lambda content: callback(self, content, [])

    def send(self, content: dict[str, Any], buffers: list[bytes]) -> None:
        assert not self.closed
        json.dumps(content, allow_nan=False)
        self.sent.append((content, buffers))
        self.threads.add(threading.current_thread().name)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def shown(monkeypatch):
    monkeypatch.setattr(module, "_widget_class", lambda: Widget)
    monkeypatch.setattr(module, "front_end", FrontEnd())
    monkeypatch.setattr(module, "_open_afterwards", set())
    return Shown(monkeypatch)


def test_the_widget_becomes_a_picture_and_a_table(shown):
    one = many(2)
    one.ended_s = None
    board = Dashboard(one, mode="widget")
    board.push()  # before it is open: nothing
    board.open()
    board.open()
    assert board.opened
    assert module.WIDGET_VIEW in shown.outputs[board._display_id]
    assert shown.outputs[board._display_id + "table"] == {}
    widget = board._widget
    one.ended_s = time.time()
    board.finish()
    board.finish()
    assert set(shown.outputs[board._display_id]) == {"image/png", "text/plain"}
    assert set(shown.outputs[board._display_id + "table"]) == {"text/html", "text/plain"}
    assert widget.closed
    assert not board.opened
    board.push(now=True)


def test_pushes_from_a_thread_are_few_and_complete(shown, monkeypatch):
    one = run()
    board = Dashboard(one, mode="widget")
    board.open()
    monkeypatch.setattr(module, "FEW_RANKS_S", 3600.0)
    for k in range(100):
        add(one.history, 0, k, loss=[(k, 1.0)])
        board.push()
    assert len(board._widget.sent) <= 1
    thread = threading.Thread(target=lambda: board.push(now=True), name="sender")
    thread.start()
    thread.join()
    assert board._widget.threads == {"MainThread", "sender"} or board._widget.threads == {"sender"}
    page = Page()
    for message in board._widget.sent:
        page.receive(message)
    assert page.curves["loss", 0]["total"] == 100
    one.ended_s = time.time()
    board.finish()


def test_finishing_on_another_thread_returns_at_once_and_draws(shown):
    one = many(2)
    board = Dashboard(one, mode="widget")
    board.open()
    thread = threading.Thread(target=board.finish)
    thread.start()
    thread.join()
    wait_until(lambda: board._widget.closed, what="the widget closed")
    assert "image/png" in shown.outputs[board._display_id]
    wait_until(lambda: not any(t.name == "nbdist figure" for t in threading.enumerate()))


def test_a_page_that_loads_again_gets_everything_again(shown):
    one = run()
    add(one.history, 0, loss=[(0, 1.0)])
    board = Dashboard(one, mode="widget")
    board.open()
    board.set_text(1, "hello")
    board.push(now=True)
    before = len(board._widget.sent)
    board._widget.hear({"type": "ready"})
    assert len(board._widget.sent) == before
    assert module.front_end.answers is True
    board._widget.hear({"type": "ready"})
    page = Page()
    for message in board._widget.sent[before:]:
        page.receive(message)
    assert page.curves["loss", 0]["total"] == 1
    assert any(content.get("text") == {"1": "hello"} for content, _ in board._widget.sent[before:])
    for odd in (None, [], {"type": 7}, "x"):
        board._widget.hear(odd)
    board.finish()


def test_stop_reaches_the_run_in_the_background(shown):
    stopped: list[int] = []
    board = Dashboard(run(), mode="widget", on_stop=lambda: stopped.append(1))
    board.open()
    assert board._widget.meta["stop"] == "message"
    board._widget.hear({"type": "stop"})
    assert stopped == [1]
    board.finish()


def test_a_finished_run_is_shown_again_until_it_is_kept(shown):
    one = many(2)
    first, second = Dashboard(one, mode="widget"), Dashboard(one, mode="widget")
    first.open()
    assert first._widget.meta["keep"]
    assert first.opened
    second.open()
    assert not first.opened
    second._widget.hear({"type": "keep"})
    assert not second.opened
    assert "image/png" in shown.outputs[second._display_id]


def test_without_anywidget_there_is_text_with_the_reason(shown, monkeypatch):
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(module, "_in_kernel", lambda: True)
    one = run()
    add(one.history, 0, loss=[(0, 1.5)])
    board = Dashboard(one)
    board.open()
    assert board.mode == "text"
    assert "pip install anywidget" in shown.outputs[board._display_id]["text/plain"]
    add(one.history, 0, 1, loss=[(1, 1.25)])
    board.push(now=True)
    assert "[0] 1.25" in shown.outputs[board._display_id]["text/plain"]
    one.ended_s = time.time()
    board.finish()
    assert "image/png" in shown.outputs[board._display_id]
    assert "pip install anywidget" in shown.outputs[board._display_id + "table"]["text/plain"]


class Loop:
    """A kernel's event loop whose time passes by hand."""

    def __init__(self) -> None:
        self.due: list[Any] = []

    def call_later(self, delay_s: float, callback: Any) -> None:
        self.due.append(callback)

    def is_closed(self) -> bool:
        return False

    def call_soon_threadsafe(self, callback: Any, *args: Any) -> None:
        self.due.append(lambda: callback(*args))

    def turn(self) -> None:
        due, self.due = self.due, []
        for callback in due:
            callback()


def test_a_page_that_never_answers_is_noticed_when_the_kernel_is_idle(monkeypatch):
    counts = [1]
    monkeypatch.setattr(module, "_execution_count", lambda: counts[0])
    page, loop, told = FrontEnd(), Loop(), []
    page.settle(loop, lambda: told.append(1))  # type: ignore[arg-type]
    page.settle(loop, lambda: told.append(2))  # type: ignore[arg-type]
    for _ in range(3 * module.SILENT_TICKS):
        counts[0] += 1  # cells sent together run one after another
        loop.turn()
    assert not told
    for _ in range(module.SILENT_TICKS):
        loop.turn()
    assert told == [1, 2]
    assert page.answers is False
    assert page.reason is not None
    assert "Jupyter server" in page.reason
    page.heard()  # the page was loaded again, with anywidget
    assert page.reason is None


def test_a_page_that_answers_is_not_suspected(monkeypatch):
    monkeypatch.setattr(module, "_execution_count", lambda: 1)
    page, loop, told = FrontEnd(), Loop(), []
    page.settle(loop, lambda: told.append(page.reason))  # type: ignore[arg-type]
    page.heard()
    loop.turn()
    assert told == [None]
    assert not loop.due
    page.settle(loop, lambda: told.append(page.reason))  # type: ignore[arg-type]
    loop.turn()
    assert told == [None, None]


def test_the_widget_stays_until_the_page_could_answer(shown, monkeypatch):
    monkeypatch.setattr(module, "_execution_count", lambda: 1)
    one = many(2)
    board = Dashboard(one, mode="widget")
    board.open()
    loop = Loop()
    board._loop = loop  # type: ignore[assignment]
    board.finish()
    loop.turn()
    loop.turn()
    assert not board._widget.closed
    board._widget.hear({"type": "ready"})
    loop.turn()
    assert board._widget.closed
    assert "anywidget" not in shown.outputs[board._display_id + "table"]["text/plain"]


def test_lines_where_nothing_can_be_updated(shown):
    written: list[str] = []
    one = run()
    board = Dashboard(one, mode="lines", write=written.append)
    board.open()
    assert not written
    for rank in (0, 1):
        add(one.history, rank, loss=[(12, 0.5 + rank)])
    board.push(now=True)
    assert len(written) == 1
    assert "step 12 · loss  [0] 0.5  [1] 1.5  mean of 2 ranks 1" in written[0]
    one.ended_s, one.status = time.time(), "ok"
    board.finish()
    assert "finished after" in written[-1]
    assert not shown.outputs


def test_a_terminal_updates_one_line(shown):
    written: list[str] = []
    one = run()
    board = Dashboard(one, mode="terminal", write=written.append)
    board.open()
    add(one.history, 0, loss=[(1, 0.5)])
    board.push(now=True)
    assert written[0].startswith("\r\x1b[K")
    assert "\n" not in written[0]
    board.finish()
    assert written[-1].endswith("\n")


def test_an_unknown_mode_says_what_there_is():
    with pytest.raises(InputError, match="mode is one of auto, widget, text, terminal, lines, not 'fast'"):
        Dashboard(run(), mode="fast")
