"""Which GPUs CUDA will show a process, in CUDA's order, from NVML's list and the environment.

CUDA's own counting is the truth (`torch.cuda.device_count` in a fresh process); this says which NVML device each
number means, and why there are fewer than NVML lists.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nbdist.doctor.gpu import Device, Snapshot, bare_uuid

__all__ = ["Visible", "visible"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Visible:
    """What CUDA will see.

    Attributes
    ----------
    devices
        ``devices[i]`` is ``cuda:i``; None where only CUDA knows which one it is (different cards, fastest first).
    reason
        Why there is none, None if there is one.
    notes
        What else should be said, one line each, e.g. an entry that does not exist.
    """

    devices: tuple[Device | None, ...] = ()
    reason: str | None = None
    notes: tuple[str, ...] = ()


def visible(
    found: Snapshot, environ: Mapping[str, str] | None = None, *, torch_uuids: Sequence[str] | None = None
) -> Visible:
    """Match CUDA's devices to NVML's.

    Parameters
    ----------
    found
        NVML's list.
    environ
        The environment of the process in question; None: this one's.
    torch_uuids
        UUIDs of ``cuda:0``, ``cuda:1``, ... as torch reports them, where they are known: they decide.
    """
    environ = os.environ if environ is None else environ
    if torch_uuids is not None:
        by_uuid = {
            bare_uuid(d.uuid): d for device in found.devices for d in (device, *device.instances) if d.uuid is not None
        }
        return Visible(devices=tuple(by_uuid.get(bare_uuid(uuid)) for uuid in torch_uuids))
    if not found.devices:
        return Visible(reason=found.reason)
    text = environ.get("CUDA_VISIBLE_DEVICES")
    ordered = _in_cuda_order(found.devices, environ)
    if text is None:
        return _chosen(list(ordered), [])
    shown = f'CUDA_VISIBLE_DEVICES="{text}"'
    first = text.strip()
    if first.startswith(("GPU-", "MIG-")):
        entries = first.split(",")
    else:
        entries = [str(number) for number in map(_leading_int, text.split(","))]
        if (end := next((i for i, entry in enumerate(entries) if int(entry) < 0), None)) is not None:
            entries = entries[:end]
        if not entries:
            return Visible(reason=f"GPUs hidden by {shown}")
    chosen: list[Device | None] = []
    notes: list[str] = []
    for place, entry in enumerate(entries):  # first of all: a repetition counts wherever it stands
        if entry in entries[:place]:
            return Visible(reason=f"no GPU: {shown} repeats {entry}, and CUDA then sees none")
    for place, entry in enumerate(entries):
        try:
            chosen.append(_find(entry, found.devices, ordered, first[:4]))
        except LookupError as error:
            after = ", entries after it are ignored" if place + 1 < len(text.split(",")) else ""
            notes.append(f"{shown}: {error.args[0]}{after}")
            break
    if not chosen:
        return Visible(reason=f"no GPU: {notes[0]}", notes=tuple(notes))
    known = [d.uuid for d in chosen if d is not None]
    if len(set(known)) < len(known):
        return Visible(reason=f"no GPU: {shown} repeats a GPU, and CUDA then sees none")
    return _chosen(chosen, notes)


def _chosen(devices: list[Device | None], notes: list[str]) -> Visible:
    """Apply MIG's rule: a process sees one compute instance, and then no whole GPU."""
    for device in devices:
        if device is None or not (device.mig or device.gpu_instance is not None):
            continue
        instance = device if device.gpu_instance is not None else next(iter(device.instances), None)
        if instance is None:
            return Visible(reason=f"no GPU: GPU {device.index} is in MIG mode and has no instance", notes=tuple(notes))
        if len(devices) > 1 or len(device.instances) > 1:
            notes.append("CUDA shows a process one MIG instance only: the others are ignored")
        return Visible(devices=(instance,), notes=tuple(notes))
    return Visible(devices=tuple(devices), notes=tuple(notes))


def _in_cuda_order(devices: Sequence[Device], environ: Mapping[str, str]) -> Sequence[Device | None]:
    """NVML counts by PCI bus; CUDA, unless told to, puts the fastest first: the same only if all are alike."""
    if environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({d.name for d in devices}) == 1:
        return devices
    return [None] * len(devices)


def _leading_int(entry: str) -> int:
    """The number an entry begins with (``1gpu`` is 1), -1 if with none."""
    match = re.match(r"\s*([+-]?\d+)", entry)
    return int(match[1]) if match else -1


def _find(entry: str, devices: Sequence[Device], ordered: Sequence[Device | None], family: str) -> Device | None:
    """The device an entry of CUDA_VISIBLE_DEVICES names; LookupError says why there is none."""
    if not family.startswith(("GPU-", "MIG-")):
        if int(entry) >= len(ordered):
            raise LookupError(f"entry {entry} does not exist ({len(ordered)} GPU{'s' * (len(ordered) != 1)})")
        return ordered[int(entry)]
    if not entry.startswith(family):
        raise LookupError(f"entry {entry!r} is no {family[:3]} UUID")
    if family == "MIG-" and entry.startswith("MIG-GPU-"):  # MIG-GPU-<uuid>/<gpu instance>/<compute instance>
        uuid, _, numbers = entry[4:].partition("/")
        candidates = [
            i
            for d in devices
            if d.uuid == uuid
            for i in d.instances
            if f"{i.gpu_instance}/{i.compute_instance}" == numbers
        ]
    else:
        listed = devices if family == "GPU-" else [i for d in devices for i in d.instances]
        candidates = [d for d in listed if d.uuid is not None and d.uuid.startswith(entry)]
    if len(candidates) != 1:
        raise LookupError(f"entry {entry} {'is ambiguous' if candidates else 'does not exist'}")
    return candidates[0]
