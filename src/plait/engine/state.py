"""The state of a native engine as a checkpoint holds it: names and global shapes do not depend on the sharding."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from plait.checkpoint import DeferredTensor, Entry
from plait.distributed import is_sharded, persistent_buffers
from plait.engine.master_weights import MasterWeights
from plait.errors import CheckpointError
from plait.kernels import pack_from_host, unpack_on_host
from plait.optim import MakeState, PlaitOptimizer, flat_tensors, is_builtin

_FACTORS = frozenset({"row_var", "col_var"})
"""Adafactor's factors, replicated on every rank although a matrix of one row or column has the same shape."""


def collect(model: nn.Module, master_weights: MasterWeights, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return every tensor that a checkpoint holds, under names that do not depend on the layout."""
    with master_weights.readable():
        if isinstance(optimizer, PlaitOptimizer):
            optimizer.unpack()
        tensors = _collect(model, master_weights, optimizer)
    return {name: entry for name, entry in tensors.items() if isinstance(entry, Tensor)}


def collect_entries(model: nn.Module, master_weights: MasterWeights, optimizer: Optimizer) -> dict[str, Entry]:
    """Return the same tensors for saving and loading: packed 8-bit states stay packed until they are read."""
    with master_weights.readable():
        return _collect(model, master_weights, optimizer)


def _collect(model: nn.Module, master_weights: MasterWeights, optimizer: Optimizer) -> dict[str, Entry]:
    tensors: dict[str, Entry] = {}
    index_of = {id(param): index for index, param in enumerate(master_weights.params)}
    for name, param in model.named_parameters():
        tensors[f"model.{name}"] = _weight(master_weights, param, index_of.get(id(param)))
    tensors.update({f"model.{name}": buffer for name, buffer in persistent_buffers(model)})
    for index, (name, tensor) in enumerate(zip(master_weights.names, master_weights.updated, strict=True)):
        kept = {} if tensor is None else optimizer.state.get(tensor, {})
        for key, value in flat_tensors(optimizer, name, kept).items():
            if isinstance(value, Tensor):
                tensors[f"optim.{name}.{key}"] = _whole(master_weights, index, value, optimizer, key)
            else:
                made, taken = partial(unpack_on_host, value), partial(pack_from_host, value)
                tensors[f"optim.{name}.{key}"] = DeferredTensor(
                    _whole(master_weights, index, value.codes, optimizer, key),
                    torch.float32,
                    make_rows=made,
                    store_rows=taken,
                )
    return tensors


def weight(master_weights: MasterWeights, param: nn.Parameter) -> Tensor:
    """Return the fp32 weights of one parameter, as a checkpoint holds them; also of an offloaded one."""
    index = next((index for index, other in enumerate(master_weights.params) if other is param), None)
    with master_weights.readable():
        return _weight(master_weights, param, index)


def _weight(master_weights: MasterWeights, param: nn.Parameter, index: int | None) -> Tensor:
    if index is None:
        return master_weights.frozen.get(param, param).detach()
    tensor = master_weights.tensors[index]
    whole = tensor if is_sharded(tensor) else master_weights.logical(index, tensor.detach())
    return whole.detach()


def _whole(master_weights: MasterWeights, index: int, value: Tensor, optimizer: Optimizer, key: str) -> Tensor:
    # An optimizer over DTensors shards its states itself, or keeps them replicated. One over local shards has states
    # of the shard's shape, and scalars.
    if is_sharded(master_weights.tensors[index]) or value.ndim == 0:
        return value
    if not is_sharded(master_weights.params[index]):
        return value
    if value.shape != master_weights.tensors[index].shape:
        raise CheckpointError(
            f"{type(optimizer).__name__} keeps {key!r} of shape {tuple(value.shape)} for a shard of shape "
            f"{tuple(master_weights.tensors[index].shape)} of {master_weights.names[index]}: it is not elementwise, so "
            "a checkpoint cannot store this state under the global shape: leave out `optim.elementwise`"
        )
    return master_weights.logical(index, value)


def allocate(
    master_weights: MasterWeights, optimizer: Optimizer, shapes: Mapping[str, tuple[torch.Size, torch.dtype]]
) -> None:
    """Allocate the optimizer tensors named in `shapes` (`<parameter>.<key>` → global shape, dtype)."""
    index_of = {name: index for index, name in enumerate(master_weights.names)}
    in_files = master_weights.allocate_states(_state_makers(master_weights, optimizer, index_of, shapes))
    for entry, (shape, dtype) in shapes.items():
        name, _, key = entry.rpartition(".")
        if name not in index_of:
            continue  # the loader reports unknown entries
        index = index_of[name]
        tensor = master_weights.updated[index]
        if tensor is None:
            continue  # another rank updates it
        if _fits(master_weights, index, key, shape):
            if index in in_files:
                continue
            zeros = _zeros(optimizer, tensor, key, dtype)
        else:
            # Scalars such as `step` lie on the host unless a fused kernel reads them on the device.
            on_device = len(shape) > 0 or _on_device(optimizer) or not (is_builtin(optimizer) or key == "step")
            device = tensor.device if on_device else torch.device("cpu")
            zeros = torch.zeros(shape, dtype=_state_dtype(optimizer, tensor, dtype) if shape else dtype, device=device)
        optimizer.state[tensor][key] = zeros


def _fits(master_weights: MasterWeights, index: int, key: str, shape: torch.Size) -> bool:
    """Whether a state has the shape of its parameter, and is sharded in the same way."""
    return shape == master_weights.params[index].shape and len(shape) > 0 and key not in _FACTORS


def _state_makers(
    master_weights: MasterWeights,
    optimizer: Optimizer,
    index_of: Mapping[str, int],
    shapes: Mapping[str, tuple[torch.Size, torch.dtype]],
) -> dict[int, dict[str, MakeState]]:
    """Return for each parameter index the functions that allocate those of its states that have its shape."""
    makers: dict[int, dict[str, MakeState]] = {}
    for entry, (shape, dtype) in shapes.items():
        name, _, key = entry.rpartition(".")
        if name in index_of and _fits(master_weights, index_of[name], key, shape):
            index = index_of[name]
            makers.setdefault(index, {})[key] = partial(_zeros, optimizer, key=key, dtype=dtype)
    return makers


def _zeros(optimizer: Optimizer, tensor: Tensor, key: str, dtype: torch.dtype) -> Any:
    dtype = _state_dtype(optimizer, tensor, dtype)
    if isinstance(optimizer, PlaitOptimizer):
        return optimizer.zero_state(tensor, key, dtype)
    return torch.zeros_like(tensor, dtype=dtype).detach()


def _state_dtype(optimizer: Optimizer, tensor: Tensor, saved: torch.dtype) -> torch.dtype:
    """Return the dtype to allocate a state in; the checkpoint may have been saved with another `precision.master`.

    States of torch's optimizers and Plait's have the dtype of the weights that they update; others keep that of the
    checkpoint (`saved`).
    """
    return tensor.dtype if is_builtin(optimizer) and saved.is_floating_point else saved


def _on_device(optimizer: Optimizer) -> bool:
    return any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
