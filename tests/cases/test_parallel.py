"""Cases about what DDP, FSDP and data loading do, rightly used and misused, on one kernel."""

from __future__ import annotations

import contextlib
import re

import psutil
import pytest
from deadlines import BREAK_S, GONE_S, wait_until

pytestmark = pytest.mark.shared

DDP = "import torch, torch.distributed as dist\nfrom torch.nn.parallel import DistributedDataParallel as DDP\n"
FSDP = "import torch\nfrom torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n"


def no_gpu(notebook) -> None:
    """Some of torch's errors are another where there is a GPU."""
    if notebook.value("__import__('torch').cuda.is_available()") == "True":
        pytest.skip("needs a machine without a GPU")


def on_both(played, *lines: str) -> None:
    """Both ranks printed these lines at the end."""
    assert played.ok, played.text
    assert played.of(0)[-len(lines) :] == played.of(1)[-len(lines) :] == list(lines)


def numbers(played, rank: int) -> list[float]:
    """The numbers in a rank's last line."""
    assert played.ok, played.text
    return [float(word) for word in played.of(rank)[-1].split() if word.lstrip("-").replace(".", "").isdigit()]


def below(pids: list[str]) -> list[psutil.Process]:
    """Processes that ranks started, without the two helpers that multiprocessing keeps once it has spawned."""
    started = [child for pid in pids for child in psutil.Process(int(pid)).children(recursive=True)]
    return [p for p in started if not re.search(r"multiprocessing\.(forkserver|resource_tracker)", _command(p))]


def _command(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline())
    return ""


# ---- DDP


def test_dd01_parameters_without_gradient(notebook):
    body = (
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.main, self.extra = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)\n"
        "    def forward(self, x): return self.main(x)\n"
        "def steps(model):\n"
        "    for step in range(2):\n"
        "        model(torch.ones(2, 4)).sum().backward(); print('step', step)\n"
        "steps(DDP(Net()))"
    )
    played = notebook.cell(DDP + body)
    assert played.of(0) == played.of(1) == ["step 0"]
    assert len(played.errors) == 1
    assert "Expected to have finished reduction in the prior iteration" in played.report
    assert all(name in played.report for name in ("ranks 0-1", "extra.weight", "extra.bias", "find_unused_parameters"))
    assert "main.weight" not in played.report
    on_both(notebook.cell("steps(DDP(Net(), find_unused_parameters=True))"), "step 0", "step 1")


def test_dd03_forward_past_the_wrapper(notebook):
    body = (
        "import nbdist\n"
        "def fit(past):\n"
        "    torch.manual_seed(0); model = DDP(torch.nn.Linear(3, 1))\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "    torch.manual_seed(dist.get_rank())\n"
        "    for _ in range(3):\n"
        "        optimizer.zero_grad()\n"
        "        (model.module if past else model)(torch.randn(4, 3)).pow(2).mean().backward(); optimizer.step()\n"
        "    return model\n"
    )
    apart = notebook.cell(DDP + body + "print(bool(nbdist.replicas_equal(fit(past=True))))")
    on_both(apart, "False")
    on_both(notebook.cell("print(bool(nbdist.replicas_equal(fit(past=False))))"), "True")


def test_dd04_weights_on_two_devices(notebook):
    body = (
        "model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, device='meta'))\n"
        "model = DDP(model); model(torch.ones(1, 2)).sum().backward()"
    )
    played = notebook.cell(DDP + body, timeout_s=BREAK_S)
    assert played.status == "error"
    assert len(played.errors) == 1
    hint = next(line for line in played.report.splitlines() if line.startswith("hint"))
    assert "1.weight" in hint
    assert "meta" in hint


def test_dd07_ddp_equals_the_whole_batch(notebook):
    body = (
        "def fit(wrap, x, y):\n"
        "    torch.manual_seed(0); model = torch.nn.Linear(3, 1); model = DDP(model) if wrap else model\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "    for _ in range(5):\n"
        "        optimizer.zero_grad(); torch.nn.functional.mse_loss(model(x), y).backward(); optimizer.step()\n"
        "    return [p.detach().clone() for p in model.parameters()]\n"
        "g = torch.Generator().manual_seed(1); x, y = torch.randn(8, 3, generator=g), torch.randn(8, 1, generator=g)\n"
        "mine, whole = fit(True, x[rank::2], y[rank::2]), fit(False, x, y)\n"
        "print('same', all(torch.allclose(p, q, rtol=0, atol=1e-6) for p, q in zip(mine, whole)))"
    )
    on_both(notebook.cell(DDP + body), "same True")


def test_dd09_device_ids_on_the_cpu(notebook):
    no_gpu(notebook)
    played = notebook.cell(DDP + "import os\nDDP(torch.nn.Linear(2, 2), device_ids=[int(os.environ['LOCAL_RANK'])])")
    assert played.status == "error"
    assert len(played.errors) == 1
    assert "ranks 0-1: ValueError" in played.report
    hint = next(line for line in played.report.splitlines() if line.startswith("hint"))
    assert "device_ids" in hint


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("torch.ones(1).cuda()", "use `device`"),
        ("torch.cuda.set_device(rank)", "use `device`"),
        ("DDP(torch.nn.SyncBatchNorm(4))", "keep BatchNorm"),
        ("dist.new_group(backend='nccl')", "gloo"),
        ("torch.empty(10**14)", "a smaller batch"),
    ],
    ids=["cuda", "set_device", "syncbn", "nccl", "memory"],
)
def test_what_needs_a_gpu_or_more_memory(notebook, body, said):
    no_gpu(notebook)
    played = notebook.cell(DDP + body)
    assert played.status == "error"
    assert len(played.errors) == 1
    assert "ranks 0-1: " in played.report
    assert said in next(line for line in played.report.splitlines() if line.startswith("hint"))


def test_attribute_of_a_wrapped_model(notebook):
    body = "class Net(torch.nn.Linear): head = 1\n"
    played = notebook.cell(DDP + body + "def use(model): return model.head\nuse(DDP(Net(2, 2)))")
    assert "hint: the wrapper does not pass attributes on: model.module.head" in played.report.splitlines()
    assert "hint" not in notebook.cell("DDP(Net(2, 2)).tail").report


def test_ranks_that_build_different_models(notebook):
    """The rank that only saw its peer go is no cause, although both failed at the same line."""
    played = notebook.cell(DDP + "DDP(torch.nn.Linear(2, 2 + rank))", timeout_s=BREAK_S)
    assert played.report.splitlines()[1].startswith("rank 1: RuntimeError")
    assert "stopped because rank 1 failed: rank 0" in played.report.splitlines()
    assert "Connection closed" not in played.report


# ---- FSDP


def test_fs01_fsdp_without_a_gpu(notebook):
    no_gpu(notebook)
    refused = notebook.cell(FSDP + "model = FSDP(torch.nn.Linear(8, 8))")
    assert refused.status == "error"
    assert len(refused.errors) == 1
    hint = next(line for line in refused.report.splitlines() if line.startswith("hint"))
    assert 'device_id=torch.device("cpu")' in hint
    first = notebook.cell(
        "model = FSDP(torch.nn.Linear(8, 8), device_id=torch.device('cpu'))\n"
        "model(torch.randn(4, 8)).sum().backward(); print(*(tuple(p.shape) for p in model.parameters()))"
    )
    assert first.of(0)[-1] == first.of(1)[-1] == "(36,)"
    second = notebook.cell(
        "from torch.distributed.fsdp import fully_shard\n"
        "model = torch.nn.Linear(8, 8); fully_shard(model); model(torch.randn(4, 8)).sum().backward()\n"
        "print(tuple(model.weight.to_local().shape))"
    )
    assert second.of(0)[-1] == second.of(1)[-1] == "(4, 8)"


def test_fs02_optimizer_built_before_wrapping(notebook):
    body = (
        "def changed(before):\n"
        "    model = torch.nn.Linear(8, 8)\n"
        "    if before: optimizer = torch.optim.SGD(model.parameters(), lr=1.0)\n"
        "    model = FSDP(model, device_id=torch.device('cpu'))\n"
        "    if not before: optimizer = torch.optim.SGD(model.parameters(), lr=1.0)\n"
        "    old = next(model.parameters()).detach().clone()\n"
        "    model(torch.ones(2, 8)).sum().backward(); optimizer.step()\n"
        "    return not torch.equal(old, next(model.parameters()).detach())\n"
        "print('changed', changed(before=True), changed(before=False))"
    )
    played = notebook.cell(FSDP + body)
    assert played.ok, played.text
    assert played.of(0)[-1] == played.of(1)[-1] == "changed False True"


def test_fs04_clipping_of_shards(notebook):
    body = (
        "torch.manual_seed(0); base = torch.nn.Linear(8, 8); x = torch.randn(4, 8)\n"
        "plain = torch.nn.Linear(8, 8); plain.load_state_dict(base.state_dict()); plain(x).pow(2).sum().backward()\n"
        "model = FSDP(base, device_id=torch.device('cpu')); model(x).pow(2).sum().backward()\n"
        "shard = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)\n"
        "print(float(shard), float(model.clip_grad_norm_(1e9)),\n"
        "      float(torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9)))"
    )
    played = notebook.cell(FSDP + body)
    (shard_0, method_0, plain_0), (shard_1, method_1, plain_1) = numbers(played, 0), numbers(played, 1)
    assert shard_0 != pytest.approx(shard_1, rel=1e-3)
    assert method_0 == method_1 == pytest.approx(plain_0, rel=1e-4)
    assert plain_0 == plain_1


def test_fs07_weights_outside_forward(notebook):
    body = (
        "import nbdist\n"
        "base = torch.nn.Linear(8, 8); print(tuple(base.weight.shape))\n"
        "model = FSDP(base, device_id=torch.device('cpu')); print([p.numel() for p in model.parameters()])\n"
        "with FSDP.summon_full_params(model): print(tuple(model.module.weight.shape))\n"
        "print(nbdist.replicas_equal(model))"
    )
    played = notebook.cell(FSDP + body)
    for rank in (0, 1):
        said = [line for line in played.of(rank) if line.startswith(("(", "["))]
        assert said == ["(8, 8)", "[36]", "(8, 8)"]
    assert "differ" not in played.streams


# ---- data


def test_dl01_set_epoch_forgotten(notebook):
    body = (
        "from torch.utils.data import DataLoader, DistributedSampler\n"
        "data = list(range(16)); sampler = DistributedSampler(data, shuffle=True)\n"
        "loader = DataLoader(data, batch_size=4, sampler=sampler)\n"
        "def epoch(): return [int(i) for batch in loader for i in batch]\n"
        "first, second = epoch(), epoch(); sampler.set_epoch(1); third = epoch()\n"
        "print(first == second, first == third, sorted(first))"
    )
    played = notebook.cell(body)
    assert played.ok, played.text
    shares = []
    for rank in (0, 1):
        same, other, share = played.of(rank)[-1].split(" ", 2)
        assert (same, other) == ("True", "False")
        shares += [int(i) for i in share.strip("[]").split(",")]
    assert sorted(shares) == list(range(16))


def test_dl02_the_sampler_pads(notebook):
    body = (
        "import nbdist, torch.distributed as dist\n"
        "from torch.utils.data import DataLoader, DistributedSampler\n"
        "def seen(loader):\n"
        "    mine, parts = [int(i) for batch in loader for i in batch], [None] * 2\n"
        "    dist.all_gather_object(parts, mine); every = sum(parts, [])\n"
        "    return len(every), len(set(every))\n"
        "data = list(range(9))\n"
        "print(*seen(DataLoader(data, sampler=DistributedSampler(data, shuffle=False))))"
    )
    on_both(notebook.cell(body), "10 9")


def test_dl03_iterable_dataset_without_splitting(notebook):
    body = (
        "import collections, torch.distributed as dist\n"
        "from torch.utils.data import DataLoader, IterableDataset, get_worker_info\n"
        "class Items(IterableDataset):\n"
        "    def __init__(self, split): self.split, self.rank, self.size = split, dist.get_rank(), 2\n"
        "    def __iter__(self):\n"
        "        info = get_worker_info(); first, step = 0, 1\n"
        "        if self.split: first, step = self.rank * 2 + info.id, self.size * 2\n"
        "        return iter(range(first, 12, step))\n"
        "for split in (False, True):\n"
        "    mine, parts = [int(i) for batch in DataLoader(Items(split), num_workers=2) for i in batch], [None] * 2\n"
        "    dist.all_gather_object(parts, mine); print(max(collections.Counter(sum(parts, [])).values()))"
    )
    on_both(notebook.cell(body), "4", "1")


def test_dl05_the_same_seed_on_every_rank(notebook):
    body = (
        "import numpy as np, torch, torch.distributed as dist\n"
        "from torch.utils.data import DataLoader, Dataset\n"
        "class Noise(Dataset):\n"
        "    def __len__(self): return 8\n"
        "    def __getitem__(self, i): return float(np.random.rand()) + float(torch.rand(1))\n"
        "def same(seed):\n"
        "    torch.manual_seed(seed); parts = [None] * 2\n"
        "    dist.all_gather_object(parts, [float(x) for batch in DataLoader(Noise(), num_workers=2) for x in batch])\n"
        "    return parts[0] == parts[1]\n"
        "print(same(0), same(dist.get_rank()))"
    )
    on_both(notebook.cell(body), "True False")


def test_dl06_dataset_of_a_cell_in_spawned_workers(notebook):
    pids = notebook.rank_pids()
    body = (
        "from torch.utils.data import DataLoader, Dataset\n"
        "class Four(Dataset):\n"
        "    def __len__(self): return 4\n"
        "    def __getitem__(self, i): return i\n"
        "def read(method): return [int(i) for i in DataLoader(Four(), num_workers=1, multiprocessing_context=method)]\n"
        "print(read('fork'))"
    )
    on_both(notebook.cell(body), "[0, 1, 2, 3]")
    for method in ("spawn", "forkserver"):
        played = notebook.cell(f"print(read({method!r}))")
        if played.ok:
            on_both(played, "[0, 1, 2, 3]")
        else:
            hint = next(line for line in played.report.splitlines() if line.startswith("hint"))
            assert "fork" in hint and "file" in hint
    assert notebook.rank_pids() == pids
    wait_until(lambda: not below(pids), GONE_S, "no loader's worker")


def test_dl08_pinned_memory_without_a_gpu(notebook):
    no_gpu(notebook)
    body = (
        "import torch\n"
        "from torch.utils.data import DataLoader\n"
        "print(len(list(DataLoader(torch.arange(16), batch_size=4, pin_memory=True, num_workers=1))))"
    )
    played = notebook.cell(body)
    assert played.ok, played.text
    assert played.of(0)[-1] == played.of(1)[-1] == "4"
    assert played.text.count("pin_memory") <= 2  # the warning and its line


def test_dl09_more_loader_workers_than_cores(notebook):
    pids = notebook.rank_pids()
    body = (
        "import torch\n"
        "from torch.utils.data import DataLoader\n"
        "print(sum(len(batch) for batch in DataLoader(torch.arange(64), batch_size=2, num_workers=32)))"
    )
    played = notebook.cell(body, timeout_s=120)
    assert played.ok, played.text
    assert played.of(0)[-1] == played.of(1)[-1] == "64"
    warnings = [line for line in played.text.splitlines() if "suggested max number of worker" in line]
    assert len(warnings) == len(set(warnings)) <= 2  # torch warns when the loader is made and when it is iterated
    assert all(line.startswith("[all]") for line in warnings)
    wait_until(lambda: not below(pids), GONE_S, "no loader's worker")


def test_dl10_a_loader_worker_is_killed(notebook):
    body = (
        "import os, signal, torch.distributed as dist\n"
        "from torch.utils.data import DataLoader, Dataset\n"
        "class Rows(Dataset):\n"
        "    def __len__(self): return 64\n"
        "    def __getitem__(self, i):\n"
        "        if i == 20 and dist.get_rank() == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
        "        return i\n"
        "for batch in DataLoader(Rows(), batch_size=4, num_workers=2): pass\n"
        "dist.barrier(); print('never')"
    )
    played = notebook.cell(body, timeout_s=BREAK_S)
    assert played.status == "error"
    assert "never" not in played.streams
    assert "rank 1" in played.report
    assert "DataLoader worker (pid" in played.report
    assert "/dev/shm" in played.report
    assert "stopped because rank 1 failed: rank 0" in played.report
    assert notebook.cell("dist.barrier()").ok


def test_dl12_shuffle_and_a_sampler(notebook):
    body = (
        "from torch.utils.data import DataLoader, DistributedSampler\n"
        "DataLoader(range(8), shuffle=True, sampler=DistributedSampler(range(8)))"
    )
    played = notebook.cell(body)
    assert len(played.errors) == 1
    assert "ranks 0-1: ValueError" in played.report
    assert "mutually exclusive with shuffle" in played.report
    assert re.search(r"^-+> +2 DataLoader\(range\(8\), shuffle=True", played.report, re.MULTILINE)


def test_dl14_persistent_workers_and_the_cell_again(notebook):
    pids = notebook.rank_pids()
    body = (
        "import gc, torch, multiprocessing\n"
        "from torch.utils.data import DataLoader\n"
        "loader = DataLoader(torch.arange(8), num_workers=2, persistent_workers=True)\n"
        "for batch in loader: pass\n"
        "gc.collect(); print(len(multiprocessing.active_children()))"
    )
    for _ in range(3):
        played = notebook.cell(body)
        assert played.ok, played.text
        assert played.of(0)[-1] == played.of(1)[-1] == "2"
    assert notebook.cell("del loader, batch; gc.collect()").ok
    wait_until(lambda: not below(pids), GONE_S, "no loader's worker")


# ---- checkpoints


def test_ck01_every_rank_saves(notebook):
    body = (
        "import nbdist, torch, torch.distributed as dist\n"
        "model = DDP(torch.nn.Linear(100, 100))\n"
        "nbdist.save('checkpoint', model=model)\n"
        "torch.save({'w': torch.full((1000, 1000), float(rank))}, f'ck.pt'); dist.barrier(); print('saved')"
    )
    played = notebook.cell(DDP + body)
    assert played.ok, played.text
    again = notebook.cell(
        "other = DDP(torch.nn.Linear(100, 100)); nbdist.load('checkpoint', model=other)\n"
        "print(torch.equal(model.module.weight, other.module.weight))"
    )
    assert again.of(0)[-1] == again.of(1)[-1] == "True"
