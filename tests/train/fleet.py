"""Real ranks for tests: four processes, forked from one that has imported torch, that run one case after another.

Each case gets a process group of its own on as many of them as it asks for, so that a case costs about 30 ms to set up.
A case is a module-level function of a test file; it is loaded by path in the ranks, and what it returns is pickled.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.util
import io
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any

CASE_S = 60.0
OTHERS_S = 5.0  # what the other ranks get to finish once one has failed
PRELOAD = ["torch.distributed.checkpoint", "torch._dynamo", "torch._subclasses", "nbdist.train.checkpoint"]


@dataclass
class Told:
    """What one rank has to say after a case."""

    value: Any = None
    text: str = ""
    error: str = ""
    ename: str = ""
    evalue: str = ""


class Fleet:
    """The processes; restarted when a case has hung or killed one."""

    def __init__(self, size: int = 4) -> None:
        self.size = size
        self.folder = Path(tempfile.mkdtemp(prefix="fleet-"))
        self.cases = 0
        self.ranks: list[tuple[Any, Connection]] = []
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload([*PRELOAD, "fleet"])

    def start(self) -> None:
        for number in range(self.size):
            ours, theirs = self.context.Pipe()
            process = self.context.Process(
                target=serve, args=(theirs, str(self.folder / f"stack{number}")), daemon=False
            )
            process.start()
            theirs.close()
            self.ranks.append((process, ours))
        for _, connection in self.ranks:
            connection.recv()

    def stop(self) -> None:
        for process, connection in self.ranks:
            process.kill()
            process.join()
            connection.close()
        self.ranks = []

    def close(self) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def run(self, world_size: int, case: Callable[..., Any], *args: Any) -> list[Told]:
        """Run a case on the first ranks; what each of them said, in rank order."""
        if not self.ranks:
            self.start()
        self.cases += 1
        file = Path(case.__code__.co_filename)
        store = str(self.folder / f"store{self.cases}")
        for rank in range(world_size):
            self.ranks[rank][1].send((str(file), case.__name__, args, rank, world_size, store))
        told: dict[int, Told] = {}
        by_connection = {self.ranks[r][1]: r for r in range(world_size)}
        patience = CASE_S
        while len(told) < world_size:
            ready = wait([c for c, r in by_connection.items() if r not in told], patience)
            if not ready:
                return self._hung(world_size, told)
            for connection in ready:
                rank = by_connection[connection]
                try:
                    told[rank] = connection.recv()
                except EOFError:
                    told[rank] = Told(error=f"rank {rank} died", ename="Died")
                if told[rank].error:
                    patience = OTHERS_S
        if any(t.ename == "Died" for t in told.values()):
            self.stop()
        return [told[r] for r in range(world_size)]

    def _hung(self, world_size: int, told: dict[int, Told]) -> list[Told]:
        for rank in set(range(world_size)) - set(told):
            stack = self.folder / f"stack{rank}"
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.ranks[rank][0].pid, signal.SIGUSR1)
            self.ranks[rank][0].join(0.3)
            told[rank] = Told(error=f"rank {rank} hangs:\n{stack.read_text()}", ename="Hang")
        self.stop()
        return [told[r] for r in range(world_size)]


def serve(connection: Connection, stack: str) -> None:
    """Life of one rank's process."""
    import torch

    # A process of a fork server would start loader workers by another one, as Python 3.14 does.
    multiprocessing.set_start_method("fork", force=True)
    with open(stack, "w") as file:
        faulthandler.register(signal.SIGUSR1, file, all_threads=True)
        torch.set_num_threads(1)
        # What the parent prints is pytest's; what a case prints comes back with its value.
        warnings.simplefilter("error")
        # torch warns users of FSDP 1 through its own state dict functions.
        warnings.filterwarnings("ignore", message="When using ``NO_SHARD``")
        warnings.filterwarnings("ignore", message="FSDP.state_dict_type")
        warnings.filterwarnings("ignore", message="TypedStorage is deprecated")  # torch 2.9's own checkpoint reader
        # webdataset leaves a shard open that is not read to its end.
        warnings.filterwarnings("ignore", message="unclosed file .*tar", category=ResourceWarning)
        connection.send("ready")
        while True:
            try:
                task = connection.recv()
            except EOFError:
                os._exit(0)
            connection.send(_run(*task))


def _run(file: str, name: str, args: tuple[Any, ...], rank: int, world_size: int, store: str) -> Told:
    import torch.distributed as dist

    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size)
    )
    text = io.StringIO()
    told = Told()
    try:
        with contextlib.redirect_stdout(text):
            dist.init_process_group("gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size)
            told.value = getattr(load(file), name)(*args)
            dist.barrier()
    except BaseException as error:
        told.error, told.ename, told.evalue = traceback.format_exc(), type(error).__name__, str(error)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    told.text = text.getvalue()
    return told


def load(file: str) -> ModuleType:
    """A test file as a module, once per process."""
    name = f"case_{Path(file).stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]
