"""One layer of GPT."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from plait.config import GptConfig
from plait.models.common.attention import Attention, Shared
from plait.models.common.init import residual_output


class FeedForward(nn.Module):
    """Four times as wide inside, with the tanh form of GELU that GPT-2 was trained with."""

    def __init__(self, dim: int, *, layers: int, bias: bool) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 4 * dim, bias=bias)
        self.down = residual_output(nn.Linear(4 * dim, dim, bias=bias), layers)

    def forward(self, x: Tensor) -> Tensor:
        """Works on each token alone."""
        return self.down(F.gelu(self.up(x), approximate="tanh"))  # type: ignore[no-any-return]


class GptBlock(nn.Module):
    """Attention, then feed-forward, each normed before and added to the residual stream."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.attention_norm = nn.LayerNorm(config.dim, bias=config.bias)
        self.attention = Attention(
            config.dim,
            config.heads,
            config.heads,
            layers=config.layers,
            bias=config.bias,
            dropout=config.dropout,
        )
        self.ffn_norm = nn.LayerNorm(config.dim, bias=config.bias)
        self.ffn = FeedForward(config.dim, layers=config.layers, bias=config.bias)

    def forward(self, x: Tensor, shared: Shared) -> Tensor:
        """One step along the residual stream (batch, tokens, dim)."""
        x = x + self._drop(self.attention(self.attention_norm(x), shared))
        return x + self._drop(self.ffn(self.ffn_norm(x)))

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)
