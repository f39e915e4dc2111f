"""Every tutorial is committed as it should be read, and runs from top to bottom in another folder."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import nbformat
import pytest
from execute_notebooks import execute

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
TUTORIALS = sorted(NOTEBOOKS.glob("0[1-9]*.ipynb"))
MAX_OUTPUT_BYTES = 100_000
MEANT_TO_FAIL = "raises-exception"

each_tutorial = pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def untagged_errors(notebook: Any) -> list[str]:
    """What went wrong in cells that are not meant to fail."""
    return [
        f"{cell.id}: {output.ename}: {output.evalue}"
        for cell in code_cells(notebook)
        if MEANT_TO_FAIL not in cell.metadata.get("tags", [])
        for output in cell.outputs
        if output.output_type == "error"
    ]


def test_there_are_tutorials() -> None:
    assert TUTORIALS
    numbers = [path.name[:2] for path in TUTORIALS]
    assert len(set(numbers)) == len(numbers)


@each_tutorial
@pytest.mark.timeout(300)
def test_it_is_committed_with_its_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert "widgets" not in notebook.metadata
    ids = [cell.get("id") for cell in notebook.cells]
    assert all(ids)
    assert len(set(ids)) == len(ids)
    code = code_cells(notebook)
    assert all(cell.execution_count is None for cell in code)
    assert sum(bool(cell.outputs) for cell in code) >= len(code) / 2
    assert untagged_errors(notebook) == []
    outputs = [output for cell in code for output in cell.outputs]
    assert max(len(str(output)) for output in outputs) < MAX_OUTPUT_BYTES
    assert any("image/png" in output.get("data", {}) for output in outputs)


@each_tutorial
@pytest.mark.timeout(300)
def test_its_text_names_nothing_of_the_machine_it_ran_on(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    texts = [
        text
        for cell in code_cells(notebook)
        for output in cell.outputs
        for text in (output.get("text", ""), output.get("data", {}).get("text/plain", ""))
    ]
    assert not any("/site-packages/" in text or str(Path.home()) + "/" in text for text in texts)


@each_tutorial
@pytest.mark.timeout(300)
def test_it_runs_from_top_to_bottom_in_another_folder(path: Path, tmp_path: Path) -> None:
    executed = execute(Path(shutil.copy(path, tmp_path)))
    assert untagged_errors(executed) == []
    assert sorted(found.name for found in tmp_path.iterdir()) == [path.name]
