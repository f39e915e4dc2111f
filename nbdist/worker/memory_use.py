"""How much memory this rank uses, and what its GPU is doing; None where a number is not available."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Iterable, Iterator
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any

from nbdist.doctor import gpu
from nbdist.doctor.visible import visible

if TYPE_CHECKING:
    import torch

__all__ = ["MemoryUse"]

_PAGE = os.sysconf("SC_PAGE_SIZE")
_SHARE = 1000  # an expensive reading is repeated only after this many times what it cost
_PROCESS_S = 1.0  # at most how often the kernel is asked for shared pages
_DEVICE_S = 1.0  # at most how often the driver is asked
_STRATEGIES = {"DistributedDataParallel": "DDP", "FSDPModule": "FSDP2", "FullyShardedDataParallel": "FSDP1"}
_STATES_S = 2.0  # at most how often the model's tensors are counted


class MemoryUse:
    """Reads this rank's memory.

    Parameters
    ----------
    device
        The rank's device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._exact: dict[str, int] | None = None  # PSS and USS as last read, and the private pages then
        self._process_at_s = 0.0
        self._modules: dict[int, weakref.ref[torch.nn.Module]] = {}
        self._optimizers: dict[int, weakref.ref[torch.optim.Optimizer]] = {}
        self._states: dict[str, int | str | None] = dict.fromkeys(
            ("parameters_bytes", "gradients_bytes", "optimizer_bytes", "strategy")
        )
        self._states_at_s = 0.0
        self._device_values: dict[str, Any] = {}
        self._device_at_s = 0.0
        self._reader: gpu.Reader | None = None
        self._reader_known = False
        self._no_reader: str | None = None

    def begin(self) -> None:
        """A run begins: count its model's tensors at its first step, and those of no earlier run."""
        self._modules.clear()
        self._optimizers.clear()
        self._states_at_s = 0.0
        self._device_at_s = 0.0

    def read(self) -> dict[str, Any]:
        """One reading; called on the I/O thread.

        Returns
        -------
        dict
            ``process_pss_bytes`` (shared pages divided among those who share them: adds up over ranks),
            ``process_uss_bytes`` (pages of this process alone), ``process_rss_bytes`` (shared pages counted in full);
            ``parameters_bytes``, ``gradients_bytes``, ``optimizer_bytes`` as held by this rank at the end of a step,
            and ``strategy``, how the model is spread over the ranks;
            ``allocated_bytes``, ``reserved_bytes``, ``peak_bytes``, ``inactive_split_bytes``, ``alloc_retries`` of
            torch's allocator; ``device_name``, ``device_uuid``, ``device_total_bytes``, ``device_used_bytes``
            (everybody), ``device_process_bytes`` (this process, where the driver tells), ``device_outside_bytes``
            (used, but not by this rank's allocator), ``load_percent``, ``power_w``, ``power_limit_w``,
            ``temperature_c``, ``throttle`` (list of words) of the GPU; ``device_reason``, why there is no GPU to read,
            and ``device_reasons``, by name, why a number is None.
        """
        return self._process() | self._states | self._allocator_and_device()

    def explain_failure(self) -> list[str]:
        """What to read under an out-of-memory error: this rank's figures, and what can be done, one line each."""
        values = self.read()
        names = ("allocated_bytes", "reserved_bytes", "inactive_split_bytes")
        lines = gpu.explain_memory(
            **{name: values[name] for name in names},
            retries=values["alloc_retries"],
            used_bytes=values["device_used_bytes"],
            total_bytes=values["device_total_bytes"],
        )
        if not lines and values["process_uss_bytes"] is not None:
            lines.append(
                f"this process alone holds {gpu.bytes_text(values['process_uss_bytes'])}; it uses no GPU so far"
            )
        held = {
            "parameters": values["parameters_bytes"],
            "gradients": values["gradients_bytes"],
            "optimizer state": values["optimizer_bytes"],
        }
        if all(size is not None for size in held.values()):
            parts = ", ".join(f"{name} {gpu.bytes_text(size)}" for name, size in held.items())
            lines.append(f"the model's states on this rank: {parts}; the rest are activations and buffers")
        lines.append(
            "what helps: a smaller batch per rank; activation checkpointing; nbdist.fsdp(), which divides the states "
            "among the ranks"
        )
        return lines

    # ---- the process

    def _process(self) -> dict[str, Any]:
        """Exact now and then (the kernel walks all pages), in between moved by what the process took or gave back."""
        values: dict[str, Any] = dict.fromkeys(("process_pss_bytes", "process_uss_bytes", "process_rss_bytes"))
        try:
            with open("/proc/self/statm", "rb") as file:
                resident, shared = (int(n) * _PAGE for n in file.read().split()[1:3])
        except (OSError, ValueError):
            return values
        values["process_rss_bytes"] = resident
        if monotonic() >= self._process_at_s:
            started_s = perf_counter()
            self._exact = _proportional()
            if self._exact is not None:
                self._exact["private"] = resident - shared
            self._process_at_s = monotonic() + max(_PROCESS_S, _SHARE * (perf_counter() - started_s))
        if self._exact is not None:
            moved = resident - shared - self._exact["private"]
            values["process_pss_bytes"] = max(0, self._exact["pss"] + moved)
            values["process_uss_bytes"] = max(0, self._exact["uss"] + moved)
        return values

    # ---- the model

    def saw_module(self, module: torch.nn.Module) -> None:
        """Count this module's parameters; it is not kept alive."""
        known = self._modules.get(id(module))
        if known is None or known() is not module:
            self._modules[id(module)] = weakref.ref(module)

    def saw_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Count this optimizer's tensors; it is not kept alive. Called when a step has ended, on the main thread.

        That is the moment to count: gradients are there, `zero_grad` has not run, and FSDP has put its shards back.
        """
        known = self._optimizers.get(id(optimizer))
        if known is None or known() is not optimizer:
            self._optimizers[id(optimizer)] = weakref.ref(optimizer)
            self._states_at_s = 0.0
        if monotonic() >= self._states_at_s:
            started_s = perf_counter()
            self._count()
            self._states_at_s = monotonic() + max(_STATES_S, _SHARE * (perf_counter() - started_s))

    def _count(self) -> None:
        modules, optimizers = _alive(self._modules), _alive(self._optimizers)
        parameters = {id(p): p for o in optimizers for group in o.param_groups for p in group["params"]}
        for module in modules:
            parameters.update((id(p), p) for p in module.parameters())
        states: dict[int, torch.Tensor] = {}
        for optimizer in optimizers:
            states.update((id(t), t) for t in _tensors(optimizer.state.values()))
        self._states = {
            "parameters_bytes": _bytes(parameters.values()),
            "gradients_bytes": _bytes(p.grad for p in parameters.values() if p.grad is not None),
            "optimizer_bytes": _bytes(states.values()),
            "strategy": _strategy(modules),
        }

    # ---- the GPU

    def _allocator_and_device(self) -> dict[str, Any]:
        values: dict[str, Any] = dict.fromkeys(
            (
                *("allocated_bytes", "reserved_bytes", "peak_bytes", "inactive_split_bytes"),
                *("alloc_retries", "device_name", "device_uuid", "device_total_bytes", "device_used_bytes"),
                *("device_process_bytes", "device_outside_bytes", "load_percent", "power_w"),
                *("power_limit_w", "temperature_c", "throttle", "device_reason"),
            )
        ) | {"device_reasons": {}}
        index = None
        torch = sys.modules.get("torch") if self._device.type == "cuda" else None
        if torch is not None and torch.cuda.is_initialized():
            index = self._device.index if self._device.index is not None else torch.cuda.current_device()
            stats = torch.cuda.memory_stats(index)
            values["allocated_bytes"] = stats.get("allocated_bytes.all.current", 0)
            values["reserved_bytes"] = stats.get("reserved_bytes.all.current", 0)
            values["peak_bytes"] = stats.get("allocated_bytes.all.peak", 0)
            values["inactive_split_bytes"] = stats.get("inactive_split_bytes.all.current", 0)
            values["alloc_retries"] = stats.get("num_alloc_retries", 0)
        if monotonic() >= self._device_at_s:
            started_s = perf_counter()
            self._device_values = self._ask_device(index)
            self._device_at_s = monotonic() + max(_DEVICE_S, _SHARE * (perf_counter() - started_s))
        values |= self._device_values
        used, reserved = values["device_used_bytes"], values["reserved_bytes"]
        if used is not None and reserved is not None:
            values["device_outside_bytes"] = max(0, used - reserved)
        return values

    def _ask_device(self, index: int | None) -> dict[str, Any]:
        reader = self._find_reader(index)
        if reader is None:
            return {"device_reason": self._no_reader}
        device = reader.read()
        return {
            "device_name": device.name,
            "device_uuid": device.uuid,
            "device_total_bytes": device.memory_total_bytes,
            "device_used_bytes": device.memory_used_bytes,
            "device_process_bytes": device.process_bytes(os.getpid()),
            "load_percent": device.load_percent,
            "power_w": device.power_w,
            "power_limit_w": device.power_limit_w,
            "temperature_c": device.temperature_c,
            "throttle": None if device.throttle is None else list(device.throttle),
            "device_reasons": {
                name.replace("memory_", "device_"): reason
                for name, reason in device.reasons.items()
                if name not in ("memory_free_bytes", "processes")
            },
        }

    def _find_reader(self, index: int | None) -> gpu.Reader | None:
        """NVML's device behind this rank's: by UUID once CUDA runs, before that by what the environment says."""
        if self._reader_known:
            return self._reader
        uuid: str | None = None
        if self._device.type != "cuda":
            self._reader_known = True
            seen = visible(gpu.snapshot(processes=False))
            self._no_reader = seen.reason if seen.reason is not None else "this rank runs on the CPU"
        elif index is not None:
            import torch

            self._reader_known = True
            uuid = str(torch.cuda.get_device_properties(index).uuid)
        else:
            seen = visible(gpu.snapshot(processes=False))
            place = self._device.index or 0
            device = seen.devices[place] if place < len(seen.devices) else None
            uuid = device.uuid if device is not None else None
            self._no_reader = seen.reason or (None if uuid else "not known before CUDA is first used")
        if uuid is not None:
            self._reader = gpu.Reader.of_uuid(uuid)
            self._no_reader = None if self._reader is not None else f"the driver lists no GPU {uuid}"
        return self._reader


def _proportional() -> dict[str, int] | None:
    """Proportional and unique set size, in bytes."""
    try:
        with open("/proc/self/smaps_rollup", "rb") as file:
            kib = {key: int(rest.split()[0]) for key, _, rest in (line.partition(b":") for line in list(file)[1:])}
        return {"pss": kib[b"Pss"] * 1024, "uss": (kib[b"Private_Clean"] + kib[b"Private_Dirty"]) * 1024}
    except (OSError, ValueError, IndexError, KeyError):  # an old kernel, or one that does not let us
        return None


def _strategy(modules: Iterable[torch.nn.Module]) -> str | None:
    """By the classes' names: what is not imported is not in use."""
    names = {cls.__name__ for module in modules for cls in type(module).__mro__}
    return next((word for name, word in _STRATEGIES.items() if name in names), None)


def _alive(references: dict[int, Any]) -> list[Any]:
    found = []
    for key, reference in list(references.items()):
        if (thing := reference()) is None:
            del references[key]
        else:
            found.append(thing)
    return found


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Every tensor in nested dicts, lists and tuples."""
    import torch

    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, dict):
            yield from _tensors(value.values())
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes this rank holds: of a DTensor its own shard (read without `to_local`, an autograd operation)."""
    return sum(int(getattr(tensor, "_local_tensor", tensor).nbytes) for tensor in tensors)
