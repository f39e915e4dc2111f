"""Where ranks meet to make a group: a store whose waits can be broken off, and the interfaces gloo and NCCL may use."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store

from nbdist.errors import CollectiveBroken, StartError

__all__ = ["BreakableStore", "choose_interfaces"]

_LONGEST_POLL_S = 0.01


class BreakableStore(Store):
    """A store that polls another one, so that a wait ends when it is broken off, or by Ctrl-C.

    The waits of torch's own stores are C++ loops that no signal and no other thread can end before their time-out,
    half an hour by default. torch takes a store written in Python (a public base class) wherever it takes its own;
    gloo asks it some ten questions per group and none afterwards.

    Parameters
    ----------
    inner
        The store that holds the keys.
    patience_s
        Longest wait for a key, whatever time-out is asked for.
    """

    def __init__(self, inner: Store, patience_s: float) -> None:
        super().__init__()
        self._inner = inner
        self._patience_s = patience_s
        self._reason: str | None = None

    def break_off(self, reason: str) -> None:
        """End every wait, now and later, with `CollectiveBroken` (any thread)."""
        self._reason = reason

    def meet(self, rank: int, world_size: int, place: str) -> None:
        """Wait until every rank has come to a place.

        Raises
        ------
        StartError
            If some have not come in time; it names them.
        """
        self._inner.set(f"{place}/{rank}", "")
        missing = [f"{place}/{r}" for r in range(world_size)]
        try:
            self._wait(missing, self._patience_s)
        except TimeoutError:
            late = [r for r in range(world_size) if not self._inner.check([f"{place}/{r}"])]
            names = ", ".join(map(str, late))
            raise StartError(
                f"rank {names} did not join the process group within {self._patience_s:.0f} s"
                if len(late) == 1
                else f"ranks {names} did not join the process group within {self._patience_s:.0f} s"
            ) from None

    def _wait(self, keys: Sequence[str], limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        pause_s = 0.0005
        while not self._inner.check(list(keys)):
            if self._reason is not None:
                raise CollectiveBroken(self._reason)
            if time.monotonic() > deadline:
                raise TimeoutError(f"nobody set {', '.join(keys)} within {limit_s:.0f} s")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_POLL_S)

    # What torch calls, on any thread.

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set."""
        limit_s = self._patience_s if timeout is None else min(timeout.total_seconds(), self._patience_s)
        self._wait(keys, limit_s)

    def get(self, key: str) -> Any:
        """Wait for a key and return its value."""
        self._wait([key], self._patience_s)
        return self._inner.get(key)

    def multi_get(self, keys: Sequence[str]) -> list[Any]:
        """Wait for keys and return their values."""
        return [self.get(key) for key in keys]

    def set(self, key: str, value: Any) -> None:
        """Set a key."""
        self._inner.set(key, value)

    def multi_set(self, keys: Sequence[str], values: Sequence[Any]) -> None:
        """Set keys."""
        for key, value in zip(keys, values, strict=True):
            self._inner.set(key, value)

    def add(self, key: str, value: int) -> int:
        """Add to a counter."""
        return int(self._inner.add(key, value))

    def append(self, key: str, value: Any) -> None:
        """Append to a value."""
        present = self._inner.get(key) if self._inner.check([key]) else b""
        added = value if isinstance(value, str) else bytes(value).decode()
        self._inner.set(key, bytes(present).decode() + added)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are set."""
        return bool(self._inner.check(list(keys)))

    def compare_set(self, key: str, expected: Any, desired: Any) -> Any:
        """Set a key if it has the expected value."""
        return self._inner.compare_set(key, expected, desired)

    def delete_key(self, key: str) -> bool:
        """Delete a key."""
        return bool(self._inner.delete_key(key))

    def num_keys(self) -> int:
        """Count the keys."""
        return int(self._inner.num_keys())

    def has_extended_api(self) -> bool:
        """Whether append, multi_get and multi_set may be used."""
        return False


def choose_interfaces(backend: str) -> None:
    """Set the network interface of gloo and NCCL to loopback, unless the user has chosen one.

    Parameters
    ----------
    backend
        The backend about to be used, e.g. ``gloo`` or ``cpu:gloo,cuda:nccl``.

    Raises
    ------
    StartError
        If an interface the user chose does not exist; torch itself would only say so after a long time or not at all.
    """
    present = [name for _, name in socket.if_nameindex()]
    for backend_name, variable in (("gloo", "GLOO_SOCKET_IFNAME"), ("nccl", "NCCL_SOCKET_IFNAME")):
        value = os.environ.get(variable, "")
        if not value:
            if "lo" in present:
                os.environ[variable] = "lo"
        elif backend_name in backend and not _names_one(variable, value, present):
            raise StartError(
                f"{variable}={value} names no network interface of this machine (it has {', '.join(present)}): "
                "unset the variable or name one of these, then start again"
            )


def _names_one(variable: str, value: str, present: Sequence[str]) -> bool:
    wanted = [v.strip() for v in value.lstrip("^=").split(",") if v.strip()]
    if variable.startswith("NCCL"):  # NCCL takes prefixes, exact names after '=', exclusions after '^'
        if value.startswith("^"):
            return any(not name.startswith(w) for name in present for w in wanted)
        if not value.startswith("="):
            return any(name.startswith(w) for name in present for w in wanted)
    return bool(wanted) and all(w in present for w in wanted)
