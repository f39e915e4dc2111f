"""What NCCL's logs say, as data: communicators, their ranks, what connects each pair."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Communicator", "Link", "Member", "NcclLog", "Transport"]


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Transport:
    """One way NCCL moves data between two ranks.

    Attributes
    ----------
    kind
        ``P2P``, ``SHM`` (through host memory), ``NET/IB``, ``NET/Socket``, ``NET/other`` (a plugin of any other name),
        ``COLLNET`` or ``other``.
    name
        What NCCL calls it: ``IPC``, ``CUMEM``, ``direct pointer``, ``IBext_v8``, ``AWS Libfabric``, ...
    gdr
        The network card reads and writes GPU memory itself (GPUDirect RDMA).
    flags
        Further marks: ``read``, ``CE`` (copy engine), ``shared`` (buffers).
    """

    kind: str
    name: str = ""
    gdr: bool = False
    flags: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """Short form for a matrix: ``P2P/CUMEM``, ``NET/IB+GDR``."""
        if self.kind == "SHM":
            return "SHM"
        head = self.kind.split("/")[0]
        return f"{head}/{'direct' if self.name == 'direct pointer' else self.name}" + ("+GDR" if self.gdr else "")


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

    @property
    def title(self) -> str:
        """``communicator 2: 2 ranks, split of communicator 1, colour 0``."""
        text = f"communicator {self.number}: {self.size} rank{'s' * (self.size != 1)}"
        if self.parent is not None:
            text += f", split of communicator {self.parent.number}" + (
                "" if self.color is None else f", colour {self.color}"
            )
        return text if self.identified else text + " (put together from connection lines alone)"

    def link(self, a: int, b: int) -> Link | None:
        """Return what connects two ranks, or None."""
        return self.links.get((min(a, b), max(a, b)))

    def unconnected(self, a: int, b: int) -> str:
        """Say why a pair without a link has none."""
        if self.identified and a not in self.members and b not in self.members:
            return "not in this log"
        if not self.identified:
            return "no connection seen"
        if self.unfinished:
            return "not connected: initialisation did not finish"
        return "not directly connected" if self.rings_connected else "no connection seen yet"


@dataclass(slots=True, kw_only=True)
class NcclLog:
    """What one or more logs say, before any judgement.

    Attributes
    ----------
    versions
        ``2.27.7+cuda12.9``; usually one.
    variables
        NCCL's variables set by the environment, with their values.
    networks
        Names after ``Using network``: ``IB``, ``Socket``, a plugin's.
    interfaces
        Network interfaces of NET/Socket.
    no_ib
        NCCL's own words when it found no InfiniBand, else None.
    nvls
        Whether NVLink SHARP multicast is available; None: not said.
    warnings
        NCCL's warnings, each once, with the processes that printed it.
    """

    num_nccl_lines: int = 0
    blank: bool = True
    versions: list[str] = field(default_factory=list)
    variables: dict[str, list[str]] = field(default_factory=dict)
    networks: list[str] = field(default_factory=list)
    interfaces: list[str] = field(default_factory=list)
    no_ib: str | None = None
    nvls: bool | None = None
    warnings: dict[str, set[tuple[str, int]]] = field(default_factory=dict)
    communicators: list[Communicator] = field(default_factory=list)
