"""The agreed stop: a training loop ends on all ranks after the same optimizer step.

A rank that is asked to stop names the next step boundary it will come to, and waits there. The notebook takes the
highest boundary any rank named and tells it to all; ranks that are behind go on to it. (Naming it at once, not on
arrival, matters: a rank ahead may be waiting in a collective for one that has halted behind it.) At the agreed boundary
nothing is raised inside ``step()``: ``zero_grad()``, a scheduler or an EMA after it belong to the same training step.
KeyboardInterrupt comes where the loop around the step turns, ends, or its function returns.
"""

from __future__ import annotations

import ctypes
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

from nbdist.worker.frames import Loop, Loops, user_frames

__all__ = ["AgreedStop"]

LEAST_GRACE_S = 2.0
GRACE_STEPS = 3
TURN_S = 1.0  # how long a rank may need from the boundary to where its loop turns
HANDLER_S = 1.0  # how long a user's own SIGINT handler may take to end the cell

_CO_GENERATOR = 0x20 | 0x80 | 0x200


class AgreedStop:
    """Stops the main thread's training loop, or interrupts it where that cannot be agreed.

    Parameters
    ----------
    count
        Reads the number of optimizer steps this rank has made.
    step_time_s
        Reads the time a training step takes; None if not known.

    Attributes
    ----------
    halted
        Called with the boundary this rank will wait at.
    agreed
        Whether the cell was interrupted where all ranks had agreed on: no collective is half done then.
    """

    def __init__(self, count: Callable[[], int], step_time_s: Callable[[], float | None]) -> None:
        self.halted: Callable[[int], None] = lambda steps: None
        self._count = count
        self._step_time_s = step_time_s
        self._main = threading.main_thread().ident or 0
        self._lock = threading.Lock()
        self._loops = Loops()
        self._running = False
        self._loop: tuple[int, CodeType, Loop] | None = None  # frame by identity: a reference would keep its tensors
        self._trace_before: Any = None
        self._reset()

    def _reset(self) -> None:
        self._asked = False
        self._boundary = 0
        self._at: int | None = None
        self._turning = False
        self.agreed = False
        self._told = threading.Event()
        self._over = threading.Event()

    # ---- the cell's life (main thread)

    def begin(self) -> None:
        """A cell begins."""
        with self._lock:
            self._reset()
            self._loop = None
            self._loops.clear()
            self._running = True

    def end(self) -> None:
        """The cell has ended, however it did."""
        with self._lock:
            self._running = False
            self._over.set()
            self._told.set()
            self._loop = None
            self._loops.clear()
            if self._turning and sys.gettrace() is not self._trace_before:
                sys.settrace(self._trace_before)
            self._trace_before = None

    def stepped(self, frame: FrameType | None, count: int) -> None:
        """An optimizer has stepped (called inside ``step()``); wait here if a stop was asked for.

        Parameters
        ----------
        frame
            The frame below the hook.
        count
            Steps made by now.
        """
        if threading.get_ident() != self._main:
            return
        self._loop = None
        for caller in user_frames(frame):
            loop = self._loops.training(caller.f_code, caller.f_lasti)
            if loop is not None:
                self._loop = id(caller), caller.f_code, loop
                break
        if self._asked and not self._turning:
            self._at_boundary(frame, count)

    def _at_boundary(self, frame: FrameType | None, count: int) -> None:
        with self._lock:  # the request may still be naming the boundary
            boundary, over = self._boundary, self._over
        if count < boundary:
            return
        if self._at is None:
            self._told.wait()
        if over.is_set() or (self._at is not None and count < self._at):
            return
        self._stop_at_turn(frame)

    def _stop_at_turn(self, frame: FrameType | None) -> None:
        callers = list(user_frames(frame))
        if not callers:
            raise KeyboardInterrupt
        target, loop = callers[-1], None
        for caller in callers:
            loop = self._loops.training(caller.f_code, caller.f_lasti)
            if loop is not None:
                target = caller
                break
        self._turning = True
        self._trace_before = sys.gettrace()
        turn = _Turn(target, loop, self._loops, self._turned)
        sys.settrace(turn.on_call)
        target.f_trace = turn.on_event

    def _turned(self) -> None:
        with self._lock:
            self._asked = False
            self.agreed = self._at is not None
            self._over.set()

    # ---- what the I/O thread calls

    @property
    def grace_s(self) -> float:
        """How long the ranks may take to agree and to come to the boundary."""
        return max(LEAST_GRACE_S, GRACE_STEPS * (self._step_time_s() or 0.0))

    def request(self, at_step: int | None) -> None:
        """Ask the running cell to stop (any thread but the main one).

        Parameters
        ----------
        at_step
            None: name the next boundary (through `halted`, on this thread) and wait there, or interrupt at once where
            no training loop runs, or where this has been asked before. A number: stop at that boundary.
        """
        with self._lock:
            if not self._running:
                return
            if at_step is not None:
                self._at = at_step
                self._told.set()
                return
            agreed = not self._asked and self._in_loop()
            if agreed:
                self._asked = True
                self._boundary = boundary = self._count() + 1
                watch = threading.Thread(
                    target=self._watch, args=(self._over, self._told, self.grace_s), name="nbdist-stop", daemon=True
                )
        if agreed:
            watch.start()
            self.halted(boundary)
        else:
            self.interrupt()

    def _in_loop(self) -> bool:
        """Whether the loop that stepped last is still on the main thread's stack, and inside its loop."""
        if self._loop is None:
            return False
        ident, code, (first, last) = self._loop
        frame = sys._current_frames().get(self._main)
        while frame is not None:
            if id(frame) == ident and frame.f_code is code:
                return first <= frame.f_lasti <= last
            frame = frame.f_back
        return False

    def _watch(self, over: threading.Event, told: threading.Event, grace_s: float) -> None:
        """Interrupt for good when the grace is over."""
        if over.wait(grace_s):
            return
        waiting_there = not told.is_set() and self._asked and self._count() >= self._boundary
        told.set()
        if (waiting_there or self._turning) and over.wait(TURN_S):
            return
        if not over.is_set():
            self.interrupt()

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in the main thread where it stands (any other thread).

        A handler that the user has set for SIGINT is called instead, and gets a second to end the cell.
        """
        with self._lock:
            over = self._over
            if not self._running:
                return
        handler = signal.getsignal(signal.SIGINT)
        if handler is signal.default_int_handler:
            signal.pthread_kill(self._main, signal.SIGINT)
        elif not callable(handler):  # ignored, or ending the process
            _raise_in(self._main)
        else:
            signal.pthread_kill(self._main, signal.SIGINT)
            threading.Thread(target=self._insist, args=(over,), name="nbdist-stop", daemon=True).start()

    def _insist(self, over: threading.Event) -> None:
        deadline_s = time.monotonic() + HANDLER_S
        while self._running and self._over is over and time.monotonic() < deadline_s:
            time.sleep(0.02)
        if self._running and self._over is over:
            _raise_in(self._main)
            signal.pthread_kill(
                self._main, signal.SIGINT
            )  # ends a sleep; the exception comes before the handler's code


class _Turn:
    """A trace of one frame that raises KeyboardInterrupt where its loop turns, is left, or the frame returns."""

    def __init__(self, frame: FrameType, loop: Loop | None, loops: Loops, turned: Callable[[], None]) -> None:
        self._code = frame.f_code
        self._ident = id(frame)
        self._loop = loop
        self._loops = loops
        self._turned = turned
        self._last = frame.f_lasti
        self._failing = False

    def on_call(self, frame: FrameType, event: str, arg: Any) -> Any:
        """The thread's trace: only a generator's frame comes here again, when it is resumed."""
        return self.on_event if id(frame) == self._ident and frame.f_code is self._code else None

    def on_event(self, frame: FrameType, event: str, arg: Any) -> Any:
        """The frame's trace."""
        if event == "exception":
            self._failing = True
        elif event == "line":
            self._failing = False
            if self._at_turn(frame.f_lasti):
                self._fire(frame)
            self._last = frame.f_lasti
        elif event == "return" and not frame.f_code.co_flags & _CO_GENERATOR:
            if not self._failing:
                self._fire(frame)
            self._stop_tracing(frame)
        return self.on_event

    def _at_turn(self, here: int) -> bool:
        if self._loop is None:
            return False
        first, last = self._loop
        if not first <= here <= last:
            return True
        return here <= self._last and self._loops.innermost(self._code, here) == self._loop

    def _fire(self, frame: FrameType) -> None:
        self._stop_tracing(frame)
        self._turned()
        raise KeyboardInterrupt

    def _stop_tracing(self, frame: FrameType) -> None:
        frame.f_trace = None
        sys.settrace(None)


def _raise_in(ident: int) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(KeyboardInterrupt))
