"""Find a model's repeated block, and checkpoint its activations.

A block is what FSDP gathers and frees at a time: one transformer layer, one residual block. Wrapping the whole model as
one unit gathers every parameter at once and saves nothing during forward and backward.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from nbdist.errors import InputError

__all__ = ["Blocks", "checkpoint_activations", "find_blocks", "shared_across"]

Blocks = type[nn.Module] | str | Sequence[type[nn.Module] | str] | Sequence[nn.Module] | nn.Module
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_SAME_SIZE = 0.8  # a finer block that holds this part of a coarser one's parameters is preferred
_WORTH_A_UNIT = 0.1  # a second block class counts from this part of the model's parameters on
_LEAF_SHARE = 0.5  # plain layers count as blocks from this part of the model's parameters on


def find_blocks(model: nn.Module, blocks: Blocks | None = None) -> tuple[list[tuple[str, nn.Module]], str]:
    """Modules that become one unit each, and the reason in words.

    Parameters
    ----------
    model
        The unwrapped model.
    blocks
        A class, its name, a module, or several of them; None looks for the repeated class that holds most parameters.

    Returns
    -------
    tuple
        Name and module of each block in the model's order, and the sentence for the notice.

    Raises
    ------
    InputError
        If a class or module named in ``blocks`` does not occur in the model.
    """
    if blocks is not None:
        return _given(model, blocks)
    sizes = {module: sum(p.numel() for p in module.parameters()) for module in model.modules()}
    total = sizes[model] or 1
    composite = _repeated(model, [m for m in model.modules() if any(True for _ in m.children())], sizes)
    leaves = _repeated(model, [m for m in model.modules() if not any(True for _ in m.children())], sizes)
    chosen: list[nn.Module] = []
    for _, group in _preferred(composite, sizes):
        share = sum(sizes[m] for m in group) / total
        if share >= _WORTH_A_UNIT and not _nested(group, chosen):
            chosen += group
    if not chosen and leaves:
        group = max(leaves.values(), key=lambda g: sum(sizes[m] for m in g))
        if sum(sizes[m] for m in group) / total >= _LEAF_SHARE:
            chosen = group
    if not chosen:
        return [], "no block class repeats in the model, so it is one unit (blocks= names one)"
    share = sum(sizes[m] for m in chosen) / total
    names = [(n, m) for n, m in model.named_modules() if any(m is c for c in chosen)]
    counts = " and ".join(f"{sum(type(m) is c for _, m in names)} × {c.__name__}" for c in _classes(names))
    return names, f"one unit per block: {counts}, found as what repeats, with {share:.0%} of the parameters"


def _given(model: nn.Module, blocks: Blocks) -> tuple[list[tuple[str, nn.Module]], str]:
    asked: list[Any] = list(blocks) if isinstance(blocks, list | tuple | set | nn.ModuleList) else [blocks]
    found: list[nn.Module] = []
    for one in asked:
        if isinstance(one, nn.Module):
            matches = [m for m in model.modules() if m is one]
            what = f"the {type(one).__name__} given"
        elif isinstance(one, str) or (isinstance(one, type) and issubclass(one, nn.Module)):
            matches = [
                m for m in model.modules() if (type(m).__name__ == one if isinstance(one, str) else type(m) is one)
            ]
            what = one if isinstance(one, str) else one.__name__
        else:
            raise InputError(f"blocks expects module classes, their names or modules of the model, not {one!r}")
        if not matches:
            sizes = dict.fromkeys(model.modules(), 1)
            known = sorted({c.__name__ for c in _repeated(model, list(model.modules()), sizes)})
            raise InputError(
                f"blocks: {what} does not occur in the model; repeated there: {', '.join(known) or 'none'}"
            )
        found += matches
    names = [(n, m) for n, m in model.named_modules() if m is not model and any(m is f for f in found)]
    return names, f"one unit per block: {len(names)} × {', '.join(c.__name__ for c in _classes(names))}, as given"


def _classes(names: Iterable[tuple[str, nn.Module]]) -> list[type[nn.Module]]:
    return list(dict.fromkeys(type(m) for _, m in names))


def _repeated(
    model: nn.Module, modules: Iterable[nn.Module], sizes: dict[nn.Module, int]
) -> dict[type[nn.Module], list[nn.Module]]:
    """Classes with at least two instances that hold parameters, none inside another of its class."""
    groups: dict[type[nn.Module], list[nn.Module]] = {}
    for module in modules:
        if module is not model and sizes[module] and not isinstance(module, _CONTAINERS):
            groups.setdefault(type(module), []).append(module)
    return {c: group for c, group in groups.items() if len(group) > 1 and not _nested(group, group)}


def _nested(group: Sequence[nn.Module], others: Sequence[nn.Module]) -> bool:
    inside = {id(m) for g in group for m in g.modules() if m is not g}
    around = {id(m) for o in others for m in o.modules() if m is not o}
    return any(id(o) in inside for o in others) or any(id(g) in around for g in group)


def _preferred(
    groups: dict[type[nn.Module], list[nn.Module]], sizes: dict[nn.Module, int]
) -> list[tuple[type[nn.Module], list[nn.Module]]]:
    """Largest class first; a stage made of many smaller blocks gives way to those blocks."""
    totals = {c: sum(sizes[m] for m in group) for c, group in groups.items()}

    def finer(c: type[nn.Module]) -> bool:
        return any(
            totals[d] >= _SAME_SIZE * totals[c]
            and len(groups[d]) >= 2 * len(groups[c])
            and _nested(groups[c], groups[d])
            for d in groups
            if d is not c
        )

    kept = [c for c in groups if not finer(c)]
    return [(c, groups[c]) for c in sorted(kept, key=lambda c: -totals[c])]


def shared_across(model: nn.Module, units: Sequence[tuple[str, nn.Module]]) -> tuple[str, str] | None:
    """Two names of one parameter that two units would own: sharding would silently untie them."""
    owner: dict[int, tuple[str, str]] = {}
    unit_of: dict[str, str] = {}
    for name, module in units:
        unit_of.update({f"{name}.{n}" if n else name: name for n, _ in module.named_modules(remove_duplicate=False)})
    for module_name, owned in model.named_modules(remove_duplicate=False):
        for parameter_name, parameter in owned.named_parameters(recurse=False, remove_duplicate=False):
            full = f"{module_name}.{parameter_name}".lstrip(".")
            unit = unit_of.get(module_name, "")
            first = owner.setdefault(id(parameter), (unit, full))
            if first[0] != unit:
                return first[1], full
    return None


def checkpoint_activations(modules: Iterable[tuple[str, nn.Module]]) -> int:
    """Recompute each module's forward in backward instead of keeping its activations; returns how many it did.

    The module's own ``forward`` is replaced, so names of parameters, ``isinstance`` and state dicts stay as they were.
    """
    done: list[nn.Module] = []
    for _, module in modules:
        if not _nested([module], done):
            module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)
            done.append(module)
    return len(done)
