"""Every message between the notebook and a rank: the only description of the wire.

Names are Jupyter's where Jupyter has one. A message is a frozen dataclass of JSON values; raw data (metric columns,
out-of-band pickle buffers) travels beside it as binary buffers. ``parse`` turns a received kind and content into a
message, or raises `WireError` for an unknown kind, a missing or unknown field, or a value of the wrong type.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from dataclasses import dataclass, field
from typing import Any, ClassVar

from nbdist.errors import WireError

__all__ = ["FROM_RANK", "TO_RANK", "Message", "kind_of", "parse"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Base of all messages."""

    kind: ClassVar[str] = ""


# ---- from the notebook to a rank


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecuteRequest(Message):
    """Run one cell."""

    kind: ClassVar[str] = "execute_request"
    run_id: str
    code: str
    cell: int  # number of the cell, for `Cell In[k]` in tracebacks
    ranks: list[int]  # who else runs it
    autoreload: str | None = None  # mode of the notebook's own %autoreload
    watch: list[str] | None = None  # names of the caller's variables to record at each step; None: loss
    interval_s: float = 0.1  # at most how often telemetry is sent
    profile_steps: int | None = None  # optimizer steps to record with torch.profiler
    profile_ranks: list[int] | None = None  # who records them


@dataclass(frozen=True, slots=True, kw_only=True)
class InterruptRequest(Message):
    """Stop the running cell: at the next agreed step boundary, or where it stands."""

    kind: ClassVar[str] = "interrupt_request"
    run_id: str
    at_step: int | None = None  # None: halt at the next boundary and report; n: go on to n, then stop there


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakRequest(Message):
    """Give up the process group's connections, so that a blocked collective returns with an error."""

    kind: ClassVar[str] = "break_request"
    run_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RenewRequest(Message):
    """Join a new default process group (all ranks of the cluster get one at the same time)."""

    kind: ClassVar[str] = "renew_request"
    generation: int
    attach: bool = True  # re-attach DDP and FSDP modules found in the namespace


@dataclass(frozen=True, slots=True, kw_only=True)
class PushRequest(Message):
    """Set names in the rank's namespace; the pickle travels beside, its buffers too or in a memfd."""

    kind: ClassVar[str] = "push_request"
    names: list[str]
    memfd: str | None = None  # path of the memfd that holds the buffers
    sizes: list[int] | None = None  # their sizes in bytes
    alone: bool = False  # no other rank maps the memfd


@dataclass(frozen=True, slots=True, kw_only=True)
class PullRequest(Message):
    """Ask for one name, or the value of a dotted or indexed expression of names."""

    kind: ClassVar[str] = "pull_request"
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PullDone(Message):
    """The notebook has opened the memfd of a pull: the rank may close it."""

    kind: ClassVar[str] = "pull_done"
    memfd: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WhereRequest(Message):
    """Ask what the rank is doing."""

    kind: ClassVar[str] = "where_request"
    full: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ShutdownRequest(Message):
    """Flush and leave."""

    kind: ClassVar[str] = "shutdown_request"


# ---- from a rank to the notebook


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready(Message):
    """The rank has joined the group and serves cells."""

    kind: ClassVar[str] = "ready"
    pid: int
    generation: int
    device: str
    backend: str
    torch_version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StartFailed(Message):
    """The rank could not come up."""

    kind: ClassVar[str] = "start_failed"
    ename: str
    evalue: str
    traceback: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecuteReply(Message):
    """A cell ended on this rank."""

    kind: ClassVar[str] = "execute_reply"
    run_id: str
    status: str  # ok, error, interrupted
    mark: int  # output written before this mark belongs to the cell
    ended_s: float  # unix time
    ename: str = ""
    evalue: str = ""
    traceback: list[str] = field(default_factory=list)
    secondary: bool = False
    group: str = "none"  # which making of the process group the rank stands in; "none": it has none that works
    communicated: bool = False  # the rank issued collectives in this cell
    steps: int = 0  # optimizer steps this rank has made since it started
    hint: str | None = None
    exit_code: int | None = None  # sys.exit in the cell
    details: dict[str, Any] | None = None  # memory at the moment of an out-of-memory error, ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DisplayData(Message):
    """A rich display, or the cell's last value; shown where the text has reached the mark."""

    kind: ClassVar[str] = "display_data"
    run_id: str
    mark: int
    data: dict[str, Any]
    metadata: dict[str, Any] = field(default_factory=dict)
    display_id: str | None = None
    update: bool = False
    result: bool = False  # value of the cell's last expression


@dataclass(frozen=True, slots=True, kw_only=True)
class ClearOutput(Message):
    """The cell asked to clear its output."""

    kind: ClassVar[str] = "clear_output"
    run_id: str
    mark: int
    wait: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice(Message):
    """One line the user should read, e.g. an automatic choice with its reason."""

    kind: ClassVar[str] = "notice"
    text: str
    run_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics(Message):
    """Points of metrics; one float64 buffer per series: n steps, then n unix times, then n values."""

    kind: ClassVar[str] = "metrics"
    run_id: str
    seq: int
    series: list[dict[str, Any]]  # [{"name": str, "n": int}, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample(Message):
    """One reading of a rank's state: memory, step rate, progress. None: not available."""

    kind: ClassVar[str] = "sample"
    run_id: str | None
    time_s: float
    values: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepHalted(Message):
    """The rank names the next step boundary it will come to; there it waits to be told where to stop."""

    kind: ClassVar[str] = "step_halted"
    run_id: str
    steps: int
    grace_s: float = 2.0  # how long it may need to get there


@dataclass(frozen=True, slots=True, kw_only=True)
class RenewReply(Message):
    """The rank joined the group of this generation, or could not."""

    kind: ClassVar[str] = "renew_reply"
    generation: int
    status: str  # ok, error
    evalue: str = ""
    attached: list[str] = field(default_factory=list)  # modules attached again
    lost: list[str] = field(default_factory=list)  # what could not be, one line each
    steps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PushReply(Message):
    """Names were set, or why not."""

    kind: ClassVar[str] = "push_reply"
    status: str
    evalue: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PullReply(Message):
    """The value asked for: the pickle travels beside, its buffers too or in a memfd of this rank."""

    kind: ClassVar[str] = "pull_reply"
    status: str
    ename: str = ""
    evalue: str = ""
    memfd: str | None = None
    sizes: list[int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WhereReply(Message):
    """What the rank is doing: idle, running, or waiting in a collective."""

    kind: ClassVar[str] = "where_reply"
    state: str
    since_s: float | None
    line: str  # `Cell In[3], line 4: dist.barrier()`
    operation: str | None = None
    unmoved: bool = False  # it stands exactly where it stood when it was interrupted
    steps: int = 0
    stack: list[str] = field(default_factory=list)


TO_RANK: dict[str, type[Message]] = {
    c.kind: c
    for c in (
        ExecuteRequest,
        InterruptRequest,
        BreakRequest,
        RenewRequest,
        PushRequest,
        PullRequest,
        PullDone,
        WhereRequest,
        ShutdownRequest,
    )
}
FROM_RANK: dict[str, type[Message]] = {
    c.kind: c
    for c in (
        Ready,
        StartFailed,
        ExecuteReply,
        DisplayData,
        ClearOutput,
        Notice,
        Metrics,
        Sample,
        StepHalted,
        RenewReply,
        PushReply,
        PullReply,
        WhereReply,
    )
}

_HINTS: dict[type[Message], dict[str, Any]] = {
    c: {n: t for n, t in typing.get_type_hints(c).items() if n != "kind"}
    for c in (*TO_RANK.values(), *FROM_RANK.values())
}
_REQUIRED: dict[type[Message], set[str]] = {
    c: {
        f.name
        for f in dataclasses.fields(c)
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    }
    for c in _HINTS
}


def kind_of(message: Message) -> str:
    """The message's name on the wire."""
    return type(message).kind


def _fits(value: Any, hint: Any) -> bool:
    if hint is Any:
        return True
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, h) for h in typing.get_args(hint))
    if origin is list:
        (item,) = typing.get_args(hint)
        return isinstance(value, list) and all(_fits(v, item) for v in value)
    if origin is dict:
        return isinstance(value, dict) and all(isinstance(k, str) for k in value)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def parse(kind: str, content: Any, known: dict[str, type[Message]]) -> Message:
    """Make a message of a received kind and content.

    Parameters
    ----------
    kind
        The name on the wire.
    content
        Decoded JSON.
    known
        Which messages this side accepts: `TO_RANK` or `FROM_RANK`.

    Raises
    ------
    WireError
        If the kind is not known here, or the content does not fit its fields.
    """
    cls = known.get(kind)
    if cls is None:
        raise WireError(f"unknown message {kind!r}")
    if not isinstance(content, dict):
        raise WireError(f"{kind}: content is no object")
    hints = _HINTS[cls]
    if missing := _REQUIRED[cls] - content.keys():
        raise WireError(f"{kind}: missing {', '.join(sorted(missing))}")
    for name, value in content.items():
        if name not in hints:
            raise WireError(f"{kind}: unknown field {name!r}")
        if not _fits(value, hints[name]):
            raise WireError(f"{kind}: field {name!r} has type {type(value).__name__}")
    return cls(**content)
