"""Runs the pre-flight or the measurements in ranks of their own, for a shell without a notebook.

The ranks meet in a file of a private folder, talk over loopback, and are gone when this returns. In a notebook the
cluster's ranks call `nbdist.doctor.preflight.preflight` and `nbdist.doctor.bandwidth.measure` themselves.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

from nbdist.doctor.bandwidth import Bandwidth
from nbdist.doctor.finding import Finding, fail

__all__ = ["copies", "run_bandwidth", "run_preflight"]

_SEARCHED = (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))  # nbdist may run from its source tree
_RENDEZVOUS_S = 60.0
_LIMIT_S = 180.0
_COPY_LIMIT_S = 60.0
_POLL_S = 0.05


def run_preflight(num_ranks: int, backend: str) -> list[Finding]:
    """Try copies, an all-reduce and a DataLoader in so many fresh ranks."""
    answer = _run("preflight", num_ranks, backend)
    if isinstance(answer, str):
        return [fail("ranks", answer, "no distributed training would run here")]
    return [Finding(**f) for f in answer]


def run_bandwidth(num_ranks: int, backend: str) -> Bandwidth | Finding:
    """Measure collectives in so many fresh ranks; a finding if that failed."""
    answer = _run("bandwidth", num_ranks, backend)
    if isinstance(answer, str):
        return fail("bandwidth", answer, "no distributed training would run here")
    return Bandwidth.from_json(answer)


def copies() -> list[Finding]:
    """Copy between all GPUs in a process of its own, and compare."""
    with _Started([_python("nbdist.doctor.preflight")], [{}]) as started:
        hung = not started.wait(_COPY_LIMIT_S)
        out, err = started.output(0)
    if hung:
        return [
            fail(
                "copies between GPUs",
                f"did not end within {_COPY_LIMIT_S:g} s",
                "NCCL would hang in the same way",
                "set NCCL_P2P_DISABLE=1 before the workers start; then look at IOMMU and ACS",
            )
        ]
    try:
        return [Finding(**f) for f in json.loads(out.splitlines()[-1])]
    except (ValueError, IndexError):
        return [fail("copies between GPUs", _last_line(err))]


def _python(module: str, *words: str) -> list[str]:
    """Run a module of nbdist; -P, so that no file of the current folder hides one."""
    return [sys.executable, "-P", "-m", module, *words]


class _Started:
    """Child processes, each in its own session; whatever happens, they are gone at the end of the block."""

    def __init__(self, commands: Sequence[Sequence[str]], environments: Sequence[dict[str, str]]) -> None:
        self._commands, self._environments = commands, environments

    def __enter__(self) -> _Started:
        # Files, not pipes: nobody reads while they run. Closed in __exit__.
        self._files = [(tempfile.TemporaryFile(), tempfile.TemporaryFile()) for _ in self._commands]  # noqa: SIM115
        self._children = [
            subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, _SEARCHED))} | environment,
                start_new_session=True,
            )
            for command, environment, (out, err) in zip(self._commands, self._environments, self._files, strict=True)
        ]
        return self

    def wait(self, limit_s: float) -> bool:
        """Wait until all have ended or one has failed; False if the time was over before."""
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            ended = [c.poll() for c in self._children]
            if None not in ended or any(ended):
                return True
            time.sleep(_POLL_S)
        return False

    def output(self, number: int) -> tuple[str, str]:
        """What a child has written so far."""
        texts = []
        for file in self._files[number]:
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
        return texts[0], texts[1]

    def failed(self) -> list[int]:
        """Children that ended with an error."""
        return [i for i, c in enumerate(self._children) if c.poll()]

    def __exit__(self, *_: object) -> None:
        for child in self._children:
            try:
                os.killpg(child.pid, signal.SIGKILL)  # DataLoader workers too
            except ProcessLookupError:
                pass
            child.wait()
        for pair in self._files:
            for file in pair:
                file.close()


def _run(what: str, num_ranks: int, backend: str) -> Any:
    """Run a step in ranks; what rank 0 answered, or one line about what went wrong."""
    with tempfile.TemporaryDirectory(prefix="nbdist-doctor-") as folder:
        answer = Path(folder) / "answer.json"
        command = _python("nbdist.doctor.ranks", what, backend, folder)
        environments = [
            {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(num_ranks),
                "LOCAL_WORLD_SIZE": str(num_ranks),
                "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
                "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
                "NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME", "lo"),
            }
            for rank in range(num_ranks)
        ]
        with _Started([command] * num_ranks, environments) as started:
            in_time = started.wait(_LIMIT_S)
            if failed := started.failed():
                return f"rank {failed[0]}: {_last_line(started.output(failed[0])[1])}"
            if not in_time:
                return f"the ranks did not end within {_LIMIT_S:g} s"
        return json.loads(answer.read_text())


def _last_line(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1][:500] if lines else "ended without a word"


def _main(what: str, backend: str, folder: str) -> None:
    """One rank."""
    import torch
    import torch.distributed as dist

    from nbdist.doctor.bandwidth import measure
    from nbdist.doctor.preflight import preflight

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
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
