"""The optimizer-step boundary of an unmodified training loop: counting, timing, its loss, and the agreed stop.

torch calls a hook of ours before and after every optimizer's ``step()`` (public hooks). There the caller's frame is
looked at, so a loop needs no added line; nothing of it is kept alive, and no GPU is synchronised.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from nbdist.worker.frames import MISSING, read, user_frames
from nbdist.worker.stop import AgreedStop

if TYPE_CHECKING:
    from nbdist.worker.telemetry import Telemetry

__all__ = ["Steps"]

_RECENT = 20  # steps whose times are kept
_FRAMES_SEARCHED = 4
_STEPS_BEFORE_GIVING_UP = 3


class Steps:
    """Watches every optimizer of this process.

    Parameters
    ----------
    telemetry
        Where losses and times are recorded.
    notice
        Called with one line the user should read (main thread).

    Attributes
    ----------
    count
        Optimizer steps since the rank started. An optimizer that steps others inside its own step counts once.
    """

    def __init__(self, telemetry: Telemetry, *, notice: Callable[[str], None]) -> None:
        self.count = 0
        self._telemetry = telemetry
        self._notice = notice
        self._run_id: str | None = None
        self._begun_at = 0
        self._losses = Losses(())
        self._open: list[int] = []  # optimizers inside their step
        self._step_times_s: deque[float] = deque(maxlen=_RECENT)
        self._stepped_s: float | None = None
        self._stop = AgreedStop(lambda: self.count, self._slow_step_s)

    @property
    def halted(self) -> Callable[[int], None]:
        """Called with the boundary this rank will wait at, on the thread that called `request_stop`."""
        return self._stop.halted

    @halted.setter
    def halted(self, report: Callable[[int], None]) -> None:
        self._stop.halted = report

    @property
    def grace_s(self) -> float:
        """How long this rank waits for an agreed stop before it interrupts in any case: 2 s, or 3 recent steps."""
        return self._stop.grace_s

    @property
    def agreed(self) -> bool:
        """Whether the cell's interrupt came at the step all ranks had agreed on.

        No collective is half done then, and no iteration: the group and all modules need nothing.
        """
        return self._stop.agreed

    def install(self) -> None:
        """Hook into torch's optimizers, for the life of this process (main thread, once)."""
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        self._telemetry.add_source("steps", self._row)

    def begin(self, run_id: str, watch: Sequence[str] | None, cell_filename_prefixes: Sequence[str] = ()) -> None:
        """A cell begins (main thread).

        Parameters
        ----------
        run_id
            As in the request.
        watch
            Names of the caller's variables to record at each step, dots allowed; None: ``loss``, if there is one.
        cell_filename_prefixes
            Not needed: a cell's own frame is known by being no function's.
        """
        self._run_id = run_id
        self._begun_at = self.count
        self._open.clear()
        self._losses = Losses(watch)
        self._step_times_s.clear()
        self._stepped_s = None
        self._stop.begin()

    def end(self) -> None:
        """The cell has ended (main thread)."""
        self._run_id = None
        self._stop.end()
        self._losses = Losses(())

    def request_stop(self, run_id: str, at_step: int | None) -> None:
        """Stop the running cell at an agreed step (I/O thread); see `AgreedStop.request`."""
        if run_id == self._run_id:
            self._stop.request(at_step)

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in the main thread where it stands (I/O thread)."""
        self._stop.interrupt()

    # ---- torch's hooks

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        ident = id(optimizer)
        if ident in self._open:  # its last step raised
            del self._open[self._open.index(ident) :]
        self._open.append(ident)

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        ident = id(optimizer)
        while self._open and self._open.pop() != ident:
            pass
        if self._open:  # inside another optimizer's step
            return
        self.count += 1
        if self._run_id is None:
            return
        now_s = time.perf_counter()
        if self._stepped_s is not None:
            self._step_times_s.append(now_s - self._stepped_s)
        self._stepped_s = now_s
        frame = sys._getframe(1)
        self._record(frame)
        self._stop.stepped(frame, self.count)

    def _slow_step_s(self) -> float | None:
        """The longest of the last three steps; None before the second one."""
        return max(list(self._step_times_s)[-3:], default=None)

    def _row(self) -> dict[str, Any]:
        """What a sample says of the steps (I/O thread): those of this run, and how many a second of late."""
        times_s = list(self._step_times_s)
        whole_s = sum(times_s)
        return {
            "steps": self.count - self._begun_at,
            "steps_per_s": len(times_s) / whole_s if whole_s > 0 else None,
        }

    def _record(self, frame: FrameType) -> None:
        values = self._losses.read(frame)
        if values:
            self._telemetry.record(values, self.count - self._begun_at, time.time())
        elif (text := self._losses.not_found()) is not None:
            self._notice(text)


class Losses:
    """Finds the values to record in the frames of whoever called ``step()``.

    Parameters
    ----------
    watch
        Names, dots allowed; None: ``loss``.
    """

    def __init__(self, watch: Sequence[str] | None) -> None:
        self._names = ("loss",) if watch is None else tuple(watch)
        self._asked = watch is not None
        self._last: dict[str, Any] = {}
        self._found: set[str] = set()
        self._steps = 0

    def read(self, frame: FrameType) -> dict[str, object]:
        """Values that have changed since the last step: numbers, or detached tensors of one element on a GPU."""
        self._steps += 1
        found: dict[str, object] = {}
        for name in self._names:
            value = self._find(frame, name)
            if value is not None:
                found[name] = value
                self._found.add(name)
        return found

    def not_found(self) -> str | None:
        """What to tell the user, once, when nothing has been found for some steps."""
        if self._steps != _STEPS_BEFORE_GIVING_UP or self._found or not self._names:
            return None
        if self._asked:
            return f"no number called {' or '.join(self._names)} found where the optimizer steps: check --watch"
        return "loss not found: name the variable to draw with --watch, e.g. --watch train_loss"

    def _find(self, frame: FrameType, name: str) -> object | None:
        first, *rest = name.split(".")
        for i, caller in enumerate(user_frames(frame)):
            if i == _FRAMES_SEARCHED:
                break
            value = read(caller, first)
            for attribute in rest:
                value = getattr(value, attribute, MISSING)
            if value is not MISSING and _is_real_scalar(value):
                return self._fresh(name, value)
        return None

    def _fresh(self, name: str, value: Any) -> object | None:
        """The value as it may be kept, unless it is the one of the last step."""
        last = self._last.get(name)
        if isinstance(value, torch.Tensor):
            if last is not None and not isinstance(last, float) and last[0]() is value and last[1] == value._version:
                return None
            self._last[name] = weakref.ref(value), value._version
            local = getattr(value, "_local_tensor", value)  # DTensor
            return local.detach() if local.device.type != "cpu" else float(local.detach())
        number = float(value)
        if isinstance(last, float) and (number == last or (number != number and last != last)):
            return None
        self._last[name] = number
        return number


def _is_real_scalar(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and value.dtype.is_floating_point and value.device.type != "meta"
    if isinstance(value, np.ndarray):
        return value.size == 1 and value.dtype.kind == "f"
    return isinstance(value, float | np.floating)
