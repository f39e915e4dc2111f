"""Variables between the notebook and its ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nbdist.errors import InputError
from nbdist.notebook.members import Members
from nbdist.wire import messages as m
from nbdist.wire import values

if TYPE_CHECKING:
    from nbdist.notebook.cluster import Cluster

__all__ = ["RankView", "pull", "push"]


class RankView:
    """One rank's variables: ``cluster[0]["loss"]``."""

    def __init__(self, cluster: Cluster, rank: int) -> None:
        self._cluster, self._rank = cluster, rank

    def __getitem__(self, name: str) -> Any:
        return self._cluster.pull(name, ranks=[self._rank])[self._rank]

    def __setitem__(self, name: str, value: object) -> None:
        self._cluster.push({name: value}, ranks=[self._rank])


def push(members: Members, variables: Mapping[str, object], ranks: Sequence[int]) -> None:
    """Set variables in these ranks' namespaces.

    Raises
    ------
    InputError
        If a name is none, a value cannot be pickled, or a rank cannot unpickle it.
    """
    for name in variables:
        if not name.isidentifier():
            raise InputError(f"{name!r} is no name a variable can have")
    names = ", ".join(variables)
    try:
        data, buffers = values.dumps(list(variables.values()))
    except Exception as error:  # pickling runs the values' own code
        raise InputError(f"{names} cannot be sent: {type(error).__name__}: {error}") from None
    sizes = [b.nbytes for b in buffers]
    large = sum(sizes) >= values.MEMFD_BYTES
    memfd = values.to_memfd(buffers) if large else None
    inline: list[bytes | memoryview] = [data] if large else [data, *buffers]
    request = m.PushRequest(names=list(variables), memfd=memfd, sizes=sizes if large else None, alone=len(ranks) == 1)
    try:
        members.send(ranks, request, inline)
        for rank, (reply, _) in members.collect(ranks, m.PushReply, None).items():
            if reply.status != "ok":
                raise InputError(f"rank {rank} could not take {names}: {reply.evalue}")
    finally:
        if memfd is not None:
            values.close_memfd(memfd)


def pull(members: Members, name: str, ranks: Sequence[int]) -> dict[int, Any]:
    """Fetch a variable, or the value of an expression, from these ranks.

    Raises
    ------
    InputError
        If a rank has no such variable, or its value cannot be pickled or read here.
    """
    try:
        compile(name, "<pull>", "eval")
    except SyntaxError:
        raise InputError(f"{name!r} is no variable or expression") from None
    members.send(ranks, m.PullRequest(name=name))
    found: dict[int, Any] = {}
    problems = []
    for rank, (reply, buffers) in members.collect(ranks, m.PullReply, None).items():
        if reply.status != "ok":
            missing = reply.ename == "NameError"
            why = f"there is no {name} on rank {rank}" if missing else f"rank {rank} could not send {name}"
            problems.append(why if missing else f"{why}: {reply.ename}: {reply.evalue}")
            continue
        data, parts = buffers[0], list(buffers[1:])
        if reply.memfd is not None:
            parts = values.map_memfd(reply.memfd, reply.sizes or [], alone=True)
            members.send(rank, m.PullDone(memfd=reply.memfd))
        try:
            found[rank] = values.loads(data, parts)
        except Exception as error:  # unpickling runs the classes' own code, which may not be here
            problems.append(f"{name} of rank {rank} cannot be read here: {type(error).__name__}: {error}")
    if problems:
        raise InputError(problems[0])
    return found
