"""Initialisation that looks at one module at a time.

A module that must start differently carries a mark, set where it is constructed. Nothing depends on the
order of calls or on the module's surroundings, so a model built on the meta device starts like any other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeVar

from torch import nn

LM_STD = 0.02
"""Standard deviation of every matrix of a language model, before its mark."""

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def residual_output(module: ModuleT, layers: int) -> ModuleT:
    """Mark a projection that writes into the residual stream.

    Two such writes a layer add up, so each starts smaller by sqrt(2 * layers).
    """
    return _scaled(module, 1.0 / math.sqrt(2 * layers))


def zero_start(module: ModuleT) -> ModuleT:
    """Mark a norm whose weight starts at zero, so that its branch starts as the identity."""
    return _scaled(module, 0.0)


def start_scale(module: nn.Module) -> float:
    """The mark of a module; 1 where it has none."""
    return float(getattr(module, "start_scale", 1.0))


def init_lm_module(module: nn.Module) -> None:
    """Fill a module of a language model: matrices normal, norm weights one, biases zero."""
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


# How much arithmetic a decoder asks for.


def decoder_flops_per_token(
    model: nn.Module, lookups: list[nn.Embedding], *, layers: int, dim: int, seq_len: int
) -> float:
    """6 FLOPs for each parameter in a matrix product, and 6·layers·dim·seq_len for causal attention.

    `lookups` are the embeddings that are only looked up. A tied one is not among them: it is the head too.
    """
    parameters = sum(p.numel() for p in model.parameters())
    parameters -= sum(e.weight.numel() for e in lookups)
    return 6.0 * parameters + 6.0 * layers * dim * seq_len


# How ranks share the layers of a decoder: what Plait's own have in common.


def decoder_plan(feed_forward: Mapping[str, str]) -> dict[str, str]:
    """Attention by heads, the vocabulary by words, and the feed-forwards as said.

    The words are those of `parallel.tensor`; `feed_forward` gives them to names of modules or patterns.
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
