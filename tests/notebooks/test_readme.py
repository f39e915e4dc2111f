"""The README's code runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from deadlines import CELL_S, START_S
from player import Notebook

README = Path(__file__).resolve().parents[2] / "README.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
CELLS = [block for block in BLOCKS if block.startswith("%")]
SCRIPTS = [block for block in BLOCKS if not block.startswith("%")]


@pytest.fixture
def notebook(tmp_path):
    made = Notebook(tmp_path, load=False)
    yield made
    made.shutdown()


def test_the_four_cells(notebook):
    assert len(CELLS) == 4
    for cell in CELLS:
        played = notebook.run(cell.rstrip("\n"), timeout_s=START_S + CELL_S)
        assert played.ok, (cell, played.text)
    points = notebook.points("loss")
    assert set(points) == {0, 1}
    for rank in (0, 1):
        assert points[rank][-1][1] < points[rank][0][1] / 4


def test_the_python_calls(notebook):
    assert SCRIPTS
    assert notebook.run("import nbdist").ok
    for number, script in enumerate(SCRIPTS):
        if number == 0:  # the README has a model by then
            script = script.replace("cluster.push(", "cluster.run('model = torch.nn.Linear(2, 2)')\ncluster.push(", 1)
        played = notebook.run(script, timeout_s=START_S + CELL_S)
        assert played.ok, played.text
    assert "[all] 0.001" in played.text
    assert notebook.run("cluster.stop()").ok
