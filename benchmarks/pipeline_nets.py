"""What pipelines and tensor parallelism are measured with: a row of layers that work, and one of layers that wait."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import torch
from nets import GptSize
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

# ---- layers that work


class Embed(nn.Module):
    """Words and places."""

    def __init__(self, size: GptSize) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(size.vocab, size.dim), nn.Embedding(size.seq, size.dim)

    def forward(self, ids: Tensor) -> Tensor:
        """One vector for each token."""
        out: Tensor = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        return out


class Attention(nn.Module):
    """Causal attention; the heads are as many as the projections have room for."""

    def __init__(self, size: GptSize) -> None:
        super().__init__()
        self.head_dim = size.dim // size.heads
        self.q, self.k, self.v, self.out = (nn.Linear(size.dim, size.dim, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Mix tokens."""
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for project in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class FeedForward(nn.Module):
    """Two products and a bend."""

    def __init__(self, size: GptSize) -> None:
        super().__init__()
        self.up = nn.Linear(size.dim, 4 * size.dim, bias=False)
        self.down = nn.Linear(4 * size.dim, size.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Each token for itself."""
        out: Tensor = self.down(F.gelu(self.up(x)))
        return out


class Block(nn.Module):
    """One step along the residual stream."""

    def __init__(self, size: GptSize) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(size.dim), Attention(size)
        self.norm2, self.ffn = nn.LayerNorm(size.dim), FeedForward(size)

    def forward(self, x: Tensor) -> Tensor:
        """Attention, then feed-forward."""
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.ffn(self.norm2(x))
        return out


def gpt_row(size: GptSize) -> nn.Sequential:
    """A GPT as a row of layers that ends with logits; the same values on every rank."""
    torch.manual_seed(0)
    head = nn.Sequential(nn.LayerNorm(size.dim), nn.Linear(size.dim, size.vocab, bias=False))
    row = nn.Sequential(Embed(size), *(Block(size) for _ in range(size.layers)), head)
    for parameter in row.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.02)
    return row


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean over all tokens."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


# ---- layers that wait


class _PassLater(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        time.sleep(ctx.seconds)
        return gradient, None


class _WeighLater(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        ctx.save_for_backward(x)
        return weight.expand_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        time.sleep(ctx.seconds)
        return (gradient * x).sum(), None, None


class Wait(nn.Module):
    """Sleeps in its forward pass and in each half of its backward pass, and keeps its input in between.

    The core is free meanwhile, so more ranks than cores show what the schedule does, and not how they share cores.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """The input, later."""
        time.sleep(self.seconds)
        passed: Tensor = _PassLater.apply(x, self.seconds)
        return passed + _WeighLater.apply(self.weight, x.detach(), self.seconds)


# ---- what is kept


class Ledger:
    """Counts the bytes that autograd keeps for backward passes, parameters left out; each storage once."""

    def __init__(self, module: nn.Module) -> None:
        self.peak = 0
        self._held = 0
        self._own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
        self._holders: Counter[int] = Counter()

    def watch(self) -> saved_tensors_hooks:
        """A context in which it counts."""
        return saved_tensors_hooks(lambda tensor: _Kept(tensor, self), lambda kept: kept.tensor)

    def take(self, place: int, size: int) -> None:
        """Somebody keeps a storage."""
        self._holders[place] += 1
        if self._holders[place] == 1 and place not in self._own:
            self._held += size
            self.peak = max(self.peak, self._held)

    def drop(self, place: int, size: int) -> None:
        """Somebody lets go of it."""
        self._holders[place] -= 1
        if self._holders[place] == 0 and place not in self._own:
            self._held -= size


class _Kept:
    def __init__(self, tensor: Tensor, ledger: Ledger) -> None:
        # Without its graph: a node that keeps its own output would keep itself.
        self.tensor, self._ledger = tensor.detach(), ledger
        storage = tensor.untyped_storage()
        self._entry = storage.data_ptr(), storage.nbytes()
        ledger.take(*self._entry)

    def __del__(self) -> None:
        self._ledger.drop(*self._entry)
