"""The life of the process group in a rank: join, break off, renew, and what a pasted script asks for.

How ranks agree without talking: the notebook hands out generations (`join` and `renew`), and whatever a cell makes
again in between (``init_process_group`` after ``destroy_process_group``) is counted, so that every rank that runs the
same cell comes to the same name. A rank that went another way is put right by the next generation.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore

from nbdist.errors import CollectiveBroken, InputError
from nbdist.worker import internals
from nbdist.worker.attach import reattach
from nbdist.worker.connections import Connections, descriptors, find_new
from nbdist.worker.rendezvous import BreakableStore, choose_interfaces
from nbdist.worker.scripts import Scripts
from nbdist.worker.waiting import Waiting

__all__ = ["Group"]

_log = logging.getLogger(__name__)

JOIN_PATIENCE_S = 60.0
_LONG_ON_GPU_S = 1.0  # a collective queued on a GPU for less is at work


class Group:
    """The default process group of this rank, and the groups that were made from it.

    Parameters
    ----------
    rank, world_size
        As torchrun counts them.
    backend
        ``gloo``, ``nccl`` or a list by device as torch takes it.
    folder
        The cluster's private folder; the ranks meet in a file there.
    device
        The device of this rank.
    notice
        Called with one line the user should read (main thread).
    """

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        backend: str,
        folder: Path,
        device: torch.device,
        notice: Callable[[str], None],
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.backend = backend
        self.device = device
        self.generation = -1
        self.reason: str | None = None
        self.ranks: Sequence[int] = range(world_size)
        self.namespace: dict[str, Any] = {}
        self._folder = folder
        self._notice = notice
        self._lock = threading.Lock()
        self._stores: list[BreakableStore] = []
        self._connections: list[Connections] = []
        self._given_up = False
        self._made = 0
        self._current = backend
        self._timeout = internals.default_timeout(backend)
        self._used_before = (0, 0)
        self._unattached: list[internals.GroupRecord] = []
        self._waiting = Waiting()
        self._scripts = Scripts(self, notice)

    # ---- what the rank process calls

    def patch(self) -> None:
        """Make ``init_process_group``, ``destroy_process_group`` and ``mp.spawn`` in cells mean nbdist's group.

        Call once, on the main thread, before `join`.
        """
        internals.on_group_made(self._remember_connections)
        self._scripts.install()

    def join(self, generation: int) -> None:
        """Join the default process group of a generation (main thread; every rank calls it).

        Raises
        ------
        StartError
            If the interface the user chose does not exist, or some rank does not come within a minute.
        CollectiveBroken
            If `give_up` was called meanwhile.
        """
        self.generation = generation
        self._made = 0
        self.make(self.backend)

    def begin_cell(self, ranks: Sequence[int], namespace: dict[str, Any]) -> None:
        """Say that a cell begins (main thread).

        Parameters
        ----------
        ranks
            The ranks that run the cell: a group cannot be made again where only some do.
        namespace
            The cell's variables; modules in it are re-attached if the cell asks for another group.
        """
        self.ranks = ranks
        self.namespace = namespace
        self._used_before = self._used()
        self._scripts.begin_cell()

    @property
    def broken(self) -> bool:
        """Whether there is no usable default group: it was given up, or a cell destroyed it."""
        return self._given_up or not dist.is_initialized()

    @property
    def given_up(self) -> bool:
        """Whether the connections were broken off, in contrast to a group that a cell destroyed itself."""
        return self._given_up

    @property
    def current_backend(self) -> str:
        """The backend of the group as it is: the cluster's, or what a cell asked for last."""
        return self._current

    @property
    def state(self) -> str:
        """What must be equal on all ranks: which making of the group this rank uses, e.g. ``3.0``; ``none``."""
        return "none" if self.broken else f"{self.generation}.{self._made}"

    @property
    def communicated(self) -> bool:
        """Whether this rank used a group since the cell began (or has none).

        If no rank did, an interrupted cell leaves nothing half sent, and the group need not be renewed.
        """
        return self.broken or self._used() != self._used_before

    def give_up(self, reason: str, generation: int | None = None) -> None:
        """Break every connection of this rank's groups, so that blocked collectives return with an error.

        Any thread; idempotent. The group stays broken until `renew`.

        Parameters
        ----------
        reason
            What a rank that is still making a group is told.
        generation
            Do nothing if the group is of another one: a request may come late, when the group has been renewed.
        """
        with self._lock:
            if self._given_up or self.generation < 0 or generation not in (None, self.generation):
                return
            self._given_up = True
            self.reason = reason
            stores, connections = list(self._stores), list(self._connections)
        for store in stores:
            store.break_off(reason)
        for group in connections:
            group.shut_down()
        internals.abort_communicators()

    def renew(self, generation: int, namespace: dict[str, Any], *, attach: bool) -> tuple[list[str], list[str]]:
        """Leave the old groups and join the new default one (main thread; every rank calls it, at the same time).

        Parameters
        ----------
        generation
            Never used before by any rank, also not in a renewal that failed.
        namespace
            Where DDP and FSDP modules, groups and meshes are looked for.
        attach
            Whether to re-attach what is found.

        Returns
        -------
        attached, lost
            Names of what works again; one line for each thing that does not.
        """
        self.give_up(f"the process group is being renewed (generation {generation})")
        self._unattached = internals.records() or self._unattached  # of before, where the last renewal failed
        self.leave()
        self.join(generation)
        found = reattach(self, self._unattached, namespace if attach else {})
        self._unattached = []
        return found

    def waiting(self) -> tuple[str, float] | None:
        """Which collective the main thread is in, and since when (unix time); None if in none.

        Any thread. It looks at the main thread's stack and costs the collectives nothing; since when is known
        to the time between two calls, so call it regularly, e.g. twice a second.
        """
        found = self._waiting.look(internals.issued)
        if found is not None or "nccl" not in self._current:
            return found
        active = internals.nccl_operation()
        return active if active is not None and time.time() - active[1] > _LONG_ON_GPU_S else None

    # ---- parts

    def make(
        self,
        backend: str,
        *,
        timeout: timedelta | None = None,
        device_id: torch.device | None = None,
        options: Any = None,
    ) -> None:
        """Make the default group under the next name all ranks agree on (main thread)."""
        choose_interfaces(backend)
        if "nccl" in backend:
            _leave_failures_to_us()
        file = FileStore(str(self._folder / "rendezvous"), -1)
        prefixed = PrefixStore(f"{self.generation}.{self._made}", file)
        breakable = BreakableStore(prefixed, JOIN_PATIENCE_S)
        with self._lock:
            self._given_up, self.reason = False, None
            self._stores = [breakable]
            self._connections = []
        breakable.meet(self.rank, self.world_size, "before")
        # NCCL's own threads ask the store for ever; in Python they would have to wait for the GIL, and a destructor
        # that joins them while it holds the GIL would never end. So only gloo is given the store in Python.
        store = prefixed if "nccl" in backend else breakable
        if device_id is None and "nccl" in backend and self.device.type == "cuda":
            device_id = self.device
        self._timeout = timeout or internals.default_timeout(backend)
        internals.make_default_group(
            backend,
            store=PrefixStore("default", store),
            rank=self.rank,
            world_size=self.world_size,
            timeout=self._timeout,
            device_id=device_id,
            options=options,
        )
        # One that fails at once in the next line must not close its connections on a peer that is still making them.
        breakable.meet(self.rank, self.world_size, "after")
        self._current = backend

    def exchange(self, key: str, value: str) -> list[str]:
        """Give every rank a text and get everybody's, by rank (each rank calls it once per making of the group)."""
        store = self._stores[0]
        store.set(f"{key}/{self.rank}", value)
        return [store.get(f"{key}/{rank}").decode() for rank in range(self.world_size)]

    def leave(self) -> None:
        """Forget every group (main thread); none of their connections may be in use."""
        internals.tear_down()
        with self._lock:
            self._stores, self._connections = [], []

    def init_again(
        self,
        backend: str,
        timeout: timedelta | None,
        device_id: torch.device | None,
        options: Any,
    ) -> None:
        """Do what ``init_process_group`` in a cell asks for: keep the group if it fits, else make another."""
        if not self.broken and backend == self._current and options is None and timeout in (None, self._timeout):
            return
        if len(self.ranks) < self.world_size:
            raise InputError(
                "a process group is made by all ranks together, and this cell runs on "
                f"{_named(self.ranks)} of {self.world_size}: run it without -r"
            )
        old = internals.records()
        self.leave()
        self._made += 1
        self.make(backend, timeout=timeout, device_id=device_id, options=options)
        for line in reattach(self, old, self.namespace)[1]:
            self._notice(line)

    def _used(self) -> tuple[int, int]:
        """Collectives issued and bytes moved: sending to one rank is no collective, NCCL's bytes cannot be seen."""
        return internals.issued(), sum(group.traffic() for group in self._connections)

    @contextlib.contextmanager
    def _remember_connections(self) -> Iterator[None]:
        """Around the making of any group: find the connections it opened."""
        before = descriptors()
        try:
            yield
        finally:
            found = find_new(before, descriptors())
            with self._lock:
                self._connections.extend(found)
                given_up, reason = self._given_up, self.reason
            if given_up:  # while the group was being made
                for group in found:
                    group.shut_down()
        if given_up:
            raise CollectiveBroken(reason)


def _leave_failures_to_us() -> None:
    """Keep NCCL's watchdog from ending the process when a collective fails or takes long (the user's choice stands)."""
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
