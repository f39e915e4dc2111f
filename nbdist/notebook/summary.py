"""What a run's numbers say: one row a rank, and sentences a person would say about them.

Read by the live widget, the static figure and the text form alike, so that all three tell the same. Numbers are in
bytes and seconds here; None is "not available" and becomes ``n/a`` only in the functions that format.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nbdist.notebook.history import History, Run
from nbdist.notebook.palette import MANY_RANKS
from nbdist.notebook.units import bytes_text, duration_text, number_text, ranks_text, seconds_text

__all__ = [
    "Finding",
    "Memory",
    "Progress",
    "RankRow",
    "findings",
    "headline",
    "memory_note",
    "memory_text",
    "progress",
    "rank_rows",
    "table",
    "text_lines",
]

# Parts of a step: key in a sample, and what a person reads. A collective makes everybody as slow as the slowest rank,
# so the ranks tell the time they only waited in one (`wait_s`) apart from work.
PARTS: dict[str, str] = {
    "data_s": "data wait",
    "forward_s": "forward",
    "backward_s": "backward",
    "wait_s": "communication wait",
    "optimizer_s": "optimizer",
    "rest_s": "rest",
}

READINGS = 6  # that the parts of a step are means of: about 3 s

_MATTERS = 0.15  # of the step: less is not worth a sentence
_MATTERS_S = 0.002
_ENDED = ("failed", "died", "killed", "error")


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Memory of one rank.

    Attributes
    ----------
    parts
        Bytes by label: on a GPU everything on the card, else what is held for the model.
    used
        Bytes in use on the card, or by the process.
    limit
        The card's size; None on a CPU.
    peak
        Highest use by tensors so far.
    """

    parts: dict[str, int] = field(default_factory=dict)
    used: int | None = None
    limit: int | None = None
    peak: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a loop is: `done` of `total` items (None: not known), and the seconds left."""

    name: str
    done: int
    total: int | None
    left_s: float | None

    @property
    def fraction(self) -> float | None:
        """Between 0 and 1; None if the total is not known."""
        return min(1.0, self.done / self.total) if self.total else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRow:
    """What one rank last reported."""

    rank: int
    state: str
    step: int | None
    step_s: float | None
    steps_per_s: float | None
    samples_per_s: float | None
    parts: dict[str, float]  # seconds of a step by key of `PARTS`
    last: dict[str, float]  # newest value by metric
    memory: Memory
    load_percent: float | None
    power_w: float | None
    temperature_c: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One sentence worth reading; level is ``bad``, ``warn``, ``note`` or ``good``."""

    level: str
    text: str


def _number(values: Mapping[str, Any], *names: str) -> float | None:
    for name in names:
        value = values.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    return None


def _bytes(values: Mapping[str, Any], *names: str) -> int | None:
    value = _number(values, *names)
    return None if value is None else int(value)


def memory(values: Mapping[str, Any]) -> Memory:
    """Split one sample's memory into parts that add up.

    On a GPU ``allocated`` lies inside ``reserved``, which lies inside what the card has in use: the parts are the
    differences, never the three numbers added. On a CPU the parts are what the model takes, and `Memory.used` is the
    whole process, which would dwarf them.
    """
    held = {
        "parameters": _bytes(values, "parameters_bytes"),
        "gradients": _bytes(values, "gradients_bytes"),
        "optimizer state": _bytes(values, "optimizer_bytes"),
    }
    parts = {label: size for label, size in held.items() if size is not None}
    allocated = _bytes(values, "allocated_bytes")
    if allocated is not None:
        reserved = _bytes(values, "reserved_bytes")
        in_use = _bytes(values, "device_used_bytes")
        parts["activations and others" if parts else "tensors"] = max(0, allocated - sum(parts.values()))
        if reserved is not None:
            parts["cached by torch"] = max(0, reserved - allocated)
            if in_use is not None:
                parts["outside torch"] = max(0, in_use - reserved)
        return Memory(
            parts=parts,
            used=max(allocated, reserved or 0, in_use or 0),
            limit=_bytes(values, "device_total_bytes"),
            peak=_bytes(values, "peak_bytes"),
        )
    process = _bytes(values, "process_uss_bytes", "process_pss_bytes")
    if not any(parts.values()):
        parts = {} if process is None else {"process": process}
    return Memory(parts=parts, used=process if process is not None else (sum(parts.values()) if parts else None))


def memory_text(values: Mapping[str, Any]) -> str | None:
    """Why the three numbers of a GPU differ, for one sample; None if they are not available."""
    allocated = _bytes(values, "allocated_bytes")
    reserved = _bytes(values, "reserved_bytes")
    if allocated is None or reserved is None:
        return None
    text = (
        f"torch has reserved {bytes_text(reserved)}: {bytes_text(allocated)} in tensors, "
        f"{bytes_text(reserved - allocated)} cached for the next ones"
    )
    split = _bytes(values, "inactive_split_bytes")
    if split is not None and reserved and split > 0.2 * reserved:
        text += (
            f" (of which {bytes_text(split)} lie in pieces between tensors: fragmentation; "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True avoids it)"
        )
    in_use = _bytes(values, "device_used_bytes")
    if in_use is not None:
        text += (
            f". The card has {bytes_text(in_use)} in use: {bytes_text(max(0, in_use - reserved))} are outside torch "
            "(CUDA context, NCCL, other processes)"
        )
    return text + "."


def progress(run: Run) -> Progress | None:
    """The progress to show: the slowest rank in the outermost `track` loop, or, without one, in its DataLoader."""
    rows: dict[str, list[Mapping[str, Any]]] = {}
    for values in list(run.history.samples.values()):
        told = values.get("progress")
        found = [*told] if isinstance(told, list) else []
        for row in [*found, values.get("loader")]:
            if isinstance(row, Mapping) and isinstance(row.get("done"), int):
                rows.setdefault(str(row.get("name")), []).append(row)
    if not rows:
        return None
    # The first one made is the outermost loop: an inner one starts again and again.
    name, found_rows = next(iter(rows.items()))
    slowest = min(found_rows, key=lambda row: row["done"])
    total = slowest.get("total")
    return Progress(
        name=name,
        done=slowest["done"],
        total=total if isinstance(total, int) and total > 0 else None,
        left_s=_number(slowest, "left_s") if run.ended_s is None else None,
    )


def rank_rows(run: Run) -> list[RankRow]:
    """One row a rank that takes part in the run."""
    history = run.history
    names = history.names()
    last: dict[int, dict[str, float]] = {}
    step: dict[int, int] = {}
    for name in names:
        for rank in history.ranks(name):
            steps, _, points = history.series(name, rank)
            last.setdefault(rank, {})[name] = float(points[-1])
            if math.isfinite(steps[-1]):
                step.setdefault(rank, int(steps[-1]))
    rows = []
    for rank in run.ranks:
        values = history.samples.get(rank, {})
        parts = {key: _recent(history, key, rank) for key in PARTS if _number(values, key) is not None}
        steps_per_s = _number(values, "steps_per_s")
        step_s = _number(values, "step_s")
        if step_s is None and steps_per_s:
            step_s = 1 / steps_per_s
        reached = step.get(rank)
        if reached is None and (count := _number(values, "steps")) is not None:
            reached = int(count)
        rows.append(
            RankRow(
                rank=rank,
                state=run.states.get(rank, run.status),
                step=reached,
                step_s=step_s,
                steps_per_s=steps_per_s,
                samples_per_s=_number(values, "samples_per_s"),
                parts=parts,
                last=last.get(rank, {}),
                memory=memory(values),
                load_percent=_number(values, "load_percent"),
                power_w=_number(values, "power_w"),
                temperature_c=_number(values, "temperature_c"),
            )
        )
    return rows


def _recent(history: History, name: str, rank: int) -> float:
    """Mean of a rank's last few readings: a single one is as restless as the machine."""
    return float(history.reading(name, rank)[2][-READINGS:].mean())


def headline(run: Run) -> str:
    """Run, workers, device and backend, in one line."""
    count = len(run.ranks)
    workers = f"{count} rank{'s' if count != 1 else ''}"
    if count != run.world_size:
        workers += f" of {run.world_size}"
    return f"{run.name} · {workers} on {run.device} · {run.backend}"


# ---- sentences


def findings(run: Run, rows: Sequence[RankRow] | None = None) -> list[Finding]:
    """What to say about the run, the gravest first."""
    rows = rank_rows(run) if rows is None else rows
    history = run.history
    found: list[Finding] = []
    for row in rows:
        if row.state in _ENDED:
            at = f" after step {row.step}" if row.step is not None else ""
            found.append(Finding(level="bad", text=f"Rank {row.rank} {row.state}{at}; its curves end there."))
    for bad in history.non_finite()[:4]:
        more = f" ({bad.count} values so far)" if bad.count > 1 else ""
        where = f"{bad.name} is not finite on rank {bad.rank}"
        text = f"{where}: {number_text(bad.value)} first at step {bad.step:g}{more}."
        found.append(Finding(level="bad", text=text))
    found += _device_findings(run, rows)
    found += _time_findings(rows)
    if history.turned_back:
        (name, _), step = next(iter(history.turned_back.items()))
        ranks = ranks_text(sorted({rank for known, rank in history.turned_back if known == name}))
        text = (
            f"Steps of {name} went back to {step:g} on {ranks}: the curve is broken there; log a step that counts on."
        )
        found.append(Finding(level="note", text=text))
    if lost := sum(history.lost.values()):
        found.append(
            Finding(level="warn", text=f"{lost} messages of metrics never arrived ({ranks_text(history.lost)}).")
        )
    merged = sum(int(_number(v, "merged_points") or 0) for v in list(history.samples.values()))
    if merged:
        text = f"{merged:,} points came faster than they could be sent and were merged into later ones."
        found.append(Finding(level="note", text=text))
    return found


def _device_findings(run: Run, rows: Sequence[RankRow]) -> list[Finding]:
    found = []
    held: dict[str, list[int]] = {}
    for row in rows:
        values = run.history.samples.get(row.rank, {})
        used, limit = row.memory.used, row.memory.limit
        if used is not None and limit and used > 0.95 * limit:
            text = f"Rank {row.rank}'s card is nearly full: {bytes_text(used)} of {bytes_text(limit)} in use."
            found.append(Finding(level="warn", text=text))
        if retries := _number(values, "alloc_retries"):
            text = (
                f"Rank {row.rank} had to empty torch's cache {retries:.0f} times to find memory: it is nearly used up."
            )
            found.append(Finding(level="warn", text=text))
        words = values.get("throttle")
        if isinstance(words, list) and words:
            held.setdefault(", ".join(map(str, words)), []).append(row.rank)
    for why, ranks in held.items():
        text = f"The GPU of {ranks_text(ranks)} runs below its full clock: {why}."
        found.append(Finding(level="note", text=text))
    return found[:4]


def memory_note(run: Run) -> str | None:
    """One sentence under the memory bars: the fullest card explained, or why no card is shown."""
    samples = run.history.samples.copy()
    on_cards = [values for values in samples.values() if _bytes(values, "allocated_bytes") is not None]
    if on_cards:
        return memory_text(max(on_cards, key=lambda values: _bytes(values, "device_used_bytes", "reserved_bytes") or 0))
    reason = next((values["device_reason"] for values in samples.values() if values.get("device_reason")), None)
    processes = [used for values in samples.values() if (used := memory(values).used) is not None]
    if not processes:
        return None if reason is None else f"No GPU: {reason}."
    text = f"Each process uses up to {bytes_text(max(processes))}, shared pages left out."
    return text if reason is None else f"{text} No GPU: {reason}."


def _time_findings(rows: Sequence[RankRow]) -> list[Finding]:
    timed = [row for row in rows if row.parts and row.state not in _ENDED]
    if not timed:
        return []
    found = []
    step_s = statistics.median(sum(row.parts.values()) for row in timed)
    if len(timed) > 1:
        late = straggler(timed)
        if late is not None:
            row, key, over_s = late
            text = (
                f"Rank {row.rank} is behind: its {PARTS[key]} takes {seconds_text(row.parts[key])} a step, "
                f"{seconds_text(over_s)} more than on the other ranks."
            )
            found.append(Finding(level="warn", text=text))
        else:
            found.append(Finding(level="good", text="All ranks are even: none holds the others up."))
    largest = max(PARTS, key=lambda key: statistics.median(row.parts.get(key, 0.0) for row in timed))
    share = statistics.median_low(row.parts.get(largest, 0.0) for row in timed) / step_s if step_s else 0.0
    if largest == "data_s" and share > 0.4:
        text = f"Waiting for data takes {share:.0%} of a step: more loader workers (num_workers) would help."
        found.append(Finding(level="warn", text=text))
    elif share > 0:
        part = "the rest of the loop" if largest == "rest_s" else PARTS[largest]
        text = f"A step takes {seconds_text(step_s)}; most of it is {part} ({share:.0%})."
        found.append(Finding(level="note", text=text))
    return found


def straggler(rows: Sequence[RankRow]) -> tuple[RankRow, str, float] | None:
    """The rank that the others wait for, the part of its step, and by how many seconds; None if the ranks are even.

    Waiting is never held against a rank. Where ranks wait in collectives, a slow one is believed only if the others
    wait longer than it does, by about what it is slower: else it is noise, or it catches up elsewhere.
    """
    threshold = max(_MATTERS_S, _MATTERS * statistics.median(sum(row.parts.values()) for row in rows))
    waits = [row.parts.get("wait_s", 0.0) for row in rows]
    typical_wait = statistics.median_high(waits)
    worst: tuple[RankRow, str, float] | None = None
    for key in PARTS:
        if key == "wait_s":
            continue
        times = [row.parts.get(key, 0.0) for row in rows]
        typical = statistics.median_low(times)
        for row, seconds, wait in zip(rows, times, waits, strict=True):
            over = seconds - typical
            held_up = typical_wait == 0 or typical_wait - wait > over / 2
            if over > threshold and held_up and (worst is None or over > worst[2]):
                worst = (row, key, over)
    return worst


# ---- as text


def table(run: Run) -> tuple[list[str], list[list[str]]]:
    """Column heads and rows of text: one row a rank, of very many ranks the smallest, median and largest of each.

    Columns in which nothing is known are left out.
    """
    rows = rank_rows(run)
    columns: list[tuple[str, list[float | None], Callable[[Any], str]]] = [
        ("step", [row.step for row in rows], lambda step: "n/a" if step is None else f"{step:.0f}")
    ]
    for name in run.history.names()[:4]:
        columns.append((f"last {name}", [row.last.get(name) for row in rows], number_text))
    columns += [
        ("step time", [row.step_s for row in rows], seconds_text),
        ("steps/s", [row.steps_per_s for row in rows], number_text),
        ("samples/s", [row.samples_per_s for row in rows], number_text),
        ("memory", [row.memory.used for row in rows], bytes_text),
        ("peak", [row.memory.peak for row in rows], bytes_text),
        ("GPU load", [row.load_percent for row in rows], lambda load: "n/a" if load is None else f"{load:.0f} %"),
    ]
    columns = [c for c in columns if c[0] == "step" or any(value is not None for value in c[1])]
    heads = ["rank", "state", *(head for head, _, _ in columns)]
    single = rows if len(rows) <= MANY_RANKS else [row for row in rows if row.state in _ENDED]
    places = {row.rank: place for place, row in enumerate(rows)}
    body = [
        [str(row.rank), row.state, *(text(values[places[row.rank]]) for _, values, text in columns)] for row in single
    ]
    if len(rows) > MANY_RANKS:
        states = Counter(row.state for row in rows)
        said = ", ".join(f"{count} {state}" for state, count in states.most_common())
        for label, pick in (("smallest", min), ("median", statistics.median), ("largest", max)):
            known = [[v for v in values if v is not None and math.isfinite(v)] for _, values, _ in columns]
            cells = [text(pick(v)) if v else "n/a" for v, (_, _, text) in zip(known, columns, strict=True)]
            body.append([f"{label} of {len(rows)}", said, *cells])
    return heads, body


def text_lines(run: Run, *, short: bool = False) -> list[str]:
    """The run as text: a few lines, or (`short`) all in one."""
    rows = rank_rows(run)
    history = run.history
    state = {"ok": "finished", "error": "failed"}.get(run.status, run.status)
    facts = [f"{state} after {duration_text(run.elapsed_s)}" if run.ended_s else duration_text(run.elapsed_s)]
    going = progress(run)
    steps = [row.step for row in rows if row.step is not None]
    if steps:
        facts.append(f"step {min(steps)}" if min(steps) == max(steps) else f"steps {min(steps)} to {max(steps)}")
    if going is not None:
        facts.append(f"{going.name} {going.done}" + (f" of {going.total}" if going.total else ""))
        if going.left_s is not None:
            facts.append(f"{duration_text(going.left_s)} left")
    rates = [row.steps_per_s for row in rows if row.steps_per_s is not None]
    if rates:
        facts.append(f"{number_text(min(rates))} steps/s")
    curves = []
    for name in history.names()[: 1 if short else 4]:
        values = history.last(name)
        text = f"{name}  " + "  ".join(f"[{rank}] {number_text(values[rank])}" for rank in list(values)[:8])
        finite = [value for value in values.values() if math.isfinite(value)]
        if len(values) > 8:
            text += "  ..."
        if len(finite) > 1:
            text += f"  mean of {len(finite)} ranks {number_text(statistics.fmean(finite))}"
        curves.append(text)
    if short:
        return [" · ".join([run.name, *facts, *curves])]
    said = [found.text for found in findings(run, rows) if found.level in ("bad", "warn")]
    return [headline(run), " · ".join(facts), *curves, *said]
