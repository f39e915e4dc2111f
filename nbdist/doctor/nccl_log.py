"""Which transport each pair of ranks uses, why, and whether that is good: the verdict on a log of NCCL.

`parse` and `read` take any log of NCCL 2.10 to 2.30 (``NCCL_DEBUG=INFO``) and return an `NcclReport`, which draws
itself as text and as HTML. Only pairs with a line of their own are judged: NCCL connects neighbours in a ring or tree.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from html import escape
from itertools import combinations
from pathlib import Path
from typing import Any

from nbdist.doctor.finding import Finding, Verdict, counted, html_of, html_table, text_of, text_table, worst
from nbdist.doctor.nccl_problems import problems
from nbdist.doctor.nccl_reader import Communicator, Link, NcclLog, Reader
from nbdist.errors import InputError

__all__ = ["NcclReport", "judge", "parse", "read"]

_DRAWN = 8  # communicators drawn; more are counted
_WIDE = 16  # ranks up to which cells hold words
_WIDEST = 64  # ranks up to which a matrix is drawn at all
_LETTERS = {"P2P": "P", "SHM": "S", "NET/IB": "I", "NET/Socket": "T", "NET/other": "N", "COLLNET": "C", "other": "?"}
_COLORS = {"P2P": "#2ea04340", "NET/IB": "#388bfd40", "NET/other": "#388bfd40", "SHM": "#d2992240"}
_OTHER_COLOR = "#da363340"

Pair = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclReport:
    """A log, and what it means: ``log`` is what was read, ``findings`` the judgement."""

    log: NcclLog
    findings: tuple[Finding, ...]

    @property
    def verdict(self) -> Verdict:
        """The most serious verdict."""
        return worst(self.findings)

    @property
    def exit_status(self) -> int:
        """1 if something failed, else 0."""
        return int(self.verdict == "fail")

    def __str__(self) -> str:
        blocks = [f"NCCL log: {_headline(self.log)}"]
        blocks += ["\n  ".join([_title(c), *text_table(_grid(c)[0]), *_legend(c)]) for c in self._drawn()]
        return "\n\n".join([*blocks, *self._more(), text_of(self.findings, folded=False)])

    def _repr_html_(self) -> str:
        parts = [f"<p><b>NCCL log:</b> {escape(_headline(self.log))}</p>"]
        for c in self._drawn():
            legend = "".join(f"<div>{escape(line)}</div>" for line in _legend(c))
            parts.append(f"<p>{escape(_title(c))}</p>{html_table(*_grid(c))}{legend}")
        return "".join([*parts, *(f"<p>{line}</p>" for line in self._more()), html_of(self.findings)])

    def _drawn(self) -> list[Communicator]:
        return [c for c in self.log.communicators if c.links][:_DRAWN]

    def _more(self) -> list[str]:
        more = sum(bool(c.links) for c in self.log.communicators) - len(self._drawn())
        return [f"... {more} more communicators"] if more else []

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON values."""
        return {
            "verdict": self.verdict,
            "versions": self.log.versions,
            "variables": self.log.variables,
            "nvls": self.log.nvls,
            "communicators": [
                {
                    "title": _title(c),
                    "members": [asdict(member) for _, member in sorted(c.members.items())],
                    "links": [
                        {
                            "ranks": list(pair),
                            "transports": [asdict(t) for t in sorted(link.transports)],
                            "devices": sorted(link.devices),
                            "proxies": sorted(link.proxies),
                            "connection_indices": sorted(link.indices),
                        }
                        for pair, link in sorted(c.links.items())
                    ],
                }
                for c in self.log.communicators
            ],
            "findings": [asdict(f) for f in self.findings],
        }


def parse(text: str | bytes | Iterable[bytes]) -> NcclReport:
    """Judge a log that is already in memory: text, or its lines as bytes."""
    if isinstance(text, str):
        text = text.encode("utf-8", "surrogatepass")
    reader = Reader()
    reader.feed(text.split(b"\n") if isinstance(text, bytes) else text)
    log = reader.finish()
    return NcclReport(log=log, findings=tuple(judge(log)))


def read(*paths: str | Path) -> NcclReport:
    """Judge log files; a folder stands for the files in it (one per rank, as ``--nccl-debug`` writes them).

    Raises
    ------
    InputError
        If a path cannot be read. What is in a file is never an error.
    """

    def lines() -> Iterator[bytes]:
        for path in map(Path, paths):
            try:
                for file in sorted(p for p in path.iterdir() if p.is_file()) if path.is_dir() else [path]:
                    with file.open("rb") as opened:
                        yield from opened
            except OSError as error:
                raise InputError(f"{path}: {error.strerror}; expected an NCCL log, or a folder of them") from None

    return parse(lines())


# ---- the verdict


def judge(log: NcclLog) -> list[Finding]:
    """Say what a log means: failures and their causes, then the links, then what else is worth knowing."""
    if log.blank:
        return [Finding("log", "info", "empty log", "", "set NCCL_DEBUG=INFO before the workers start")]
    found = problems(log)
    found += [_unfinished(c, bool(found)) for c in log.communicators if c.unfinished]
    linked = [c for c in log.communicators if c.links]
    if not linked and not found:
        found.append(_without_links(log))
    judged = [f for c in linked for f in (*_inside(log, c), *_between(log, c))]
    # No "all P2P" beside pairs that are not, and the same of several communicators once.
    troubled = any(f.name == "links" and f.verdict != "ok" for f in judged)
    found += dict.fromkeys(f for f in judged if not (troubled and f.name == "links" and f.verdict == "ok"))
    unseen = "no connection seen yet"
    waiting = sum(_reasons(c)[unseen] for c in linked if c.size <= _WIDEST)
    if waiting:
        fact = f"{unseen} for {waiting} pairs: NCCL connects (since 2.22) when a collective first needs it"
        found.append(Finding("unused pairs", "ok", fact))
    if log.nvls is not None:
        text = "available" if log.nvls else "not available"
        found.append(Finding("NVLS", "ok", f"NVLink SHARP multicast (NVLS) is {text}"))
    return found


def _unfinished(c: Communicator, explained: bool) -> Finding:
    missing = [r for r in range(min(c.size, 1024)) if r not in c.members]
    fact = f"{_name(c)}: initialisation did not finish on {c.unfinished} of {c.size} ranks"
    fact += f"; no line from rank{'s' * (len(missing) > 1)} {_ranges(missing)}" if missing else ""
    remedy = "mend the cause above" if explained else "look at what the silent ranks did: crashed, or not there yet"
    return Finding("initialisation", "fail", fact, "no collective can run", remedy)


def _without_links(log: NcclLog) -> Finding:
    """Say why a log names no connection."""
    subsystems = ",".join(log.variables.get("NCCL_DEBUG_SUBSYS", []))
    if any(c.size > 1 for c in log.communicators):
        fact = "no connection seen yet: NCCL connects (since 2.22) when a collective first needs it"
        return Finding("links", "info", fact, "", "run a collective, then look again")
    if log.communicators:
        return Finding("links", "ok", "one rank: nothing to connect")
    if log.num_nccl_lines and subsystems and "INIT" not in subsystems:
        fact = f"this log has no connection lines: NCCL_DEBUG_SUBSYS={subsystems} leaves them out"
        return Finding("links", "info", fact, "", "unset NCCL_DEBUG_SUBSYS, or add INIT to it")
    fact = "this log has no connection lines; set NCCL_DEBUG=INFO before the workers start"
    return Finding("links", "info", fact, "", "`%distributed start --nccl-debug` sets it")


def _same_host(c: Communicator, pair: Pair, link: Link) -> bool:
    hosts = [c.members[r].host for r in pair if r in c.members]
    return hosts[0] == hosts[1] if len(hosts) == 2 else bool(link.kinds & {"P2P", "SHM"})


def _inside(log: NcclLog, c: Communicator) -> Iterator[Finding]:
    """Judge the pairs inside one host."""
    by_kind: defaultdict[str, list[Pair]] = defaultdict(list)
    for pair, link in sorted(c.links.items()):
        for kind in link.kinds if _same_host(c, pair, link) else ():
            by_kind[kind.split("/")[0]].append(pair)
    p2p, shm, net = by_kind["P2P"], by_kind["SHM"], by_kind["NET"]
    no_p2p = _variable(log, "NCCL_P2P_DISABLE") or _variable(log, "NCCL_P2P_LEVEL")
    if p2p and not shm and not net:
        where = " inside a host" * (len(p2p) < len(c.links))
        fact = f"all {len(p2p)} connected pairs{where} use P2P" if len(p2p) > 1 else f"{_pairs(c, p2p)} uses P2P"
        yield Finding("links", "ok", fact)
    if shm:
        verdict: Verdict = "info"
        fact = f"{_pairs(c, shm)} through host memory (SHM)"
        if no_p2p:
            verdict, fact = "warn", f"{fact}: {no_p2p} is set"
            remedy = f"unset {_set(no_p2p)}, unless these GPUs are known to hang or to corrupt data with P2P"
        elif p2p:
            fact = f"mixed: {_pairs(c, p2p)} P2P; {_pairs(c, shm)} SHM{_across(p2p, shm)}"
            remedy = "nothing, if the GPUs are wired so; `nvidia-smi topo -m` shows it"
        elif other := _with_p2p(log, c, shm):
            fact += f"; communicator {other} uses P2P between the same GPUs"
            remedy = "the path is there: compare how the two were made (options, environment, NCCL's configuration)"
        else:
            fact += "; no variable forbids P2P"
            remedy = (
                "`nvidia-smi topo -p2p r` tells whether the driver offers P2P; many cards and virtual machines don't"
            )
        yield Finding("links", verdict, fact, "data goes through host memory: slower than GPU to GPU", remedy)
    if net:
        causes = [v for v in (no_p2p, _variable(log, "NCCL_SHM_DISABLE")) if v]
        fact = f"{_pairs(c, net)} over the network inside one host" + (
            f": {' and '.join(causes)} set" if causes else ""
        )
        remedy = "let the ranks share one container, or at least --ipc=host and one /dev/shm"
        if causes:
            remedy = f"unset {' and '.join(map(_set, causes))}"
        yield Finding("links", "warn", fact, "the slowest path there is between two GPUs of one host", remedy)


def _with_p2p(log: NcclLog, c: Communicator, pairs: Sequence[Pair]) -> int | None:
    """Number of another communicator that uses P2P between the GPUs of all these pairs."""

    def gpus(c: Communicator, pair: Pair) -> frozenset[tuple[str, int | None]]:
        return frozenset((m.host, m.gpu) for r in pair if (m := c.members.get(r)) and m.gpu is not None)

    wanted = {gpus(c, pair) for pair in pairs}
    for other in log.communicators:
        if other is not c and wanted <= {gpus(other, p) for p, link in other.links.items() if "P2P" in link.kinds}:
            return other.number
    return None


def _between(log: NcclLog, c: Communicator) -> Iterator[Finding]:
    """Judge the pairs that leave a host."""
    outside = {pair: link for pair, link in sorted(c.links.items()) if not _same_host(c, pair, link)}

    def using(kind: str, gdr: bool | None = None) -> list[Pair]:
        wanted = (kind,)
        return [
            pair
            for pair, link in outside.items()
            if any(t.kind in wanted and gdr in (None, t.gdr) for t in link.transports)
        ]

    if sockets := using("NET/Socket"):
        why = _variable(log, "NCCL_IB_DISABLE") or _variable(log, "NCCL_NET")
        fact = "traffic between nodes goes over TCP sockets"
        fact += f" ({', '.join(log.interfaces)})" if log.interfaces else ""
        fact += f"; {why} is set" if why else f"; {log.no_ib}" if log.no_ib else ""
        remedy = "give the container its InfiniBand or RoCE (--device=/dev/infiniband, libibverbs), if there is any; "
        remedy = f"unset {_set(why)}" if why else remedy + "else name the fastest interface in NCCL_SOCKET_IFNAME"
        yield Finding("network", "warn", fact, f"{_pairs(c, sockets)}: a fraction of InfiniBand's bandwidth", remedy)
    if staged := using("NET/IB", gdr=False):
        why = _variable(log, "NCCL_NET_GDR_LEVEL")
        fact = f"{_pairs(c, staged)}: InfiniBand without GPUDirect RDMA" + (f"; {why} is set" if why else "")
        remedy = "load nvidia-peermem, or use a driver with DMA-BUF; let NCCL_NET_GDR_LEVEL allow the distance"
        yield Finding("network", "warn", fact, "data between nodes is staged in host memory", remedy)
    if direct := using("NET/IB", gdr=True):
        plugins = sorted({t.name for pair in direct for t in outside[pair].transports} - {"IB"})
        fact = f"{_pairs(c, direct)}: InfiniBand{' through ' * bool(plugins)}{', '.join(plugins)} with GPUDirect RDMA"
        if ranks := sorted({r for pair in direct for r in outside[pair].proxies}):
            by_proxy = [pair for pair in direct if outside[pair].proxies]
            fact += f" ({_pairs(c, by_proxy)} sent through proxy rank{'s' * (len(ranks) > 1)} {_ranges(ranks)})"
        yield Finding("network", "ok", fact)
    for transport in sorted({t for link in outside.values() for t in link.transports if t.kind == "NET/other"}):
        pairs = [pair for pair, link in outside.items() if transport in link.transports]
        how = "with" if transport.gdr else "without"
        fact = f"{_pairs(c, pairs)}: plugin {transport.name!r}, {how} GPUDirect RDMA"
        yield Finding("network", "ok" if transport.gdr else "info", fact)


def _variable(log: NcclLog, name: str) -> str:
    """``NAME=value`` where the log says that it is set to something that matters, else nothing."""
    values = [v for v in log.variables.get(name, []) if not (name.endswith("_DISABLE") and v in ("0", ""))]
    return f"{name}={values[0]}" if values else ""


def _set(variable: str) -> str:
    return variable.split("=")[0]


# ---- words and drawings


def _ranges(numbers: Sequence[int]) -> str:
    """``0-2,5`` for sorted numbers."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and runs[-1][-1] == n - 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ",".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)


def _pairs(c: Communicator, pairs: Sequence[Pair]) -> str:
    """``0-1, 2-3``; with the GPUs where a communicator's ranks are not the GPUs' numbers."""
    shown = []
    for a, b in pairs[:8]:
        first, second = c.members.get(a), c.members.get(b)
        split = c.parent is not None and first and second and first.gpu is not None
        shown.append(f"{a}-{b}" + (f" (GPUs {first.gpu}-{second.gpu})" if split and first and second else ""))
    more = f" and {len(pairs) - 8} more" if len(pairs) > 8 else ""
    return f"communicator {c.number}: " * (c.number > 1) + ", ".join(shown) + more


def _across(p2p: Sequence[Pair], shm: Sequence[Pair]) -> str:
    """Say so where the SHM pairs lie between groups that P2P joins: GPUs under different PCIe roots."""
    group = {r: r for pair in p2p for r in pair}
    for a, b in p2p:
        group = {r: group[a] if g == group[b] else g for r, g in group.items()}
    sets = [_ranges([r for r in sorted(group) if group[r] == g]) for g in dict.fromkeys(map(group.get, sorted(group)))]
    inside = any(group.get(a, -1 - a) == group.get(b, -1 - b) for a, b in shm)
    return f" (they cross the PCIe groups {' | '.join(sets)})" if len(sets) > 1 and not inside else ""


def _headline(log: NcclLog) -> str:
    members = [m for c in log.communicators for m in c.members.values()]
    head = f"NCCL {', '.join(log.versions)}" if log.versions else "version not printed"
    processes, hosts = {(m.host, m.pid) for m in members}, {m.host for m in members}
    return head + (f", {counted(len(processes), 'process')} on {counted(len(hosts), 'host')}" if members else "")


def _name(c: Communicator) -> str:
    """``communicator 2: 2 ranks, split of communicator 1, colour 0``."""
    text = f"communicator {c.number}: {counted(c.size, 'rank')}"
    if c.parent is not None:
        text += f", split of communicator {c.parent.number}" + ("" if c.color is None else f", colour {c.color}")
    return text if c.identified else text + " (put together from connection lines alone)"


def _title(c: Communicator) -> str:
    """Its name, and ``(gpu01: 0-1, gpu02: 2-3)``."""
    at: defaultdict[str, list[int]] = defaultdict(list)
    for rank, member in sorted(c.members.items()):
        at[member.host].append(rank)
    return f"{_name(c)} ({', '.join(f'{host}: {_ranges(ranks)}' for host, ranks in at.items())})"


def _reasons(c: Communicator) -> Counter[str]:
    """How many pairs have no link, by reason."""
    return Counter(c.unconnected(*pair) for pair in combinations(range(c.size), 2) if pair not in c.links)


def _legend(c: Communicator) -> list[str]:
    """Say what cells without a link and letters mean, and what is special about some links."""
    lines = []
    if _WIDE < c.size <= _WIDEST:
        used = {min(link.kinds) for link in c.links.values()}
        lines.append(", ".join(f"{letter} {kind}" for kind, letter in _LETTERS.items() if kind in used))
    for reason, count in _reasons(c).items() if c.size <= _WIDEST else ():
        note = " (no ring or tree uses them: no fault)" if reason == "not directly connected" else ""
        lines.append(f"- {counted(count, 'pair')} {reason}{note}")
    if later := [pair for pair, link in sorted(c.links.items()) if 0 not in link.indices]:
        lines.append(f"{_pairs(c, later)}: made for send/recv (connection index 1)")
    return lines


def _grid(c: Communicator) -> tuple[list[list[str]], dict[str, str]]:
    """The matrix of a communicator, its first row the head, and colours of cells; only counts where it is too large."""
    if c.size > _WIDEST:
        counts = Counter(link.label for link in c.links.values())
        return [["", ""], *([f"{count} pairs {label}", ""] for label, count in counts.most_common())], {}
    wide = c.size <= _WIDE
    cells, colors = {}, {}
    for (a, b), link in c.links.items():
        kind = min(link.kinds)
        text = cells[a, b] = cells[b, a] = link.label if wide else _LETTERS[kind]
        colors[text] = _COLORS.get(kind, _OTHER_COLOR)
    plain = not wide or all(m.gpu in (None, r) for r, m in c.members.items())
    gpus = {r: f" (gpu{m.gpu})" for r, m in c.members.items() if not plain and m.gpu is not None}
    labels = [f"{r}{gpus.get(r, '')}" for r in range(c.size)]
    rows = [
        [label, *("." if a == b else cells.get((a, b), "-") for b in range(c.size))] for a, label in enumerate(labels)
    ]
    return [["", *labels], *rows], colors
