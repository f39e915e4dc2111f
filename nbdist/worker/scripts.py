"""What a pasted script does to its process group, and what it means inside a rank.

``init_process_group`` joins or renews nbdist's group, ``destroy_process_group`` really destroys it (the notebook has it
made again before the next cell), and ``mp.spawn(train, nprocs=world_size)`` calls ``train`` once in each rank. Where
a call cannot mean the cluster (another number of processes, a child process, a thread), torch's own function runs.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch._C._distributed_c10d import Store

from nbdist.errors import InputError
from nbdist.worker import internals

if TYPE_CHECKING:
    from nbdist.worker.group import Group

__all__ = ["Scripts"]


class FinishedSpawn:
    """What ``mp.spawn(..., join=False)`` gives back: everything has already run."""

    processes: tuple[()] = ()

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        """All processes have ended."""
        return True

    def pids(self) -> list[int]:
        """No process was started."""
        return []


class Scripts:
    """Stands in for the functions of torch that a script calls to start and end its processes.

    Parameters
    ----------
    group
        The rank's process group.
    notice
        Called with one line the user should read.
    """

    def __init__(self, group: Group, notice: Callable[[str], None]) -> None:
        self._group = group
        self._notice = notice
        self._pid = os.getpid()
        self._said: set[str] = set()
        self._init = dist.init_process_group
        self._spawn: Callable[..., Any] = torch.multiprocessing.spawn  # type: ignore[attr-defined]

    def install(self) -> None:
        """Put the stand-ins in place, for the life of this process."""
        internals.replace_everywhere("init_process_group", _like(self._init, self.init_process_group))
        spawn = _like(self._spawn, self.spawn)
        torch.multiprocessing.spawn = spawn  # type: ignore[attr-defined]
        sys.modules["torch.multiprocessing.spawn"].spawn = spawn  # type: ignore[attr-defined]

    def begin_cell(self) -> None:
        """Allow each notice once more."""
        self._said.clear()

    def init_process_group(
        self,
        backend: str | None = None,
        init_method: str | None = None,
        timeout: timedelta | None = None,
        world_size: int = -1,
        rank: int = -1,
        store: Store | None = None,
        group_name: str = "",
        pg_options: Any = None,
        device_id: torch.device | int | None = None,
        **more: Any,
    ) -> None:
        """Join nbdist's group, or make it again with the arguments asked for.

        Where the ranks meet (`init_method`, `store`) is nbdist's business; the rest is honoured.

        Raises
        ------
        InputError
            If the script counts on other processes than the cluster has.
        """
        if not self._in_rank():
            self._init(
                backend, init_method, timeout, world_size, rank, store, group_name, pg_options, device_id, **more
            )
            return
        group = self._group
        if world_size not in (-1, group.world_size):
            raise InputError(
                f"init_process_group(world_size={world_size}): this cluster has {group.world_size} ranks; "
                f"leave world_size out, or start {world_size}: %distributed restart -n {world_size}"
            )
        if rank not in (-1, group.rank):
            raise InputError(
                f"init_process_group(rank={rank}) on rank {group.rank} of the cluster: leave rank out, or pass `rank`"
            )
        if isinstance(device_id, int):
            device_id = torch.device("cuda", device_id)
        wanted = self._choose(backend)
        group.init_again(wanted, timeout, device_id if "nccl" in wanted else None, pg_options)

    def _choose(self, backend: str | None) -> str:
        if backend is None:
            return self._group.current_backend
        wanted = str(backend).lower()
        if "nccl" in wanted and self._no_nccl() is not None:
            self._say(f'init_process_group("{wanted}") uses gloo ({self._no_nccl()})')
            return "gloo"
        names = [part.split(":")[-1] for part in wanted.split(",")]
        for name in names:
            if name not in dist.Backend.backend_list or not dist.is_backend_available(name):
                raise InputError(f'init_process_group("{backend}"): this torch has no backend {name!r}')
        return wanted

    def _no_nccl(self) -> str | None:
        """Why NCCL cannot be used; None if it can."""
        if self._group.device.type != "cuda":
            return "the ranks run on the CPU" if torch.cuda.is_available() else "no usable GPU"
        if not dist.is_nccl_available():
            return "this torch was built without NCCL"
        if torch.cuda.device_count() < self._group.world_size and "nccl" not in self._group.backend:
            return "ranks share a GPU"
        return None

    def spawn(
        self,
        fn: Callable[..., Any],
        args: Iterable[Any] = (),
        nprocs: int = 1,
        join: bool = True,
        daemon: bool = False,
        start_method: str = "spawn",
    ) -> Any:
        """Call ``fn(rank, *args)`` here, if there are to be as many processes as ranks; else spawn them."""
        if not self._in_rank() or nprocs != self._group.world_size or len(self._group.ranks) != nprocs:
            return self._spawn(fn, args, nprocs, join, daemon, start_method)
        name = getattr(fn, "__name__", "the function")
        self._say(f"mp.spawn: each of the {nprocs} ranks calls {name}(rank, ...) itself, no process is started")
        fn(self._group.rank, *args)
        return None if join else FinishedSpawn()

    def _in_rank(self) -> bool:
        return os.getpid() == self._pid and threading.current_thread() is threading.main_thread()

    def _say(self, text: str) -> None:
        if text not in self._said and self._group.rank == min(self._group.ranks):
            self._said.add(text)
            self._notice(text)


def _like(original: Callable[..., Any], replacement: Callable[..., Any]) -> Callable[..., Any]:
    """A plain function that looks like the original one, for ``help()`` and for code that inspects it."""

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        return replacement(*args, **kwargs)

    for attribute in ("__name__", "__qualname__", "__doc__", "__module__"):
        setattr(stand_in, attribute, getattr(original, attribute))
    stand_in.__wrapped__ = original  # type: ignore[attr-defined]
    return stand_in
