"""Initialization of one module at a time, and what Plait's decoders have in common.

A module that starts with another scale carries the attribute `start_scale`, set where it is constructed. Nothing
depends on the order of calls or on other modules, so a model built on the meta device starts like any other.
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
    """Set the start scale of a projection that writes into the residual stream.

    Two such projections per layer add up, so each starts smaller by sqrt(2 * layers).
    """
    return _scaled(module, 1.0 / math.sqrt(2 * layers))


def zero_start(module: ModuleT) -> ModuleT:
    """Let a norm's weight start at zero, so that its residual branch starts as the identity."""
    return _scaled(module, 0.0)


def start_scale(module: nn.Module) -> float:
    """The start scale of a module; 1 by default."""
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
    """6 FLOPs for each parameter in a matrix product, and 6·layers·dim·seq_len for causal attention.

    `lookups` are the embeddings that take part in no product. A tied one is not among them: it is the head too.
    """
    parameters = sum(p.numel() for p in model.parameters())
    parameters -= sum(e.weight.numel() for e in lookups)
    return 6.0 * parameters + 6.0 * layers * dim * seq_len


def decoder_plan(feed_forward: Mapping[str, str]) -> dict[str, str]:
    """The tensor-parallel plan: attention by heads, embedding and head by vocabulary, and `feed_forward`.

    It maps names of modules, or patterns, to the styles of `plait.distributed`.
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
