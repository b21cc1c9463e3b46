"""From a model without storage to one with values, rank by rank.

[Note: initial values do not depend on the layout]
Every module's values are a pure function of (seed, module name): each rank makes the whole tensors of one
module at a time, from that seed, and keeps its part. So any layout starts from the same weights, and no rank
holds more than one module beyond its own shards.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from plait.parallel.initializer import Initializer
from plait.torch_internals import storage_key
from plait.world import is_sharded, local_part


def give_storage(model: nn.Module, device: torch.device, *, then: Callable[[nn.Module], None] | None = None) -> None:
    """Allocate every tensor that is still on the meta device, keeping tied parameters and shared buffers tied.

    Of a sharded model `then` may take each unit's memory away again, before the next unit gets its own.
    """
    ties: dict[int, list[tuple[dict[str, Any], str]]] = {}
    for module in model.modules():
        held: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for tensors in held:
            for key, tensor in tensors.items():
                if tensor is not None:
                    ties.setdefault(id(tensor), []).append((tensors, key))
    if then is None:
        model.to_empty(device=device)
    else:
        for module in [module for module in model.modules() if hasattr(module, "unshard")][::-1]:  # the root is last
            for inner in _own_modules(module):
                inner.to_empty(device=device, recurse=False)
            then(module)
    for (first, first_key), *others in ties.values():
        for tensors, key in others:
            tensors[key] = first[first_key]


def _own_modules(unit: nn.Module) -> list[nn.Module]:
    """The modules of a unit that are in no other unit inside; itself last, since it looks at all of them then."""
    inner = [module for child in unit.children() if not hasattr(child, "unshard") for module in _own_modules(child)]
    return [*inner, unit]


Keep = Callable[[nn.Parameter, torch.Tensor], bool]
"""Is given a parameter and its whole values in fp32, and says whether the parameter itself need not have them."""


def initialize(
    model: nn.Module, initializer: Initializer, *, seed: int, device: torch.device, keep: Keep | None = None
) -> None:
    """Set all values; see [Note: initial values do not depend on the layout]."""
    done: set[int] = set()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.no_grad():
        for name, module in model.named_modules():
            held = {k: p for k, p in module._parameters.items() if p is not None}
            fresh = {k for k, p in held.items() if id(p) not in done}
            if not fresh and all(b is None for b in module._buffers.values()):
                continue
            done.update(id(p) for p in held.values())
            torch.manual_seed(_seed_of(seed, name))
            _initialize_module(module, held, fresh, initializer, device, keep)


def initialize_buffers(model: nn.Module, initializer: Initializer, *, seed: int, device: torch.device) -> None:
    """Set what is no parameter, such as tables that are made from the configuration."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.no_grad():
        for name, module in model.named_modules():
            if any(buffer is not None for buffer in module._buffers.values()):
                held = {key: param for key, param in module._parameters.items() if param is not None}
                torch.manual_seed(_seed_of(seed, name))
                _initialize_module(module, held, set(), initializer, device, None)


def _initialize_module(
    module: nn.Module,
    held: dict[str, nn.Parameter],
    fresh: set[str],
    initializer: Initializer,
    device: torch.device,
    keep: Keep | None,
) -> None:
    """Fill the `fresh` parameters of one module; the others it shares with a module that came before."""
    # A parameter that is whole here already is filled where it is.
    there = {key for key in fresh if keep is None and _is_whole(held[key], device)}
    whole = {
        key: nn.Parameter(
            p.detach() if key in there else torch.empty(p.shape, dtype=_wide(p, keep), device=device),
            requires_grad=p.requires_grad,
        )
        for key, p in held.items()
    }
    for key, param in held.items():
        vars(whole[key]).update(vars(param))  # an initializer may ask for what was set on a parameter
    module._parameters.update(whole)
    try:
        initializer(module)
    finally:
        module._parameters.update(held)
    for key in fresh:
        values = whole[key].data
        if key in there and _storage(values) == _storage(held[key]):
            continue  # unless the initializer gave it another one
        if keep is None or not keep(held[key], values):
            assign_whole(held[key], values)


def _storage(tensor: torch.Tensor) -> int:
    return storage_key(tensor)


def _is_whole(param: nn.Parameter, device: torch.device) -> bool:
    return not is_sharded(param) and param.device == device and param.is_contiguous()


def _wide(param: nn.Parameter, keep: Keep | None) -> torch.dtype:
    rounds = keep is not None and param.dtype in (torch.bfloat16, torch.float16)
    return torch.float32 if rounds else param.dtype


def assign_whole(param: torch.Tensor, whole: torch.Tensor) -> None:
    """Copy a whole tensor into a parameter, of which this rank may hold only a part."""
    with torch.no_grad():
        local_part(param).copy_(part_of(param, whole))


def part_of(param: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a whole tensor that is spread as a parameter is. Call it without gradients enabled."""
    if not is_sharded(param):
        return whole
    from torch.distributed.tensor import distribute_tensor

    # src_data_rank=None: every rank has the whole tensor, so nothing is sent.
    device = param.device_mesh.device_type
    part = distribute_tensor(whole.to(device), param.device_mesh, param.placements, src_data_rank=None)
    return part.to_local()


def _seed_of(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little") % 2**63


def copy_from_main(model: nn.Module, group: dist.ProcessGroup, device: torch.device) -> None:
    """Make every rank's parameters and buffers those of rank 0, tensor by tensor."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            staged = tensor.detach().to(device).contiguous()
            dist.broadcast(staged, src=0, group=group)
            tensor.copy_(staged)
