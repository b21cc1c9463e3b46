"""Tensors and objects of all ranks, in the order of the data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plait.errors import TrainingError
from plait.frontends.accelerate.prepared import apply
from plait.world import World


class Gatherer:
    """Collectives over the ranks that see different data, one of each where several see the same."""

    def __init__(self, world: World) -> None:
        self._world = world
        ranks: dict[int, int] = {}
        for rank, share in enumerate(world.gather(world.data_rank)):
            ranks.setdefault(share, rank)
        self._ranks = [ranks[share] for share in sorted(ranks)]

    def gather(self, value: Any) -> Any:
        """Each tensor of nested values, from every rank, one after another along the first dimension."""
        return apply(self._gather, value)

    def _gather(self, tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        tensor = tensor.reshape(1) if tensor.ndim == 0 else tensor.contiguous()
        if self._world.size == 1:
            return tensor
        parts = [torch.empty_like(tensor) for _ in range(self._world.size)]
        dist.all_gather(parts, tensor)
        return torch.cat([parts[rank] for rank in self._ranks])

    def gather_objects(self, value: Sequence[Any]) -> list[Any]:
        """Every rank's objects, as one list."""
        parts = self._world.gather(list(value) if isinstance(value, (list, tuple)) else [value])
        return [each for rank in self._ranks for each in parts[rank]]

    def gather_for_metrics(self, value: Any, gradients: Any, *, as_objects: bool) -> Any:
        """Everything of a round of batches, without the samples that were repeated to fill it up.

        `gradients` knows whether the round is the last one, and how many of its samples are no repetitions.
        """
        objects = as_objects or not has_only_tensors(value)
        data = self.gather_objects(value) if objects else self.gather(value)
        count = gradients.remainder
        if not gradients.end_of_dataloader or count <= 0:
            return data
        return data[:count] if objects else first_rows(data, count)

    def reduce(self, value: Any, reduction: str, scale: float) -> Any:
        """The sum or mean of each tensor over all ranks, times `scale`."""
        if reduction not in ("sum", "mean", "none"):
            raise TrainingError(f"reduction={reduction!r} is not known: write 'sum', 'mean' or 'none'")

        def one(tensor: Tensor) -> Tensor:
            total = tensor.detach().clone()
            if self._world.size > 1 and reduction != "none":
                dist.all_reduce(total)
            if reduction == "mean":
                total = total / self._world.size
            return total * scale if scale != 1.0 else total

        return apply(one, value)

    def pad(self, value: Any, *, dim: int, pad_index: int, pad_first: bool) -> Any:
        """Each tensor as long along `dim` as the longest of all ranks, filled up with `pad_index`."""

        def one(tensor: Tensor) -> Tensor:
            if self._world.size == 1 or not -tensor.ndim <= dim < tensor.ndim:
                return tensor
            longest = max(self._world.gather(tensor.shape[dim]))
            missing = longest - tensor.shape[dim]
            if missing == 0:
                return tensor
            shape = list(tensor.shape)
            shape[dim] = missing
            filling = tensor.new_full(shape, pad_index)
            return torch.cat((filling, tensor) if pad_first else (tensor, filling), dim=dim)

        return apply(one, value)


def has_only_tensors(value: Any) -> bool:
    """Whether nested values are tensors throughout."""
    if isinstance(value, Tensor):
        return True
    if isinstance(value, dict):
        return all(has_only_tensors(each) for each in value.values())
    return isinstance(value, (list, tuple)) and all(has_only_tensors(each) for each in value)


def first_rows(value: Any, count: int) -> Any:
    """The first rows of nested tensors."""
    return apply(lambda tensor: tensor[:count], value)
