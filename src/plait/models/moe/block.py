"""One layer of a mixture-of-experts Llama."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from plait.config import MoeConfig
from plait.models.common.attention import Attention, Shared
from plait.models.llama.block import SwiGLU, ffn_dim
from plait.models.moe.experts import Experts
from plait.models.moe.router import Router


class Stream(NamedTuple):
    """What goes from block to block: hidden states, and beside them what the routers charge for each row.

    Penalties travel with the hidden states, through whatever stands between two blocks, because a gradient has to
    come back to each router: whoever cuts a model between blocks has to carry both.
    """

    hidden: Tensor
    """(rows, tokens, dim)"""
    penalty: Tensor
    """(rows,), fp32"""

    @classmethod
    def of(cls, x: Tensor | tuple[Tensor, Tensor]) -> Stream:
        """The stream as it is; of an embedding's output, one without penalties so far.

        They depend on the hidden states from the start, as they will later, so a gradient comes back at any cut.
        """
        return cls(*x) if isinstance(x, tuple) else cls(x, x[:, :0].float().sum((1, 2)))


class Mixture(nn.Module):
    """A feed-forward of many experts, of which each token sees a few; and of shared ones, which all see."""

    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        hidden = expert_dim(config)
        self.router = Router(config)
        self.experts = Experts(
            config.experts, config.dim, hidden, layers=config.layers, drops=config.capacity_factor is not None
        )
        shared = config.shared_experts * hidden
        self.shared = SwiGLU(config.dim, shared, layers=config.layers) if shared else None

    def forward(self, x: Tensor, real: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The answer to (rows, tokens, dim), and each row's penalty, which only `real` tokens have a part in."""
        index, weights, penalty = self.router(x, real)
        hidden = x.flatten(0, 1)
        if torch.is_autocast_enabled(x.device.type):  # once, before rows are repeated, and perhaps sent
            hidden = hidden.to(torch.get_autocast_dtype(x.device.type))
        y = self.experts(hidden, index, weights).unflatten(0, x.shape[:2])
        return (y if self.shared is None else y + self.shared(x)), penalty


class MoeBlock(nn.Module):
    """Attention, then a feed-forward, dense or mixed; each normed before and added to the residual stream."""

    def __init__(self, config: MoeConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config.dim, config.heads, config.kv_heads or config.heads, layers=config.layers)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.ffn: Mixture | SwiGLU = (
            Mixture(config) if is_mixture(config, layer) else SwiGLU(config.dim, ffn_dim(config), layers=config.layers)
        )

    def forward(self, x: Tensor, shared: Shared, penalty: Tensor) -> Stream:
        """One step along the stream of hidden states (rows, tokens, dim) and penalties (rows)."""
        x = x + self.attention(self.attention_norm(x), shared)
        if not isinstance(self.ffn, Mixture):
            return Stream(x + self.ffn(self.ffn_norm(x)), penalty)
        answer, charged = self.ffn(self.ffn_norm(x), real=shared.real)
        return Stream(x + answer, penalty + charged)


def is_mixture(config: MoeConfig, layer: int) -> bool:
    """Whether a layer's feed-forward is a mixture: the last one of each `moe_every` layers."""
    return (layer + 1) % config.moe_every == 0


def expert_dim(config: MoeConfig) -> int:
    """The width of one expert: as configured, or that of the dense feed-forward."""
    return config.expert_dim or ffn_dim(config)
