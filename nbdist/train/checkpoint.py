"""``save()`` and ``load()``: sharded checkpoints that replace the old one at once and fit any number of ranks.

Written by ``torch.distributed.checkpoint``: each rank writes its own part, and a checkpoint of DDP on four ranks can be
read by FSDP on three. The folder appears under its name only when it is complete; until then the old one stays.
"""

from __future__ import annotations

import ctypes
import io
import json
import os
import shutil
import threading
import uuid
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as read_parts
from torch.distributed.checkpoint.state_dict_saver import async_save as write_parts_later
from torch.distributed.checkpoint.state_dict_saver import save as write_parts
from torch.optim import Optimizer

from nbdist.errors import InputError
from nbdist.train.ranks import agree, require_group, signature, together

__all__ = ["Saving", "load", "save"]

_FACTS = "nbdist.json"
_EXTRA = "extra.pt"
_RENAME_EXCHANGE = 2  # linux/fs.h
_AT_FDCWD = -100  # fcntl.h


class Saving:
    """A checkpoint that is being written while training goes on.

    The next ``save()`` waits for it by itself; wait for the last one before the program ends.
    """

    def __init__(self, future: Future[Any], folder: Path, path: Path) -> None:
        self._future, self._folder, self.path = future, folder, path
        self._published = threading.Event()
        self._failure: Exception | None = None
        if dist.get_rank() == 0:
            future.add_done_callback(self._publish)

    def _publish(self, future: Future[Any]) -> None:
        # On the writing thread of rank 0: what it learns is told to the others in wait().
        try:
            future.result()
            _publish(self._folder, self.path)
        except Exception as error:
            self._failure = error
        finally:
            self._published.set()

    def done(self) -> bool:
        """Whether this rank's part is written (on rank 0: and the checkpoint stands under its name)."""
        return self._published.is_set() if dist.get_rank() == 0 else self._future.done()

    def wait(self) -> None:
        """Wait until the checkpoint is complete; call it on every rank. Raises what went wrong on any of them."""
        global _pending

        def check() -> tuple[None, dict[str, object]]:
            self._future.result()
            if dist.get_rank() == 0:
                self._published.wait()
                if self._failure is not None:
                    raise self._failure
            return None, {"the path": self.path}

        _pending = None if _pending is self else _pending
        agree("save", check)


_pending: Saving | None = None
_writers: tuple[object, Any] | None = None


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    full: bool = False,
    wait: bool = True,
) -> Saving | None:
    """Write a checkpoint; call it on every rank.

    Parameters
    ----------
    path
        Folder of the checkpoint, the same on every rank and on a file system that all of them see; an older checkpoint
        of that name is replaced when the new one is complete. With ``full``, a file.
    model
        Wrapped or not.
    optimizer
        Its state is divided over the ranks as the model is.
    extra
        Small things to have back from ``load()``, rank 0's: step, epoch, a scheduler's state.
    full
        For use without nbdist: rank 0 writes one file with the whole model's state dict, as ``torch.load`` reads it,
        without ``module.`` in its names.
    wait
        False returns once the state has been copied, and writes it while training goes on.

    Returns
    -------
    Saving or None
        Something to wait for, with ``wait=False``.

    Raises
    ------
    InputError
        On every rank alike.
    """
    require_group("save")
    target = Path(os.path.abspath(os.fspath(path))) if isinstance(path, str | os.PathLike) else None

    def check() -> tuple[bytes, Mapping[str, object]]:
        if target is None:
            raise InputError(f"expects the path first, then the model, not {type(path).__name__}")
        if not isinstance(model, nn.Module):
            raise InputError(f"expects a torch.nn.Module after the path, not {type(model).__name__}")
        if optimizer is not None and not isinstance(optimizer, Optimizer):
            raise InputError(f"expects a torch.optim.Optimizer after the model, not {type(optimizer).__name__}")
        if full and (optimizer is not None or extra is not None or not wait):
            raise InputError("full=True exports the model alone, and waits: leave optimizer, extra and wait out")
        if dist.get_rank() == 0:
            _check_target(target, full)
        asked = (full, wait, optimizer is not None)
        return _packed(extra), {"the path": target, "the model": signature(model), "the arguments": asked}

    packed = agree("save", check)
    if _pending is not None:
        _pending.wait()
    assert target is not None
    if full:
        _export(target, model)
        return None
    folder = _start(target, optimizer, packed)
    state: dict[str, Any] = {"model": get_model_state_dict(model)}
    if optimizer is not None and optimizer.state:
        state["optimizer"] = get_optimizer_state_dict(model, optimizer)
    writer = FileSystemWriter(folder, single_file_per_rank=True, sync_files=True)
    if wait:
        _save_now(state, writer, folder, target)
        return None
    return _save_later(state, writer, folder, target)


def load(path: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer | None = None) -> dict[str, Any]:
    """Read a checkpoint into a model and its optimizer; call it on every rank.

    The number of ranks, and DDP or FSDP, may differ from those it was written with.

    Parameters
    ----------
    path
        What ``save()`` wrote: a folder, or with ``full`` a file.
    model
        Wrapped as it will be trained.
    optimizer
        Built from the wrapped model's parameters.

    Returns
    -------
    dict
        The ``extra`` that was saved.

    Raises
    ------
    InputError
        On every rank alike: no checkpoint there, one of another model, or one without this optimizer's state.
    """
    require_group("load")
    if _pending is not None:
        _pending.wait()
    target = Path(os.path.abspath(os.fspath(path)))

    def check() -> tuple[Metadata | None, Mapping[str, object]]:
        if not isinstance(model, nn.Module):
            raise InputError(f"expects a torch.nn.Module after the path, not {type(model).__name__}")
        facts = {"the path": target, "the model": signature(model), "the arguments": optimizer is not None}
        if target.is_file():
            if optimizer is not None:
                raise InputError(f"{target.name} is a full state dict of a model, without an optimizer's state")
            return None, facts
        if not (target / ".metadata").is_file():
            raise InputError(
                f"{target} is no checkpoint" + ("" if target.exists() else ": there is nothing of that name")
            )
        if optimizer is not None:
            _check_optimizer(_facts(target), optimizer)
        return FileSystemReader(target).read_metadata(), facts

    metadata = agree("load", check)
    # Collective under version 1 of FSDP, so no rank may have refused before.
    state: dict[str, Any] = {"model": get_model_state_dict(model)}
    if metadata is None:
        _import(target, model, _shapes(state["model"]))
        return {}
    held = _held(metadata)
    together("load", lambda: _compare(held, _shapes(state["model"])))
    with_state = optimizer is not None and any(k.startswith("optimizer.") for k in metadata.state_dict_metadata)
    if optimizer is not None and with_state:
        # Gradients of the old weights have no use, and would keep torch from setting up an empty optimizer's state.
        optimizer.zero_grad(set_to_none=True)
        state["optimizer"] = get_optimizer_state_dict(model, optimizer)
    read_parts(state, storage_reader=FileSystemReader(target))
    set_model_state_dict(model, state["model"])
    if optimizer is not None:
        if with_state:
            set_optimizer_state_dict(model, optimizer, state["optimizer"])
        else:
            optimizer.state.clear()
        for group, saved in zip(optimizer.param_groups, _facts(target)["param_groups"], strict=True):
            group.update(saved)
    box = [torch.load(target / _EXTRA, weights_only=True) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box, src=0)
    return dict(box[0] or {})


def _shapes(state: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.size()) for name, value in state.items() if hasattr(value, "size")}


# ---- writing


def _packed(extra: Mapping[str, Any] | None) -> bytes:
    """``extra`` as bytes that the safe loader takes back."""
    buffer = io.BytesIO()
    try:
        torch.save(dict(extra or {}), buffer)
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except Exception as error:
        kinds = sorted({type(v).__name__ for v in (extra or {}).values()})
        raise InputError(f"extra expects numbers, text, tensors and lists or dicts of them, not {kinds}") from error
    return buffer.getvalue()


def _check_target(target: Path, full: bool) -> None:
    if not target.parent.is_dir() and target.parent.exists():
        raise InputError(f"{target.parent} is not a folder")
    if full and target.is_dir():
        raise InputError(f"{target} is a folder; full=True writes one file")
    if not full and target.is_file():
        raise InputError(f"{target} is a file; a sharded checkpoint is a folder")
    if not full and target.is_dir() and any(target.iterdir()) and not (target / ".metadata").exists():
        raise InputError(f"{target} holds something that is no checkpoint; it would be replaced: give another name")


def _start(target: Path, optimizer: Optimizer | None, packed: bytes) -> Path:
    """Make the temporary folder beside the target, on rank 0, and tell everyone its name."""
    box: list[str | None] = [f".{target.name}.{uuid.uuid4().hex[:8]}.partial" if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box, src=0)
    folder = target.parent / str(box[0])

    def make() -> None:
        if dist.get_rank() == 0:
            target.parent.mkdir(parents=True, exist_ok=True)
            for stale in target.parent.glob(f".{target.name}.*.partial"):
                shutil.rmtree(stale, ignore_errors=True)
            folder.mkdir()
            facts = {
                "format": 1,
                "torch": torch.__version__,
                "world_size": dist.get_world_size(),
                "optimizer": type(optimizer).__name__ if optimizer is not None else None,
                "param_groups": [_settings(g) for g in optimizer.param_groups] if optimizer is not None else [],
            }
            (folder / _FACTS).write_text(json.dumps(facts, indent=1))
            (folder / _EXTRA).write_bytes(packed)

    together("save", make)
    return folder


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    plain = {k: v.item() if isinstance(v, torch.Tensor) and v.numel() == 1 else v for k, v in group.items()}
    return {k: v for k, v in plain.items() if k != "params" and isinstance(v, bool | int | float | str | list | tuple)}


def _save_now(state: dict[str, Any], writer: FileSystemWriter, folder: Path, target: Path) -> None:
    try:
        write_parts(state, storage_writer=writer)
    except BaseException:
        if dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
        raise

    together("save", lambda: _publish(folder, target) if dist.get_rank() == 0 else None)


def _save_later(state: dict[str, Any], writer: FileSystemWriter, folder: Path, target: Path) -> Saving:
    global _pending, _writers
    default = dist.group.WORLD
    if _writers is None or _writers[0] is not default:
        # The writing thread has collectives of its own; in the training's group they would pair with the training's.
        _writers = (default, dist.new_group(backend="gloo"))
    future = write_parts_later(state, storage_writer=writer, process_group=_writers[1])
    assert isinstance(future, Future)
    _pending = Saving(future, folder, target)
    return _pending


def _publish(folder: Path, target: Path) -> None:
    """Give the complete folder its name in one step, and drop what had it."""
    metadata = FileSystemReader(folder).read_metadata()
    files = {info.relative_path for info in (metadata.storage_data or {}).values()}
    missing = sorted(f for f in files if not (folder / f).exists())
    if missing:
        raise InputError(f"{missing[0]} of another machine is not in {folder}: the path must be seen by all of them")
    if not target.exists():
        folder.rename(target)
    elif not _exchange(folder, target):
        aside = folder.with_suffix(".old")
        target.rename(aside)
        folder.rename(target)
        shutil.rmtree(aside, ignore_errors=True)
    else:
        shutil.rmtree(folder, ignore_errors=True)
    parent = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(parent)
    finally:
        os.close(parent)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two folders' names in one step, where the system and the file system can."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    return bool(renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0)


def _export(target: Path, model: nn.Module) -> None:
    # On CPU ranks offloading copies nothing, and version 1 of FSDP then reads memory it has freed (torch 2.13).
    offload = any(p.device.type != "cpu" for p in model.parameters())
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=offload))

    def write() -> None:
        if dist.get_rank() == 0:
            target.parent.mkdir(parents=True, exist_ok=True)
            partial = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.partial")
            try:
                torch.save(state, partial)
                partial.replace(target)
            finally:
                partial.unlink(missing_ok=True)

    together("save", write)


# ---- reading


def _facts(target: Path) -> dict[str, Any]:
    """What save() noted beside the parts; a checkpoint of torch's own makes has no such file."""
    try:
        facts: dict[str, Any] = json.loads((target / _FACTS).read_text())
    except FileNotFoundError:
        raise InputError(f"{target} was not written by nbdist.save(): it has no {_FACTS}") from None
    return facts


def _held(metadata: Metadata) -> dict[str, tuple[int, ...]]:
    """Name and whole shape of each of the model's tensors in a checkpoint."""
    return {
        name.removeprefix("model."): tuple(entry.size)
        for name, entry in metadata.state_dict_metadata.items()
        if name.startswith("model.") and isinstance(entry, TensorStorageMetadata)
    }


def _compare(held: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]) -> None:
    for name, shape in wanted.items():
        if name not in held:
            raise InputError(f"this is a checkpoint of another model: it has no `{name}`")
        if held[name] != shape:
            raise InputError(
                f"this is a checkpoint of another model: its `{name}` is {held[name]}, the model's is {shape}"
            )
    for name in held:
        if name not in wanted:
            raise InputError(f"this is a checkpoint of another model: the model has no `{name}`")


def _check_optimizer(facts: Mapping[str, Any], optimizer: Optimizer) -> None:
    saved, mine = facts["optimizer"], type(optimizer).__name__
    if saved is None:
        raise InputError("the checkpoint was saved without an optimizer: leave it out, and it starts anew")
    if saved != mine:
        raise InputError(f"the checkpoint holds the state of {saved}, not of {mine}")
    if len(facts["param_groups"]) != len(optimizer.param_groups):
        groups = (len(facts["param_groups"]), len(optimizer.param_groups))
        raise InputError(f"the checkpoint's optimizer has {groups[0]} parameter groups, this one has {groups[1]}")


def _import(target: Path, model: nn.Module, wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Read one full file on every rank; each takes its own part of it."""

    def read() -> dict[str, Any]:
        try:
            state = torch.load(target, map_location="cpu", mmap=True, weights_only=True)
        except Exception as error:
            raise InputError(f"{target.name} is no state dict that torch.load reads: {error}".split("\n")[0]) from error
        if not isinstance(state, dict):
            raise InputError(f"{target.name} holds a {type(state).__name__}, not a state dict")
        _compare(_shapes(state), wanted)
        return state

    state = together("load", read)
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True))
