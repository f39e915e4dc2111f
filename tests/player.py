"""Plays cells in a real kernel, as a notebook would, and keeps what its reader would have seen.

`Notebook` starts an ipykernel in a folder of its own and loads nbdist; `run` executes a cell and returns a `Played`:
the output area as it stands at the end (updates applied), what each rank said, how the cell ended. Nothing here knows
how nbdist does it: labels such as ``[1-3]`` in front of a line are all that is read.
"""

from __future__ import annotations

import ast
import contextlib
import os
import queue
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from deadlines import CELL_S, GONE_S, START_S, wait_until
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import KernelManager

__all__ = ["Notebook", "Played", "plain", "run_python"]

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_LABEL = re.compile(r"^\[(all|\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*)\] ?(.*)$")
_SHOWN = {"stream", "error", "display_data", "update_display_data", "execute_result", "clear_output"}
POLL_S = 0.05


def plain(text: str) -> str:
    """Text without colour codes."""
    return _COLOUR.sub("", text)


def run_python(code: str, folder: Path) -> str:
    """Run plain Python in a folder, outside any kernel, and return what it printed."""
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout


@dataclass
class Played:
    """How one cell went."""

    status: str = "late"
    outputs: list[dict[str, Any]] = field(default_factory=list)  # the output area at the end, in notebook format
    arrived: list[tuple[float, str]] = field(default_factory=list)  # (seconds after it was sent, text)
    num_messages: int = 0
    seconds: float = 0.0
    world_size: int = 2

    @property
    def ok(self) -> bool:
        """Whether the cell succeeded."""
        return self.status == "ok"

    @property
    def errors(self) -> list[dict[str, Any]]:
        """Outputs shown as errors."""
        return [o for o in self.outputs if o["output_type"] == "error"]

    @property
    def raw(self) -> str:
        """All text of the output area, in order, colours included."""
        return "".join(_text_of(o) for o in self.outputs)

    @property
    def text(self) -> str:
        """All text of the output area, in order."""
        return plain(self.raw)

    @property
    def streams(self) -> str:
        """What was shown as a stream, without colours."""
        return plain("".join(o["text"] for o in self.outputs if o["output_type"] == "stream"))

    @property
    def report(self) -> str:
        """What was shown as an error, without colours."""
        return plain("\n".join("\n".join(e["traceback"]) for e in self.errors))

    def of(self, rank: int) -> list[str]:
        """Lines labelled with a rank, labels taken off, in order; results and displays of ranks are labelled too."""
        lines = []
        for line in self.text.splitlines():
            if (match := _LABEL.match(line)) and rank in _members(match[1], self.world_size):
                lines.append(match[2])
        return lines

    def data(self, kind: str) -> list[Any]:
        """Contents of one MIME type, in order."""
        return [o["data"][kind] for o in self.outputs if kind in o.get("data", {})]


def _text_of(output: dict[str, Any]) -> str:
    kind = output["output_type"]
    if kind == "stream":
        return str(output["text"])
    if kind == "error":
        return "\n".join(output["traceback"]) + "\n"
    return str(output["data"].get("text/plain", "")) + "\n"


def _members(label: str, world_size: int) -> set[int]:
    if label == "all":
        return set(range(world_size))
    members: set[int] = set()
    for part in label.split(","):
        first, _, last = part.partition("-")
        members |= set(range(int(first), int(last or first) + 1))
    return members


class Notebook:
    """A kernel with nbdist loaded, in a folder of its own.

    Parameters
    ----------
    folder
        The notebook's folder.
    env
        Variables on top of this process's; a value of None takes one away.
    load
        Whether to run ``%load_ext nbdist`` first.
    """

    def __init__(self, folder: Path, env: Mapping[str, str | None] | None = None, load: bool = True) -> None:
        self.folder = folder
        self.world_size = 2
        self._env = {k: v for k, v in {**os.environ, "MPLBACKEND": None, **(env or {})}.items() if v is not None}
        self._manager = KernelManager()
        self._manager._kernel_spec = KernelSpec(
            argv=[sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"], language="python"
        )
        self._log = folder.parent / f"{folder.name}.kernel.log"
        with self._log.open("ab") as log:
            self._manager.start_kernel(cwd=str(folder), env=self._env, stdout=log, stderr=log)
        self._seen: dict[int, psutil.Process] = {}
        self._connect()
        if load:
            assert self.run("%load_ext nbdist").ok

    def _connect(self) -> None:
        self._client = self._manager.blocking_client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=START_S)

    # ---- cells

    def run(
        self,
        code: str,
        timeout_s: float = CELL_S,
        actions: Sequence[tuple[Callable[[Played], bool], Callable[[], object]]] = (),
    ) -> Played:
        """Execute a cell until its reply has come and the kernel is idle.

        Parameters
        ----------
        code
            The cell.
        timeout_s
            After this its status is "late", and the kernel is interrupted.
        actions
            (condition on what has been shown so far, what to do): each done once.
        """
        played = Played(world_size=self.world_size)
        mine = self._client.execute(code, allow_stdin=True, stop_on_error=False)
        begun = time.monotonic()
        pending, idle = list(actions), False
        replaceable: dict[str, list[dict[str, Any]]] = {}
        clear = [False]
        while not idle or pending:
            played.seconds = time.monotonic() - begun
            if played.seconds > timeout_s:
                self.interrupt()
                return played
            with contextlib.suppress(queue.Empty):
                message = self._client.get_iopub_msg(timeout=POLL_S)
                if message["parent_header"].get("msg_id") == mine:
                    content = message["content"]
                    if message["msg_type"] in _SHOWN:
                        played.num_messages += 1
                        _show(played, message["msg_type"], content, replaceable, clear)
                        played.arrived.append((played.seconds, _arrived(content)))
                    idle = idle or content.get("execution_state") == "idle"
            self._refuse_input()
            for action in list(pending):
                if action[0](played):
                    pending.remove(action)
                    action[1]()
        played.status = self._reply(mine)
        return played

    def cell(self, body: str, flags: str = "", **kwargs: Any) -> Played:
        """Execute a body as a ``%%distributed`` cell."""
        return self.run(f"%%distributed {flags}".rstrip() + "\n" + body, **kwargs)

    def send(self, body: str) -> None:
        """Send a ``%%distributed`` cell and go on, as a reader who does not wait; what it shows is not kept."""
        self._client.execute(f"%%distributed\n{body}", stop_on_error=False)

    def start(self, n: int) -> None:
        """Start a cluster of n ranks."""
        played = self.run(f"%distributed start -n {n}", timeout_s=START_S)
        assert played.ok, played.text
        self.world_size = n

    def resize(self, n: int) -> None:
        """Have a cluster of n ranks, which is another one where their number differs."""
        if n != self.world_size:
            assert self.run("%distributed stop").ok
            self.start(n)

    def value(self, expression: str) -> str:
        """What the kernel itself prints for an expression."""
        played = self.run(f"print({expression})")
        assert played.ok, played.text
        return played.text.strip()

    def points(self, name: str = "loss") -> dict[int, list[tuple[float, float]]]:
        """Steps and values of a metric of the last run, by rank."""
        said = self.value(
            f"(lambda h: {{r: list(zip(*(c.tolist() for c in h.series({name!r}, r)[::2]))) for r in h.last({name!r})}})"
            "(__import__('nbdist').cluster().runs[-1].history)"
        )
        found: dict[int, list[tuple[float, float]]] = ast.literal_eval(said)
        return found

    def rank_pids(self) -> list[str]:
        """Process ids of the ranks, as they print them themselves."""
        played = self.cell("import os as _os; print(_os.getpid())")
        return [played.of(rank)[0] for rank in range(self.world_size)]

    def _refuse_input(self) -> None:
        """A reader who closes the input box: an empty line."""
        with contextlib.suppress(queue.Empty):
            self._client.get_stdin_msg(timeout=0)
            self._client.input("")

    def _reply(self, mine: str) -> str:
        while True:
            reply = self._client.get_shell_msg(timeout=GONE_S)
            if reply["parent_header"].get("msg_id") == mine:
                return str(reply["content"]["status"])

    # ---- life

    @property
    def pid(self) -> int:
        """The kernel's process."""
        return int(self._manager.provisioner.process.pid)  # type: ignore[union-attr]

    def interrupt(self) -> None:
        """What the Stop button does."""
        self._manager.interrupt_kernel()

    def restart(self) -> None:
        """What the notebook's restart does; nbdist is loaded again."""
        self._client.stop_channels()
        with self._log.open("ab") as log:
            self._manager.restart_kernel(now=False, stdout=log, stderr=log)
        self._connect()
        assert self.run("%load_ext nbdist").ok

    def kill(self) -> None:
        """End the kernel's process at once."""
        psutil.Process(self.pid).kill()

    def processes(self) -> list[psutil.Process]:
        """All processes seen below the kernel that are still alive."""
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self.pid).children(recursive=True):
                self._seen.setdefault(child.pid, child)
        return [p for p in self._seen.values() if _alive(p)]

    def shutdown(self) -> None:
        """End the kernel as JupyterLab does; afterwards no process of it may be left."""
        self.processes()
        self._client.stop_channels()
        if self._manager.is_alive():
            self._manager.shutdown_kernel(now=False)
        self._manager.cleanup_resources()
        wait_until(lambda: not any(_alive(p) for p in self._seen.values()), GONE_S, "all processes of the kernel gone")


def _alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _arrived(content: dict[str, Any]) -> str:
    return plain(content.get("text") or str(content.get("data", {}).get("text/plain", "")))


def _show(
    played: Played,
    kind: str,
    content: dict[str, Any],
    replaceable: dict[str, list[dict[str, Any]]],
    clear: list[bool],
) -> None:
    """Apply one message to the output area, as a front end does."""
    if kind == "clear_output":
        clear[0] = content["wait"]
        if not content["wait"]:
            played.outputs.clear()
        return
    display_id = (content.get("transient") or {}).get("display_id")
    if kind == "update_display_data":
        for output in replaceable.get(display_id, []):
            output["data"], output["metadata"] = content["data"], content["metadata"]
        return
    if clear[0]:
        played.outputs.clear()
        clear[0] = False
    last = played.outputs[-1] if played.outputs else {}
    if kind == "stream" and last.get("output_type") == "stream" and last["name"] == content["name"]:
        last["text"] += content["text"]
        return
    output = {"output_type": kind, **content}
    played.outputs.append(output)
    if display_id:
        replaceable.setdefault(display_id, []).append(output)
