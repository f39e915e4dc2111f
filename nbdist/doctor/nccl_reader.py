"""Reads what NCCL prints under ``NCCL_DEBUG=INFO`` and ``WARN``.

The formats are those of NCCL 2.10 to 2.30 (``INFO`` and ``WARN`` calls in src/init.cc, src/debug.cc and src/transport/
of the tagged sources). What makes them less than obvious:

- ``Channel 00/02 : 0 1 2 3`` is the order of a ring; only ``A[x] -> B[y] via ...`` is a connection. The number in
  brackets is a PCI bus id in older versions and the GPU's NVML index later; after the channel's number may stand a
  connection index (1: made for send/recv).
- A ``[receive]`` line is printed by the receiver and names the sender first, as all others do.
- Ranks are those of one communicator, and lines do not name it. It is the one that its thread is setting up (from
  ``Init START`` to ``Init COMPLETE``; older versions print only the latter), else the newest in which both ranks sit
  on these GPUs.
- Only neighbours in a ring or tree get connected, and since 2.22 only when a collective first needs it: a pair
  without a line is not a pair without a path.
- Launchers put their own prefix and colours before a line, progress bars write into it, two processes may share one.

Nothing a file contains raises; what cannot be placed is left out.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

from nbdist.doctor.nccl_model import Communicator, Link, Member, NcclLog, Transport

__all__ = ["Reader"]


@dataclass(frozen=True, slots=True)
class _Connection:
    """A connection line; `a` sends to `b`, each with its number in brackets."""

    index: int
    a: int
    a_at: str
    b: int
    b_at: str
    received: bool
    transport: Transport
    device: int | None
    proxy: int | None

    @property
    def own(self) -> tuple[int, str]:
        """Rank and GPU of the process that printed the line."""
        return (self.b, self.b_at) if self.received else (self.a, self.a_at)

    @property
    def peer(self) -> tuple[int, str]:
        return (self.a, self.a_at) if self.received else (self.b, self.b_at)


@dataclass(slots=True, eq=False)
class _Part:
    """One process's part of one communicator."""

    pointer: str
    member: Member
    size: int
    comm_id: str | None
    parent: str | None
    split: str | None
    color: int | None
    complete: bool = False
    rings: bool = False
    lines: dict[_Connection, None] = field(default_factory=dict)
    communicator: Communicator | None = None

    def prints(self, line: _Connection) -> bool:
        """Whether this part can have printed a connection line."""
        rank, at = line.own
        return rank == self.member.rank and max(line.a, line.b) < self.size and self.member.sits_at(at)

    def agrees(self, line: _Connection) -> bool:
        """Whether the line's other rank sits where this communicator has it."""
        rank, at = line.peer
        member = self.communicator.members.get(rank) if self.communicator else None
        return member is None or member.sits_at(at)


@dataclass(slots=True, eq=False)
class _Process:
    host: str
    pid: int
    parts: list[_Part] = field(default_factory=list)  # in the order of their first Init line
    open: dict[int, _Part] = field(default_factory=dict)  # by thread: between START and COMPLETE
    # By thread: lines whose communicator is not known yet, with the number of parts there were.
    pending: defaultdict[int, dict[tuple[_Connection, int], None]] = field(default_factory=lambda: defaultdict(dict))
    pending_rings: set[int] = field(
        default_factory=set
    )  # threads that said "Connected all rings" outside START..COMPLETE

    def owners(self, lines: list[_Connection], count: int) -> list[_Part | None]:
        """Whose lines these are, which one thread printed while there were `count` parts: of one part, if that can be.

        A communicator connects its rings once, so one without such lines comes first, then the newest.
        """
        fallback = None
        for place in range(count - 1, -1, -1):
            part = self.parts[place]
            if all(part.prints(line) and part.agrees(line) for line in lines):
                if not any(line.index == 0 for line in part.lines):
                    return [part] * len(lines)
                fallback = fallback or part
        if fallback is not None or len(lines) == 1:
            return [fallback] * len(lines)
        return [self.owners([line], count)[0] for line in lines]


_MARK = re.compile(rb"NCCL (INFO|WARN) ")
_ANSI = re.compile(rb"\x1b\[[0-9;?]{0,20}[ -/]?[@-~]?")
_HEAD = re.compile(
    rb"([\w.-]{1,255}):(\d{1,9}):(\d{1,9}) \[-?\d{1,5}\] ?(?:[^\s:]{1,200}:\d{1,7} ?(?:\([^\s()]{1,200}\) ?)?)?$"
)
_STARTS = (
    b"Channel ",
    b"comm ",
    b"nccl",
    b"NCCL",
    b"Using ",
    b"NET/",
    b"NVLS ",
    b"Connected ",
    b"Failed to open libib",
)
_CHANNEL = re.compile(
    r"Channel \d{1,6}(?:/(\d{1,6}))? : (\d{1,7})\[([0-9a-f]{1,16})\] -> (\d{1,7})\[([0-9a-f]{1,16})\]"
    r" (?:\[(send|receive)\] )?via (\S.*)"
)
_P2P = re.compile(
    r"P2P/(direct pointer|common device|IPC|CUMEM|MNNVL|indirect|\w{1,40})(?:/\d+\[[0-9a-f]+\])?(/read)?(/CE)?"
)
_NET = re.compile(r"(NET|COLLNET)/(.{1,64}?)/(-?\d{1,6})(?:\((\d{1,7})\))?(/GDRDMA(?:\(PCI\))?)?(/Shared)?")
_INIT = re.compile(
    r"comm (\S{1,32}) rank (\d{1,7}) nranks (\d{1,7})(?: cudaDev (\d{1,5}))?(?: nvmlDev (\d{1,5}))?"
    r"(?: busId ([0-9a-f]{1,16}))?(.*?)- Init (START|COMPLETE)"
)
_INIT_MORE = re.compile(r"\b(parent|splitCount|childCount|color|commId) (\S{1,64})")
_VERSION = re.compile(r"NCCL version (\d{1,4}\.\d{1,4}(?:\.\d{1,4})?(?:\+cuda\d{1,4}\.\d{1,4})?)")
_VARIABLE = re.compile(r"(NCCL_\w+) set by (?:environment|\S{1,80}) to (.*)")
_SOCKETS = re.compile(r"\[\d+\]([\w.-]+):")
_BARE_WARNING = re.compile(r"/dev/shm/nccl-|Duplicate GPU detected|no socket interface found|NVLink SHARP|Cuda failure")

_HEAD_BYTES = 600  # of what stands before the mark, this much can belong to NCCL's own prefix
_BODY_BYTES = 1024  # NCCL's own limit of a line (src/debug.cc)
_CACHE = 100_000  # prefixes and connection lines remembered
_RECENT = 64  # communicators among which a line printed twice is looked for
_MANY = 1000  # distinct warnings, values and names kept


def _transport(via: str) -> tuple[Transport, int | None, int | None]:
    """Understand what stands behind ``via``: transport, network device, proxy rank."""
    if m := _P2P.match(via):
        flags = tuple(flag for flag, found in (("read", m[2]), ("CE", m[3])) if found)
        return Transport(kind="P2P", name=m[1], flags=flags), None, None
    if via.startswith(("SHM", "direct shared memory")):
        return Transport(kind="SHM"), None, None
    if m := _NET.match(via):
        if m[1] == "COLLNET":
            kind = "COLLNET"
        elif re.match(r"IB(?:ext)?(?:_v\d+)?$", m[2]):
            kind = "NET/IB"
        else:
            kind = "NET/Socket" if m[2] == "Socket" else "NET/other"
        transport = Transport(kind=kind, name=m[2], gdr=bool(m[5]), flags=("shared",) if m[6] else ())
        return transport, int(m[3]), int(m[4]) if m[4] else None
    return Transport(kind="other", name=via.split()[0][:40]), None, None


def _number(text: str | None) -> int | None:
    return int(text) if text and len(text) < 12 and text.isascii() and text.removeprefix("-").isdigit() else None


def _text(body: bytes) -> str:
    """One line's text, up to where a progress bar took the cursor back."""
    return body[:_BODY_BYTES].split(b"\r", 1)[0].decode("utf-8", "replace").strip()


class Reader:
    """Takes a log's lines with `feed`; everything that needs the whole log happens in `finish`."""

    def __init__(self) -> None:
        self._log = NcclLog()
        self._processes: dict[tuple[str, int], _Process] = {}
        self._heads: dict[bytes, tuple[_Process, int] | None] = {}
        self._channels: dict[bytes, _Connection | None] = {}
        self._families: defaultdict[tuple[object, ...], list[Communicator]] = defaultdict(list)

    def feed(self, lines: Iterable[bytes]) -> None:
        """Read lines, in the order they were written."""
        log, heads = self._log, self._heads
        for line in lines:
            raw = _ANSI.sub(b"", line) if b"\x1b" in line else line
            at = raw.find(b"NCCL ")
            if at < 0 or not raw.startswith(b"INFO ", at + 5) or raw.find(b"NCCL ", at + 10) >= 0:
                self._unusual(raw)
                continue
            log.num_nccl_lines += 1
            head = raw[at - _HEAD_BYTES if at > _HEAD_BYTES else 0 : at]
            self._info(heads[head] if head in heads else self._learn(head), raw[at + 10 :])

    def _learn(self, head: bytes) -> tuple[_Process, int] | None:
        """Find out which process and thread writes behind this prefix."""
        if len(self._heads) > _CACHE:
            self._heads.clear()
        found = _HEAD.search(head)
        self._heads[head] = None
        if found:
            host, pid = found[1].decode(), int(found[2])
            process = self._processes.setdefault((host, pid), _Process(host, pid))
            self._heads[head] = process, int(found[3])
        return self._heads[head]

    def _unusual(self, raw: bytes) -> None:
        """A line with no mark, with a warning, or with more than one mark (two processes wrote into it)."""
        self._log.blank = self._log.blank and not raw.strip()
        marks = list(islice(_MARK.finditer(raw), _MANY)) if b"NCCL " in raw else []
        if not marks:
            if b"NCCL" in raw or b"nccl" in raw or b"Duplicate GPU" in raw:
                self._bare(_text(raw))
            return
        self._log.num_nccl_lines += len(marks)
        start = 0
        for mark, after in zip(marks, [*marks[1:], None], strict=True):
            head = raw[max(start, mark.start() - _HEAD_BYTES) : mark.start()]
            source = self._heads[head] if head in self._heads else self._learn(head)
            body = raw[mark.end() : after.start() if after else len(raw)]
            if after and (next_head := _HEAD.search(body[-_HEAD_BYTES:])):
                # "...via P2P/CUMEMnode1:12:34 [0]": the next line's host begins where a known one does.
                host, pid = next_head[1].decode(), int(next_head[2])
                known = next((h for h, p in self._processes if p == pid and host.endswith(h)), host)
                body = body[: len(body) - len(next_head[0]) + len(host) - len(known)]
            start = mark.end() + len(body)
            if mark[1] == b"INFO":
                self._info(source, body)
            else:
                self._warn(_text(body), source[0] if source else None)

    def _bare(self, text: str) -> None:
        """A line without NCCL's prefix: its version, or its last error as torch reports it."""
        if m := _VERSION.search(text):
            self._version(m[1])
        if _BARE_WARNING.search(text):
            self._warn(text, None)

    def _version(self, version: str) -> None:
        # torch's error texts name the version without CUDA's: the same one.
        if not any(v == version or v.startswith(version + "+") for v in self._log.versions):
            self._log.versions.append(version)

    def _warn(self, text: str, process: _Process | None) -> None:
        if text in self._log.warnings or len(self._log.warnings) < _MANY:
            self._log.warnings.setdefault(text, set()).add((process.host, process.pid) if process else ("", 0))

    def _info(self, source: tuple[_Process, int] | None, body: bytes) -> None:
        if not body.startswith(_STARTS):
            return
        log = self._log
        if body.startswith(b"Channel "):
            if source is not None:
                self._connection(*source, body)
            return
        text = _text(body)
        if m := _INIT.search(text):
            if source is not None:
                self._init(m, *source)
        elif text.startswith("Connected all rings"):
            if source is not None and (part := source[0].open.get(source[1])):
                part.rings = True
            elif source is not None:
                source[0].pending_rings.add(source[1])
        elif m := _VARIABLE.match(text):
            self._add(log.variables.setdefault(m[1], []), m[2].removesuffix("."))
        elif m := _VERSION.search(text):
            self._version(m[1])
        elif text.startswith("Using network "):
            self._add(log.networks, text.removeprefix("Using network ")[:64])
        elif text.startswith("NVLS multicast support is "):
            log.nvls = bool(log.nvls) or not text.startswith("NVLS multicast support is not ")
        elif (text.startswith("NET/IB") and "No device found" in text) or text.startswith("Failed to open libib"):
            log.no_ib = log.no_ib or text.rstrip(".")
        elif text.startswith("NET/Socket : Using "):
            for name in _SOCKETS.findall(text):
                self._add(log.interfaces, name)

    @staticmethod
    def _add(values: list[str], value: str) -> None:
        if value not in values and len(values) < _MANY:
            values.append(value)

    def _connection(self, process: _Process, tid: int, body: bytes) -> None:
        if body in self._channels:
            line = self._channels[body]
        else:
            if len(self._channels) > _CACHE:
                self._channels.clear()
            line = None
            m = _CHANNEL.match(_text(body))
            if m and m[2] != m[4]:
                line = _Connection(
                    int(m[1] or 0), int(m[2]), m[3], int(m[4]), m[5], m[6] == "receive", *_transport(m[7])
                )
            self._channels[body] = line
        if line is None:
            return
        part = process.open.get(tid)
        if part is None or not part.prints(line):
            part = next((p for p in reversed(process.open.values()) if p.prints(line)), None)
        if part is not None:
            part.lines[line] = None
        else:
            process.pending[tid][line, len(process.parts)] = None

    def _init(self, m: re.Match[str], process: _Process, tid: int) -> None:
        pointer, rank, size = m[1], int(m[2]), int(m[3])
        started = next(
            (t for t, p in process.open.items() if (p.pointer, p.member.rank, p.size) == (pointer, rank, size)), None
        )
        if started is not None:
            if m[8] == "COMPLETE":
                process.open.pop(started).complete = True
            return  # a second START of an open one: the log holds the line twice
        more: dict[str, str] = dict(_INIT_MORE.findall(m[7]))
        member = Member(
            rank=rank,
            host=process.host,
            pid=process.pid,
            cuda_device=_number(m[4]),
            nvml_device=_number(m[5]),
            bus_id=m[6],
        )
        split = more.get("splitCount") or more.get("childCount")
        color = _number(more.get("color", "").rstrip("-"))
        part = _Part(pointer, member, size, more.get("commId"), more.get("parent"), split, color)
        if part.comm_id and any(p.comm_id == part.comm_id and p.member == member for p in process.parts[-_RECENT:]):
            return  # also twice: NCCL's ids are not used again
        process.parts.append(part)
        if m[8] == "START":
            process.open[tid] = part
            return
        # Versions without a START line: what this thread has printed so far belongs to this communicator.
        part.complete = True
        part.rings = tid in process.pending_rings
        process.pending_rings.discard(tid)
        waiting = process.pending.pop(tid, {})
        for line, count in waiting:
            if part.prints(line):
                part.lines[line] = None
            else:
                process.pending[tid][line, count] = None

    # ---- once everything is read

    def finish(self) -> NcclLog:
        """Put together what the processes said.

        Returns
        -------
        NcclLog
            Communicators sorted: the largest first, splits after their parents.
        """
        log = self._log
        log.blank = log.blank and not log.num_nccl_lines
        for process in self._processes.values():
            self._join(process)
        homeless: list[tuple[_Process, _Connection]] = []
        for process in self._processes.values():
            for tid, waiting in process.pending.items():
                batches: defaultdict[int, list[_Connection]] = defaultdict(list)
                for line, count in waiting:
                    batches[count].append(line)
                for count, lines in batches.items():
                    for line, part in zip(lines, process.owners(lines, count), strict=True):
                        if part is None or part.communicator is None:
                            homeless.append((process, line))
                            continue
                        part.lines[line] = None
                        self._connect(part.communicator, line)
                        # "Connected all rings" follows the connections on the same thread.
                        part.communicator.rings_connected |= tid in process.pending_rings
        self._place(homeless)
        log.communicators.sort(key=lambda c: (not c.identified, c.parent is not None, -c.size, c.color or 0))
        for number, communicator in enumerate(log.communicators, 1):
            communicator.number = number
        return log

    def _join(self, process: _Process) -> None:
        """Find each part's communicator: by NCCL's id, by parent and colour, or by what its lines say of the peers."""
        newest: dict[str, Communicator] = {}
        for part in process.parts:
            parent = newest.get(part.parent) if part.parent else None
            if part.comm_id:
                key: tuple[object, ...] = ("id", part.comm_id, part.size, part.color)
            elif parent is not None:
                key = ("split", id(parent), part.split, part.color, part.size)
            else:
                key = ("size", part.size)
            peers = dict(line.peer for line in part.lines)
            for communicator in self._families[key]:
                members = communicator.members
                if part.member.rank not in members and all(
                    r not in members or members[r].sits_at(peers[r]) for r in peers
                ):
                    break
            else:
                communicator = Communicator(size=part.size, parent=parent, color=part.color)
                self._families[key].append(communicator)
                self._log.communicators.append(communicator)
            communicator.members[part.member.rank] = part.member
            communicator.unfinished += not part.complete
            communicator.rings_connected |= part.rings
            part.communicator = newest[part.pointer] = communicator
            for line in part.lines:
                self._connect(communicator, line)

    def _place(self, lines: list[tuple[_Process, _Connection]]) -> None:
        """Lines of processes whose Init lines are missing: ranks that sit on the same GPUs belong together."""
        made: list[tuple[Communicator, dict[int, str]]] = []
        for process, line in lines:
            seats = {line.a: line.a_at, line.b: line.b_at}
            rank, at = line.own
            for communicator, places in made:
                member = communicator.members.get(rank)
                if (member is None or member.pid == process.pid) and all(
                    places.get(r, s) == s for r, s in seats.items()
                ):
                    break
            else:
                communicator, places = Communicator(size=0, identified=False), {}
                made.append((communicator, places))
                self._log.communicators.append(communicator)
            places.update(seats)
            gpu, bus = (int(at), None) if at.isdigit() and len(at) < 4 else (None, at)
            communicator.members[rank] = Member(
                rank=rank, host=process.host, pid=process.pid, nvml_device=gpu, bus_id=bus
            )
            communicator.size = max(communicator.size, line.a + 1, line.b + 1)
            self._connect(communicator, line)

    @staticmethod
    def _connect(communicator: Communicator, line: _Connection) -> None:
        link = communicator.links.setdefault((min(line.a, line.b), max(line.a, line.b)), Link())
        link.transports.add(line.transport)
        link.indices.add(line.index)
        if line.device is not None:
            link.devices.add(line.device)
        if line.proxy is not None:
            link.proxies.add(line.proxy)
