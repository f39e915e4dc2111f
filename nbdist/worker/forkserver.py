"""The warm process that forks ranks: it imports torch once, constructs and computes nothing, and has one thread.

The notebook speaks to it over an inherited ``SOCK_SEQPACKET`` pair that carries one request and one reply at a time;
with each rank comes a pipe for its wait status. It ends, and every process of its ranks with it, when the notebook
closes its end or the notebook's process ends (a pidfd), whichever is seen first: PR_SET_PDEATHSIG would fire when the
*thread* that started it ends, and a child of the notebook may have inherited the socket.

It is the reaper of orphans below it, so that a grandchild in a session of its own is found too.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import select
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

__all__ = ["IMPORTS", "LATER_IMPORTS", "main", "process_tree"]

IMPORTS = (
    "torch",
    "torch.distributed",
    "torch.nn.functional",
    "IPython.core.interactiveshell",
    "IPython.core.magics",
    "IPython.core.completerlib",
    "IPython.core.logger",
    "jupyter_client.session",
    "nbdist.worker.main",
    "nbdist.worker.group",
    "nbdist.worker.steps",
    "nbdist.worker.telemetry",
    "nbdist.worker.step_parts",
    "nbdist.worker.memory_use",
    "nbdist.worker.metric_values",
    "nbdist.worker.shell",
    "nbdist.worker.hints",
    "nbdist.worker.spawn",
    "nbdist.worker.streams",
)
# What a first DDP or FSDP construction would load lazily, each rank for itself: about 800 modules.
LATER_IMPORTS = (
    "torch.optim",
    "torch._dynamo",
    "nbdist.worker.attach",
    "torch.nn.parallel",
    "torch.utils.data",
    "torch.utils.checkpoint",
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "nbdist.train.parallel",
    "nbdist.train.data",
    "nbdist.train.memory",
    "pynvml",
    "matplotlib.backends.backend_agg",
)
_PR_SET_CHILD_SUBREAPER = 36
_FIRST_PAUSE_MS = 200  # a cell that was sent at once waits for the imports: its ranks come first
_PAUSE_MS = 2000
_END_S = 5.0  # a process in the midst of a system call dies when that returns


def process_tree(roots: Iterable[int], sessions: Iterable[int] = ()) -> list[int]:
    """Ids of the given processes, of all below them, and of all in the given sessions, that are not zombies."""
    parent: dict[int, int] = {}
    chosen = set(roots)
    wanted = set(sessions)
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            fields = Path("/proc", entry, "stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            continue
        if fields[0] == b"Z":
            continue
        pid = int(entry)
        parent[pid] = int(fields[1])
        if int(fields[3]) in wanted:
            chosen.add(pid)
    grown = True
    while grown:
        below = {pid for pid, up in parent.items() if up in chosen and pid not in chosen}
        chosen |= below
        grown = bool(below)
    return [pid for pid in chosen if pid in parent]


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _count_devices() -> dict[str, Any]:
    import torch

    try:
        return {"count": torch.cuda.device_count(), "cuda": torch.version.cuda, "torch": torch.__version__}
    except Exception as error:  # a broken driver must not end the count: the reason is shown instead
        return {"count": 0, "cuda": torch.version.cuda, "torch": torch.__version__, "error": str(error)}


class ForkServer:
    """Serves fork requests until the notebook is gone."""

    def __init__(self, control: int, notebook_pid: int) -> None:
        self.control = socket.socket(fileno=control)
        self.ranks: dict[int, int] = {}  # process id to the pipe that takes its wait status
        self.folders: set[str] = set()
        self.notebook = os.pidfd_open(notebook_pid)
        if os.getppid() != notebook_pid:  # it ended before its pidfd was open
            os._exit(0)
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._wake_r, self._wake_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.set_wakeup_fd(self._wake_w, warn_on_full_buffer=False)
        self._poll = select.poll()
        for fd in (self.control.fileno(), self.notebook, self._wake_r):
            self._poll.register(fd, select.POLLIN)

    def serve(self, pending: list[str]) -> None:
        """Answer requests; while there are none, import what is `pending`, one module at a time."""
        pause_ms = _FIRST_PAUSE_MS
        while True:
            ready = {fd for fd, _ in self._poll.poll(pause_ms if pending else None)}
            if self.notebook in ready:
                self.leave()
            if self._wake_r in ready:
                os.read(self._wake_r, 4096)
                self.reap()
            if self.control.fileno() in ready:
                self.answer()
                pause_ms = _PAUSE_MS  # requests come in a row, and the ranks that start want the cores
            elif not ready:
                pause_ms = 0
            if pending and not ready:
                _import(pending.pop(0))
                if not pending:
                    gc.collect()
                    gc.enable()

    def orphaned(self) -> bool:
        """Whether the notebook has ended, or has closed its end; asked before it has sent anything."""
        return bool(select.select([self.notebook, self.control.fileno()], [], [], 0)[0])

    def answer(self) -> None:
        """Read one request and reply to it."""
        data, fds, _, _ = socket.recv_fds(self.control, 65536, 8)
        if not data:
            self.leave()
        request = json.loads(data)
        reply: dict[str, Any]
        try:
            if request["do"] == "fork":
                with os.fdopen(fds.pop(0), "rb") as payload:
                    spec = json.loads(payload.read())
                reply = {"pid": self.fork(spec, fds)}
            elif request["do"] == "count":
                reply = self.ask_in_a_fork(request["env"])
            elif request["do"] == "kill":
                _kill(process_tree(request["pids"], request["pids"]))
                reply = {}
            elif request["do"] == "describe":
                reply = {"threads": len(os.listdir("/proc/self/task")), "modules": len(sys.modules)}
            else:
                reply = {"error": f"unknown request {request['do']!r}"}
        except OSError as error:
            reply = {"error": f"{error.strerror or error} (errno {error.errno})"}
        for fd in fds:
            os.close(fd)
        self.control.send(json.dumps(reply).encode())

    def fork(self, spec: dict[str, Any], fds: list[int]) -> int:
        """Fork one rank with the write ends of its output pipes and of that for its wait status; its process id."""
        if (threads := threading.active_count()) != 1:
            raise OSError(0, f"the fork server has {threads} threads")
        self.folders.add(spec["folder"])
        gc.freeze()  # what the ranks share stays shared: their collectors leave it alone
        pid = os.fork()
        if pid:
            self.ranks[pid] = os.dup(fds[2])
            return pid
        try:
            self._forget()
            gc.enable()
            os.close(fds.pop())
            from nbdist.worker.main import run_rank

            run_rank(spec, *fds)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)

    def ask_in_a_fork(self, env: dict[str, str]) -> dict[str, Any]:
        """Count devices under this environment in a process thrown away afterwards: CUDA is never touched here."""
        r, w = os.pipe2(os.O_CLOEXEC)
        pid = os.fork()
        if pid == 0:
            try:
                self._forget()
                os.environ.clear()
                os.environ.update(env)
                os.write(w, json.dumps(_count_devices()).encode())
            finally:
                os._exit(0)
        os.close(w)
        with os.fdopen(r, "rb") as pipe:
            answer = pipe.read()
        os.waitpid(pid, 0)
        if not answer:
            return {"count": 0, "error": "the process that counted the devices died"}
        result: dict[str, Any] = json.loads(answer)
        return result

    def _forget(self) -> None:
        """In a fork: leave nothing of the fork server open or set."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for fd in (self.control.detach(), self.notebook, self._wake_r, self._wake_w, *self.ranks.values()):
            os.close(fd)

    def reap(self) -> None:
        """Tell of ranks that ended, and end what was left in their sessions."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self.ranks:
                told = self.ranks.pop(pid)
                _kill(process_tree((), [pid]))
                if not self.ranks:  # what they left in sessions of its own has become a child of this process
                    self.end_all()
                try:
                    os.write(told, str(status).encode())
                except BrokenPipeError:
                    pass  # nobody asks any more
                os.close(told)

    def end_all(self) -> None:
        """Kill every process below this one until there is none: what loses its parent becomes a child of this one."""
        me = os.getpid()
        deadline_s = time.monotonic() + _END_S
        while time.monotonic() < deadline_s:
            _kill(pid for pid in process_tree([me]) if pid != me)
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                return
            time.sleep(0.002)

    def leave(self) -> None:
        """End everything below this process, remove the clusters' folders, and end."""
        self.end_all()
        for folder in self.folders:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)


def _import(name: str) -> None:
    try:
        importlib.import_module(name)
    except Exception:
        # A module that a torch version does not have, an optional library, a setting that one of them refuses: ranks
        # meet it themselves, where the user can read it.
        return


def main(control: int, notebook_pid: int) -> None:
    """Process entry: import, say so, serve."""
    server = ForkServer(control, notebook_pid)
    signal.signal(signal.SIGALRM, lambda *_: server.leave() if server.orphaned() else None)
    signal.setitimer(signal.ITIMER_REAL, 0.5, 0.5)  # importing torch takes seconds, in which nothing is polled
    gc.disable()  # the collector would take a third of the time of the imports
    try:
        for name in IMPORTS:
            importlib.import_module(name)
        import torch

        hello = {"torch": torch.__version__, "file": torch.__file__}
    except BaseException as error:  # whatever a broken installation raises is what the user must read
        hello = {"error": f"{type(error).__name__}: {error}"}
    signal.setitimer(signal.ITIMER_REAL, 0)
    server.control.send(json.dumps(hello).encode())
    server.serve(list(LATER_IMPORTS))
