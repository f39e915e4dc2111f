"""``%%distributed`` for Jupyter: one torch.distributed worker per GPU, trained from the notebook, watched live.

Importing this package imports no torch: every public name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

__version__ = "0.1.0"

_HOMES = {
    "Cluster": "nbdist.notebook.cluster",
    "start": "nbdist.notebook.cluster",
    "cluster": "nbdist.magics",
    "compare": "nbdist.notebook.history",
    "log": "nbdist.worker.telemetry",
    "track": "nbdist.worker.telemetry",
    "ddp": "nbdist.train.parallel",
    "fsdp": "nbdist.train.parallel",
    "loader": "nbdist.train.data",
    "accumulate": "nbdist.train.gradients",
    "autocast": "nbdist.train.gradients",
    "clip_gradients": "nbdist.train.gradients",
    "grad_scaler": "nbdist.train.gradients",
    "mean_over_ranks": "nbdist.train.gradients",
    "replicas_equal": "nbdist.train.replicas",
    "save": "nbdist.train.checkpoint",
    "load": "nbdist.train.checkpoint",
    "account": "nbdist.train.memory",
    "estimate": "nbdist.train.memory",
    "recommend": "nbdist.train.memory",
    "closed_form": "nbdist.train.memory",
    "forecast": "nbdist.train.memory",
    "profile": "nbdist.train.profile",
    "span": "nbdist.train.profile",
    "memory_snapshot": "nbdist.train.profile",
}

__all__ = ["__version__", "load_ipython_extension", "unload_ipython_extension", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'nbdist' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Add ``%%distributed`` and ``%distributed`` and start warming the fork server (``%load_ext nbdist``)."""
    from nbdist import magics

    magics.load(shell)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """Stop the cluster and take the magics away (``%unload_ext nbdist``)."""
    from nbdist import magics

    magics.unload(shell)
