"""The doctor's checks over made-up machines: what they say, and that a healthy one is left alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fixtures.machines import GIB, machine, with_gpus

from nbdist.doctor import gpu
from nbdist.doctor.checks import check, link_table
from nbdist.doctor.facts import Facts, Health, Torch, outside_address
from nbdist.doctor.finding import Finding


def attention(facts: Facts) -> list[Finding]:
    """What a user is bothered with."""
    return [f for f in check(facts) if f.verdict in ("warn", "fail")]


def only(facts: Facts, name: str, verdict: str) -> Finding:
    """The one finding of that name; no other asks for attention."""
    found = [f for f in check(facts) if f.name == name and f.verdict == verdict]
    assert len(found) == 1, check(facts)
    assert [f for f in attention(facts) if f not in found] == []
    return found[0]


def whole(finding: Finding) -> str:
    return " | ".join((finding.fact, finding.matters, finding.remedy))


@pytest.mark.case("EN14")
def test_a_healthy_machine_is_left_alone():
    facts = machine(host_cpus=64, host_mem=512 * GIB, addresses={"lo": "127.0.0.1", "eth0": "192.168.4.7"})
    assert {f.verdict for f in check(facts)} == {"ok"}


def test_unknown_facts_are_not_judged():
    assert [(f.name, f.verdict) for f in check(Facts())] == [("variables", "ok")]


# ---- shared memory, limits


@pytest.mark.case("EN01")
def test_dockers_shared_memory():
    said = whole(only(machine(shm_total=64 << 20, shm_free=64 << 20, in_container=True), "shared memory", "fail"))
    for text in ("64 MiB", "64 MB", "NCCL", "DataLoader", "--shm-size=1g", "--ipc=host"):
        assert text in said


def test_shared_memory_without_gpus():
    facts = machine(gpus=0, shm_total=64 << 20, shm_free=64 << 20)
    assert only(facts, "shared memory", "warn")
    assert only(replace(facts, loader_workers=4), "shared memory", "fail")


def test_full_shared_memory():
    assert "only 1 MiB left" in only(machine(shm_free=1 << 20), "shared memory", "warn").fact


@pytest.mark.case("EN09")
def test_container_limits_are_the_ones_that_hold():
    facts = machine(host_cpus=64, cgroup_cpu_quota=1.5, host_mem=256 * GIB, cgroup_mem=4 * GIB, in_container=True)
    cpus = whole(only(facts, "CPUs", "warn"))
    assert "1.5 CPUs" in cpus
    assert "4 ranks x 4 loader workers do not fit" in cpus
    assert "OMP_NUM_THREADS=1" in cpus
    memory = next(f for f in check(facts) if f.name == "memory")
    assert (memory.verdict, memory.fact) == ("info", "4 GiB (container limit; the machine has 256 GiB)")


def test_cpus_left_by_an_affinity():
    facts = replace(machine(host_cpus=64), cpus_allowed=8)
    assert whole(only(facts, "CPUs", "info")).endswith("room for 1 DataLoader workers per rank | ")


@pytest.mark.case("EN13")
@pytest.mark.parametrize(("nodes", "verdict"), [(2, "warn"), (1, "info")])
def test_small_limits(nodes, verdict):
    found = {f.name: f for f in check(machine(memlock="65536", nofile=256, nodes=nodes)) if f.verdict != "ok"}
    assert found["locked memory"].verdict == verdict
    assert "64 KiB" in found["locked memory"].fact
    assert ("memlock=-1" in found["locked memory"].remedy) == (nodes == 2)
    assert found["open files"].verdict == "warn"
    assert "Too many open files" in found["open files"].matters
    assert "LimitNOFILE" in found["open files"].remedy
    assert len(found) == 2


def test_few_processes():
    assert "--pids-limit" in only(replace(machine(), processes=100), "processes", "warn").remedy


# ---- driver and build


@pytest.mark.case("EN03")
def test_driver_older_than_torchs_cuda():
    facts = machine(driver="470.199.02", driver_cuda=11040, cuda_available=False)
    said = whole(only(facts, "driver", "fail"))
    assert "driver 470.199.02 supports CUDA 11.4, torch was built for 12.8" in said
    assert "is_available() is False for that reason" in said
    assert "gloo" in said
    assert "driver 525 or newer" in said


def test_minor_version_compatibility():
    assert attention(machine(driver="535.104.05", driver_cuda=12020)) == []


def test_forward_compatibility_package_is_believed():
    assert attention(machine(driver="470.199.02", driver_cuda=11040, cuda_available=True)) == []


@pytest.mark.case("EN04")
def test_cpu_wheel_on_a_gpu_machine():
    facts = machine(torch="2.13.0+cpu", torch_cuda=None, nccl_torch=None, nccl_loaded=None, cuda_available=False)
    said = whole(only(facts, "torch", "warn"))
    assert "4 GPUs present, but torch 2.13.0+cpu cannot use them: the wheel is a CPU build" in said
    assert "the driver is not the cause" in said


def test_cuda_does_not_come_up_for_another_reason():
    torch = Torch(
        version="2.12", cuda="12.8", nccl="2.28.9", cuda_available=False, cuda_error="system not yet initialized"
    )
    said = whole(only(replace(machine(), torch=torch), "CUDA", "fail"))
    assert "system not yet initialized" in said
    assert "fabricmanager" in said


@pytest.mark.parametrize(
    ("capability", "architectures", "runs"),
    [
        ((6, 1), ("sm_75", "sm_80", "sm_90", "compute_90"), False),
        ((8, 9), ("sm_80", "sm_90"), True),
        ((9, 0), ("sm_90a",), True),
        ((12, 0), ("sm_80", "compute_90"), True),
        ((10, 3), ("sm_100f",), True),
        ((8, 0), ("sm_86",), False),
    ],
)
def test_kernels_for_a_gpu(capability, architectures, runs):
    torch = Torch(
        version="2.12",
        cuda="13.0",
        nccl="2.28.9",
        cuda_available=True,
        capabilities=(capability,),
        architectures=architectures,
    )
    facts = replace(with_gpus(gpu.Device(index=0, name="X"), driver="590.1"), torch=torch)
    assert [f.name for f in attention(facts)] == ([] if runs else ["torch"])


def test_torch_missing_or_broken():
    missing = Facts(torch=Torch(error="ModuleNotFoundError: No module named 'torch'"))
    assert only(missing, "torch", "fail").remedy == "pip install torch"
    broken = Facts(torch=Torch(error="OSError: libcudart.so.13: cannot open shared object file"))
    assert "libcudart" in only(broken, "torch", "fail").fact


@pytest.mark.case("SP08")
def test_file_that_hides_torch():
    said = whole(only(replace(machine(), shadows=("/work/nb/torch.py",)), "file names", "fail"))
    assert said.startswith("/work/nb/torch.py hides the library torch")
    assert only(replace(machine(), shadows=("/work/nb/queue.py",)), "file names", "warn")


def test_another_nccl_than_torchs():
    facts = machine(nccl_loaded="2.18.3")
    assert "NCCL 2.18.3 is loaded, torch came with 2.28.9" in only(facts, "NCCL", "warn").fact


# ---- variables, interfaces, names


@pytest.mark.case("EN05")
def test_left_over_variables():
    env = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_SOCKET_IFNAME": "eth9", "NCCL_IB_DISABLE": "1",
           "NCCL_DEBUG": "INFO"}  # fmt: skip
    found = [f for f in check(machine(env=env, interfaces=["lo", "enp1s0"])) if f.verdict not in ("ok", "skipped")]
    said = {f.fact.split("=")[0]: (f.verdict, whole(f)) for f in found}
    assert {name: verdict for name, (verdict, _) in said.items()} == {
        "NCCL_P2P_DISABLE": "warn",
        "NCCL_SHM_DISABLE": "warn",
        "NCCL_SOCKET_IFNAME": "warn",
        "NCCL_IB_DISABLE": "info",
    }
    assert "slow" in said["NCCL_P2P_DISABLE"][1]
    assert "falls to sockets on one host" in said["NCCL_SHM_DISABLE"][1]
    assert "no such interface (this machine has lo, enp1s0)" in said["NCCL_SOCKET_IFNAME"][1]


@pytest.mark.parametrize(
    "env",
    [
        {"NCCL_P2P_DISABLE": "0", "NCCL_IB_DISABLE": "0", "CUDA_LAUNCH_BLOCKING": "0", "NCCL_DEBUG": "INFO"},
        {"NCCL_SOCKET_IFNAME": "enp"},
        {"NCCL_SOCKET_IFNAME": "=enp1s0"},
        {"NCCL_SOCKET_IFNAME": "^docker,lo"},
        {"NCCL_SOCKET_IFNAME": "eth,enp"},
        {"GLOO_SOCKET_IFNAME": "enp1s0"},
    ],
)
def test_variables_that_do_no_harm(env):
    assert attention(machine(env=env, interfaces=["lo", "enp1s0"])) == []


@pytest.mark.case("SP15")
def test_gloo_on_an_interface_that_is_not_there():
    facts = machine(env={"GLOO_SOCKET_IFNAME": "nosuch0"}, interfaces=["lo", "eth0"])
    said = whole(only(facts, "variables", "fail"))
    assert "GLOO_SOCKET_IFNAME=nosuch0: no such interface" in said


@pytest.mark.parametrize(
    ("name", "value"),
    [("CUDA_LAUNCH_BLOCKING", "1"), ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"), ("NCCL_P2P_DISABLE", "true")],
)
def test_variables_that_do_harm(name, value):
    assert only(machine(env={name: value}), "variables", "warn").fact == f"{name}={value} is set"


def test_infiniband_switched_off_matters_between_nodes():
    assert only(machine(env={"NCCL_IB_DISABLE": "1"}, nodes=2), "variables", "warn")


@pytest.mark.case("EN11")
def test_host_name():
    unresolved = only(machine(resolves={}), "host name", "warn")
    assert "on one node all works" in unresolved.matters
    loopback = machine(resolves={"n7": "127.0.1.1"}, addresses={"enp1s0": "10.2.0.7", "lo": "127.0.0.1"})
    assert attention(loopback) == []
    assert outside_address(loopback) == "10.2.0.7"
    assert "use 10.2.0.7 as MASTER_ADDR" in only(replace(loopback, nodes=2), "host name", "warn").remedy


def test_outside_address_prefers_the_names_own_and_no_bridge():
    addresses = {
        "docker0": ("172.17.0.1",),
        "eth0": ("10.0.0.5",),
        "ib0": ("10.8.0.5", "fe80::1"),
        "lo": ("127.0.0.1",),
    }
    assert outside_address(Facts(addresses=addresses)) == "10.0.0.5"
    assert outside_address(Facts(addresses=addresses, hostname="a", hostname_addresses=("10.8.0.5",))) == "10.8.0.5"
    assert outside_address(Facts(addresses={"lo": ("127.0.0.1", "::1")})) is None


@pytest.mark.case("SP12")
def test_a_slurm_job_is_information():
    env = {"SLURM_JOB_ID": "42", "SLURM_NTASKS": "4", "SLURM_JOB_NUM_NODES": "2", "SLURM_PROCID": "0"}
    facts = machine(env=env)
    assert attention(facts) == []
    assert "inside a Slurm job: 2 nodes, 4 tasks" in [f.fact for f in check(facts)]


# ---- GPUs and links


@pytest.mark.case("EN07")
def test_peer_access_behind_acs_and_iommu():
    facts = machine(nvlink=False, acs=True, iommu="translated", peer_access=[[1] * 4] * 4)
    said = whole(only(facts, "P2P", "warn"))
    for text in ("ACS is on", "IOMMU translates", "hang", "NCCL_P2P_DISABLE=1", "iommu=pt"):
        assert text in said
    assert attention(machine(nvlink=True, acs=True, iommu="translated")) == []
    assert attention(machine(nvlink=False, acs=True, iommu="translated", peer_access=[[0] * 4] * 4)) == []
    assert attention(machine(nvlink=False, acs=False, iommu="passthrough", peer_access=[[1] * 4] * 4)) == []


def test_no_peer_access_is_information():
    facts = machine(nvlink=False, peer_access=[[0] * 4] * 4)
    assert attention(facts) == []
    assert "0-1, 0-2" in only(facts, "P2P", "info").fact


def test_what_cuda_says_of_peers_counts_more_than_the_driver():
    facts = machine(nvlink=False)
    torch = Torch(version="2", cuda="12.8", nccl="2.28.9", cuda_available=True, uuids=tuple(f"GPU-{i}" for i in range(4)),
                  peers=tuple(tuple(i == j for j in range(4)) for i in range(4)))  # fmt: skip
    assert only(replace(facts, torch=torch), "P2P", "info")


def test_nvlink_between_some():
    facts = machine()
    links = tuple(replace(link, nvlinks=4 if link.second - link.first == 1 else 0) for link in facts.links)
    assert "0-2, 0-3, 1-3" in only(replace(facts, links=links), "NVLink", "info").fact


def test_link_table():
    facts = machine(gpus=2)
    drawn = "\n".join(link_table(facts))
    assert "GPU0" in drawn
    assert "NV12" in drawn
    assert link_table(machine(gpus=1)) == []
    bare = replace(facts, links=(gpu.Link(first=0, second=1, path="SYS", nvlinks=None, peer=False),))
    assert "SYS!P2P" in "\n".join(link_table(bare))


A100 = {"name": "NVIDIA A100-SXM4-80GB", "memory_total_bytes": 80 * GIB}
TWO = tuple(gpu.Device(index=i, uuid=f"GPU-{i}", **A100) for i in range(2))


@pytest.mark.case("NV01")
def test_no_gpu_is_said_once():
    facts = Facts(torch=Torch(version="2", gloo=True, cuda_available=False),
                  gpus=gpu.Snapshot(reason=gpu.NO_GPU, error="LibraryNotFound"), pci_gpus=0)  # fmt: skip
    said = [f for f in check(facts) if f.verdict not in ("ok", "skipped")]
    assert [(f.verdict, f.fact) for f in said] == [("info", "no GPU: gloo on CPU (no NVIDIA driver/GPU found)")]
    assert {f.name for f in check(facts) if f.verdict == "skipped"} == {"driver", "NCCL", "P2P", "NVLink"}


@pytest.mark.case("NV02")
def test_driver_and_library_differ():
    reason = "driver and NVML library differ (kernel module not reloaded): reboot, or restart the container"
    facts = Facts(gpus=gpu.Snapshot(reason=reason, error="LibRmVersionMismatch"))
    finding = only(facts, "GPUs", "fail")
    assert finding.fact == "driver and NVML library differ (kernel module not reloaded)"
    assert finding.remedy == "reboot, or restart the container"
    assert "18" not in whole(finding)


@pytest.mark.parametrize(("container", "remedy"), [("docker", "--gpus all"), ("none", "install the NVIDIA driver")])
def test_gpus_on_the_bus_without_a_driver(container, remedy):
    facts = Facts(gpus=gpu.Snapshot(reason=gpu.NO_GPU, error="LibraryNotFound"), pci_gpus=8, container=container)
    finding = only(facts, "GPUs", "warn")
    assert "8 NVIDIA GPUs on the PCI bus" in finding.fact
    assert remedy in finding.remedy


@pytest.mark.case("NV08")
@pytest.mark.parametrize("value", ["", "-1"])
def test_hidden_gpus(value):
    facts = with_gpus(*TWO, variables={"CUDA_VISIBLE_DEVICES": value})
    assert only(facts, "visible GPUs", "info").fact == f'GPUs hidden by CUDA_VISIBLE_DEVICES="{value}"'
    assert "gloo on CPU" in whole(only(facts, "visible GPUs", "info"))


@pytest.mark.case("NV09")
def test_repeated_gpu():
    finding = only(with_gpus(*TWO, variables={"CUDA_VISIBLE_DEVICES": "0,0"}), "visible GPUs", "warn")
    assert "repeats 0" in finding.fact


@pytest.mark.case("NV12")
def test_gpu_that_does_not_exist():
    finding = only(with_gpus(*TWO, variables={"CUDA_VISIBLE_DEVICES": "0,7,1"}), "visible GPUs", "warn")
    assert "entry 7 does not exist" in finding.fact
    assert "entries after it are ignored" in finding.fact


@pytest.mark.case("NV07")
def test_reordered_gpus():
    env = {"CUDA_VISIBLE_DEVICES": "1,0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    finding = only(with_gpus(*TWO, variables=env), "visible GPUs", "info")
    assert finding.fact == "cuda:0 is GPU 1, cuda:1 is GPU 0 of nvidia-smi"


@pytest.mark.case("NV14")
def test_different_cards():
    cards = (gpu.Device(index=0, uuid="GPU-a", name="Small"), gpu.Device(index=1, uuid="GPU-b", name="Large"))
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in only(with_gpus(*cards), "visible GPUs", "info").remedy
    torch = Torch(version="2", cuda="12.6", nccl="2.28.9", cuda_available=True, uuids=("b", "a"))
    known = replace(with_gpus(*cards), torch=torch)
    assert only(known, "visible GPUs", "info").fact == "cuda:0 is GPU 1, cuda:1 is GPU 0 of nvidia-smi"


@pytest.mark.case("NV05")
def test_mig():
    parts = tuple(gpu.Device(index=0, uuid=f"MIG-{i}", name="A100 (MIG)", gpu_instance=7 + i) for i in range(2))
    divided = gpu.Device(index=0, uuid="GPU-0", mig=True, instances=parts, **A100)
    facts = with_gpus(divided, variables={"CUDA_VISIBLE_DEVICES": "MIG-0,MIG-1"}, count=1)
    assert attention(facts) == []
    assert [f.verdict for f in check(facts) if f.name in ("MIG", "visible GPUs")] == ["info", "info"]


def test_torch_counts_other_gpus():
    assert "torch counts 1 GPUs where 2" in only(with_gpus(*TWO, count=1), "CUDA", "warn").fact


@pytest.mark.parametrize(
    ("health", "name", "verdict"),
    [
        ({"ecc_errors": 3}, "memory errors", "warn"),
        ({"remap_failed": True}, "memory errors", "fail"),
        ({"remap_pending": True}, "memory errors", "warn"),
        ({"compute_mode": "Prohibited"}, "compute mode", "fail"),
        ({"compute_mode": "Exclusive_Process"}, "compute mode", "info"),
        ({"pcie_width": 4, "pcie_width_max": 16}, "PCIe", "warn"),
    ],
)
def test_gpu_health(health, name, verdict):
    assert only(with_gpus(*TWO, health=(Health(index=1, **health),)), name, verdict).fact.startswith("GPU 1")


def test_slowed_clocks():
    hot = replace(TWO[0], throttle=("temperature (hardware)", "power limit"))
    assert only(with_gpus(hot), "clocks", "warn").fact == "GPU 0 is slowed down: temperature (hardware)"
    assert attention(with_gpus(replace(TWO[0], throttle=("power limit",)))) == []


def test_other_processes():
    mine, other = gpu.Process(pid=7, used_bytes=GIB), gpu.Process(pid=8, used_bytes=2 * GIB)
    used = replace(TWO[0], processes=(mine, other), memory_used_bytes=3 * GIB)
    finding = only(with_gpus(used, own_pids=(7,)), "other processes", "info")
    assert finding.fact == "GPU 0: 1 other process, 2.0 GiB"
    full = replace(used, processes=(gpu.Process(pid=1, used_bytes=None),), memory_used_bytes=70 * GIB)
    assert only(with_gpus(full), "other processes", "warn").fact == "GPU 0: 1 other process"


def test_cpus_far_from_the_gpu():
    facts = with_gpus(TWO[0], health=(Health(index=0, numa_node=1),), numa_cpus={"0": 16, "1": 0})
    assert only(facts, "NUMA", "info")


# ---- Jupyter, memory


@pytest.mark.parametrize(
    ("packages", "extensions", "verdict"),
    [
        (
            {"ipywidgets": "8", "anywidget": "0.9", "jupyterlab": "4"},
            ("anywidget", "@jupyter-widgets/jupyterlab-manager"),
            "ok",
        ),
        ({"ipywidgets": "8", "anywidget": "0.9", "jupyterlab": "4"}, ("@jupyter-widgets/jupyterlab-manager",), "warn"),
        ({"ipywidgets": "8", "anywidget": "0.9"}, (), "info"),
        ({"jupyterlab": "4"}, (), "warn"),
    ],
)
def test_widgets(packages, extensions, verdict):
    facts = replace(machine(), packages=packages, labextensions=extensions)
    assert [f.verdict for f in check(facts) if f.name == "Jupyter"] == [verdict]
