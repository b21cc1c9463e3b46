"""The networks and the data that all sides of a comparison share: plain torch, nobody's own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


def token_walks(rows: int, length: int, vocab: int, *, seed: int) -> Tensor:
    """Token sequences that can be learned: each token is one, two or three more than the one before."""
    draw = torch.Generator().manual_seed(seed)
    start = torch.randint(vocab, (rows, 1), generator=draw)
    strides = torch.randint(1, 4, (rows, length - 1), generator=draw)
    return torch.cat((start, start + strides.cumsum(1)), dim=1) % vocab


def _normal(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def _split(x: Tensor, head_dim: int) -> Tensor:
    return x.unflatten(-1, (-1, head_dim)).transpose(1, 2)


# ---- GPT


@dataclass(frozen=True)
class GptSize:
    """The sizes of a GPT."""

    layers: int
    dim: int
    heads: int
    vocab: int
    seq: int


class GptBlock(nn.Module):
    """Attention and feed-forward."""

    def __init__(self, size: GptSize) -> None:
        super().__init__()
        self.head_dim = size.dim // size.heads
        self.norm1, self.norm2 = nn.LayerNorm(size.dim), nn.LayerNorm(size.dim)
        self.qkv, self.out = nn.Linear(size.dim, 3 * size.dim), nn.Linear(size.dim, size.dim)
        self.up, self.down = nn.Linear(size.dim, 4 * size.dim), nn.Linear(4 * size.dim, size.dim)

    def forward(self, x: Tensor) -> Tensor:
        """One step along the residual stream."""
        q, k, v = (_split(part, self.head_dim) for part in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """A GPT that returns its mean loss."""

    def __init__(self, size: GptSize) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(size.vocab, size.dim), nn.Embedding(size.seq, size.dim)
        self.blocks = nn.ModuleList(GptBlock(size) for _ in range(size.layers))
        self.norm, self.head = nn.LayerNorm(size.dim), nn.Linear(size.dim, size.vocab, bias=False)
        self.apply(_normal)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """The mean cross-entropy of the labels."""
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


# ---- Llama


@dataclass(frozen=True)
class LlamaSize:
    """The sizes of a Llama."""

    layers: int
    dim: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    tied: bool = True
    rope_base: float = 500000.0

    @property
    def params(self) -> int:
        """Parameters that take part in matrix products; a tied embedding does, as the head."""
        kv = self.dim * self.kv_heads // self.heads
        block = 2 * self.dim * (self.dim + kv) + 3 * self.dim * self.ffn + 2 * self.dim
        return self.layers * block + self.vocab * self.dim + self.dim

    def flops_per_token(self, seq: int) -> float:
        """Forward and backward of one token in a row of `seq`; half of the attention is masked away."""
        return 6.0 * self.params + 6.0 * self.layers * self.dim * seq


LLAMAS = {
    "tiny": LlamaSize(layers=2, dim=64, heads=4, kv_heads=2, ffn=128, vocab=512),
    "1b": LlamaSize(layers=16, dim=2048, heads=32, kv_heads=8, ffn=8192, vocab=128256),
    "3b": LlamaSize(layers=28, dim=3072, heads=24, kv_heads=8, ffn=8192, vocab=128256),
    "8b": LlamaSize(layers=32, dim=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256, tied=False),
}


class LlamaBlock(nn.Module):
    """Grouped-query attention and a gated feed-forward."""

    def __init__(self, size: LlamaSize) -> None:
        super().__init__()
        self.head_dim = size.dim // size.heads
        kv = size.kv_heads * self.head_dim
        self.norm1, self.norm2 = nn.RMSNorm(size.dim, eps=1e-5), nn.RMSNorm(size.dim, eps=1e-5)
        self.q, self.k, self.v = (nn.Linear(size.dim, width, bias=False) for width in (size.dim, kv, kv))
        self.out = nn.Linear(size.dim, size.dim, bias=False)
        self.gate, self.up = nn.Linear(size.dim, size.ffn, bias=False), nn.Linear(size.dim, size.ffn, bias=False)
        self.down = nn.Linear(size.ffn, size.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """One step along the residual stream."""
        h = self.norm1(x)
        q, k, v = (_split(project(h), self.head_dim) for project in (self.q, self.k, self.v))
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Llama(nn.Module):
    """A Llama that returns its mean loss; with `recompute`, of each block only the input is kept."""

    def __init__(self, size: LlamaSize, *, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.head_dim, self.rope_base = size.dim // size.heads, size.rope_base
        self.embedding = nn.Embedding(size.vocab, size.dim)
        self.blocks = nn.ModuleList(LlamaBlock(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.dim, eps=1e-5)
        self.head = nn.Linear(size.dim, size.vocab, bias=False)
        self.apply(_normal)
        if size.tied:
            self.head.weight = self.embedding.weight

    def init_weights(self, module: nn.Module) -> None:
        """Fill one module as the constructor did: who knows this builds the model without memory first."""
        _normal(module)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """The mean cross-entropy of the labels."""
        x = self.embedding(ids)
        half = torch.arange(0, self.head_dim, 2, device=ids.device) / self.head_dim
        angles = torch.outer(torch.arange(ids.shape[1], device=ids.device), self.rope_base**-half).repeat(1, 2)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for block in self.blocks:
            x = checkpoint(block, x, cos, sin, use_reentrant=False) if self.recompute else block(x, cos, sin)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), labels.flatten())
