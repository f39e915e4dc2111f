"""A cell in front of the user: its text, its dashboard, its end. The handle that `Cluster.run` returns."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, NoReturn

from nbdist.errors import CellError
from nbdist.notebook.cell import CellRun
from nbdist.notebook.history import Run
from nbdist.notebook.merge import Text
from nbdist.notebook.render import BackgroundPrinter, Printer, failure_report, interrupt_report

if TYPE_CHECKING:
    from nbdist.notebook.cluster import Cluster
    from nbdist.notebook.dashboard import Dashboard

__all__ = ["Foreground", "RunHandle"]

_DRAIN_S = 0.05
_PUSH_S = 0.1


class Foreground:
    """Shows a cell: the main thread drains what the I/O thread has queued, and prints it.

    Parameters
    ----------
    cluster
        Whose lock and condition are used.
    state
        The cell.
    dashboard
        Show metrics live.
    """

    def __init__(self, cluster: Cluster, state: CellRun, dashboard: bool) -> None:
        self._cluster = cluster
        self._state = state
        self._want_dashboard = dashboard
        self._dashboard: Dashboard | None = None
        self._printer = BackgroundPrinter(state.run.run_id) if state.background else Printer(state.run.run_id)
        self._drained_s = 0.0
        self._pushed_s = 0.0
        self._finished = False

    def open(self) -> None:
        """Make what a background run shows itself in (main thread)."""
        if isinstance(self._printer, BackgroundPrinter):
            if self._want_dashboard:
                self._open_dashboard()
            self._printer.open()

    def print(self, text: str) -> None:
        """One line of nbdist's own."""
        if isinstance(self._printer, Printer):
            self._printer.print(f"{text}\n")

    def _open_dashboard(self) -> None:
        from nbdist.notebook.dashboard import Dashboard

        run, stop = self._state.run, self._cluster.interrupt if self._state.background else None
        if self._want_dashboard:
            self._dashboard = Dashboard(run, on_stop=stop)
        else:
            self._dashboard = Dashboard(run, mode="lines", write=self._write)
        self._dashboard.open()

    def _write(self, text: str) -> None:
        self._printer.show([Text("stdout", text if text.endswith("\n") else f"{text}\n")])

    def wait(self) -> None:
        """Show what comes until the cell has ended on every rank; an interrupt is passed on to the ranks."""
        while True:
            try:
                if self._turn():
                    return
            except KeyboardInterrupt:
                self._cluster.interrupt()

    def _turn(self) -> bool:
        shown, state = self._cluster.shown, self._state
        with shown:
            if not state.done and not (state.events and self._due()):
                shown.wait(_DRAIN_S if state.events or self._dashboard or state.voice.waiting else 0.2)
            done = state.done
            events = []
            if done or self._due():
                while state.events:
                    events.append(state.events.popleft())
            rows = state.voice.live()
        if events:
            self._drained_s = time.monotonic()
            self._printer.show(events)
        self._printer.live(rows, final=done)
        self._watch_metrics()
        return done and not state.events

    def _due(self) -> bool:
        assert isinstance(self._printer, Printer)
        return time.monotonic() - self._drained_s > _DRAIN_S and self._printer.may_print()

    def _watch_metrics(self) -> None:
        if not self._state.run.history.version:
            return
        if self._dashboard is None:
            if not self._state.run.history.names():
                return  # samples alone are no training run
            self._open_dashboard()
        now = time.monotonic()
        if self._dashboard is not None and now - self._pushed_s > _PUSH_S:
            self._push(self._dashboard, now)

    def _push(self, dashboard: Dashboard, now: float) -> None:
        self._pushed_s = now
        for process in self._cluster.members.ranks:
            if process.rank in self._state.run.ranks and (lines := process.output.tail()):
                dashboard.set_text(process.rank, "\n".join(lines))
        dashboard.push()

    def background_tick(self) -> None:
        """The same for a background run, on the I/O thread, under the lock."""
        assert isinstance(self._printer, BackgroundPrinter)
        events = list(self._state.events)
        self._state.events.clear()
        done = self._state.done
        if events:
            self._printer.show(events)
        if done and not self._finished:
            self._finished = True
            if failures := self._state.failures():
                self._printer.show_lines(failure_report(failures, self._hints()))
            elif self._state.interrupted:
                self._printer.show_lines([self._interrupted_text()])
        self._printer.live(self._state.voice.live(), final=done)
        if self._dashboard is not None:
            if done:
                self._dashboard.finish()
            elif self._state.run.history.version and time.monotonic() - self._pushed_s > _PUSH_S:
                self._push(self._dashboard, time.monotonic())

    def close(self) -> None:
        """Turn what is live into what stays (main thread)."""
        self._watch_metrics()
        if self._dashboard is not None:
            self._dashboard.finish()
        if isinstance(self._printer, Printer):
            self._printer.flush()

    # ---- the end

    def _interrupted_text(self) -> str:
        run, state = self._state.run, self._state
        steps = {r: reply.steps for r, reply in state.replies.items()}
        stopped = [r for r, reply in state.replies.items() if state.stopped(reply)]
        text = (
            "all ranks stopped"
            if len(stopped) == len(run.ranks)
            else f"stopped {len(stopped)} of {len(run.ranks)} ranks"
        )
        counts = set(steps.values())
        if len(counts) == 1 and counts != {0} and len(steps) == len(run.ranks):
            text += f" after optimizer step {counts.pop()}"
        for rank, why in state.killed.items():
            text += f"; rank {rank} was killed: {why}; its variables are lost"
        return text

    def _hints(self) -> list[str]:
        state = self._state
        hints = [f.hint for f in state.failures() if f.hint and not f.secondary]
        known = self._cluster.notebook_names()
        for reply in state.replies.values():
            name = (reply.details or {}).get("name")
            if reply.ename == "NameError" and name and not reply.hint:
                if name in known:
                    hints.append(
                        f"`{name}` exists in the notebook, not in the ranks: send it with `%distributed push {name}`"
                    )
                elif gone := self._cluster.lost_ranks():
                    were = "rank {} was" if gone.isdigit() else "ranks {} were"
                    hints.append(f"{were.format(gone)} started anew: the variables of earlier cells are gone there")
        return hints

    def raise_failures(self) -> None:
        """Raise `CellError`, or KeyboardInterrupt if the cell was stopped on request, or nothing."""
        failures = self._state.failures()
        if self._state.interrupted and all(f.secondary for f in failures):
            self._raise_interrupt()
        if failures:
            error = CellError(failures, ())
            error.report = tuple(failure_report(error.failures, self._hints()))
            raise error

    def _raise_interrupt(self) -> NoReturn:
        text = self._interrupted_text()
        interrupt = KeyboardInterrupt(text)
        # IPython asks an exception whether it draws itself; the type stays what every front end knows.
        interrupt._render_traceback_ = lambda: interrupt_report(text)  # type: ignore[attr-defined]
        raise interrupt


class RunHandle:
    """A cell that runs, or has run.

    Attributes
    ----------
    run
        Its record: history of metrics, states of the ranks.
    """

    def __init__(self, cluster: Cluster, state: CellRun, front: Foreground) -> None:
        self._cluster, self._state, self._front = cluster, state, front
        self.run: Run = state.run

    @property
    def done(self) -> bool:
        """Whether it has ended on every rank."""
        return self._state.done

    @property
    def status(self) -> str:
        """``running``, ``ok``, ``error`` or ``interrupted``."""
        return self.run.status

    def result(self, timeout_s: float | None = None) -> Mapping[int, str]:
        """Wait for the end; how it ended on each rank.

        Raises
        ------
        TimeoutError
            If it still runs after `timeout_s`.
        CellError
            If it failed.
        """
        changed = self._cluster.changed
        with changed:
            if not changed.wait_for(lambda: self._state.done, timeout_s):
                raise TimeoutError(f"{self.run.name} still runs after {timeout_s:g} s")
        self._front.raise_failures()
        return dict(self.run.states)

    def interrupt(self) -> None:
        """Stop it, as the notebook's interrupt stops a cell."""
        if not self._state.done:
            self._cluster.interrupt()

    def __repr__(self) -> str:
        return f"<{self.run.name}: {self.status}, {self.run.elapsed_s:.1f} s>"
