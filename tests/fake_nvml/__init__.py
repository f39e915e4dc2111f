"""Plays machines with GPUs: a C file compiled to a libnvidia-ml.so.1, under the real pynvml, one process each."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["CASES", "build", "case", "describe", "play"]

HERE = Path(__file__).resolve().parent
CASES = HERE / "cases"
_PLAY_S = 60.0

# what each process runs first; the test's own lines follow, and print one JSON value
_PREAMBLE = """
import ctypes, dataclasses, json
from nbdist.doctor import gpu
from nbdist.doctor.visible import visible
def show(value): print(json.dumps(dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value))
"""


def build(folder: Path) -> Path | None:
    """Compile the library into a folder; None where there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    library = folder / "libnvidia-ml.so.1"
    subprocess.run(
        [compiler, "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o", library, HERE / "fake_nvml.c"],
        check=True,
        timeout=_PLAY_S,
    )
    return library


def case(name: str) -> dict[str, Any]:
    """Facts of a case, e.g. ``NV07``."""
    (path,) = CASES.glob(f"{name}_*.json")
    return dict(json.loads(path.read_text(encoding="utf-8")))


def _value(value: Any) -> str:
    return f"!{value['code']}" if isinstance(value, dict) else str(value)


def _device(facts: dict[str, Any], head: str) -> list[str]:
    lines = [head] + [f"{key} {facts[key]}" for key in ("uuid", "name", "pci", "remote") if key in facts]
    memory = facts["memory"]
    lines += [f"{key} {_value(memory if 'error' in memory else memory[key])}" for key in ("total", "used", "free")]
    load = facts["utilization"]
    lines.append(f"load {_value(load if 'error' in load else load['gpu'])}")
    for key, name in {
        "power_mW": "power",
        "temperature": "temperature",
        "throttle": "throttle",
        "gi": "gi",
        "ci": "ci",
        "links": "links",
    }.items():
        if key in facts:
            lines.append(f"{name} {_value(facts[key])}")
    if "mig_mode" in facts:
        mode = facts["mig_mode"]
        lines.append(f"mig {_value(mode if 'error' in mode else mode['current'])}")
    for process in facts.get("processes", ()):
        used = process["used"] if process["used"] is not None else 2**64 - 1  # NVML's "not available"
        lines.append(f"process {process['pid']} {used}")
    for instance in facts.get("mig", ()):
        lines += _device(instance, "instance")
    return lines


def describe(nvml: dict[str, Any]) -> str:
    """The text file the library reads, of the ``nvml`` part of a case."""
    init = nvml["init"]
    lines = [
        f"init {0 if init == 'ok' else init['code']}",
        f"driver {nvml['driver_version']}",
        f"cuda {nvml['cuda_driver_version']}",
    ]
    if "missing_handle" in nvml:
        lines.append(f"missing_handle {nvml['missing_handle']}")
    for device in nvml["devices"]:
        lines += _device(device, "device")
    return "\n".join(lines) + "\n"


def play(library: Path, nvml: dict[str, Any], code: str, env: dict[str, str] | None = None) -> Any:
    """Run lines of Python on such a machine; the JSON value they print."""
    facts = library.parent / "machine.txt"
    facts.write_text(describe(nvml), encoding="utf-8")
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("CUDA_")}
    # a machine without the library is one where it is not found
    found = library.parent if nvml["init"] == "ok" or nvml["init"]["code"] != 12 else library.parent / "nothing"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", _PREAMBLE + code],
        env=inherited | {"LD_LIBRARY_PATH": str(found), "FAKE_NVML": str(facts)} | (env or {}),
        capture_output=True,
        text=True,
        timeout=_PLAY_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
    return json.loads(done.stdout)
