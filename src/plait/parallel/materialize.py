"""From a model without storage to one with values, rank by rank.

[Note: initial values do not depend on the layout]
Every module's values are a pure function of (seed, module name): each rank makes the whole tensors of one
module at a time, from that seed, and keeps its part. So any layout starts from the same weights, and no rank
holds more than one module beyond its own shards.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

Initializer = Callable[[nn.Module], None]


def find_initializer(model: nn.Module) -> Initializer | None:
    """What sets the values of one module: the model's `init_weights(module)`, or each module's own reset.

    None where some module has values and no way to set them; such a model must be built for real.
    """
    declared = getattr(model, "init_weights", None)
    if declared is not None and _takes_a_module(declared):
        return declared  # type: ignore[no-any-return]
    for module in model.modules():
        has_values = any(t is not None for t in (*module._parameters.values(), *module._buffers.values()))
        if has_values and not callable(getattr(module, "reset_parameters", None)):
            return None
    return lambda module: module.reset_parameters()  # type: ignore[operator]


def _takes_a_module(function: Callable[..., Any]) -> bool:
    required = [p for p in inspect.signature(function).parameters.values() if p.default is p.empty]
    return len(required) == 1


def give_storage(model: nn.Module, device: torch.device) -> None:
    """Allocate every tensor that is still on the meta device, keeping tied parameters tied."""
    ties: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for key, param in module._parameters.items():
            if param is not None:
                ties.setdefault(id(param), []).append((module, key))
    model.to_empty(device=device)
    for (first, first_key), *others in ties.values():
        for module, key in others:
            module._parameters[key] = first._parameters[first_key]


def initialize(model: nn.Module, initializer: Initializer, *, seed: int, device: torch.device) -> None:
    """Set all values; see [Note: initial values do not depend on the layout]."""
    done: set[int] = set()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.no_grad():
        for name, module in model.named_modules():
            own = {k: p for k, p in module._parameters.items() if p is not None and id(p) not in done}
            has_buffers = any(b is not None for b in module._buffers.values())
            if not own and not (has_buffers and not module._parameters):
                continue
            done.update(id(p) for p in own.values())
            torch.manual_seed(_seed_of(seed, name))
            _initialize_module(module, own, initializer, device)


def _initialize_module(
    module: nn.Module, own: dict[str, nn.Parameter], initializer: Initializer, device: torch.device
) -> None:
    whole = {
        key: nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device=device), requires_grad=p.requires_grad)
        for key, p in own.items()
    }
    module._parameters.update(whole)
    try:
        initializer(module)
    finally:
        module._parameters.update(own)
    for key, param in own.items():
        assign_whole(param, whole[key].data)


def assign_whole(param: torch.Tensor, whole: torch.Tensor) -> None:
    """Copy a whole tensor into a parameter, of which this rank may hold only a part."""
    with torch.no_grad():
        if isinstance(param, DTensor):
            # src_data_rank=None: every rank has the whole tensor, so nothing is sent.
            part = distribute_tensor(whole.to(param.device), param.device_mesh, param.placements, src_data_rank=None)
            param.to_local().copy_(part.to_local())
        else:
            param.copy_(whole)


def _seed_of(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little") % 2**63


def copy_from_main(model: nn.Module, group: dist.ProcessGroup, device: torch.device) -> None:
    """Make every rank's parameters and buffers those of rank 0, tensor by tensor."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            staged = tensor.detach().to(device).contiguous()
            dist.broadcast(staged, src=0, group=group)
            tensor.copy_(staged)
