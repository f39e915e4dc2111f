"""``loader()``: a DataLoader that gives each rank its own share of the data, in a new order each epoch."""

from __future__ import annotations

import copy
import inspect
import multiprocessing
import os
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    Subset,
    TensorDataset,
    default_collate,
    get_worker_info,
)

from nbdist.errors import InputError
from nbdist.train.ranks import agree, device_of, local_world_size, require_group, say

__all__ = ["EpochSampler", "ExactBatches", "RankShare", "ShardBatches", "loader"]

TAILS = ("pad", "drop", "exact")
_MAX_WORKERS = 4


class EpochSampler(DistributedSampler[Any]):
    """``DistributedSampler`` that goes on to the next epoch by itself each time it has been started.

    ``set_epoch`` still works and decides the next one.
    """

    def __iter__(self) -> Iterator[int]:
        # A generator: iterators that are made and never read (DataLoader makes one) do not count as an epoch.
        indices = super().__iter__()
        self.epoch += 1
        yield from indices


class ExactBatches(Sampler[list[int]]):
    """Batches of one rank in which every sample of the data set occurs exactly once over all ranks.

    Every rank gets the same number of batches and none is empty: what is left over at the end is spread over the ranks'
    last batches, whose sizes differ by at most one.

    Parameters
    ----------
    sampler
        Gives the epoch, the seed, the number of ranks and this rank.
    batch_size
        Samples per rank and batch.
    """

    def __init__(self, sampler: EpochSampler, batch_size: int) -> None:
        self.sampler = sampler
        self.batch_size = batch_size

    def __iter__(self) -> Iterator[list[int]]:
        s = self.sampler
        size = len(s.dataset)  # type: ignore[arg-type]
        if s.shuffle:
            order = torch.randperm(size, generator=torch.Generator().manual_seed(s.seed + s.epoch)).tolist()
        else:
            order = list(range(size))
        s.epoch += 1
        for group in _groups(order, self.batch_size, s.num_replicas, "exact"):
            yield group[s.rank :: s.num_replicas]

    def __len__(self) -> int:
        full, rest = divmod(len(self.sampler.dataset), self.batch_size * self.sampler.num_replicas)  # type: ignore[arg-type]
        return full + (rest >= self.sampler.num_replicas or full == 0)


class RankShare(IterableDataset[Any]):
    """Batches of one rank and one loader worker, out of a stream that every one of them reads whole.

    The stream must come in the same order everywhere. All ranks see the same stream, so all end after the same number
    of batches.

    Parameters
    ----------
    dataset
        The stream.
    batch_size
        Samples per rank and batch; None if the stream's items are batches.
    tail, num_batches
        As in :func:`loader`.
    """

    def __init__(
        self, dataset: Iterable[Any], batch_size: int | None, tail: str, num_batches: int | None = None
    ) -> None:
        self.dataset, self.batch_size, self.tail, self.num_batches = dataset, batch_size, tail, num_batches
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()

    def __iter__(self) -> Iterator[Any]:
        number, num_workers = _worker()
        stream = self.dataset if self.num_batches is None else _endless(self.dataset)
        groups = _groups(stream, self.batch_size or 1, self.world_size, self.tail)
        for group in islice(groups, number, self.num_batches, num_workers):
            share = group[self.rank :: self.world_size]
            yield share if self.batch_size is not None else share[0]

    def __len__(self) -> int:
        if self.num_batches is None:
            raise TypeError("the length of a stream is known only with num_batches=")
        return self.num_batches


class ShardBatches(IterableDataset[Any]):
    """A fixed number of batches from a stream that is this rank's and this loader worker's own already.

    Parameters
    ----------
    dataset
        The stream; it is started again when it ends early.
    batch_size
        Samples per batch; None if the stream's items are batches.
    num_batches
        Batches per rank and epoch.
    """

    def __init__(self, dataset: Iterable[Any], batch_size: int | None, num_batches: int) -> None:
        self.dataset, self.batch_size, self.num_batches = dataset, batch_size, num_batches

    def __iter__(self) -> Iterator[Any]:
        number, num_workers = _worker()
        with closing(_endless(self.dataset)) as stream:
            for _ in range(number, self.num_batches, num_workers):
                yield next(stream) if self.batch_size is None else list(islice(stream, self.batch_size))

    def __len__(self) -> int:
        return self.num_batches


def _worker() -> tuple[int, int]:
    worker = get_worker_info()
    return (worker.id, worker.num_workers) if worker else (0, 1)


def _endless(stream: Iterable[Any]) -> Generator[Any, None, None]:
    while True:
        empty = True
        samples = iter(stream)
        try:
            for sample in samples:
                empty = False
                yield sample
        finally:
            if isinstance(samples, Generator):
                samples.close()
        if empty:
            raise InputError("loader(): the stream gave no sample at all")


def _groups(samples: Iterable[Any], batch_size: int, world_size: int, tail: str) -> Iterator[list[Any]]:
    """Samples of one step over all ranks, step by step; the last one as ``tail`` says."""
    stream = iter(samples)
    size = batch_size * world_size
    group = list(islice(stream, size))
    while group:
        following = list(islice(stream, size))
        if tail == "exact" and 0 < len(following) < world_size:
            group, following = group + following, []
        if len(group) >= size:
            yield group
        elif tail == "pad":
            missing = -len(group) % world_size
            yield group + [group[i % len(group)] for i in range(missing)]
        elif tail == "exact":
            if len(group) < world_size:
                raise InputError(f"loader(): {len(group)} samples cannot be shared by {world_size} ranks")
            yield group
        group = following


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """What the arguments of one call come to, once every rank has found them good."""

    batch_size: int | None
    sampler: EpochSampler | Sampler[Any] | None
    size: int | None
    num_workers: int
    pin_memory: bool
    remarks: list[str]


def loader(
    dataset: Dataset[Any] | Iterable[Any],
    batch_size: int | None = None,
    *,
    global_batch_size: int | None = None,
    shuffle: bool | None = None,
    tail: str = "pad",
    seed: int = 0,
    sampler: DistributedSampler[Any] | None = None,
    num_batches: int | None = None,
    num_workers: int | None = None,
    pin_memory: bool | None = None,
    **options: Any,
) -> DataLoader[Any]:
    """Make the DataLoader that gives this rank its own share of a data set, in a new order each epoch.

    Each start of an iteration begins the next epoch (``loader.sampler.set_epoch`` still decides it, e.g. on resuming),
    so start as many on every rank: a batch that only rank 0 looks at would leave the ranks in different orders.

    Parameters
    ----------
    dataset
        With a length, or a stream. A stream is read whole by every rank and dealt out batch by batch, so it must come
        in the same order everywhere; a WebDataset is dealt out by its shards instead and wants ``num_batches``.
    batch_size
        Samples per rank and step, as in torch.
    global_batch_size
        Samples per step over all ranks, instead of ``batch_size``; a multiple of the number of ranks.
    shuffle
        Default: yes, for a data set with a length.
    tail
        What happens where the samples do not divide evenly. ``"pad"``: some are seen twice, as DistributedSampler has
        it. ``"drop"``: the last incomplete step is left out. ``"exact"``: every sample once, last batches of unequal
        size (use it to evaluate; :func:`nbdist.mean_over_ranks` weighs them right).
    seed
        Of the order of samples, and with the rank added, of the random numbers drawn in loader workers.
    sampler
        A DistributedSampler of your own instead of ``shuffle``, ``tail`` and ``seed``.
    num_batches
        Batches per rank and epoch of a stream, which is started again where it is shorter.
    num_workers, pin_memory
        Default: chosen by the data, the processors and the device, and said so.
    **options
        Passed on to ``DataLoader``.

    Returns
    -------
    DataLoader

    Raises
    ------
    InputError
        On every rank alike.
    """
    require_group("loader")
    streamed = isinstance(dataset, IterableDataset)
    world_size, rank = dist.get_world_size(), dist.get_rank()

    def check() -> tuple[_Plan, Mapping[str, object]]:
        size = _size(dataset, streamed)
        per_rank = _batch_size(batch_size, global_batch_size, world_size, streamed)
        _check_options(options, tail, shuffle, sampler, streamed, num_batches)
        if size is not None and size < world_size:
            raise InputError(f"{size} samples cannot be shared by {world_size} ranks; each needs at least one")
        if size is not None and tail == "drop" and size < (per_rank or 1) * world_size:
            raise InputError(f"tail='drop' leaves nothing: {size} samples are less than one step of all ranks")
        remarks: list[str] = []
        workers = _num_workers(dataset, num_workers, remarks)
        if _is_webdataset(dataset):
            workers = _webdataset_workers(dataset, workers, num_batches, world_size, remarks)
        pinned = _pin_memory(pin_memory, remarks)
        order: Sampler[Any] | None = sampler
        if type(sampler) is DistributedSampler:
            order = EpochSampler(
                sampler.dataset, sampler.num_replicas, sampler.rank, sampler.shuffle, sampler.seed, sampler.drop_last
            )
        elif sampler is None and not streamed:
            order = EpochSampler(
                dataset,  # type: ignore[arg-type]
                world_size,
                rank,
                shuffle=shuffle is not False,
                seed=seed,
                drop_last=tail == "drop",
            )
        facts = {
            "the data set": f"{type(dataset).__name__} of {size} samples"
            if size is not None
            else type(dataset).__name__,
            "the arguments": (per_rank, shuffle, tail, seed, type(sampler).__name__, num_batches, num_workers),
        }
        plan = _Plan(
            batch_size=per_rank, sampler=order, size=size, num_workers=workers, pin_memory=pinned, remarks=remarks
        )
        return plan, facts

    plan = agree("loader", check)
    collate = options.pop("collate_fn", None) or default_collate
    common: dict[str, Any] = {
        "num_workers": plan.num_workers,
        "pin_memory": plan.pin_memory,
        "persistent_workers": plan.num_workers > 0,
        # Loader workers take their seeds from it: equal ones would augment alike on every rank.
        "generator": torch.Generator().manual_seed((seed << 20) + rank),
        **options,
    }
    if plan.num_workers and "multiprocessing_context" not in common and _needs_fork(dataset):
        common["multiprocessing_context"] = "fork"
    say(_sentence(plan, tail, world_size, sampler is not None))
    if streamed:
        share = _share(dataset, plan, tail, num_batches)
        return DataLoader(share, batch_size=None, collate_fn=None if plan.batch_size is None else collate, **common)
    if tail == "exact" and isinstance(plan.sampler, EpochSampler) and sampler is None:
        batches = ExactBatches(plan.sampler, plan.batch_size or 1)
        return DataLoader(dataset, batch_sampler=batches, collate_fn=collate, **common)  # type: ignore[arg-type]
    return DataLoader(
        dataset,  # type: ignore[arg-type]
        batch_size=plan.batch_size,
        sampler=plan.sampler,
        drop_last=tail == "drop",
        collate_fn=collate,
        **common,
    )


def _size(dataset: Any, streamed: bool) -> int | None:
    if streamed:
        return None
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise InputError(
            f"expects a data set with a length and items, or an IterableDataset, not {type(dataset).__name__}"
        )
    return len(dataset)


def _batch_size(per_rank: int | None, over_all: int | None, world_size: int, streamed: bool) -> int | None:
    if per_rank is not None and over_all is not None:
        raise InputError("expects batch_size (per rank) or global_batch_size (over all ranks), not both")
    if over_all is not None:
        if (
            isinstance(over_all, bool)
            or not isinstance(over_all, int)
            or over_all < world_size
            or over_all % world_size
        ):
            raise InputError(f"global_batch_size expects a multiple of the {world_size} ranks, not {over_all!r}")
        return over_all // world_size
    if per_rank is None:
        if streamed:
            return None
        return 1
    if isinstance(per_rank, bool) or not isinstance(per_rank, int) or per_rank < 1:
        raise InputError(f"batch_size expects a positive number of samples per rank, not {per_rank!r}")
    return per_rank


def _check_options(
    options: Mapping[str, Any],
    tail: str,
    shuffle: bool | None,
    sampler: object,
    streamed: bool,
    num_batches: int | None,
) -> None:
    if tail not in TAILS:
        raise InputError(f"tail expects {', '.join(TAILS)}, not {tail!r}")
    if sampler is not None and shuffle is not None:
        raise InputError("sampler and shuffle exclude each other: the sampler decides the order")
    if sampler is not None and not isinstance(sampler, DistributedSampler):
        raise InputError(
            f"sampler expects a DistributedSampler, not {type(sampler).__name__}: others give all ranks the same"
        )
    if streamed and (shuffle or sampler is not None):
        raise InputError("a stream has its own order: shuffle in the data set, with the same seed on every rank")
    if num_batches is not None and (not streamed or not isinstance(num_batches, int) or num_batches < 1):
        raise InputError("num_batches expects a positive number, for a stream (an IterableDataset)")
    if "drop_last" in options or "batch_sampler" in options:
        raise InputError("say tail='drop' instead of drop_last, and batch_size instead of batch_sampler")
    unknown = sorted(set(options) - set(inspect.signature(DataLoader.__init__).parameters))
    if unknown:
        raise InputError(f"{unknown[0]} is no argument of loader() or of DataLoader")


def _num_workers(dataset: Any, asked: int | None, remarks: list[str]) -> int:
    if asked is not None:
        if isinstance(asked, bool) or not isinstance(asked, int) or asked < 0:
            raise InputError(f"num_workers expects a number of processes per rank, 0 or more, not {asked!r}")
        return asked
    inner = dataset
    while isinstance(inner, Subset):
        inner = inner.dataset
    if isinstance(inner, TensorDataset | list | tuple | torch.Tensor):
        remarks.append("no workers (the data is in memory)")
        return 0
    cores = len(os.sched_getaffinity(0)) // local_world_size()
    if device_of().type == "cpu":
        remarks.append("no workers (the ranks' own computing takes the processors)")
        return 0
    workers = max(0, min(_MAX_WORKERS, cores - 1))
    remarks.append(f"{workers} workers per rank ({cores} processors per rank, at most {_MAX_WORKERS})")
    return workers


def _pin_memory(asked: bool | None, remarks: list[str]) -> bool:
    accelerated = device_of().type != "cpu"
    if asked and not accelerated:
        remarks.append("pin_memory left off (no accelerator to copy to)")
    elif accelerated and asked is None:
        remarks.append("pinned memory (faster copies to the GPU)")
    return accelerated and asked is not False


def _needs_fork(dataset: object) -> bool:
    """Whether spawned workers could not import the data set's class, because a cell defined it."""
    inner = dataset
    while isinstance(inner, Subset):
        inner = inner.dataset
    return type(inner).__module__ == "__main__" and multiprocessing.get_start_method(allow_none=False) != "fork"


def _sentence(plan: _Plan, tail: str, world_size: int, own_sampler: bool) -> str:
    parts = []
    if plan.size is None:
        parts.append(f"a stream shared by {world_size} ranks")
    elif own_sampler:
        parts.append(f"{plan.size} samples, dealt out by the sampler given")
    else:
        batch = plan.batch_size or 1
        extra = -plan.size % world_size
        text = f"{plan.size} samples over {world_size} ranks, {batch} per rank and step"
        if tail == "pad" and extra:
            text += f", {extra} seen twice each epoch to make it even (tail='exact' sees each once)"
        rest = plan.size % (batch * world_size)
        if tail == "drop" and rest:
            text += f", {rest} left out each epoch"
        parts.append(text)
    return "loader: " + "; ".join(parts + plan.remarks)


def _is_webdataset(dataset: object) -> bool:
    return any(c.__module__.split(".")[0] == "webdataset" for c in type(dataset).__mro__) and hasattr(
        dataset, "pipeline"
    )


def _webdataset_workers(
    dataset: Any, workers: int, num_batches: int | None, world_size: int, remarks: list[str]
) -> int:
    """Workers that each get a shard; a WebDataset is split by shard, once by rank and once by worker."""
    if num_batches is None:
        raise InputError("a WebDataset is split by shard, unevenly: say num_batches=, the batches per rank and epoch")
    shards = len(getattr(dataset.pipeline[0], "urls", ())) if dataset.pipeline else 0
    if 0 < shards < world_size:
        raise InputError(f"{shards} shards cannot be shared by {world_size} ranks; write at least one per rank")
    remarks.append(f"a WebDataset of {shards} shards, split by shard")
    return min(workers, shards // world_size) if shards else workers


def _share(dataset: Any, plan: _Plan, tail: str, num_batches: int | None) -> IterableDataset[Any]:
    if not _is_webdataset(dataset):
        return RankShare(dataset, plan.batch_size, tail, num_batches)
    from webdataset import shardlists

    dealt = copy.copy(dataset)
    # Its default stage refuses several ranks; split_by_node is webdataset's own answer. A splitter of the user stays.
    dealt.pipeline = [
        shardlists.split_by_node if stage is shardlists.single_node_only else stage for stage in dataset.pipeline
    ]
    return ShardBatches(dealt, plan.batch_size, num_batches or 1)
