from __future__ import annotations

import csv
import json
import math
from typing import Any

import numpy as np
import pytest
from simulated import add, make_run, sample

from nbdist.errors import InputError
from nbdist.notebook import history as module
from nbdist.notebook.history import History, Run, thin
from nbdist.wire.messages import Metrics


def run(ranks: int = 2, **fields: Any) -> Run:
    return make_run(ranks, **({"started_s": 1000.0} | fields))


def test_points_come_back_as_they_were_sent():
    history = History()
    add(history, 0, loss=[(0, 2.0), (1, 1.5)])
    add(history, 0, 1, loss=[(2, 1.25)], lr=[(2, 0.1)])
    steps, times, values = history.series("loss", 0)
    assert steps.tolist() == [0, 1, 2]
    assert times.tolist() == [1000, 1001, 1002]
    assert values.tolist() == [2.0, 1.5, 1.25]
    assert history.names() == ["loss", "lr"]
    assert history.last("loss") == {0: 1.25}
    assert history.total("loss", 0) == 3
    assert not history.lost


def test_readers_cannot_write():
    history = History()
    add(history, 0, loss=[(0, 2.0)])
    with pytest.raises(ValueError, match="read-only"):
        history.series("loss", 0)[2][0] = 5.0


def test_a_reader_keeps_what_it_has_while_the_series_grows_and_is_thinned(monkeypatch):
    monkeypatch.setattr(module, "POINTS_PER_SERIES", 1000)
    history = History()
    add(history, 0, loss=[(0, 0.0), (1, 1.0)])
    _, _, values = history.series("loss", 0)
    add(history, 0, 1, loss=[(i, float(i)) for i in range(2, 5000)])
    assert values.tolist() == [0.0, 1.0]


def test_loss_comes_first():
    history = History()
    add(history, 0, lr=[(0, 1)], val_loss=[(0, 1)], loss=[(0, 1)])
    assert history.names() == ["loss", "val_loss", "lr"]


@pytest.mark.case("WM05")
def test_names_may_differ_by_rank():
    history = History()
    add(history, 0, loss=[(0, 10.0)], only0=[(0, -1.0)])
    add(history, 1, loss=[(0, 20.0)], only1=[(0, -2.0)], only1b=[(0, -3.0)])
    assert history.ranks("only0") == [0]
    assert history.ranks("only1") == [1]
    assert history.last("only1") == {1: -2.0}
    assert history.last("only1b") == {1: -3.0}
    assert history.last("loss") == {0: 10.0, 1: 20.0}


@pytest.mark.case("WM01")
def test_values_that_are_not_finite_are_kept_and_named():
    history = History()
    odd = {3: math.nan, 4: math.inf, 5: -math.inf}
    add(history, 0, loss=[(s, 0.1 * s) for s in range(10)])
    add(history, 1, loss=[(s, odd.get(s, 0.1 * s)) for s in range(10)])
    (bad,) = history.non_finite()
    assert (bad.name, bad.rank, bad.step, bad.count) == ("loss", 1, 3, 3)
    assert math.isnan(bad.value)
    assert np.isfinite(history.series("loss", 1)[2]).tolist() == [True] * 3 + [False] * 3 + [True] * 4
    assert history.last("loss") == {0: 0.1 * 9, 1: 0.1 * 9}


@pytest.mark.case("WM06")
def test_steps_may_differ_repeat_and_go_back():
    history = History()
    for rank, count in ((0, 3), (1, 8)):
        add(history, rank, loss=[(s, float(s)) for s in range(count)] + [(2, 20.0), (2, 21.0)])
        add(history, rank, 1, loss=[(s, 0.5) for s in range(3)] + [(3, 0.25)])
    assert history.total("loss", 0) == 3 + 2 + 4
    assert history.total("loss", 1) == 8 + 2 + 4
    # rank 0 goes on with step 2 and goes back to 0 later; rank 1 had reached 7 and goes back to 2
    assert history.turned_back == {("loss", 0): 0.0, ("loss", 1): 2.0}
    assert history.last("loss") == {0: 0.25, 1: 0.25}


def test_lost_messages_are_counted():
    history = History()
    for seq in (0, 1, 4, 5):
        add(history, 0, seq, loss=[(seq, 1.0)])
    add(history, 1, 0, loss=[(0, 1.0)])
    assert history.lost == {0: 2}


def test_a_buffer_of_the_wrong_size_is_refused():
    with pytest.raises(InputError, match="expected 3 x 2 numbers, got 3"):
        History().add_metrics(0, Metrics(run_id="r", seq=0, series=[{"name": "a", "n": 2}]), [np.zeros(3).tobytes()])


def test_thinning_keeps_ends_peaks_and_gaps():
    n = 10_000
    steps = np.arange(n, dtype=float)
    values = np.sin(steps / 500)
    values[1234], values[4321], values[5555] = 50.0, -50.0, np.nan
    few = thin(steps, steps, values, 500)
    assert len(few[0]) <= 520
    assert (few[0][0], few[0][-1]) == (0, n - 1)
    assert (np.diff(few[0]) > 0).all()
    assert np.nanmax(few[2]) == 50
    assert np.nanmin(few[2]) == -50
    assert np.isnan(few[2]).sum() == 1


def test_a_short_series_is_not_thinned():
    steps = np.arange(10.0)
    assert thin(steps, steps, steps, 10)[0] is steps


def test_a_million_points_are_bounded_and_say_that_they_are_thinned():
    history = History()
    block = np.arange(50_000.0)
    for k in range(20):
        steps = block + 50_000 * k
        points = np.stack([steps, steps, np.where(steps == 123_456, 99.0, 1.0)])
        message = Metrics(run_id="r", seq=k, series=[{"name": "loss", "n": len(steps)}])
        history.add_metrics(0, message, [points.tobytes()])
    steps, _, values = history.series("loss", 0)
    assert history.total("loss", 0) == 1_000_000
    assert len(steps) <= module.POINTS_PER_SERIES
    assert history.thinned("loss", 0) > 1
    assert (steps[0], steps[-1]) == (0, 999_999)
    assert values.max() == 99.0


def test_with_many_series_each_keeps_less(monkeypatch):
    monkeypatch.setattr(module, "POINTS", 10_000)
    monkeypatch.setattr(module, "MIN_POINTS", 100)
    history = History()
    for seq in range(10):
        for rank in range(20):
            add(history, rank, seq, loss=[(i + 200 * seq, 1.0) for i in range(200)])
    assert sum(len(history.series("loss", rank)[0]) for rank in range(20)) <= 10_000
    assert history.thinned("loss", 19) > 1


def test_since_gives_what_is_new_until_it_is_thinned(monkeypatch):
    monkeypatch.setattr(module, "POINTS_PER_SERIES", 100)
    history = History()
    assert history.since("loss", 0, 0)[1] == 0
    add(history, 0, loss=[(i, float(i)) for i in range(60)])
    points, total = history.since("loss", 0, 50)
    assert points is not None
    assert points[0].tolist() == list(range(50, 60))
    assert total == 60
    add(history, 0, 1, loss=[(i, float(i)) for i in range(60, 120)])
    assert history.since("loss", 0, 60) == (None, 120)
    add(history, 0, 2, loss=[(120, 1.0)])
    points, total = history.since("loss", 0, 120)
    assert points is not None
    assert points[0].tolist() == [120]
    whole, counted = history.whole("loss", 0)
    assert (whole[0, -1], counted) == (120, 121)


def test_samples_are_kept_merged_and_as_readings_over_time():
    history = History()
    sample(history, 0, 10.0, steps=5, used_bytes=100, reason=None, nested={"a": 1.5}, flag=True, odd=["x"])
    sample(history, 0, 11.0, steps=6, used_bytes=200)
    assert history.samples[0]["reason"] is None
    assert history.samples[0]["used_bytes"] == 200
    assert history.samples[0]["nested"] == {"a": 1.5}
    steps, times, values = history.reading("used_bytes", 0)
    assert (steps.tolist(), times.tolist(), values.tolist()) == ([5, 6], [10, 11], [100, 200])
    assert history.reading("nested.a", 0)[2].tolist() == [1.5]
    assert len(history.reading("flag", 0)[2]) == 0
    assert len(history.reading("never", 3)[2]) == 0


def test_readings_are_bounded_and_may_gain_names(monkeypatch):
    monkeypatch.setattr(module, "READINGS_PER_RANK", 128)
    history = History()
    for k in range(1000):
        late = {f"name{i}": k for i in range(50)} if k > 500 else {}
        sample(history, 0, float(k), steps=k, used=2.0 * k, **late)
    steps, times, values = history.reading("used", 0)
    assert 50 < len(values) <= 128
    assert (steps[-1], times[-1], values[-1]) == (999, 999, 1998)
    assert (values == 2 * steps).all()
    assert (np.diff(times) > 0).all()
    assert history.reading("name49", 0)[2][-1] == 999
    assert history.reading("name49", 0)[0][0] > 500


def test_version_changes_when_something_arrives():
    history = History()
    seen = [history.version]
    add(history, 0, loss=[(0, 1)])
    seen.append(history.version)
    sample(history, 0, a=1)
    seen.append(history.version)
    assert len(set(seen)) == 3


def test_an_unknown_series_names_what_there_is():
    history = History()
    add(history, 0, loss=[(0, 1)])
    with pytest.raises(InputError, match="no metric 'accuracy' of rank 1; there is: 'loss' of rank 0"):
        history.series("accuracy", 1)


def test_rows_csv_and_dataframe_agree(tmp_path):
    pandas = pytest.importorskip("pandas")
    history = History()
    add(history, 0, loss=[(0, 2.0), (1, math.nan)], acc=[(1, 0.5)])
    add(history, 1, loss=[(0.5, 3.0)])
    rows = history.rows()
    assert rows[0] == {"rank": 0, "metric": "loss", "step": 0, "time_s": 1000.0, "value": 2.0}
    assert [row["step"] for row in rows] == [0, 1, 0.5, 1]
    assert isinstance(rows[0]["step"], int)
    with history.to_csv(tmp_path / "run.csv").open() as file:
        read = list(csv.DictReader(file))
    assert [(r["rank"], r["metric"], r["step"], r["value"]) for r in read] == [
        ("0", "loss", "0", "2.0"), ("0", "loss", "1", "nan"), ("1", "loss", "0.5", "3.0"), ("0", "acc", "1", "0.5"),
    ]  # fmt: skip
    frame = history.dataframe()
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame.columns) == list(rows[0])
    assert len(frame) == 4


def test_a_run_hands_on_its_history(tmp_path):
    one = run(ended_s=1042.0)
    add(one.history, 0, loss=[(0, 1.0)])
    assert one.rows() == one.history.rows()
    assert len(one.dataframe()) == 1
    assert one.to_csv(tmp_path / "a.csv").exists()
    assert one.elapsed_s == 42.0
    json.dumps([{k: v for k, v in row.items() if k != "value"} for row in one.rows()])
