"""Tools that start processes for one function or script and end them with it: nothing stays from cell to cell."""

from __future__ import annotations

from benchmarks.products import Product

__all__ = ["LAUNCHERS"]

_FUNCTION = """
def _body({parameters}):
    import os, time
    {before}
    import torch, torch.distributed as dist
    torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.barrier()
{body}
"""
_PORT = "import socket\n_s = socket.socket(); _s.bind(('127.0.0.1', 0)); _port = str(_s.getsockname()[1]); _s.close()\n"


def _function(body: str, parameters: str = "", before: str = "pass") -> str:
    indented = "\n".join("    " + line for line in body.splitlines())
    return _FUNCTION.format(parameters=parameters, before=before, body=indented)


class Launcher(Product):
    """A cell defines a function and has it run by new processes."""

    can = frozenset({"faults"})

    def start(self, n: int) -> list[str]:
        return [f"NUM_RANKS = {n}"]


class Accelerate(Launcher):
    """accelerate's ``notebook_launcher``: forks the kernel, which must not have imported anything dangerous."""

    name, label = "accelerate", "accelerate's notebook_launcher"
    warming = "from accelerate import notebook_launcher"

    def everywhere(self, body: str, rank: int | None = None) -> str:
        launch = "notebook_launcher(_body, (), num_processes=NUM_RANKS, use_port=_port)"
        return f"{_function(body)}{_PORT}{launch}"


class Fabric(Launcher):
    """Lightning Fabric with the strategy ``ddp_notebook``."""

    name, label = "lightning", "Lightning Fabric"
    warming = "from lightning.fabric import Fabric"

    def everywhere(self, body: str, rank: int | None = None) -> str:
        launch = "Fabric(accelerator='cpu', devices=NUM_RANKS, strategy='ddp_notebook').launch(_body)"
        return _function(body, "fabric") + launch


class TorchRunX(Launcher):
    """torchrunx: agents on hosts, here the own one; the function is sent by cloudpickle."""

    name, label = "torchrunx", "torchrunx"
    warming = "import os; os.environ['TORCHRUNX_LOG_DIR'] = ''\nimport torchrunx"

    def everywhere(self, body: str, rank: int | None = None) -> str:
        launch = (
            "torchrunx.Launcher(hostnames=['localhost'], workers_per_host=NUM_RANKS, backend='gloo').run(_body)\nNone"
        )
        return _function(body) + launch


class Torchrun(Launcher):
    """A script and a shell line; output goes where the notebook puts that of programs."""

    name, label = "torchrun", "torchrun in a cell"

    def everywhere(self, body: str, rank: int | None = None) -> str:
        script = _function(body) + "_body()\n"
        return (
            f"open('script.py', 'w').write({script!r})\n"
            "get_ipython().system(f'torchrun --nproc_per_node {NUM_RANKS} --standalone script.py')\n"
            "assert _exit_code == 0, f'torchrun ended with {_exit_code}'"
        )


LAUNCHERS = (Accelerate(), Fabric(), TorchRunX(), Torchrun())
