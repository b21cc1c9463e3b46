"""`accelerate.utils.operations`: operations on nested tensors, and collectives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plait.config import Layout
from plait.distributed import Ranks, World, make_mesh
from plait.frontends.accelerate.prepared import Gatherer, apply, apply_to_all, in_fp32


def gather_object(object: Any) -> list[Any]:
    """Return every rank's list of objects as one list."""
    if not dist.is_initialized():
        return list(object)
    lists: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(lists, object)
    return [item for items in lists for item in items]


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Replace every rank's objects by those of one rank, in place; return the list."""
    if dist.is_initialized():
        dist.broadcast_object_list(object_list, src=from_process)
    return object_list


# ---- tensors of all ranks. An `Accelerator` uses only one of several ranks that read the same data; these use all.


def gather(tensor: Any) -> Any:
    """Return nested tensors of all ranks, concatenated along the first dimension."""
    return _all_ranks().gather(tensor)


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """Return the mean or sum of nested tensors over all ranks, times `scale`."""
    return _all_ranks().reduce(tensor, reduction, scale)


def pad_across_processes(tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
    """Return nested tensors, each padded along `dim` to the size of the largest of all ranks."""
    return _all_ranks().pad(tensor, dim=dim, pad_index=pad_index, pad_first=pad_first)


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """Overwrite nested tensors with those of one rank; return them."""

    def one(item: Tensor) -> Tensor:
        if dist.is_initialized():
            dist.broadcast(item, src=from_process)
        return item

    return apply(one, tensor)


def send_to_device(
    tensor: Any, device: Any, non_blocking: bool = False, skip_keys: str | Sequence[str] | None = None
) -> Any:
    """Return nested tensors on a device; values of a mapping under `skip_keys` are not moved."""
    skipped = {skip_keys} if isinstance(skip_keys, str) else set(skip_keys or ())
    if isinstance(tensor, Mapping) and skipped & tensor.keys():
        moved = {
            key: value if key in skipped else send_to_device(value, device, non_blocking)
            for key, value in tensor.items()
        }
        return type(tensor)(moved)  # type: ignore[call-arg]
    return apply(lambda item: item.to(device, non_blocking=non_blocking), tensor)


# ---- tensors of this rank


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = torch.is_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """Return nested values with `func(leaf, *args, **kwargs)` in place of each leaf that `test_type` accepts."""

    def one(item: Any) -> Any:
        if test_type(item):
            return func(item, *args, **kwargs)
        if error_on_other_type:
            raise TypeError(f"{func.__name__} cannot be applied to a {type(item).__name__}")
        return item

    return apply_to_all(one, data)


def convert_to_fp32(tensor: Any) -> Any:
    """Return nested values with 16-bit tensors in fp32."""
    return in_fp32(tensor)


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward function whose 16-bit outputs are converted to fp32."""

    @wraps(model_forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return in_fp32(model_forward(*args, **kwargs))

    return forward


def concatenate(data: Sequence[Any], dim: int = 0) -> Any:
    """Return equally nested tensors, concatenated along `dim`."""
    first = data[0]
    if isinstance(first, Mapping):
        joined = {key: concatenate([item[key] for item in data], dim) for key in first}
        return type(first)(joined)  # type: ignore[call-arg]
    if isinstance(first, (list, tuple)):
        return type(first)(concatenate([item[i] for item in data], dim) for i in range(len(first)))
    return torch.cat(list(data), dim=dim)


def find_batch_size(data: Any) -> int | None:
    """Return the length of the first tensor of nested values; None without a tensor."""
    if isinstance(data, Tensor):
        return data.shape[0]
    items = data.values() if isinstance(data, Mapping) else data if isinstance(data, (list, tuple)) else ()
    return next((size for item in items if (size := find_batch_size(item)) is not None), None)


def listify(data: Any) -> Any:
    """Return nested tensors as lists of numbers."""
    return apply(lambda item: item.detach().cpu().tolist(), data)


def _all_ranks() -> Gatherer:
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return _gatherer(rank, size)


@cache
def _gatherer(rank: int, size: int) -> Gatherer:
    """Return a gatherer over the existing process group, cached: each new `World` would replace the heartbeat."""
    device = torch.device("cuda" if size > 1 and dist.get_backend() == "nccl" else "cpu")
    layout = Layout(dp_replicate=size)
    mesh = make_mesh(layout, device) if size > 1 else None
    return Gatherer(World(Ranks(rank, size, rank, size, launcher="caller"), device, layout, mesh, owns_processes=False))
