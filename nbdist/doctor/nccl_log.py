"""Which transport each pair of ranks uses, why, and whether that is good: the verdict on a log of NCCL.

`parse` and `read` take any log of NCCL 2.10 to 2.30 (``NCCL_DEBUG=INFO``) and return an `NcclReport`, which draws
itself as text and as HTML. Only pairs with a line of their own are judged: NCCL connects neighbours in a ring or tree.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

from nbdist.doctor.finding import Finding, Verdict, fail, html_of, info, lines_of, ok, warn, worst
from nbdist.doctor.nccl_model import Communicator, Link, NcclLog
from nbdist.doctor.nccl_problems import problems
from nbdist.doctor.nccl_reader import Reader
from nbdist.errors import InputError

__all__ = ["NcclReport", "judge", "parse", "read"]

_DRAWN = 8  # communicators drawn; more are counted
_WIDE = 16  # ranks up to which cells hold words
_WIDEST = 64  # ranks up to which a matrix is drawn at all
_LETTERS = {"P2P": "P", "SHM": "S", "NET/IB": "I", "NET/Socket": "T", "NET/other": "N", "COLLNET": "C", "other": "?"}

Pair = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclReport:
    """A log, and what it means.

    Attributes
    ----------
    log
        Communicators, links, versions, variables: what was read.
    findings
        The judgement, see `judge`.
    """

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
        lines = [f"NCCL log: {_headline(self.log)}"]
        drawn = [c for c in self.log.communicators if c.links][:_DRAWN]
        for communicator in drawn:
            lines += ["", *_matrix(communicator)]
        if more := sum(bool(c.links) for c in self.log.communicators) - len(drawn):
            lines += ["", f"... {more} more communicators"]
        return "\n".join([*lines, *([""] if drawn else []), *lines_of(self.findings, folded=False)])

    def _repr_html_(self) -> str:
        drawn = [c for c in self.log.communicators if c.links][:_DRAWN]
        more = sum(bool(c.links) for c in self.log.communicators) - len(drawn)
        return (
            f"<div><b>NCCL log:</b> {escape(_headline(self.log))}"
            + "".join(map(_html_matrix, drawn))
            + (f"<p>... {more} more communicators</p>" if more else "")
            + html_of(self.findings)
            + "</div>"
        )

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON values."""
        log = self.log
        return {
            "verdict": self.verdict,
            "versions": log.versions,
            "variables": log.variables,
            "nvls": log.nvls,
            "communicators": [
                {
                    "title": c.title,
                    "ranks": c.size,
                    "members": {str(r): {"host": m.host, "gpu": m.gpu, "bus_id": m.bus_id} for r, m in _members(c)},
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
                    "finished": not c.unfinished,
                }
                for c in log.communicators
            ],
            "findings": [asdict(f) for f in self.findings],
        }


def parse(text: str | bytes | Iterable[bytes]) -> NcclReport:
    """Judge a log that is already in memory.

    Parameters
    ----------
    text
        The log, or its lines as bytes.
    """
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
    """Say what a log means.

    Returns
    -------
    list of Finding
        Failures and their causes, then the links, then what else is worth knowing.
    """
    if log.blank:
        return [info("log", "empty log", remedy="set NCCL_DEBUG=INFO before the workers start")]
    found = problems(log)
    found += _unfinished(log, bool(found))
    judged = [f for c in log.communicators for f in _inside(log, c) + _between(log, c)]
    found += _merged(judged)
    if not any(c.links for c in log.communicators):
        found += _without_links(log, bool(found))
    waiting = sum(
        c.unconnected(a, b) == "no connection seen yet"
        for c in log.communicators
        if c.links and c.size <= _WIDEST
        for a in range(c.size)
        for b in range(a + 1, c.size)
        if (a, b) not in c.links
    )
    if waiting:
        found.append(
            ok(
                "unused pairs",
                f"no connection seen yet for {waiting} pairs: NCCL connects (since 2.22) when a collective first "
                "needs it",
            )
        )
    if log.nvls is not None:
        text = "available" if log.nvls else "not available"
        found.append(ok("NVLS", f"NVLink SHARP multicast (NVLS) is {text}"))
    return found


def _without_links(log: NcclLog, explained: bool) -> list[Finding]:
    """Say why a log names no connection, unless a failure has said it."""
    if explained:
        return []
    if any(c.size > 1 for c in log.communicators):
        fact = "no connection seen yet: NCCL connects (since 2.22) when a collective first needs it"
        return [info("links", fact, remedy="run a collective, then look again")]
    if log.communicators:
        return [ok("links", "one rank: nothing to connect")]
    subsystems = ",".join(log.variables.get("NCCL_DEBUG_SUBSYS", []))
    if log.num_nccl_lines and subsystems and "INIT" not in subsystems:
        fact = f"this log has no connection lines: NCCL_DEBUG_SUBSYS={subsystems} leaves them out"
        return [info("links", fact, remedy="unset NCCL_DEBUG_SUBSYS, or add INIT to it")]
    fact = "this log has no connection lines; set NCCL_DEBUG=INFO before the workers start"
    return [info("links", fact, remedy="`%distributed start --nccl-debug` sets it")]


def _unfinished(log: NcclLog, explained: bool) -> list[Finding]:
    found = []
    for c in log.communicators:
        if not c.unfinished:
            continue
        missing = [r for r in range(min(c.size, 1024)) if r not in c.members]
        fact = f"{c.title}: initialisation did not finish on {c.unfinished} of {c.size} ranks"
        if missing:
            fact += f"; no line from rank{'s' * (len(missing) > 1)} {_ranges(missing)}"
        remedy = "mend the cause above" if explained else "look at what the silent ranks did: crashed, or not there yet"
        found.append(fail("initialisation", fact, "no collective can run", remedy))
    return found


def _same_host(c: Communicator, a: int, b: int, link: Link) -> bool:
    first, second = c.members.get(a), c.members.get(b)
    if first and second:
        return first.host == second.host
    return bool(link.kinds & {"P2P", "SHM"})


def _inside(log: NcclLog, c: Communicator) -> list[Finding]:
    """Judge the pairs inside one host."""
    by_kind: defaultdict[str, list[Pair]] = defaultdict(list)
    for (a, b), link in sorted(c.links.items()):
        if _same_host(c, a, b, link):
            for kind in link.kinds:
                by_kind[kind.split("/")[0]].append((a, b))
    p2p, shm, net = by_kind["P2P"], by_kind["SHM"], by_kind["NET"]
    found = []
    if p2p and not shm and not net:
        where = " inside a host" * (len(p2p) < len(c.links))
        fact = f"all {len(p2p)} connected pairs{where} use P2P" if len(p2p) > 1 else f"{_name_pairs(c, p2p)} uses P2P"
        found.append(ok("links", fact))
    why = _variable(log, "NCCL_P2P_DISABLE") or _variable(log, "NCCL_P2P_LEVEL")
    if shm:
        matters = "data goes through host memory: slower than GPU to GPU"
        if why:
            fact = f"{_name_pairs(c, shm)} through host memory (SHM): {why} is set"
            remedy = f"unset {why.split('=')[0]}, unless these GPUs are known to hang or to corrupt data with P2P"
            found.append(warn("links", fact, matters, remedy))
        elif p2p:
            fact = f"mixed: {_name_pairs(c, p2p)} P2P; {_name_pairs(c, shm)} SHM{_across(p2p, shm)}"
            remedy = "nothing, if the GPUs are wired so; `nvidia-smi topo -m` shows it"
            found.append(info("links", fact, matters, remedy))
        elif other := _with_p2p(log, c, shm):
            fact = (
                f"{_name_pairs(c, shm)} through host memory (SHM); communicator {other} uses P2P between the same GPUs"
            )
            remedy = "the path is there: compare how the two were made (options, environment, NCCL's configuration)"
            found.append(info("links", fact, matters, remedy))
        else:
            fact = f"{_name_pairs(c, shm)} through host memory (SHM); no variable forbids P2P"
            remedy = (
                "`nvidia-smi topo -p2p r` tells whether the driver offers P2P; many cards and virtual machines do not"
            )
            found.append(info("links", fact, matters, remedy))
    if net:
        shm_off = _variable(log, "NCCL_SHM_DISABLE")
        cause = " and ".join(filter(None, (why, shm_off)))
        fact = f"{_name_pairs(c, net)} over the network inside one host" + (f": {cause} set" if cause else "")
        remedy = (
            f"unset {' and '.join(w.split('=')[0] for w in (why, shm_off) if w)}"
            if cause
            else ("let the ranks share one container, or at least --ipc=host and one /dev/shm")
        )
        matters = "the slowest path there is between two GPUs of one host"
        found.append(warn("links", fact, matters, remedy))
    return found


def _gpus(c: Communicator, pair: Pair) -> frozenset[tuple[str, int | None]]:
    return frozenset((m.host, m.gpu) for r in pair if (m := c.members.get(r)) and m.gpu is not None)


def _with_p2p(log: NcclLog, c: Communicator, pairs: Sequence[Pair]) -> int | None:
    """Number of another communicator that uses P2P between the GPUs of all these pairs."""
    wanted = {_gpus(c, p) for p in pairs}
    for other in log.communicators:
        joined = {_gpus(other, p) for p, link in other.links.items() if "P2P" in link.kinds}
        if other is not c and wanted <= joined:
            return other.number
    return None


def _between(log: NcclLog, c: Communicator) -> list[Finding]:
    """Judge the pairs that leave a host."""
    found = []
    outside = {p: link for p, link in sorted(c.links.items()) if not _same_host(c, *p, link)}
    sockets = [p for p, link in outside.items() if "NET/Socket" in link.kinds]
    if sockets:
        why = _variable(log, "NCCL_IB_DISABLE") or _variable(log, "NCCL_NET")
        cause = f"{why} is set" if why else log.no_ib
        where = f" ({', '.join(log.interfaces)})" if log.interfaces else ""
        found.append(
            warn(
                "network",
                f"traffic between nodes goes over TCP sockets{where}" + (f"; {cause}" if cause else ""),
                f"{_name_pairs(c, sockets)}: a fraction of InfiniBand's bandwidth, and CPU time",
                f"unset {why.split('=')[0]}"
                if why
                else "if there is InfiniBand or RoCE: give the container its devices (--device=/dev/infiniband) and "
                "libibverbs; else name the fastest interface in NCCL_SOCKET_IFNAME",
            )
        )
    plain = [p for p, link in outside.items() if any(t.kind == "NET/IB" and not t.gdr for t in link.transports)]
    if plain:
        why = _variable(log, "NCCL_NET_GDR_LEVEL")
        found.append(
            warn(
                "network",
                f"{_name_pairs(c, plain)}: InfiniBand without GPUDirect RDMA" + (f"; {why} is set" if why else ""),
                "data between nodes is staged in host memory",
                "load nvidia-peermem, or use a driver with DMA-BUF; let NCCL_NET_GDR_LEVEL allow the distance",
            )
        )
    good = [p for p, link in outside.items() if any(t.kind == "NET/IB" and t.gdr for t in link.transports)]
    if good:
        by_proxy = [p for p in good if outside[p].proxies]
        plugins = sorted({t.name for p in good for t in outside[p].transports} - {"IB"})
        through = f" through {', '.join(plugins)}" if plugins else ""
        fact = f"{_name_pairs(c, good)}: InfiniBand{through} with GPUDirect RDMA"
        if by_proxy:
            ranks = sorted({r for p in by_proxy for r in outside[p].proxies})
            fact += f" ({_name_pairs(c, by_proxy)} sent through proxy rank{'s' * (len(ranks) > 1)} {_ranges(ranks)})"
        found.append(ok("network", fact))
    for transport in sorted({t for link in outside.values() for t in link.transports if t.kind == "NET/other"}):
        pairs = [p for p, link in outside.items() if transport in link.transports]
        how = "with" if transport.gdr else "without"
        fact = f"{_name_pairs(c, pairs)}: plugin {transport.name!r}, {how} GPUDirect RDMA"
        found.append(Finding(name="network", verdict="ok" if transport.gdr else "info", fact=fact))
    return found


def _merged(found: Sequence[Finding]) -> list[Finding]:
    """The same of several communicators once, and no "all P2P" beside pairs that are not."""
    troubled = any(f.verdict != "ok" for f in found if f.name == "links")
    kept = [f for f in found if not (troubled and f.name == "links" and f.verdict == "ok")]
    return list(dict.fromkeys(kept))


def _variable(log: NcclLog, name: str) -> str | None:
    """``NAME=value`` where the log says that it is set to something that matters."""
    values = [v for v in log.variables.get(name, []) if not (name.endswith("_DISABLE") and v in ("0", ""))]
    return f"{name}={values[0]}" if values else None


def _name_pairs(c: Communicator, pairs: Sequence[Pair]) -> str:
    """``0-1, 2-3``; with the GPUs where a communicator's ranks are not the GPUs' numbers."""
    shown = []
    for a, b in pairs[:8]:
        first, second = c.members.get(a), c.members.get(b)
        text = f"{a}-{b}"
        if c.parent is not None and first and second and first.gpu is not None:
            text += f" (GPUs {first.gpu}-{second.gpu})"
        shown.append(text)
    more = f" and {len(pairs) - 8} more" if len(pairs) > 8 else ""
    where = f"communicator {c.number}: " if c.number > 1 else ""
    return where + ", ".join(shown) + more


def _across(p2p: Sequence[Pair], shm: Sequence[Pair]) -> str:
    """Say so where the SHM pairs lie between groups that P2P joins: GPUs under different PCIe roots."""
    group: dict[int, int] = {}
    for a, b in p2p:
        old, new = group.setdefault(b, b), group.setdefault(a, a)
        group.update({r: new for r, g in group.items() if g == old})
    if any(group.get(a, -1 - a) == group.get(b, -1 - b) for a, b in shm):
        return ""
    sets = [
        _ranges([r for r in sorted(group) if group[r] == g]) for g in dict.fromkeys(group[r] for r in sorted(group))
    ]
    return f" (they cross the PCIe groups {' | '.join(sets)})" if len(sets) > 1 else ""


def _ranges(numbers: Sequence[int]) -> str:
    """``0-2,5`` for sorted numbers."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and runs[-1][-1] == n - 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ",".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)


# ---- drawing


def _members(c: Communicator) -> list[tuple[int, Any]]:
    return sorted(c.members.items())


def _headline(log: NcclLog) -> str:
    hosts = {m.host for c in log.communicators for m in c.members.values()}
    ranks = {(m.host, m.pid) for c in log.communicators for m in c.members.values()}
    parts = [f"NCCL {', '.join(log.versions)}" if log.versions else "version not printed"]
    if ranks:
        parts.append(f"{len(ranks)} process{'es' * (len(ranks) != 1)} on {len(hosts)} host{'s' * (len(hosts) != 1)}")
    return ", ".join(parts)


def _seats(c: Communicator) -> str:
    """``gpu01: 0-1, gpu02: 2-3``."""
    at: defaultdict[str, list[int]] = defaultdict(list)
    for rank, member in _members(c):
        at[member.host].append(rank)
    return ", ".join(f"{host}: {_ranges(ranks)}" for host, ranks in at.items())


def _legend(c: Communicator) -> list[str]:
    """Say what cells without a link mean, and what is special about some links."""
    reasons = Counter(c.unconnected(a, b) for a in range(c.size) for b in range(a + 1, c.size) if (a, b) not in c.links)
    lines = []
    for reason, count in reasons.items():
        note = " (no ring or tree uses them: no fault)" if reason == "not directly connected" else ""
        lines.append(f"- {count} pair{'s' * (count != 1)} {reason}{note}")
    if later := [p for p, link in sorted(c.links.items()) if 0 not in link.indices]:
        lines.append(f"{_name_pairs(c, later)}: made for send/recv (connection index 1)")
    return lines


def _matrix(c: Communicator) -> list[str]:
    lines = [f"{c.title} ({_seats(c)})"]
    if c.size > _WIDEST:
        counts = Counter(link.label for link in c.links.values())
        return [*lines, *(f"  {count} pairs {label}" for label, count in counts.most_common())]
    shown = range(c.size)
    wide = c.size <= _WIDE
    cells = {p: link.label if wide else _LETTERS[min(link.kinds)] for p, link in c.links.items()}
    labels = {r: _rank_label(c, r) if wide else str(r) for r in shown}
    width = max([len(v) for v in cells.values()] + [len(v) for v in labels.values()])
    margin = max(map(len, labels.values()))
    lines.append("  " + " " * margin + "".join(f"  {labels[r]:>{width}}" for r in shown))
    for a in shown:
        row = ("." if a == b else cells.get((min(a, b), max(a, b)), "-") for b in shown)
        lines.append(f"  {labels[a]:>{margin}}" + "".join(f"  {cell:>{width}}" for cell in row))
    if not wide:
        used = {min(link.kinds) for link in c.links.values()}
        lines.append("  " + ", ".join(f"{_LETTERS[k]} {k}" for k in _LETTERS if k in used))
    return lines + [f"  {line}" for line in _legend(c)]


def _rank_label(c: Communicator, rank: int) -> str:
    member = c.members.get(rank)
    alike = all(m.gpu in (None, r) for r, m in c.members.items())
    return str(rank) if alike or member is None or member.gpu is None else f"{rank} (gpu{member.gpu})"


_COLORS = {"P2P": "46,160,67", "NET/IB": "56,139,253", "NET/other": "56,139,253", "SHM": "210,153,34"}


def _html_matrix(c: Communicator) -> str:
    title = f"<p>{escape(c.title)} ({escape(_seats(c))})</p>"
    if c.size > _WIDEST:
        return title + "<pre>" + escape("\n".join(_matrix(c)[1:])) + "</pre>"
    wide = c.size <= _WIDE
    head = "".join(f"<th>{escape(_rank_label(c, r)) if wide else r}</th>" for r in range(c.size))
    rows = []
    for a in range(c.size):
        cells = []
        for b in range(c.size):
            link = c.link(a, b)
            if a == b:
                cells.append("<td></td>")
            elif link is None:
                cells.append(f'<td title="{a}-{b}: {c.unconnected(a, b)}" style="opacity:.5">-</td>')
            else:
                kind = min(link.kinds)
                color = _COLORS.get(kind, "218,54,51")
                text = link.label if wide else _LETTERS[kind]
                tip = f"{a}-{b}: {link.label}"
                cells.append(f'<td title="{escape(tip)}" style="background:rgba({color},.25)">{escape(text)}</td>')
        rows.append(f"<tr><th>{escape(_rank_label(c, a)) if wide else a}</th>{''.join(cells)}</tr>")
    legend = "".join(f"<div>{escape(line)}</div>" for line in _legend(c))
    return f"{title}<table><thead><tr><th></th>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>{legend}"
