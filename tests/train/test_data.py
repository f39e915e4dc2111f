"""Each rank its own share, in a new order each epoch, with tails handled as said."""

from __future__ import annotations

import io
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset

import nbdist

pytestmark = pytest.mark.shared


class Stream(IterableDataset[int]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.size))


class Augmented(Dataset[float]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> float:
        return float(np.random.rand()) + float(torch.rand(1))


def _epochs(size: int, streamed: bool, epochs: int, options: dict[str, Any]) -> list[list[list[int]]]:
    data: Any = Stream(size) if streamed else range(size)
    batches = nbdist.loader(data, **options)
    return [[[int(i) for i in batch] for batch in batches] for _ in range(epochs)]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("tail", ["pad", "drop", "exact"])
@pytest.mark.parametrize(("streamed", "workers"), [(False, 0), (False, 1), (True, 0), (True, 2)])
def test_shares(ranks: Callable[..., list[Any]], world_size: int, tail: str, streamed: bool, workers: int) -> None:
    options = {"batch_size": 2, "tail": tail, "num_workers": workers}
    # With workers one size tells enough: each costs processes.
    for size in (world_size, 16, 23, 25) if not workers else (25,):
        if tail == "drop" and size < 2 * world_size:
            continue
        told = ranks(world_size, _epochs, size, streamed, 2, options)
        for epoch in range(2):
            steps = {len(one[epoch]) for one in told}
            assert len(steps) == 1, "every rank makes as many steps"
            assert all(batch for one in told for batch in one[epoch]), "no batch is empty"
            seen = [i for one in told for batch in one[epoch] for i in batch]
            if tail == "drop":
                assert len(seen) == len(set(seen)) == size // (2 * world_size) * 2 * world_size
            elif tail == "exact":
                assert sorted(seen) == list(range(size))
            else:
                assert set(seen) == set(range(size))
                assert len(seen) == -(-size // world_size) * world_size
        if size > 10 and not streamed:
            assert told[0][0] != told[0][1], "a new order each epoch"


def _batches_of(tail: str) -> tuple[int, list[int]]:
    batches = nbdist.loader(range(25), 2, tail=tail)
    return len(batches), [len(b) for b in batches]


@pytest.mark.parametrize("tail", ["pad", "drop", "exact"])
def test_length_is_the_number_of_batches(ranks: Callable[..., list[Any]], tail: str) -> None:
    for length, sizes in ranks(3, _batches_of, tail):
        assert length == len(sizes)


def _same_as_torch() -> tuple[bool, bool]:
    sampler = DistributedSampler(range(23), seed=5)
    batches = nbdist.loader(range(23), 4, seed=5)
    plain = DataLoader(range(23), batch_size=4, sampler=sampler)
    orders = []
    for epoch in (0, 1, 7):
        sampler.set_epoch(epoch)
        if epoch == 7:
            batches.sampler.set_epoch(7)
        orders.append([b.tolist() for b in batches] == [b.tolist() for b in plain])
    iter(batches)  # made and never read: no epoch
    return all(orders), isinstance(batches, DataLoader) and isinstance(batches.sampler, DistributedSampler)


def test_as_distributed_sampler_with_set_epoch(ranks: Callable[..., list[Any]]) -> None:
    assert ranks(3, _same_as_torch) == [(True, True)] * 3


def _own_sampler() -> list[bool]:
    batches = nbdist.loader(range(12), 2, sampler=DistributedSampler(range(12), seed=3))
    first, second = ([b.tolist() for b in batches] for _ in range(2))
    return [first != second, batches.sampler.epoch == 2]


def test_a_sampler_given_goes_on_by_itself_too(ranks: Callable[..., list[Any]]) -> None:
    assert ranks(2, _own_sampler) == [[True, True]] * 2


def _draws(workers: int) -> list[float]:
    torch.manual_seed(0)
    batches = nbdist.loader(Augmented(), 2, num_workers=workers)
    return [round(float(x), 6) for b in batches for x in b]


def test_loader_workers_of_different_ranks_draw_differently(ranks: Callable[..., list[Any]]) -> None:
    one, other = ranks(2, _draws, 2)
    assert one != other
    assert len(set(one)) == len(one)
    assert ranks(2, _draws, 2) == [one, other], "and the same in the next run"


def _fixed(size: int, batches: int, workers: int) -> list[list[int]]:
    made = nbdist.loader(Stream(size), 2, num_batches=batches, num_workers=workers)
    assert len(made) == batches
    return [[int(i) for i in b] for b in made]


def test_a_stream_of_a_fixed_number_of_batches(ranks: Callable[..., list[Any]]) -> None:
    for workers in (0, 2):
        told = ranks(2, _fixed, 9, 7, workers)
        assert [[len(b) for b in one] for one in told] == [[2] * 7] * 2
        assert told[0] != told[1]


def _webdataset(folder: str, workers: int) -> list[int]:
    import webdataset as wds

    stream = wds.WebDataset(f"{folder}/{{0..3}}.tar", shardshuffle=False).decode().to_tuple("cls")
    batches = nbdist.loader(stream, 2, num_batches=4, num_workers=workers)
    return [int(i) for batch in batches for i in batch[0]]


def _webdataset_without_number(folder: str) -> None:
    import webdataset as wds

    nbdist.loader(wds.WebDataset(f"{folder}/{{0..3}}.tar", shardshuffle=False), 2)


def test_webdataset_by_shard(ranks: Callable[..., list[Any]], refusal: Callable[..., str], tmp_path: Path) -> None:
    pytest.importorskip("webdataset")
    for shard in range(4):
        with tarfile.open(tmp_path / f"{shard}.tar", "w") as tar:
            for i in range(4):
                content = str(4 * shard + i).encode()
                entry = tarfile.TarInfo(f"{4 * shard + i:03}.cls")
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
    for workers in (0, 2):
        told = ranks(2, _webdataset, str(tmp_path), workers)
        assert Counter(i for one in told for i in one) == Counter(range(16))
        assert {i // 4 for i in told[0]} == {0, 2}
    assert "say num_batches=" in refusal(2, _webdataset_without_number, str(tmp_path))


def _refused(name: str) -> None:
    rank = dist.get_rank()
    sampler = DistributedSampler(range(10))
    calls: dict[str, Callable[[], object]] = {
        "few": lambda: nbdist.loader(range(2), 1),
        "global": lambda: nbdist.loader(range(9), global_batch_size=2),
        "global uneven": lambda: nbdist.loader(range(9), global_batch_size=4),
        "both": lambda: nbdist.loader(range(9), 3, global_batch_size=3),
        "batch": lambda: nbdist.loader(range(9), 0),
        "sampler": lambda: nbdist.loader(range(10), 2, shuffle=True, sampler=sampler),
        "other sampler": lambda: nbdist.loader(range(10), 2, sampler=torch.utils.data.SequentialSampler(range(10))),
        "tail": lambda: nbdist.loader(range(10), 2, tail="repeat"),
        "drop": lambda: nbdist.loader(range(10), 4, tail="drop"),
        "drop_last": lambda: nbdist.loader(range(10), 4, drop_last=True),
        "type": lambda: nbdist.loader(10, 4),
        "stream": lambda: nbdist.loader(Stream(10), 4, shuffle=True),
        "number": lambda: nbdist.loader(range(10), 4, num_batches=3),
        "workers": lambda: nbdist.loader(range(10), 4, num_workers=-1),
        "option": lambda: nbdist.loader(range(10), 4, num_worker=1),
        "size differs": lambda: nbdist.loader(range(10 + rank), 2),
        "one rank": lambda: nbdist.loader(range(10), 2 * (rank != 1)),
    }
    calls[name]()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("few", "2 samples cannot be shared by 3 ranks; each needs at least one"),
        ("global", "global_batch_size expects a multiple of the 3 ranks, not 2"),
        ("global uneven", "global_batch_size expects a multiple of the 3 ranks, not 4"),
        ("both", "expects batch_size (per rank) or global_batch_size (over all ranks), not both"),
        ("batch", "batch_size expects a positive number of samples per rank, not 0"),
        ("sampler", "sampler and shuffle exclude each other"),
        ("other sampler", "sampler expects a DistributedSampler, not SequentialSampler"),
        ("tail", "tail expects pad, drop, exact, not 'repeat'"),
        ("drop", "tail='drop' leaves nothing: 10 samples are less than one step of all ranks"),
        ("drop_last", "say tail='drop' instead of drop_last"),
        ("type", "expects a data set with a length and items, or an IterableDataset, not int"),
        ("stream", "a stream has its own order"),
        ("number", "num_batches expects a positive number, for a stream"),
        ("workers", "num_workers expects a number of processes per rank, 0 or more, not -1"),
        ("option", "num_worker is no argument of loader() or of DataLoader"),
        ("size differs", "rank 0 has range of 10 samples, rank 1 has range of 11 samples"),
        ("one rank", "loader(): rank 1: batch_size expects"),
    ],
)
def test_refused_by_every_rank_alike(refusal: Callable[..., str], name: str, says: str) -> None:
    assert says in refusal(3, _refused, name)


def _says(kind: str) -> None:
    match kind:
        case "padded":
            nbdist.loader(TensorDataset(torch.arange(10)), 2)
        case "dropped":
            nbdist.loader(range(10), 2, tail="drop")
        case "pinned":
            nbdist.loader(range(9), 3, pin_memory=True)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (
            "padded",
            "nbdist: loader: 10 samples over 3 ranks, 2 per rank and step, 2 seen twice each epoch to make it even "
            "(tail='exact' sees each once); no workers (the data is in memory)\n",
        ),
        (
            "dropped",
            "nbdist: loader: 10 samples over 3 ranks, 2 per rank and step, 4 left out each epoch; no workers (the",
        ),
        (
            "pinned",
            "nbdist: loader: 9 samples over 3 ranks, 3 per rank and step; no workers (the ranks' own computing takes",
        ),
    ],
)
def test_choices_are_said_once_with_their_reason(notices: Callable[..., list[str]], kind: str, text: str) -> None:
    said = notices(3, _says, kind)
    assert said[0].startswith(text)
    assert said[1:] == ["", ""]
    if kind == "pinned" and not torch.cuda.is_available():
        assert "pin_memory left off (no accelerator to copy to)" in said[0]
