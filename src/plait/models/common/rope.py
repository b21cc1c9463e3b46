"""Rotary positions, in the rotate-half layout that published Llama weights have."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rotary:
    """Cosines and sines of one forward, each (batch or 1, 1, tokens, head_dim / 2), fp32."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def at(cls, positions: Tensor, head_dim: int, base: float) -> Rotary:
        """The table for positions of shape (batch or 1, tokens).

        Computed anew for each forward rather than kept in a buffer: it costs next to nothing beside one
        attention, and a model without buffers has nothing to restore after a build on the meta device.
        """
        return cls(*rotary_table(positions, head_dim, base))

    def rotate(self, x: Tensor) -> Tensor:
        """Turn each pair (i, i + head_dim / 2) of (batch, heads, tokens, head_dim) by its angle.

        In fp32 whatever the dtype of `x`: bf16 cannot tell neighbouring positions apart far from zero.
        """
        first, second = x.float().chunk(2, dim=-1)
        turned = (first * self.cos - second * self.sin, second * self.cos + first * self.sin)
        return torch.cat(turned, dim=-1).to(x.dtype)


def rotate_both(rotary: Rotary, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys, turned."""
    return rotary.rotate(q), rotary.rotate(k)


# One operator to `torch.compile`: traced into, powers, cosines and sines would be fused into every layer that
# uses the table, and so computed anew in each of them.
@torch.library.custom_op("plait::rotary_table", mutates_args=())
def rotary_table(positions: Tensor, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each (batch or 1, 1, tokens, head_dim / 2), fp32."""
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angles = positions[:, None, :, None].float() * (1.0 / base**exponents)
    return angles.cos(), angles.sin()


@rotary_table.register_fake
def _(positions: Tensor, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
    batch, tokens = positions.shape
    shape = (batch, 1, tokens, head_dim // 2)
    return positions.new_empty(shape, dtype=torch.float32), positions.new_empty(shape, dtype=torch.float32)
