"""What NVML is asked and how CUDA's numbering follows: real pynvml on a compiled stand-in for the driver's library."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_nvml
import pytest
from fake_nvml import case

from nbdist.doctor.gpu import Device, Snapshot, explain_memory
from nbdist.doctor.visible import visible

GB = 2**30
Play = Callable[..., Any]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = fake_nvml.build(tmp_path_factory.mktemp("nvml"))
    if built is None:
        pytest.skip("no C compiler to build the stand-in for libnvidia-ml.so.1")
    return built


@pytest.fixture
def play(library: Path) -> Play:
    def run(facts: dict[str, Any], code: str, env: dict[str, str] | None = None) -> Any:
        return fake_nvml.play(library, facts["nvml"], code, env)

    return run


VISIBLE = "show(visible(gpu.snapshot()))"


def seen(play: Play, name: str, env: dict[str, str] | None = None) -> dict[str, Any]:
    facts = case(name)
    return dict(play(facts, VISIBLE, facts["env"] if env is None else env))


@pytest.mark.case("NV01")
def test_no_library(play: Play) -> None:
    snapshot = play(case("NV01"), "show(gpu.snapshot())")
    assert snapshot["reason"] == "no NVIDIA driver/GPU found"
    assert snapshot["error"] == "LibraryNotFound"
    assert snapshot["devices"] == []
    assert seen(play, "NV01") == {"devices": [], "reason": "no NVIDIA driver/GPU found", "notes": []}
    assert play(case("NV01"), "show([gpu.Reader.of_uuid('GPU-1'), gpu.links()])") == [None, []]


@pytest.mark.case("NV02")
def test_driver_and_library_differ(play: Play) -> None:
    snapshot = play(case("NV02"), "show(gpu.snapshot())")
    assert snapshot["reason"].startswith("driver and NVML library differ (kernel module not reloaded): reboot")
    assert snapshot["error"] == "LibRmVersionMismatch"
    assert "18" not in snapshot["reason"]


@pytest.mark.case("NV05")
def test_mig_instance_is_the_gpu(play: Play) -> None:
    result = seen(play, "NV05")
    (gpu,) = result["devices"]
    assert (gpu["memory_total_bytes"], gpu["memory_used_bytes"]) == (10 * GB, 1 * GB)
    assert gpu["load_percent"] is None
    assert gpu["reasons"]["load_percent"] == "n/a (MIG)"
    assert gpu["name"] == "NVIDIA A100-SXM4-80GB (MIG)"
    assert any("one MIG instance" in note for note in result["notes"])


@pytest.mark.case("NV05")
def test_what_a_mig_parent_refuses_is_asked_once(play: Play) -> None:
    code = """
reader = next(iter(gpu._readers(gpu._nvml.open()[0])))
readings = [reader.read() for _ in range(3)]
library = ctypes.CDLL("libnvidia-ml.so.1")
library.fake_nvml_asked.restype = ctypes.c_char_p
show([library.fake_nvml_asked().decode().splitlines(), [r.reasons["memory_used_bytes"] for r in readings]])
"""
    asked, reasons = play(case("NV05"), code)
    assert asked.count("memory 0") == 1
    assert reasons == ["no permission"] * 3


@pytest.mark.case("NV05")
@pytest.mark.parametrize(
    "entry",
    [
        None,
        "0",
        "MIG-11111111-aaaa-bbbb-cccc-000000000001",
        "MIG-GPU-00000000-1111-2222-3333-444400000000/7/0",
    ],
)
def test_one_mig_instance_a_process(play: Play, entry: str | None) -> None:
    facts = case("NV05")
    for number, instance in enumerate(facts["nvml"]["devices"][0]["mig"]):
        instance["ci"] = 0
        assert number < 2
    (gpu,) = play(facts, VISIBLE, {} if entry is None else {"CUDA_VISIBLE_DEVICES": entry})["devices"]
    assert gpu["gpu_instance"] == 7


@pytest.mark.case("NV06")
def test_memory_not_told_by_the_driver(play: Play) -> None:
    (gpu,) = seen(play, "NV06")["devices"]
    assert gpu["memory_total_bytes"] is gpu["memory_used_bytes"] is gpu["power_w"] is None
    assert gpu["reasons"]["memory_used_bytes"] == gpu["reasons"]["power_w"] == "n/a from driver"
    assert gpu["load_percent"] == 12
    assert gpu["mig"] is False
    assert gpu["reasons"]["power_limit_w"] == "the driver is too old to tell"


@pytest.mark.case("NV07")
def test_reordered(play: Play) -> None:
    result = seen(play, "NV07")
    assert [(d["index"], d["load_percent"], d["memory_used_bytes"] // GB) for d in result["devices"]] == [
        (1, 88, 60),
        (0, 11, 1),
    ]
    assert result["devices"][0]["power_w"] == 90.0


@pytest.mark.case("NV08")
@pytest.mark.parametrize("value", case("NV08")["env"]["CUDA_VISIBLE_DEVICES"])
def test_hidden(play: Play, value: str) -> None:
    result = seen(play, "NV08", {"CUDA_VISIBLE_DEVICES": value})
    assert result["devices"] == []
    assert result["reason"] == f'GPUs hidden by CUDA_VISIBLE_DEVICES="{value}"'


@pytest.mark.case("NV09")
def test_repeated(play: Play) -> None:
    result = seen(play, "NV09")
    assert result["devices"] == []
    assert 'CUDA_VISIBLE_DEVICES="0,0" repeats 0' in result["reason"]


@pytest.mark.case("NV10")
def test_by_uuid(play: Play) -> None:
    (gpu,) = seen(play, "NV10")["devices"]
    assert (gpu["index"], gpu["load_percent"]) == (1, 88)


@pytest.mark.case("NV12")
def test_entry_that_does_not_exist(play: Play) -> None:
    result = seen(play, "NV12")
    assert [d["index"] for d in result["devices"]] == [0]
    (note,) = result["notes"]
    assert "entry 7 does not exist (2 GPUs), entries after it are ignored" in note


@pytest.mark.case("NV14")
def test_fastest_first(play: Play) -> None:
    facts = case("NV14")
    assert play(facts, VISIBLE)["devices"] == [None, None]  # only CUDA knows
    uuids = [device["uuid"].removeprefix("GPU-") for device in facts["torch"]["devices"]]  # as torch writes them
    devices = play(facts, f"show(visible(gpu.snapshot(), torch_uuids={uuids}))")["devices"]
    assert [d["name"] for d in devices] == ["NVIDIA GeForce RTX 4090", "NVIDIA GeForce GT 710"]
    assert devices[0]["memory_total_bytes"] == 24 * GB
    assert play(facts, f"show(gpu.Reader.of_uuid({uuids[0]!r}).read())")["memory_total_bytes"] == 24 * GB
    by_bus = play(facts, VISIBLE, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})["devices"]
    assert [d["index"] for d in by_bus] == [0, 1]


@pytest.mark.case("NV16")
def test_processes_of_a_host(play: Play) -> None:
    (gpu,) = seen(play, "NV16")["devices"]
    assert gpu["processes"] == [
        {"pid": 918273, "used_bytes": 7516192768},
        {"pid": 918274, "used_bytes": None},
        {"pid": 1, "used_bytes": None},
    ]
    code = "import os; d = gpu.snapshot().devices[0]; show([d.process_bytes(os.getpid()), d.process_bytes(918274)])"
    assert play(case("NV16"), code) == [None, None]


def test_a_lost_gpu_costs_only_itself(play: Play) -> None:
    facts = case("NV07")
    facts["nvml"]["missing_handle"] = 0
    assert [d["index"] for d in play(facts, "show(gpu.snapshot())")["devices"]] == [1]


def test_versions_throttle_and_links(play: Play) -> None:
    facts = case("NV07")
    first, second = facts["nvml"]["devices"]
    first |= {"throttle": 0x04 | 0x40 | 0x01, "temperature": 87, "links": 4, "remote": second["pci"]}
    second |= {"throttle": 0x01, "links": 4, "remote": first["pci"]}
    snapshot = play(facts, "show(gpu.snapshot())")
    assert (snapshot["driver"], snapshot["cuda_driver"]) == ("550.90.07", [12, 4])
    assert snapshot["devices"][0]["throttle"] == ["power limit", "temperature (hardware)"]
    assert snapshot["devices"][0]["temperature_c"] == 87
    assert snapshot["devices"][1]["throttle"] == []  # idle is no throttling
    assert snapshot["devices"][1]["reasons"]["temperature_c"] == "n/a from driver"
    wanted = {"first": 0, "second": 1, "path": "SYS", "nvlinks": 4, "peer": True}
    assert play(facts, "show([dataclasses.asdict(link) for link in gpu.links()])") == [wanted]
    first["remote"] = second["remote"] = "00000000:C1:00.0"  # an NVSwitch
    assert play(facts, "show(gpu.links()[0].nvlinks)") == 4


def test_no_links_to_tell(play: Play) -> None:
    (link,) = play(case("NV07"), "show([dataclasses.asdict(link) for link in gpu.links()])")
    assert link["nvlinks"] is None
    assert link["peer"] is False


# ---- CUDA_VISIBLE_DEVICES, without a driver

TWO = Snapshot(
    devices=(
        Device(index=0, uuid="GPU-aaaa1111", name="H200"),
        Device(index=1, uuid="GPU-aabb2222", name="H200"),
    )
)


@pytest.mark.parametrize(
    ("text", "indices"),
    [
        (None, [0, 1]),
        ("0", [0]),
        ("1,0", [1, 0]),
        (" 1 , 0 ", [1, 0]),
        ("1gpu,0x", [1, 0]),  # as strtoul reads them
        ("+1", [1]),
        ("0,-1,1", [0]),
        ("0,,1", [0]),
        ("0,x", [0]),
        ("none", []),
        ("2", []),
        ("0,7,0", []),  # a repetition counts wherever it stands
        ("GPU-aabb", [1]),
        ("GPU-aa", []),  # means both
        ("GPU-aabb,GPU-aaaa", [1, 0]),
        ("GPU-aabb,GPU-aabb2222", []),  # the same one twice
        ("GPU-aabb,0", [1]),
        ("GPU-nothere", []),
        ("MIG-1", []),
        ("0,GPU-aabb", [0]),
    ],
)
def test_entries(text: str | None, indices: list[int]) -> None:
    result = visible(TWO, {} if text is None else {"CUDA_VISIBLE_DEVICES": text})
    assert [d.index for d in result.devices if d] == indices
    assert (result.reason is None) == bool(indices)


def test_mig_parent_without_instances() -> None:
    result = visible(Snapshot(devices=(Device(index=0, uuid="GPU-a", name="A100", mig=True),)), {})
    assert result.devices == ()
    assert result.reason == "no GPU: GPU 0 is in MIG mode and has no instance"


@pytest.mark.case("ME08")
def test_three_numbers() -> None:
    facts = case("ME08")
    torch = facts["torch"]
    text = "\n".join(
        explain_memory(
            allocated_bytes=torch["allocated"],
            reserved_bytes=torch["reserved"],
            inactive_split_bytes=torch["inactive_split"],
            retries=torch["num_alloc_retries"],
            used_bytes=facts["nvml"]["used"],
            total_bytes=facts["nvml"]["total"],
        )
    )
    for number in ("10.0 GiB", "18.0 GiB", "8.0 GiB", "6.0 GiB", "21.5 GiB", "24.0 GiB", "3.5 GiB"):
        assert number in text
    assert "expandable_segments" in text
    assert "28.0" not in text  # allocated is part of reserved
    assert "leak" not in text


def test_memory_explained_without_numbers() -> None:
    assert explain_memory(allocated_bytes=None, reserved_bytes=None) == []
    assert explain_memory(allocated_bytes=None, reserved_bytes=None, used_bytes=GB) == ["the device has 1.0 GiB in use"]


# ---- a rank's sample, before it uses CUDA

SAMPLE = """
from types import SimpleNamespace
from nbdist.worker.memory_use import MemoryUse
show(MemoryUse(SimpleNamespace(type=TYPE, index=INDEX)).read())
"""


def sample(kind: str, index: int | None = 0) -> str:
    return SAMPLE.replace("TYPE", repr(kind)).replace("INDEX", repr(index))


@pytest.mark.case("NV07")
def test_a_rank_reads_its_own_gpu(play: Play) -> None:
    facts = case("NV07")
    values = [play(facts, sample("cuda", rank), facts["env"]) for rank in range(2)]
    assert [v["load_percent"] for v in values] == [88, 11]
    assert [v["device_used_bytes"] for v in values] == [60 * GB, 1 * GB]
    assert values[0]["device_uuid"] == "GPU-00000001-1111-2222-3333-444400000001"
    assert values[0]["allocated_bytes"] is values[0]["device_outside_bytes"] is None  # CUDA has not been used
    assert values[0]["temperature_c"] is None
    assert values[0]["device_reasons"]["temperature_c"] == "n/a from driver"


@pytest.mark.case("NV06")
def test_a_rank_without_memory_from_the_driver(play: Play) -> None:
    values = play(case("NV06"), sample("cuda"))
    assert values["device_used_bytes"] is values["device_total_bytes"] is None
    assert values["device_reasons"]["device_used_bytes"] == "n/a from driver"
    assert values["load_percent"] == 12


@pytest.mark.case("NV05")
def test_a_rank_on_a_mig_instance(play: Play) -> None:
    facts = case("NV05")
    values = play(facts, sample("cuda"), facts["env"])
    assert (values["device_total_bytes"], values["device_used_bytes"]) == (10 * GB, 1 * GB)
    assert values["device_reasons"]["load_percent"] == "n/a (MIG)"


@pytest.mark.case("NV08")
def test_a_cpu_rank_shows_no_gpu(play: Play) -> None:
    values = play(case("NV08"), sample("cpu", None), {"CUDA_VISIBLE_DEVICES": ""})
    assert values["device_reason"] == 'GPUs hidden by CUDA_VISIBLE_DEVICES=""'
    assert values["device_used_bytes"] is None
    assert play(case("NV07"), sample("cpu", None))["device_reason"] == "this rank runs on the CPU"
    assert play(case("NV02"), sample("cpu", None))["device_reason"].startswith("driver and NVML library differ")


@pytest.mark.case("NV14")
def test_which_gpu_is_not_known_before_cuda_runs(play: Play) -> None:
    values = play(case("NV14"), sample("cuda"))
    assert values["device_used_bytes"] is None
    assert values["device_reason"] == "not known before CUDA is first used"
