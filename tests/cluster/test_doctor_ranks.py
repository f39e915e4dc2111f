"""The doctor on real ranks: pre-flight and bandwidth under torchrun, the command's own ranks, the facts of this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from deadlines import START_S

from nbdist.doctor import facts, ranks
from nbdist.doctor.bandwidth import OPERATIONS, Bandwidth
from nbdist.doctor.checks import check
from nbdist.doctor.finding import Finding
from nbdist.doctor.report import diagnose, main

# Each rank writes what it got: all must have the same.
SCRIPT = """
import json, os, sys
from dataclasses import asdict
import torch.distributed as dist
from nbdist.doctor.bandwidth import measure
from nbdist.doctor.preflight import preflight
dist.init_process_group("gloo")
said = [asdict(f) for f in preflight(limit_s=20)]
table = measure(sizes=[4096, 1 << 16], seconds=0.02).to_json()
with open(os.path.join(sys.argv[1], f"rank{dist.get_rank()}.json"), "w") as file:
    json.dump({"preflight": said, "bandwidth": table}, file)
dist.destroy_process_group()
"""

# Rank 1 never takes part: rank 0 must say so in time, and what to look at.
STUCK = """
import os, sys, time
import torch.distributed as dist
from nbdist.doctor.preflight import preflight
from nbdist.errors import CollectiveBroken
dist.init_process_group("gloo")
if dist.get_rank() == 0:
    try:
        preflight(limit_s=1)
    except CollectiveBroken as error:
        open(os.path.join(sys.argv[1], "said"), "w").write(str(error))
store = dist.distributed_c10d._get_default_store()
store.set(f"done{dist.get_rank()}", "1")
store.wait(["done0", "done1"])
os._exit(0)
"""


def torchrun(script: str, folder: Path) -> None:
    path = folder / "script.py"
    path.write_text(script)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        str(path),
        str(folder),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=START_S, check=False)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr


def test_under_torchrun(tmp_path):
    torchrun(SCRIPT, tmp_path)
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert [(f["name"], f["verdict"]) for f in first["preflight"]] == [
        ("all-reduce", "ok"),
        ("copies between ranks", "ok"),
        ("DataLoader", "ok"),
    ]
    table = Bandwidth.from_json(first["bandwidth"])
    assert [(r.operation, r.num_bytes) for r in table.rows] == [(o, n) for o in OPERATIONS for n in (4096, 1 << 16)]
    for row in table.rows:
        assert row.algbw_gb_s == pytest.approx(row.num_bytes / row.time_s / 1e9)
        factor = 1.0 if row.operation == "all_reduce" else 0.5
        assert row.busbw_gb_s == pytest.approx(row.algbw_gb_s * factor)
    assert (table.world_size, table.backend, table.device, table.limit_gb_s) == (2, "gloo", "cpu", None)


def test_a_rank_that_never_comes(tmp_path):
    torchrun(STUCK, tmp_path)
    said = (tmp_path / "said").read_text()
    assert said.startswith("all_reduce did not end within 1 s on rank 0")
    assert "GLOO_SOCKET_IFNAME" in said


def test_the_commands_own_ranks(capsys):
    assert main(["--preflight", "--bandwidth", "-n", "2", "--json"]) in (0, 1)
    value = json.loads(capsys.readouterr().out)
    verdicts = {f["name"]: f["verdict"] for f in value["findings"]}
    assert verdicts["all-reduce"] == verdicts["copies between ranks"] == verdicts["DataLoader"] == "ok"
    assert verdicts["copies between GPUs"] in ("ok", "skipped")
    assert value["bandwidth"]["world_size"] == 2


@pytest.mark.case("SP15")
def test_ranks_that_cannot_meet(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    (finding,) = ranks.run_preflight(2, "gloo")
    assert isinstance(finding, Finding)
    assert (finding.name, finding.verdict) == ("ranks", "fail")
    assert "nosuch0" in finding.fact


@pytest.mark.case("EN16")
def test_this_machine():
    found = facts.gather()
    assert found.torch is not None
    assert found.torch.error is None
    assert found.cpus_allowed
    assert facts.Facts.from_json(json.loads(json.dumps(found.to_json()))) == found
    again = diagnose()
    assert str(again) == str(diagnose(facts=found))
    if not found.devices:
        said = [f for f in check(found) if f.name == "GPUs"]
        assert [(f.verdict, f.fact) for f in said] == [("info", "no GPU: gloo on CPU (no NVIDIA driver/GPU found)")]
        assert {f.name for f in check(found) if f.verdict == "skipped"} >= {"NCCL", "P2P", "NVLink"}


@pytest.mark.case("SP08")
def test_a_file_called_torch_beside_the_notebook(tmp_path, monkeypatch, capsys):
    (tmp_path / "torch.py").write_text("raise SystemExit('must not run')\n")
    monkeypatch.chdir(tmp_path)
    assert main([]) == 1
    out = capsys.readouterr().out
    assert f"{tmp_path}/torch.py hides the library torch" in out
    assert "must not run" not in out


def test_the_kernel_stays_without_torch():
    code = "import sys; from nbdist.doctor.report import diagnose; str(diagnose()); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=START_S)
