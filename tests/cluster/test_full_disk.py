"""No room left: for the ranks' logs, in shared memory, in the folder where sockets lie. Each in a mount of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile

import pytest
from deadlines import START_S

HOST = """
import os, sys
import nbdist
from nbdist.errors import CellError, StartError

def fill(folder):
    with open(os.path.join(folder, "filler"), "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(512))
        except OSError:
            pass

def start(n=2):
    return nbdist.start(n, say=lambda _: None)
"""

LOGS = """
fill(os.environ["XDG_STATE_HOME"])
with start() as cluster:
    cluster.run("for i in range(2000): print(i, '.' * 100)")
    cluster.run("t = torch.ones(1); dist.all_reduce(t); print('sum', t.item())")
"""

SHARED_MEMORY = """
import numpy
with start() as cluster:
    try:
        cluster.run('''
from torch.utils.data import DataLoader, Dataset
class Big(Dataset):
    def __len__(self): return 8
    def __getitem__(self, i): return torch.zeros(1_000_000)
for batch in DataLoader(Big(), batch_size=2, num_workers=1): pass
''')
    except CellError as error:
        text = "\\n".join(error.report)
        print("told", "shared memory" in text or "shm" in text, "shm-size" in text, flush=True)
    fill("/dev/shm")
    cluster.push(large=numpy.arange(4_000_000))
    cluster.run("t = torch.ones(1); dist.all_reduce(t); print('sum', t.item(), large[-1])")
"""

SOCKETS = """
with start() as cluster:
    cluster.run("t = torch.ones(1); dist.all_reduce(t); print('sum', t.item())")
    print("meanwhile", os.listdir(os.environ["XDG_RUNTIME_DIR"]))
"""


@pytest.fixture
def played(request):
    """What a notebook prints whose folder (or /dev/shm) is a file system of 64 kB, or takes no file at all."""
    unshare = shutil.which("unshare")
    code, place, variable, size = request.param
    target = place or tempfile.mkdtemp(prefix="nbt-")  # short: a unix socket's path may have about 100 bytes
    script = f'mount -t tmpfs -o {size} tmpfs "{target}" && exec "$@"'
    command = [unshare or "", "-rm", "sh", "-c", script, "sh"]
    if unshare is None or subprocess.run([*command, "true"], capture_output=True).returncode:
        pytest.skip("this machine lets nobody mount a file system of their own")
    env = dict(os.environ) | ({variable: target} if variable else {})
    done = subprocess.run(
        [*command, sys.executable, "-c", HOST + code], env=env, capture_output=True, text=True, timeout=START_S
    )
    if place is None:
        os.rmdir(target)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("played", [(LOGS, None, "XDG_STATE_HOME", "size=64k")], indirect=True, ids=["logs"])
def test_logs_that_do_not_fit_are_lost_and_nothing_else(played):
    assert any(line.endswith(" 1999 " + "." * 100) for line in played)
    assert played[-1] == "[all] sum 2.0"


@pytest.mark.parametrize("played", [(SHARED_MEMORY, "/dev/shm", None, "size=64k")], indirect=True, ids=["shm"])
def test_shared_memory_that_is_full_fails_the_loader_and_not_the_session(played):
    assert "told True True" in played
    assert played[-1] == "[all] sum 2.0 3999999"


@pytest.mark.parametrize("played", [(SOCKETS, None, "XDG_RUNTIME_DIR", "nr_inodes=1")], indirect=True, ids=["sockets"])
def test_a_folder_that_takes_no_file_is_passed_over(played):
    assert played == ["[all] sum 2.0", "meanwhile []"]
