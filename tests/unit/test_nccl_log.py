"""The reader of NCCL's logs: what it understands, what it must not misunderstand, and that nothing makes it raise."""

from __future__ import annotations

import random
import re

import pytest
from fixtures.nccl_text import Run
from hypothesis import given, settings
from hypothesis import strategies as st

from nbdist.doctor import nccl_log
from nbdist.doctor.nccl_log import NcclReport
from nbdist.errors import InputError


def labels(report: NcclReport, number: int = 0) -> dict[tuple[int, int], str]:
    return {pair: link.label for pair, link in report.log.communicators[number].links.items()}


def facts(report: NcclReport) -> str:
    return "\n".join(f"{f.verdict} {f.name}: {f.fact} | {f.remedy}" for f in report.findings)


@pytest.mark.case("NL01")
def test_old_format_with_bus_ids_and_direct_shared_memory():
    run = Run(version="2.10.3+cuda11.3")
    run.versions()
    run.ring_orders()
    for a, b in ((0, 1), (2, 3)):
        run.connect(a, b, "P2P/IPC", index=None)
        run.connect(b, a, "P2P/IPC", index=None)
    for a, b in ((1, 2), (3, 0)):
        run.connect(a, b, "direct shared memory")
    run.rings_connected()
    run.complete()
    report = nccl_log.parse(run.text())
    assert report.log.versions == ["2.10.3+cuda11.3"]
    assert labels(report) == {(0, 1): "P2P/IPC", (2, 3): "P2P/IPC", (1, 2): "SHM", (0, 3): "SHM"}
    assert len(report.log.communicators) == 1
    assert report.log.communicators[0].unconnected(0, 2) == "not directly connected"
    assert report.verdict == "info"
    assert "mixed" in facts(report)
    assert "cross the PCIe groups 0-1 | 2-3" in facts(report)


@pytest.mark.case("NL02")
@pytest.mark.parametrize(
    ("version", "via"),
    [
        ("2.15.5+cuda11.8", "P2P/IPC/read"),
        ("2.18.1+cuda12.1", "P2P/direct pointer"),
        ("2.27.7+cuda12.9", "P2P/CUMEM/read"),
        ("2.30.7+cuda13.0", "P2P/CUMEM/CE"),
        ("2.24.3+cuda12.6", "P2P/MNNVL"),
    ],
)
def test_all_pairs_p2p(version, via):
    report = nccl_log.parse(Run(version=version, hosts=("gpu-3.rack2.example",)).whole(via).text(shuffle=1))
    assert set(labels(report)) == {(0, 1), (1, 2), (2, 3), (0, 3)}
    assert {member.host for member in report.log.communicators[0].members.values()} == {"gpu-3.rack2.example"}
    assert facts(report).startswith("ok links: all 4 connected pairs use P2P")
    assert report.exit_status == 0


@pytest.mark.case("NL05")
def test_infiniband_with_gpudirect_and_a_proxy():
    run = Run(version="2.21.5+cuda12.4", hosts=("a1", "a2"), per_host=2)
    run.versions()
    run.start()
    run.connect(0, 1, "P2P/CUMEM")
    run.connect(2, 3, "P2P/CUMEM")
    run.connect(1, 2, "NET/IB/0/GDRDMA")
    run.connect(3, 0, "NET/IB/1(2)/GDRDMA(PCI)")
    run.rings_connected()
    run.complete()
    report = nccl_log.parse(run.text(shuffle=2))
    assert labels(report) == {(0, 1): "P2P/CUMEM", (2, 3): "P2P/CUMEM", (1, 2): "NET/IB+GDR", (0, 3): "NET/IB+GDR"}
    links = report.log.communicators[0].links
    assert links[0, 3].proxies == {2}
    assert links[0, 3].devices == {1}
    assert report.verdict == "ok"
    assert "a1: 0-1, a2: 2-3" in str(report)


def test_receive_lines_name_the_sender_first():
    run = Run(version="2.21.5+cuda12.4", hosts=("a1", "a2"), per_host=1)
    run.start()
    run.say(1, "Channel 00/0 : 0[0] -> 1[0] [receive] via NET/IB/0/GDRDMA")
    run.complete()
    report = nccl_log.parse(run.text())
    assert labels(report) == {(0, 1): "NET/IB+GDR"}
    assert len(report.log.communicators) == 1


@pytest.mark.case("NL06")
@pytest.mark.parametrize("why", [None, "NCCL_IB_DISABLE", "NCCL_NET"])
def test_sockets_between_nodes(why):
    run = Run(version="2.21.5+cuda12.4", hosts=("10-0-0-4", "10-0-0-5"), per_host=2)
    run.start()
    for rank in range(4):
        if why:
            run.say(rank, f"{why} set by environment to {'Socket' if why == 'NCCL_NET' else '1'}.")
        else:
            run.say(rank, "NET/IB : No device found.")
        run.say(rank, "NET/Socket : Using [0]enp5s0:10.0.0.1<0> [1]enp6s0:10.0.1.1<0>")
    run.ring("P2P/IPC", "NET/Socket/0")
    run.complete()
    report = nccl_log.parse(run.text())
    assert labels(report) == {(0, 1): "P2P/IPC", (2, 3): "P2P/IPC", (1, 2): "NET/Socket", (0, 3): "NET/Socket"}
    assert report.verdict == "warn"
    assert "traffic between nodes goes over TCP sockets (enp5s0, enp6s0)" in facts(report)
    assert (f"{why}=" if why else "NET/IB : No device found") in facts(report)


@pytest.mark.case("NL07")
def test_shared_memory_because_of_a_variable():
    run = Run(version="2.22.3+cuda12.6", per_host=2, hosts=("3f9c1d2e7a44",))
    for rank in range(2):
        run.say(rank, "NCCL_P2P_DISABLE set by environment to 1.")
    report = nccl_log.parse(run.whole("SHM/direct/direct").text())
    assert labels(report) == {(0, 1): "SHM"}
    assert report.log.versions == ["2.22.3+cuda12.6"]
    assert "warn links: 0-1 through host memory (SHM): NCCL_P2P_DISABLE=1 is set" in facts(report)
    assert "unset NCCL_P2P_DISABLE" in facts(report)


def test_shared_memory_without_a_variable_blames_none():
    run = Run(per_host=2)
    for rank in range(2):
        run.say(rank, "NCCL_P2P_DISABLE set by environment to 0.")
    report = nccl_log.parse(run.whole("SHM/CE/direct").text())
    assert report.verdict == "info"
    assert "no variable forbids P2P" in facts(report)


def test_network_inside_one_host():
    run = Run(per_host=2)
    for rank in range(2):
        run.say(rank, "NCCL_P2P_DISABLE set by environment to 1.")
        run.say(rank, "NCCL_SHM_DISABLE set by environment to 1.")
    report = nccl_log.parse(run.whole("NET/Socket/0").text())
    assert report.verdict == "warn"
    assert "inside one host: NCCL_P2P_DISABLE=1 and NCCL_SHM_DISABLE=1 set" in facts(report)
    assert "unset NCCL_P2P_DISABLE and NCCL_SHM_DISABLE" in facts(report)


@pytest.mark.case("NL08")
def test_eight_gpus_are_a_readable_matrix():
    run = Run(per_host=8, hosts=("hgx",))
    run.whole("P2P/CUMEM/read")
    for rank in range(8):
        run.say(rank, f"NVLS multicast support is available on dev {rank} (NVLS_NCHANNELS 16)")
        run.say(rank, f"Init timings - ncclCommInitRank: rank {rank} nranks 8 total 1.92 (kernels 0.2, rest 0.0)")
    report = nccl_log.parse(run.text(shuffle=3))
    assert len(labels(report)) == 8
    assert report.log.nvls is True
    assert report.verdict == "ok"
    drawn = str(report).splitlines()
    rows = [line for line in drawn if re.match(r"  \d  ", line)]
    assert len(rows) == 8
    assert max(map(len, drawn)) <= 120
    assert "20 pairs not directly connected (no ring or tree uses them: no fault)" in str(report)


PREFIXES = (
    "",
    "[default0]:",
    "[rank1]: ",
    "[1,2]<stdout>:",
    "\x1b[32m",
    "worker-1  | ",
    "3: ",
    "[2026-01-31 10:00:00] ",
)
NOISE = ("train:  4%|###   | 4/100 [00:04<00:10, 9.1it/s]loss 0.51", "", "Epoch 1 loss 1.98", "NCCL is great")


@pytest.mark.case("NL09")
@given(seed=st.integers(0, 2**32))
@settings(max_examples=25, deadline=None)
def test_launchers_colours_and_progress_bars_change_nothing(seed):
    rng = random.Random(seed)
    clean = Run(version="2.28.9+cuda13.0", hosts=("dgx",)).whole("P2P/CUMEM").text(shuffle=seed)
    noisy = []
    for line in clean.splitlines():
        bar = rng.choice(("", "", "train:  4%|###   | 4/100\r"))
        after = rng.choice(("", "", "\x1b[0m", "\rtrain: 5%|###", "\r"))
        noisy.append(bar + rng.choice(PREFIXES) + line + after)
        if rng.random() < 0.3:
            noisy.append(rng.choice(NOISE))
    report = nccl_log.parse("\n".join(noisy))
    assert labels(report) == dict.fromkeys([(0, 1), (1, 2), (2, 3), (0, 3)], "P2P/CUMEM")
    assert report.log.versions == ["2.28.9+cuda13.0"]
    assert len(report.log.communicators) == 1
    assert report.log.communicators[0].rings_connected


def test_two_lines_in_one():
    run = Run(hosts=("dgx",))
    clean = run.whole("P2P/CUMEM").text().splitlines()
    glued = [a + b for a, b in zip(clean[::2], clean[1::2], strict=False)]
    report = nccl_log.parse("\n".join(clean[:5] + glued))
    assert labels(report) == dict.fromkeys([(0, 1), (1, 2), (2, 3), (0, 3)], "P2P/CUMEM")
    assert {m.host for m in report.log.communicators[0].members.values()} == {"dgx"}


@pytest.mark.case("NL12")
def test_network_plugins_keep_their_names():
    run = Run(version="2.23.4+cuda12.5", hosts=("p1", "p2", "p3"), per_host=1)
    run.start()
    run.connect(0, 1, "NET/AWS Libfabric/0/GDRDMA")
    run.connect(1, 2, "NET/IBext_v8/3/GDRDMA/Shared")
    run.connect(2, 0, "NET/FasTrak/1")
    run.rings_connected()
    run.complete()
    report = nccl_log.parse(run.text())
    links = report.log.communicators[0].links
    seen = {pair: next(iter(link.transports)) for pair, link in links.items()}
    assert [(t.kind, t.name, t.gdr) for t in (seen[0, 1], seen[1, 2], seen[0, 2])] == [
        ("NET/other", "AWS Libfabric", True),
        ("NET/IB", "IBext_v8", True),
        ("NET/other", "FasTrak", False),
    ]
    assert seen[1, 2].flags == ("shared",)
    assert "Socket" not in str(report)
    assert "plugin 'AWS Libfabric', with GPUDirect RDMA" in facts(report)


def test_infiniband_without_gpudirect():
    run = Run(hosts=("a", "b"), per_host=1)
    report = nccl_log.parse(run.whole("P2P/CUMEM", "NET/IB/0").text())
    assert report.verdict == "warn"
    assert "without GPUDirect RDMA" in facts(report)


@pytest.mark.case("NL14")
@pytest.mark.parametrize("fields", ["splitCount 1", "childCount 1", "commId 0x77"])
def test_splits_are_kept_apart(fields):
    run = Run(version="2.26.5+cuda12.8", hosts=("hsdp",)).whole("P2P/IPC")
    run.split(0, [0, 1], "SHM/direct/direct", fields=fields)
    run.split(1, [2, 3], "SHM/direct/direct", fields=fields)
    report = nccl_log.parse(run.text(shuffle=5))
    world, first, second = report.log.communicators
    assert labels(report) == dict.fromkeys([(0, 1), (1, 2), (2, 3), (0, 3)], "P2P/IPC")
    assert {p: link.label for p, link in first.links.items()} == {(0, 1): "SHM"}
    assert {p: link.label for p, link in second.links.items()} == {(0, 1): "SHM"}
    assert [m.gpu for _, m in sorted(second.members.items())] == [2, 3]
    assert (first.parent, second.parent) == (world, world)
    assert "0-1 (GPUs 2-3)" in facts(report)


def test_old_communicators_without_ids_are_told_apart_by_their_gpus():
    run = Run(version="2.12.12+cuda11.6")
    for pair in ((0, 1), (2, 3)):
        for rank, (new, other) in zip(pair, ((0, 1), (1, 0)), strict=True):
            a, b = run.at(pair[new]), run.at(pair[other])
            run.say(rank, f"Channel 00 : {new}[{a}] -> {other}[{b}] via P2P/IPC")
            run.say(rank, f"comm 0x55{rank} rank {new} nranks 2 cudaDev {rank} busId {run.at(rank)} - Init COMPLETE")
    report = nccl_log.parse(run.text(shuffle=4))
    assert [sorted(m.gpu for m in c.members.values()) for c in report.log.communicators] in (
        [[0, 1], [2, 3]],
        [[2, 3], [0, 1]],
    )
    assert all(c.links[0, 1].label == "P2P/IPC" for c in report.log.communicators)


@pytest.mark.case("NL19")
def test_pairs_connected_later():
    run = Run(version="2.28.3+cuda12.9", hosts=("lazy",))
    run.versions()
    run.start()
    run.complete()
    run.connect(0, 1, "P2P/CUMEM", index=1, thread=300)
    run.connect(1, 0, "P2P/CUMEM", index=1, thread=300)
    report = nccl_log.parse(run.text(shuffle=6))
    assert labels(report) == {(0, 1): "P2P/CUMEM"}
    communicator = report.log.communicators[0]
    assert communicator.links[0, 1].indices == {1}
    assert communicator.unconnected(2, 3) == "no connection seen yet"
    assert "made for send/recv (connection index 1)" in str(report)
    assert report.verdict == "ok"


def test_rings_connected_later_by_another_thread_belong_to_the_communicator_of_these_gpus():
    run = Run(version="2.27.7+cuda12.9")
    run.start()
    run.complete()
    run.split(0, [0, 1], "SHM/direct/direct")
    run.split(1, [2, 3], "SHM/direct/direct")
    run.ring("P2P/CUMEM", thread=900)
    run.rings_connected(thread=900)
    report = nccl_log.parse(run.text())
    assert set(labels(report).values()) == {"P2P/CUMEM"}
    assert [c.rings_connected for c in report.log.communicators] == [True, False, False]


def test_lines_printed_twice():
    lines = Run().whole("P2P/CUMEM").text(shuffle=9).splitlines()
    report = nccl_log.parse("\n".join(line for line in lines for _ in range(2)))
    assert len(report.log.communicators) == 1
    assert len(labels(report)) == 4
    assert len(nccl_log.parse("\n".join(lines + lines)).log.communicators) == 1


def test_one_ranks_file_alone():
    run = Run().whole("P2P/CUMEM")
    report = nccl_log.parse("\n".join(line for rank, line in run.lines if rank == 0))
    assert labels(report) == {(0, 1): "P2P/CUMEM"}
    assert report.log.communicators[0].unconnected(2, 3) == "not in this log"
    assert report.verdict == "ok"


def test_connection_lines_alone():
    text = Run().whole("P2P/CUMEM").text()
    report = nccl_log.parse("\n".join(line for line in text.splitlines() if " via " in line))
    assert labels(report) == dict.fromkeys([(0, 1), (1, 2), (2, 3), (0, 3)], "P2P/CUMEM")
    assert "put together from connection lines alone" in str(report)


def test_the_same_address_used_again():
    run = Run(per_host=2)
    for number, via in ((1, "P2P/CUMEM"), (2, "SHM/direct/direct")):
        run.start(number=number)
        run.ring(via)
        run.complete(number=number)
    text = run.text().replace("0x550002", "0x550001")
    report = nccl_log.parse(text)
    assert sorted(c.links[0, 1].label for c in report.log.communicators) == ["P2P/CUMEM", "SHM"]


# ---- failures


@pytest.mark.case("NL15")
def test_shared_memory_too_small():
    run = Run(version="2.21.5+cuda12.4", per_host=2)
    run.versions()
    run.start()
    for rank in range(2):
        run.warn(rank, f"Error: failed to extend /dev/shm/nccl-X{rank} to 33030532 bytes", "misc/shmutils.cc:72")
        run.warn(rank, f"Error while creating shared memory segment /dev/shm/nccl-X{rank} (size 33030528)")
        run.say(rank, "transport/shm.cc:114 -> 2")
    report = nccl_log.parse(run.text(shuffle=7))
    assert not labels(report)
    assert report.exit_status == 1
    assert [f.name for f in report.findings] == ["shared memory", "initialisation"]
    assert "33 MB" in facts(report)
    assert "--shm-size" in facts(report)
    assert "--ipc=host" in facts(report)
    assert "initialisation did not finish on 2 of 2 ranks" in facts(report)


def test_last_error_as_torch_reports_it():
    report = nccl_log.parse(
        "torch.distributed.DistBackendError: NCCL error in: a.cpp:93, unhandled system error, NCCL version 2.29.3\n"
        "Last error:\nError while creating shared memory segment /dev/shm/nccl-ab (size 9637888)\n"
    )
    assert report.log.versions == ["2.29.3"]
    assert "/dev/shm is too small: a segment of 10 MB could not be made" in facts(report)


@pytest.mark.case("NL20")
def test_two_ranks_on_one_gpu():
    run = Run(version="2.24.3+cuda12.6", per_host=2)
    run.start()
    run.warn(1, "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 65000")
    run.warn(0, "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 65000")
    report = nccl_log.parse(run.text())
    assert facts(report).count("use the same GPU") == 1
    assert "ranks 0 and 1 use the same GPU (bus id 65000)" in facts(report)


@pytest.mark.parametrize(
    ("text", "name", "remedy"),
    [
        ("Bootstrap : no socket interface found", "interfaces", "NCCL_SOCKET_IFNAME"),
        ("Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory", "locked memory", "memlock"),
        ("Call to ibv_modify_qp failed with error Connection timed out", "InfiniBand", "NCCL_IB_GID_INDEX"),
        ("Failed to bind NVLink SHARP (NVLS) Multicast memory of size 2097152", "NVLS", "NCCL_NVLS_ENABLE=0"),
        ("Cuda failure 2 'out of memory'", "GPU memory", "free memory"),
        ("Cuda failure 802 'system not yet initialized'", "fabric manager", "nvidia-fabricmanager"),
        ("Cuda failure 101 'invalid device ordinal'", "GPUs", "local_rank"),
        ("Cuda failure 711 'peer mapping resources exhausted'", "P2P", "NCCL_P2P_DISABLE=1"),
        ("Cuda failure 700 'an illegal memory access was encountered'", "CUDA", "CUDA_LAUNCH_BLOCKING=1"),
        ("Message truncated : received 1024 bytes instead of 256", "ranks", "WORLD_SIZE"),
        (
            "socketStartConnect: Connect to 10.0.0.2<51823> failed : No route to host",
            "connection",
            "NCCL_SOCKET_IFNAME",
        ),
        ("Connection closed by remote peer node<37>", "connection", "failed first"),
    ],
)
def test_known_warnings_have_a_cause_and_a_remedy(text, name, remedy):
    run = Run(per_host=2)
    run.start()
    run.warn(0, text)
    finding = nccl_log.parse(run.text()).findings[0]
    assert (finding.name, finding.verdict) == (name, "fail")
    assert remedy in finding.remedy


def test_variable_behind_a_failure_is_named():
    run = Run(per_host=2)
    run.say(0, "NCCL_SOCKET_IFNAME set by environment to eth9")
    run.warn(0, "Bootstrap : no socket interface found")
    assert "NCCL_SOCKET_IFNAME=eth9 is set" in facts(nccl_log.parse(run.text()))


def test_secondary_errors_do_not_hide_the_cause():
    run = Run(per_host=2)
    run.start()
    run.warn(1, "Connection closed by remote peer node<37>")
    run.warn(0, "Cuda failure 2 'out of memory'")
    assert [f.name for f in nccl_log.parse(run.text()).findings] == ["GPU memory", "initialisation"]


def test_unknown_warnings_are_shown_as_they_are():
    run = Run(per_host=2).whole("P2P/CUMEM")
    run.warn(0, "the moon is <b>wrong</b>")
    report = nccl_log.parse(run.text())
    assert report.verdict == "warn"
    assert "the moon is <b>wrong</b>" in str(report)
    assert "<b>wrong" not in report._repr_html_()


def test_warning_with_time_and_function():
    line = "[2026-01-31 10:00:00] gpu7:12:34 [5] transport/nvls.cc:379 (nvlsAllocateMem) NCCL WARN Cuda failure 1 'x'"
    report = nccl_log.parse(line)
    assert report.log.warnings == {"Cuda failure 1 'x'": {("gpu7", 12)}}


# ---- logs that say little


@pytest.mark.case("NL17")
def test_version_only():
    report = nccl_log.parse("NCCL version 2.29.3+cuda13.0\nEpoch 0 loss 2.31\n")
    assert not report.log.communicators
    assert "2.29.3" in str(report)
    assert "this log has no connection lines; set NCCL_DEBUG=INFO before the workers start" in str(report)
    assert "P2P" not in str(report)
    assert report.exit_status == 0


@pytest.mark.case("NL18")
@pytest.mark.parametrize("text", ["", "\n", " \n\n\t\r\n", b""])
def test_empty(text):
    report = nccl_log.parse(text)
    assert "empty log" in str(report)
    assert report.exit_status == 0


def test_subsystems_that_leave_the_connections_out():
    report = nccl_log.parse("h:1:2 [0] NCCL INFO NCCL_DEBUG_SUBSYS set by environment to COLL\n")
    assert "NCCL_DEBUG_SUBSYS=COLL leaves them out" in facts(report)


def test_one_rank():
    run = Run(per_host=1)
    run.start()
    run.complete()
    assert "one rank: nothing to connect" in facts(nccl_log.parse(run.text()))


def test_files_and_folders(tmp_path):
    run = Run().whole("P2P/CUMEM")
    for rank in range(4):
        (tmp_path / f"rank{rank}.log").write_text("\n".join(line for r, line in run.lines if r == rank))
    assert labels(nccl_log.read(tmp_path)) == dict.fromkeys([(0, 1), (1, 2), (2, 3), (0, 3)], "P2P/CUMEM")
    with pytest.raises(InputError, match="expected an NCCL log"):
        nccl_log.read(tmp_path / "missing.log")


def test_many_ranks_are_drawn_with_letters_and_more_are_counted():
    wide = Run(hosts=("a", "b", "c", "d", "e"), per_host=8).whole("P2P/CUMEM", "NET/IB/0/GDRDMA")
    report = nccl_log.parse(wide.text())
    assert "P P2P, I NET/IB" in str(report)
    assert "<table>" in report._repr_html_()
    vast = Run(hosts=tuple(f"n{i}" for i in range(16)), per_host=8).whole("P2P/CUMEM", "NET/IB/0/GDRDMA")
    assert "16 pairs NET/IB+GDR" in str(nccl_log.parse(vast.text()))


def test_json():
    import json

    value = json.loads(json.dumps(nccl_log.parse(Run().whole("P2P/CUMEM").text()).to_json()))
    assert value["verdict"] == "ok"
    assert value["communicators"][0]["links"][0]["transports"][0]["name"] == "CUMEM"


# ---- nothing makes it raise


def use(report: NcclReport) -> None:
    str(report)
    report._repr_html_()
    report.to_json()


@given(data=st.binary(max_size=2000))
@settings(max_examples=100, deadline=None)
def test_any_bytes(data):
    use(nccl_log.parse(data))


PIECES = st.sampled_from(
    [
        b"\xff\xfe",
        b"\x00",
        *"""host:1:2 [0] @host:1:2 [0] a.cc:7 (f) @NCCL INFO @NCCL WARN @Channel 00/0 : @0[0] -> 1[1] @1[-1] -> 0[0] @[send] @
    [receive] @via @via P2P/@CUMEM@NET/@IB/0(2)/GDRDMA@NET/x/y@SHM/@comm 0x1 rank 0 nranks 2 @cudaDev 0 @
    nvmlDev 0 busId 1a000 @commId 0x5 @parent 0x1 @splitCount 1 color 0 key 0@- Init START@- Init COMPLETE@
    Connected all rings@    NCCL version 2.@NCCL_X set by environment to @Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1@\n@\r@
    failed to extend /dev/shm/a to 99999999999999 bytes@\x1b[31m@ @99999999999999999999@NVLS multicast support is @\u0661@
    NET/Socket : Using [0]e:@Using network """.replace("@\n    ", "@")
        .encode()
        .split(b"@"),
    ]
)


@given(pieces=st.lists(PIECES, max_size=60))
@settings(max_examples=200, deadline=None)
def test_any_order_of_what_logs_are_made_of(pieces):
    use(nccl_log.parse(b"".join(pieces)))


@given(data=st.data())
@settings(max_examples=50, deadline=None)
def test_a_log_with_bytes_changed_and_cut(data):
    text = bytearray(TYPICAL)
    for _ in range(data.draw(st.integers(0, 40))):
        text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
    use(nccl_log.parse(bytes(text[: data.draw(st.integers(0, len(text)))])))


def _typical() -> bytes:
    run = Run(hosts=("a", "b"), per_host=2).whole("P2P/CUMEM", "NET/IB/0(2)/GDRDMA")
    run.split(0, [0, 1], "SHM/direct/direct")
    run.warn(0, "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 65000")
    return run.text(shuffle=8).encode()


TYPICAL = _typical()
