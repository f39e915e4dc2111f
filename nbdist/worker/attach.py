"""After a renewal: find what the cells have made, and make it work with the new groups, in place.

Looked through are the variables of the namespace and what they hold, four levels deep: items of lists, tuples, sets
and dictionaries (of up to a thousand items), attributes of objects, and modules within modules to any depth.
Variables inside a function's closure are not seen.
"""

from __future__ import annotations

import json
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from nbdist.worker import internals
from nbdist.worker.internals import GroupRecord

if TYPE_CHECKING:
    from nbdist.worker.group import Group

__all__ = ["DEPTH", "reattach"]

DEPTH = 4
_LARGEST = 1000  # items of a container that is looked into
_CLOSED: tuple[type, ...] = (
    str,
    bytes,
    int,
    float,
    complex,
    torch.Tensor,
    torch.device,
    torch.dtype,
    type,
    types.ModuleType,
)
_CLOSED += (types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.CodeType, types.FrameType)


def reattach(group: Group, old: Sequence[GroupRecord], namespace: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Make sub-groups again and attach what is found; every rank calls it, right after it has joined.

    Parameters
    ----------
    group
        This rank's group, joined again.
    old
        The groups as they were.
    namespace
        The cell's variables.

    Returns
    -------
    attached, lost
        Names of what works again; one line for each thing that does not, with what to do.
    """
    renewed = _Renewed()
    for record in old[:1]:
        renewed.add(record, dist.group.WORLD)
    _make_subgroups(group, old[1:], renewed)
    found = _Found(namespace)
    return _Attachment(renewed, found, group).run()


class _Renewed:
    """Which new group stands for which old one."""

    def __init__(self) -> None:
        self.by_name: dict[str, Any] = {}
        self._by_identity: dict[int, tuple[Any, Any]] = {}
        self.missing: dict[int, str] = {}

    def add(self, record: GroupRecord, new: Any) -> None:
        self._by_identity[id(record.group)] = record.group, new
        self.by_name[record.name] = new

    def group_of(self, old: Any) -> Any:
        """The new group for an old one; None if there is none."""
        if id(old) in self._by_identity:
            return self._by_identity[id(old)][1]
        if old in self.by_name.values():
            return old
        # A group a cell has destroyed is known to torch no longer: if it had all ranks, the new default one is meant.
        world = dist.group.WORLD
        return world if world is not None and id(old) not in self.missing and old.size() == world.size() else None


def _make_subgroups(group: Group, old: Sequence[GroupRecord], renewed: _Renewed) -> None:
    """Make the groups again that all of their members still know, in the old order."""
    mine = {
        "groups": [(record.name, record.ranks) for record in old],
        "names": max([int(r.name) + 1 for r in old if r.name.isdecimal()], default=1),
    }
    all_ranks = [json.loads(text) for text in group.exchange("groups", json.dumps(mine))]
    known = [{(name, tuple(ranks)) for name, ranks in theirs["groups"]} for theirs in all_ranks]
    for record in old:
        gone = [rank for rank in record.ranks if (record.name, record.ranks) not in known[rank]]
        if gone:
            renewed.missing[id(record.group)] = f"rank {gone[0]} no longer has it"
        else:
            device_id = group.device if "nccl" in record.backend and group.device.type == "cuda" else None
            renewed.add(record, internals.make_subgroup(record, rank=group.rank, device_id=device_id))
    internals.reserve_names(max(theirs["names"] for theirs in all_ranks))


@dataclass
class _Thing:
    """Something found, and where."""

    path: str
    value: Any
    owner: Any = None
    key: Any = None


@dataclass
class _Found:
    """What a namespace holds that depends on process groups."""

    namespace: dict[str, Any]
    modules: list[_Thing] = field(default_factory=list)
    groups: list[_Thing] = field(default_factory=list)
    meshes: list[_Thing] = field(default_factory=list)
    _seen: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._seen.add(id(self.namespace))
        level = [
            _Thing(name, value, self.namespace, name)
            for name, value in self.namespace.items()
            if not (name.startswith("_") or name in ("In", "Out"))
        ]
        # IPython's own records of results come last, so that a thing is called by its variable.
        level += [_Thing(n, v, self.namespace, n) for n, v in self.namespace.items() if n.startswith("_") or n == "Out"]
        for _ in range(DEPTH):
            level = [inner for thing in level if self._new(thing) for inner in _inside(thing)]

    def _new(self, thing: _Thing) -> bool:
        """Note a thing; return whether to look into it."""
        value = thing.value
        if isinstance(value, dist.ProcessGroup):
            self.groups.append(thing)  # each place, as each is set anew
            return False
        if value is None or isinstance(value, _CLOSED) or id(value) in self._seen:
            return False
        self._seen.add(id(value))
        if isinstance(value, DeviceMesh):
            self.meshes.append(thing)
            return False
        if isinstance(value, torch.nn.Module):
            self._add_module(thing)
        return not isinstance(value, FullyShardedDataParallel)

    def _add_module(self, thing: _Thing) -> None:
        covered: set[int] = set()
        for name, part in thing.value.named_modules():
            path = f"{thing.path}.{name}".removesuffix("._orig_mod") if name else thing.path  # of torch.compile
            if part is not thing.value and id(part) in self._seen:
                continue
            if isinstance(part, DistributedDataParallel | FullyShardedDataParallel):
                self.modules.append(_Thing(path, part))
            elif isinstance(part, FSDPModule) and id(part) not in covered:
                self.modules.append(_Thing(path, part))
                covered.update(id(inner) for inner in cast(torch.nn.Module, part).modules())
            self._seen.add(id(part))


def _inside(thing: _Thing) -> Iterator[_Thing]:
    value, path = thing.value, thing.path
    if isinstance(value, dict):
        if len(value) <= _LARGEST:
            yield from (_Thing(f"{path}[{key!r}]", item, value, key) for key, item in list(value.items()))
    elif isinstance(value, list | tuple):
        if len(value) <= _LARGEST:
            yield from (_Thing(f"{path}[{i}]", item, value, i) for i, item in enumerate(value))
    elif isinstance(value, set | frozenset):
        if len(value) <= _LARGEST:
            yield from (_Thing(f"an item of {path}", item) for item in list(value))
    else:
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            own_groups = isinstance(value, DistributedDataParallel | FSDPModule | FullyShardedDataParallel)
            for name, item in list(attributes.items()):
                if not (own_groups and isinstance(item, dist.ProcessGroup)):
                    yield _Thing(f"{path}.{name}", item, attributes, name)


class _Attachment:
    """Goes through what was found."""

    def __init__(self, renewed: _Renewed, found: _Found, group: Group) -> None:
        self._renewed = renewed
        self._found = found
        self._group = group
        self.attached: list[str] = []
        self.lost: list[str] = []

    def run(self) -> tuple[list[str], list[str]]:
        for thing in self._found.groups:
            self._replace_group(thing)
        for thing in self._found.meshes:
            self._refresh_mesh(thing)
        for thing in self._found.modules:
            self._attach_module(thing)
        return self.attached, self.lost

    def _replace_group(self, thing: _Thing) -> None:
        new = self._renewed.group_of(thing.value)
        if new is thing.value:
            return
        if new is None:
            why = self._renewed.missing.get(id(thing.value), "it was destroyed")
            self.lost.append(f"process group {thing.path}: {why}; run the cell that made it again")
        elif isinstance(thing.owner, dict | list):
            thing.owner[thing.key] = new
            self.attached.append(thing.path)
        else:
            self.lost.append(f"process group {thing.path} cannot be set there; run the cell that made it again")

    def _refresh_mesh(self, thing: _Thing) -> None:
        mesh = thing.value
        root = mesh._get_root_mesh() if hasattr(mesh, "_get_root_mesh") else mesh
        internals.refresh_mesh(root, self._renewed.by_name)
        if internals.refresh_mesh(mesh, self._renewed.by_name):
            self.attached.append(thing.path)
        else:
            self.lost.append(f"device mesh {thing.path}: a group of it is gone; run the cell that made it again")

    def _attach_module(self, thing: _Thing) -> None:
        module = thing.value
        if isinstance(module, DistributedDataParallel):
            why = internals.attach_ddp(module, self._renewed.group_of)
        elif isinstance(module, FullyShardedDataParallel):
            self.lost.append(
                f"FSDP1 module {thing.path} cannot be attached again: its last shards are in the old groups; "
                "wrap its model again, or use fully_shard (nbdist.fsdp), which can"
            )
            return
        else:
            self._refresh_meshes_of(module)
            why = internals.attach_fsdp(module, self._renewed.group_of)
        if why is None:
            for parameter in module.parameters():
                parameter.grad = None
            self.attached.append(thing.path)
        else:
            self.lost.append(f"module {thing.path} could not be attached again ({why}): wrap its model again")

    def _refresh_meshes_of(self, module: torch.nn.Module) -> None:
        for parameter in module.parameters():
            mesh = getattr(parameter, "device_mesh", None)
            if isinstance(mesh, DeviceMesh):
                internals.refresh_mesh(mesh, self._renewed.by_name)
                if hasattr(mesh, "_get_root_mesh"):
                    internals.refresh_mesh(mesh._get_root_mesh(), self._renewed.by_name)
