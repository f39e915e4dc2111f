"""The doctor's report: text, HTML, JSON, what is left out of it, and the command's exit status."""

from __future__ import annotations

import getpass
import json
from dataclasses import replace

import pytest
from fixtures.machines import machine
from fixtures.nccl_text import Run

from nbdist.doctor import report
from nbdist.doctor.bandwidth import Bandwidth, Row, bus_factor, link_limit
from nbdist.doctor.facts import Facts, Health
from nbdist.doctor.finding import Finding
from nbdist.doctor.gpu import Link
from nbdist.doctor.report import diagnose, main
from nbdist.errors import InputError

BROKEN = machine(shm_total=64 << 20, shm_free=64 << 20, env={"NCCL_P2P_DISABLE": "1"})


def test_text_is_short_on_a_healthy_machine():
    found = diagnose(facts=replace(machine(), links=()))
    lines = str(found).splitlines()
    assert found.exit_status == 0
    assert lines[0].startswith("nbdist doctor: all is well")
    assert len(lines) == 2


def test_text_says_the_worst_first():
    found = diagnose(facts=BROKEN)
    lines = str(found).splitlines()
    assert found.exit_status == 1
    assert found.verdict == "fail"
    assert (
        lines[0]
        == f"nbdist doctor: 1 to mend, 1 slow or fragile ({sum(f.verdict == 'ok' for f in found.findings)} checks passed)"
    )
    assert [line.split()[0] for line in lines if line[:4] in ("FAIL", "WARN")] == ["FAIL", "WARN"]
    assert str(diagnose(facts=BROKEN)) == str(found)


def test_warnings_do_not_stop_a_build():
    assert diagnose(facts=machine(env={"NCCL_P2P_DISABLE": "1"})).exit_status == 0


def test_html_escapes_and_folds():
    facts = machine(env={"NCCL_P2P_DISABLE": "<i>1</i>"})
    html = diagnose(facts=facts)._repr_html_()
    assert "NCCL_P2P_DISABLE=&lt;i&gt;1" in html
    assert "<i>1" not in html
    assert "<details>" in html
    assert "<b>WARN</b>" in html


def test_everything_together(tmp_path):
    log = tmp_path / "nccl.log"
    log.write_text(Run().whole("P2P/CUMEM").text())
    table = Bandwidth(world_size=2, backend="gloo", device="cpu", rows=())
    tried = [Finding(name="all-reduce", verdict="fail", fact="its sum is wrong")]
    found = diagnose(facts=machine(), nccl_logs=[log], bandwidth=table, preflight=tried)
    for drawn in (str(found), found._repr_html_()):
        assert "its sum is wrong" in drawn
        assert "P2P/CUMEM" in drawn
        assert "gloo" in drawn
        assert "NV12" in drawn
    assert found.exit_status == 1
    json.dumps(found.to_json())


def test_wrong_plans():
    with pytest.raises(InputError, match="at least one node"):
        diagnose(nodes=0)


def test_report_leaves_out_names(monkeypatch, tmp_path):
    monkeypatch.setattr(getpass, "getuser", lambda: "mallory")
    log = tmp_path / "n.log"
    log.write_text(Run(hosts=("secret-gpu-1",)).whole("P2P/CUMEM").text())
    facts = replace(
        machine(
            hostname="trainbox",
            resolves={"trainbox": "10.2.0.7"},
            addresses={"enp1s0": "10.2.0.7", "lo": "127.0.0.1"},
            env={
                "MASTER_ADDR": "headnode.example.org",
                "SLURM_JOB_ACCOUNT": "physics",
                "SLURM_JOB_ID": "7",
                "NCCL_TOPO_FILE": "/home/mallory/topo.xml",
                "NCCL_COMM_ID": "10.9.8.7:1234",
                "NCCL_SOCKET_IFNAME": "eth9",
                "NCCL_DEBUG": "INFO",
            },
        ),
        shadows=("/home/mallory/work/torch.py",),
        packages={"torch": "2.12.1"},
    )
    text = diagnose(facts=facts, nccl_logs=[log]).report()
    for name in ("trainbox", "mallory", "10.2.0.7", "10.9.8.7", "headnode", "physics", "secret-gpu-1"):
        assert name not in text
    for kept in ("~/work/torch.py", "NCCL_SOCKET_IFNAME=eth9", "2.12.1", '"NCCL_DEBUG": "INFO"', "12.8"):
        assert kept in text


def test_a_pasted_report_can_be_judged(tmp_path, capsys):
    for text in (diagnose(facts=BROKEN).report(), json.dumps(diagnose(facts=BROKEN).to_json())):
        (tmp_path / "r.txt").write_text("see below\n\n" + text if text.startswith("nbdist") else text)
        assert main(["--facts", str(tmp_path / "r.txt")]) == 1
        assert "/dev/shm has 64 MiB" in capsys.readouterr().out


def test_command_judges_a_log_alone(tmp_path, capsys):
    (tmp_path / "n.log").write_text(Run().whole("P2P/CUMEM").text())
    assert main(["--nccl-log", str(tmp_path / "n.log")]) == 0
    assert "all 4 connected pairs use P2P" in capsys.readouterr().out
    assert main(["--nccl-log", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "ok"
    (tmp_path / "m.log").write_text("h:1:2 [0] NCCL WARN Cuda failure 2 'out of memory'\n")
    assert main(["--nccl-log", str(tmp_path / "m.log")]) == 1


def test_command_shapes(monkeypatch, capsys):
    monkeypatch.setattr(report, "gather", lambda **_: BROKEN)
    assert main([]) == 1
    assert capsys.readouterr().out.startswith("nbdist doctor: 1 to mend")
    assert main(["--json"]) == 1
    value = json.loads(capsys.readouterr().out)
    assert Facts.from_json(value["facts"]) == BROKEN
    assert main(["--report"]) == 1
    assert "```json" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--facts", "/nowhere"], ["--nccl-log", "/nowhere"], ["--nodes", "0"]])
def test_command_refuses_in_one_line(words, capsys):
    assert main(words) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


# ---- bandwidth


def test_bus_bandwidth_is_that_of_nccl_tests():
    assert bus_factor("all_reduce", 8) == 1.75
    assert bus_factor("all_gather", 8) == bus_factor("reduce_scatter", 8) == 0.875
    assert bus_factor("all_reduce", 1) == 0


def both_ways(count: int, links: int) -> tuple[Link, ...]:
    return tuple(
        Link(first=i, second=j, path="NODE", nvlinks=links, peer=True)
        for i in range(count)
        for j in range(i + 1, count)
    )


@pytest.mark.parametrize(
    ("gpus", "links", "version", "limit", "text"),
    [
        (8, 18, 6, 450.0, "18 NVLinks × 25 GB/s"),  # H100 behind switches
        (8, 12, 5, 300.0, "12 NVLinks × 25 GB/s"),  # A100 behind switches
        (4, 4, 5, 300.0, "12 NVLinks × 25 GB/s"),  # four A100 joined directly, 4 links a pair
        (2, 18, 7, 900.0, "18 NVLinks × 50 GB/s"),
        (2, 4, 99, None, ""),
    ],
)
def test_limit_of_nvlink(gpus, links, version, limit, text):
    health = [Health(index=i, nvlink_version=version) for i in range(gpus)]
    assert link_limit(both_ways(gpus, links), health) == (limit, text)


def test_limit_of_pcie():
    health = [Health(index=0, pcie_width_max=16, pcie_gt_s=16.0), Health(index=1, pcie_width_max=8, pcie_gt_s=16.0)]
    limit, text = link_limit(both_ways(2, 0), health)
    assert limit == pytest.approx(15.75, abs=0.01)
    assert text == "PCIe, 8 lanes at 16 GT/s"
    assert link_limit((), health[:1]) == (None, "")
    assert link_limit((), ()) == (None, "")


def test_table():
    rows = (
        Row(operation="all_reduce", num_bytes=1 << 29, time_s=2.5e-3, algbw_gb_s=214.7, busbw_gb_s=375.8),
        Row(operation="all_gather", num_bytes=4096, time_s=1e-5, algbw_gb_s=0.41, busbw_gb_s=None),
    )
    table = Bandwidth(
        world_size=8, backend="nccl", device="NVIDIA H100", rows=rows, limit_gb_s=450.0, limit="18 NVLinks"
    )
    assert "all_reduce  512 MiB       2500           215           376" in str(table)
    assert str(table).endswith("all_reduce reached 376 GB/s bus bandwidth, 84% of 450 GB/s (18 NVLinks)")
    assert "<td>4 KiB</td>" in table._repr_html_()
    assert Bandwidth.from_json(json.loads(json.dumps(table.to_json()))) == table
    assert Bandwidth(world_size=1, backend="gloo", device="cpu", rows=()).summary == "one rank: nothing is sent"
