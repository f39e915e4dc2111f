"""Known mistakes and their remedies, and which errors only follow from another rank's.

torch offers text where one would like a type. The patterns stand here, in one place, each with the torch versions it
was seen in; nothing else in nbdist looks at the text of an error.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from nbdist.errors import CollectiveBroken

__all__ = ["HINTS", "Hint", "find_hint", "is_out_of_memory", "is_secondary"]

# gloo 2.9 to 2.13: what a collective raises when a peer's connection has ended
_CONNECTION_LOST = re.compile(
    r"Connection (?:closed|reset) by peer|Broken pipe|Read error|Write error|Socket closed|"
    r"Transport endpoint is not connected|Application timeout caused pair closure|remote process exited|"
    r"NCCL (?:communicator|operation).*abort|ncclCommAbort|ncclRemoteError"
)


class Hint(NamedTuple):
    """One known mistake.

    Attributes
    ----------
    ename
        Type name of the error.
    pattern
        Matched against its text.
    remedy
        One line, or a function of the match and of the objects at hand, the most likely ones first.
    seen
        torch versions whose text it fits.
    """

    ename: str
    pattern: re.Pattern[str]
    remedy: str | Callable[[re.Match[str], Iterator[Any]], str | None]
    seen: str


def _at_hand(error: BaseException, namespace: Mapping[str, Any]) -> Iterator[Any]:
    """Variables of the functions on the way to the error, from the cell inwards; then those of the cell itself."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_globals is not namespace or frame.f_code.co_name != "<module>":
            yield from list(frame.f_locals.values())
    yield from list(namespace.values())


def _unused_parameters(match: re.Match[str], objects: Iterator[Any]) -> str:
    from torch.nn.parallel import DistributedDataParallel

    indices = re.search(r"Parameter indices which did not receive grad[^:]*:\s*([\d ]+)", match.string)
    unused = [int(i) for i in indices[1].split()] if indices else []
    names: list[str] = []
    model = next((o for o in objects if isinstance(o, DistributedDataParallel)), None)
    if model is not None:
        trainable = [name for name, parameter in model.module.named_parameters() if parameter.requires_grad]
        names = [trainable[i] for i in unused if i < len(trainable)]
    which = f"{', '.join(names)} took no part in the loss" if names else "some parameters took no part in the loss"
    return f"{which}: use them in forward, or wrap with DDP(model, find_unused_parameters=True)"


def _inside_the_wrapper(match: re.Match[str], objects: Iterator[Any]) -> str | None:
    from torch.nn.parallel import DistributedDataParallel

    name = match[1]
    inside = any(isinstance(o, DistributedDataParallel) and hasattr(o.module, name) for o in objects)
    return f"the wrapper does not pass attributes on: model.module.{name}" if inside else None


def _meta_parameter(match: re.Match[str], objects: Iterator[Any]) -> str:
    import torch

    for model in (o for o in objects if isinstance(o, torch.nn.Module)):
        devices: dict[str, list[str]] = {}
        for name, parameter in model.named_parameters():
            devices.setdefault(str(parameter.device), []).append(name)
        if len(devices) > 1 or "meta" in devices:
            fewest = min(devices, key=lambda d: (d != "meta", len(devices[d])))
            names = ", ".join(devices[fewest][:4])
            return f"{names} is on {fewest}: move the whole model with model.to(device) before wrapping it"
    return "move the model and its input to the rank's device: model.to(device), x.to(device)"


HINTS: tuple[Hint, ...] = (
    Hint(
        "RuntimeError",
        re.compile(r"Expected to have finished reduction in the prior iteration"),
        _unused_parameters,
        "2.9-2.13",
    ),
    Hint(
        "ValueError",
        re.compile(r"device_ids.*(?:CPU|cpu)|DistributedDataParallel device_ids and output_device"),
        "on CPU ranks leave device_ids out: DDP(model), or use nbdist.ddp(model), which is right on both",
        "2.9-2.13",
    ),
    Hint(
        "RuntimeError",
        re.compile(r"Expected to mark a variable ready only once"),
        "a parameter took part in two backward passes of one step: checkpoint(..., use_reentrant=False), or"
        " DDP(model, static_graph=True)",
        "2.9-2.13",
    ),
    Hint(
        "AttributeError",
        re.compile(r"'DistributedDataParallel' object has no attribute '(\w+)'"),
        _inside_the_wrapper,
        "2.9-2.13",
    ),
    Hint(
        "ValueError",
        re.compile(r"SyncBatchNorm layers only work with GPU modules"),
        'on CPU ranks keep BatchNorm: convert only if device.type == "cuda"',
        "2.9-2.13",
    ),
    Hint(
        "*",
        re.compile(
            r"Torch not compiled with CUDA enabled|no attribute '_cuda_setDevice'|Found no NVIDIA driver"
            r"|No CUDA GPUs are available|invalid device ordinal"
        ),
        "no such GPU for this rank: use `device`, which every rank has, as in model.to(device) and x.to(device);"
        " `%distributed doctor` says which GPUs there are",
        "2.9-2.13",
    ),
    Hint(
        "RuntimeError",
        re.compile(r"Distributed package doesn't have NCCL built in"),
        "this torch is a build without NCCL: leave backend= out, or use gloo",
        "2.9-2.13",
    ),
    Hint(
        "RuntimeError",
        re.compile(r"DefaultCPUAllocator: (?:can't allocate|not enough) memory"),
        "host memory does not hold this tensor: use a smaller batch, fewer ranks, or nbdist.fsdp()",
        "2.9-2.13",
    ),
    Hint(
        "RuntimeError",
        re.compile(r"FSDP needs a non-CPU accelerator device"),
        'on CPU ranks give FSDP(model, device_id=torch.device("cpu")), or use fully_shard(model)',
        "2.9-2.13",
    ),
    Hint(
        "RuntimeError",
        re.compile(r"(?:Missing|Unexpected) key\(s\) in state_dict:[\s\S]*\"module\."),
        "the 'module.' prefix comes from DDP: save model.module.state_dict(), or load into the wrapped model",
        "2.9-2.13",
    ),
    Hint(
        "*",
        re.compile(
            r"(?:on|in|for|from|of) (?:the )?(?:\S+ )?meta\b|meta tensor|Expected all tensors to be on the same device"
            r"|input module must be on the same type of devices"
        ),
        _meta_parameter,
        "2.9-2.13",
    ),
    Hint(
        "ValueError",
        re.compile(r"sampler option is mutually exclusive with shuffle"),
        "a sampler shuffles by itself: DistributedSampler(data, shuffle=True) and no shuffle= in the DataLoader",
        "2.9-2.13",
    ),
    Hint(
        "RuntimeError",
        re.compile(r"DataLoader worker .*(?:exited unexpectedly|killed by signal)"),
        "a loader worker died: the usual reasons are too little host memory, or a full /dev/shm (bus error)",
        "2.9-2.13",
    ),
    Hint(
        "*",
        re.compile(
            r"shared memory.*No space left on device|unable to \w+ shared memory|^\[Errno 28\] No space left on device$"
        ),
        "/dev/shm is full, through which loader workers hand over batches; containers have 64 MB of it: start one with"
        " --shm-size=8g or --ipc=host, or use fewer workers (num_workers=0 needs none)",
        "2.9-2.13",
    ),
    Hint(
        "AttributeError",
        re.compile(r"Can't get (?:local )?(?:attribute|object) '\w+' on <module '__m(?:ain|p_main)__'"),
        "a spawned process cannot import a class of a cell: use the fork start method, or put it in a module file",
        "python 3.11-3.14",
    ),
    Hint(
        "KeyError",
        re.compile(r"allocated_bytes\.all\.current"),
        "there is no CUDA device here: torch.cuda's memory reports need one",
        "2.9-2.13",
    ),
    Hint(
        "AttributeError",
        re.compile(r"_cuda_record_memory_history|_cuda_memorySnapshot|_cuda_attach_out_of_memory_observer"),
        "this is a CPU build of torch: memory history and snapshots need a CUDA device",
        "2.9-2.13",
    ),
)


def find_hint(error: BaseException, namespace: Mapping[str, Any]) -> str | None:
    """One line that names the remedy of a known mistake, or None.

    Parameters
    ----------
    error
        What the cell raised.
    namespace
        The cell's variables. A remedy that names parameters finds the model there or on the way to the error.
    """
    try:
        text = str(error)
    except Exception:  # a user's __str__ may raise anything
        return None
    for hint in HINTS:
        if hint.ename not in ("*", type(error).__name__):
            continue
        if match := hint.pattern.search(text):
            if isinstance(hint.remedy, str):
                return hint.remedy
            try:
                return hint.remedy(match, _at_hand(error, namespace))
            except Exception:  # looking through the user's objects may raise; the error itself matters more
                return None
    return None


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an allocation failed, as its type says: a text with the word memory in it is no such error."""
    import torch

    return isinstance(error, torch.OutOfMemoryError | MemoryError)


def is_secondary(error: BaseException | None) -> bool:
    """Whether this error says no more than that another rank has gone."""
    if error is None:
        return False
    if isinstance(error, CollectiveBroken):
        return True
    if not isinstance(error, RuntimeError | ConnectionError):
        return False
    try:
        return _CONNECTION_LOST.search(str(error)) is not None
    except Exception:  # a user's __str__ may raise anything
        return False
