"""Starts ranks on this machine through the fork server, and says what they start with.

Every automatic choice carries its reason; nothing here imports torch: how many devices there are is asked of a
throw-away fork of the fork server, under the environment the ranks will have.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from nbdist.errors import InputError, StartError

__all__ = ["Choice", "ForkServer", "choose", "notebook_folder", "rank_environment", "runtime_folder", "shadowing_files"]

IMPORT_TIMEOUT_S = 120.0
# Set for each rank by nbdist as torchrun does, never taken from the notebook's own environment.
_RENDEZVOUS = (
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "ROLE_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE",
    "ROLE_NAME",
    "MASTER_ADDR",
    "MASTER_PORT",
)
# Read once, when Python or a library is loaded: a fork server that imported under other values must be replaced.
_READ_AT_IMPORT = ("OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "TORCH", "PYTORCH_", "PYTHON", "LD_", "MPLBACKEND")
_DEFAULT_CPU_RANKS = 2
_PLACEHOLDER_PORT = "29500"  # nothing of nbdist binds it; libraries that only look for MASTER_PORT find a number


def _read_at_import(env: Mapping[str, str]) -> dict[str, str]:
    return {k: v for k, v in env.items() if k.startswith(_READ_AT_IMPORT)}


def _library_path() -> list[str]:
    """The notebook's `sys.path` without its own folder: a file beside the notebook must not stand in for a library."""
    here = os.readlink("/proc/self/cwd")
    path = [p for p in sys.path if p and os.path.realpath(p) != here]
    package = str(Path(__file__).resolve().parents[2])  # it may be this very folder, in nbdist's own source tree
    return path if package in path else [*path, package]


def shadowing_files(names: Sequence[str] = ("torch", "numpy", "IPython", "zmq", "nbdist")) -> list[Path]:
    """Files in the notebook's folder that hide a library which the ranks need."""
    found = []
    for name in names:
        for path in (Path(f"{name}.py"), Path(name, "__init__.py")):
            spec = importlib.util.find_spec(name) if name in sys.modules else None
            if path.is_file() and not (spec and spec.origin and Path(spec.origin).resolve() == path.resolve()):
                found.append(path.resolve())
    return found


def notebook_folder() -> str:
    """The notebook's working folder, where ranks work too.

    Raises
    ------
    StartError
        If it has been removed.
    """
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise StartError("the notebook's folder was removed: change to one that exists, with %cd") from None


def runtime_folder() -> Path:
    """A new folder of mode 0700 for a cluster's socket and rendezvous files, its path short enough for a socket."""
    for base in (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp"):
        if base and len(os.fsencode(base)) < 60 and os.access(base, os.W_OK):
            with contextlib.suppress(OSError):  # no room there
                return Path(tempfile.mkdtemp(prefix="nbdist-", dir=base))
    raise StartError("no writable folder with a short path and room was found: set XDG_RUNTIME_DIR or TMPDIR to one")


def rank_environment(env: Mapping[str, str], rank: int, world_size: int) -> dict[str, str]:
    """What a rank finds in `os.environ`: the notebook's variables, and torchrun's contract for this rank.

    Parameters
    ----------
    env
        The notebook's environment at the time of the start.
    rank, world_size
        Global rank and number of ranks; on one machine the local rank is the rank.
    """
    kept = {k: v for k, v in env.items() if k not in _RENDEZVOUS and not k.startswith("TORCHELASTIC_")}
    contract = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "ROLE_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_WORLD_SIZE": "1",
        "ROLE_WORLD_SIZE": str(world_size),
        "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": _PLACEHOLDER_PORT,
    }
    if world_size > 1:
        kept.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does
    return kept | contract


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """How many ranks on what, and why.

    Attributes
    ----------
    num_gpus
        What torch sees in the ranks.
    reason
        Why this backend and this number, in words that fit behind them in brackets.
    """

    n: int
    backend: str
    device: str
    num_gpus: int
    reason: str

    def __str__(self) -> str:
        what = "GPU" if self.device == "cuda" else "CPU"
        workers = "1 worker" if self.n == 1 else f"{self.n} workers"
        return f"{workers} on {what}, backend {self.backend} ({self.reason})"


def choose(n: int | None, backend: str | None, seen: Mapping[str, Any]) -> Choice:
    """Decide on ranks, backend and device.

    Parameters
    ----------
    n
        Number of ranks asked for, or None for one per GPU (without a GPU: 2).
    backend
        "nccl", "gloo", or None to choose.
    seen
        What the ranks' torch sees: ``count`` of GPUs, ``cuda`` version of the build or None, perhaps an ``error``.

    Raises
    ------
    InputError
        For a number or backend that cannot be had here, with the way out.
    """
    gpus = int(seen["count"])
    if backend not in (None, "nccl", "gloo"):
        raise InputError(f"--backend takes nccl or gloo, not {backend!r}")
    if n is not None and n < 1:
        raise InputError(f"the number of ranks must be at least 1, not {n}")
    if gpus == 0:
        why = _why_no_gpu(seen)
        if backend == "nccl":
            raise InputError(f"backend nccl needs a GPU, and there is none ({why}): leave --backend out, or use gloo")
        return Choice(n=n or _DEFAULT_CPU_RANKS, backend="gloo", device="cpu", num_gpus=0, reason=why)
    n = n or gpus
    if n > gpus and backend != "gloo":
        have = "is 1 GPU" if gpus == 1 else f"are {gpus} GPUs"
        raise InputError(
            f"{n} ranks with nccl need {n} GPUs and there {have}: use -n {gpus}, or --backend gloo,"
            " whose ranks share GPUs"
        )
    reason = f"{gpus} GPU{'s' if gpus > 1 else ''} visible"
    if backend == "gloo":
        reason += ", gloo as asked" + (f", {n} ranks share them" if n > gpus else "")
    return Choice(n=n, backend=backend or "nccl", device="cuda", num_gpus=gpus, reason=reason)


def _why_no_gpu(seen: Mapping[str, Any]) -> str:
    if seen.get("error"):
        return f"torch could not count GPUs: {seen['error']}"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    driver = (
        Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists()
    )
    if driver and seen.get("cuda") is None:
        return "this torch is a CPU build"
    if not driver:
        return "no NVIDIA driver found"
    if visible is not None:
        return f"CUDA_VISIBLE_DEVICES={visible} leaves none"
    return "the driver shows torch no GPU"


class ForkServer:
    """The notebook's side of the fork server process; a lock sees to it that one thread at a time speaks with it."""

    def __init__(self) -> None:
        self.environment = _read_at_import(os.environ)
        self.path = _library_path()
        self._lock = threading.Lock()
        self._hello: dict[str, Any] | None = None
        self._users = 0
        self._retired = False
        self._control, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        code = (
            "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from nbdist.worker.forkserver import main;"
            " main(*map(int, sys.argv[2:]))"
        )
        argv = [sys.executable, "-P", "-c", code, json.dumps(self.path)]
        argv += [str(control.fileno()), str(os.getpid())]
        # One BLAS thread while importing: OpenBLAS starts its threads when numpy is imported, and a process that forks
        # must have one. Ranks get the user's own value back.
        env = dict(os.environ, OPENBLAS_NUM_THREADS="1")
        try:
            self.process = subprocess.Popen(
                argv,
                env=env,
                pass_fds=(control.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            self._control.close()
            raise StartError(f"the fork server could not be started: {error.strerror}") from error
        finally:
            control.close()

    def outdated(self) -> str | None:
        """Why ranks cannot be forked from it any more, or None: dead, or what it imported under has changed."""
        if self.process.poll() is not None:
            return "it had ended"
        now = _read_at_import(os.environ)
        if changed := sorted(k for k in now.keys() | self.environment.keys() if now.get(k) != self.environment.get(k)):
            return f"{', '.join(changed)} changed"
        if self._hello and self._first_torch() not in (None, self._hello.get("file")):
            return "sys.path leads to another torch"
        return None

    @staticmethod
    def _first_torch() -> str | None:
        for folder in _library_path():
            path = os.path.join(folder, "torch", "__init__.py")
            if os.path.isfile(path):
                return path
        return None

    def wait_warm(self) -> dict[str, Any]:
        """Wait until torch is imported there; what it says of itself: ``torch`` version and ``file``.

        Raises
        ------
        StartError
            If torch cannot be imported, with the error that torch's import raised.
        """
        with self._lock:
            if self._hello is None:
                self._hello = self._receive(IMPORT_TIMEOUT_S)
            if "error" in self._hello:
                raise StartError(f"torch cannot be imported in the workers: {self._hello['error']}")
            return self._hello

    def _receive(self, timeout_s: float) -> dict[str, Any]:
        self._control.settimeout(timeout_s)
        try:
            data = self._control.recv(1 << 20)
        except TimeoutError:
            self.process.kill()  # a late answer would be taken for that of the next question
            raise StartError(f"the fork server did not answer within {timeout_s:.0f} s") from None
        except OSError:
            data = b""
        if not data:
            raise StartError(f"the fork server ended (exit status {self.process.wait()})")
        reply: dict[str, Any] = json.loads(data)
        return reply

    def _ask(self, request: dict[str, Any], fds: Sequence[int] = ()) -> dict[str, Any]:
        self.wait_warm()
        with self._lock:
            try:
                socket.send_fds(self._control, [json.dumps(request).encode()], list(fds))
            except OSError:
                raise StartError("the fork server is gone") from None
            return self._receive(30.0)

    def count_devices(self) -> dict[str, Any]:
        """How many GPUs the ranks' torch will see under the notebook's present environment."""
        env = {k: v for k, v in os.environ.items() if k.isprintable()}
        return self._ask(
            {
                "do": "count",
                "env": {k: env[k] for k in env if k.startswith(("CUDA", "NVIDIA", "PATH", "LD_", "PYTORCH", "HOME"))},
            }
        )

    def fork(self, spec: Mapping[str, Any], stdout: int, stderr: int, exits: int) -> int:
        """Fork one rank; its process id.

        Parameters
        ----------
        spec
            What `nbdist.worker.main.run_rank` takes.
        stdout, stderr
            Write ends of the pipes that become its descriptors 1 and 2.
        exits
            Write end of the pipe that takes its wait status as decimal digits.
        """
        payload = os.memfd_create("nbdist-spec", os.MFD_CLOEXEC)
        try:
            with open(payload, "wb", closefd=False) as file:
                file.write(json.dumps(spec).encode("utf-8", "surrogateescape"))
            os.lseek(payload, 0, os.SEEK_SET)
            reply = self._ask({"do": "fork"}, (payload, stdout, stderr, exits))
        finally:
            os.close(payload)
        if "error" in reply:
            raise StartError(f"a worker could not be forked: {reply['error']}")
        return int(reply["pid"])

    def kill(self, pids: Sequence[int]) -> None:
        """End these ranks and every process in their sessions or below them, at once."""
        try:
            self._ask({"do": "kill", "pids": list(pids)})
        except StartError:
            for process in _below(pids):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()

    def hold(self) -> None:
        """A cluster begins to use it."""
        self._users += 1

    def release(self) -> None:
        """A cluster does not use it any more."""
        self._users -= 1
        if self._retired and not self._users:
            self.close()

    def retire(self) -> None:
        """End it as soon as no cluster uses it: another one takes its place."""
        self._retired = True
        if not self._users:
            self.close()

    def close(self) -> None:
        """End the fork server, and with it all its ranks."""
        self._control.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _below(pids: Sequence[int]) -> list[psutil.Process]:
    """These processes, all below them and all in their sessions; what the fork server knows while it lives."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getsid(process.pid) in pids or any(p.pid in pids for p in (process, *process.parents())):
                found.append(process)
    return found
