"""A hash of the values of tensors that does not depend on how they are sharded."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from plait.checkpoint.pieces import HeldPiece
from plait.distributed import Channel

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_AT_ONCE = 1 << 22
_MIX = (0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64)
"""Odd multipliers of a 64-bit hash, as signed integers: one changed bit of a value changes many bits of the hash."""


def fingerprint(pieces: Sequence[HeldPiece], channel: Channel) -> str:
    """Return the hash of all tensors of all ranks; each piece must be in the `pieces` of one rank only. Collective.

    The hash is a sum over elements, of numbers that depend on an element's bits, its index in the whole tensor and the
    tensor's name. So the order in which ranks add their elements does not matter.
    """
    total = 0
    for held in pieces:
        seed = sum(byte * 257**index for index, byte in enumerate(held.piece.name.encode())) % 2**63
        total += _sum(held, seed)
    return f"{sum(channel.all_gather(total % 2**64)) % 2**64:016x}"


def _sum(held: HeldPiece, seed: int) -> int:
    """Return the sum of the elements' numbers over one piece, computed in chunks to bound the memory."""
    piece, flat = held.piece, held.tensor.reshape(-1)
    strides = [math.prod(piece.whole[dim + 1 :]) for dim in range(len(piece.whole))]
    total = 0
    for begin in range(0, flat.numel(), _AT_ONCE):
        values = flat[begin : begin + _AT_ONCE]
        bits = values.contiguous().view(_BITS[values.dtype.itemsize]).to(torch.int64)
        local = torch.arange(begin, begin + values.numel(), device=flat.device)
        total += int(_mixed(bits, _global_indices(local, piece.start, piece.shape, strides) + seed).sum())
    return total


def _global_indices(local: Tensor, start: Sequence[int], shape: Sequence[int], strides: Sequence[int]) -> Tensor:
    """Return the indices of elements in the whole tensor, from their indices in a piece of it."""
    index = torch.zeros_like(local)
    for first, length, stride in reversed(list(zip(start, shape, strides, strict=True))):
        index += (local % length + first) * stride
        local = local // length
    return index


def _mixed(bits: Tensor, index: Tensor) -> Tensor:
    mixed = (bits * _MIX[0]) ^ (index * _MIX[1])
    return (mixed ^ (mixed >> 29)) * _MIX[0]
