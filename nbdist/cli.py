"""``nbdist lab | doctor``: the same from a shell, a container or CI.

``nbdist lab`` opens JupyterLab on the quickstart notebook; with ``--headless`` it runs the notebook from end to end
without a browser, saves it with its outputs and prints the final loss of every rank. ``nbdist doctor`` judges the
machine and exits with 1 if something must be mended.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nbdist import __version__
from nbdist.errors import InputError, NbdistError

__all__ = ["main"]

QUICKSTART = "00_quickstart.ipynb"
CELL_TIMEOUT_S = 900

# Runs in the notebook's own kernel after its last cell: the runs it has seen, with the last loss of each rank.
_ASK_LOSSES = """
def _nbdist_losses():
    import json, nbdist
    try:
        runs = nbdist.cluster().runs
    except nbdist.errors.NotRunningError:
        runs = []
    found = [{"run": run.name, "loss": {str(k): v for k, v in run.history.last("loss").items()}} for run in runs]
    print(json.dumps([run for run in found if run["loss"]]))
_nbdist_losses()
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status.

    Parameters
    ----------
    argv
        Words after the program's name; those of this process by default.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["doctor"]:  # has its own flags, and its own help
        return _doctor(words[1:])
    args, rest = _parser().parse_known_args(words)
    if rest and args.command != "lab":
        _parser().error(f"unknown: {' '.join(rest)}")
    try:
        if args.command == "lab":
            return _headless(args, rest) if args.headless else _lab(args, rest)
    except NbdistError as error:
        print(f"nbdist: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    _parser().print_help()
    return 2


def _parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="nbdist", description="%(prog)s: distributed training from JupyterLab, one worker per GPU."
    )
    top.add_argument("--version", action="version", version=f"nbdist {__version__}")
    sub = top.add_subparsers(dest="command", metavar="lab | doctor")
    lab = sub.add_parser(
        "lab",
        help="open JupyterLab on the quickstart notebook",
        description="Open JupyterLab on the quickstart notebook. Other options go to JupyterLab (--no-browser, --ip).",
    )
    lab.add_argument("--notebook", type=Path, help="another notebook, instead of a copy of the quickstart")
    lab.add_argument("--headless", action="store_true", help="run the notebook from end to end, without a browser")
    lab.add_argument(
        "--folder", type=Path, default=Path("nbdist-quickstart"), help="where the copy goes (default: %(default)s)"
    )
    sub.add_parser("doctor", help="judge driver, image, links and limits of this machine", add_help=False)
    return top


def _doctor(words: Sequence[str]) -> int:
    from nbdist.doctor import report

    status: int = report.main(list(words))
    return status


# ---- the notebook


def _shipped(name: str) -> Path:
    """A notebook that comes with nbdist: inside the installed package, or in the source tree beside it."""
    package = Path(__file__).resolve().parent
    for folder in (package / "notebooks", package.parent / "notebooks"):
        if (folder / name).is_file():
            return folder / name
    raise InputError(f"{name} is not part of this installation: expected it in {package / 'notebooks'}")


def _notebook(args: argparse.Namespace) -> Path:
    """The notebook asked for, or a copy of the quickstart that its reader may change (an earlier copy is kept)."""
    chosen: Path | None = args.notebook
    if chosen is not None:
        if chosen.suffix != ".ipynb" or not chosen.is_file():
            raise InputError(f"{chosen}: expected an existing .ipynb file")
        return chosen.resolve()
    target: Path = args.folder.resolve() / QUICKSTART
    if not target.exists():
        source = _shipped(QUICKSTART)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
        except OSError as error:
            raise InputError(f"cannot write {target}: {error.strerror} (choose another place with --folder)") from error
    return target


def _need(*modules: str) -> None:
    if missing := [m for m in modules if importlib.util.find_spec(m) is None]:
        raise InputError(f"{', '.join(missing)} not installed: pip install 'nbdist[lab]'")


def _lab(args: argparse.Namespace, rest: Sequence[str]) -> int:
    _need("jupyterlab")
    notebook = _notebook(args)
    words = [sys.executable, "-m", "jupyterlab", str(notebook), *rest]
    if hasattr(os, "geteuid") and os.geteuid() == 0 and "--allow-root" not in rest:
        words.append("--allow-root")  # JupyterLab would refuse; in a container root is usual
    print(f"JupyterLab opens {notebook}", flush=True)
    os.execv(sys.executable, words)  # JupyterLab takes this process over: its signals, its exit status


def _headless(args: argparse.Namespace, rest: Sequence[str]) -> int:
    if rest:
        raise InputError(f"unknown with --headless: {' '.join(rest)}")
    _need("nbclient", "nbformat", "ipykernel")
    notebook = _notebook(args)
    executed = notebook.with_name(notebook.stem + ".executed.ipynb")
    begun = time.monotonic()
    failure, losses = _execute(notebook, executed)
    for run in losses:
        for rank, value in run["loss"].items():
            print(f"{run['run']}: rank {rank}: final loss {value:.4f}")
    if not losses and failure is None:
        print("no run recorded a loss")
    print(f"executed notebook: {executed} ({time.monotonic() - begun:.0f} s)", flush=True)
    if failure is not None:
        print(f"nbdist: {failure}", file=sys.stderr)
        return 1
    return 0


def _execute(notebook: Path, executed: Path) -> tuple[str | None, list[dict[str, Any]]]:
    """Run every cell in a fresh kernel and save the result, also after an error; (what failed, losses by run)."""
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    nbformat: Any = importlib.import_module("nbformat")  # its functions carry no types
    content = nbformat.read(notebook, as_version=4)
    content.metadata.pop("widgets", None)
    client = NotebookClient(
        content,
        timeout=CELL_TIMEOUT_S,
        kernel_name="python3",
        store_widget_state=False,
        extra_arguments=["--log-level=ERROR"],
        resources={"metadata": {"path": str(notebook.parent)}},
    )
    failure: str | None = None
    losses: list[dict[str, Any]] = []
    code_cells = [i for i, cell in enumerate(content.cells) if cell.cell_type == "code"]
    try:
        with client.setup_kernel():
            for nth, index in enumerate(code_cells, 1):
                print(f"cell {nth} of {len(code_cells)}", file=sys.stderr, flush=True)
                client.execute_cell(content.cells[index], index)
            asked = client.execute_cell(nbformat.v4.new_code_cell(_ASK_LOSSES), 0, store_history=False)
            text = "".join(o.text for o in asked.outputs if o.output_type == "stream" and o.name == "stdout")
            losses = json.loads(text)
    except CellExecutionError as error:
        failure = f"{error.ename}: {error.evalue}".splitlines()[0]
    except (CellTimeoutError, DeadKernelError) as error:
        failure = str(error).strip().splitlines()[0]
    finally:
        nbformat.write(content, executed)
    return failure, losses
