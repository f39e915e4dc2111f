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
from functools import lru_cache
from itertools import islice

__all__ = ["Communicator", "Link", "Member", "NcclLog", "Reader", "Transport"]


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Transport:
    """One way NCCL moves data between two ranks."""

    kind: str  # P2P, SHM (through host memory), NET/IB, NET/Socket, NET/other (any other plugin), COLLNET, other
    name: str = ""  # what NCCL calls it: IPC, CUMEM, direct pointer, IBext_v8, AWS Libfabric, ...
    gdr: bool = False  # the network card reads and writes GPU memory itself (GPUDirect RDMA)
    flags: tuple[str, ...] = ()  # read, CE (copy engine), shared (buffers)

    @property
    def label(self) -> str:
        """Short form for a matrix: ``P2P/CUMEM``, ``NET/IB+GDR``."""
        name = "direct" if self.name == "direct pointer" else self.name
        return "/".join(filter(None, (self.kind.split("/")[0], name))) + "+GDR" * self.gdr


@dataclass(frozen=True, slots=True)
class Connection:
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


@dataclass(slots=True, kw_only=True)
class Link:
    """What connects two ranks of one communicator, both directions together."""

    transports: set[Transport] = field(default_factory=set)
    indices: set[int] = field(default_factory=set)  # connection indices; {1}: for send/recv only
    devices: set[int] = field(default_factory=set)  # network devices
    proxies: set[int] = field(default_factory=set)  # ranks whose network card is used instead of one's own (PXN)

    @property
    def label(self) -> str:
        """The transports' short forms, one behind another."""
        return " ".join(sorted({t.label for t in self.transports}))

    @property
    def kinds(self) -> set[str]:
        """The transports' kinds."""
        return {t.kind for t in self.transports}


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One rank of a communicator, as its own process printed it."""

    rank: int
    host: str
    pid: int
    cuda_device: int | None = None
    nvml_device: int | None = None
    bus_id: str | None = None

    @property
    def gpu(self) -> int | None:
        """Number of the GPU on its host: NVML's where printed, else CUDA's."""
        return self.cuda_device if self.nvml_device is None else self.nvml_device

    def sits_at(self, bracket: str) -> bool:
        """Whether a number in brackets can mean this member's GPU; an unknown GPU can be any."""
        known = (self.bus_id, self.nvml_device, self.cuda_device)
        return bracket in map(str, known) or known == (None, None, None)


@dataclass(slots=True, kw_only=True, eq=False)
class Communicator:
    """One NCCL communicator: its ranks are numbered on their own, from 0."""

    number: int = 0
    size: int
    parent: Communicator | None = None
    color: int | None = None
    identified: bool = True  # False: put together from connection lines alone
    members: dict[int, Member] = field(default_factory=dict)
    links: dict[tuple[int, int], Link] = field(default_factory=dict)
    rings_connected: bool = False
    unfinished: int = 0  # ranks that began their initialisation and did not say that they finished it

    def connect(self, line: Connection) -> None:
        """Take in what one line says."""
        link = self.links.setdefault((min(line.a, line.b), max(line.a, line.b)), Link())
        link.transports.add(line.transport)
        link.indices.add(line.index)
        if line.device is not None:
            link.devices.add(line.device)
        if line.proxy is not None:
            link.proxies.add(line.proxy)

    def unconnected(self, a: int, b: int) -> str:
        """Say why a pair without a link has none."""
        if not self.identified:
            return "no connection seen"
        if a not in self.members and b not in self.members:
            return "not in this log"
        if self.unfinished:
            return "not connected: initialisation did not finish"
        return "not directly connected" if self.rings_connected else "no connection seen yet"


@dataclass(slots=True, kw_only=True)
class NcclLog:
    """What one or more logs say, before any judgement."""

    num_nccl_lines: int = 0
    blank: bool = True
    versions: list[str] = field(default_factory=list)  # 2.27.7+cuda12.9; usually one
    variables: dict[str, list[str]] = field(default_factory=dict)  # NCCL's, as the environment sets them
    interfaces: list[str] = field(default_factory=list)  # of NET/Socket
    no_ib: str | None = None  # NCCL's own words when it found no InfiniBand
    nvls: bool | None = None  # NVLink SHARP multicast is available; None: not said
    warnings: dict[str, set[tuple[str, int]]] = field(default_factory=dict)  # each once, with who printed it
    communicators: list[Communicator] = field(default_factory=list)


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
    lines: dict[Connection, None] = field(default_factory=dict)
    communicator: Communicator | None = None

    def prints(self, line: Connection) -> bool:
        """Whether this part can have printed a connection line."""
        rank, at = line.own
        return rank == self.member.rank and max(line.a, line.b) < self.size and self.member.sits_at(at)

    def agrees(self, line: Connection) -> bool:
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
    pending: defaultdict[int, dict[tuple[Connection, int], None]] = field(default_factory=lambda: defaultdict(dict))
    pending_rings: set[int] = field(default_factory=set)  # threads that said so outside START..COMPLETE

    def owners(self, lines: list[Connection], count: int) -> list[_Part | None]:
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
_STARTS = (b"Channel ", b"comm ", b"nccl", b"NCCL", b"NET/", b"NVLS ", b"Connected ", b"Failed to open libib")
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
_BARE_WARNING = re.compile(
    rb"/dev/shm/nccl-|Duplicate GPU detected|no socket interface found|NVLink SHARP|Cuda failure"
)

_HEAD_BYTES = 600  # of what stands before the mark, this much can belong to NCCL's own prefix
_BODY_BYTES = 1024  # NCCL's own limit of a line (src/debug.cc)
_CACHE = 100_000  # prefixes and connection lines remembered
_RECENT = 64  # communicators among which a line printed twice is looked for
_MANY = 1000  # distinct warnings, values and names kept


def _transport(via: str) -> tuple[Transport, int | None, int | None]:
    """Understand what stands behind ``via``: transport, network device, proxy rank."""
    if m := _P2P.match(via):
        flags = tuple(flag.strip("/") for flag in m.groups()[1:] if flag)
        return Transport(kind="P2P", name=m[1], flags=flags), None, None
    if via.startswith(("SHM", "direct shared memory")):
        return Transport(kind="SHM"), None, None
    if m := _NET.match(via):
        known = "NET/IB" if re.match(r"IB(?:ext)?(?:_v\d+)?$", m[2]) else "NET/other"
        kind = m[1] if m[1] == "COLLNET" else "NET/Socket" if m[2] == "Socket" else known
        transport = Transport(kind=kind, name=m[2], gdr=bool(m[5]), flags=("shared",) if m[6] else ())
        return transport, int(m[3]), int(m[4]) if m[4] else None
    return Transport(kind="other", name=via.split()[0][:40]), None, None


def _connection(body: bytes) -> Connection | None:
    m = _CHANNEL.match(_text(body))
    if m is None or m[2] == m[4]:
        return None
    return Connection(int(m[1] or 0), int(m[2]), m[3], int(m[4]), m[5], m[6] == "receive", *_transport(m[7]))


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
        self._families: defaultdict[tuple[object, ...], list[Communicator]] = defaultdict(list)
        # Prefixes and connection lines come again and again, with every channel and every run.
        self._source = lru_cache(_CACHE)(self._find_source)
        self._connection = lru_cache(_CACHE)(_connection)

    def feed(self, lines: Iterable[bytes]) -> None:
        """Read lines, in the order they were written."""
        for line in lines:
            raw = _ANSI.sub(b"", line) if b"\x1b" in line else line
            at = raw.find(b"NCCL ")
            if at < 0 or not raw.startswith(b"INFO ", at + 5) or raw.find(b"NCCL ", at + 10) >= 0:
                self._unusual(raw)
                continue
            self._log.num_nccl_lines += 1
            self._info(self._source(raw[max(at - _HEAD_BYTES, 0) : at]), raw[at + 10 :])

    def _find_source(self, head: bytes) -> tuple[_Process, int] | None:
        """Find out which process and thread writes behind this prefix."""
        found = _HEAD.search(head)
        if found is None:
            return None
        host, pid = found[1].decode(), int(found[2])
        return self._processes.setdefault((host, pid), _Process(host, pid)), int(found[3])

    def _unusual(self, raw: bytes) -> None:
        """A line with no mark, with a warning, or with more than one mark (two processes wrote into it)."""
        self._log.blank = self._log.blank and not raw.strip()
        marks = list(islice(_MARK.finditer(raw), _MANY)) if b"NCCL " in raw else []
        if not marks:
            # NCCL's version, or its last error as torch reports it, without a prefix.
            if b"NCCL version" in raw:
                self._version(_text(raw))
            if _BARE_WARNING.search(raw):
                self._warn(_text(raw), None)
            return
        self._log.num_nccl_lines += len(marks)
        start = 0
        for mark, after in zip(marks, [*marks[1:], None], strict=True):
            head = raw[max(start, mark.start() - _HEAD_BYTES) : mark.start()]
            source = self._source(head)
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

    def _version(self, text: str) -> None:
        # torch's error texts name the version without CUDA's: the same one.
        if (m := _VERSION.search(text)) and not any(f"{v}+".startswith(f"{m[1]}+") for v in self._log.versions):
            self._log.versions.append(m[1])

    def _warn(self, text: str, process: _Process | None) -> None:
        if text in self._log.warnings or len(self._log.warnings) < _MANY:
            self._log.warnings.setdefault(text, set()).add((process.host, process.pid) if process else ("", 0))

    def _info(self, source: tuple[_Process, int] | None, body: bytes) -> None:
        if not body.startswith(_STARTS):
            return
        if body.startswith(b"Channel "):
            if source is not None and (line := self._connection(body)) is not None:
                self._connected(*source, line)
            return
        log, text = self._log, _text(body)
        if source is not None and (m := _INIT.search(text)):
            self._init(m, *source)
        elif source is not None and text.startswith("Connected all rings"):
            process, tid = source
            if part := process.open.get(tid):
                part.rings = True
            else:
                process.pending_rings.add(tid)
        elif m := _VARIABLE.match(text):
            self._add(log.variables.setdefault(m[1], []), m[2].removesuffix("."))
        elif text.startswith("NCCL version "):
            self._version(text)
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

    def _connected(self, process: _Process, tid: int, line: Connection) -> None:
        part = process.open.get(tid)
        if part is None or not part.prints(line):
            part = next((p for p in reversed(process.open.values()) if p.prints(line)), None)
        if part is not None:
            part.lines[line] = None
        else:
            process.pending[tid][line, len(process.parts)] = None

    def _init(self, m: re.Match[str], process: _Process, tid: int) -> None:
        pointer, rank, size = m[1], int(m[2]), int(m[3])
        started = [t for t, p in process.open.items() if (p.pointer, p.member.rank, p.size) == (pointer, rank, size)]
        if started:
            if m[8] == "COMPLETE":
                process.open.pop(started[0]).complete = True
            return  # a second START of an open one: the log holds the line twice
        more: dict[str, str] = dict(_INIT_MORE.findall(m[7]))
        gpu = {"cuda_device": _number(m[4]), "nvml_device": _number(m[5])}
        member = Member(rank=rank, host=process.host, pid=process.pid, bus_id=m[6], **gpu)
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
        part.lines |= {line: None for line, _ in waiting if part.prints(line)}
        process.pending[tid] = {(line, count): None for line, count in waiting if not part.prints(line)}

    # ---- once everything is read

    def finish(self) -> NcclLog:
        """Put together what the processes said; the largest communicators first, splits after their parents."""
        log = self._log
        log.blank = log.blank and not log.num_nccl_lines
        for process in self._processes.values():
            self._join(process)
        homeless: list[tuple[_Process, Connection]] = []
        for process in self._processes.values():
            for tid, waiting in process.pending.items():
                batches: defaultdict[int, list[Connection]] = defaultdict(list)
                for line, count in waiting:
                    batches[count].append(line)
                for count, lines in batches.items():
                    for line, part in zip(lines, process.owners(lines, count), strict=True):
                        if part is None or part.communicator is None:
                            homeless.append((process, line))
                            continue
                        part.lines[line] = None
                        part.communicator.connect(line)
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
                known = communicator.members
                if part.member.rank not in known and all(known[r].sits_at(peers[r]) for r in peers if r in known):
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
                communicator.connect(line)

    def _place(self, lines: list[tuple[_Process, Connection]]) -> None:
        """Lines of processes whose Init lines are missing: ranks that sit on the same GPUs belong together."""
        made: list[tuple[Communicator, dict[int, str]]] = []
        for process, line in lines:
            seats = {line.a: line.a_at, line.b: line.b_at}
            rank, at = line.own
            for communicator, places in made:
                ours = rank not in communicator.members or communicator.members[rank].pid == process.pid
                if ours and all(places.get(r, seat) == seat for r, seat in seats.items()):
                    break
            else:
                communicator, places = Communicator(size=0, identified=False), {}
                made.append((communicator, places))
                self._log.communicators.append(communicator)
            places.update(seats)
            number = at.isdigit() and len(at) < 4
            gpu, bus = (int(at), None) if number else (None, at)
            member = Member(rank=rank, host=process.host, pid=process.pid, nvml_device=gpu, bus_id=bus)
            communicator.members[rank] = member
            communicator.size = max(communicator.size, line.a + 1, line.b + 1)
            communicator.connect(line)
