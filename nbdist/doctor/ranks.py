"""Runs the pre-flight or the measurements in ranks of their own, for a shell without a notebook.

The ranks meet in a file of a private folder, talk over loopback, and are gone when this returns. In a notebook the
cluster's ranks call `nbdist.doctor.preflight.preflight` and `nbdist.doctor.bandwidth.measure` themselves.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

from nbdist.doctor.bandwidth import Bandwidth, measure
from nbdist.doctor.finding import Finding

__all__ = ["copies", "run_bandwidth", "run_preflight"]

_SEARCHED = (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))  # nbdist may run from its source tree
_RENDEZVOUS_S = 60.0
_LIMIT_S = 180.0
_COPY_LIMIT_S = 60.0
_POLL_S = 0.05
_STOPS = "no distributed training would run here"


def run_preflight(num_ranks: int, backend: str) -> list[Finding]:
    """Try copies, an all-reduce and a DataLoader in so many fresh ranks."""
    answer = _run("preflight", num_ranks, backend, _LIMIT_S)
    return [Finding("ranks", "fail", answer, _STOPS)] if isinstance(answer, str) else [Finding(**f) for f in answer]


def run_bandwidth(num_ranks: int, backend: str) -> Bandwidth | Finding:
    """Measure collectives in so many fresh ranks; a finding if that failed."""
    answer = _run("bandwidth", num_ranks, backend, _LIMIT_S)
    return Finding("bandwidth", "fail", answer, _STOPS) if isinstance(answer, str) else Bandwidth.from_json(answer)


def copies() -> list[Finding]:
    """Copy between all GPUs in a process of its own, and compare."""
    answer = _run("copies", 1, "none", _COPY_LIMIT_S)
    if isinstance(answer, str):
        remedy = "set NCCL_P2P_DISABLE=1 before the workers start; then look at IOMMU and ACS"
        return [Finding("copies between GPUs", "fail", answer, "NCCL would stop in the same way", remedy)]
    return [Finding(**answer)]


def _run(what: str, num_ranks: int, backend: str, limit_s: float) -> Any:
    """Run a step in ranks; what rank 0 answered, or one line about what went wrong. No child outlives this."""
    children: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="nbdist-doctor-") as folder:
        try:
            for rank in range(num_ranks):
                environment = os.environ | {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(num_ranks),
                    "LOCAL_WORLD_SIZE": str(num_ranks),
                    "PYTHONPATH": os.pathsep.join(filter(None, _SEARCHED)),
                }
                for name, usual in (
                    ("OMP_NUM_THREADS", "1"),
                    ("GLOO_SOCKET_IFNAME", "lo"),
                    ("NCCL_SOCKET_IFNAME", "lo"),
                ):
                    environment.setdefault(name, usual)
                # -P: no file of the current folder hides a module.
                command = [sys.executable, "-P", "-m", "nbdist.doctor.ranks", what, backend, folder]
                with open(f"{folder}/errors{rank}", "wb") as errors:
                    child = subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        stderr=errors,
                        env=environment,
                        start_new_session=True,
                    )
                children.append(child)
            end = time.monotonic() + limit_s
            while time.monotonic() < end:
                codes = {child.poll() for child in children}
                if None not in codes or codes - {None, 0}:  # all have ended, or one has failed
                    break
                time.sleep(_POLL_S)
            for rank, child in enumerate(children):
                if child.poll():
                    lines = Path(folder, f"errors{rank}").read_text(errors="replace").strip().splitlines()
                    return f"rank {rank}: {lines[-1][:500] if lines else 'ended without a word'}"
            if any(child.poll() is None for child in children):
                return f"did not end within {limit_s:g} s"
            return json.loads(Path(folder, "answer.json").read_text())
        finally:
            for child in children:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)  # DataLoader workers too
                child.wait()


def _main(what: str, backend: str, folder: str) -> None:
    """One rank."""
    import torch
    import torch.distributed as dist

    from nbdist.doctor.preflight import copy_between_gpus, preflight

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if what == "copies":
        Path(folder, "answer.json").write_text(json.dumps(asdict(copy_between_gpus())))
        return
    if backend == "nccl":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=_RENDEZVOUS_S),
    )
    answer: Any = measure().to_json() if what == "bandwidth" else [asdict(f) for f in preflight()]
    if rank == 0:
        Path(folder, "answer.json").write_text(json.dumps(answer))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _main(*sys.argv[1:])
