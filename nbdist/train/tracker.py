"""Count the bytes of living tensors while code runs, on real and on fake tensors alike.

A dispatch mode sees every tensor that an operation returns; a weak reference on its storage tells when it dies, and a
patched ``UntypedStorage.resize_`` when FSDP frees or refills it. What an operation allocates and frees within itself
is not seen, nor is the CUDA context, NCCL's buffers or the allocator's rounding.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nbdist.train.fake_world import replaced

__all__ = ["KINDS", "Timeline", "Tracker", "local", "states"]

KINDS = ("parameters", "gradients", "optimizer_state", "buffers", "activations", "communication", "temporaries")
_REDUCING = ("reduce", "chunk_cat")
# Frames that stand between an operation and the code that wanted it.
_PASSED_BY = (
    *("torch._", "torch.utils", "torch.overrides", "torch.functional", "torch.distributed.tensor", "torch.amp"),
    *("torch.nn.parameter", "torch.storage", "torch.fx", "contextlib", "functools", __name__),
)
_KIND_OF_MODULE = (
    ("torch.distributed", "communication"),
    ("torch.nn.parallel", "communication"),
    ("torch.optim", "temporaries"),
    ("torch.nn.utils", "temporaries"),
)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Part of a tensor that this rank holds; all of it unless it is sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def states(model: nn.Module, optimizer: Optimizer | None = None) -> dict[str, list[torch.Tensor]]:
    """Tensors of this rank's model states by kind; sharded ones as this rank's part."""
    parameters = [local(p) for p in model.parameters()]
    gradients = [local(p.grad) for p in model.parameters() if p.grad is not None]
    kept: list[torch.Tensor] = []
    if optimizer is not None:
        kept = [
            local(t) for state in optimizer.state.values() for t in tree_leaves(state) if isinstance(t, torch.Tensor)
        ]
    buffers = [local(b) for b in model.buffers()]
    return {"parameters": parameters, "gradients": gradients, "optimizer_state": kept, "buffers": buffers}


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Living bytes by kind after each change.

    Attributes
    ----------
    keys, changes
        Which storage changed, and by how many bytes; ``(events,)``.
    kinds
        Kind of each storage.
    marks
        Number of the event at which each named moment came.
    """

    keys: npt.NDArray[np.int64]
    changes: npt.NDArray[np.float64]
    kinds: dict[int, str]
    marks: tuple[tuple[int, str], ...]

    def by_kind(self) -> dict[str, npt.NDArray[np.float64]]:
        """Living bytes of each kind after each event."""
        number = {kind: i for i, kind in enumerate(KINDS)}
        codes = np.array([number[self.kinds[int(k)]] for k in self.keys], dtype=np.int64)
        return {kind: np.cumsum(np.where(codes == i, self.changes, 0.0)) for kind, i in number.items()}

    def after(self, mark: str) -> int:
        """Number of the first event after the last moment of that name."""
        return max((n for n, name in self.marks if name == mark), default=0)


@dataclass(slots=True)
class _Stored:
    key: int
    size: int
    watch: weakref.ref[Any]


@dataclass(slots=True)
class _Log:
    events: list[tuple[int, int]] = field(default_factory=list)
    kinds: dict[int, str] = field(default_factory=dict)
    marks: list[tuple[int, str]] = field(default_factory=list)
    living: dict[int, _Stored] = field(default_factory=dict)


class Tracker(TorchDispatchMode):
    """Follow every tensor made inside the ``with`` block.

    ::

        with Tracker() as tracker:
            tracker.own(model, optimizer)
            loss = model(x).sum(); loss.backward()
            tracker.own(model, optimizer)
            optimizer.step()
        timeline = tracker.timeline()
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._log = _Log()
        self._count = 0
        self._resize: Any = None

    def __enter__(self) -> Tracker:
        original, log = torch.UntypedStorage.resize_, self._log

        def resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            result: torch.UntypedStorage = original(storage, size)
            stored = log.living.get(storage._cdata)
            if stored is not None:
                _grow(log, stored, size)
            return result

        self._resize = replaced(torch.UntypedStorage, "resize_", resize)
        self._resize.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._resize.__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            # Let it come back with the local tensors.
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        kind = ""
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                kind = kind or _origin()
                self._see(leaf, kind)
        if func.namespace in ("c10d", "fsdp") and any(word in func.name() for word in _REDUCING):
            # FSDP's gradients of one unit, whole for a moment and on their way to the other ranks.
            self._label([t for t in tree_leaves(args) if isinstance(t, torch.Tensor)], "communication", "activations")
        return result

    def own(self, model: nn.Module, optimizer: Optimizer | None = None) -> None:
        """Say what the model's states are, now; call it before ``optimizer.step()`` and after."""
        for kind, tensors in states(model, optimizer).items():
            for tensor in tensors:
                self._see(tensor, kind)
            self._label(tensors, kind)

    def watch_gradients(self, model: nn.Module) -> None:
        """Know the gradients of unsharded parameters as soon as they are there."""
        for parameter in model.parameters():
            if parameter.requires_grad and not isinstance(parameter, DTensor):
                parameter.register_post_accumulate_grad_hook(self._gradient)  # type: ignore[no-untyped-call]

    def _gradient(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            self._label([parameter.grad], "gradients")

    def mark(self, name: str) -> None:
        """Name this moment."""
        self._log.marks.append((len(self._log.events), name))

    def timeline(self) -> Timeline:
        """What has happened so far."""
        gc.collect()
        events = np.array(self._log.events, dtype=np.int64).reshape(-1, 2)
        return Timeline(
            keys=events[:, 0],
            changes=events[:, 1].astype(np.float64),
            kinds=dict(self._log.kinds),
            marks=tuple(self._log.marks),
        )

    def _see(self, tensor: torch.Tensor, kind: str) -> None:
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:  # sparse, nested
            return
        log, address = self._log, storage._cdata
        stored = log.living.get(address)
        if stored is not None:
            _grow(log, stored, storage.nbytes())
            return
        self._count += 1
        key = self._count

        def gone(_: object) -> None:
            dead = log.living.pop(address, None)
            if dead is not None and dead.size:
                log.events.append((dead.key, -dead.size))

        log.kinds[key] = kind
        log.living[address] = _Stored(key, 0, weakref.ref(storage, gone))
        _grow(log, log.living[address], storage.nbytes())

    def _label(self, tensors: Iterable[torch.Tensor], kind: str, only: str | None = None) -> None:
        for tensor in tensors:
            stored = self._log.living.get(tensor.untyped_storage()._cdata)
            if stored is not None and (only is None or self._log.kinds[stored.key] == only):
                self._log.kinds[stored.key] = kind


def _grow(log: _Log, stored: _Stored, size: int) -> None:
    if size != stored.size:
        log.events.append((stored.key, size - stored.size))
        stored.size = size


def _origin() -> str:
    """Kind of a new tensor, from the innermost code that is not the machinery of an operation."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name: str = frame.f_globals.get("__name__", "")
        if not name.startswith(_PASSED_BY):
            return next((kind for module, kind in _KIND_OF_MODULE if name.startswith(module)), "activations")
        frame = frame.f_back
    return "activations"
