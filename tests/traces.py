"""What a test may leave behind: processes, threads, unix sockets, files in /dev/shm and in the runtime folder.

`take()` reads what is there now; two readings are compared by the leak check in conftest.py. Processes are found by a
variable which every process started from the test session inherits, so a rank that outlived its parent is found too.
"""

from __future__ import annotations

import os
import re
import threading
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["SESSION_VARIABLE", "Traces", "session_processes", "take"]

SESSION_VARIABLE = "NBDIST_TEST_SESSION"

# Threads that others start once a process and keep: IPython's history writer, asyncio's executor, timers of
# pytest-timeout, tqdm's monitor, Playwright's and psygnal's own.
_THREADS_KEPT = re.compile(
    r"MainThread|IPythonHistorySavingThread|asyncio_\d+|pytest_timeout.*|tqdm_monitor.*|Tqdm.*|ThreadPoolExecutor-\d+_\d+"
)
# Programs that a browser test's own fixtures start and stop; they come and go by themselves.
_PROGRAMS_KEPT = re.compile(r"chrom|node|playwright|crashpad")
# The fork server is meant to stay, warm, until the process that loaded nbdist ends.
_FORK_SERVER = re.compile(r"nbdist[./]worker[./]forkserver")
_SHARED_MEMORY = re.compile(r"^(torch_|nbdist|gloo|nccl|psm_|sem\.mp-)")


@dataclass(frozen=True)
class Traces:
    """One reading."""

    processes: dict[int, str] = field(default_factory=dict)
    threads: dict[int, str] = field(default_factory=dict)
    sockets: frozenset[str] = frozenset()
    shared_memory: frozenset[str] = frozenset()
    runtime: frozenset[str] = frozenset()

    def beyond(self, before: Traces) -> list[str]:
        """What is in this reading and was not in ``before``, one line each."""
        lines = [f"process {pid}: {line}" for pid, line in self.processes.items() if pid not in before.processes]
        lines += [f"thread {name}" for ident, name in self.threads.items() if ident not in before.threads]
        lines += [f"unix socket {path}" for path in sorted(self.sockets - before.sockets)]
        lines += [f"/dev/shm/{name}" for name in sorted(self.shared_memory - before.shared_memory)]
        lines += [f"runtime folder: {path}" for path in sorted(self.runtime - before.runtime)]
        return lines


def session_processes() -> dict[int, str]:
    """Living processes that descend from this test session, by pid, with their command lines."""
    mark = f"{SESSION_VARIABLE}={os.environ.get(SESSION_VARIABLE, '')}\0".encode()
    found = {}
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        folder = Path(entry.path)
        try:
            if mark not in (folder / "environ").read_bytes() + b"\0":
                continue
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:  # ended meanwhile, or somebody else's
            continue
        line = b" ".join(words).decode(errors="replace").strip()
        if state != "Z" and line:
            found[int(entry.name)] = line
    return found


def _children_of(pid: int) -> list[int]:
    try:
        return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _own_unix_sockets() -> frozenset[str]:
    inodes = set()
    for entry in os.scandir("/proc/self/fd"):
        try:
            target = os.readlink(entry.path)
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return frozenset(row[7] for row in rows if len(row) > 7 and row[6] in inodes)


def _shared_memory(processes: dict[int, str]) -> frozenset[str]:
    """Files that are ours, or whose maker (torch_<pid>_...) is dead; not those of somebody else's living process."""
    found = set()
    for name in os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else ():
        if not _SHARED_MEMORY.match(name):
            continue
        maker = re.match(r"torch_(\d+)_", name)
        pid = int(maker[1]) if maker else None
        if name.startswith("sem.") and _mapped_by_others(name, processes):
            continue
        if pid is None or pid == os.getpid() or pid in processes or not os.path.exists(f"/proc/{pid}"):
            found.add(name)
    return frozenset(found)


def _mapped_by_others(name: str, processes: dict[int, str]) -> bool:
    """Whether a process that is not of this session uses this file: its name does not tell who made it."""
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit() or int(entry.name) in processes or int(entry.name) == os.getpid():
            continue
        try:
            if f"/dev/shm/{name}" in Path(entry.path, "maps").read_text():
                return True
        except OSError:  # ended meanwhile, or somebody else's
            continue
    return False


def take(runtime: Path) -> Traces:
    """Read what is there now.

    Parameters
    ----------
    runtime
        The session's XDG_RUNTIME_DIR, where nbdist keeps its sockets.
    """
    processes = {
        pid: line
        for pid, line in session_processes().items()
        if not _PROGRAMS_KEPT.search(Path(line.split()[0]).name)
        and not (_FORK_SERVER.search(line) and not _is_rank(pid))
    }
    threads = {
        t.ident: t.name for t in threading.enumerate() if t.ident is not None and not _THREADS_KEPT.fullmatch(t.name)
    }
    files = frozenset(str(p.relative_to(runtime)) for p in runtime.rglob("*") if not p.is_dir())
    return Traces(
        processes=processes,
        threads=threads,
        sockets=frozenset(s for s in _own_unix_sockets() if "nbdist" in s or str(runtime) in s),
        shared_memory=_shared_memory(processes),
        runtime=files,
    )


def _is_rank(pid: int) -> bool:
    """Whether this process was forked by a fork server rather than being one (a fork keeps the command line)."""
    for parent, line in session_processes().items():
        if parent != pid and _FORK_SERVER.search(line) and pid in _children_of(parent):
            return True
    return False
