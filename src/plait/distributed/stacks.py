"""Initial values of stacks, such as the experts of a mixture, of which a rank computes only its own region.

[Note: stacks are filled in blocks]
The experts of one layer are a few parameters with a slice per expert, which may be larger than everything else that a
rank holds. So an initializer does not get the full tensor of such a parameter (`StackShard.stand_in`: its shape, with
the memory of one number), and the operations by which it fills it are carried out on the region of this rank alone
(`StackShard.local`). Random numbers are drawn for all rows, in blocks, and those of other ranks are dropped: the values
stay the same in every layout. On the CPU they are also those of one draw of the full tensor, because blocks are
multiples of the 16 numbers that torch draws at a time. On a GPU they are not: there, every stack with more than
`BLOCK` numbers is filled in blocks, also where one rank holds all of it. An initializer that reads a stack, or writes
to it by slices, gets the full tensor after all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from plait.distributed.dtensor import is_sharded
from plait.torch_internals import intercept_operations, storage_key, tree_leaves

Region = tuple[slice, ...]
"""A slice of each dimension of a tensor; () for the full tensor."""

BLOCK = 1 << 26
"""The most numbers that are drawn at a time, unless one row has more."""
_DRAWN_TOGETHER = 16
"""The CPU draws normally distributed numbers in groups of this many."""

_aten = torch.ops.aten
_DRAWS = frozenset({_aten.normal_.default, _aten.uniform_.default})
_ELEMENTWISE = frozenset(
    {
        _aten.zero_.default,
        _aten.fill_.Scalar,
        _aten.fill_.Tensor,
        _aten.mul_.Scalar,
        _aten.mul_.Tensor,
        _aten.add_.Scalar,
        _aten.add_.Tensor,
        _aten.div_.Scalar,
        _aten.div_.Tensor,
        _aten.clamp_.default,
        _aten.erfinv_.default,
    }
)
"""Operations that compute each element of their first argument from that element and from numbers."""
_SAME_ELEMENTS = frozenset({_aten.detach.default, _aten.alias.default})


class WholeStackError(Exception):
    """An initializer does what cannot be done with a shard of a stack."""


class StackShard:
    """A stack of which this rank computes a region."""

    def __init__(self, param: nn.Parameter, region: Region, dtype: torch.dtype, device: torch.device) -> None:
        self.stand_in = torch.empty(1, dtype=dtype, device=device).expand(param.shape)
        """A tensor like the full one, in which all elements share their memory."""
        self._rows, self._inside = region[0], region[1:]
        sizes = [len(range(*index.indices(size))) for index, size in zip(region, param.shape, strict=True)]
        self.local = torch.empty(sizes, dtype=dtype, device=device)

    def fill(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Carry out an operation whose first argument is the stack."""
        others = [leaf for leaf in tree_leaves((args[1:], kwargs)) if isinstance(leaf, Tensor)]
        if args[0].shape != self.stand_in.shape or any(other.ndim for other in others):
            raise WholeStackError
        if func in _ELEMENTWISE:
            func(self.local, *args[1:], **kwargs)
        elif func in _DRAWS and kwargs.get("generator") is None:
            for rows in blocks(self.stand_in.shape):
                drawn = self.local.new_empty((len(rows), *self.stand_in.shape[1:]))
                func(drawn, *args[1:], **kwargs)
                first, last = max(rows.start, self._rows.start), min(rows.stop, self._rows.stop)
                if first < last:
                    mine = drawn[(slice(first - rows.start, last - rows.start), *self._inside)]
                    self.local[first - self._rows.start : last - self._rows.start].copy_(mine)
        else:
            raise WholeStackError


def blocks(shape: torch.Size) -> Iterator[range]:
    """Yield the rows of each block of a stack: as many for every layout."""
    count, row = shape[0], max(1, math.prod(shape[1:]))
    together = _DRAWN_TOGETHER // math.gcd(row, _DRAWN_TOGETHER)
    rows = max(1, BLOCK // row // together) * together
    first = 0
    while first < count:
        last = first + rows
        # A remainder with fewer numbers than are drawn together would be drawn in another way.
        if (count - last) * row < _DRAWN_TOGETHER:
            last = count
        yield range(first, last)
        first = last


def find_stacks(params: Mapping[str, nn.Parameter], region_of: Callable[[Tensor], Region | None]) -> dict[str, Region]:
    """Return the stacks among the parameters of a module, each with the region that this rank holds."""
    stacks = {}
    for key, param in params.items():
        if param.ndim < 3 or not (is_sharded(param) if param.device.type == "cpu" else param.numel() > BLOCK):
            continue
        region = region_of(param)
        if region is None:
            region = (slice(0, 0), *(slice(0, size) for size in param.shape[1:]))
        elif region == ():  # all of it, or what is not one region
            region = tuple(slice(0, size) for size in param.shape)
        stacks[key] = region
    return stacks


def fill_shards(shards: Iterable[StackShard]) -> AbstractContextManager[Any]:
    """Return a context in which operations on the stand-ins of stacks fill the shards; others run as they are.

    An operation that is not possible with a shard raises `WholeStackError`.
    """
    shard_of = {storage_key(shard.stand_in): shard for shard in shards}
    if not shard_of:
        return nullcontext()

    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        stacks = [tensor for tensor in given if storage_key(tensor) in shard_of]
        if not stacks or func in _SAME_ELEMENTS:
            return func(*args, **kwargs)
        if len(stacks) > 1 or stacks[0] is not args[0]:
            raise WholeStackError
        shard_of[storage_key(stacks[0])].fill(func, args, kwargs)
        return stacks[0]

    return intercept_operations(run)
