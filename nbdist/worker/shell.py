"""Executes cells in a rank: an IPython shell whose displays and errors become messages.

It never waits for a terminal.

`__main__` is a fresh module, so that pasted scripts, pickled classes and `inspect.getsource` see what a notebook gives
them. Nothing of a finished cell is kept: neither its value, nor its traceback, whose frames would keep tensors alive.
"""

from __future__ import annotations

import builtins
import gc
import getpass
import io
import linecache
import sys
import traceback
import types
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.error import StdinNotImplementedError, UsageError
from IPython.core.interactiveshell import InteractiveShell
from traitlets import Type
from traitlets.config import Config

from nbdist.worker import failures

__all__ = ["Outcome", "RankShell", "describe_stack", "make_shell"]

_NO_INPUT = (
    "input() is not available in ranks: ask in an ordinary cell, then send the answer with `%distributed push name`"
)
_NO_DEBUGGER = (
    "the debugger is not available in ranks: `%distributed where` shows what they do,"
    " `%distributed pull` fetches variables"
)

_MAX_TEXT = 10_000  # characters of an error's text

Publish = Callable[..., None]


@dataclass(slots=True)
class Outcome:
    """How a cell ended on this rank."""

    status: str = "ok"
    ename: str = ""
    evalue: str = ""
    traceback: list[str] = field(default_factory=list)
    exit_code: int | None = None
    details: dict[str, Any] = field(default_factory=dict)
    error: BaseException | None = None  # only while the hints are looked up


def _text_of(value: BaseException | None) -> str:
    try:
        text = str(value)
    except Exception:  # a user's __str__ may raise anything
        return f"<{type(value).__name__} whose __str__ failed>"
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}... ({len(text):,} characters)"


class _NoStdin(io.TextIOBase):
    """Standard input of a rank: reading fails at once."""

    encoding = "utf-8"

    def readable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        return 0

    def read(self, size: int | None = -1, /) -> NoReturn:
        raise StdinNotImplementedError(_NO_INPUT)

    def readline(self, size: int | None = -1, /) -> NoReturn:
        raise StdinNotImplementedError(_NO_INPUT)


def _no_input(prompt: object = "", /) -> NoReturn:
    raise StdinNotImplementedError(_NO_INPUT)


def _no_password(prompt: str = "", stream: object = None, **_: object) -> NoReturn:
    raise StdinNotImplementedError(_NO_INPUT.replace("input()", "getpass()"))


def _no_breakpoint(*_: object, **__: object) -> NoReturn:
    raise UsageError(_NO_DEBUGGER)


class _RankPublisher(DisplayPublisher):
    """`display()` in a rank."""

    shell: Any

    def publish(
        self,
        data: dict[str, Any],
        metadata: dict[str, Any] | None = None,
        source: str | None = None,
        *,
        transient: Mapping[str, Any] | None = None,
        update: bool = False,
        **_: Any,
    ) -> None:
        self.shell.publish(data, metadata or {}, (transient or {}).get("display_id"), update, False)

    def clear_output(self, wait: bool = False) -> None:
        self.shell.publish_clear(wait)


class _RankDisplayHook(DisplayHook):
    """The value of a cell's last expression; kept nowhere (`_` and `Out` would keep a model alive)."""

    shell: Any

    def quiet(self) -> bool:
        ends: Any = self.semicolon_at_end_of_expression
        return bool(ends(self.shell.current_code))

    def __call__(self, result: object = None) -> None:
        if result is None or self.quiet():
            return
        form: Any = self.compute_format_data
        data, metadata = form(result)
        if data:
            self.shell.publish(data, metadata, None, False, True)


class RankShell(InteractiveShell):
    """IPython without a terminal, history or front end of its own."""

    display_pub_class = Type(_RankPublisher)
    displayhook_class = Type(_RankDisplayHook)
    publish: Publish
    publish_clear: Callable[[bool], None]
    current_code = ""
    _outcome: Outcome

    system = InteractiveShell.system_raw  # children inherit the rank's pipes

    def ask_exit(self) -> None:
        """`exit()` and `quit()` end the cell as `sys.exit()` does; the rank stays."""
        raise SystemExit(0)

    def enable_gui(self, gui: str | None = None) -> None:
        """Inline figures need no event loop, and a rank has none to offer."""
        if gui:
            raise UsageError(f"ranks have no event loop for {gui!r}: use `%matplotlib inline`")

    def debugger(self, force: bool = False) -> None:
        """A post-mortem prompt would wait for a terminal that nobody sees."""
        raise UsageError(_NO_DEBUGGER)

    def showsyntaxerror(self, filename: str | None = None, running_compiled_code: bool = False) -> None:
        """A syntax error found while the cell runs."""
        self.showtraceback()

    def showtraceback(self, exc_tuple: Any = None, *_: Any, **__: Any) -> None:
        """Keep the failure as text; called by IPython for errors of the cell and of a value's formatter."""
        etype, value = (exc_tuple or sys.exc_info())[:2]
        if etype is None or value is None or self._outcome.status != "ok":
            return
        self._outcome = self._describe(etype, value)

    def _describe(self, etype: type[BaseException], value: BaseException) -> Outcome:
        outcome = Outcome(status="error", ename=etype.__name__, evalue=_text_of(value), error=value)
        if issubclass(etype, SystemExit):
            code = value.code  # type: ignore[attr-defined]
            if code is None or code == 0:
                outcome.status, outcome.exit_code = "ok", 0
                return outcome
            outcome.exit_code = code if isinstance(code, int) else 1
            outcome.evalue = f"exit code {code}" if isinstance(code, int) else _text_of(value)
        elif issubclass(etype, KeyboardInterrupt):
            outcome.status = "interrupted"
            return outcome
        if issubclass(etype, UsageError):
            outcome.traceback = [f"UsageError: {outcome.evalue}"]
            return outcome
        if isinstance(value, NameError) and value.name:
            outcome.details["name"] = value.name
        outcome.traceback = "\n".join(failures.render(value, self.compile._filename_map)).split("\n")
        return outcome

    def run(self, code: str, cell: int) -> Outcome:
        """Run one cell.

        Parameters
        ----------
        code
            The cell's text, with IPython's syntax.
        cell
            Its number in the notebook, for `Cell In[k], line n`.
        """
        self._outcome = Outcome()
        self.current_code = code
        self.execution_count = cell
        execute: Any = self.run_cell
        result = execute(code, store_history=False)
        error: BaseException | None = result.error_in_exec or result.error_before_exec
        outcome = self._outcome
        if error is not None and outcome.error is None:  # raised where IPython reports nothing
            outcome = self._describe(type(error), error)
        self._outcome = Outcome()
        self.last_execution_result = None
        del result, error
        return outcome

    @staticmethod
    def forget(outcome: Outcome) -> None:
        """Free what a failure holds: its frames' locals, and the cycles that exceptions make."""
        error, outcome.error = outcome.error, None
        seen: set[int] = set()
        while error is not None and id(error) not in seen:
            seen.add(id(error))
            traceback.clear_frames(error.__traceback__)
            error = error.__cause__ or error.__context__
        if seen:
            del error
            gc.collect()

    def autoreload(self, mode: str) -> None:
        """Reload edited modules before each cell, as the notebook's own `%autoreload` does."""
        extensions: Any = self.extension_manager
        if "autoreload" not in extensions.loaded:
            extensions.load_extension("autoreload")
        self.run_line_magic("autoreload", mode)


def make_shell(namespace: Mapping[str, Any], publish: Publish, publish_clear: Callable[[bool], None]) -> RankShell:
    """The rank's shell, with a fresh `__main__` that holds the given names.

    Parameters
    ----------
    namespace
        Names set once: ``rank``, ``device``, ...
    publish
        Called with data, metadata, display id, update, result for everything displayed.
    publish_clear
        Called with `wait` for `clear_output`.
    """
    main = types.ModuleType("__main__", "The notebook's distributed cells.")
    main.__builtins__ = builtins  # type: ignore[attr-defined]
    sys.modules["__main__"] = main
    builtins.input = _no_input
    getpass.getpass = _no_password
    sys.stdin = sys.__stdin__ = _NoStdin()  # type: ignore[misc,assignment]
    sys.breakpointhook = _no_breakpoint
    warnings.filterwarnings("ignore", message="To exit: use")
    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.cache_size = 0
    config.InteractiveShell.autoindent = False
    RankShell.clear_instance()
    shell = RankShell.instance(config=config, user_module=main, user_ns=main.__dict__)
    shell.publish = publish
    shell.publish_clear = publish_clear
    shell._outcome = Outcome()
    main.__dict__.update(namespace)
    return shell


def describe_stack(frame: types.FrameType | None, shell: RankShell, full: bool) -> tuple[str, list[str]]:
    """Where a thread stands: its innermost line in a cell (`Cell In[k], line n: text`), and its stack, outermost first.

    Parameters
    ----------
    frame
        The thread's innermost frame.
    full
        Also describe the frames of libraries.
    """
    cells = shell.compile._filename_map
    line, stack = "", []
    frames = []
    while frame is not None:
        frames.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    outermost = max((i for i, (code, _) in enumerate(frames) if code.co_filename in cells), default=-1)
    for code, lineno in frames[: outermost + 1]:
        name = code.co_filename
        text = linecache.getline(name, lineno).strip()
        if name in cells:
            where = f"Cell In[{cells[name]}], line {lineno}: {text}"
            line = line or where
        elif full:
            where = f"{name}:{lineno} {code.co_name}: {text}"
        else:
            continue
        stack.append(where)
    return line, stack[::-1]
