"""The decode step of a Llama, one token per row, in five kernels per layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from torch import Tensor

from plait.kernels.decode.attention import attend_cached
from plait.kernels.decode.dependent_launch import PREFETCH_BYTES, Prefetch
from plait.kernels.decode.embed_sample import RowPositions, embed, greedy_head, sample_head
from plait.kernels.decode.sampling import CounterRNG
from plait.kernels.decode.skinny_gemm import (
    EARLY_LOADS,
    Norm,
    ResidualStream,
    add,
    gated,
    make_counters,
    prefetch_of,
    project,
)

MANY_ROWS = 33
"""From this number of rows on, the programs of a kernel fill the device, and the next kernel cannot start early."""

Caches = Iterable[tuple[Tensor, Tensor]]
"""For each layer its keys and its values, (rows, kv heads, slots, head_dim) each."""


class LayerWeights(NamedTuple):
    """The weights of one layer, (out features, in features) each."""

    attention_norm: Norm
    qkv: tuple[Tensor, Tensor, Tensor]
    out: Tensor
    ffn_norm: Norm
    gate: Tensor
    up: Tensor
    down: Tensor


class DecoderWeights(NamedTuple):
    """All weights of a Llama."""

    embedding: Tensor
    layers: Sequence[LayerWeights]
    norm: Norm
    head: Tensor
    """(vocabulary, width); the embedding, where the head is tied."""


class DecodeStep:
    """The decode step of one batch. It writes the keys and values of the new tokens to the caches."""

    def __init__(
        self,
        weights: Callable[[], DecoderWeights],
        cos: Tensor,
        sin: Tensor,
        *,
        prefetch_bytes: int | None = None,
        early: bool = EARLY_LOADS,
    ) -> None:
        """`weights` is called in each step; `cos` and `sin` are the rotary tables (positions, head_dim / 2), fp32.

        `prefetch_bytes` is the number of bytes of [Note: prefetching for the next kernel]; by default `PREFETCH_BYTES`
        from `MANY_ROWS` rows on, and 0 below. `early` turns [Note: early loads] on.
        """
        self._weights, self._cos, self._sin = weights, cos, sin
        self._prefetch_bytes, self._early = prefetch_bytes, early
        self._counters = make_counters(cos.device)

    def __call__(self, tokens: Tensor, at: RowPositions, caches: Caches) -> Tensor:
        """Append one token to each row, and return the logits (rows, vocabulary) of the next."""
        stream, head = self._hidden(tokens, at, caches)
        return project(stream, [head], self._counters, early=self._early)

    def greedy(self, tokens: Tensor, at: RowPositions, caches: Caches) -> tuple[Tensor, Tensor]:
        """Append one token to each row, and return the most likely next token of each and its log-probability."""
        stream, head = self._hidden(tokens, at, caches)
        return greedy_head(stream, head, self._counters)

    def sample(
        self, tokens: Tensor, at: RowPositions, caches: Caches, temperature: float, rng: CounterRNG
    ) -> tuple[Tensor, Tensor]:
        """Append one token to each row; return the next, sampled from the vocabulary, and its log-probability."""
        stream, head = self._hidden(tokens, at, caches)
        return sample_head(stream, head, temperature, rng, self._counters)

    def _hidden(self, tokens: Tensor, at: RowPositions, caches: Caches) -> tuple[ResidualStream, Tensor]:
        """Return the residual stream after the last layer, and the weight of the head."""
        embedding, layers, last_norm, head = self._weights()
        counters, early = self._counters, self._early
        default = PREFETCH_BYTES if len(tokens) >= MANY_ROWS else 0
        budget = default if self._prefetch_bytes is None else self._prefetch_bytes

        def then(form: str, *weights: Tensor) -> Prefetch | None:
            """Return what the next kernel, of this form and with these weights, reads first; None: do not prefetch."""
            return prefetch_of(form, len(tokens), weights, budget=budget) if budget else None

        stream = embed(tokens, embedding, layers[0].attention_norm, at=at, prefetch=then("project", *layers[0].qkv))
        for number, (layer, (keys, values)) in enumerate(zip(layers, caches, strict=True)):
            after = layers[number + 1] if number + 1 < len(layers) else None
            cache = (tensor.flatten(2).flatten(0, 1) for tensor in (keys, values))
            qkv = project(stream, layer.qkv, counters, prefetch=then("cache", *cache), early=early)
            y = attend_cached(
                qkv,
                self._cos,
                self._sin,
                keys,
                values,
                at.positions,
                counters,
                prefetch=then("add", layer.out),
                early=early,
            )
            prefetch = then("gated", layer.gate, layer.up)
            stream = add(stream, y, layer.out, layer.ffn_norm, counters, prefetch=prefetch, early=early)
            y = gated(stream, layer.gate, layer.up, prefetch=then("add", layer.down), early=early)
            norm = last_norm if after is None else after.attention_norm
            prefetch = then("wide", head) if after is None else then("project", *after.qkv)
            stream = add(stream, y, layer.down, norm, counters, prefetch=prefetch, early=early)
        return stream, head
