"""The quickstart runs from top to bottom, learns, and shows what it promises."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import nbformat
import pytest

from execute_notebooks import execute

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "notebooks" / "00_quickstart.ipynb"
MAX_OUTPUT_BYTES = 100_000


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("quickstart")
    return execute(Path(shutil.copy(QUICKSTART, folder)))


def outputs(notebook: Any, start: str) -> list[Any]:
    """Outputs of the cell whose source begins so."""
    (cell,) = [c for c in notebook.cells if c.cell_type == "code" and c.source.startswith(start)]
    return list(cell.outputs)


def printed(found: list[Any]) -> str:
    return "".join(o.text for o in found if o.output_type == "stream")


def test_both_ways_reach_95_percent(executed: Any) -> None:
    text = "".join(printed(list(c.outputs)) for c in executed.cells if c.cell_type == "code")
    reached = [float(value) for value in re.findall(r"test accuracy ([\d.]+)%", text)]
    assert len(reached) >= 2
    assert min(reached) > 95.0


def test_each_training_cell_leaves_a_figure_and_a_table(executed: Any) -> None:
    for name in ("DDP", "FSDP2"):
        data = [o.data for o in outputs(executed, f"%%distributed --name {name}") if "data" in o]
        assert any("image/png" in d for d in data)
        table = next(d["text/html"] for d in data if "text/html" in d)
        assert re.findall(r">(\d)</t[dh]>", table)[:1] == ["0"]
        assert not any("widget-view" in kind for d in data for kind in d)


def test_fsdp_has_the_losses_of_ddp(executed: Any) -> None:
    text = printed(outputs(executed, "_, _, with_ddp"))
    steps, difference = re.search(r"(\d+) steps; .*: ([\d.e+-]+)", text).groups()  # type: ignore[union-attr]
    assert int(steps) > 200
    assert float(difference) < 1e-3


def test_fsdp_holds_half_of_the_states(executed: Any) -> None:
    text = printed(outputs(executed, "%%distributed\ndist.barrier()"))
    sizes = re.findall(r"states together +([\d.]+) (KiB|MiB)", text)
    ddp, fsdp = (float(value) * {"KiB": 1, "MiB": 1024}[unit] for value, unit in sizes)
    assert fsdp == pytest.approx(ddp / 2, rel=0.02)


def test_it_is_committed_with_its_outputs() -> None:
    notebook = nbformat.read(QUICKSTART, as_version=4)
    nbformat.validate(notebook)
    assert "widgets" not in notebook.metadata
    code = [c for c in notebook.cells if c.cell_type == "code"]
    assert all(c.execution_count is None for c in code)
    assert sum(bool(c.outputs) for c in code) >= len(code) - 1
    assert not any(o.output_type == "error" for c in code for o in c.outputs)
    assert max(len(str(o)) for c in code for o in c.outputs) < MAX_OUTPUT_BYTES
