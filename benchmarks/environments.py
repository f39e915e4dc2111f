"""A throw-away virtual environment for each product, and stubs for programs that no product may run here."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import venv
from pathlib import Path

__all__ = ["REQUIREMENTS", "python_of", "stubs"]

REPOSITORY = Path(__file__).resolve().parent.parent
TORCH = "torch==2.13.0"
REQUIREMENTS: dict[str, list[str]] = {
    "nbdist": ["-e", f"{REPOSITORY}[lab]"],
    "ipyparallel": ["ipyparallel==9.2.*", "ipykernel"],
    "nbdistributed": ["nbdistributed==0.1.0", "ipykernel"],
    "jupyter-distributed": ["jupyter-distributed==0.1.1", "ipykernel"],
    "torchmonarch": ["torchmonarch==0.7.0", "ipykernel"],
    "accelerate": ["accelerate", "ipykernel"],
    "lightning": ["lightning", "ipykernel"],
    "torchrunx": ["torchrunx", "ipykernel"],
    "torchrun": ["ipykernel"],
}


def python_of(product: str, cache: Path) -> Path:
    """The interpreter of a product's environment, which is made if it is not there yet.

    nbdist is measured in the environment this runs in, where it is installed there.
    """
    if product == "nbdist" and importlib.util.find_spec("nbdist") and importlib.util.find_spec("ipykernel"):
        return Path(sys.executable)
    folder = cache / product
    done = folder / ".done"
    python = folder / "bin" / "python"
    if not done.exists():
        print(f"making the environment of {product} in {folder}", file=sys.stderr, flush=True)
        venv.create(folder, with_pip=True)
        for words in ([TORCH, "numpy"], REQUIREMENTS[product]):
            subprocess.run([python, "-m", "pip", "install", "--quiet", *words], check=True)
        done.touch()
    return python


def stubs(cache: Path) -> Path:
    """A folder to put first on PATH, with a ``pkill`` and a ``killall`` that only write down how they were called.

    nbdistributed 0.1 runs ``pkill -9 -f`` with patterns such as ``python.*worker``, which hit processes of others.
    """
    folder = cache / "stubs"
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("pkill", "killall"):
        program = folder / name
        if not program.exists():
            program.write_text(f'#!/bin/sh\necho "{name} $*" >> "{folder}/calls"\nexit 1\n', encoding="utf-8")
            program.chmod(0o755)
        if not os.access(program, os.X_OK):
            raise RuntimeError(f"{program} must be executable before any product is started")
    return folder
