"""Numbers that decide draws, without a generator.

[Note: a row's chance is its own]
The number that decides a choice is a hash of (seed, key of the row, how many tokens the row has so far). So a text
depends on its prompt, its key and the seed, and on nothing else: neither on what else is in the batch, nor on which
rank computes it, nor on rows that leave early. There is no generator whose state would have to be carried along, and
nothing that a CUDA graph could not repeat.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

from torch import Tensor

from plait.ops.triton import HAS_TRITON

CHANCE_BITS = 28
"""Of the number that decides."""
_WORD = 0xFFFFFFFF
_Bits = TypeVar("_Bits", int, Tensor)

if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def _scattered(bits):  # type: ignore[no-untyped-def]
        """`_mixed`, of 32 bits in 64."""
        bits = ((bits ^ (bits >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
        bits = ((bits ^ (bits >> 15)) * 0x846CA68B) & 0xFFFFFFFF
        return bits ^ (bits >> 16)

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def chance_of(seed, key, count, bits: tl.constexpr):  # type: ignore[no-untyped-def]
        """The chance of a row, from a seed that `Chance.seed_bits` gave, its key and its count (int64 both)."""
        begun = _scattered((seed.to(tl.int64) + key) & 0xFFFFFFFF)
        keyed = _scattered(begun ^ ((key >> 32) & 0xFFFFFFFF))
        return _scattered((keyed + count * 0x9E3779B9) & 0xFFFFFFFF) >> (32 - bits)


class Chance(NamedTuple):
    """What the chances of rows follow from; see [Note: a row's chance is its own]."""

    keys: Tensor
    """(rows), int64"""
    counts: Tensor
    """How many tokens each row has (rows), int64."""
    seed: int

    def bits(self) -> Tensor:
        """A number of `CHANCE_BITS` bits for each row."""
        keyed = _mixed(_mixed(self.keys + _begun(self.seed) & _WORD) ^ (self.keys >> 32 & _WORD))
        return _mixed(keyed + self.counts * 0x9E3779B9 & _WORD) >> (32 - CHANCE_BITS)

    def seed_bits(self) -> int:
        """The seed as a kernel takes it: with a sign, for Triton would compile another one for more than 31 bits."""
        begun = _begun(self.seed)
        return begun - (1 << 32) if begun >> 31 else begun


def with_seed(key: int, seed: int) -> int:
    """The key whose chances under seed 0 are those of `key` under `seed`, so that one batch may mix seeds."""
    return (key >> 32) << 32 | (key + _begun(seed)) & _WORD


def _begun(seed: int) -> int:
    return _mixed((seed & _WORD) ^ (seed >> 32 & _WORD))


def _mixed(bits: _Bits) -> _Bits:
    """Scatter 32 bits, held in 64, over all 32: two rounds of shift and multiply."""
    bits = ((bits ^ bits >> 16) * 0x7FEB352D) & _WORD
    bits = ((bits ^ bits >> 15) * 0x846CA68B) & _WORD
    return bits ^ bits >> 16
