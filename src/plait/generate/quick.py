"""One token for each row of a Llama, in five kernels a layer.

Reading a prompt, a model is busy computing; writing, it waits for weights and for the next kernel to begin. So here the
modules of a Llama are not called one by one: their weights go through `ops.skinny` and `ops.decode_attention`. What is
computed is the same, up to rounding. A model with anything unusual about it is not taken, and keeps its own step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from plait.models import (
    Attention,
    FusedAttention,
    FusedLlamaBlock,
    FusedRMSNorm,
    FusedSwiGLU,
    Llama,
    LlamaBlock,
    LMHead,
    SwiGLU,
    attend,
    fuse,
    rotary_table,
    rotate_both,
    rotate_together,
)
from plait.ops import (
    AHEAD,
    EARLY,
    Ahead,
    At,
    Chance,
    Norm,
    Stream,
    add,
    ahead_of,
    attend_cached,
    drawn,
    gated,
    has_kernels,
    likeliest,
    look_up,
    make_counters,
    project,
    takes,
)
from plait.torch_internals import compiled_call, forward_hooks

_PARTS = (LlamaBlock, Attention, SwiGLU, nn.RMSNorm)
_FUSED = (FusedLlamaBlock, FusedAttention, FusedSwiGLU, FusedRMSNorm)
_KNOWN = frozenset((Llama, nn.ModuleList, nn.Embedding, nn.Linear, LMHead, *_PARTS, *_FUSED))
_DTYPES = (torch.bfloat16, torch.float32)
"""fp16 is not among them: see [Note: a stream carries its norm]."""
MANY = 33
"""Rows from which a kernel's programs keep those of the next one out; with fewer, both have room."""


def takes_model(model: nn.Module) -> bool:
    """Whether a model is a Llama of which nothing is changed, spread out or left out, on a device with kernels."""
    if type(model) is not Llama or model.head is None or not all(map(_is_usual, model.modules())):
        return False
    params = list(model.parameters())
    first = params[0]
    alike = all(type(p) is nn.Parameter and p.dtype == first.dtype and p.device == first.device for p in params)
    autocast = torch.is_autocast_enabled(first.device.type)
    if autocast and torch.get_autocast_dtype(first.device.type) != first.dtype:
        return False
    head_dim = model.config.dim // model.config.heads
    return alike and first.dtype in _DTYPES and has_kernels(first) and takes(head_dim, first.dtype)


def _is_usual(module: nn.Module) -> bool:
    changed = any(forward_hooks(module)) or "forward" in vars(module) or compiled_call(module) is not None
    if type(module) not in _KNOWN or changed:
        return False
    if isinstance(module, Attention):
        return module.attend is attend and module.rotate in (rotate_both, rotate_together)
    if isinstance(module, nn.RMSNorm):
        return module.weight is not None
    return getattr(module, "bias", None) is None


@contextmanager
def fused(model: nn.Module) -> Iterator[None]:
    """A model that `takes_model` takes, with the forms of `models.fused` for as long as it reads prompts."""
    usual = [(part, part.__class__, vars(part).get("rotate")) for part in model.modules()]
    fuse(model)
    try:
        yield
    finally:
        for part, kind, rotate in usual:
            part.__class__ = kind
            if isinstance(part, Attention):
                part.rotate = rotate  # type: ignore[assignment]


class QuickStep:
    """The step of one batch: what it needs beside weights and cache. Reads the live weights each time."""

    def __init__(self, model: nn.Module, slots: int, *, ahead: int | None = None, early: bool = EARLY) -> None:
        """`model`: one that `takes_model` takes; `slots`: places of the cache.

        `ahead` are the bytes of [Note: looking ahead], 0 for none; absent: `AHEAD` for `MANY` rows. `early` is for
        [Note: early loads].
        """
        self._model = cast(Llama, model)
        self._ahead, self._early = ahead, early
        config, device = self._model.config, self._model.embedding.weight.device
        self._counters = make_counters(device)
        table = rotary_table(torch.arange(slots, device=device)[None], config.dim // config.heads, config.rope_base)
        self._cos, self._sin = (each[0, 0] for each in table)

    def __call__(self, tokens: Tensor, at: At, caches: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
        """Logits (rows, vocabulary) behind one token for each row, at its next place.

        A layer's cache is its keys and its values, and has those of the new tokens afterwards.
        """
        stream = self._through(tokens, at, caches)
        return project(stream, [self._head()], self._counters, early=self._early)

    def likeliest(self, tokens: Tensor, at: At, caches: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """The likeliest token behind one token for each row, and its log-probability; otherwise like a call."""
        stream = self._through(tokens, at, caches)
        return likeliest(stream, self._head(), self._counters)

    def draw(
        self,
        tokens: Tensor,
        at: At,
        caches: Iterable[tuple[Tensor, Tensor]],
        temperature: float,
        chance: Chance,
    ) -> tuple[Tensor, Tensor]:
        """A token drawn from all behind one token for each row, and its log-probability; otherwise like a call."""
        stream = self._through(tokens, at, caches)
        return drawn(stream, self._head(), temperature, chance, self._counters)

    def _through(self, tokens: Tensor, at: At, caches: Iterable[tuple[Tensor, Tensor]]) -> Stream:
        model, counters, early = self._model, self._counters, self._early
        blocks: list[Any] = list(model.blocks)
        norms = [_norm(norm) for block in blocks for norm in (block.attention_norm, block.ffn_norm)]
        norms.append(_norm(model.norm))
        mixers = [[each.weight for each in (b.attention.q, b.attention.k, b.attention.v)] for b in blocks]

        usual = AHEAD if len(tokens) >= MANY else 0
        budget = usual if self._ahead is None else self._ahead

        def next_is(form: str, *weights: Tensor) -> Ahead | None:
            return ahead_of(form, len(tokens), weights, budget=budget) if budget else None

        stream = look_up(tokens, model.embedding.weight, norms[0], at=at, ahead=next_is("project", *mixers[0]))
        for layer, (block, (keys, values)) in enumerate(zip(blocks, caches, strict=True)):
            out, gate, up, down = (
                p.weight for p in (block.attention.out, block.ffn.gate, block.ffn.up, block.ffn.down)
            )
            seen = (each.flatten(2).flatten(0, 1) for each in (keys, values))
            later = ("project", *mixers[layer + 1]) if layer + 1 < len(blocks) else ("wide", self._head())
            mixed = project(stream, mixers[layer], counters, ahead=next_is("cache", *seen), early=early)
            y = attend_cached(
                mixed,
                self._cos,
                self._sin,
                keys,
                values,
                at.places,
                counters,
                ahead=next_is("add", out),
                early=early,
            )
            stream = add(stream, y, out, norms[2 * layer + 1], counters, ahead=next_is("gated", gate, up), early=early)
            y = gated(stream, gate, up, ahead=next_is("add", down), early=early)
            stream = add(stream, y, down, norms[2 * layer + 2], counters, ahead=next_is(*later), early=early)
        return stream

    def _head(self) -> Tensor:
        own: Tensor | None = self._model.head.weight
        return self._model.embedding.weight if own is None else own


def _norm(module: Any) -> Norm:
    eps = torch.finfo(torch.float32).eps if module.eps is None else module.eps
    return Norm(module.weight, eps)
