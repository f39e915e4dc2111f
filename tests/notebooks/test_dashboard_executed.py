"""The dashboard in a notebook that a program executes: nobody looks, the picture is what counts."""

from __future__ import annotations

import nbclient
import nbformat
from deadlines import CELL_S

CELLS = [
    "import simulated as s",
    "d = s.play(s.make_run(2), 0.5, mode='auto', metrics=s.METRICS, sample=s.cpu_sample)",
    "print(d.mode)",
    "run = d.run\nrun",
]


def test_an_executed_notebook_keeps_the_picture_and_no_widget(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", __file__.rpartition("/notebooks/")[0])
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    nbclient.NotebookClient(book, timeout=int(CELL_S), resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [cell.outputs for cell in book.cells]
    assert [set(output["data"]) for output in outputs[1]] == [{"image/png", "text/plain"}, {"text/html", "text/plain"}]
    assert outputs[2][0]["text"] == "text\n"
    assert outputs[3][0]["data"]["text/plain"].startswith("<run 1: 2 ranks on cpu, gloo, ok after")
    assert not book.metadata.get("widgets")
    assert "anywidget" not in nbformat.writes(book)
