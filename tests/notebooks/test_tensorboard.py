"""A run written for TensorBoard, read back with TensorBoard's own reader."""

from __future__ import annotations

import importlib.util

import pytest
from simulated import add, make_run

from nbdist.errors import InputError

needs_tensorboard = pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed"
)


@needs_tensorboard
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of TensorBoard's own dependencies
def test_each_rank_is_a_curve_of_one_chart(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = make_run(2, started_s=1000.0)
    for rank in (0, 1):
        add(run.history, rank, loss=[(0, 2.0 + rank), (5, 1.5)], **({"lr": [(0, 0.1)]} if rank else {}))
    folder = run.to_tensorboard(tmp_path / "runs")
    assert sorted(path.name for path in folder.iterdir()) == ["rank0", "rank1"]
    for rank, names in ((0, ["loss"]), (1, ["loss", "lr"])):
        events = EventAccumulator(str(folder / f"rank{rank}"))
        events.Reload()
        assert sorted(events.Tags()["scalars"]) == names
        points = [(event.step, event.value, event.wall_time) for event in events.Scalars("loss")]
        assert points == [(0, 2.0 + rank, 1000.0), (5, 1.5, 1005.0)]


def test_without_tensorboard_the_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", None)
    with pytest.raises(InputError, match="pip install tensorboard"):
        make_run(1).to_tensorboard(tmp_path)
