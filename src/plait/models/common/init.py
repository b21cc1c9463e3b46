"""Initialization of one module at a time, and functions that Plait's decoders share.

A module whose initial weights are scaled has the attribute `start_scale`, set where it is constructed. Initialization
depends neither on the order of calls nor on other modules, so a model that was built on the meta device gets the same
weights as one that was not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeVar

from torch import nn

LM_STD = 0.02
"""Standard deviation of every matrix of a language model, times `start_scale`."""

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def residual_output(module: ModuleT, layers: int) -> ModuleT:
    """Set the start scale of a projection whose output is added to the residual stream, and return it.

    With two such projections per layer, 2 * layers outputs add up, so each is scaled by 1 / sqrt(2 * layers).
    """
    return _scaled(module, 1.0 / math.sqrt(2 * layers))


def zero_start(module: ModuleT) -> ModuleT:
    """Set a norm's start scale to zero, so that its block starts as the identity, and return the norm."""
    return _scaled(module, 0.0)


def start_scale(module: nn.Module) -> float:
    """Return the factor on a module's initial weights; 1 by default."""
    return float(getattr(module, "start_scale", 1.0))


def init_lm_module(module: nn.Module) -> None:
    """Initialize a module of a language model: matrices normal, norm weights one, biases zero."""
    for name, parameter in module.named_parameters(recurse=False):
        if name == "bias":
            nn.init.zeros_(parameter)
        elif parameter.ndim == 1:
            nn.init.constant_(parameter, start_scale(module))
        else:
            nn.init.normal_(parameter, std=LM_STD * start_scale(module))


def _scaled(module: ModuleT, scale: float) -> ModuleT:
    module.start_scale = scale  # type: ignore[assignment]  # nn.Module types every attribute as a tensor
    return module


def decoder_flops_per_token(
    model: nn.Module, lookups: list[nn.Embedding], *, layers: int, dim: int, seq_len: int
) -> float:
    """Return 6 FLOPs for each parameter of a matrix multiplication, plus 6·layers·dim·seq_len for causal attention.

    `lookups` are the embeddings that are not multiplied with. A tied embedding is not among them: it is also the head.
    """
    parameters = sum(p.numel() for p in model.parameters())
    parameters -= sum(e.weight.numel() for e in lookups)
    return 6.0 * parameters + 6.0 * layers * dim * seq_len


def decoder_plan(feed_forward: Mapping[str, str]) -> dict[str, str]:
    """Return a tensor-parallel plan: attention split by heads, embedding and head by vocabulary, plus `feed_forward`.

    A plan maps names of modules, or patterns of names, to the styles of `plait.distributed`.
    """
    return {
        "embedding": "vocab_embedding",
        "blocks.*": "block",
        "blocks.*.attention_norm": "sequence",
        "blocks.*.attention": "region",
        "blocks.*.attention.q": "heads",
        "blocks.*.attention.k": "kv_heads",
        "blocks.*.attention.v": "kv_heads",
        "blocks.*.attention.out": "rowwise",
        "blocks.*.ffn_norm": "sequence",
        **feed_forward,
        "head": "vocab_head",
    }
