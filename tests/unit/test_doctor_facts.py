"""Gathering facts: from made-up /proc, /sys and cgroup trees, and back and forth through JSON."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from fixtures.machines import machine

from nbdist.doctor import facts as facts_module
from nbdist.doctor.facts import Facts, Health
from nbdist.doctor.machine import Machine
from nbdist.errors import InputError


def tree(root: Path, files: dict[str, str | bytes]) -> Machine:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return Machine(root)


# ---- control groups


def test_cgroup_v2_takes_the_tightest_limit_on_the_way_up(tmp_path):
    found = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/user.slice/job.scope\n",
            "sys/fs/cgroup/user.slice/job.scope/memory.max": "max\n",
            "sys/fs/cgroup/user.slice/memory.max": "4294967296\n",
            "sys/fs/cgroup/user.slice/job.scope/cpu.max": "300000 100000\n",
            "sys/fs/cgroup/user.slice/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/user.slice/job.scope/pids.max": "512\n",
        },
    )
    assert (found.memory_limit(), found.cpu_quota(), found.pids_limit()) == (4 << 30, 1.5, 512)


def test_cgroup_v2_inside_a_container(tmp_path):
    found = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/memory.max": "max\n",
            "sys/fs/cgroup/cpu.max": "max 100000\n",
            "sys/fs/cgroup/pids.max": "max\n",
        },
    )
    assert (found.memory_limit(), found.cpu_quota(), found.pids_limit()) == (None, None, -1)


def test_cgroup_v1_with_the_hosts_path_inside_a_container(tmp_path):
    found = tree(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/docker/ab12\n3:cpu,cpuacct:/docker/ab12\n2:pids:/docker/ab12\n0::/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "8589934592\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "250000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/pids/pids.max": "100\n",
        },
    )
    assert (found.memory_limit(), found.cpu_quota(), found.pids_limit()) == (8 << 30, 2.5, 100)


def test_cgroup_v1_without_limits(tmp_path):
    found = tree(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/\n1:cpu:/\nnonsense\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
    )
    assert (found.memory_limit(), found.cpu_quota(), found.pids_limit()) == (None, None, None)


def test_nothing_to_read(tmp_path):
    found = Machine(tmp_path)
    assert found.memory_limit() is None
    assert found.cpu_quota() is None
    assert found.pci_gpus() is None
    assert found.shm() is None
    assert found.numa_cpus([0]) == {}
    assert found.pci("00000000:17:00.0") is None
    assert found.iommu([]) is None
    assert found.acs([]) is None


@pytest.mark.parametrize(
    ("file", "content", "kind"),
    [
        (".dockerenv", "", "docker"),
        ("run/.containerenv", "", "podman"),
        ("proc/1/cgroup", "1:name=systemd:/kubepods/besteffort/pod1\n", "kubepods"),
        ("proc/1/cgroup", "0::/init.scope\n", "none"),
    ],
)
def test_container(tmp_path, monkeypatch, file, content, kind):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert tree(tmp_path, {file: content}).container() == kind


# ---- the PCI bus


def gpu_below_a_bridge(root: Path, *, acs: int | None, group: str | None) -> Machine:
    """A GPU in a slot with 8 of its 16 lanes, behind one bridge."""
    slot = "sys/devices/pci0000:00/0000:00:01.0"
    card = f"{slot}/0000:17:00.0"
    space = bytearray(512)
    if acs is not None:
        struct.pack_into("<I", space, 256, 0x0001 | (0x140 << 20))  # another capability first
        struct.pack_into("<I", space, 0x140, 0x000D)
        struct.pack_into("<H", space, 0x140 + 6, acs)
    files: dict[str, str | bytes] = {
        f"{slot}/config": bytes(space) if acs is not None else bytes(64),
        f"{slot}/max_link_width": "8\n",
        f"{slot}/max_link_speed": "32.0 GT/s PCIe\n",
        f"{card}/current_link_width": "8\n",
        f"{card}/max_link_width": "16\n",
        f"{card}/max_link_speed": "16.0 GT/s PCIe\n",
        f"{card}/numa_node": "0\n",
        f"{card}/vendor": "0x10de\n",
        f"{card}/class": "0x030200\n",
    }
    if group is not None:
        files[f"{card}/iommu_group/type"] = group + "\n"
    found = tree(root, files)
    listed = root / "sys/bus/pci/devices"
    listed.mkdir(parents=True)
    (listed / "0000:17:00.0").symlink_to(root / card)
    return found


def test_gpu_on_the_bus(tmp_path):
    found = gpu_below_a_bridge(tmp_path, acs=0b1100, group="DMA-FQ")
    card = found.pci("00000000:17:00.0")
    assert card is not None
    assert found.pci_gpus() == 1
    assert found.pcie(card) == {"pcie_width": 8, "pcie_width_max": 8, "pcie_gt_s": 16.0, "numa_node": 0}
    assert found.iommu([card]) == "translated"
    assert found.acs([card]) is True


@pytest.mark.parametrize(("acs", "answer"), [(0, False), (0b0011, False), (0b0100, True), (None, None)])
def test_access_control_services(tmp_path, acs, answer):
    found = gpu_below_a_bridge(tmp_path, acs=acs, group="identity")
    card = found.pci("00000000:17:00.0")
    assert found.acs([card]) is answer
    assert found.iommu([card]) == "passthrough"


def test_no_iommu(tmp_path):
    found = gpu_below_a_bridge(tmp_path, acs=0, group=None)
    assert found.iommu([found.pci("00000000:17:00.0"), None]) == "off"


def test_memory_nodes(tmp_path):
    nodes = {"sys/devices/system/node/node0/cpulist": "0-3,8\n", "sys/devices/system/node/node1/cpulist": "4-7\n"}
    assert tree(tmp_path, nodes).numa_cpus([0, 1, 8]) == {"0": 3, "1": 0}


# ---- files that hide modules


def test_shadows(tmp_path):
    for name in ("torch.py", "helper.py", "queue.py", "notes.txt", "test.py", "sys.py"):
        (tmp_path / name).write_text("")
    for folder in ("numpy", "anywidget", "nbdist/doctor"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "numpy/__init__.py").write_text("")
    (tmp_path / "nbdist/__init__.py").write_text("")
    # anywidget has no __init__.py: the real package comes first; nbdist is the source tree itself.
    assert [Path(p).name for p in facts_module._shadows(tmp_path)] == ["numpy", "queue.py", "torch.py"]
    assert facts_module._shadows(tmp_path / "missing") == ()


# ---- JSON


@pytest.mark.parametrize(
    "facts",
    [
        Facts(),
        machine(),
        machine(addresses={"eth0": "10.0.0.1"}, cgroup_cpu_quota=2.0),
        Facts(
            health=(Health(index=0, pcie_gt_s=16, numa_node=1),), numa_cpus={"0": 4}, hostname_addresses=("10.0.0.1",)
        ),
    ],
)
def test_json_and_back(facts):
    assert Facts.from_json(json.loads(json.dumps(facts.to_json()))) == facts


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"shm": 1}, "unknown field 'shm'"),
        ({"nodes": "2"}, "facts.nodes: expected int, got str"),
        ({"nodes": True}, "expected int, got bool"),
        ({"torch": {"version": 2}}, "facts.torch.version: expected str"),
        ({"torch": {"peers": [[1]]}}, "expected bool"),
        ([], "facts: expected Facts, got list"),
    ],
)
def test_json_of_something_else(value, message):
    with pytest.raises(InputError, match=message.replace("[", r"\[")):
        Facts.from_json(value)


def test_least_limit():
    assert facts_module._least(-1, None) == -1
    assert facts_module._least(-1, 100, None) == 100
    assert facts_module._least(None) is None
