"""Checkpoints: resumed on other numbers of ranks and by other wrappers, whole or not there, and of this model only."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from torch import nn

import nbdist
from nbdist.errors import InputError
from nbdist.train.checkpoint import save

HALF = 25
LOSS = 1e-4

pytestmark = pytest.mark.shared


def wrapped(kind: str, **sizes: int) -> nn.Module:
    model = models.Net(seed=dist.get_rank() + 7, **sizes)
    name, _, version = kind.partition("/")
    return nbdist.ddp(model) if name == "ddp" else nbdist.fsdp(model, name, version=int(version))


def _steps(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    x, y = (t[rank::world_size] for t in models.data())
    losses = []
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(models.mean(loss))
    return losses


def _first_half(path: str, kind: str, optimizer: str) -> list[float]:
    model = wrapped(kind)
    # Rank 0's weights are those of one process with seed 7.
    step = models.OPTIMIZERS[optimizer](model.parameters())
    losses = _steps(model, step, HALF)
    nbdist.save(path, model, step, extra={"step": HALF, "rates": [0.1, 0.2], "mask": torch.ones(2)})
    return losses


def _second_half(path: str, kind: str, optimizer: str) -> tuple[list[float], dict[str, Any]]:
    model = wrapped(kind)
    step = models.OPTIMIZERS[optimizer](model.parameters())
    extra = nbdist.load(path, model, step)
    return _steps(model, step, HALF), extra


@pytest.mark.parametrize(
    ("before", "after", "optimizer"),
    [
        ((2, "ddp"), (3, "full/2"), "adamw"),
        ((4, "full/2"), (2, "ddp"), "adamw"),
        ((3, "grad_op/2"), (4, "full/2"), "momentum"),
        ((3, "full/2"), (1, "ddp"), "adamw"),
        ((2, "full/1"), (3, "full/2"), "adamw"),
        ((3, "full/2"), (2, "full/1"), "momentum"),
        ((2, "ddp"), (4, "ddp"), "sgd"),
    ],
)
def test_resume_elsewhere(
    ranks: Callable[..., list[Any]], tmp_path: Path, before: tuple[int, str], after: tuple[int, str], optimizer: str
) -> None:
    path = str(tmp_path / "at 25")
    first = ranks(before[0], _first_half, path, before[1], optimizer)
    second = ranks(after[0], _second_half, path, after[1], optimizer)
    reference, _ = models.whole(optimizer, 2 * HALF, model=models.Net(seed=7))
    for losses, extra in second:
        assert models.far(first[0] + losses, reference) <= LOSS
        assert extra["step"] == HALF
        assert extra["rates"] == [0.1, 0.2]
        assert torch.equal(extra["mask"], torch.ones(2))
    assert [p.name for p in tmp_path.iterdir()] == ["at 25"]


def _before_the_first_step(path: str) -> tuple[list[float], list[float]]:
    model = wrapped("full/2")
    step = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    nbdist.save(path, model, step)
    expected = _steps(model, step, 5)
    again = torch.optim.AdamW(model.parameters(), lr=1.0)
    nbdist.load(path, model, again)
    return expected, _steps(model, again, 5)


def test_saved_before_the_first_step(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    for expected, found in ranks(2, _before_the_first_step, str(tmp_path / "c")):
        assert found == expected


def _later(path: str, kind: str) -> dict[str, Any]:
    model = wrapped(kind)
    step = models.adamw(model.parameters())
    _steps(model, step, 2)
    then = models.full_parameters(model)
    saving = nbdist.save(path, model, step, wait=False)
    _steps(model, step, 3)
    saving.wait()
    moved = any(not torch.equal(p, then[n]) for n, p in models.full_parameters(model).items())
    nbdist.save(path, model, step, wait=False)
    nbdist.save(path + " 2", model, step, wait=False).wait()
    nbdist.load(path, model, step)
    one = Path(path + " 2", "nbdist.json").exists()
    return {"then": then, "moved": moved, "second": one, "done": saving.done()}


@pytest.mark.parametrize("kind", ["ddp", "full/2"])
def test_written_while_training_goes_on(ranks: Callable[..., list[Any]], tmp_path: Path, kind: str) -> None:
    for told in ranks(2, _later, str(tmp_path / "c"), kind):
        assert told["moved"]
        assert told["second"]
        assert told["done"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c", "c 2"]


def _as_of_then(path: str) -> bool:
    model = wrapped("full/2")
    step = models.adamw(model.parameters())
    _steps(model, step, 2)
    then = models.full_parameters(model)
    saving = nbdist.save(path, model, step, wait=False)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.0)
    saving.wait()
    nbdist.load(path, model, step)
    return all(torch.equal(p, then[n]) for n, p in models.full_parameters(model).items())


def test_a_later_save_holds_the_state_of_its_call(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    assert ranks(3, _as_of_then, str(tmp_path / "c")) == [True] * 3


def _again_and_again(path: str, times: int) -> None:
    model = wrapped("full/2")
    for i in range(times):
        nbdist.save(path, model, extra={"i": i})


def test_replaced_in_one_step(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    path = tmp_path / "c"
    ranks(2, _again_and_again, str(path), 1)
    looks, torn, stop = 0, [], threading.Event()

    def watch() -> None:
        nonlocal looks
        while not stop.is_set():
            looks += 1
            try:
                json.loads((path / "nbdist.json").read_text())
                (path / ".metadata").stat()
            except (OSError, ValueError) as error:
                # Between the two reads of one look the folder may rightly be another one; gone it may not be.
                if not (path / ".metadata").exists():
                    torn.append(str(error))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        ranks(2, _again_and_again, str(path), 12)
    finally:
        stop.set()
        watcher.join()
    assert looks > 12
    assert not torn
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def _fails_on_the_way(path: str) -> tuple[str, bool]:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    model = wrapped("full/2")
    nbdist.save(path, model, extra={"good": 1})
    original = FileSystemWriter.write_data
    if dist.get_rank() == 1:
        FileSystemWriter.write_data = lambda *_: (_ for _ in ()).throw(OSError("disk full"))
    try:
        nbdist.save(path, model, extra={"good": 0})
        raised = ""
    except BaseException as error:
        raised = type(error).__name__
    finally:
        FileSystemWriter.write_data = original
    return raised, nbdist.load(path, model) == {"good": 1}


def test_the_old_one_stays_when_writing_fails(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    assert ranks(2, _fails_on_the_way, str(tmp_path / "c")) == [("CheckpointException", True)] * 2
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def _fails_later(path: str) -> str:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    model = wrapped("ddp")
    original = FileSystemWriter.write_data
    if dist.get_rank() == 1:
        FileSystemWriter.write_data = lambda *_: (_ for _ in ()).throw(OSError("disk full"))
    try:
        nbdist.save(path, model, wait=False).wait()
    except BaseException as error:
        return type(error).__name__
    finally:
        FileSystemWriter.write_data = original
    return ""


def test_a_failure_in_the_background_is_raised_by_wait(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    assert ranks(2, _fails_later, str(tmp_path / "c")) == ["CheckpointException"] * 2
    assert not (tmp_path / "c").exists()


def _export(path: str, kind: str) -> dict[str, Any]:
    model = wrapped(kind)
    _steps(model, models.sgd(model.parameters()), 2)
    nbdist.save(path, model, full=True)
    mine = models.full_parameters(model)
    other = wrapped("full/2" if kind == "ddp" else "ddp")
    nbdist.load(path, other)
    theirs = models.full_parameters(other)
    return {"mine": mine, "same": all(torch.equal(theirs[n], p) for n, p in mine.items())}


@pytest.mark.parametrize("kind", ["ddp", "full/2", "hybrid/2", "full/1"])
def test_full_export_is_a_plain_state_dict(ranks: Callable[..., list[Any]], tmp_path: Path, kind: str) -> None:
    told = ranks(2, _export, str(tmp_path / "net.pt"), kind)
    plain = models.Net()
    plain.load_state_dict(torch.load(tmp_path / "net.pt", weights_only=True))
    for one in told:
        assert one["same"]
        assert all(torch.equal(one["mine"][n], p) for n, p in plain.state_dict().items())
    assert [p.name for p in tmp_path.iterdir()] == ["net.pt"]


def _save(path: str, optimizer: str | None = None, **options: Any) -> None:
    model = wrapped("ddp")
    nbdist.save(path, model, models.OPTIMIZERS[optimizer](model.parameters()) if optimizer else None, **options)


def _load(path: str, optimizer: str | None = None, width: int = models.WIDTH, blocks: int = 2) -> None:
    model = wrapped("full/2", width=width, blocks=blocks)
    nbdist.load(path, model, models.OPTIMIZERS[optimizer](model.parameters()) if optimizer else None)


@pytest.mark.parametrize(
    ("saved", "loaded", "says"),
    [
        ({}, {"width": 9}, "another model: its `first.weight` is (8, 5), the model's is (9, 5)"),
        ({}, {"blocks": 3}, "another model: it has no `blocks.2.norm.weight`"),
        ({}, {"blocks": 1}, "another model: the model has no `blocks.1."),
        ({"full": True}, {"width": 9}, "another model: its `first.weight` is (8, 5), the model's is (9, 5)"),
        ({"full": True}, {"optimizer": "sgd"}, "without an optimizer's state"),
        ({}, {"optimizer": "sgd"}, "saved without an optimizer"),
        ({"optimizer": "adamw"}, {"optimizer": "sgd"}, "holds the state of AdamW, not of SGD"),
    ],
)
def test_a_checkpoint_of_something_else_is_refused(
    ranks: Callable[..., list[Any]],
    refusal: Callable[..., str],
    tmp_path: Path,
    saved: dict[str, Any],
    loaded: dict[str, Any],
    says: str,
) -> None:
    path = str(tmp_path / "c")
    ranks(2, _call, "_save", path, saved)
    assert says in refusal(2, _call, "_load", path, loaded)


def _call(name: str, path: str, options: dict[str, Any]) -> None:
    globals()[name](path, **options)


def test_what_is_no_checkpoint_is_refused(refusal: Callable[..., str], tmp_path: Path) -> None:
    assert "there is nothing of that name" in refusal(2, _load, str(tmp_path / "none"))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    assert "is no checkpoint" in refusal(2, _load, str(tmp_path / "mine"))
    assert "would be replaced" in refusal(2, _save, str(tmp_path / "mine"))
    assert (tmp_path / "mine" / "thesis.tex").exists()
    assert "is a folder" in refusal(2, _call, "_save", str(tmp_path / "mine"), {"full": True})
    (tmp_path / "text.pt").write_text("no state dict")
    assert "no state dict" in refusal(2, _load, str(tmp_path / "text.pt"))
    assert "is a file" in refusal(2, _save, str(tmp_path / "text.pt"))


def _paths_differ(path: str) -> None:
    nbdist.save(path + str(dist.get_rank()), wrapped("ddp"))


def _model_differs(path: str) -> None:
    save(path, models.Net(width=8 + dist.get_rank()))


def _extra(path: str) -> None:
    nbdist.save(path, wrapped("ddp"), extra={"scheduler": threading.Lock.__class__})


def test_arguments_that_differ_between_ranks(refusal: Callable[..., str], tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    assert "the path differs between ranks" in refusal(2, _paths_differ, path)
    assert "rank 0 has parameter first.weight (8, 5)" in refusal(2, _model_differs, path)
    assert "extra expects numbers, text, tensors" in refusal(2, _extra, path)
    assert "the path first" in refusal(2, _order, path)
    assert not list(tmp_path.iterdir())


def _order(path: str) -> None:
    nbdist.save(wrapped("ddp"), path)


def test_outside_of_a_group() -> None:
    with pytest.raises(nbdist.errors.NotRunningError, match=r"save\(\) needs a process group"):
        nbdist.save("c", models.Net())
    assert issubclass(InputError, ValueError)
