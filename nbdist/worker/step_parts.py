"""Where a training step's time goes: data wait, forward, backward, waiting for other ranks, optimizer, the rest.

Marks are set where one part gives way to the next, and the time between two marks belongs to exactly one part: so the
parts add up to the step. On the CPU a mark is a clock reading; on a GPU it is an event on the current stream, read when
it is done, so that nothing waits for the GPU. A step ends when an optimizer's ``step()`` does.

A collective makes every rank wait for the slowest one. That wait is kept apart from work: time inside ``Work.wait``,
and in DDP's and FSDP's backward the time between the last gradient computed (a callback of the autograd engine, queued
before theirs) and the return of ``backward()``.
"""

from __future__ import annotations

import functools
import itertools
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["PARTS", "StepParts"]

PARTS = ("data", "forward", "backward", "wait", "optimizer", "rest")

_MOST_MARKS = 4096  # of a step that never ends, e.g. in a loop that only evaluates
_MOST_STEPS = 4096  # waiting to be read
_WINDOW_S = 5.0  # what a live reading is the mean of: enough steps that an even run looks even
_WINDOW_STEPS = 20

Mark = tuple[Any, str]  # when (seconds, or a CUDA event), and the part that begins there


class StepParts:
    """Measures this rank's steps.

    Parameters
    ----------
    device
        The rank's device: decides between clock and events.
    stepped
        Called with each optimizer whose ``step()`` has ended, on the main thread: must be cheap.
    called
        Called with each module that is called by no other module: must be cheap.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        stepped: Callable[[torch.optim.Optimizer], None],
        called: Callable[[torch.nn.Module], None],
    ) -> None:
        self._events = device.type == "cuda"
        self._device = device
        self._stepped = stepped
        self._called = called
        self._grad_enabled: Callable[[], bool] = lambda: False
        self._queue_callback: Callable[[Callable[[], None]], None] = lambda callback: None
        self._thread = threading.get_ident()
        self._now: Callable[[], Any] = perf_counter
        self._pool: list[Any] = []
        self._start_again()

    def _start_again(self) -> None:
        self._stack: list[str] = []
        self.inside = False  # a module called now belongs to the present part (optimizers call some in closures)
        self._in_backward = False
        self._marks: list[Mark] = []
        self._samples = 0
        self._from_loader = False  # in this step batches came from a DataLoader
        self._counted = False  # a batch was counted since the last backward
        self._steps: deque[tuple[list[Mark], int]] = deque(maxlen=_MOST_STEPS)
        self._first: Chunk | None = None
        self._recent: deque[Chunk] = deque()
        self._all = Chunk(0.0)
        self._loader: weakref.ref[Any] | None = None
        self._loader_since_s = 0.0

    def begin(self) -> None:
        """Measure from here on; call it on the thread that trains."""
        import torch

        global _at_work
        _install()
        self._start_again()
        self._grad_enabled = torch.is_grad_enabled
        self._queue_callback = torch.autograd.Variable._execution_engine.queue_callback
        self._thread = threading.get_ident()
        _at_work = self

    def end(self) -> None:
        """Measure no more; what was measured can still be read."""
        global _at_work
        if _at_work is self:
            _at_work = None

    # ---- marks

    def enter(self, part: str) -> None:
        """A part begins inside the present one."""
        self._stack.append(part)
        self.inside = part != "optimizer"
        self._mark(part)

    def leave(self, level: int) -> None:
        """The part that began at this depth of the stack ends, with all inside it."""
        stack = self._stack
        del stack[level:]
        part = stack[-1] if stack else "rest"
        self.inside = bool(stack) and part != "optimizer"
        self._mark(part)

    def _mark(self, part: str) -> None:
        if not self._marks:
            self._now = self._event if self._events and _cuda_runs() else perf_counter
        now = self._now()
        if now is not None:
            self._marks.append((now, part))

    def _event(self) -> Any:
        import torch

        if torch.cuda.is_current_stream_capturing():
            return None
        event = self._pool.pop() if self._pool else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _recycle(self, marks: list[Mark]) -> None:
        if self._now is not perf_counter:
            self._pool += [when for when, _ in marks]

    def _ours(self) -> bool:
        """Whether the present thread does this rank's step: the cell's, or autograd's while the cell's waits for it."""
        return self._in_backward or threading.get_ident() == self._thread

    # ---- what the patched places call

    def data(self, call: Callable[..., Any], *args: Any) -> Any:
        """Run a DataLoader's call as part of the wait for data."""
        __tracebackhide__ = True
        if not self._ours() or self._stack:
            return call(*args)
        self.enter("data")
        try:
            return call(*args)
        finally:
            self.leave(0)

    def batch(self, loader: Any, batch: object) -> None:
        """Count the samples of a batch that a DataLoader gave."""
        if self._ours() and not self._stack:
            if not self._from_loader:
                self._from_loader, self._samples = True, 0
            self._samples += _first_size(batch) or 0
            if self._loader is None or self._loader() is not loader:
                self._loader = weakref.ref(loader)
                self._loader_since_s = perf_counter()

    def forward(self, call: Callable[..., Any], module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        """Run a module; the outermost one's time is the forward part."""
        __tracebackhide__ = True
        if not self._ours():
            return call(module, *args, **kwargs)
        if len(self._marks) > _MOST_MARKS:
            self._recycle(self._marks)
            self._marks.clear()
        self._called(module)
        if not self._from_loader and not self._counted and module.training and self._grad_enabled():
            self._counted = True
            self._samples += _first_size((args, list(kwargs.values()))) or 0
        level = len(self._stack)
        self.enter("forward")
        try:
            return call(module, *args, **kwargs)
        finally:
            self.leave(level)

    def backward(self, call: Callable[..., Any], tensors: Any, args: Any, kwargs: Any) -> Any:
        """Run autograd's backward; what it waits for after the last gradient is no work."""
        __tracebackhide__ = True
        if not self._ours() or self._in_backward:
            return call(tensors, *args, **kwargs)
        root = getattr(tensors, "grad_fn", None)
        hook = None if root is None else root.register_prehook(self._queue_computed)
        self._counted = False
        level = len(self._stack)
        self.enter("backward")
        self._in_backward = True
        try:
            return call(tensors, *args, **kwargs)
        finally:
            self._in_backward = False
            self.leave(level)
            if hook is not None:
                hook.remove()

    def _queue_computed(self, _grads: Any) -> None:
        self._queue_callback(self._computed)

    def _computed(self) -> None:
        if self._in_backward and self._stack and self._stack[-1] == "backward":
            self.enter("wait")

    def wait(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Wait for a collective."""
        __tracebackhide__ = True
        if not self._ours() or (self._stack and self._stack[-1] in ("wait", "data")):
            return call(*args, **kwargs)
        level = len(self._stack)
        self.enter("wait")
        try:
            return call(*args, **kwargs)
        finally:
            self.leave(level)

    def before_step(self) -> None:
        """An optimizer's ``step()`` begins."""
        if self._ours():
            self.enter("optimizer")

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer's ``step()`` has ended."""
        if not self._ours():
            return
        if self._stack and self._stack[-1] == "optimizer":
            self.leave(len(self._stack) - 1)
        if not self._stack:  # else an optimizer inside another one, or stepping in backward
            self._step_done()
        self._stepped(optimizer)

    def _step_done(self) -> None:
        marks = self._marks
        if len(marks) < 2:
            return
        last = marks[-1]
        self._marks = [] if self._now is not perf_counter else [last]
        self._steps.append((marks, self._samples))
        if not self._marks:  # an event is read and used again by one step only
            self._mark("rest")
        self._samples, self._from_loader, self._counted = 0, False, False

    # ---- the I/O thread

    def read(self) -> Mapping[str, Any]:
        """Means over the latest steps: of some seconds, and at least some steps; after the end, over the whole run.

        Returns
        -------
        dict
            ``step_s`` and, adding up to it, ``data_s``, ``forward_s``, ``backward_s``, ``wait_s`` (for other ranks),
            ``optimizer_s``, ``rest_s``; ``samples_per_s``; ``parts_steps``, how many steps these are means of. None
            where nothing was measured. ``loader``: progress of the DataLoader in use, as rows of `track` have it.
        """
        now_s = perf_counter()
        new = Chunk(now_s)
        while self._steps:
            marks, samples = self._steps[0]
            if not isinstance(marks[-1][0], float) and not marks[-1][0].query():
                break  # the GPU is not there yet
            self._steps.popleft()
            if self._first is None:
                self._first = Chunk(now_s)
                self._first.add(marks, samples)
            else:
                new.add(marks, samples)
            if not isinstance(marks[0][0], float):
                self._pool += [event for event, _ in marks]
        if new.steps:
            self._recent.append(new)
            self._all.merge(new)
        steps = sum(chunk.steps for chunk in self._recent)
        while self._recent and self._recent[0].at_s < now_s - _WINDOW_S:
            if (steps := steps - self._recent[0].steps) < _WINDOW_STEPS:
                break
            self._recent.popleft()
        if _at_work is self:
            mean = Chunk(now_s)
            for chunk in self._recent:
                mean.merge(chunk)
        else:
            mean = self._all
        if not mean.steps and self._first is not None:  # it pays for what is set up once: only for want of another
            mean = self._first
        return mean.row() | {"loader": self._loader_row()}

    def _loader_row(self) -> dict[str, Any] | None:
        loader = self._loader() if self._loader is not None else None
        if loader is None:
            return None
        try:
            total = len(loader)
        except (TypeError, NotImplementedError):  # an iterable dataset
            total = None
        done = loader._num_yielded
        left_s = None
        if total is not None and done > 1 and _at_work is self:
            left_s = (total - done) * (perf_counter() - self._loader_since_s) / (done - 1)
        return {"name": "batches", "done": done, "total": total, "left_s": left_s, "active": _at_work is self}


class Chunk:
    """Sums over some steps.

    Parameters
    ----------
    at_s
        When they were read.
    """

    __slots__ = ("at_s", "samples", "seconds", "steps")

    def __init__(self, at_s: float) -> None:
        self.at_s = at_s
        self.steps = 0
        self.samples = 0
        self.seconds = dict.fromkeys(PARTS, 0.0)

    def add(self, marks: list[Mark], samples: int) -> None:
        """Add one step."""
        self.steps += 1
        self.samples += samples
        for part, seconds in _spans(marks):
            self.seconds[part] += seconds

    def merge(self, other: Chunk) -> None:
        """Add another's steps."""
        self.steps += other.steps
        self.samples += other.samples
        for part, seconds in other.seconds.items():
            self.seconds[part] += seconds

    def row(self) -> dict[str, Any]:
        """Means, as in `StepParts.read`."""
        n, whole_s = self.steps, sum(self.seconds.values())
        return {
            "step_s": whole_s / n if n else None,
            **{f"{part}_s": seconds / n if n else None for part, seconds in self.seconds.items()},
            "samples_per_s": self.samples / whole_s if self.samples and whole_s > 0 else None,
            "parts_steps": n,
        }


_at_work: StepParts | None = None  # whose cell runs
_installed = False


def _install() -> None:
    """Put the marks' places into torch, for the life of this process."""
    global _installed
    if _installed:
        return
    _installed = True
    import torch
    import torch.distributed as dist
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
    from torch.utils.data import dataloader

    from nbdist.worker import internals

    is_compiling = torch.compiler.is_dynamo_compiling  # traced: nothing to measure, and nothing to guard on
    next_batch = dataloader._BaseDataLoaderIter.__next__
    iterate = dataloader.DataLoader.__iter__
    call = torch.nn.Module.__call__
    backward = torch.autograd.backward

    @functools.wraps(next_batch)
    def timed_next(self: Any) -> Any:
        __tracebackhide__ = True
        if is_compiling() or (parts := _at_work) is None:
            return next_batch(self)
        batch = parts.data(next_batch, self)
        parts.batch(self, batch)
        return batch

    @functools.wraps(iterate)
    def timed_iterate(self: Any) -> Any:
        __tracebackhide__ = True
        return iterate(self) if is_compiling() or (parts := _at_work) is None else parts.data(iterate, self)

    @functools.wraps(call)
    def timed_call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        if is_compiling() or (parts := _at_work) is None or parts.inside:
            return call(self, *args, **kwargs)
        return parts.forward(call, self, args, kwargs)

    @functools.wraps(backward)
    def timed_backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        if is_compiling() or (parts := _at_work) is None:
            return backward(tensors, *args, **kwargs)
        return parts.backward(backward, tensors, args, kwargs)

    def timed_wait(wait: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(wait)
        def waits(*args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            if is_compiling() or (parts := _at_work) is None:
                return wait(*args, **kwargs)
            return parts.wait(wait, args, kwargs)

        internals.never_trace(waits)  # what it calls is C++, which Dynamo would warn about
        return waits

    def before_step(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if (parts := _at_work) is not None:
            parts.before_step()

    def after_step(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if (parts := _at_work) is not None:
            parts.after_step(optimizer)

    dataloader._BaseDataLoaderIter.__next__ = timed_next  # type: ignore[method-assign]
    dataloader.DataLoader.__iter__ = timed_iterate  # type: ignore[method-assign]
    torch.nn.Module.__call__ = timed_call  # type: ignore[method-assign]
    torch.autograd.backward = timed_backward
    dist.Work.wait = timed_wait(dist.Work.wait)  # type: ignore[method-assign]
    # with it DDP makes its buffers equal before each forward
    dist._broadcast_coalesced = timed_wait(dist._broadcast_coalesced)  # type: ignore[attr-defined]
    register_optimizer_step_pre_hook(before_step)
    register_optimizer_step_post_hook(after_step)
    os.register_at_fork(after_in_child=_leave_fork)


def _leave_fork() -> None:
    """A DataLoader worker must not touch its parent's CUDA events."""
    global _at_work
    _at_work = None


def _cuda_runs() -> bool:
    import torch

    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _spans(marks: list[Mark]) -> list[tuple[str, float]]:
    """(part, seconds) between each two marks; what is computed between forward and backward is the loss: forward."""
    spans = []
    for i, ((start, part), (stop, following)) in enumerate(itertools.pairwise(marks)):
        if part == "rest" and following == "backward" and i and marks[i - 1][1] == "forward":
            part = "forward"
        spans.append((part, stop - start if isinstance(start, float) else start.elapsed_time(stop) / 1000))
    return spans


def _first_size(batch: object, depth: int = 0) -> int | None:
    """Size of the first dimension of the first tensor in a batch."""
    shape = getattr(batch, "shape", None)
    if shape is not None:
        try:
            return int(shape[0])
        except (IndexError, TypeError):
            return None
    if depth < 4:
        if isinstance(batch, Mapping):
            batch = list(batch.values())
        if isinstance(batch, list | tuple):
            for item in batch[:8]:
                if (size := _first_size(item, depth + 1)) is not None:
                    return size
    return None
