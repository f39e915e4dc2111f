"""Asks what only a process of its own should be asked, and prints it as JSON: torch, CUDA, this host's own name.

Run by path in a short-lived child (``python -P probe.py``): the notebook's kernel never imports torch and holds no CUDA
context, and whatever hangs here is killed with the child. Imports nothing of nbdist.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import warnings
from typing import Any

__all__ = ["ask_host", "ask_torch"]

_HOST_TIMEOUT_S = 3.0


def ask_torch() -> dict[str, Any]:
    """What torch says of itself and of CUDA; ``error`` where it cannot be imported."""
    try:
        import torch
        import torch.distributed as dist
    except BaseException as error:  # a broken installation raises anything, and that is the answer
        return {"error": f"{type(error).__name__}: {error}"}
    cudnn: Any = torch.backends.cudnn
    nccl: Any = torch.cuda.nccl
    found: dict[str, Any] = {
        "version": str(torch.__version__),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cudnn": cudnn.version() if cudnn.is_available() else None,
        "gloo": dist.is_available() and dist.is_gloo_available(),
        "architectures": torch.cuda.get_arch_list() if torch.version.cuda else [],
    }
    if dist.is_available() and dist.is_nccl_available():
        found["nccl"] = ".".join(map(str, nccl.version()))
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            found["nccl_library"] = next((line.split()[-1] for line in maps if "libnccl.so" in line), None)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            found["cuda_available"] = torch.cuda.is_available()
            found["device_count"] = torch.cuda.device_count()
            count = range(torch.cuda.device_count() if found["cuda_available"] else 0)
            properties = [torch.cuda.get_device_properties(i) for i in count]
            if properties:
                found["uuids"] = [str(p.uuid) for p in properties]
                found["capabilities"] = [[p.major, p.minor] for p in properties]
                found["peers"] = [[i == j or torch.cuda.can_device_access_peer(i, j) for j in count] for i in count]
        except Exception as error:  # whatever CUDA raises is its answer
            found = {"cuda_available": False, **found, "cuda_error": f"{type(error).__name__}: {error}"}
    if said and "cuda_error" not in found and not found["cuda_available"]:
        found["cuda_error"] = str(said[0].message).split("(Triggered")[0].strip()
    return found


def ask_host(answer: dict[str, Any]) -> None:
    """Add this host's name and the addresses it resolves to, as soon as they are known."""
    answer["hostname"] = socket.gethostname()
    try:
        found = socket.getaddrinfo(answer["hostname"], None, type=socket.SOCK_STREAM)
        answer["hostname_addresses"] = sorted({str(a[4][0]) for a in found})
    except OSError:
        answer["hostname_addresses"] = []


if __name__ == "__main__":
    host: dict[str, Any] = {}
    thread = threading.Thread(target=ask_host, args=(host,), daemon=True)
    thread.start()
    torch_says = ask_torch()
    thread.join(_HOST_TIMEOUT_S)
    # What importing torch prints goes to other streams or before this line: the last line is the answer.
    sys.stdout.write("\n" + json.dumps({"torch": torch_says, **host}) + "\n")
    sys.stdout.flush()
    os._exit(0)  # a name server that does not answer would keep the thread, and the process, for half a minute
