"""A model of one's own: a small causal language model that every technique of Plait can take."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait import LossTerm


class Block(nn.Module):
    """Causal self-attention, then a gated feed-forward."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.q, self.k, self.v = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.out = nn.Linear(dim, dim, bias=False)
        self.up, self.gate = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(dim, 4 * dim, bias=False)
        self.down = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return hidden states of the same shape."""
        h = self.norm1(x)
        # -1, because a tensor-parallel rank has some of the heads.
        q, k, v = (part(h).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        y: Tensor = self.down(self.up(h) * F.silu(self.gate(h)))
        return x + y


class TinyLM(nn.Module):
    """Predicts the next token. What it declares beside `forward` lets Plait shard, cut and pipeline it."""

    block_classes: ClassVar[tuple[type[nn.Module], ...]] = (Block,)

    def __init__(self, vocab_size: int, dim: int = 32, layers: int = 2, heads: int = 4, seq_len: int = 64) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, dim)
        self.places = nn.Embedding(seq_len, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab_size, bias=False)

    def tensor_plan(self) -> dict[str, str]:
        """Return how tensor-parallel ranks share the layers."""
        wide = {f"blocks.*.{name}": "colwise" for name in ("q", "k", "v", "up", "gate")}
        return {**wide, "blocks.*.out": "rowwise", "blocks.*.down": "rowwise"}

    def forward(
        self, input_ids: Tensor, labels: Tensor | None = None, hidden: Tensor | None = None
    ) -> Tensor | LossTerm:
        """Return the loss where labels are given, logits where not.

        In a pipeline, a stage without the first layers starts from `hidden`, and one without the head (None there)
        returns hidden states.
        """
        if hidden is None:
            hidden = self.tokens(input_ids) + self.places(torch.arange(input_ids.shape[1], device=input_ids.device))
        for block in self.blocks:
            hidden = block(hidden)
        assert hidden is not None
        if self.head is None:
            return hidden
        logits: Tensor = self.head(self.norm(hidden)).float()
        if labels is None:
            return logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        return LossTerm(loss, (labels != -100).sum())
