"""How much arithmetic a decoder asks for."""

from __future__ import annotations

from torch import nn


def decoder_flops_per_token(
    model: nn.Module, lookups: list[nn.Embedding], *, layers: int, dim: int, seq_len: int
) -> float:
    """6 FLOPs for each parameter in a matrix product, and 6·layers·dim·seq_len for causal attention.

    `lookups` are the embeddings that are only looked up. A tied one is not among them: it is the head too.
    """
    parameters = sum(p.numel() for p in model.parameters())
    parameters -= sum(e.weight.numel() for e in lookups)
    return 6.0 * parameters + 6.0 * layers * dim * seq_len
