"""The whole text of every rank, in files of bounded number and size: floods are cut in the cell, not there.

They lie under ``$XDG_STATE_HOME/nbdist/output`` (``~/.local/state/nbdist/output``), one folder for each cluster.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import time
from pathlib import Path

__all__ = ["RankLog", "new_log_folder"]

KEPT_FOLDERS = 10
MAX_BYTES = 64 * 2**20  # of one rank's file; the one before it is kept as `.old`


def new_log_folder() -> Path | None:
    """A folder for a new cluster's logs, after the oldest ones were removed; None where none can be made."""
    state = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    base = Path(state, "nbdist", "output")
    now_ns = time.time_ns()  # in the name to the last digit: the names' order is their age
    folder = (
        base / f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(now_ns // 10**9))}-{now_ns % 10**9:09d}-{os.getpid()}"
    )
    try:
        folder.mkdir(parents=True, mode=0o700)
        for old in sorted(base.iterdir())[:-KEPT_FOLDERS]:
            shutil.rmtree(old, ignore_errors=True)
    except OSError:
        return None
    return folder


class RankLog:
    """A file that takes bytes and never raises: a full disk must not end a training run.

    Parameters
    ----------
    path
        Where to write, or None to keep nothing.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._size = 0
        self._file: io.FileIO | None = None
        self._open()

    def _open(self) -> None:
        if self.path is None:
            return
        try:
            self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115
            self._size = self._file.tell()
        except OSError:
            self._file = None

    def write(self, data: bytes) -> int:
        """Append; what does not fit on the disk is lost."""
        if self._file is None:
            return 0
        try:
            self._file.write(data)
            self._size += len(data)
            if self._size > MAX_BYTES and self.path is not None:
                self._file.close()
                self.path.replace(self.path.with_suffix(".old"))
                self._open()
        except OSError:
            return 0
        return len(data)

    def position(self) -> int:
        """Bytes in the present file."""
        return self._size

    def text_from(self, position: int) -> str:
        """What was written since `position`, or all there is if the file was begun anew meanwhile."""
        if self.path is None or not self.path.exists():
            return ""
        with open(self.path, "rb") as file:
            if position <= self._size:
                file.seek(position)
            return file.read().decode("utf-8", "replace")

    def close(self) -> None:
        """Close the file; it stays for `%distributed output`."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # the disk is full
                self._file.close()
            self._file = None
