"""An IPython shell without a kernel, whose cells' text, errors and displays are kept."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from traitlets.config import Config

__all__ = ["Console", "Shown"]

_COLOUR = re.compile(r"\x1b\[[\d;]*m")


@dataclass
class Shown:
    """What a cell showed, and how it ended."""

    ok: bool
    text: str
    displays: list[dict[str, Any]] = field(default_factory=list)
    value: Any = None

    @property
    def lines(self) -> list[str]:
        return [line for line in self.text.splitlines() if line.strip()]


class Console:
    """Types cells into the shell."""

    def __init__(self) -> None:
        InteractiveShell.clear_instance()
        config = Config()
        config.HistoryManager.enabled = False
        self.shell = InteractiveShell.instance(config=config)
        self.shell.colors = "nocolor"

    def run(self, code: str) -> Shown:
        with capture_output() as captured:
            result = self.shell.run_cell(code, store_history=True)
        text = _COLOUR.sub("", captured.stdout + captured.stderr)
        return Shown(result.success, text, [o.data for o in captured.outputs], result.result)

    def cell(self, body: str, flags: str = "") -> Shown:
        return self.run(f"%%distributed {flags}".rstrip() + f"\n{body}")

    def close(self) -> None:
        self.run("%unload_ext nbdist")
        self.shell.reset()
        InteractiveShell.clear_instance()
