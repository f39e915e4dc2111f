"""Drives a real Jupyter kernel as a notebook does, and notes when each message arrives."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import zmq
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import KernelManager

__all__ = ["Kernel", "Ran", "alive", "end"]

_DELIMITER = b"<IDS|MSG>"
READY_S = 90.0


@dataclass
class Ran:
    """One executed cell, times in seconds after it was sent (None: never)."""

    sent: float
    status: str = "late"
    replied: float | None = None
    idle: float | None = None
    shown: list[tuple[float, str, str]] = field(default_factory=list)  # (seconds, kind, text)
    num_bytes: int = 0

    @property
    def wall(self) -> float | None:
        """How long the notebook showed the cell as running."""
        return None if self.replied is None or self.idle is None else max(self.replied, self.idle)

    @property
    def text(self) -> str:
        """Everything shown, in order."""
        return "".join(text for _, _, text in self.shown)

    def when(self, needle: str) -> float | None:
        """When a text was first shown."""
        return next((at for at, _, text in self.shown if needle in text), None)


class Kernel:
    """A kernel of another environment.

    Parameters
    ----------
    python
        Interpreter of the environment.
    folder
        The notebook's folder; the kernel's log goes there.
    env
        Variables on top of this process's.
    module
        What to start instead of ipykernel.
    """

    def __init__(self, python: Path, folder: Path, env: Mapping[str, str], module: str = "ipykernel_launcher") -> None:
        self.folder = folder
        self._manager = KernelManager()
        self._manager._kernel_spec = KernelSpec(
            argv=[str(python), "-m", module, "-f", "{connection_file}"], language="python"
        )
        self._log = (folder / "kernel.log").open("ab")
        self._manager.start_kernel(
            env={**os.environ, **env}, cwd=str(folder), stdout=self._log, stderr=subprocess.STDOUT
        )
        self.seen: dict[int, psutil.Process] = {}
        self._connect()

    # ---- cells

    def run(
        self,
        code: str,
        timeout_s: float = 300.0,
        actions: Sequence[tuple[float | Callable[[Ran], bool], Callable[[], object]]] = (),
        linger_s: float = 0.0,
    ) -> Ran:
        """Execute one cell and wait for its reply and for idle.

        Parameters
        ----------
        code
            Source of the cell.
        timeout_s
            Give up after this; the result's status is then "late".
        actions
            (when, what): done once while the cell runs, after so many seconds or as soon as the condition holds.
        linger_s
            Go on listening for so long after idle, for what comes late.
        """
        content = {
            "code": code,
            "silent": False,
            "store_history": True,
            "user_expressions": {},
            "allow_stdin": False,
            "stop_on_error": False,
        }
        message = self._session.msg("execute_request", content)
        mine = message["header"]["msg_id"]
        pending = list(actions)
        begun = time.time()
        ran = Ran(sent=begun)
        self._session.send(self._shell, message)
        while (now := time.time() - begun) < timeout_s:
            for action in list(pending):
                when, what = action
                if when(ran) if callable(when) else now >= when:
                    pending.remove(action)
                    what()
            if ran.wall is not None and not pending and now >= ran.wall + linger_s:
                break
            wait_ms = 20 if pending or ran.wall is not None else 200
            for socket, _ in self._poller.poll(wait_ms):
                self._read(socket, mine, begun, ran)
        return ran

    def _read(self, socket: zmq.Socket[bytes], mine: str, begun: float, ran: Ran) -> None:
        while True:
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            at = time.time() - begun
            first = frames.index(_DELIMITER)
            header, parent = json.loads(frames[first + 2]), json.loads(frames[first + 3])
            ours = parent.get("msg_id") == mine
            if header["msg_type"] == "execute_reply":
                if ours:
                    ran.replied, ran.status = at, json.loads(frames[first + 5])["status"]
            elif header["msg_type"] == "status":
                if ours and json.loads(frames[first + 5])["execution_state"] == "idle":
                    ran.idle = at
            else:
                ran.num_bytes += sum(map(len, frames))
                ran.shown.extend(
                    (at, header["msg_type"], text) for text in _texts(header["msg_type"], frames[first + 5])
                )

    def value(self, expression: str) -> Any:
        """Value of a literal that the kernel itself prints."""
        ran = self.run(f"%bench_value {expression}", timeout_s=60)
        return json.loads(ran.text.split("@@")[1])

    # ---- life

    def _connect(self) -> None:
        self._session = self._manager.session.clone()
        self._shell = self._manager.connect_shell(identity=uuid.uuid4().bytes)
        self._iopub = self._manager.connect_iopub()
        for socket in (self._shell, self._iopub):
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.setsockopt(zmq.LINGER, 0)
        self._poller = zmq.Poller()
        self._poller.register(self._iopub, zmq.POLLIN)
        self._poller.register(self._shell, zmq.POLLIN)
        end_s = time.monotonic() + READY_S
        while time.monotonic() < end_s:
            if self.run("pass", timeout_s=2).status == "ok":
                self.run(_LOCAL_MAGICS)
                return
        raise RuntimeError(f"the kernel did not answer, see {self.folder / 'kernel.log'}")

    @property
    def pid(self) -> int:
        """The kernel's process."""
        return int(self._manager.provisioner.pid)  # type: ignore[union-attr]

    def interrupt(self) -> None:
        """What the notebook's Stop button does."""
        self._manager.interrupt_kernel()

    def kill(self) -> None:
        """End the kernel as the kernel's out-of-memory killer would."""
        os.kill(self.pid, signal.SIGKILL)

    def processes(self) -> list[int]:
        """Ids of all processes seen below the kernel that are still alive."""
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self.pid).children(recursive=True):
                self.seen.setdefault(child.pid, child)
        return [pid for pid, process in self.seen.items() if alive(process)]

    def close(self) -> None:
        """Shut the kernel down, then end by their ids the processes it left."""
        self.processes()
        self._shell.close(0)
        self._iopub.close(0)
        with contextlib.suppress(Exception):  # a kernel that a measurement killed cannot be shut down
            self._manager.shutdown_kernel(now=True)
        end(self.seen.values())
        self._log.close()


def alive(process: psutil.Process) -> bool:
    """Whether this very process still runs (ids are reused)."""
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def end(processes: Iterator[psutil.Process] | Any) -> None:
    """Kill the given processes, and no others."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if alive(process):
                process.kill()


def _texts(kind: str, raw: bytes) -> list[str]:
    content = json.loads(raw) if kind in _SHOWN else {}
    if kind == "stream":
        return [content["text"]]
    if kind == "error":
        return ["\n".join(content["traceback"])]
    return [str(content["data"].get("text/plain", "")) + "\n"] if "data" in content else []


_SHOWN = {"stream", "error", "display_data", "update_display_data", "execute_result"}

# Run in the kernel itself whatever the product does to cells: a line magic that prints a value, a cell magic that
# executes code there.
_LOCAL_MAGICS = """
def _add_magics():
    import json
    shell = get_ipython()
    def bench_value(line):
        print("@@" + json.dumps(eval(line, shell.user_ns)) + "@@")
    def bench_here(line, cell):
        exec(compile(cell, "<benchmark>", "exec"), shell.user_ns)
    shell.register_magic_function(bench_value, "line", "bench_value")
    shell.register_magic_function(bench_here, "cell", "bench_here")
_add_magics(); del _add_magics
"""
