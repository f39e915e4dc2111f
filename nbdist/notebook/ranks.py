"""One rank as the notebook sees it: its process, its pipes, what it does."""

from __future__ import annotations

import fcntl
import os
import re
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nbdist.errors import StartError
from nbdist.notebook.launch import ForkServer
from nbdist.notebook.logs import RankLog
from nbdist.notebook.output import RankOutput
from nbdist.wire import messages as m

__all__ = ["RankProcess", "how_it_ended", "start_rank"]

_PIPE_BYTES = 1 << 20
_CELL_FRAME = re.compile(r'File "<ipython-input-(\d+)-\w+>", line (\d+) in (\S+)')


@dataclass(slots=True)
class RankProcess:
    """A rank's process.

    Attributes
    ----------
    stacks
        File to which its signal handlers write Python stacks, its own when it crashed among them.
    state
        ``starting``, ``idle``, ``busy`` or ``dead``.
    exits
        Descriptor that can be read once it has ended; -1 when that was seen.
    exit_status
        As waitpid gives it; None if unknown, e.g. when the fork server was gone by then.
    replaced
        It took the place of a rank that died: variables of earlier cells are gone.
    """

    rank: int
    pid: int
    log: RankLog
    exits: int
    stacks: Path
    output: RankOutput = field(init=False)
    state: str = "starting"
    ready: m.Ready | None = None
    failure: m.StartFailed | None = None
    exit_status: int | None = None
    died_s: float | None = None
    displays: dict[int, m.DisplayData | m.ClearOutput] = field(default_factory=dict)
    end_mark: int = 0
    late: list[tuple[str, str]] = field(default_factory=list)
    group: str = "none"
    steps: int = 0
    replaced: bool = False
    _watched: bool = False  # `exits` is a pidfd

    @property
    def identity(self) -> bytes:
        """The name under which it dials the notebook."""
        return f"{self.rank}:{self.pid}".encode()

    @property
    def alive(self) -> bool:
        """Its process has not ended, as far as is known."""
        return self.state != "dead"

    def read_exit(self) -> tuple[bool, int | None]:
        """When `exits` can be read: whether the process has ended, and its status if the fork server lived to tell."""
        told = b"" if self._watched else os.read(self.exits, 20)
        self.close_exits()
        if told or self._watched:
            return True, int(told) if told else None
        try:
            self.exits, self._watched = os.pidfd_open(self.pid), True
        except ProcessLookupError:
            return True, None
        return False, None

    def crashed_at(self) -> tuple[int, int, str] | None:
        """Cell number, line and function in which a signal of its own doing ended it, if a cell was on the way."""
        if self.exit_status is None or not os.WIFSIGNALED(self.exit_status):
            return None
        try:
            text = self.stacks.read_text(errors="replace")
        except OSError:
            return None
        _, fatal, text = text.rpartition("Fatal Python error")
        threads = re.split(r"^(?=(?:Current t|T)hread 0x)", text, flags=re.MULTILINE)
        threads.sort(key=lambda stack: not stack.startswith("Current"))  # it may be one that runs no Python
        found = next(filter(None, map(_CELL_FRAME.search, threads)), None) if fatal else None
        return (int(found[1]), int(found[2]), found[3]) if found else None

    def close_exits(self) -> None:
        """Ask no more how it ended."""
        if self.exits >= 0:
            os.close(self.exits)
            self.exits = -1


def start_rank(
    server: ForkServer,
    spec: Mapping[str, Any],
    log_path: Path | None,
    on_text: Callable[[RankProcess, str, str], None],
    on_mark: Callable[[RankProcess, str, int], bool],
) -> RankProcess:
    """Fork one rank and read its pipes.

    Raises
    ------
    StartError
        If no process or pipe can be had.
    """
    ends: list[int] = []
    try:
        for _ in range(3):
            ends += os.pipe2(os.O_CLOEXEC)
        for read_end in ends[:4:2]:
            try:
                fcntl.fcntl(read_end, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
            except OSError:  # over the user's limit for pipes: the default size does too
                break
        pid = server.fork(spec, *ends[1::2])
    except OSError as error:
        for fd in ends:
            os.close(fd)
        raise StartError(f"a worker could not be started: {error.strerror}") from error
    except BaseException:
        for fd in ends:
            os.close(fd)
        raise
    for fd in ends[1::2]:
        os.close(fd)
    stacks = Path(spec["folder"], f"stack-{spec['rank']}")
    process = RankProcess(rank=spec["rank"], pid=pid, log=RankLog(log_path), exits=ends[4], stacks=stacks)
    process.output = RankOutput(
        ends[0],
        ends[2],
        spec["token"],
        process.log,
        lambda stream, text: on_text(process, stream, text),
        lambda kind, number: on_mark(process, kind, number),
    )
    return process


def how_it_ended(status: int | None) -> str:
    """The end of a process in words: ``exited with code 7``, ``was killed by signal 9 (SIGKILL)``."""
    if status is None:
        return "ended"
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        try:
            name = f" ({signal.Signals(number).name})"
        except ValueError:
            name = ""
        return f"was killed by signal {number}{name}"
    return f"exited with code {os.waitstatus_to_exitcode(status)}"
