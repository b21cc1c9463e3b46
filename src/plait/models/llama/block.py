"""One layer of Llama."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from plait.config import LlamaConfig
from plait.models.common.attention import Attention, Shared
from plait.models.common.init import residual_output


class SwiGLU(nn.Module):
    """A gated feed-forward: down(silu(gate(x)) * up(x))."""

    def __init__(self, dim: int, hidden: int, *, layers: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = residual_output(nn.Linear(hidden, dim, bias=False), layers)

    def forward(self, x: Tensor) -> Tensor:
        """Works on each token alone."""
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class LlamaBlock(nn.Module):
    """Attention, then feed-forward, each normed before and added to the residual stream."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        kv_heads = config.kv_heads or config.heads
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config.dim, config.heads, kv_heads, layers=config.layers)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.ffn = SwiGLU(config.dim, ffn_dim(config), layers=config.layers)

    def forward(self, x: Tensor, shared: Shared) -> Tensor:
        """One step along the residual stream (batch, tokens, dim)."""
        x = x + self.attention(self.attention_norm(x), shared)
        return x + self.ffn(self.ffn_norm(x))  # type: ignore[no-any-return]


def ffn_dim(config: LlamaConfig) -> int:
    """The width of the feed-forward: as configured, or 8/3 of `dim` rounded up to a multiple of 64."""
    return config.ffn_dim or -(-8 * config.dim // (3 * 64)) * 64
