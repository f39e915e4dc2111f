"""What ranks start with: how many on what and why, their environment, their path."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from nbdist.errors import InputError, StartError
from nbdist.notebook import launch
from nbdist.notebook.launch import choose, notebook_folder, rank_environment, runtime_folder, shadowing_files

CPU = {"count": 0, "cuda": None, "torch": "2.13"}
FOUR = {"count": 4, "cuda": "13.0", "torch": "2.13"}
ONE = FOUR | {"count": 1}


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Which files of a driver exist."""
    found: set[str] = set()
    exists = Path.exists
    monkeypatch.setattr(
        Path,
        "exists",
        lambda p, **k: str(p) in found if str(p).startswith(("/dev", "/proc/driver")) else exists(p, **k),
    )
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return found


@pytest.mark.parametrize(
    ("n", "backend", "seen", "line"),
    [
        (None, None, CPU, "2 workers on CPU, backend gloo (no NVIDIA driver found)"),
        (3, "gloo", CPU, "3 workers on CPU, backend gloo (no NVIDIA driver found)"),
        (1, None, CPU, "1 worker on CPU, backend gloo (no NVIDIA driver found)"),
        (None, None, FOUR, "4 workers on GPU, backend nccl (4 GPUs visible)"),
        (2, "nccl", FOUR, "2 workers on GPU, backend nccl (4 GPUs visible)"),
        (None, None, ONE, "1 worker on GPU, backend nccl (1 GPU visible)"),
        (2, "gloo", FOUR, "2 workers on GPU, backend gloo (4 GPUs visible, gloo as asked)"),
        (8, "gloo", FOUR, "8 workers on GPU, backend gloo (4 GPUs visible, gloo as asked, 8 ranks share them)"),
        (
            None,
            None,
            CPU | {"error": "driver too old"},
            "2 workers on CPU, backend gloo (torch could not count GPUs: driver too old)",
        ),
    ],
)
def test_every_choice_gives_its_reason(n, backend, seen, line, devices):
    assert str(choose(n, backend, seen)) == line


@pytest.mark.parametrize(
    ("driver", "visible", "seen", "reason"),
    [
        ({"/dev/nvidiactl"}, None, CPU, "this torch is a CPU build"),
        ({"/proc/driver/nvidia/version"}, "", CPU | {"cuda": "13.0"}, "CUDA_VISIBLE_DEVICES= leaves none"),
        ({"/dev/dxg"}, "7", CPU | {"cuda": "13.0"}, "CUDA_VISIBLE_DEVICES=7 leaves none"),
        ({"/dev/nvidiactl"}, None, CPU | {"cuda": "13.0"}, "the driver shows torch no GPU"),
        (set(), "0", CPU | {"cuda": "13.0"}, "no NVIDIA driver found"),
    ],
)
def test_no_gpu_is_explained(driver, visible, seen, reason, devices, monkeypatch):
    devices |= driver
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert choose(None, None, seen).reason == reason


@pytest.mark.parametrize(
    ("n", "backend", "seen", "line"),
    [
        (0, None, CPU, "the number of ranks must be at least 1, not 0"),
        (-2, "gloo", FOUR, "the number of ranks must be at least 1, not -2"),
        (2, "mpi", CPU, "--backend takes nccl or gloo, not 'mpi'"),
        (2, "nccl", CPU, "backend nccl needs a GPU, and there is none (no NVIDIA driver found)"),
        (5, None, FOUR, "5 ranks with nccl need 5 GPUs and there are 4 GPUs: use -n 4, or --backend gloo"),
        (5, "nccl", FOUR, "5 ranks with nccl need 5 GPUs and there are 4 GPUs: use -n 4, or --backend gloo"),
        (2, None, ONE, "2 ranks with nccl need 2 GPUs and there is 1 GPU: use -n 1, or --backend gloo"),
    ],
)
def test_what_cannot_be_had_is_refused_with_the_way_out(n, backend, seen, line, devices):
    with pytest.raises(InputError) as refused:
        choose(n, backend, seen)
    assert str(refused.value).startswith(line)
    assert "\n" not in str(refused.value)


def test_a_rank_finds_torchruns_contract_and_nothing_of_the_notebooks_own():
    theirs = dict.fromkeys(launch._RENDEZVOUS, "theirs")
    env = rank_environment({**theirs, "TORCHELASTIC_RUN_ID": "x", "HOME": "/home/user", "FLAG": "1"}, 3, 4)
    assert env == {
        "HOME": "/home/user",
        "FLAG": "1",
        "RANK": "3",
        "LOCAL_RANK": "3",
        "GROUP_RANK": "0",
        "ROLE_RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "4",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_WORLD_SIZE": "4",
        "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "OMP_NUM_THREADS": "1",
    }


def test_threads_are_limited_only_where_ranks_share_the_cores():
    assert "OMP_NUM_THREADS" not in rank_environment({}, 0, 1)
    assert rank_environment({"OMP_NUM_THREADS": "7"}, 0, 2)["OMP_NUM_THREADS"] == "7"
    json.dumps(rank_environment(dict(os.environ), 0, 2))


def test_the_library_path_leaves_the_notebooks_folder_out_but_not_this_package(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", str(tmp_path), f"{tmp_path}/", "/elsewhere"])
    package = str(Path(launch.__file__).resolve().parents[2])
    assert launch._library_path() == ["/elsewhere", package]
    monkeypatch.chdir(package)
    assert launch._library_path()[-1] == package


def test_files_that_hide_a_library_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert shadowing_files() == []
    (tmp_path / "torch.py").touch()
    (tmp_path / "numpy").mkdir()
    assert shadowing_files() == [tmp_path / "torch.py"]
    (tmp_path / "numpy" / "__init__.py").touch()
    assert shadowing_files() == [tmp_path / "torch.py", tmp_path / "numpy" / "__init__.py"]
    (tmp_path / "helpers.py").touch()
    assert shadowing_files(["helpers"]) == [tmp_path / "helpers.py"]


def test_the_source_tree_hides_nothing(monkeypatch):
    monkeypatch.chdir(Path(launch.__file__).resolve().parents[2])
    assert shadowing_files() == []


def test_a_folder_that_was_removed(tmp_path, monkeypatch):
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    assert notebook_folder() == str(folder)
    folder.rmdir()
    with pytest.raises(StartError, match="the notebook's folder was removed: change to one that exists, with %cd"):
        notebook_folder()
    assert launch._library_path()
    monkeypatch.undo()


def test_no_folder_for_a_socket(monkeypatch):
    def refuse(*_: Any) -> bool:
        return False

    monkeypatch.setattr(os, "access", refuse)
    with pytest.raises(StartError, match="set XDG_RUNTIME_DIR or TMPDIR to one"):
        runtime_folder()
