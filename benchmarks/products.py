"""What a user of each product types: one adapter per product."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from benchmarks import environments
from benchmarks.kernel import Kernel, Ran

__all__ = ["PRODUCTS", "Product", "open_kernel", "start", "started"]


class Product:
    """The cells of one product.

    Attributes
    ----------
    name, label
        Key on the command line, and what the table says.
    module
        What runs as the kernel.
    warming
        The cell a notebook begins with, before any rank is asked for.
    can
        Which measurements it does the work of.
    """

    name = ""
    label = ""
    module = "ipykernel_launcher"
    warming = "import torch, torch.distributed"
    can = frozenset({"start", "empty", "stream", "transfer", "faults"})

    def env(self, n: int) -> dict[str, str]:
        """Variables the kernel needs."""
        return {}

    def start(self, n: int) -> list[str]:
        """Cells that start n ranks, up to where `everywhere` works."""
        raise NotImplementedError

    def group(self, n: int) -> list[str]:
        """Cells that make the process group, where start does not."""
        return []

    def everywhere(self, body: str, rank: int | None = None) -> str:
        """A cell that runs the body on all ranks, or on one; ``rank`` and ``world_size`` are defined there."""
        raise NotImplementedError

    def push(self, name: str) -> str | None:
        """Python for the kernel that sends its variable to rank 0."""
        return None

    def pull(self, name: str) -> str | None:
        """Python for the kernel that fetches a variable of rank 0 as ``back``."""
        return None

    def restart(self, n: int) -> list[str] | None:
        """Cells that give fresh ranks, where that is not starting again."""
        return None


class Nbdist(Product):
    """The magics of the package that this repository holds."""

    name = label = "nbdist"
    warming = "%load_ext nbdist"

    def start(self, n: int) -> list[str]:
        return [f"%distributed start -n {n}"]

    def everywhere(self, body: str, rank: int | None = None) -> str:
        return ("%%distributed" if rank is None else f"%%distributed -r {rank}") + "\n" + body

    def push(self, name: str) -> str:
        return f"cluster.push({{'{name}': {name}}}, ranks=[0])"

    def pull(self, name: str) -> str:
        return f"back = cluster.pull('{name}', ranks=[0])[0]"

    def restart(self, n: int) -> list[str]:
        return ["%distributed restart"]


class IPyParallel(Product):
    """Engines started by a Cluster object, cells by ``%%px``; the process group is made by hand."""

    name, label = "ipyparallel", "ipyparallel 9.2"
    warming = "import torch, torch.distributed, ipyparallel as ipp"

    def start(self, n: int) -> list[str]:
        return [
            f"import ipyparallel as ipp\n_cluster = ipp.Cluster(n={n}, log_level=40)\n"
            "rc = _cluster.start_and_connect_sync(activate=True)",
            # rank 0's machine chooses the port, as the user would have to
            "import socket as _s\nwith _s.create_server(('127.0.0.1', 0)) as _k: _port = _k.getsockname()[1]\n"
            f"for _i in range({n}): rc[_i].push(dict(rank=_i, world_size={n}, _port=_port), block=True)",
            "%%px\nimport os\nos.environ.update(MASTER_ADDR='127.0.0.1', MASTER_PORT=str(_port), RANK=str(rank),"
            " WORLD_SIZE=str(world_size))",
        ]

    def group(self, n: int) -> list[str]:
        return ["%%px\nimport torch, torch.distributed as dist\ndist.init_process_group('gloo')"]

    def everywhere(self, body: str, rank: int | None = None) -> str:
        return ("%%px" if rank is None else f"%%px --targets [{rank}]") + "\n" + body

    def push(self, name: str) -> str:
        return f"rc[0].push(dict({name}={name}), block=True)"

    def pull(self, name: str) -> str:
        return f"back = rc[0].pull('{name}', block=True)"


class NbDistributed(Product):
    """Workers started by ``%dist_init``; every cell is sent to them unless that mode is switched off."""

    name, label = "nbdistributed", "nbdistributed 0.1"
    warming = "import torch, torch.distributed\n%load_ext nbdistributed"
    can = frozenset({"start", "empty", "stream", "faults"})

    def start(self, n: int) -> list[str]:
        return [
            f"%load_ext nbdistributed\n%dist_init -n {n}",
            "%dist_mode --disable",
            # It has no readiness handshake: a first cell sent too early is lost and times out after 30 s.
            "%%bench_here\nimport time\n"
            "_m = get_ipython().magics_manager.registry['DistributedMagic']\n"
            "_end = time.time() + 120\n"
            "while time.time() < _end:\n"
            "    try:\n        _m._comm_manager.send_to_all('get_status', {}, timeout=0.25); break\n"
            "    except TimeoutError: pass",
        ]

    def everywhere(self, body: str, rank: int | None = None) -> str:
        return ("%%distributed" if rank is None else f"%%rank [{rank}]") + "\n" + body


class JupyterDistributed(Product):
    """A kernel that hands each cell to all ranks; there is no cell for the notebook's side alone."""

    name, label = "jupyter-distributed", "jupyter-distributed 0.1.1"
    module = "jupyter_distributed.kernel"
    can = frozenset({"start", "empty", "faults"})

    def env(self, n: int) -> dict[str, str]:
        return {"JUPYTER_DISTRIBUTED_BASE_KERNEL": "python3", "JUPYTER_DISTRIBUTED_WORLD_SIZE": str(n)}

    def start(self, n: int) -> list[str]:
        return ["import os; rank, world_size = int(os.environ['RANK']), int(os.environ['WORLD_SIZE'])"]

    def group(self, n: int) -> list[str]:
        return ["import torch, torch.distributed as dist\ndist.init_process_group('gloo')"]

    def everywhere(self, body: str, rank: int | None = None) -> str:
        if rank is None:
            return body
        return f"if rank == {rank}:\n" + "\n".join("    " + line for line in body.splitlines())


class Monarch(Product):
    """Actors on spawned processes; a cell is the source that an actor's endpoint executes."""

    name, label = "torchmonarch", "torchmonarch 0.7"
    warming = "import torch, torch.distributed\nimport monarch.actor, monarch.spmd"
    can = frozenset({"start", "empty", "transfer", "faults"})

    def start(self, n: int) -> list[str]:
        return [
            "from monarch.actor import Actor, endpoint, this_host\n"
            "from monarch.spmd import setup_torch_elastic_env_async\n"
            "class Ranks(Actor):\n"
            "    @endpoint\n"
            "    def run(self, body):\n"
            "        import os\n"
            "        self.names = getattr(self, 'names', None) or dict(\n"
            "            __name__='cell', rank=int(os.environ['RANK']), world_size=int(os.environ['WORLD_SIZE']))\n"
            "        exec(body, self.names)\n"
            "    @endpoint\n"
            "    def put(self, name, value): self.names[name] = value\n"
            "    @endpoint\n"
            "    def get(self, name): return self.names[name]\n"
            f"_procs = this_host().spawn_procs({{'gpus': {n}}})\n"
            "await setup_torch_elastic_env_async(_procs)\n"
            "ranks = _procs.spawn('ranks', Ranks)"
        ]

    def group(self, n: int) -> list[str]:
        return [self.everywhere("import torch, torch.distributed as dist\ndist.init_process_group('gloo')")]

    def everywhere(self, body: str, rank: int | None = None) -> str:
        where = "ranks" if rank is None else f"ranks.slice(gpus={rank})"
        return f"_ = await {where}.run.call({body!r})"

    def push(self, name: str) -> str:
        return f"ranks.slice(gpus=0).put.call_one('{name}', {name}).get()"

    def pull(self, name: str) -> str:
        return f"back = ranks.slice(gpus=0).get.call_one('{name}').get()"


PRODUCTS: dict[str, Product] = {
    p.name: p for p in (Nbdist(), IPyParallel(), NbDistributed(), JupyterDistributed(), Monarch())
}


def open_kernel(product: Product, n: int, cache: Path) -> Kernel:
    """A fresh kernel of the product's environment, with a home and a folder of its own."""
    python = environments.python_of(product.name, cache)
    folder = Path(tempfile.mkdtemp(prefix=f"{product.name}-", dir=cache))
    env = {
        "PATH": os.pathsep.join([str(environments.stubs(cache)), str(python.parent), os.environ["PATH"]]),
        "HOME": str(folder),
        "IPYTHONDIR": str(folder / "ipython"),
        "JUPYTER_CONFIG_DIR": str(folder / "jupyter"),
        "JUPYTER_PATH": str(python.parent.parent / "share" / "jupyter"),
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
        **product.env(n),
    }
    return Kernel(python, folder, env, product.module)


_HANDLE = "import nbdist; cluster = nbdist.cluster()"


def _must(ran: Ran, what: str) -> Ran:
    if ran.status != "ok":
        raise RuntimeError(f"{what}: {ran.status}: {ran.text[-800:]}")
    return ran


def start(kernel: Kernel, product: Product, n: int) -> None:
    """Start n ranks and their process group in an open kernel."""
    for cell in (product.warming, *product.start(n), *product.group(n)):
        _must(kernel.run(cell, timeout_s=180), f"{product.name} start")


def started(product: Product, n: int, cache: Path) -> Kernel:
    """A kernel with n ranks that answer and have a process group."""
    kernel = open_kernel(product, n, cache)
    try:
        start(kernel, product, n)
        if product.name == "nbdist":  # the handle that push and pull are called on
            _must(kernel.run(_HANDLE), "nbdist handle")
    except BaseException:
        kernel.close()
        raise
    return kernel
