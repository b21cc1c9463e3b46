"""Stage 0: whole weights, and an optimizer state that does not say whose it is.

[Note: whose state is it]
At stage 0 DeepSpeed saves `optimizer.state_dict()`, which numbers the parameters in the order in which the optimizer
was given them, group after group. Which name has which number is nowhere written. What is known: optimizers are
given parameters in the model's order, except that several groups divide it. So a number is matched with a name where
that leaves one possibility: in 16-bit runs the fp32 weights must round to the model's, otherwise as many parameters
of one shape are in the model as in one group. If it leaves several, nobody may guess, and the caller says it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch

from plait.checkpoint.convert.deepspeed.parts import Parts, flat_group, number, whole
from plait.checkpoint.convert.deepspeed.states import module_of, tied_of
from plait.checkpoint.convert.deepspeed.zero import Pickled, evenly
from plait.checkpoint.convert.pickled import Stored
from plait.errors import CheckpointError


def stage_0(model: Pickled, order: Sequence[str] | None) -> Parts:
    """Trained parameters of stage 0. `order`: the optimizer's parameters by name, in its order; () leaves it out.

    [Note: whose state is it]
    """
    optimizer = model.get("optimizer")
    if not isinstance(optimizer, Mapping) or order == ():
        return {}
    buffers = set(model.get("buffer_names") or ())
    tied = tied_of(model)
    weights = {name: tensor for name, tensor in module_of(model).items() if name not in buffers and name not in tied}
    inner = optimizer.get("optimizer_state_dict", optimizer)
    states, groups = inner["state"], inner["param_groups"]
    told = list(order) if order is not None else _named(groups)
    if told is not None and (unknown := [name for name in told if name not in weights]):
        raise CheckpointError(f"order names {unknown[:4]}, which the model does not have")
    if "fp32_groups_flat" in optimizer:
        return _flat(weights, optimizer["fp32_groups_flat"], states, groups, told)
    numbers = [number for group in groups for number in group["params"]]
    if "fp32_groups" in optimizer:
        masters = [list(group) for group in optimizer["fp32_groups"]]
        names = told or _by_value(weights, masters)
        values = [master for group in masters for master in group]
    else:
        names = told or _by_shape(weights, groups, states)
        values = [weights[name] for name in names]
    if len(names) != len(numbers):
        raise CheckpointError(f"the optimizer has {len(numbers)} parameters, and {len(names)} names were given for it")
    parts: Parts = {}
    for name, value, index in zip(names, values, numbers, strict=True):
        parts |= _one(name, value, states.get(index, {}))
    return parts


def _named(groups: Sequence[Mapping[str, Any]]) -> list[str] | None:
    """Optimizers that were given names keep them."""
    if not all("param_names" in group for group in groups):
        return None
    return [name for group in groups for name in group["param_names"]]


def _one(name: str, value: Stored, state: Mapping[str, Any]) -> Parts:
    parts = {f"model.{name}": whole(value)}
    for key, kept in state.items():
        part = whole(kept) if isinstance(kept, Stored) else number(kept)
        if part is not None:
            parts[f"optim.{name}.{key}"] = part
    return parts


def _by_shape(
    weights: Mapping[str, Stored], groups: Sequence[Mapping[str, Any]], states: Mapping[int, Any]
) -> list[str]:
    numbers = [(index, number) for index, group in enumerate(groups) for number in group["params"]]
    shapes = [(group, _shape(states.get(number))) for group, number in numbers]
    if len(groups) == 1 and len(numbers) == len(weights):
        pairs = zip(weights.values(), shapes, strict=True)
        if all(shape is None or shape == tensor.shape for tensor, (_, shape) in pairs):
            return list(weights)
    by_shape: dict[torch.Size, list[str]] = {}
    for name, tensor in weights.items():
        by_shape.setdefault(tensor.shape, []).append(name)
    counts = Counter(shape for _, shape in shapes)
    for shape in counts:
        of_groups = {group for group, other in shapes if other == shape}
        names = by_shape.get(shape, []) if shape is not None else []
        if len(of_groups) > 1 or len(names) != counts[shape]:
            _give_up(shape, names, counts[shape], len(of_groups))
    queues = {shape: iter(names) for shape, names in by_shape.items()}
    return [next(queues[shape]) for _, shape in shapes if shape is not None]


def _shape(state: Any) -> torch.Size | None:
    sizes = [value.shape for value in (state or {}).values() if isinstance(value, Stored) and value.shape]
    return sizes[0] if sizes else None


def _give_up(shape: torch.Size | None, names: Sequence[str], count: int, groups: int) -> NoReturn:
    what = f"shape {tuple(shape)}" if shape is not None else "no state yet"
    some = ", ".join(names[:4]) + (" …" if len(names) > 4 else "")
    raise CheckpointError(
        f"a stage 0 checkpoint does not say whose optimizer state is whose: of {what} it has {count} in {groups} "
        f"parameter group(s), and the model has {len(names)} parameters ({some}). "
        "Give DeepSpeedSource(order=[…]) the optimizer's parameters by name, in its order, or order=() to read the "
        "weights alone; or save once with ZeRO stage 1, which notes the names"
    )


def _by_value(weights: Mapping[str, Stored], masters: Sequence[Sequence[Stored]]) -> list[str]:
    free = dict(weights)
    names = []
    for group in masters:
        for master in group:
            value = master.read()
            alike = [name for name, tensor in free.items() if tensor.shape == master.shape]
            name = next((name for name in alike if torch.equal(value.to(free[name].dtype), free[name].read())), None)
            if name is None:
                _give_up(master.shape, alike, 1, 1)
            names.append(name)
            del free[name]
    return names


def _flat(
    weights: Mapping[str, Stored],
    flats: Sequence[Stored],
    states: Mapping[int, Any],
    groups: Sequence[Mapping[str, Any]],
    told: list[str] | None,
) -> Parts:
    parts: Parts = {}
    free = dict(weights) if told is None else {name: weights[name] for name in told}
    for flat, group in zip(flats, groups, strict=True):
        state = states.get(group["params"][0], {})
        begin = 0
        while begin < flat.numel:
            name = next((n for n, t in free.items() if told is not None or _rounds_to(flat, begin, t)), None)
            if name is None:
                _give_up(flat.shape, list(free), 1, 1)
            tensor = free.pop(name)
            cuts = evenly(begin, tensor.numel, tensor.numel, 1)
            parts |= flat_group(name, tensor.shape, [flat], [state], group.get("step"), cuts)
            begin += tensor.numel
    return parts


def _rounds_to(flat: Stored, begin: int, tensor: Stored) -> bool:
    if begin + tensor.numel > flat.numel:
        return False
    for count in (min(64, tensor.numel), tensor.numel):  # most of those that do not fit show it at once
        value = torch.empty(count, dtype=flat.dtype)
        flat.fill(value, begin)
        if not torch.equal(value.to(tensor.dtype), tensor.read().reshape(-1)[:count]):
            return False
    return True
