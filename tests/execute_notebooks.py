"""Runs notebooks from top to bottom on CPU ranks and saves them with their outputs, as they are committed.

    python tests/execute_notebooks.py notebooks/00_quickstart.ipynb ...

Execution counts, cell timings and widget state are left out: they would differ with every run and say nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

__all__ = ["execute", "strip"]

CELL_TIMEOUT_S = 300


def execute(path: Path) -> Any:
    """The notebook with the outputs of a run in its own folder; raises where a cell fails that is not meant to."""
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    client = NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT_S,
        kernel_name="python3",
        store_widget_state=False,
        resources={"metadata": {"path": str(path.parent)}},
    )
    client.execute()
    return notebook


def strip(notebook: Any) -> Any:
    """Take out what differs with every run."""
    notebook.metadata.pop("widgets", None)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type != "code":
            continue
        cell.execution_count = None
        merged: list[Any] = []
        for output in cell.outputs:
            if "execution_count" in output:
                output.execution_count = None
            if output.output_type == "display_data" and not any(output.data.values()):
                continue  # what a widget or a progress bar stood in
            last = merged[-1] if merged else None
            if output.output_type == "stream" and last and last.output_type == "stream" and last.name == output.name:
                last.text += output.text
            else:
                merged.append(output)
        cell.outputs = merged
    return notebook


if __name__ == "__main__":
    for name in sys.argv[1:]:
        target = Path(name).resolve()
        nbformat.write(strip(execute(target)), target)
        print(target)
