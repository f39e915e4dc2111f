"""The command line: what it prints, its exit status, one line for each mistake."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

import nbdist
from nbdist import cli


def run(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "import sys; from nbdist.cli import main; sys.exit(main())", *words],
        capture_output=True,
        text=True,
        cwd=cwd,
        check=False,
    )


def test_version():
    done = run("--version")
    assert done.stdout.strip() == f"nbdist {nbdist.__version__}"
    assert done.returncode == 0


def test_without_a_command_it_tells_what_there_is():
    done = run()
    assert done.returncode == 2
    assert "lab" in done.stdout and "doctor" in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nonsense"], "invalid choice"),
        (["--nonsense"], "--nonsense"),
        (["lab", "--headless", "--nonsense"], "unknown with --headless: --nonsense"),
        (["lab", "--headless", "--notebook", "missing.ipynb"], "missing.ipynb: expected an existing .ipynb file"),
        (["lab", "--headless", "--notebook", "script.py"], "script.py: expected an existing .ipynb file"),
    ],
)
def test_mistakes_are_one_line(tmp_path, words, said):
    (tmp_path / "script.py").write_text("")
    done = run(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert len([line for line in done.stderr.splitlines() if line.startswith("nbdist")]) == 1


def test_the_copy_of_the_quickstart_is_kept(tmp_path, monkeypatch):
    shipped = tmp_path / cli.QUICKSTART
    shipped.write_text("shipped")
    monkeypatch.setattr(cli, "_shipped", lambda name: shipped)
    args = cli._parser().parse_args(["lab", "--folder", str(tmp_path / "mine")])
    copy = cli._notebook(args)
    assert copy.read_text() == "shipped"
    copy.write_text("changed by its reader")
    assert cli._notebook(args).read_text() == "changed by its reader"


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path, monkeypatch):
    shipped = tmp_path / cli.QUICKSTART
    shipped.write_text("shipped")
    monkeypatch.setattr(cli, "_shipped", lambda name: shipped)
    (tmp_path / "file").write_text("")
    args = cli._parser().parse_args(["lab", "--folder", str(tmp_path / "file" / "below")])
    with pytest.raises(nbdist.errors.InputError, match="--folder"):
        cli._notebook(args)


def test_the_quickstart_is_found():
    notebook = nbformat.read(cli._shipped(cli.QUICKSTART), as_version=4)
    assert notebook.cells
    assert "widgets" not in notebook.metadata
    assert json.dumps(notebook.metadata)
