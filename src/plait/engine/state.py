"""The logical state of a native engine: names and whole shapes, however it is spread."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from plait.checkpoint import Entry, Later
from plait.distributed import is_sharded, persistent_buffers
from plait.engine.master_weights import MasterWeights
from plait.errors import CheckpointError
from plait.kernels import pack_from_host, unpack_on_host
from plait.optim import MakeState, OwnOptimizer, is_known, tensors_of

_FACTORS = frozenset({"row_var", "col_var"})
"""Adafactor's, whole on every rank although a matrix of one row or column has the same shape."""


def collect(model: nn.Module, views: MasterWeights, optimizer: Optimizer) -> dict[str, Tensor]:
    """Every tensor a checkpoint holds, under names that no layout changes."""
    with views.revealed():
        if isinstance(optimizer, OwnOptimizer):
            optimizer.widen()
        found = _collect(model, views, optimizer)
    return {name: entry for name, entry in found.items() if isinstance(entry, Tensor)}


def collect_entries(model: nn.Module, views: MasterWeights, optimizer: Optimizer) -> dict[str, Entry]:
    """The same for whoever saves or loads; what training holds in another form stays in that."""
    with views.revealed():
        return _collect(model, views, optimizer)


def _collect(model: nn.Module, views: MasterWeights, optimizer: Optimizer) -> dict[str, Entry]:
    tensors: dict[str, Entry] = {}
    index_of = {id(param): index for index, param in enumerate(views.params)}
    for name, param in model.named_parameters():
        tensors[f"model.{name}"] = _weight(views, param, index_of.get(id(param)))
    tensors.update({f"model.{name}": buffer for name, buffer in persistent_buffers(model)})
    for index, (name, tensor) in enumerate(zip(views.names, views.updated, strict=True)):
        kept = {} if tensor is None else optimizer.state.get(tensor, {})
        for key, value in tensors_of(optimizer, name, kept).items():
            if isinstance(value, Tensor):
                tensors[f"optim.{name}.{key}"] = _whole(views, index, value, optimizer, key)
            else:
                made, taken = partial(unpack_on_host, value), partial(pack_from_host, value)
                tensors[f"optim.{name}.{key}"] = Later(
                    _whole(views, index, value.codes, optimizer, key), torch.float32, make=made, take=taken
                )
    return tensors


def weight(views: MasterWeights, param: nn.Parameter) -> Tensor:
    """The weights behind one parameter, as a checkpoint holds them, wherever they live."""
    index = next((index for index, each in enumerate(views.params) if each is param), None)
    with views.revealed():
        return _weight(views, param, index)


def _weight(views: MasterWeights, param: nn.Parameter, index: int | None) -> Tensor:
    if index is None:
        return views.frozen.get(param, param).detach()
    tensor = views.tensors[index]
    whole = tensor if is_sharded(tensor) else views.logical(index, tensor.detach())
    return whole.detach()


def _whole(views: MasterWeights, index: int, value: Tensor, optimizer: Optimizer, key: str) -> Tensor:
    # An optimizer that sees the DTensor itself cuts what is to be cut, and the rest is whole. One that sees this
    # rank's part has states of the part's shape, and scalars.
    if is_sharded(views.tensors[index]) or value.ndim == 0:
        return value
    if not is_sharded(views.params[index]):
        return value
    if value.shape != views.tensors[index].shape:
        raise CheckpointError(
            f"{type(optimizer).__name__} keeps {key!r} of shape {tuple(value.shape)} for a part of shape "
            f"{tuple(views.tensors[index].shape)} of {views.names[index]}, so it does not go number by number, and a "
            "checkpoint cannot say what that is of the whole: leave out `optim.elementwise`"
        )
    return views.logical(index, value)


def allocate(views: MasterWeights, optimizer: Optimizer, shapes: Mapping[str, tuple[torch.Size, torch.dtype]]) -> None:
    """Make room for the optimizer tensors named in `shapes` (`<parameter>.<key>` → whole shape, dtype)."""
    index_of = {name: index for index, name in enumerate(views.names)}
    elsewhere = views.make_room(_of_whole_shape(views, optimizer, index_of, shapes))
    for entry, (shape, dtype) in shapes.items():
        name, _, key = entry.rpartition(".")
        if name not in index_of:
            continue  # the loader reports entries that nobody wants
        index = index_of[name]
        tensor = views.updated[index]
        if tensor is None:
            continue  # another rank updates it
        if _fits(views, index, key, shape):
            if index in elsewhere:
                continue
            room = _room_for(optimizer, tensor, key, dtype)
        else:
            # Scalars such as `step` live on the host unless a fused kernel reads them on the device.
            at_home = len(shape) > 0 or _on_device(optimizer) or not (is_known(optimizer) or key == "step")
            device = tensor.device if at_home else torch.device("cpu")
            room = torch.zeros(shape, dtype=_format(optimizer, tensor, dtype) if shape else dtype, device=device)
        optimizer.state[tensor][key] = room


def _fits(views: MasterWeights, index: int, key: str, shape: torch.Size) -> bool:
    """Whether a state has the shape of its parameter, and is cut as it is."""
    return shape == views.params[index].shape and len(shape) > 0 and key not in _FACTORS


def _of_whole_shape(
    views: MasterWeights,
    optimizer: Optimizer,
    index_of: Mapping[str, int],
    shapes: Mapping[str, tuple[torch.Size, torch.dtype]],
) -> dict[int, dict[str, MakeState]]:
    """For each parameter what makes its states of its own shape."""
    found: dict[int, dict[str, MakeState]] = {}
    for entry, (shape, dtype) in shapes.items():
        name, _, key = entry.rpartition(".")
        if name in index_of and _fits(views, index_of[name], key, shape):
            index = index_of[name]
            found.setdefault(index, {})[key] = partial(_room_for, optimizer, key=key, dtype=dtype)
    return found


def _room_for(optimizer: Optimizer, tensor: Tensor, key: str, dtype: torch.dtype) -> Any:
    dtype = _format(optimizer, tensor, dtype)
    if isinstance(optimizer, OwnOptimizer):
        return optimizer.room_for(tensor, key, dtype)
    return torch.zeros_like(tensor, dtype=dtype).detach()


def _format(optimizer: Optimizer, tensor: Tensor, saved: torch.dtype) -> torch.dtype:
    """Of a state that was saved in some format, perhaps while `precision.master` was another, the one to train with.

    torch's optimizers and Plait's take states in the format of the weights that they update. Others know best.
    """
    return tensor.dtype if is_known(optimizer) and saved.is_floating_point else saved


def _on_device(optimizer: Optimizer) -> bool:
    return any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
