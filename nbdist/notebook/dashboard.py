"""The dashboard of a run: live while the cell runs, a figure and a table afterwards.

`Dashboard.open` and `Dashboard.finish` are called by the kernel's main thread, `Dashboard.push` by any thread. It knows
a `Run` and the front end, and nothing of how the numbers came here.

A saved widget view is shown as "model not found" when the notebook is opened again, so at the end the output is
replaced, through its display id, by a picture and a table; then the widget is closed.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import html
import importlib
import importlib.util
import re
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nbdist.errors import InputError
from nbdist.notebook import palette
from nbdist.notebook.feed import Feed
from nbdist.notebook.history import Run
from nbdist.notebook.summary import PARTS, findings, headline, table, text_lines

__all__ = ["MODES", "Dashboard", "FrontEnd", "front_end", "static_data", "table_data"]

STATIC = Path(__file__).with_name("static")
MODES = ("auto", "widget", "text", "terminal", "lines")

FEW_RANKS_S, MANY_RANKS_S = 0.125, 0.2  # between two messages to the widget
TEXT_S = 1.0  # between two updates of the text form, and of the text below the panels
TEXT_CHARACTERS = 64_000  # of the text below the panels, all ranks together
LINE_S = 5.0  # between two lines where text cannot be updated in place
IDLE_S = 0.25  # between two looks at whether the front end has answered
SILENT_TICKS = 12  # so many of them without an answer while the kernel was idle: nobody will
WARM_S = 1.0  # after so long the picture of the end is prepared for

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"


class FrontEnd:
    """Whether the page at the other end shows our widgets; found out between cells.

    Attributes
    ----------
    answers
        True once a page has loaded a dashboard; False when the kernel was idle for a while after one was opened and
        nobody did; None while it is not known.
    """

    def __init__(self) -> None:
        self.answers: bool | None = None
        self._waiting: list[Callable[[], None]] = []

    def heard(self) -> None:
        """A page has loaded the widget."""
        self.answers = True

    @property
    def reason(self) -> str | None:
        """Why widgets are not used: one line that names the remedy; None if they are."""
        if importlib.util.find_spec("anywidget") is None:
            return "the live dashboard needs the package anywidget in this kernel's environment: pip install anywidget"
        if self.answers is False:
            return (
                "the page did not load the live dashboard: install anywidget in the environment that the Jupyter "
                "server runs in (pip install anywidget), then reload the page"
            )
        return None

    def settle(self, loop: asyncio.AbstractEventLoop, then: Callable[[], None]) -> None:
        """Call `then` when it is known whether the page answers, in the main thread, between cells."""
        self._waiting.append(then)
        if len(self._waiting) > 1:
            return
        seen = _execution_count()
        ticks = 0

        def look() -> None:
            nonlocal seen, ticks
            now = _execution_count()
            ticks = ticks + 1 if now == seen else 0  # answers queue behind the cells that were sent together
            seen = now
            if self.answers is None and ticks < SILENT_TICKS:
                loop.call_later(IDLE_S, look)
                return
            self.answers = bool(self.answers)
            waiting, self._waiting = self._waiting, []
            for callback in waiting:
                callback()

        loop.call_later(IDLE_S, look)


front_end = FrontEnd()
"""The page of this kernel."""


def _shell() -> Any:
    import IPython

    return IPython.get_ipython()


def _execution_count() -> int:
    return int(getattr(_shell(), "execution_count", 0))


def _in_kernel() -> bool:
    return getattr(_shell(), "kernel", None) is not None


def _watched() -> bool:
    """Whether a person may sit at the front end. Programs that run notebooks (nbclient) take no input, and say so."""
    parent = _shell().kernel.get_parent()
    return bool(parent.get("content", {}).get("allow_stdin", True))


@functools.cache
def _widget_class() -> Any:
    import anywidget
    import traitlets

    class RunWidget(anywidget.AnyWidget):
        _esm = (STATIC / "dashboard.js").read_text(encoding="utf-8")
        _css = (STATIC / "dashboard.css").read_text(encoding="utf-8")
        meta = traitlets.Dict().tag(sync=True)

    return RunWidget


def _interrupt_path() -> str | None:
    """Where the server takes an interrupt for this kernel, relative to its base; None if it was not started by one."""
    try:
        from ipykernel.connect import get_connection_file

        name = Path(get_connection_file()).stem
    except (ImportError, RuntimeError):
        return None
    found = re.fullmatch(r"kernel-([0-9a-fA-F-]{32,36})", name)
    return f"api/kernels/{found[1]}/interrupt" if found else None


class Dashboard:
    """Shows one run.

    Parameters
    ----------
    run
        What to show.
    interrupt_url
        Where the page sends the interrupt that its Stop button asks for, relative to the server's base; None: this
        kernel's, if a Jupyter server started it.
    on_stop
        Called, in the main thread, when Stop is pressed, instead of interrupting the kernel: for a run in the
        background, whose cell has ended long ago.
    mode
        ``widget``; ``text`` (a block of text updated in place); ``terminal`` (one line updated in place); ``lines`` (a
        line every few seconds, no picture at the end); ``auto`` chooses by the front end.
    write
        Where ``terminal`` and ``lines`` write; None: standard output.
    """

    def __init__(
        self,
        run: Run,
        *,
        interrupt_url: str | None = None,
        on_stop: Callable[[], None] | None = None,
        mode: str = "auto",
        write: Callable[[str], object] | None = None,
    ) -> None:
        if mode not in MODES:
            raise InputError(f"mode is one of {', '.join(MODES)}, not {mode!r}")
        self.run = run
        self.mode = mode
        self.reason: str | None = None
        self._interrupt_url = interrupt_url
        self._on_stop = on_stop
        self._write = write
        self._display_id = uuid.uuid4().hex
        self._feed = Feed(run)
        self._widget: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.RLock()  # one sender at a time; finish() waits for it
        self._pushed_s = 0.0
        self._shown = ""
        self._text: dict[int, str] = {}
        self._text_sent: dict[int, str] = {}
        self._text_sent_s = 0.0
        self._opened_s: float | None = None
        self._loaded = False  # a page has loaded the widget
        self._finished = False

    @property
    def opened(self) -> bool:
        """It is on the page, and not finished."""
        return self._opened_s is not None and not self._finished

    # ---- main thread

    def open(self) -> None:
        """Show the run where the current cell's output is.

        Of a run that has ended, a live dashboard can be looked around in until it is kept as a figure: by its button,
        when another one is opened, or when the kernel ends.
        """
        if self._opened_s is not None:
            return
        if self.mode == "auto":
            self.mode = self._choose()
        self._opened_s = time.monotonic()
        if self.run.ended_s is not None:
            _keep_all()
            _open_afterwards.add(self)
        try:
            self._loop = asyncio.get_running_loop()
        except RuntimeError:
            self._loop = None
        if self.mode == "widget":
            self._open_widget()
        elif self.mode == "text":
            self._display({"text/plain": self._text_form()})
            self._display({}, part="table")
        self.push(now=True)
        if self.run.ended_s is not None and self.mode != "widget":
            self.finish()

    def _choose(self) -> str:
        shell = _shell()
        if _in_kernel():
            self.reason = front_end.reason
            # A program would keep the widget's state in the notebook.
            return "widget" if self.reason is None and _watched() else "text"
        return "terminal" if shell is not None and sys.stdout.isatty() else "lines"

    def _open_widget(self) -> None:
        path = self._interrupt_url or _interrupt_path()
        run = self.run
        self._widget = _widget_class()(
            meta={
                "id": self._display_id,
                "run": run.name,
                "facts": " · ".join(headline(run).split(" · ")[1:] + ([run.strategy] if run.strategy else [])),
                "stop": "message" if self._on_stop is not None else ("endpoint" if path else None),
                "keep": run.ended_s is not None,
                "interrupt_path": path,
                "many": palette.MANY_RANKS,
                "rank_colours": list(palette.RANK_COLOURS),
                "part_colours": palette.PART_COLOURS,
                "memory_colours": palette.MEMORY_COLOURS,
                "parts": PARTS,
            }
        )
        self._widget.on_msg(self._heard)
        view = {"version_major": 2, "version_minor": 0, "model_id": self._widget.model_id}
        self._display({WIDGET_VIEW: view, "text/plain": headline(run)})
        self._display({}, part="table")

    def _heard(self, _widget: Any, content: Any, _buffers: Any) -> None:
        """Take a message of the page (main thread, between cells)."""
        kind = content.get("type") if isinstance(content, dict) else None
        if kind == "ready":
            again, self._loaded = self._loaded and not self._finished, True
            front_end.heard()
            if again:  # the page was loaded anew
                with self._lock:
                    self._feed.restart()
                    self._text_sent = {}
                self.push(now=True)
        elif kind == "stop" and self._on_stop is not None:
            self._on_stop()
        elif kind == "keep":
            self.finish()

    def finish(self) -> None:
        """Replace the dashboard by its figure and table, and close the widget.

        Called by another thread than the main one, it returns at once: drawing takes a while.
        """
        with self._lock:
            if self._finished or self._opened_s is None:
                return
            if self.mode == "widget":
                self.push(now=True)
            self._finished = True
        _open_afterwards.discard(self)
        if threading.current_thread() is threading.main_thread():
            self._keep()
        else:
            threading.Thread(target=self._keep, name="nbdist figure").start()

    def _keep(self) -> None:
        if self.mode in ("widget", "text"):
            self._display(static_data(self.run), update=True)
            self._display(table_data(self.run, self.reason), update=True, part="table")
            self._close_widget()
        elif self.mode == "terminal":
            self._out("\r\x1b[K" + "\n".join(text_lines(self.run)) + "\n")
        else:
            self._out("\n".join(text_lines(self.run)) + "\n")

    def _close_widget(self) -> None:
        widget = self._widget
        if widget is None:
            return
        loop = self._loop
        if loop is None or loop.is_closed():
            widget.close()
            return

        # The page may still be loading the widget, and its first word lies in the queue behind the cell.
        loop.call_soon_threadsafe(front_end.settle, loop, self._settled)

    def _settled(self) -> None:
        self.reason = front_end.reason
        if self.reason is not None:
            self._display(table_data(self.run, self.reason), update=True, part="table")
        self._widget.close()

    # ---- any thread

    def push(self, *, now: bool = False) -> None:
        """Send what is new; cheap to call often, as it sends at most ten times a second.

        Parameters
        ----------
        now
            Send whatever has not been sent, due or not.
        """
        if self._opened_s is None or self._finished:
            return
        at = time.monotonic()
        if not now and at - self._pushed_s < self._interval_s():
            return
        if not self._lock.acquire(blocking=now):
            return
        try:
            self._pushed_s = at
            if self.mode == "widget":
                self._push_widget(at, now)
            else:
                self._push_text()
        finally:
            self._lock.release()

    def set_text(self, rank: int, tail: str) -> None:
        """Show the end of what a rank has printed below the panels."""
        self._text[rank] = tail[-min(8_000, TEXT_CHARACTERS // len(self.run.ranks)) :]

    def _interval_s(self) -> float:
        if self.mode == "widget":
            return FEW_RANKS_S if len(self.run.ranks) <= palette.MANY_RANKS else MANY_RANKS_S
        return LINE_S if self.mode == "lines" else TEXT_S

    def _push_widget(self, at: float, now: bool) -> None:
        _warm_up(self._opened_s)
        for _ in range(64):  # a bound: 64 bursts are the whole of the largest run
            message = self._feed.message(at, at_once=now)
            texts: dict[int, str] = {}
            if now or at - self._text_sent_s >= TEXT_S:
                texts = {rank: text for rank, text in self._text.copy().items() if self._text_sent.get(rank) != text}
            if message is None and not texts:
                return
            content, buffers = message or self._feed.empty()
            content["elapsed_s"] = round(self.run.elapsed_s, 2)
            if texts:
                content["text"] = {str(rank): text for rank, text in texts.items()}
                self._text_sent.update(texts)
                self._text_sent_s = at
            self._widget.send(content, buffers)
            if not (now and self._feed.behind):
                return
            at += 1.0  # what is sent at once is not bounded by what may be sent in a second

    def _push_text(self) -> None:
        text = self._text_form()
        if text == self._shown:
            return
        self._shown = text
        if self.mode == "text":
            self._display({"text/plain": text}, update=True)
        elif self.run.history.version:
            line = text_lines(self.run, short=True)[0]
            self._out(f"\r\x1b[K{line}" if self.mode == "terminal" else line + "\n")

    def _text_form(self) -> str:
        lines = text_lines(self.run)
        return "\n".join([*lines, f"({self.reason})"] if self.reason else lines)

    # ---- the front end

    def _out(self, text: str) -> None:
        write = self._write or sys.stdout.write
        write(text)
        if self._write is None:
            sys.stdout.flush()

    def _display(self, data: dict[str, Any], *, update: bool = False, part: str = "") -> None:
        from IPython.display import display

        display(data, raw=True, display_id=self._display_id + part, update=update)  # type: ignore[no-untyped-call]


_open_afterwards: set[Dashboard] = set()


@atexit.register
def _keep_all() -> None:
    for dashboard in list(_open_afterwards):
        dashboard.finish()


_warm = threading.Event()


def _warm_up(opened_s: float | None) -> None:
    """Import what the static figure needs, once, beside a run that lasts: it would hold up the first cell's end."""
    if opened_s is None or _warm.is_set() or time.monotonic() - opened_s < WARM_S:
        return
    _warm.set()
    threading.Thread(
        target=lambda: importlib.import_module("nbdist.notebook.figure"), name="nbdist figure", daemon=True
    ).start()


# ---- the static form


def static_data(run: Run) -> dict[str, Any]:
    """The run as a picture, and in a few lines for readers without pictures."""
    import base64

    from nbdist.notebook import figure

    image = base64.b64encode(figure.png(figure.draw(run))).decode("ascii")
    return {"image/png": image, "text/plain": "\n".join(text_lines(run))}


def table_data(run: Run, reason: str | None = None) -> dict[str, Any]:
    """The run's ranks as a table, with what there is to say about them."""
    heads, rows = table(run)
    said = [found.text for found in findings(run)]
    if reason:
        said.append(f"{reason[0].upper()}{reason[1:]}.")
    cell = html.escape
    parts = ["<table><thead><tr>", *(f"<th>{cell(head)}</th>" for head in heads), "</tr></thead><tbody>"]
    for row in rows:
        parts += ["<tr>", *(f"<td>{cell(text)}</td>" for text in row), "</tr>"]
    parts.append("</tbody></table>")
    if said:
        parts += ["<ul>", *(f"<li>{cell(text)}</li>" for text in said), "</ul>"]
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    plain = ["  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in (heads, *rows)]
    return {"text/html": "".join(parts), "text/plain": "\n".join([*plain, *said])}
